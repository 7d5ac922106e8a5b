"""Faults on purpose as the report shows them: the records of strikes, placed on a run's axis of time. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from islands.chaos import OF_AN_ISLAND, Strike
from islands.timeline import Axis, Stamp


@dataclass(frozen=True, slots=True)
class Blow:
    """A fault that struck on purpose: `learner` "" where it met no island's process; lasted `length` on the axis."""

    learner: str
    told: str
    place: float
    length: float


def blows_of(axis: Axis, strikes: Sequence[Strike]) -> Iterator[Blow]:
    """Yield the strikes whose time is on the axis; of seconds, not of base steps."""
    for strike in strikes:
        place, fault = axis.place(Stamp("", strike.at)), strike.fault
        if place is not None and not axis.is_steps:
            length = min(fault.seconds or 0.0, axis.length - place)
            yield Blow(
                fault.island or "" if fault.target in OF_AN_ISLAND else "",
                strike.told,
                place,
                length,
            )
