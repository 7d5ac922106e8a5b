"""Goodput: seconds of training that lasted, over the seconds that were allocated. Pure functions of spans of time.

Knows when whom trained for how long; must not know what was trained, nor where the times come from.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of seconds on one clock; `end` > `begin`."""

    begin: float
    end: float

    @property
    def seconds(self) -> float:
        """How long it is."""
        return self.end - self.begin

    def overlap(self, other: Span) -> float:
        """Return the seconds they have in common."""
        return max(0.0, min(self.end, other.end) - max(self.begin, other.begin))


@dataclass(frozen=True, slots=True)
class Work:
    """An island at work: `num_kept` steps of the span lasted, and `kept_seconds` of it went into them."""

    island: str
    span: Span
    kept_seconds: float
    num_kept: int


@dataclass(frozen=True, slots=True)
class Kill:
    """An island's process was killed, `at` on the clock of the spans."""

    island: str
    at: float


@dataclass(frozen=True, slots=True)
class Trace:
    """What several islands did in a window, and who was killed.

    `rolled_back_seconds`: of the kept seconds, those that turned out not to last.
    """

    works: tuple[Work, ...]
    kills: tuple[Kill, ...]
    window: Span
    rolled_back_seconds: float = 0.0


def kept_within(works: Sequence[Work], window: Span) -> float:
    """Return the kept seconds of all islands in the window; a span that reaches out of it counts in proportion."""
    return sum(work.kept_seconds * work.span.overlap(window) / work.span.seconds for work in works)


def steps_within(works: Sequence[Work], window: Span) -> float:
    """Return the kept steps of all islands in the window, in the same way."""
    return sum(work.num_kept * work.span.overlap(window) / work.span.seconds for work in works)


def mean_at_work(works: Sequence[Work], window: Span) -> float:
    """Return how many islands are at work, mean over the window. Spans of one island must not overlap."""
    return sum(work.span.overlap(window) for work in works) / window.seconds


def uptime(works: Sequence[Work], window: Span) -> float:
    """Return the share of the window in which at least one island is at work."""
    covered, reached = 0.0, window.begin
    for work in sorted(works, key=lambda work: work.span.begin):
        begin, end = max(work.span.begin, reached), min(work.span.end, window.end)
        if end > begin:
            covered += end - begin
            reached = end
    return covered / window.seconds


def seconds_to_resume(works: Sequence[Work], kills: Sequence[Kill]) -> list[float]:
    """Return, per kill that was followed by any, the seconds until that island begins to work again."""
    waits = []
    for kill in kills:
        begins = [
            work.span.begin
            for work in works
            if work.island == kill.island and work.span.begin > kill.at
        ]
        waits += [min(begins) - kill.at] if begins else []
    return waits


def victims(islands: Sequence[str], seed: int) -> Iterator[str]:
    """Yield whom to kill, for ever: everybody once, in a seeded order, before anybody twice."""
    generator = np.random.default_rng(seed)
    while True:
        for number in generator.permutation(len(islands)):
            yield islands[number]
