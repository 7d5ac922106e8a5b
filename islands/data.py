"""Cuts documents into a held-out part and one shard per island, and names the windows of a batch.

This module knows bytes, documents and sample counts. It must not know torch, a disk, or which
model reads the batches. Everything here is a pure function of content: no order of a mapping, no
`hash()` and no process-wide random state has a say.
"""

from __future__ import annotations

import hashlib
import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from islands.types import ConfigError

Tokens = npt.NDArray[np.uint8]

SEPARATOR = b"\n\n"
# A shard may miss its share of the bytes by this much, plus the one line where a document was cut.
BALANCE_TOLERANCE = 0.02


@dataclass(frozen=True, slots=True)
class Split:
    """One text cut in parts that share no document. The arrays are read-only uint8, one a part.

    `digests` and `num_documents` have the keys of `shards`; the digests are SHA-256 in hex of the
    array's bytes. A document that was cut counts once in each shard that holds a piece of it.
    `num_duplicates` counts the documents left out because another one has the same content.
    """

    shards: dict[str, Tokens]
    digests: dict[str, str]
    num_documents: dict[str, int]
    held_out: Tokens
    held_out_digest: str
    num_held_out_documents: int
    num_duplicates: int


@dataclass(frozen=True, slots=True, order=True)
class _Piece:
    """A part of a document; ordered by the document's digest, then by place in it."""

    digest: str
    offset: int
    text: bytes


def digest(array: npt.NDArray[np.generic]) -> str:
    """Return the SHA-256 of the array's bytes in C order, in hex."""
    return hashlib.sha256(np.ascontiguousarray(array).data).hexdigest()


def split_documents(
    documents: Mapping[str, bytes],
    *,
    shards: Sequence[str],
    weights: Sequence[float] | None,
    held_out_fraction: float,
) -> Split:
    """Return the documents in a held-out part and one shard per name in `shards`.

    Documents with equal content count once and empty ones not at all; names of documents have no
    influence. The held-out part takes whole documents, in the order of their digests, until its
    fraction of the bytes is full: at least one document, and less than the fraction where the
    next document would not fit. The rest goes to the shards, largest document first, each to the
    shard with most room left. A document is cut only where it fits into no shard, at the end of a
    line if there is one, so that every shard has its share of the bytes within 2 %. Within a part
    the documents follow each other by digest, joined by an empty line (`SEPARATOR`).

    Args:
        documents: name -> text in bytes.
        shards: one name per island, in any order that is the same for everybody.
        weights: each shard's share of the bytes, on any scale; None for equal shares.
        held_out_fraction: of the bytes, in [0, 1); 0 holds nothing out.

    Raises:
        ConfigError: no text; shards or weights that make no sense; something is to be held out
            of a single document.
    """
    _check_split(shards, weights, held_out_fraction)
    distinct = {hashlib.sha256(text).hexdigest(): text for text in documents.values() if text}
    if not distinct:
        raise ConfigError(
            f"data must hold at least one byte of text, got {len(documents)} documents, all empty: "
            "name another source"
        )
    pieces = [_Piece(key, 0, distinct[key]) for key in sorted(distinct)]
    held_out, rest = _hold_out(pieces, held_out_fraction)
    dealt = _deal(rest, weights or [1.0] * len(shards))
    arrays = {name: _join(dealt[i]) for i, name in enumerate(shards)}
    held_out_array = _join(held_out)
    return Split(
        shards=arrays,
        digests={name: digest(array) for name, array in arrays.items()},
        num_documents={
            name: len({piece.digest for piece in dealt[i]}) for i, name in enumerate(shards)
        },
        held_out=held_out_array,
        held_out_digest=digest(held_out_array),
        num_held_out_documents=len(held_out),
        num_duplicates=sum(1 for text in documents.values() if text) - len(distinct),
    )


def _check_split(
    shards: Sequence[str], weights: Sequence[float] | None, held_out_fraction: float
) -> None:
    if not shards or len(set(shards)) != len(shards):
        raise ConfigError(
            f"shards must be one or more different names, got {list(shards)}: "
            "give every island a name of its own"
        )
    if weights is not None and len(weights) != len(shards):
        raise ConfigError(
            f"weights must be one per shard ({len(shards)}), got {len(weights)}: "
            "add or remove weights, or leave them out for equal shares"
        )
    if weights is not None and not all(0 < weight < math.inf for weight in weights):
        raise ConfigError(
            f"weights must be finite and > 0, got {list(weights)}: "
            "leave an island that gets no data out of the run"
        )
    if not 0 <= held_out_fraction < 1:
        raise ConfigError(
            f"held_out_fraction must be in [0, 1), got {held_out_fraction}: 0.05 is usual"
        )


def _hold_out(pieces: list[_Piece], fraction: float) -> tuple[list[_Piece], list[_Piece]]:
    """Return (held out, rest) of whole documents, both in the order given."""
    if fraction == 0:
        return [], pieces
    if len(pieces) < 2:
        raise ConfigError(
            "held_out_fraction > 0 needs 2 or more different documents, got 1: cut the text into "
            "several files, or set held_out_fraction = 0"
        )
    room = fraction * sum(len(piece.text) for piece in pieces)
    chosen: set[str] = set()
    for piece in pieces:
        if len(piece.text) <= room:
            chosen.add(piece.digest)
            room -= len(piece.text)
    if not chosen:
        chosen.add(min(pieces, key=lambda piece: (len(piece.text), piece.digest)).digest)
    held_out = [piece for piece in pieces if piece.digest in chosen]
    return held_out, [piece for piece in pieces if piece.digest not in chosen]


