"""What a run looks like from outside: islands, fragments, merged share. Reads records only; no torch."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from islands import metrics, names
from islands.contributions import Tally
from islands.health import Finding
from islands.ledger import LearnerRecord
from islands.traffic import per_merged_token
from islands.types import IslandsError
from islands.versions import Commit
from tasks import records, stopping
from tasks.health import Doctor
from tasks.history import last_link, last_seen
from tasks.runs import Run

# Something is written at least once a checkpoint, or a period of the local driver: several without it are a bad sign.
_ALIVE_SECONDS, _ALIVE_INTERVALS = 60.0, 3
AT_WORK = ("training", "quarantined")


@dataclass(frozen=True, slots=True)
class IslandStatus:
    """One island as its newest record and the heads say.

    `tokens` trained; `share` of all trained tokens; `merged_share` of its own tokens, mean over fragments; `staleness`:
    most versions its bases lie behind the heads; `state`: "waiting", "training", "quarantined" (it trains,
    and does not count), "silent" (it should train, and has written nothing of late), "stopped" (it was asked to stop),
    "spare" (it waits for another to leave) or "left". `tokens_per_second`: while
    it trains, as last merged, 0 while unknown. `replaced_copies`, `replaced_tokens`: copies dropped unsent for newer
    ones, and their tokens, over all fragments. `bytes_up`, `bytes_down`: payload bytes it has pushed and fetched, over
    all its incarnations. `last_seen`: stamp on the newest thing it wrote, by its own clock:
    seconds since 1970, or base steps of the local driver; 0 if there is none.
    """

    name: str
    region: str
    state: str
    incarnation: int
    step: int
    tokens: int
    share: float
    merged_share: float
    staleness: int
    refused: dict[str, int]
    tokens_per_second: float = 0.0
    last_seen: float = 0.0
    replaced_copies: int = 0
    replaced_tokens: int = 0
    bytes_up: int = 0
    bytes_down: int = 0


@dataclass(frozen=True, slots=True)
class FragmentStatus:
    """One fragment: elements, head version, merges, and contributions not consumed yet.

    `waiting`: islands that have one; `quorum`: how many must for the next merge, no more than may still come and count.
    """

    index: int
    elements: int
    version: int
    merged_tokens: int
    pending: int
    waiting: int = 0
    quorum: int = 1


@dataclass(frozen=True, slots=True)
class Status:
    """A run at a glance.

    `origin`: the snapshot or file it began from, empty for a run that began from its seed.
    `bytes_per_merged_token_up`, `…_down`: payload bytes of all islands for each token in the model; None while none is.
    `live`: islands that train and have written something of late; `contributing`: those in the newest merge of a
    fragment; `quorum`: how many a merge needs. `findings`: what is wrong with it.
    """

    run_id: str
    is_finished: bool
    trained: int
    total_tokens: int
    merged_share: float
    islands: tuple[IslandStatus, ...]
    fragments: tuple[FragmentStatus, ...]
    origin: str = ""
    bytes_per_merged_token_up: float | None = None
    bytes_per_merged_token_down: float | None = None
    live: int = 0
    contributing: int = 0
    quorum: int = 1
    findings: tuple[Finding, ...] = ()

    @property
    def state(self) -> str:
        """One of "finished", "stopped" (all that could train were asked to stop) and "unfinished"."""
        states = {island.state for island in self.islands} - {"left", "spare"}
        if self.is_finished:
            return "finished"
        return "stopped" if states == {"stopped"} else "unfinished"


def status(run: Run, before: Status | None = None, doctor: Doctor | None = None) -> Status:
    """Return the state of a run as its store shows it now; heads are looked for from where they stood `before`.

    A `doctor` that has looked at the run before need not read again what is in it.

    Raises:
        IslandsError: the run's creation was interrupted.
    """
    if any(records.read(run.store, names.version(p, 0)) is None for p in range(len(run.layouts))):
        raise IslandsError(
            f"a run to look at must be created whole, got {run.run_id!r}, whose creation was interrupted; "
            f"`diloco resume {run.run_id}` completes it"
        )
    num_fragments = len(run.layouts)
    known = (
        records.known_versions(run.store, num_fragments)
        if before is None
        else [fragment.version for fragment in before.fragments]
    )
    heads = [records.find_head(run.store, p, version)[0] for p, version in enumerate(known)]
    lasts = {island.name: last_link(run, island.name) for island in run.config.islands}
    trained = {name: 0 if link is None else link.trained for name, link in lasts.items()}
    total = sum(trained.values())
    merged = sum(head.merged_tokens for head in heads)
    gone, stopped = records.departed(run.store), stopping.asked(run)
    is_finished = run.store.read(names.FINISHED) is not None
    links = [link for link in lasts.values() if link is not None]
    islands = _heard(
        run,
        [
            _island(run, name, link, heads, total, _state(run, name, gone, stopped, link))
            for name, link in lasts.items()
        ],
    )
    fragments = tuple(_fragment(run, head, gone, is_finished) for head in heads)
    return Status(
        run_id=run.run_id,
        is_finished=is_finished,
        trained=total,
        total_tokens=run.config.total_tokens,
        merged_share=merged / (total * len(heads)) if total else 0.0,
        islands=islands,
        fragments=fragments,
        origin=run.facts.get("origin", {}).get("spec", ""),
        bytes_per_merged_token_up=per_merged_token(
            sum(link.bytes_up for link in links), merged / len(heads)
        ),
        bytes_per_merged_token_down=per_merged_token(
            sum(link.bytes_down for link in links), merged / len(heads)
        ),
        live=sum(island.state in AT_WORK for island in islands),
        contributing=len({entry.learner for head in heads for entry in head.consumed}),
        quorum=fragments[0].quorum,
        findings=(doctor or Doctor(run)).look(run, heads),
    )


def as_plain(seen: Status) -> dict[str, Any]:
    """Return a run's status as plain JSON values."""
    return asdict(seen) | {"state": seen.state}


