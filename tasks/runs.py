"""A run as its first record says: configuration, layouts, data; opening and listing runs.

Knows `run.json` and `changes/`; must not know a model (no torch): creating a run is `tasks/creating.py`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import numpy as np
import numpy.typing as npt

from infra.arrays import ArrayReader, chunk_length
from infra.routing import RoutedStore
from infra.store import Store, open_store
from islands import names
from islands.codecs import BLOCK_SIZE
from islands.config import (
    RunConfig,
    changed_identity,
    config_from_json,
    identity,
    parse_config,
    to_toml,
)
from islands.data import require_enough
from islands.overrides import shown
from islands.sections import IslandConfig
from islands.types import (
    ConfigError,
    DamagedObject,
    FragmentLayout,
    Manifest,
    VersionTaken,
    is_plain_name,
    manifest_from_json,
)
from islands.versions import layouts_from_json
from tasks import records

HELD_OUT, SHARD = "held_out", "shard-"
CHANGES = "changes"


@dataclass(frozen=True, slots=True)
class Run:
    """An open run.

    Attributes:
        store_url, run_id: where runs lie, and this one's plain name.
        store: a view of the run's own folder.
        config: the effective configuration, later changes included.
        layouts: the fragments.
        data: payload with one uint8 array per founding island, "shard-<name>", and "held_out".
        digest: of `run.json`.
        facts: the whole body of `run.json`.
        num_changes: how many of the recorded changes `config` takes in.
    """

    store_url: str
    run_id: str
    store: Store
    config: RunConfig
    layouts: tuple[FragmentLayout, ...]
    data: Manifest
    digest: str
    facts: Mapping[str, Any]
    num_changes: int = 0

    def island(self, name: str) -> IslandConfig:
        """Return the settings of one island."""
        return next(island for island in self.config.islands if island.name == name)

    def own_tokens(self, name: str) -> int:
        """Return how many of the run's tokens an island trains."""
        return self.config.share_of(name)

    @property
    def chunk_elements(self) -> int:
        """The most float32 elements in a stored chunk: whole blocks of the codecs."""
        return self.config.sync.chunk_bytes // 4 // BLOCK_SIZE * BLOCK_SIZE

    def chunk_of(self, layout: FragmentLayout) -> int:
        """Return the elements in a chunk of a fragment's arrays."""
        return chunk_length(layout.size, self.chunk_elements)


def open_run(store_url: str, run_id: str) -> Run:
    """Return the run, its configuration brought up to date by `changes/`.

    Raises:
        ConfigError: no such run, or no plain name.
        StoreUnavailable: the store did not answer.
        DamagedObject: its records are damaged.
    """
    require_plain(run_id)
    store = open_store(store_url).within(run_id)
    found = records.read(store, names.RUN)
    if found is None:
        raise ConfigError(
            f"run must exist in {store_url}, got {run_id!r}; `diloco runs --store {store_url}` lists them"
        )
    facts, digest = found
    configs = _configs(store, facts)
    config, numbers = configs[-1], records.numbers_in(store, CHANGES)
    return Run(
        store_url=store_url,
        run_id=run_id,
        store=route(open_store(store_url, durable=config.durable).within(run_id), config, run_id),
        config=config,
        layouts=records.parsed(names.RUN, lambda body: layouts_from_json(body["layouts"]), facts),
        data=records.parsed(
            names.RUN, lambda body: manifest_from_json(body["data"]["payload"]), facts
        ),
        digest=digest,
        facts=facts,
        num_changes=max(numbers, default=-1) + 1,
    )


def route(store: Store, config: RunConfig, run_id: str) -> Store:
    """Return the run's store with the checkpoints of some islands lying elsewhere, as configured.

    Raises:
        ConfigError: one of their stores cannot be opened.
    """
    elsewhere = {}
    for island in config.islands:
        if island.checkpoints is not None:
            place = open_store(island.checkpoints, durable=config.durable).within(run_id)
            elsewhere[f"checkpoints/{island.name}"] = elsewhere[
                f"payloads/checkpoints/{island.name}"
            ] = place
    return RoutedStore(store, elsewhere) if elsewhere else store


