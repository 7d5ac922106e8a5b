"""Garbage collection and the end of a run. No torch.

Reads the facts the retention rules need, deletes what they name, and writes `finished.json`: the inventory of all that
must be there from then on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from islands import names
from islands.contributions import Tally, Verdict
from islands.ledger import record_from_json
from islands.parsing import parse
from islands.retention import (
    KEPT_CHECKPOINTS,
    Facts,
    collectable,
    is_too_old,
    kept_snapshots,
    newest_checkpoints,
)
from islands.types import DamagedObject, manifest_from_json
from islands.versions import Commit
from tasks import records
from tasks.clockwork import Kind
from tasks.runs import Run

SUITE = "held-out"


def collect(run: Run) -> int:
    """Delete what the rules name and return how many objects went; nothing under retention = "all"."""
    if run.config.retention == "all":
        return 0
    # The heads before the names: a snapshot that appears in between names these versions, or later ones.
    heads = find_heads(run)
    present = live_names(run)
    doomed = collectable(present, retention_facts(run, present, heads))
    for name in doomed:
        run.store.delete(name)
    return len(doomed)


def live_names(run: Run) -> list[str]:
    """Return every name but the commits of versions, which are never deleted: their number grows with the run."""
    folders = (
        "inbox",
        "snapshots",
        "checkpoints",
        "advisories",
        "driver",
        "payloads",
        "evaluations",
    )
    return [names.RUN, *(name for folder in folders for name in run.store.list_names(f"{folder}/"))]


def find_heads(run: Run) -> list[Commit]:
    """Return the newest version of every fragment, without reading its whole history."""
    present = run.store.list_names("payloads/versions/")
    return [
        records.find_head(run.store, layout.index, _known_version(present, layout.index))[0]
        for layout in run.layouts
    ]


def retention_facts(run: Run, present: list[str], heads: list[Commit]) -> Facts:
    """Return what the retention rules depend on, read from the store."""
    numbered = [number for name in present if (number := names.number_of(name)) is not None]
    snapshots = kept_snapshots(
        [n for n in numbered if names.snapshot(n) in present], best_snapshots(run)
    )
    wanted = {
        (head.fragment, version) for head in heads for version in (head.version, head.version - 1)
    }
    for number in snapshots:
        if (found := records.read(run.store, names.snapshot(number))) is not None:
            wanted |= set(enumerate(found[0]["versions"]))
    for rows in newest_checkpoints(present).values():
        for name in rows[:KEPT_CHECKPOINTS]:
            wanted |= _bases(run, name)
    wanted |= _under_way(run, present)
    settled = []
    for head in heads:
        found_earlier = (
            records.read_commit(run.store, head.fragment, head.version - 2)
            if head.version >= 2
            else None
        )
        tallies: dict[str, Tally] = {} if found_earlier is None else dict(found_earlier[0].tallies)
        settled.append({learner: tally.consumed_to for learner, tally in tallies.items()})
    return Facts(
        heads=[head.version for head in heads],
        settled=settled,
        kept_versions=frozenset(wanted),
        folders=_committed_folders(run, present),
        kept_snapshots=snapshots,
        max_staleness=run.config.sync.max_staleness,
        unjudged=frozenset(_unjudged(run, present, heads)),
    )


def _unjudged(run: Run, present: list[str], heads: list[Commit]) -> Iterator[str]:
    """Yield the contributions too old to count whose refusal no version has recorded."""
    for name in present:
        key = names.parse_contribution(name)
        if key is None or key.fragment >= len(heads):
            continue
        last = heads[key.fragment].version
        if not is_too_old(key, last, run.config.sync.max_staleness):
            continue
        later = range(key.base_version + 1, last + 1)
        if records.find_refusal(run.store, name, key.fragment, later) is None:
            yield name


def best_snapshots(run: Run) -> set[int]:
    """Return the best-scored snapshot of each suite."""
    best: dict[str, tuple[float, int]] = {}
    for name in run.store.list_names("evaluations/"):
        try:
            found = records.read(run.store, name)
            score = None if found is None else records.parsed(name, _score_of, found[0])
        except DamagedObject:
            continue
        if score is not None:
            suite = name.split("/")[1]
            best[suite] = min(score, best.get(suite, score))
    return {number for _, number in best.values()}


def finish(run: Run, verdicts: list[Verdict]) -> str:
    """Collect once more, then write the end of the run with an inventory of every header; return its digest.

    Args:
        run: every island has left and nothing mergeable is pending.
        verdicts: refusals that no version has recorded.
    """
    collect(run)
    inventory = {}
    for name in run.store.list_names(""):
        if not name.startswith("payloads/") and name != names.FINISHED:
            inventory[name] = _digest(run, name)
    body: dict[str, Any] = {
        "verdicts": [asdict(verdict) for verdict in verdicts],
        "inventory": inventory,
    }
    return records.write(run.store, names.FINISHED, body)


def _score_of(body: Mapping[str, Any]) -> tuple[float, int]:
    score: tuple[float, int] = parse(tuple[float, int], [body["bits_per_byte"], body["snapshot"]])
    return score


def _digest(run: Run, name: str) -> str:
    """Return a record's digest; "" for what is none: it was refused as damaged, or belongs to nobody."""
    try:
        return records.require(run.store, name)[1]
    except DamagedObject:
        return ""


