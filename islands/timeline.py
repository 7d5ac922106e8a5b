"""Where records lie on one axis of time: stamps of several clocks, some missing, some absurd, become places.

Knows stamps, writers and steps; must not know a record or a store. Stamps are for people and decide nothing, so
whatever they say, the answer is an axis that can be drawn, and what had to be bent for it.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from statistics import median, quantiles
from typing import NamedTuple

from islands.names import ContributionKey
from islands.types import Position

# A smaller stamp counts base steps; seconds since 1970 have been larger since March 1973.
LARGEST_STEP = 1e8
# A stamp this many times the middle half's width away from it is suspicious.
_FENCE = 5
# The middle half is taken to be at least this wide, in seconds or base steps.
_LEAST_WIDTH = 60.0
# A push cannot come after the merge that took it, but may well wait for it: (seconds, share of the merges' span).
_MOST_AHEAD = (5.0, 0.02)
_MOST_BEHIND = (120.0, 0.25)


class Stamp(NamedTuple):
    """When a writer says it wrote something; None where it says nothing. The synchronizer's name is ""."""

    writer: str
    at: float | None


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis from 0 to `length` > 0, in base steps if `is_steps`, else in seconds.

    Attributes:
        origin: the stamp at zero.
        shifts: writer -> seconds its clock runs ahead of the synchronizer's (negative: behind), only where it is so far
            off that its marks are moved by that much.
        num_absurd: stamps far from all the others all the same.
        num_unknown: stamps that are missing or no number.
    """

    origin: float
    length: float
    is_steps: bool
    shifts: Mapping[str, float]
    num_absurd: int
    num_unknown: int

    def place(self, stamp: Stamp) -> float | None:
        """Return where on the axis a stamp lies, 0..length; None if it is unknown or absurd."""
        if not _is_known(stamp.at, self.is_steps):
            return None
        place = (stamp.at or 0.0) - self.shifts.get(stamp.writer, 0.0) - self.origin
        return place if 0 <= place <= self.length else None


def axis_of(stamps: Sequence[Stamp], lags: Mapping[str, Sequence[float]]) -> Axis:
    """Return the axis on which all the stamps can be drawn.

    Args:
        stamps: everybody's.
        lags: learner -> its pushes' stamps minus those of the merges that took them.
    """
    positive = [at for _, at in stamps if at is not None and math.isfinite(at) and at > 0]
    is_steps = not positive or median(positive) < LARGEST_STEP
    known = [stamp for stamp in stamps if _is_known(stamp.at, is_steps)]
    shifts = {} if is_steps else _shifts(known, lags)
    moved = sorted((at - shifts.get(writer, 0.0), writer) for writer, at in known if at is not None)
    low, high = _bounds(moved)
    inside = [at for at, _ in moved if low <= at <= high] or [0.0]
    origin = 0.0 if is_steps and inside[0] >= 0 else inside[0]
    return Axis(
        origin=origin,
        length=inside[-1] - origin or 1.0,
        is_steps=is_steps,
        shifts=shifts,
        num_absurd=sum(not low <= at <= high for at, _ in moved),
        num_unknown=len(stamps) - len(known),
    )


@dataclass(frozen=True, slots=True)
class Track:
    """Where the known steps of one incarnation lie: both ascending, not empty."""

    steps: tuple[int, ...]
    places: tuple[float, ...]

    def place(self, step: int) -> float:
        """Return where a step lies, between its neighbours in proportion; beyond the ends, at the end."""
        i = bisect_left(self.steps, step)
        if i == len(self.steps) or i == 0 or self.steps[i] == step:
            return self.places[min(i, len(self.steps) - 1)]
        share = (step - self.steps[i - 1]) / (self.steps[i] - self.steps[i - 1])
        return self.places[i - 1] + share * (self.places[i] - self.places[i - 1])


def track_of(known: Iterable[tuple[int, float]]) -> Track:
    """Return the track through (step, place) in any order; a place that runs backwards is held at the one before."""
    furthest: dict[int, float] = {}
    for step, place in known:
        furthest[step] = max(place, furthest.get(step, place))
    steps = tuple(sorted(furthest))
    return Track(steps, tuple(accumulate((furthest[step] for step in steps), max)))


@dataclass(frozen=True, slots=True)
class Sent:
    """A contribution as some record tells of it. `at` None: no stamp; `start` None: only its name is known.

    `loss` in nats per token, 0 while unknown. `fate`: "merged", "waiting" (may yet be merged), "passed over" (will not
    be), or "refused: " and the reason.
    """

    key: ContributionKey
    start: Position | None
    num_tokens: int
    at: float | None
    loss: float
    fate: str


@dataclass(slots=True)
class Traces:
    """What one island left behind, stamps as they were written.

    Attributes:
        births: incarnation -> (stamp, where it ran).
        saved: kept checkpoints.
        sent: contributions by name.
        farewell: the tokens it had trained when it left, and the stamp; None: it has not left.
        tracks: where each incarnation's steps lie, once there is an axis.
    """

    births: dict[int, tuple[float | None, str]] = field(default_factory=dict)
    saved: list[tuple[Position, float | None]] = field(default_factory=list)
    sent: dict[str, Sent] = field(default_factory=dict)
    farewell: tuple[int, float | None] | None = None
    tracks: dict[int, Track] = field(default_factory=dict)

    def marks(self) -> list[tuple[Position, float | None]]:
        """Return where the learner stood at the stamps of its pushes and checkpoints."""
        return [*self.saved, *((sent.key.stop, sent.at) for sent in self.sent.values())]

    def lay(self, axis: Axis, learner: str) -> None:
        """Set `tracks`: the known places of each incarnation's steps, its birth at the first of them."""
        known: dict[int, list[tuple[int, float]]] = {number: [] for number in self.births}
        for position, at in self.marks():
            place = axis.place(Stamp(learner, at))
            if place is not None and position.incarnation in known:
                known[position.incarnation].append((position.step, place))
        starts = [sent.start for sent in self.sent.values() if sent.start is not None]
        for number, (at, _) in self.births.items():
            steps = [start.step for start in starts if start.incarnation == number]
            steps += [step for step, _ in known[number]]
            place = axis.place(Stamp(learner, at))
            if place is None:
                place = min((place for _, place in known[number]), default=0.0)
            known[number].append((min(steps, default=0) if number else 0, place))
        self.tracks = {number: track_of(points) for number, points in known.items()}

    def place(self, axis: Axis, sent: Sent) -> float:
        """Return where a contribution lies: at its stamp, or else where its step does."""
        place = axis.place(Stamp(sent.key.learner, sent.at))
        if place is None and (track := self.tracks.get(sent.key.stop.incarnation)) is not None:
            return track.place(sent.key.stop.step)
        return place or 0.0