def change_config(run: Run, assignments: Sequence[str], environment: Mapping[str, str]) -> Run:
    """Record changed operational settings and return the run with them.

    Raises:
        ConfigError: an identity key would change (all of them are named), or a rule is broken.
    """

    def derive(config: RunConfig) -> RunConfig:
        changed = parse_config(
            to_toml(config), assignments=assignments, environment=environment, source="the run"
        )
        require_same_members(run.run_id, config, changed)
        return changed.model_copy(update={"store": config.store})  # it lies where it lies

    record_change(run, derive)
    return open_run(run.store_url, run.run_id)


def record_change(
    run: Run, derive: Callable[[RunConfig], RunConfig], *, may_grow: bool = False
) -> tuple[RunConfig, RunConfig]:
    """Record other operational settings, unless nothing differs; return what held before, and what holds now.

    Of two that change a run at once, one derives its change anew from what the other has recorded. `may_grow`: islands
    may be added behind those the run has.

    Raises:
        ConfigError: the run has ended, an identity key would change (all of them are named), a shard is too small, or
            a store for checkpoints cannot be opened.
    """
    while True:
        run = refreshed(require_unfinished(run))
        changed = derive(run.config)
        if changed == run.config:
            return run.config, changed
        _require_possible(run, changed, may_grow=may_grow)
        name = names.numbered(CHANGES, run.num_changes)
        try:
            records.write(run.store, name, changed.model_dump(mode="json"))
        except VersionTaken:
            continue
        return run.config, changed


def require_same_members(run_id: str, config: RunConfig, changed: RunConfig) -> None:
    """Refuse what changes who takes part: that needs more than one setting.

    Raises:
        ConfigError: it does.
    """
    known = {island.name: island for island in config.islands}
    for island in changed.islands:
        before = known.get(island.name, island)
        for key in ("spare", "joined_at"):
            old, new = getattr(before, key), getattr(island, key)
            if old != new:
                raise ConfigError(
                    f"islands.{island.name}.{key} must stay ({shown(old)}), got {shown(new)}; "
                    f"`diloco join {run_id} ISLAND` starts a spare, `diloco leave` ends an island"
                )


def refreshed(run: Run) -> Run:
    """Return the run under the newest of its changes, in the store it was opened with; itself if there is none.

    One that cannot be read changes nothing: `verify` names it, and it must not end whoever looks here.
    """
    config, number = run.config, run.num_changes
    try:
        while (found := records.read(run.store, names.numbered(CHANGES, number))) is not None:
            config = _config_of(names.numbered(CHANGES, number), found[0])
            number += 1
    except DamagedObject:
        pass
    if number == run.num_changes:
        return run
    return replace(run, store=_joined_by(run, config), config=config, num_changes=number)


def _joined_by(run: Run, config: RunConfig) -> Store:
    """Return the run's store with the places of islands that the run did not have when it was opened."""
    known = {island.name for island in run.config.islands}
    fresh = tuple(island for island in config.islands if island.name not in known)
    try:
        return route(run.store, config.model_copy(update={"islands": fresh}), run.run_id)
    except ConfigError:  # out of reach from here: settings must not wait for it
        return run.store


def as_most_forgiving(run: Run) -> Run:
    """Return the run under the settings that, of all it ever had, let the most be collected: that may be gone."""
    configs = _configs(run.store, run.facts)
    staleness = min(config.sync.max_staleness for config in configs)
    retentions = {config.retention for config in configs}
    update = {
        "sync": run.config.sync.model_copy(update={"max_staleness": staleness}),
        "retention": "bounded" if "bounded" in retentions else "all",
    }
    return replace(run, config=run.config.model_copy(update=update))


def list_runs(store_url: str) -> list[str]:
    """Return the ids of the runs under a store, sorted."""
    suffix = f"/{names.RUN}"
    return [
        name.removesuffix(suffix)
        for name in open_store(store_url).list_names("")
        if _is_run(name, suffix)
    ]


def next_run_id(store_url: str, prefix: str) -> str:
    """Return the first free name of prefix-1, prefix-2, ..."""
    taken = set(list_runs(store_url))
    return next(name for n in count(1) if (name := f"{prefix}-{n}") not in taken)


