"""Asking a run, or one island of it, to stop, and to go on again. No torch.

Knows `stops/`: a numbered log in which the newest entry that concerns an island counts. Whoever trains or merges looks
there; nobody has to be reached.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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


def asked(run: Run) -> frozenset[str]:
    """Return the islands that were asked to stop and not to go on since."""
    newest: dict[str, bool] = {}
    for whom, is_stop in _entries(run):
        for name in [island.name for island in run.config.members] if whom is None else [whom]:
            newest.setdefault(name, is_stop)
        if whom is None:
            break  # whatever is older concerns nobody any more
    return frozenset(name for name, is_stop in newest.items() if is_stop)


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
    return next((entry for entry in _entries(run) if entry[0] in (None, island)), None)


def _entries(run: Run) -> Iterator[tuple[str | None, bool]]:
    """Yield (whom, is_stop) of each entry, the newest first."""
    for number in sorted(records.numbers_in(run.store, FOLDER), reverse=True):
        name = names.numbered(FOLDER, number)
        try:
            body, _ = records.require(run.store, name)
            yield records.parsed(name, _read, body)
        except DamagedObject:
            continue  # `verify` names it; it must not end whoever looks here


def _read(body: Mapping[str, Any]) -> tuple[str | None, bool]:
    return body["island"], bool(body["is_stop"])
