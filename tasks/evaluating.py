"""Scoring, exporting and sampling one snapshot of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infra.export import write_safetensors
from islands import names
from islands.bigram import bigram_bits_per_byte
from islands.learner import trainable, unflatten
from islands.model import ByteGPT, build_model, generate
from islands.scoring import bits_per_byte
from islands.types import ConfigError, IslandsError, VersionTaken
from islands.versions import Snapshot
from tasks import records
from tasks.building import model_shape
from tasks.collecting import SUITE
from tasks.runs import Run, read_all_shards, read_held_out


@dataclass(frozen=True, slots=True)
class Score:
    """One snapshot on the held-out text. `bigram` is what counting byte pairs of the training text achieves."""

    snapshot: int
    versions: tuple[int, ...]
    merged_tokens: int
    bits_per_byte: float
    bigram: float
    num_bytes: int


def evaluate(run: Run, number: int | None = None, *, closes: bool = False) -> Score:
    """Return the score of a snapshot (the newest unless named); kept with the run while the run goes on.

    Once every island has left, only who closes the run (`closes`) adds to it: the end lists everything.

    Raises:
        ConfigError: no such snapshot.
    """
    snapshot, digest = pick_snapshot(run, number)
    name = names.evaluation(SUITE, snapshot.number)
    if (known := records.read(run.store, name)) is not None:
        return _score_from(snapshot, known[0])
    config, held_out = run.config, read_held_out(run)
    model = load_snapshot(run, snapshot)
    body = {
        "snapshot": snapshot.number,
        "digest": digest,
        "merged_tokens": snapshot.merged_tokens,
        "versions": list(snapshot.versions),
        "bits_per_byte": bits_per_byte(
            model, held_out, context=config.model.context, max_bytes=config.data.eval_bytes
        ),
        "bigram": bigram_of(run),
        "num_bytes": min(config.data.eval_bytes, held_out.size),
    }
    islands = {island.name for island in run.config.members}
    has_ended = islands <= records.departed(run.store)
    if run.store.read(names.FINISHED) is None and (closes or not has_ended):
        try:
            records.write(run.store, name, body)
        except VersionTaken:
            return evaluate(run, snapshot.number, closes=closes)
    return _score_from(snapshot, body)


def evaluate_if_merged(run: Run, *, closes: bool = False) -> Score | None:
    """Return the score of the newest snapshot; None if every island died before anything was merged."""
    return evaluate(run, closes=closes) if records.read_snapshots(run.store) else None


def bigram_of(run: Run) -> float:
    """Return the bits per byte of a byte bigram counted on all shards, on the bytes an evaluation scores."""
    held_out = read_held_out(run)[: run.config.data.eval_bytes]
    return bigram_bits_per_byte(read_all_shards(run), held_out)


def pick_snapshot(run: Run, number: int | None) -> tuple[Snapshot, str]:
    """Return a snapshot with its digest, the newest unless named.

    Raises:
        ConfigError: the one named does not exist.
        IslandsError: the run has none yet.
    """
    kept = records.read_snapshots(run.store)
    if not kept:
        raise IslandsError(
            f"a snapshot must exist, got none in run {run.run_id!r}; train until every fragment has merged"
        )
    if number is None:
        return kept[-1]
    for snapshot, digest in kept:
        if snapshot.number == number:
            return snapshot, digest
    numbers = ", ".join(str(snapshot.number) for snapshot, _ in kept)
    raise ConfigError(f"a snapshot must be one of {numbers}, got {number}; older ones are not kept")


def load_snapshot(run: Run, snapshot: Snapshot) -> ByteGPT:
    """Return the model with a snapshot's public values."""
    model = build_model(model_shape(run.config), run.config.seed)
    parameters = trainable(model)
    for layout, version in zip(run.layouts, snapshot.versions, strict=True):
        commit, _ = records.require_commit(run.store, layout.index, version)
        unflatten(layout, records.read_public(run.store, commit), parameters)
    return model


def export(run: Run, target: Path, number: int | None = None) -> Snapshot:
    """Write a snapshot as a safetensors file and return it; tied weights appear once.

    Raises:
        ConfigError: no such snapshot, or the file cannot be written.
    """
    snapshot, digest = pick_snapshot(run, number)
    tensors = {
        name: parameter.detach().numpy()
        for name, parameter in trainable(load_snapshot(run, snapshot)).items()
    }
    notes = {
        "run": run.run_id,
        "snapshot": str(snapshot.number),
        "digest": digest,
        "config": run.config.model_dump_json(),
    }
    write_safetensors(target, tensors, notes)
    return snapshot


def sample(
    run: Run,
    prompt: str,
    *,
    num_bytes: int,
    temperature: float,
    seed: int,
    number: int | None = None,
) -> str:
    """Return text that a snapshot continues `prompt` with."""
    snapshot, _ = pick_snapshot(run, number)
    model = load_snapshot(run, snapshot)
    text = generate(model, prompt.encode(), num_bytes=num_bytes, temperature=temperature, seed=seed)
    return text.decode(errors="replace")


def _score_from(snapshot: Snapshot, body: Mapping[str, Any]) -> Score:
    return Score(
        snapshot=snapshot.number,
        versions=snapshot.versions,
        merged_tokens=snapshot.merged_tokens,
        bits_per_byte=body["bits_per_byte"],
        bigram=body["bigram"],
        num_bytes=int(body["num_bytes"]),
    )
