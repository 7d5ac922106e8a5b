"""When to merge a fragment, and with whom: quorum, then pace, then grace.

A pure function of what the synchronizer has seen. Knows counts and the synchronizer's own monotonic seconds; must not
know a clock, a store, or any learner's time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Arrival:
    """An acceptable contribution: whose it is, and when the synchronizer first saw it."""

    learner: str
    first_seen: float


@dataclass(frozen=True, slots=True)
class Expectation:
    """A learner that is alive and may still contribute to this round.

    `arrives_at` is the running estimate of when the synchronizer will see it; None when nothing is known, which counts
    as expected.
    """

    learner: str
    arrives_at: float | None


@dataclass(frozen=True, slots=True)
class Round:
    """What is known of one fragment's next outer step. Times are monotonic seconds of the synchronizer.

    Attributes:
        arrivals: acceptable contributions, at most one per learner.
        expected: learners alive and not in quarantine, whether or not they have arrived.
        min_learners: distinct learners needed (K), already capped by those that neither have left nor are in
            quarantine; >= 1.
        opened_at: when the head was published by this synchronizer; None for a head it found: no pace is owed for it.
        period_seconds: least seconds between two outer steps of one fragment; 0 while unknown.
        grace_seconds: longest extra wait after quorum and pace.
        not_before: no merge before this time: the first merges of found heads keep apart, see `first_merge_at`.
        is_final: every learner that counts has left: merge what is there, wait for nobody.
    """

    arrivals: tuple[Arrival, ...]
    expected: tuple[Expectation, ...]
    min_learners: int
    opened_at: float | None
    period_seconds: float
    grace_seconds: float
    not_before: float = -math.inf
    is_final: bool = False


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing to do for `seconds` unless something new arrives; infinity: only an arrival can change it."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Merge:
    """Merge the contributions of these learners, ordered by name."""

    learners: tuple[str, ...]


def decide(round: Round, *, now: float) -> Wait | Merge:
    """Return whom to merge, or how long to wait.

    Quorum: `min_learners` distinct learners. Pace: one outer step per fragment and period, else a quorum of one would
    turn many learners' pushes into many outer steps. Grace: from then on, until every expected learner whose estimate
    lies inside the window has arrived, at latest `grace_seconds` later.

    Source: quorum and grace after Decoupled DiLoCo, arXiv:2604.21428; the expectation rule is ours.
    """
    stamps: dict[str, float] = {}
    for arrival in round.arrivals:
        stamps[arrival.learner] = min(arrival.first_seen, stamps.get(arrival.learner, math.inf))
    everyone = tuple(sorted(stamps))
    if round.is_final:
        return Merge(everyone) if everyone else Wait(math.inf)
    if len(everyone) < round.min_learners:
        return Wait(math.inf)
    quorum_at = sorted(stamps.values())[round.min_learners - 1]
    paced_at = -math.inf if round.opened_at is None else round.opened_at + round.period_seconds
    ready_at = max(quorum_at, paced_at)
    closes_at = ready_at + round.grace_seconds
    is_awaited = any(
        expectation.learner not in stamps
        and (expectation.arrives_at is None or expectation.arrives_at <= closes_at)
        for expectation in round.expected
    )
    merges_at = max(closes_at if is_awaited else ready_at, round.not_before)
    # Some slack: waiting out the rounded difference must never end just short of the goal.
    slack = max(1e-9, 2 * math.ulp(merges_at))
    return Merge(everyone) if now >= merges_at - slack else Wait(merges_at - now)


def first_merge_at(
    opened_elsewhere: Iterable[float | None],
    *,
    period_steps: int,
    num_fragments: int,
    period_seconds: float,
) -> float:
    """Return the earliest time for the first merge of a head that was found: 1/P of a period after any other merge.

    Learners push a fragment a period after they adopted it, so fragments that merge at once once do so for ever, and
    the wire lies idle in between. Found together, they are merged one after another instead, and stay apart. The
    distance is that of the first pushes' offsets, `period_steps // num_fragments` steps: islands that start together
    never wait for it.

    Args:
        opened_elsewhere: when this synchronizer published the head of each other fragment; None: it did not.
        period_steps, num_fragments: H and P.
        period_seconds: H steps of the fastest learner; 0 while unknown.
    """
    last = max((at for at in opened_elsewhere if at is not None), default=-math.inf)
    return last + (period_steps // num_fragments) / period_steps * period_seconds
