"""Writing a version: fold, outer step, payload, commit, chunk by chunk. No torch.

A version is made from its parent's bytes and the consumed contributions alone, so `replay` makes the same bytes again.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from infra.arrays import ArrayReader, ArrayWriter
from infra.store import Store
from islands import names
from islands.codecs import (
    STORED_DTYPE,
    Encoded,
    coded_length,
    codes_change,
    decode,
    encode,
    wire_codec,
)
from islands.contributions import Contribution, Tally
from islands.merging import BLOCK, Folded, Vector, fold, nesterov_step, spans
from islands.types import DamagedObject, FragmentLayout, Manifest
from islands.versions import Commit
from tasks import records
from tasks.records import NewAttempt
from tasks.runs import Run

# The sender summed the same float32 values, but perhaps in other pieces: float64 sums differ far below this.
NORM_TOLERANCE = 1e-6


@dataclass(frozen=True, slots=True)
class Stepped:
    """One chunk of a new version, from element `start` on: the synchronizer's own arrays, and what learners fetch.

    `public` is coded; where it codes a change, `whole` is the values that change leads to. `second`: AdamW's second
    moment, under data-parallel.
    """

    start: int
    params: Vector
    momentum: Vector
    public: Encoded | None
    whole: Vector | None = None
    second: Vector | None = None

    def arrays(self) -> dict[str, np.ndarray[Any, Any]]:
        """Return what is stored, by array name."""
        stored: dict[str, np.ndarray[Any, Any]] = {
            "params": self.params,
            "momentum": self.momentum,
        }
        if self.second is not None:
            stored["second"] = self.second
        if self.public is not None:
            stored[records.PUBLIC] = self.public.values
        if self.whole is not None:
            stored[records.WHOLE] = self.whole
        return stored


def publish_first(
    run: Run,
    layout: FragmentLayout,
    values: Vector,
    new_attempt: NewAttempt,
    *,
    momentum: Vector | None = None,
) -> str:
    """Publish version 0 from initial values, with zero momentum unless some is given; return its digest."""
    codec = run.config.sync.codec_down
    pieces = first_chunks(run, layout, values, momentum)
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


def first_chunks(
    run: Run, layout: FragmentLayout, values: Vector, momentum: Vector | None
) -> Iterator[Stepped]:
    """Yield version 0 chunk by chunk. It has no parent, so under a codec of changes it is there whole."""
    codec = run.config.sync.codec_down
    for start, stop in spans(layout.size, run.chunk_of(layout)):
        piece = values[start:stop]
        moved = piece * 0 if momentum is None else momentum[start:stop]
        second = piece * 0 if run.config.sync.sends_gradients else None
        if codes_change(codec):
            yield Stepped(start, piece, moved, None, piece, second)
        else:
            yield Stepped(start, piece, moved, encode(piece, codec), None, second)


def fold_contributions(
    store: Store,
    layout: FragmentLayout,
    offers: Sequence[Contribution],
    weights: Sequence[float],
    chunk_elements: int,
) -> Folded:
    """Return the merged delta of contributions ordered by learner name.

    Raises:
        DamagedObject: named by its header: a payload is damaged or its norms are not what the header announced.
    """
    readers = [ArrayReader(store, offer.payload) for offer in offers]
    for offer in offers:
        dtype, length = STORED_DTYPE[offer.codec], coded_length(offer.codec, layout.size)
        if [(array.dtype, array.length) for array in offer.payload.arrays] != [(dtype, length)]:
            raise DamagedObject(offer.name, f"its payload is not one array of {length} {dtype}")

    def read(i: int, start: int, stop: int) -> Vector:
        try:
            codec = offers[i].codec
            return records.read_span(readers[i], "delta", codec, start, stop, copy=False)
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
    return folded


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
    reader, before = ArrayReader(store, parent.payload), records.PublicReader(store, parent)
    for start, stop in spans(delta.size, chunk_elements):
        # The arrays just read are ours alone, so they take the result; in blocks, since every operation makes a copy.
        params, buffer = reader.read("params", start, stop), reader.read("momentum", start, stop)
        for first, last in spans(stop - start, BLOCK):
            block = slice(first, last)
            params[block], buffer[block] = nesterov_step(
                params[block],
                buffer[block],
                delta[start + first : start + last],
                learning_rate=learning_rate,
                momentum_factor=momentum,
            )
        if codes_change(codec):
            public, whole = _code_change(before.read(start, stop), params, wire_codec(codec))
            yield Stepped(start, params, buffer, public, whole)
        else:
            yield Stepped(start, params, buffer, encode(params, codec))


def _code_change(before: Vector, params: Vector, codec: str) -> tuple[Encoded, Vector]:
    """Return the coded change from the public values before, and those it leads to.

    What coding cuts off stays in the difference to the parameters, so the next version makes up for it.
    """
    coded = np.empty(coded_length(codec, params.size), dtype=STORED_DTYPE[codec])
    for first, last in spans(params.size, BLOCK):
        block = slice(first, last)
        piece = encode(params[block] - before[block], codec)
        coded[coded_length(codec, first) : coded_length(codec, last)] = piece.values
        before[block] = records.after_change(before[block], decode(piece))
    return Encoded(codec, coded, params.shape), before


def write_version(
    run: Run,
    layout: FragmentLayout,
    version: int,
    pieces: Iterator[Stepped],
    new_attempt: NewAttempt,
) -> Manifest:
    """Write the payload of a version under a fresh attempt and return its manifest; commits nothing."""
    codec, size, chunk = run.config.sync.codec_down, layout.size, run.chunk_of(layout)
    wire = wire_codec(codec)
    arrays = {"params": ("float32", size), "momentum": ("float32", size)}
    if run.config.sync.sends_gradients:
        arrays["second"] = ("float32", size)
    if codes_change(codec):
        arrays[records.WHOLE] = ("float32", size)
    if version > 0 or not codes_change(codec):
        arrays[records.PUBLIC] = (STORED_DTYPE[wire], coded_length(wire, size))
    writer = ArrayWriter(
        run.store,
        names.payload_folder(names.version(layout.index, version), new_attempt()),
        arrays,
        chunk_elements=run.chunk_elements,
        chunk_lengths={records.PUBLIC: coded_length(wire, chunk)},
    )
    for piece in pieces:
        for name, values in piece.arrays().items():
            start = coded_length(wire, piece.start) if name == records.PUBLIC else piece.start
            writer.write(name, start, values)
    return writer.finish()