def require_unfinished(run: Run) -> Run:
    """Return the run if it can go on.

    Raises:
        ConfigError: it has finished.
    """
    if run.store.read(names.FINISHED) is not None:
        raise ConfigError(
            f"this needs a run that has not ended, got {run.run_id!r}, which has; "
            f"`diloco train --from {run.run_id}` trains further"
        )
    return run


def read_shard(run: Run, island: str) -> npt.NDArray[np.uint8]:
    """Return an island's training text, checked against its checksums; of one that joined, all founders' together.

    No two founders share a document. Whoever joins finds no text left that is nobody's, so it reads all of theirs, in
    an order of its own.
    """
    return _joined(run, _shards_of(run, island))


def read_all_shards(run: Run) -> npt.NDArray[np.uint8]:
    """Return all founders' training text."""
    return _joined(run, _shards_of(run, None))


def read_held_out(run: Run) -> npt.NDArray[np.uint8]:
    """Return the text no learner sees."""
    return ArrayReader(run.store, run.data).read(HELD_OUT)


def require_plain(run_id: str) -> str:
    """Return a run id that is a plain name.

    Raises:
        ConfigError: it is not.
    """
    if not is_plain_name(run_id):
        raise ConfigError(
            f"a run id must be 1 to 64 of a-z 0-9 - _, alphanumeric at both ends, got {run_id!r}; choose a plain name"
        )
    return run_id


def _joined(run: Run, shards: Iterable[str]) -> npt.NDArray[np.uint8]:
    reader = ArrayReader(run.store, run.data)
    parts = [reader.read(name) for name in shards]
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _shards_of(run: Run, island: str | None) -> dict[str, int]:
    """Return the arrays of an island's text with their lengths: its own, or else those of all founders."""
    shards = {a.name: a.length for a in run.data.arrays if a.name.startswith(SHARD)}
    own = f"{SHARD}{island}"
    return {own: shards[own]} if own in shards else shards


def _configs(store: Store, facts: Mapping[str, Any]) -> list[RunConfig]:
    """Return every configuration a run has had, oldest first."""
    changes = [names.numbered(CHANGES, n) for n in sorted(records.numbers_in(store, CHANGES))]
    return [
        _config_of(names.RUN, facts.get("config")),
        *(_config_of(name, records.require(store, name)[0]) for name in changes),
    ]


def _require_possible(run: Run, changed: RunConfig, *, may_grow: bool) -> None:
    known = changed.islands[: len(run.config.islands)] if may_grow else changed.islands
    same = changed.model_copy(update={"islands": known})
    if broken := changed_identity(identity(run.config), identity(same)):
        raise ConfigError(
            f"a run's identity cannot change, got other values for {', '.join(broken)}; "
            f"keep them, or start a new run, perhaps with --from {run.run_id}"
        )
    _require_its_places(run, changed)
    for island in changed.islands:
        size, context = sum(_shards_of(run, island.name).values()), changed.model.context
        require_enough(island.name, size, batch_size=island.batch_size, context=context)


def _require_its_places(run: Run, changed: RunConfig) -> None:
    """Refuse a store for checkpoints that lacks an island's past, or cannot be opened: the run never could again."""
    route(run.store, changed, run.run_id)
    for island in run.config.members:
        place = next(i for i in changed.islands if i.name == island.name).checkpoints
        if place != island.checkpoints:
            raise ConfigError(
                f"islands.{island.name}.checkpoints must stay ({shown(island.checkpoints)}), where those it has lie, "
                f"got {shown(place)}; `diloco train --from {run.run_id}` begins a run with another place"
            )


def _config_of(name: str, body: Any) -> RunConfig:
    """Return the configuration a record holds; one that breaks a rule is damage, nobody can have written it."""
    try:
        return config_from_json(json.dumps(body), source=name)
    except ConfigError as exc:
        raise DamagedObject(name, f"holds no configuration: {exc}") from exc


def _is_run(name: str, suffix: str) -> bool:
    return name.endswith(suffix) and name.count("/") == 1
