"""Error feedback: what coding cut off a contribution that was merged is added to the learner's next one.

Knows one learner's deltas of one fragment; must not know a codec or a store. Let a contribution carry the delta d and
the residual e that was owed when it was coded, and let c be what its bytes decode to. Once it is merged, c has
arrived, so d - c more is owed. So

    owed after = owed before + (d - c)        for each merged contribution, in the order of their merges

which is the plain rule (the residual becomes e + d - c) where nothing else was merged meanwhile. A contribution that is
never merged changes nothing: its delta is lost, and the residual it carried is still owed. Merged deltas then add up,
over any number of rounds, to what was to be merged, up to one residual.

Source: 1-bit SGD (Seide et al., 2014); EF-SGD (Karimireddy et al., arXiv:1901.09847).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from islands.merging import Vector
from islands.types import Position

# Contributions of one fragment whose merge may still come. Of an older one the error is forgotten.
MOST_OUTSTANDING = 2


@dataclass(frozen=True, slots=True)
class Outstanding:
    """A contribution that may yet be merged: where its interval ends, and what coding it cut off, (elements,)."""

    stop: Position
    error: Vector


@dataclass(frozen=True, slots=True)
class Feedback:
    """What one learner owes of one fragment.

    `residual`: (elements,) float32, None where nothing is owed. `settled`: up to where merges are accounted for.
    `outstanding`: oldest first, at most `MOST_OUTSTANDING`.
    """

    residual: Vector | None = None
    settled: Position = Position(-1, 0)
    outstanding: tuple[Outstanding, ...] = ()


def compensated(feedback: Feedback, delta: Vector) -> Vector:
    """Return what to code for a delta: it and what is owed."""
    if feedback.residual is None:
        return delta
    return np.add(delta, feedback.residual, dtype=np.float32)


def after_push(feedback: Feedback, stop: Position, delta: Vector, decoded: Vector) -> Feedback:
    """Return the feedback with a contribution that ends at `stop`; `decoded` is what its bytes stand for.

    One that ends at the same place is replaced: the same work, written again.
    """
    error = np.subtract(delta, decoded, dtype=np.float32)
    others = tuple(one for one in feedback.outstanding if one.stop != stop)
    return replace(feedback, outstanding=(*others, Outstanding(stop, error))[-MOST_OUTSTANDING:])


def after_merge(feedback: Feedback, consumed_to: Position) -> Feedback:
    """Return the feedback once a version says up to where this learner's work is merged.

    Nothing owed is known where the version merged a contribution that this learner does not remember (it came back
    from an older checkpoint): the residual is zero then, since that contribution carried it.
    """
    if consumed_to <= feedback.settled:
        return feedback
    later = tuple(one for one in feedback.outstanding if one.stop > consumed_to)
    merged = next((one for one in feedback.outstanding if one.stop == consumed_to), None)
    if merged is None:
        return Feedback(None, consumed_to, later)
    owed = compensated(feedback, merged.error)
    return Feedback(owed, consumed_to, later)
