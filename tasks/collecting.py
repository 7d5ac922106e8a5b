"""Garbage collection and the end of a run. No torch.

Reads the facts the retention rules need, deletes what they name, and writes `finished.json`: the inventory of all that
must be there from then on.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from islands import names
from islands.contributions import Tally, Verdict
from islands.ledger import record_from_json
from islands.retention import KEPT_CHECKPOINTS, Facts, collectable, kept_snapshots, newest_checkpoints
from islands.types import DamagedObject
from tasks import records
from tasks.runs import Run

SUITE = "held-out"


def collect(run: Run) -> int:
    """Delete what the rules name and return how many objects went; nothing under retention = "all"."""
    if run.config.retention == "all":
        return 0
    present = live_names(run)
    doomed = collectable(present, retention_facts(run, present))
    for name in doomed:
        run.store.delete(name)
    return len(doomed)


def live_names(run: Run) -> list[str]:
    """Return every name but the commits of versions, which are never deleted: their number grows with the run."""
    folders = ("inbox", "snapshots", "checkpoints", "advisories", "driver", "payloads", "evaluations")
    return [names.RUN, *(name for folder in folders for name in run.store.list_names(f"{folder}/"))]


def retention_facts(run: Run, present: list[str]) -> Facts:
    """Return what the retention rules depend on, read from the store."""
    heads = [records.find_head(run.store, layout.index, _known_version(present, layout.index))[0] for layout in run.layouts]
    snapshots = kept_snapshots(
        [names.number_of(name) or 0 for name in present if name.startswith("snapshots/")], best_snapshots(run)
    )
    wanted = {(head.fragment, version) for head in heads for version in (head.version, head.version - 1)}
    for number in snapshots:
        if (found := records.read(run.store, names.snapshot(number))) is not None:
            wanted |= set(enumerate(found[0]["versions"]))
    for rows in newest_checkpoints(present).values():
        for name in rows[:KEPT_CHECKPOINTS]:
            wanted |= _bases(run, name)
    settled = []
    for head in heads:
        found_earlier = records.read_commit(run.store, head.fragment, head.version - 2) if head.version >= 2 else None
        tallies: dict[str, Tally] = {} if found_earlier is None else dict(found_earlier[0].tallies)
        settled.append({learner: tally.consumed_to for learner, tally in tallies.items()})
    return Facts(
        heads=[head.version for head in heads],
        settled=settled,
        kept_versions=frozenset(wanted),
        folders=_committed_folders(run, present),
        kept_snapshots=snapshots,
        max_staleness=run.config.sync.max_staleness,
    )


def best_snapshots(run: Run) -> set[int]:
    """Return the best-scored snapshot of each suite."""
    best: dict[str, tuple[float, int]] = {}
    for name in run.store.list_names("evaluations/"):
        try:
            found = records.read(run.store, name)
        except DamagedObject:
            continue
        if found is not None:
            suite, score = name.split("/")[1], (found[0]["bits_per_byte"], found[0]["snapshot"])
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
            inventory[name] = records.require(run.store, name)[1]
    body: dict[str, Any] = {"verdicts": [asdict(verdict) for verdict in verdicts], "inventory": inventory}
    return records.write(run.store, names.FINISHED, body)


def _known_version(present: list[str], fragment: int) -> int:
    """Return a version that exists for sure, so that the head is found without reading the whole history."""
    prefix = f"payloads/versions/f{fragment:04d}/"
    numbers = [int(name.removeprefix(prefix)[1:9]) for name in present if name.startswith(prefix)]
    # The newest payload may belong to an attempt that was never committed; the oldest kept one is of a version.
    return min(numbers, default=0)


def _bases(run: Run, checkpoint: str) -> set[tuple[int, int]]:
    try:
        found = records.read(run.store, checkpoint)
    except DamagedObject:
        return set()
    if found is None:
        return set()
    record = records.parsed(checkpoint, record_from_json, found[0]["record"])
    return {(p, clock.base_version) for p, clock in enumerate(record.clocks)}


def _committed_folders(run: Run, present: list[str]) -> dict[str, str]:
    """Return header -> committed folder for each header that has more than one attempt beside it."""
    attempts: dict[str, set[str]] = {}
    for name in present:
        if (found := names.header_of_payload(name)) is not None:
            attempts.setdefault(found[0], set()).add(found[1])
    folders = {}
    for header, some in attempts.items():
        if len(some) > 1 and (body := records.read(run.store, header)) is not None:
            payload = records.payload_of(header, body[0])
            folders[header] = "" if payload is None else payload["folder"]
    return folders