def _heard(run: Run, islands: Sequence[IslandStatus]) -> tuple[IslandStatus, ...]:
    """Return the islands, silent those that have written nothing of late: by our clock, or the local driver's."""
    newest = max(island.last_seen for island in islands)
    if newest < metrics.FIRST_STAMP:
        slowest = min(island.speed for island in run.config.islands)
        now, patience = newest, _ALIVE_INTERVALS * run.config.sync.period_steps / slowest
    else:
        interval = run.config.pipeline.checkpoint_seconds
        now = max(newest, time.time())
        patience = max(_ALIVE_SECONDS, _ALIVE_INTERVALS * interval)
    return tuple(
        replace(island, state="silent")
        if island.state in AT_WORK and now - island.last_seen > patience
        else island
        for island in islands
    )


def _island(
    run: Run, name: str, link: LearnerRecord | None, heads: list[Commit], total: int, state: str
) -> IslandStatus:
    tallies = [head.tallies.get(name, Tally()) for head in heads]
    refused: dict[str, int] = {}
    for tally in tallies:
        for reason, (count, _) in tally.refused.items():
            refused[reason] = refused.get(reason, 0) + count
    trained = 0 if link is None else link.trained
    behind = (
        []
        if link is None
        else [h.version - c.base_version for h, c in zip(heads, link.clocks, strict=True)]
    )
    return IslandStatus(
        name=name,
        region=run.island(name).region,
        state=state,
        incarnation=-1 if link is None else link.position.incarnation,
        step=0 if link is None else link.position.step,
        tokens=trained,
        share=trained / total if total else 0.0,
        merged_share=sum(tally.merged for tally in tallies) / (trained * len(heads))
        if trained
        else 0.0,
        staleness=max(behind, default=0),
        refused=refused,
        tokens_per_second=_pace(run, name, tallies),
        last_seen=last_seen(run, name),
        replaced_copies=0 if link is None else link.replaced_copies,
        replaced_tokens=0 if link is None else link.replaced_tokens,
        bytes_up=0 if link is None else link.bytes_up,
        bytes_down=0 if link is None else link.bytes_down,
    )


def _state(
    run: Run,
    name: str,
    gone: frozenset[str],
    stopped: frozenset[str],
    link: LearnerRecord | None,
) -> str:
    if name in gone:
        return "left"
    if run.island(name).spare:
        return "spare"
    if name in stopped:
        return "stopped"
    if name in run.config.quarantine:
        return "quarantined"
    return "waiting" if link is None else "training"


def _pace(run: Run, name: str, tallies: list[Tally]) -> float:
    newest = max(tallies, key=lambda tally: tally.consumed_to)
    num_tokens = run.island(name).batch_size * run.config.model.context
    return num_tokens / newest.step_seconds if newest.step_seconds > 0 else 0.0


def _fragment(run: Run, head: Commit, gone: frozenset[str], is_finished: bool) -> FragmentStatus:
    layout = run.layouts[head.fragment]
    keys = map(names.parse_contribution, run.store.list_names(f"inbox/f{head.fragment:04d}/"))
    pending = [
        key for key in keys if key and key.stop > head.tallies.get(key.learner, Tally()).consumed_to
    ]
    if is_finished:
        pending = []
    counting = {island.name for island in run.config.members} - gone - set(run.config.quarantine)
    return FragmentStatus(
        layout.index,
        layout.size,
        head.version,
        head.merged_tokens,
        len(pending),
        waiting=len({key.learner for key in pending}),
        quorum=max(1, min(run.config.quorum, len(counting))),
    )
