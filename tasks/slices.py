"""Slices of time in which one arm of a comparison ran, and what its learners did in them. Pure functions.

What two arms do is compared within one run: they take turns, so that a busy minute of the machine meets both, and each
is judged by the median of its slices.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tasks.step_log import Steps


@dataclass(frozen=True, slots=True)
class Window:
    """When an arm ran and was looked at: seconds on the clock of the steps."""

    arm: str
    start: float
    stop: float


@dataclass(frozen=True, slots=True)
class Slice:
    """What an arm's learners did in one window.

    `tokens_per_second`: of all its learners together. `step_seconds`: mean, over all learners' steps.
    `stall_fraction`: share of the learners' seconds outside training steps and adoptions.
    """

    tokens_per_second: float
    step_seconds: float
    stall_fraction: float


def turns(arms: Sequence[str], num_slices: int) -> Iterator[str]:
    """Yield whose turn it is, `num_slices` times each; every other round backwards, so that no arm is always first."""
    for number in range(num_slices):
        yield from arms if number % 2 == 0 else reversed(arms)


def within(steps: Steps, window: Window) -> Steps:
    """Return the steps that lie wholly in a window."""
    begun, ended = steps[:, 0], steps[:, 1]
    return steps[(begun >= window.start) & (ended <= window.stop)]


def slice_of(learners: Sequence[Steps], window: Window) -> Slice:
    """Return what several learners did in a window.

    Raises:
        ValueError: one of them took no whole step in it.
    """
    parts = [within(steps, window) for steps in learners]
    if any(len(part) == 0 for part in parts):
        raise ValueError(
            f"a slice must hold a step of every learner, got none; lengthen it: {window}"
        )
    spans = [float(part[-1, 1] - part[0, 0]) for part in parts]
    rates = [float(part[:, 3].sum()) / span for part, span in zip(parts, spans, strict=True)]
    useful = sum(float(part[:, 2].sum()) for part in parts)
    return Slice(
        tokens_per_second=sum(rates),
        step_seconds=sum(spans) / sum(len(part) for part in parts),
        stall_fraction=max(0.0, 1 - useful / sum(spans)),
    )


def slices_by_arm(
    learners: Mapping[str, Sequence[Steps]], windows: Sequence[Window]
) -> dict[str, list[Slice]]:
    """Return the slices of each arm, in the order of its windows."""
    return {
        arm: [slice_of(steps, window) for window in windows if window.arm == arm]
        for arm, steps in learners.items()
    }


def single_steps(
    learners: Mapping[str, Sequence[Steps]], windows: Sequence[Window]
) -> dict[str, list[float]]:
    """Return the seconds of every step of each arm in its windows."""
    found: dict[str, list[float]] = {}
    for arm, tables in learners.items():
        parts = [within(steps, w) for steps in tables for w in windows if w.arm == arm]
        found[arm] = np.concatenate([part[:, 1] - part[:, 0] for part in parts]).tolist()
    return found


def median_of(slices: Sequence[Slice], figure: str) -> float:
    """Return the median of one figure over slices."""
    return statistics.median(float(getattr(one, figure)) for one in slices)


def visible_ms(with_exchange: float, without: float, steps_per_exchange: float) -> float:
    """Return what one exchange costs a learner: the longer step, times the steps that share its cost, in ms."""
    return 1000 * (with_exchange - without) * steps_per_exchange
