"""Where a new run's first parameters come from, if not from its seed: a snapshot of a run, or a file of weights.

Knows how an origin is named, `[URL/]RUN[@SNAPSHOT]` or `PATH.safetensors`, and what a run remembers of it; must not
know who asks. Tensors are taken by name, so the new run may cut its model into other fragments. No torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from infra.arrays import ArrayReader
from infra.export import read_safetensors
from infra.store import open_store
from islands.config import RunConfig, config_from_json
from islands.fragments import list_mismatches
from islands.merging import Vector
from islands.types import ConfigError, DamagedObject, FragmentLayout
from islands.versions import Commit, Snapshot
from tasks import records
from tasks.runs import Run, open_run

FILE_ENDING = ".safetensors"
_MOST_NAMED = 3
# Parameters and momentum of one tensor, (elements,) float32.
Pair = tuple[Vector, Vector]


@dataclass(frozen=True, slots=True)
class Origin:
    """A source of first parameters.

    Attributes:
        spec: names it again, from any folder, and this very snapshot.
        facts: what the new run's first record keeps of it.
        shapes: of its tensors, by name.
        config: the configuration it was trained under; None if it does not say.
        load: reads it: name -> parameters and momentum, a file's momentum being zero.
    """

    spec: str
    facts: Mapping[str, Any]
    shapes: Mapping[str, tuple[int, ...]]
    config: RunConfig | None
    load: Callable[[], Mapping[str, Pair]]


def open_origin(spec: str, store_url: str) -> Origin:
    """Return the origin that a text names; a run without a URL is looked for in this store.

    Raises:
        ConfigError: there is none of that name, or it holds no weights.
    """
    if spec.endswith(FILE_ENDING):
        return _open_file(Path(spec).resolve())
    url, slash, last = spec.rpartition("/")
    run_id, at, number = last.partition("@")
    if at and not number.isdecimal():
        raise ConfigError(
            f"an origin must be RUN, RUN@SNAPSHOT or PATH{FILE_ENDING}, got {spec!r}; "
            "write the snapshot as a number"
        )
    run = open_run(url if slash else store_url, run_id)
    return _open_snapshot(run, *_pick(run, int(number) if at else None))


def reopen_origin(facts: Mapping[str, Any]) -> Origin:
    """Return the origin that a run remembers, the very same bytes.

    Raises:
        ConfigError: it is gone, or is not what it was.
    """
    spec = facts["spec"]
    try:
        origin = open_origin(spec, "")
    except (ConfigError, DamagedObject) as exc:
        raise _gone(spec, str(exc)) from exc
    if origin.facts != facts:
        raise _gone(spec, "it holds something else now")
    return origin


def load_tensors(origin: Origin) -> Mapping[str, Pair]:
    """Return the origin's tensors.

    Raises:
        ConfigError: some of it was collected or damaged since it was opened.
    """
    try:
        return origin.load()
    except DamagedObject as exc:
        raise _gone(origin.spec, str(exc)) from exc


def gather(layout: FragmentLayout, tensors: Mapping[str, Pair]) -> Pair:
    """Return a fragment's parameters and momentum, each (elements,) float32 in layout order."""
    params, momentum = (np.empty(layout.size, np.float32) for _ in range(2))
    for spec in layout.tensors:
        params[spec.offset : spec.stop], momentum[spec.offset : spec.stop] = tensors[spec.name]
    return params, momentum


def require_match(origin: Origin, layouts: Sequence[FragmentLayout]) -> None:
    """Raise ConfigError unless the origin has exactly the tensors of the configured model."""
    wanted = {spec.name: spec.shape for layout in layouts for spec in layout.tensors}
    problems = list_mismatches(wanted, origin.shapes)
    if not problems:
        return
    more = len(problems) - _MOST_NAMED
    rest = f" and {more} more" if more > 0 else ""
    raise ConfigError(
        f"the tensors of an origin must be those of the configured model, got from {origin.spec}: "
        f"{'; '.join(problems[:_MOST_NAMED])}{rest}; {_remedy(origin)}"
    )


def _remedy(origin: Origin) -> str:
    if origin.config is None:
        return "configure the model that it holds"
    model = origin.config.model.model_dump(mode="json")
    return f"train it with {', '.join(f'model.{key}={value}' for key, value in model.items())}"


def _gone(spec: str, why: str) -> ConfigError:
    return ConfigError(
        f"a run's origin must be there until its creation is complete, got {spec}, which is gone ({why}); "
        "bring it back, or start a new run from another origin"
    )


# --- a snapshot of a run ---


def _pick(run: Run, number: int | None) -> tuple[Snapshot, str]:
    kept = {
        snapshot.number: (snapshot, digest)
        for snapshot, digest in records.read_snapshots(run.store)
    }
    if not kept:
        raise ConfigError(
            f"an origin must have a snapshot, got none in run {run.run_id!r}; "
            "train it until every fragment has merged"
        )
    wanted = max(kept) if number is None else number
    if wanted not in kept:
        raise ConfigError(
            f"an origin's snapshot must be one of {', '.join(map(str, kept))}, got {wanted}; "
            f"older ones of {run.run_id} are not kept"
        )
    return kept[wanted]


def _open_snapshot(run: Run, snapshot: Snapshot, digest: str) -> Origin:
    found = [records.require_commit(run.store, *pair) for pair in enumerate(snapshot.versions)]
    url = run.store_url
    place = url if url.startswith("memory:") else open_store(url).url
    spec = f"{place}/{run.run_id}@{snapshot.number}"
    facts = {
        "spec": spec,
        "run_digest": run.digest,
        "snapshot_digest": digest,
        "version_digests": [commit_digest for _, commit_digest in found],
    }
    shapes = {spec.name: spec.shape for layout in run.layouts for spec in layout.tensors}
    commits = [commit for commit, _ in found]
    return Origin(spec, facts, shapes, run.config, lambda: _read_snapshot(run, commits))


def _read_snapshot(run: Run, commits: Sequence[Commit]) -> dict[str, Pair]:
    tensors: dict[str, Pair] = {}
    for layout, commit in zip(run.layouts, commits, strict=True):
        reader = ArrayReader(run.store, commit.payload)
        params, momentum = reader.read("params"), reader.read("momentum")
        for spec in layout.tensors:
            tensors[spec.name] = (
                params[spec.offset : spec.stop],
                momentum[spec.offset : spec.stop],
            )
    return tensors


# --- a file ---


def _open_file(path: Path) -> Origin:
    tensors, notes, sha256 = read_safetensors(path)
    for name, values in tensors.items():
        if not np.isfinite(values).all():
            raise ConfigError(
                f"weights must be finite, got NaN or infinity in {name} of {path}; choose another file"
            )
    shapes = {name: tuple(values.shape) for name, values in tensors.items()}
    pairs = {name: (values.reshape(-1), values.reshape(-1) * 0) for name, values in tensors.items()}
    facts = {"spec": str(path), "sha256": sha256}
    return Origin(str(path), facts, shapes, _config_in(notes), lambda: pairs)


def _config_in(notes: Mapping[str, str]) -> RunConfig | None:
    """Return the configuration that `export` has put beside the weights; None if there is none that we understand."""
    try:
        return config_from_json(notes["config"], source="the file")
    except (KeyError, ConfigError):
        return None
