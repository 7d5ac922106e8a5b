"""Creating a run: text split and stored, `run.json`, then version 0 of every fragment, from a seed or an origin.

Everything that can be wrong with the configuration is found before anything is written.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np
import torch

from infra.arrays import write_arrays
from infra.store import Store, open_store
from infra.text import load_documents
from islands import names
from islands.config import RunConfig, identity
from islands.data import Split, require_enough, split_documents
from islands.fragments import lay_out
from islands.learner import embedding_names, flatten, trainable
from islands.merging import Vector
from islands.model import build_model
from islands.types import ConfigError, FragmentLayout, VersionTaken
from islands.versions import layouts_to_json
from tasks import records
from tasks.building import model_shape, require_devices
from tasks.origins import Origin, gather, load_tensors, reopen_origin, require_match
from tasks.publishing import publish_first
from tasks.records import NewAttempt
from tasks.runs import HELD_OUT, SHARD, Run, open_run, require_plain, route

# Parameters and momentum of a fragment's version 0; None for zero momentum.
First = Callable[[FragmentLayout], tuple[Vector, Vector | None]]


@dataclass(frozen=True, slots=True)
class Prepared:
    """A checked configuration with what it leads to: nothing written yet."""

    config: RunConfig
    run_id: str
    store: Store
    split: Split
    layouts: tuple[FragmentLayout, ...]
    model: torch.nn.Module
    origin: Origin | None = None


def prepare_run(
    config: RunConfig,
    run_id: str,
    *,
    model: torch.nn.Module | None = None,
    origin: Origin | None = None,
) -> Prepared:
    """Return the run as it would be created; writes nothing.

    `model` replaces the configured one; its parameters are version 0, unless there is an origin.

    Raises:
        ConfigError: occupied or unplain run id, unusable store, device, text, shards, fragments or origin.
    """
    require_plain(run_id)
    store = open_store(config.store, durable=config.durable).within(run_id)
    if store.read(names.RUN) is not None:
        raise ConfigError(
            f"a run id must be new, got {run_id!r}, which exists in {config.store}; "
            f"choose another name, or continue it with `diloco resume {run_id}`"
        )
    require_devices(config)
    _require_all_dealt(config)
    route(store, config, run_id)
    split = split_text(config)
    for island in config.islands:
        size = split.shards[island.name].size
        require_enough(
            island.name, size, batch_size=island.batch_size, context=config.model.context
        )
    built = build_model(model_shape(config), config.seed) if model is None else model
    layouts = lay_out_model(built, config)
    if origin is not None:
        require_match(origin, layouts)
    return Prepared(config, run_id, store, split, layouts, built, origin)


def _require_all_dealt(config: RunConfig) -> None:
    """Raise ConfigError if every island has a number of tokens, and together they train less than the run."""
    numbers = [island.tokens for island in config.members if island.tokens is not None]
    if len(numbers) == len(config.members) and sum(numbers) < config.total_tokens:
        raise ConfigError(
            f"islands.*.tokens must add up to total_tokens ({config.total_tokens}) where each island has a number, "
            f"got {sum(numbers)}; raise one, or leave one out"
        )


def split_text(config: RunConfig) -> Split:
    """Return the configured text, cut into one shard per island (as large as its share) and a held-out part."""
    corpus = load_documents(config.data.source)
    return split_documents(
        {document.name: document.text for document in corpus.documents},
        shards=[island.name for island in config.islands],
        weights=list(config.rates.values()),
        held_out_fraction=config.data.held_out_fraction,
    )


def lay_out_model(model: torch.nn.Module, config: RunConfig) -> tuple[FragmentLayout, ...]:
    """Return the fragments of a model under a configuration; merge = "mean" takes the mean everywhere."""
    parameters = trainable(model)
    shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
    averaged = set(shapes) if config.outer.merge == "mean" else embedding_names(model)
    return lay_out(shapes, embeddings=averaged, num_fragments=config.sync.num_fragments)


def create_run(prepared: Prepared, new_attempt: NewAttempt) -> Run:
    """Write the text, `run.json`, and version 0 of every fragment; return the open run.

    `run.json` decides who owns the name. If this process dies before all of version 0 is there, `open_run` succeeds and
    `complete_run` writes the rest.

    Raises:
        ConfigError: another process took the name meanwhile.
    """
    config, store = prepared.config, prepared.store
    # Read before anything is written: an origin that is damaged must not leave a payload under the new name.
    first = _of_model(prepared.model)
    if prepared.origin is not None:
        first = _of_origin(prepared.origin, config)
    arrays = {f"{SHARD}{name}": values for name, values in prepared.split.shards.items()}
    arrays[HELD_OUT] = prepared.split.held_out
    folder = names.payload_folder(names.RUN, new_attempt())
    payload = write_arrays(store, folder, arrays, chunk_elements=config.sync.chunk_bytes // 4)
    body: dict[str, Any] = {
        "run_id": prepared.run_id,
        "identity": identity(config),
        "config": config.model_dump(mode="json"),
        "layouts": layouts_to_json(prepared.layouts),
        "data": {
            "source": config.data.source,
            "sha256": {**prepared.split.digests, HELD_OUT: prepared.split.held_out_digest},
            "payload": payload.to_json(),
        },
        "software": _software(),
    }
    if prepared.origin is not None:
        body["origin"] = dict(prepared.origin.facts)
    try:
        records.write(store, names.RUN, body)
    except VersionTaken as exc:
        raise ConfigError(
            f"a run id must be new, got {prepared.run_id!r}, taken just now; choose another name"
        ) from exc
    run = open_run(config.store, prepared.run_id)
    _publish_missing(run, first, new_attempt)
    return run


def complete_run(run: Run) -> None:
    """Publish version 0 of each fragment that lacks it: the run's creation was interrupted.

    Raises:
        ConfigError: its origin is gone.
    """
    if all(records.read(run.store, names.version(layout.index, 0)) for layout in run.layouts):
        return
    _publish_missing(run, first_values(run), _counted_attempts(run.store))


def first_values(run: Run) -> First:
    """Return what version 0 of the run's fragments holds: its origin's values, or those of its seed.

    Raises:
        ConfigError: its origin is gone.
    """
    if "origin" in run.facts:
        return _of_origin(reopen_origin(run.facts["origin"]), run.config)
    return _of_model(build_model(model_shape(run.config), run.config.seed))


def _of_model(model: torch.nn.Module) -> First:
    parameters = trainable(model)
    return lambda layout: (flatten(layout, parameters), None)


def _of_origin(origin: Origin, config: RunConfig) -> First:
    """Return the origin's parameters, and its momentum where that is outer momentum on both sides.

    AdamW's first moment is none, and without the second one and their count of steps it would throw the model far off.
    """
    tensors = load_tensors(origin)
    known = [config] if origin.config is None else [config, origin.config]
    keeps_momentum = not any(one.sync.sends_gradients for one in known)

    def first(layout: FragmentLayout) -> tuple[Vector, Vector | None]:
        params, momentum = gather(layout, tensors)
        return params, momentum if keeps_momentum else None

    return first


def attempts_of(prepared: Prepared) -> NewAttempt:
    """Return a source of attempt names: counted, and past those a failed creation may have left."""
    return _counted_attempts(prepared.store)


def _counted_attempts(store: Store) -> NewAttempt:
    numbers = count(len(store.list_names("payloads/")))
    return lambda: f"a-{next(numbers):08x}"


def _publish_missing(run: Run, first: First, new_attempt: NewAttempt) -> None:
    for layout in run.layouts:
        if records.read(run.store, names.version(layout.index, 0)) is None:
            values, momentum = first(layout)
            publish_first(run, layout, values, new_attempt, momentum=momentum)


def _software() -> Mapping[str, str]:
    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "numpy": np.__version__,
    }
