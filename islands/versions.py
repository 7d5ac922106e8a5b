"""Versions: what a commit, a snapshot and a run say of themselves.

Knows records; must not know arrays or a store.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from islands.contributions import Consumed, Tally, Verdict
from islands.outer import AdamW
from islands.parsing import parse
from islands.types import FragmentLayout, Manifest, TensorSpec, manifest_from_json


@dataclass(frozen=True, slots=True)
class Commit:
    """A published version of one fragment.

    Attributes:
        parent_digest: of the version before; of `run.json` for version 0.
        consumed, refused: what was decided in making it.
        tallies: every learner's running account, ordered by name.
        median_norm: running median of merged deltas' norms, 0 while unknown.
        learning_rate, momentum: of the outer step that made it; AdamW has no momentum factor, so 0.
        codec: of the payload's array "public".
        synchronizer: number of the synchronizer record it was made under; -1 for version 0.
        at: seconds since 1970 by the synchronizer's own clock, for people; the local driver writes base steps.
        payload: arrays "params" and "momentum" (float32, the synchronizer's own) and "public" (what all adopt). Under
            data-parallel "momentum" is AdamW's first moment, and "second" its second one.
        adamw: of the step that made it, where that was AdamW's.
    """

    fragment: int
    version: int
    parent_digest: str
    consumed: tuple[Consumed, ...]
    refused: tuple[Verdict, ...]
    tallies: Mapping[str, Tally]
    median_norm: float
    learning_rate: float
    momentum: float
    codec: str
    synchronizer: int
    payload: Manifest
    at: float = 0.0
    adamw: AdamW | None = None

    @property
    def merged_tokens(self) -> int:
        """Tokens merged into this fragment so far, over all learners."""
        return sum(tally.merged for tally in self.tallies.values())

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "payload": self.payload.to_json()}


def commit_from_json(value: Mapping[str, Any]) -> Commit:
    """Return the commit that `Commit.to_json` wrote.

    Raises:
        ValueError: it holds something else.
    """
    commit: Commit = parse(Commit, value)
    return replace(commit, payload=manifest_from_json(value["payload"]))


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One version of every fragment: what evaluate, export and comparison name.

    `merged_tokens`: mean over fragments of the tokens merged so far. `previous`: digest of the snapshot before.
    """

    number: int
    versions: tuple[int, ...]
    digests: tuple[str, ...]
    merged_tokens: int
    previous: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def snapshot_from_json(value: Mapping[str, Any]) -> Snapshot:
    """Return the snapshot that `Snapshot.to_json` wrote.

    Raises:
        ValueError: it holds something else.
    """
    snapshot: Snapshot = parse(Snapshot, value)
    if len(snapshot.versions) != len(snapshot.digests):
        raise ValueError(
            f"names {len(snapshot.versions)} versions by {len(snapshot.digests)} digests"
        )
    return snapshot


def layouts_to_json(layouts: tuple[FragmentLayout, ...]) -> list[list[list[Any]]]:
    """Return the layouts as plain JSON values."""
    return [
        [[t.name, list(t.shape), t.offset, t.merge] for t in layout.tensors] for layout in layouts
    ]


def layouts_from_json(value: list[list[list[Any]]]) -> tuple[FragmentLayout, ...]:
    """Return the layouts that `layouts_to_json` wrote."""
    return tuple(
        FragmentLayout(
            p,
            tuple(
                TensorSpec(name, tuple(shape), offset, merge) for name, shape, offset, merge in rows
            ),
        )
        for p, rows in enumerate(value)
    )
