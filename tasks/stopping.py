"""Asking a run, or one island of it, to stop, and to go on again. No torch.

Knows `stops/`: a numbered log in which the newest entry that concerns an island counts. Whoever trains or merges looks
there; nobody has to be reached.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import count
from typing import Any

from islands import names
from islands.types import DamagedObject, VersionTaken
from tasks import records
from tasks.records import NewAttempt
from tasks.runs import Run

FOLDER = "stops"


def ask(run: Run, *, is_stop: bool, reason: str, mark: str, island: str | None = None) -> None:
    """Ask everybody (or one island) to stop at the next step boundary with a checkpoint, or to go on.

    Of a run that has finished nothing is asked any more.

    Args:
        run: the run.
        is_stop: stop, or go on.
        reason: for people.
        mark: text no other entry has.
        island: whom it concerns; None for all.
    """
    if run.store.read(names.FINISHED) is not None:
        return  # nobody is left to hear it, and the end lists everything
    body = {"is_stop": is_stop, "reason": reason, "island": island, "mark": mark}
    for number in count(records.next_number(run.store, FOLDER)):
        try:
            records.write(run.store, names.numbered(FOLDER, number), body)
        except VersionTaken:
            continue  # somebody else asked for something at the same moment
        return


def is_asked(run: Run, island: str | None = None) -> bool:
    """Say whether the run, or this island of it, was asked to stop and not to go on since."""
    entry = _newest(run, island)
    return entry is not None and entry[1]


def let_go_on(run: Run, new_attempt: NewAttempt, island: str | None = None) -> None:
    """Take back requests to stop: those that concern one island alone, or, with None, every one.

    While the whole run is asked to stop, an island's own request stays: taking it back would let the island go on.
    """
    if island is None:
        whom = [None, *(other.name for other in run.config.islands)]
        is_lifted = any(is_asked(run, other) for other in whom)
    else:
        is_lifted = is_asked(run, island) and not is_asked(run)
    if is_lifted:
        ask(run, is_stop=False, reason="goes on", mark=new_attempt(), island=island)


def _newest(run: Run, island: str | None) -> tuple[str | None, bool] | None:
    """Return (whom, is_stop) of the newest entry that concerns an island; for None, that concerns everybody."""
    for number in sorted(records.numbers_in(run.store, FOLDER), reverse=True):
        name = names.numbered(FOLDER, number)
        try:
            body, _ = records.require(run.store, name)
            whom, is_stop = records.parsed(name, _read, body)
        except DamagedObject:
            continue  # `verify` names it; it must not end whoever looks here
        if whom is None or whom == island:
            return whom, is_stop
    return None


def _read(body: Mapping[str, Any]) -> tuple[str | None, bool]:
    return body["island"], bool(body["is_stop"])
