"""What of a run's training lasted, from its records alone: when which island was at work, and what was rolled back.

An incarnation's work reaches from its first step to its newest record; what it did after that is lost and counts
nowhere. Of the seconds between two records, those are kept that its thread did not idle, as it says itself. Stamps must
be those of one machine's clock. No torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from islands import names
from islands.goodput import Span, Work
from islands.ledger import LearnerRecord, record_from_json
from islands.types import Position
from tasks import history, records
from tasks.runs import Run


@dataclass(frozen=True, slots=True, order=True)
class Mark:
    """Where a learner stood at a stamp. The others are 0 where the record does not say.

    `step_seconds`: of its step then. `busy_share`: of its thread, since its incarnation began, in steps and adoptions.
    """

    stop: Position
    at: float
    step_seconds: float = 0.0
    busy_share: float = 0.0


@dataclass(frozen=True, slots=True)
class Kept:
    """What an island's records show. `rolled_back_seconds`: of work in the spans that a return threw away."""

    works: tuple[Work, ...]
    rolled_back_seconds: float


def kept_work(run: Run, island: str) -> Kept:
    """Return what of an island's work lasted."""
    works, begin = list[Work](), 0
    marks = _marks(run, island)
    for number in sorted({mark.stop.incarnation for mark in marks}):
        life = [mark for mark in marks if mark.stop.incarnation == number]
        works += _works(island, begin, life)
        begin = max(mark.stop.step for mark in life)
    seconds = sum(work.kept_seconds for work in works)
    last = history.last_link(run, island)
    if last is None or not last.trained:
        return Kept(tuple(works), 0.0)
    rolled_back = sum(clock.rolled_back for clock in last.clocks) / len(last.clocks)
    return Kept(tuple(works), seconds * rolled_back / last.trained)


def _works(island: str, begin: int, life: Sequence[Mark]) -> Iterator[Work]:
    """Yield the work between the records of one incarnation, in order; it began after step `begin`."""
    seconds = next((mark.step_seconds for mark in life if mark.step_seconds > 0), 0.0)
    step, since = begin, life[0].at - (life[0].stop.step - begin) * seconds
    busy = next((mark.busy_share for mark in life if mark.busy_share > 0), 1.0)
    for mark in life:
        busy = mark.busy_share or busy
        if mark.stop.step > step and mark.at > since:
            span = Span(since, mark.at)
            yield Work(island, span, busy * span.seconds, mark.stop.step - step)
            step, since = mark.stop.step, mark.at


def _marks(run: Run, island: str) -> list[Mark]:
    """Return where an island's learner stood at each of its records, in order."""
    marks = []
    for layout in run.layouts:
        for name in run.store.list_names(f"inbox/f{layout.index:04d}/{island}/"):
            if names.parse_contribution(name) and (
                found := records.read_contribution(run.store, name)
            ):
                offer = found[0]
                told = offer.telemetry
                marks.append(Mark(offer.stop, told.at, offer.step_seconds, 1 - told.idle_share))
    for name in (*history.checkpoints(run, island), names.left(island)):
        if (record := records.read(run.store, name)) is not None:
            account = records.parsed(name, _account, record[0])
            marks.append(Mark(account.position, float(record[0]["at"])))
    return sorted(marks)


def _account(body: Mapping[str, Any]) -> LearnerRecord:
    return record_from_json(body["record"])
