"""What of a run's training lasted, from its records alone: when which island was at work, and what was rolled back.

An incarnation's work reaches from its first step to its newest record; what it did after that is lost and counts
nowhere. Between two records lie so many steps of so many seconds, both as the learner wrote them. Stamps are those of
one machine's clock, or base steps under the local driver. No torch.
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
    """Where a learner stood at a stamp. `step_seconds`: of its step then, 0 where the record does not say."""

    stop: Position
    at: float
    step_seconds: float


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
    known = [mark.step_seconds for mark in life if mark.step_seconds > 0]
    step, at, seconds = begin, 0.0, known[0] if known else 0.0
    for mark in life:
        seconds = mark.step_seconds or seconds
        kept = (mark.stop.step - step) * seconds
        since = at or mark.at - kept
        if kept > 0 and mark.at > since:
            yield Work(island, Span(since, mark.at), kept)
            step, at = mark.stop.step, mark.at


def _marks(run: Run, island: str) -> list[Mark]:
    """Return where an island's learner stood at each of its records, in order."""
    marks = []
    for layout in run.layouts:
        for name in run.store.list_names(f"inbox/f{layout.index:04d}/{island}/"):
            if names.parse_contribution(name) and (
                found := records.read_contribution(run.store, name)):
                offer = found[0]
                marks.append(Mark(offer.stop, offer.telemetry.at, offer.step_seconds))
    for name in (*history.checkpoints(run, island), names.left(island)):
        if (record := records.read(run.store, name)) is not None:
            account = records.parsed(name, _account, record[0])
            marks.append(Mark(account.position, float(record[0]["at"]), 0.0))
    return sorted(marks)


def _account(body: Mapping[str, Any]) -> LearnerRecord:
    return record_from_json(body["record"])