def axis_over(
    islands: Mapping[str, Traces],
    merges: Sequence[tuple[float, Iterable[str]]],
    others: Sequence[float | None],
) -> Axis:
    """Return the axis for everything.

    Args:
        islands: learner -> its traces.
        merges: each one's stamp and the names of what it took.
        others: stamps of records that are no island's.
    """
    pushed = {
        name: (learner, sent.at)
        for learner, traces in islands.items()
        for name, sent in traces.sent.items()
    }
    lags: dict[str, list[float]] = {}
    for at, taken in merges:
        for learner, sent_at in (pushed[name] for name in taken if name in pushed):
            if sent_at is not None and math.isfinite(sent_at - at):
                lags.setdefault(learner, []).append(sent_at - at)
    stamps = [Stamp("", at) for at in (*others, *(at for at, _ in merges))]
    for learner, traces in islands.items():
        ends = [*(at for at, _ in traces.births.values()), *(traces.farewell or ())[1:]]
        stamps += [Stamp(learner, at) for at in (*ends, *(at for _, at in traces.marks()))]
    return axis_of(stamps, lags)


def _is_known(at: float | None, is_steps: bool) -> bool:
    return at is not None and math.isfinite(at) and (is_steps or at >= LARGEST_STEP)


def _shifts(known: Sequence[Stamp], lags: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Return by how much whose clock is off: a push after its merge, or ages before it."""
    merged = [at for writer, at in known if writer == "" and at is not None]
    if not merged:
        return {}
    first, _, third = _quarters(merged)
    span = 2 * (third - first)
    shifts = {writer: median(some) for writer, some in sorted(lags.items()) if some}
    ahead, behind = (max(least, share * span) for least, share in (_MOST_AHEAD, _MOST_BEHIND))
    return {writer: by for writer, by in shifts.items() if by > ahead or by < -behind}


def _bounds(moved: Sequence[tuple[float, str]]) -> tuple[float, float]:
    """Return between which stamps the axis runs.

    What lies far outside the middle half is cut off, unless two writers agree on it: a run that was resumed a day later
    has a gap, not a broken clock.
    """
    if not moved:
        return 0.0, 0.0
    first, _, third = _quarters([at for at, _ in moved])
    reach = _FENCE * max(third - first, _LEAST_WIDTH)
    low, high = first - reach, third + reach
    if len({writer for at, writer in moved if at < low}) > 1:
        low = -math.inf
    if len({writer for at, writer in moved if at > high}) > 1:
        high = math.inf
    return low, high


def _quarters(values: Sequence[float]) -> list[float]:
    return quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
