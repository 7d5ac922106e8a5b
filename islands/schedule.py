"""The learning rate as a function of a learner's own tokens; never of versions, adoptions or restarts.

Knows numbers; must not know an optimizer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True, slots=True)
class Schedule:
    """Linear warm-up, then a cosine down to `final_fraction` of `peak` at `total_tokens`, constant after.

    `begins_at`: how much of all that lies behind a learner that joins, 0..1; the rest goes by its own tokens.
    """

    peak: float
    total_tokens: int
    warmup_fraction: float
    final_fraction: float
    begins_at: float = 0.0


def learning_rate_at(num_tokens: int, schedule: Schedule) -> float:
    """Return the rate for the step that begins after `num_tokens` own tokens; positive from the first step on."""
    own = min(1.0, num_tokens / max(1, schedule.total_tokens))
    progress = schedule.begins_at + (1.0 - schedule.begins_at) * own
    if progress < schedule.warmup_fraction:
        # Half a percent of the warm-up is granted at the start: a rate of zero would waste the first step.
        return schedule.peak * max(0.005, progress / schedule.warmup_fraction)
    span = 1.0 - schedule.warmup_fraction
    done = (progress - schedule.warmup_fraction) / span if span > 0 else 1.0
    floor = schedule.final_fraction
    return schedule.peak * (floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * done)))


def own_share(
    total_tokens: int, rates: Mapping[str, float], name: str, bound: Mapping[str, int] = {}
) -> int:
    """Return one learner's part of `total_tokens`: by tokens per second (`rates`), rounded up.

    `bound`: the learners whose part is fixed, and is taken off first.
    """
    if name in bound:
        return bound[name]
    exact = {learner: Fraction(rate) for learner, rate in rates.items() if learner not in bound}
    left = max(0, total_tokens - sum(bound.values()))
    return math.ceil(left * exact[name] / sum(exact.values()))
