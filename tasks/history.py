"""What a learner's earlier incarnations left in the store, and becoming the next one. No torch.

Knows names and links of the learners' chains; must not know a checkpoint's bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from islands import names
from islands.ledger import FragmentClock, LearnerRecord, record_from_json
from islands.parsing import parse
from islands.retention import KEPT_CHECKPOINTS
from islands.types import DamagedObject, Position, VersionTaken
from tasks import records
from tasks.records import NewAttempt, Stamp
from tasks.runs import Run


@dataclass(frozen=True, slots=True)
class Past:
    """What a learner's predecessors left behind.

    `incarnation`: the number the next one takes. `last`: the newest link of their chain with its digest; None if
    nothing was ever written. `listed`: per fragment, the newest committed contribution.
    """

    incarnation: int
    last: LearnerRecord | None
    last_digest: str
    listed: tuple[str, ...]


def look_back(run: Run, learner: str) -> Past:
    """Return what earlier incarnations of a learner left.

    Of each fragment's contributions, and of the checkpoints, the newest whole one says most: no account ever shrinks.
    """
    incarnation = records.newest_incarnations(run.store).get(learner, -1) + 1
    trails = [_contributions(run, learner, layout.index) for layout in run.layouts]
    pushed = [found for trail in trails if (found := _newest_link(run, learner, trail)) is not None]
    saved = _newest_link(run, learner, checkpoints(run, learner))
    links = [link for _, link in (*pushed, *([] if saved is None else [saved]))]
    last, digest = max(links, key=lambda link: records.progress(link[0]), default=(None, ""))
    return Past(incarnation, last, digest, tuple(name for name, _ in pushed))


def register(
    run: Run, learner: str, new_attempt: NewAttempt, *, stamp: Stamp, where: Mapping[str, Any] = {}
) -> Past:
    """Become the next incarnation of a learner and return what its predecessors left.

    The record is create-only, so of two that start at once one gets the next number. The predecessor may be alive:

        1. we look back, and list what it has committed;
        2. it commits one more push, and the synchronizer merges that: nobody has a higher number yet;
        3. our record appears, and fences off whatever it writes from now on.

    So we look back once more: what came between, merged or not, is part of the past we go on from.

    `where`: host and process, for people.
    """
    while True:
        past = look_back(run, learner)
        body = {
            "listed": list(past.listed),
            "last": past.last_digest,
            "mark": new_attempt(),
            "at": stamp(),
            "where": dict(where),
        }
        try:
            records.write(run.store, names.incarnation(learner, past.incarnation), body)
        except VersionTaken:
            continue
        since = look_back(run, learner)
        return replace(past, last=since.last, last_digest=since.last_digest)


def checkpoints(run: Run, learner: str) -> list[str]:
    """Return the names of a learner's checkpoints, newest first."""
    named = [
        (names.parse_checkpoint(name), name)
        for name in run.store.list_names(f"checkpoints/{learner}/")
    ]
    return [
        name
        for parsed, name in sorted(named, key=lambda item: item[0] or (), reverse=True)
        if parsed
    ]


def _contributions(run: Run, learner: str, fragment: int) -> list[str]:
    """Return the names of a learner's contributions of a fragment, newest first."""
    inbox = run.store.list_names(f"inbox/f{fragment:04d}/{learner}/")
    keys = [(key.stop, name) for name in inbox if (key := names.parse_contribution(name))]
    return [name for _, name in sorted(keys, reverse=True)]


def saved_tokens(run: Run, learner: str) -> list[tuple[str, int]]:
    """Return a learner's newest checkpoints whose records are whole, with the tokens it had trained by each."""
    newest = checkpoints(run, learner)[:KEPT_CHECKPOINTS]
    links = [(name, _healthy_link(run, learner, name)) for name in newest]
    return [(name, link[0].trained) for name, link in links if link is not None]


def last_link(run: Run, learner: str) -> LearnerRecord | None:
    """Return a learner's newest account, its farewell included."""
    farewell = _healthy_link(run, learner, names.left(learner))
    return look_back(run, learner).last if farewell is None else farewell[0]


def last_seen(run: Run, learner: str) -> float:
    """Return the stamp on the newest thing a learner wrote, by its own clock; 0 if it has written nothing readable."""
    number = records.newest_incarnation(run.store, learner)
    newest = [names.left(learner), *checkpoints(run, learner)[:1]]
    newest += [names.incarnation(learner, number)] if number >= 0 else []
    for layout in run.layouts:
        newest += _contributions(run, learner, layout.index)[:1]
    return max((_stamp_on(run, name) for name in newest), default=0.0)


def write_off(run: Run, learner: str, *, stamp: Stamp) -> None:
    """Leave in the name of a learner that will not come back, with the last account it wrote."""
    past = look_back(run, learner)
    start = Position(-1, 0)
    if past.last is None:
        digests = [records.require_commit(run.store, layout.index, 0)[1] for layout in run.layouts]
        clocks = tuple(FragmentClock(0, digest, start, 0) for digest in digests)
        record = LearnerRecord(learner, start, 0, 0, clocks)
    else:
        record = replace(past.last, previous=past.last_digest)
    leave(run, record, stamp=stamp)


def leave(run: Run, record: LearnerRecord, *, stamp: Stamp) -> str:
    """Write a learner's farewell, its last account; repeating it is harmless. Return the digest of what counts."""
    name = names.left(record.learner)
    try:
        return records.write(run.store, name, {"record": record.to_json(), "at": stamp()})
    except VersionTaken:
        return records.require(run.store, name)[1]


def _stamp_on(run: Run, name: str) -> float:
    """Return when a record says it was written; 0 if it is not there, or does not say."""
    try:
        found = records.read(run.store, name)
        body = {} if found is None else found[0]
        return float(parse(float, body.get("telemetry", body).get("at", 0.0)))
    except (DamagedObject, ValueError, AttributeError):
        return 0.0


def _newest_link(
    run: Run, learner: str, trail: Sequence[str]
) -> tuple[str, tuple[LearnerRecord, str]] | None:
    """Return the first of these names under which a whole link lies, and that; None if there is none."""
    for name in trail:
        if (link := _healthy_link(run, learner, name)) is not None:
            return name, link
    return None


def _healthy_link(run: Run, learner: str, name: str) -> tuple[LearnerRecord, str] | None:
    """Return a link of a learner's chain; None if it is damaged: the synchronizer refuses it too."""
    try:
        found = records.read(run.store, name)
        if found is None:
            return None
        record: LearnerRecord = records.parsed(
            name, lambda body: record_from_json(body["record"]), found[0]
        )
    except DamagedObject:
        return None
    is_its_own = record.learner == learner and len(record.clocks) == len(run.layouts)
    return (record, found[1]) if is_its_own else None
