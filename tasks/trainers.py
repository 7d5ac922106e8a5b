"""Who looks after a run: a numbered log in which the newest `train` counts. No torch.

Knows `trainers/`; must not know what a trainer does, nor Prefect: a flow run is a text here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from infra import processes
from islands import names
from islands.types import DamagedObject, VersionTaken
from tasks import records
from tasks.collecting import find_heads
from tasks.records import NewAttempt, Stamp
from tasks.runs import Run

FOLDER = "trainers"


@dataclass(frozen=True, slots=True)
class Trainer:
    """One `train` that has enlisted: its number, its flow run, and how many merges the run had by then."""

    number: int
    flow_run: str
    num_merges: int


def enlist(run: Run, flow_run: str, new_attempt: NewAttempt, *, stamp: Stamp) -> int:
    """Announce a `train` by the next number and return that; whoever has a lower one ends when it sees this."""
    number = count(run)
    while True:
        body = {
            "number": number,
            "flow_run": flow_run,
            "num_merges": _num_merges(run),
            "where": processes.here(),
            "mark": new_attempt(),
            "at": stamp(),
        }
        try:
            records.write(run.store, names.numbered(FOLDER, number), body)
        except VersionTaken:
            number += 1
            continue
        return number


def count(run: Run) -> int:
    """Return how many have enlisted so far."""
    return records.next_number(run.store, FOLDER)


def newest(run: Run) -> Trainer | None:
    """Return who looks after the run, or did last; None if nobody ever has, or it cannot be told."""
    number = count(run) - 1
    return None if number < 0 else _trainer(run, number)


def number_of(run: Run, flow_run: str) -> int | None:
    """Return the number by which a flow run has enlisted, None if it has not."""
    for number in reversed(range(count(run))):
        trainer = _trainer(run, number)
        if trainer is not None and trainer.flow_run == flow_run:
            return number
    return None


def num_vain(run: Run) -> int:
    """Return how many of the newest, without a gap, enlisted when the run had as many merges as now."""
    last, num_merges = count(run), _num_merges(run)
    for number in reversed(range(last)):
        trainer = _trainer(run, number)
        if trainer is not None and trainer.num_merges != num_merges:
            return last - 1 - number
    return last


def _num_merges(run: Run) -> int:
    return sum(head.version for head in find_heads(run))


def _trainer(run: Run, number: int) -> Trainer | None:
    """Return who enlisted by a number; None where that is damaged: `verify` names it, and nobody's work must end."""
    name = names.numbered(FOLDER, number)
    try:
        trainer: Trainer = records.parsed(name, _read, records.require(run.store, name)[0])
    except DamagedObject:
        return None
    return trainer


def _read(body: Mapping[str, Any]) -> Trainer:
    return Trainer(int(body["number"]), str(body["flow_run"]), int(body["num_merges"]))
