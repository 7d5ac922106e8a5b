"""What a benchmark is asked and what it answers: figures, the targets they must meet, a table to show.

Knows records and plain numbers; must not know how anything is measured, shown or kept. No torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal

from infra.services import Services

Advance = Callable[[int, str], None]
LIMITS: Mapping[str, Callable[[float, float], bool]] = {
    "<=": lambda value, limit: value <= limit,
    ">=": lambda value, limit: value >= limit,
    "<": lambda value, limit: value < limit,
}


@dataclass(frozen=True, slots=True)
class Order:
    """What to measure with.

    `seeds`: 0..n-1. `tokens` per run; None for the benchmark's own number. `progress`: told what is worked on and how
    many parts it has. `services`: starts Prefect, MLflow and the deployments, in a home of their own.
    """

    seeds: int
    tokens: int | None
    progress: Callable[[str, int], AbstractContextManager[Advance]]
    services: Callable[[], AbstractContextManager[Services]]


@dataclass(frozen=True, slots=True)
class Target:
    """A figure and the limit it must keep; a figure that is no number keeps none."""

    name: str
    value: float
    relation: Literal["<=", ">=", "<"]
    limit: float

    @property
    def is_met(self) -> bool:
        """Whether the limit is kept."""
        return LIMITS[self.relation](self.value, self.limit)


@dataclass(frozen=True, slots=True)
class Table:
    """What people see; `words` head the first columns, `numbers` the rest."""

    words: tuple[str, ...]
    numbers: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class Measured:
    """A benchmark's answer. `figures`: plain JSON values, the keys are promised to scripts."""

    figures: Mapping[str, Any]
    targets: tuple[Target, ...]
    table: Table

    @property
    def is_met(self) -> bool:
        """Whether every target is met."""
        return all(target.is_met for target in self.targets)

    def missed(self) -> str:
        """Return the targets that are missed, for people; empty if there are none."""
        return "; ".join(
            f"{target.name} must be {target.relation} {target.limit:g}, got {target.value:.4g}"
            for target in self.targets
            if not target.is_met
        )


def scalars(figures: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield (name, number) for each finite number of the figures and of mappings in them, one level deep."""
    for key, value in figures.items():
        inner = value if isinstance(value, Mapping) else {None: value}
        for name, number in inner.items():
            is_number = isinstance(number, int | float) and math.isfinite(number)
            if is_number:
                yield key if name is None else f"{key}/{name}", float(number)


def lines(figures: Mapping[str, float], digits: Mapping[str, int]) -> Table:
    """Return a table of one line per figure."""
    rows = tuple((key, f"{value:.{digits.get(key, 3)}f}") for key, value in figures.items())
    return Table(("figure",), ("value",), rows)


def ratio_or_none(value: float, of: float) -> float | None:
    """Return value / of; None where `of` is not positive, so that there is nothing to compare with."""
    return value / of if of > 0 else None


def percent(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Return by how many percent the mean of ours exceeds theirs."""
    return 100 * (math.fsum(ours) / len(ours) / (math.fsum(theirs) / len(theirs)) - 1)
