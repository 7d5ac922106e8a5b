"""Writing a version: fold, outer step, payload, commit, chunk by chunk. No torch.

A version is made from its parent's bytes and the consumed contributions alone, so `replay` makes the same bytes again.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from infra.arrays import ArrayReader, ArrayWriter
from infra.store import Store
from islands import names
from islands.codecs import STORED_DTYPE, Encoded, decode, encode
from islands.contributions import Contribution, Tally
from islands.merging import BLOCK, Vector, fold, nesterov_step, spans
from islands.types import DamagedObject, FragmentLayout, Manifest
from islands.versions import Commit
from tasks import records
from tasks.records import NewAttempt
from tasks.runs import Run

# The sender summed the same float32 values, but perhaps in other pieces: float64 sums differ far below this.
NORM_TOLERANCE = 1e-6


@dataclass(frozen=True, slots=True)
class Stepped:
    """One chunk of a new version: elements start..stop of its three arrays; `public` is coded."""

    start: int
    params: Vector
    momentum: Vector
    public: Encoded


def publish_first(run: Run, layout: FragmentLayout, values: Vector, new_attempt: NewAttempt) -> str:
    """Publish version 0 from initial values, with zero momentum; return its digest."""
    codec = run.config.sync.codec_down
    pieces = (
        Stepped(
            start, values[start:stop], values[start:stop] * 0, encode(values[start:stop], codec)
        )
        for start, stop in spans(layout.size, run.chunk_of(layout))
    )
    payload = write_version(run, layout, 0, pieces, new_attempt)
    outer = run.config.outer
    commit = Commit(
        fragment=layout.index,
        version=0,
        parent_digest=run.digest,
        consumed=(),
        refused=(),
        tallies={
            island.name: Tally() for island in sorted(run.config.islands, key=lambda i: i.name)
        },
        median_norm=0.0,
        learning_rate=outer.learning_rate,
        momentum=outer.momentum,
        codec=codec,
        synchronizer=-1,
        payload=payload,
    )
    return records.write(run.store, names.version(layout.index, 0), commit.to_json())


def fold_contributions(
    store: Store,
    layout: FragmentLayout,
    offers: Sequence[Contribution],
    weights: Sequence[float],
    chunk_elements: int,
) -> Vector:
    """Return the merged delta of contributions ordered by learner name.

    Raises:
        DamagedObject: named by its header: a payload is damaged or its norms are not what the header announced.
    """
    readers = [ArrayReader(store, offer.payload) for offer in offers]
    for offer in offers:
        if [array.length for array in offer.payload.arrays] != [layout.size]:
            raise DamagedObject(
                offer.name, f"its payload is not one array of {layout.size} elements"
            )

    def read(i: int, start: int, stop: int) -> Vector:
        try:
            return decode(Encoded(offers[i].codec, readers[i].read("delta", start, stop)))
        except DamagedObject as exc:
            raise DamagedObject(offers[i].name, str(exc)) from exc

    folded = fold(
        layout,
        read,
        weights=weights,
        norms=[o.norms for o in offers],
        chunk_elements=chunk_elements,
    )
    for offer, seen in zip(offers, folded.norms, strict=True):
        for spec, announced, found in zip(layout.tensors, offer.norms, seen, strict=True):
            if not math.isclose(announced, found, rel_tol=NORM_TOLERANCE, abs_tol=1e-30):
                raise DamagedObject(
                    offer.name, f"{spec.name} has norm {found!r}, announced {announced!r}"
                )
    return folded.delta


def step_chunks(
    store: Store,
    parent: Commit,
    delta: Vector,
    *,
    codec: str,
    learning_rate: float,
    momentum: float,
    chunk_elements: int,
) -> Iterator[Stepped]:
    """Yield the next version chunk by chunk: the outer step on the parent's own parameters and momentum."""
    reader = ArrayReader(store, parent.payload)
    for start, stop in spans(delta.size, chunk_elements):
        # The arrays just read are ours alone, so they take the result; in blocks, since every operation makes a copy.
        params, buffer = reader.read("params", start, stop), reader.read("momentum", start, stop)
        public = np.empty(stop - start, dtype=STORED_DTYPE[codec])
        for first, last in spans(stop - start, BLOCK):
            block = slice(first, last)
            params[block], buffer[block] = nesterov_step(
                params[block],
                buffer[block],
                delta[start + first : start + last],
                learning_rate=learning_rate,
                momentum_factor=momentum,
            )
            public[block] = encode(params[block], codec).values
        yield Stepped(start, params, buffer, Encoded(codec, public))


def write_version(
    run: Run,
    layout: FragmentLayout,
    version: int,
    pieces: Iterator[Stepped],
    new_attempt: NewAttempt,
) -> Manifest:
    """Write the payload of a version under a fresh attempt and return its manifest; commits nothing."""
    public = STORED_DTYPE[run.config.sync.codec_down]
    writer = ArrayWriter(
        run.store,
        names.payload_folder(names.version(layout.index, version), new_attempt()),
        {
            "params": ("float32", layout.size),
            "momentum": ("float32", layout.size),
            "public": (public, layout.size),
        },
        chunk_elements=run.chunk_elements,
    )
    for piece in pieces:
        writer.write("params", piece.start, piece.params)
        writer.write("momentum", piece.start, piece.momentum)
        writer.write("public", piece.start, piece.public.values)
    return writer.finish()