def _deal(pieces: Sequence[_Piece], weights: Sequence[float]) -> list[list[_Piece]]:
    """Return one sorted list of pieces per weight, cutting pieces where that is needed.

    The room left in all shards together always equals the bytes left to deal, so the roomiest of
    n shards has room for 1/n of any piece: a cut is never a crumb, and there are few of them.
    """
    num_bytes = sum(len(piece.text) for piece in pieces)
    targets = [num_bytes * weight / sum(weights) for weight in weights]
    # Shared by all shards, since what one takes too much another one lacks.
    tolerance = BALANCE_TOLERANCE * min(targets) / len(targets)
    rooms = list(targets)
    dealt: list[list[_Piece]] = [[] for _ in weights]
    queue = [(-len(piece.text), piece) for piece in pieces]
    heapq.heapify(queue)
    while queue:
        piece = heapq.heappop(queue)[1]
        shard = max(range(len(rooms)), key=lambda i: (rooms[i], -i))
        if len(piece.text) > rooms[shard] + tolerance:
            piece, tail = _cut(piece, int(rooms[shard]))
            if tail.text:
                heapq.heappush(queue, (-len(tail.text), tail))
        dealt[shard].append(piece)
        rooms[shard] -= len(piece.text)
    return [sorted(share) for share in dealt]


def _cut(piece: _Piece, limit: int) -> tuple[_Piece, _Piece]:
    """Return the piece in two, the first of `limit` bytes at most: lines, words or characters.

    Where not even one character fits, the first is all of it and the second is empty.
    """
    text = piece.text
    end = text.rfind(b"\n", 0, limit) + 1 or text.rfind(b" ", 0, limit) + 1
    if not end:
        end = limit
        while end and text[end] & 0xC0 == 0x80:  # UTF-8: 10xxxxxx continues a character
            end -= 1
    end = end or len(text)
    return (
        _Piece(piece.digest, piece.offset, text[:end]),
        _Piece(piece.digest, piece.offset + end, text[end:]),
    )


def _join(pieces: Sequence[_Piece]) -> Tokens:
    return np.frombuffer(SEPARATOR.join(piece.text for piece in pieces), dtype=np.uint8)


def require_enough(shard_name: str, num_bytes: int, *, batch_size: int, context: int) -> None:
    """Raise ConfigError if a shard of `num_bytes` bytes cannot fill one batch of windows."""
    needed = batch_size * context + 1
    if num_bytes < needed:
        raise ConfigError(
            f"shard {shard_name!r} must hold one batch, batch_size * context + 1 = {needed} bytes, "
            f"got {num_bytes}: add text, or lower batch_size ({batch_size}), context ({context}) "
            "or the number of islands"
        )


def num_windows(num_bytes: int, *, context: int) -> int:
    """Return how many windows an epoch visits, the same in every epoch.

    Windows are `context` bytes apart and one byte longer, for the last target. An epoch may start
    anywhere in the first `context` bytes, so one window less than would fit unshifted is counted,
    and what lies before the first and after the last one is left out of that epoch. A shard too
    short for that has its one window. 0 means that not even one fits.
    """
    if num_bytes < context + 1:
        return 0
    return max(1, num_bytes // context - 1)


def batch_at(
    tokens: Tokens, *, cursor: int, batch_size: int, context: int, seed: int, learner: str
) -> npt.NDArray[np.int64]:
    """Return the next `batch_size` windows of a learner that has taken `cursor` windows so far.

    A pure function of its arguments, so a learner that restarts with its cursor repeats and skips
    nothing. Each epoch visits each window once, in an order and with a shift of all windows that
    follow from (seed, learner, epoch). A batch may begin in one epoch and end in a later one.

    Args:
        tokens: uint8 (num_bytes,), one shard.
        cursor: windows taken so far, >= 0.

    Returns:
        int64 (batch_size, context + 1): inputs are `[:, :-1]`, targets are `[:, 1:]`.

    Raises:
        ConfigError: the shard holds not even one window.
    """
    per_epoch = num_windows(len(tokens), context=context)
    if per_epoch == 0:
        require_enough(learner, len(tokens), batch_size=1, context=context)
    epoch, first = divmod(cursor, per_epoch)
    starts = _epoch_starts(len(tokens), context, seed, learner, epoch)[first : first + batch_size]
    while len(starts) < batch_size:
        epoch += 1
        more = _epoch_starts(len(tokens), context, seed, learner, epoch)
        starts = np.concatenate([starts, more[: batch_size - len(starts)]])
    windows: npt.NDArray[np.int64] = tokens[starts[:, None] + np.arange(context + 1)].astype(
        np.int64
    )
    return windows


@lru_cache(maxsize=32)  # in one process: every learner's present epoch, and the next one at its end
def _epoch_starts(
    num_bytes: int, context: int, seed: int, learner: str, epoch: int
) -> npt.NDArray[np.int64]:
    """Return the first byte of each window of an epoch, in the order of visit; read-only."""
    count = num_windows(num_bytes, context=context)
    key = hashlib.sha256(f"{seed}/{learner}/{epoch}".encode()).digest()
    # NumPy promises that raw streams never change from version to version, of `permutation` it
    # does not; a resumed run must see the same order.
    raw = np.random.PCG64(int.from_bytes(key[:16], "little")).random_raw(count + 1)
    num_shifts = min(context, num_bytes - count * context)
    shift = int(raw[count]) % num_shifts
    order: npt.NDArray[np.int64] = np.argsort(raw[:count], kind="stable")
    starts = order * context + shift
    starts.flags.writeable = False
    return starts