def _known_version(present: list[str], fragment: int) -> int:
    """Return a version that exists for sure, so that the head is found without reading the whole history."""
    prefix = f"payloads/versions/f{fragment:04d}/"
    headers = {
        found[0]
        for name in present
        if name.startswith(prefix) and (found := names.header_of_payload(name))
    }
    numbers = [version[1] for version in map(names.parse_version, headers) if version is not None]
    # The newest payload may belong to an attempt that was never committed; the oldest kept one is of a version.
    return min(numbers, default=0)


def _bases(run: Run, checkpoint: str) -> set[tuple[int, int]]:
    try:
        found = records.read(run.store, checkpoint)
        if found is None:
            return set()
        record = records.parsed(checkpoint, lambda body: record_from_json(body["record"]), found[0])
    except DamagedObject:
        return set()
    return {(p, clock.base_version) for p, clock in enumerate(record.clocks)}


def _under_way(run: Run, present: list[str]) -> set[tuple[int, int]]:
    """Return the versions that the local driver's islands are still fetching, or hold and have not adopted."""
    saved = [
        n
        for name in present
        if name.startswith("driver/") and (n := names.number_of(name)) is not None
    ]
    if not saved:
        return set()
    name = names.numbered("driver", max(saved))
    body, _ = records.require(run.store, name)
    versions: set[tuple[int, int]] = records.parsed(name, _fetched, body)
    return versions


def _fetched(body: Mapping[str, Any]) -> set[tuple[int, int]]:
    arriving = {
        tuple(numbers) for _, kind, _, _, numbers in body["events"] if kind == Kind.VERSION_ARRIVES
    }
    return arriving | {tuple(pair) for seat in body["seats"].values() for pair in seat["arrived"]}


def _committed_folders(run: Run, present: list[str]) -> dict[str, str]:
    """Return header -> committed folder for each header that has more than one attempt beside it."""
    attempts: dict[str, set[str]] = {}
    for name in present:
        if (found := names.header_of_payload(name)) is not None:
            attempts.setdefault(found[0], set()).add(found[1])
    folders = {}
    for header, some in attempts.items():
        if len(some) > 1 and (committed := _committed_folder(run, header)) is not None:
            folders[header] = committed
    return folders


def _committed_folder(run: Run, header: str) -> str | None:
    """Return the folder a header names; None where there is no header, or one that names none: then nothing goes."""
    try:
        found = records.read(run.store, header)
        payload = None if found is None else records.payload_of(header, found[0])
        return (
            None if payload is None else records.parsed(header, manifest_from_json, payload).folder
        )
    except DamagedObject:
        return None
