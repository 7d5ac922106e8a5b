"""The outer step: token weights, the two merge rules, the chunked fold of many deltas, Nesterov momentum.

Knows float32 vectors, weights and layouts; must not know torch, a store, or how the numbers got here.
Sums are taken in float64 and in the order given, so equal inputs give equal bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from islands.types import EmptyQuorum, FragmentLayout, FragmentMismatch, Refused, TensorSpec

Vector = npt.NDArray[np.float32]
# Elements worked on at a time: the copies every operation makes stay in the cache and out of the memory bill.
BLOCK = 2**15
# A direction shorter than this is rounding noise: unit vectors that cancel say nothing about where to go.
DEGENERATE_NORM = 1e-12
# Of any float32 vector but zero. A share over less than that may be infinite, and infinity times zero is NaN.
SMALLEST_NORM = 2.0**-149
# Elements of a fragment by which directions are compared: a cosine is then off by some 1/64, whatever the size.
MOST_SAMPLED = 2**12


def token_weight(num_tokens: int, num_steps: int) -> float:
    """Return tokens times mean tokens per step: quantity times quality. No steps weigh nothing.

    Raises:
        Refused: a negative or non-finite count.

    Source: Decoupled DiLoCo, arXiv:2604.21428, algorithm 2 line 9, as retold by its readers.
    """
    if (
        not (math.isfinite(num_tokens) and math.isfinite(num_steps))
        or min(num_tokens, num_steps) < 0
    ):
        raise Refused(
            "tokens",
            f"counts must be finite and >= 0, got {num_tokens} tokens in {num_steps} steps",
        )
    return num_tokens * (num_tokens / num_steps) if num_steps else 0.0


def shares(weights: Sequence[float]) -> tuple[float, ...]:
    """Return the weights divided by their sum.

    Raises:
        EmptyQuorum: they sum to zero, or there are none.
        Refused: one is negative or not finite.
    """
    if any(not math.isfinite(weight) or weight < 0 for weight in weights):
        raise Refused("weight", f"weights must be finite and >= 0, got {list(weights)}")
    total = math.fsum(weights)
    if total <= 0:
        raise EmptyQuorum(f"a merge needs a positive weight, got {list(weights)}")
    return tuple(weight / total for weight in weights)


def weighted_mean(deltas: Sequence[Vector], weights: Sequence[float]) -> Vector:
    """Return sum(w v) / sum(w), float32 of the deltas' shape.

    Raises:
        FragmentMismatch: different shapes, or another number of weights than deltas.
        EmptyQuorum: the weights sum to zero.
    """
    _require_equal_shapes(deltas, weights)
    total = np.zeros(deltas[0].shape if deltas else (), dtype=np.float64)
    for share, delta in zip(shares(weights), deltas, strict=True):
        total += share * delta.astype(np.float64)
    return total.astype(np.float32)


def radial_directional_mean(deltas: Sequence[Vector], weights: Sequence[float]) -> Vector:
    """Return mean length times mean direction of one tensor's deltas: the plain form of `fold`.

    Length is the weighted mean of the norms; direction the normalised weighted mean of the unit vectors. Where the
    unit vectors cancel there is no direction, and the weighted mean is returned.

    Args:
        deltas: one per learner, float32, equal shapes.
        weights: one per learner, >= 0, any scale.

    Raises:
        FragmentMismatch: different shapes, or another number of weights than deltas.
        EmptyQuorum: the weights sum to zero.

    Source: Decoupled DiLoCo, arXiv:2604.21428, radial-directional averaging, in the reading of its reimplementers.
    """
    _require_equal_shapes(deltas, weights)
    portions = shares(weights)
    norms = [float(np.sqrt(sum_of_squares(delta))) for delta in deltas]
    direction = np.zeros(deltas[0].shape, dtype=np.float64)
    for portion, norm, delta in zip(portions, norms, deltas, strict=True):
        if norm > 0:
            direction += (portion / norm) * delta.astype(np.float64)
    length = float(np.sqrt(np.add.reduce(np.square(direction).ravel())))
    if length < DEGENERATE_NORM:
        return weighted_mean(deltas, weights)
    radius = math.fsum(portion * norm for portion, norm in zip(portions, norms, strict=True))
    return (direction * (radius / length)).astype(np.float32)


def sum_of_squares(values: Vector) -> float:
    """Return the sum of squares in float64. numpy's pairwise sum: the same bits on every machine, unlike BLAS."""
    flat = values.ravel()
    blocks = (
        np.square(flat[first:last], dtype=np.float64) for first, last in spans(flat.size, BLOCK)
    )
    return math.fsum(float(np.add.reduce(block)) for block in blocks)


def tensor_norms(values: Vector, layout: FragmentLayout) -> tuple[float, ...]:
    """Return each tensor's Euclidean norm within a fragment's flat vector, in layout order."""
    return tuple(math.sqrt(sum_of_squares(values[t.offset : t.stop])) for t in layout.tensors)


def nesterov_step(
    params: Vector, momentum: Vector, delta: Vector, *, learning_rate: float, momentum_factor: float
) -> tuple[Vector, Vector]:
    """Return (parameters, momentum) after one outer step; elementwise, so it may be called piece by piece.

    momentum' = mu momentum + delta; parameters' = parameters - lr (delta + mu momentum'). PyTorch's form of Nesterov.
    """
    rate, factor = np.float32(learning_rate), np.float32(momentum_factor)
    new_momentum = factor * momentum + delta
    new_params: Vector = np.subtract(
        params, rate * (delta + factor * new_momentum), dtype=np.float32
    )
    return new_params, new_momentum


@dataclass(frozen=True, slots=True)
class Folded:
    """A merged delta and what the fold saw on the way.

    `delta`: (elements,) float32. `norms[i][t]`: learner i's norm of tensor t, recomputed from what was read.
    `cosines[i]`: see `cosines`.
    """

    delta: Vector
    norms: tuple[tuple[float, ...], ...]
    cosines: tuple[float | None, ...]


def fold(
    layout: FragmentLayout,
    read: Callable[[int, int, int], Vector],
    *,
    weights: Sequence[float],
    norms: Sequence[Sequence[float]],
    chunk_elements: int,
) -> Folded:
    """Merge one fragment chunk by chunk: one fragment and three chunks of memory, however many learners.

    Args:
        layout: the fragment; each tensor names its rule.
        read: `read(i, start, stop)` returns elements start..stop of learner i's delta, float32.
        weights: one per learner, >= 0, any scale.
        norms: `norms[i][t]` as announced by learner i. They scale the directions, so a caller must compare
            them with `Folded.norms` and throw the result away where they differ.
        chunk_elements: how many elements are read at once.

    Raises:
        EmptyQuorum: the weights sum to zero.
        FragmentMismatch: a learner announced another number of norms than there are tensors.
    """
    portions = shares(weights)
    if any(len(row) != len(layout.tensors) for row in norms) or len(norms) != len(portions):
        raise FragmentMismatch(
            f"expected {len(layout.tensors)} norms of each of {len(portions)} learners"
        )
    scales = [
        _direction_scales(layout, portion, row)
        for portion, row in zip(portions, norms, strict=True)
    ]
    sample = Sample(len(portions), layout.size)
    delta, lengths, squares = _accumulate(layout, sample.watch(read), scales, chunk_elements)
    degenerate = set()
    for t, spec in enumerate(layout.tensors):
        if spec.merge == "mean":
            continue
        if lengths[t] < DEGENERATE_NORM:
            degenerate.add(t)
            continue
        radius = math.fsum(portion * row[t] for portion, row in zip(portions, norms, strict=True))
        delta[spec.offset : spec.stop] *= np.float32(radius / lengths[t])
    if degenerate:
        means = [[portion] * len(layout.tensors) for portion in portions]
        plain, _, _ = _accumulate(layout, read, means, chunk_elements)
        for t in degenerate:
            spec = layout.tensors[t]
            delta[spec.offset : spec.stop] = plain[spec.offset : spec.stop]
    seen = tuple(tuple(map(math.sqrt, row)) for row in squares)
    return Folded(delta, seen, cosines(sample.rows, portions))


class Sample:
    """Some elements of every learner's delta, the same ones of each, taken while the deltas are read.

    `rows`: (learners, at most `MOST_SAMPLED`) float32. The stride is odd: rows of a matrix are often a power of two
    long, and an even one would meet the same columns over and over.
    """

    def __init__(self, num_learners: int, size: int) -> None:
        self._stride = -(-size // MOST_SAMPLED) | 1
        self.rows = np.zeros((num_learners, -(-size // self._stride)), dtype=np.float32)

    def watch(self, read: Callable[[int, int, int], Vector]) -> Callable[[int, int, int], Vector]:
        """Return `read`, with its values taken note of."""

        def read_and_note(i: int, start: int, stop: int) -> Vector:
            values = read(i, start, stop)
            first, last = -(-start // self._stride), -(-stop // self._stride)
            self.rows[i, first:last] = values[first * self._stride - start :: self._stride]
            return values

        return read_and_note


def cosines(rows: Vector, portions: Sequence[float]) -> tuple[float | None, ...]:
    """Return each learner's cosine to the merged delta of the others: their weighted mean direction.

    Its own part is left out: with it in, the one that points elsewhere would still show 1/sqrt(M) among M. None where
    there is nothing to compare: nobody else, no direction of its own, or others that cancel.

    Args:
        rows: (learners, elements) float32.
        portions: the learners' shares of the weight.
    """
    lengths = [math.sqrt(sum_of_squares(row)) for row in rows]
    # One that is not finite is thrown out by its norms; until then it must spoil nothing.
    scales = [
        portion / length if SMALLEST_NORM <= length < math.inf else 0.0
        for portion, length in zip(portions, lengths, strict=True)
    ]
    total = np.zeros(rows.shape[1], dtype=np.float64)
    for scale, row in zip(scales, rows, strict=True):
        if scale:
            total += scale * row.astype(np.float64)
    found: list[float | None] = []
    for scale, length, row in zip(scales, lengths, rows, strict=True):
        own = row.astype(np.float64)
        rest = total - scale * own if scale else total
        reach = math.sqrt(float(np.add.reduce(np.square(rest))))
        if not scale or reach < DEGENERATE_NORM:
            found.append(None)
            continue
        cosine = float(np.add.reduce(rest * own)) / (reach * length)
        found.append(max(-1.0, min(1.0, cosine)))
    return tuple(found)


def spans(size: int, chunk_elements: int) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) of consecutive chunks that cover `size` elements."""
    for start in range(0, size, chunk_elements):
        yield start, min(size, start + chunk_elements)


def _direction_scales(
    layout: FragmentLayout, portion: float, norms: Sequence[float]
) -> list[float]:
    """Return the factor of each tensor of one learner: its share, over its norm where direction is averaged."""
    scales = []
    for spec, norm in zip(layout.tensors, norms, strict=True):
        if spec.merge == "mean":
            scales.append(portion)
        else:
            scales.append(portion / norm if norm >= SMALLEST_NORM else 0.0)
    return scales


def _accumulate(
    layout: FragmentLayout,
    read: Callable[[int, int, int], Vector],
    scales: Sequence[Sequence[float]],
    chunk_elements: int,
) -> tuple[Vector, list[float], list[list[float]]]:
    """Return sum_i scales[i][t] v_i as float32, its norm per tensor, and every learner's squares per tensor."""
    total = np.empty(layout.size, dtype=np.float32)
    lengths = [0.0] * len(layout.tensors)
    squares = [[0.0] * len(layout.tensors) for _ in scales]
    buffer = np.empty(min(chunk_elements, layout.size), dtype=np.float64)
    for start, stop in spans(layout.size, chunk_elements):
        pieces = list(_pieces(layout.tensors, start, stop))
        chunk = buffer[: stop - start]
        chunk.fill(0.0)
        for i, row in enumerate(scales):
            values = read(i, start, stop)
            for t, low, high in pieces:
                for first, last in spans(high - low, BLOCK):
                    block = slice(low - start + first, low - start + last)
                    wide = values[block].astype(np.float64)
                    chunk[block] += row[t] * wide
                    squares[i][t] += float(np.add.reduce(np.square(wide, out=wide)))
            del values  # before the next one is read, or two would be held
        total[start:stop] = chunk
        for t, low, high in pieces:
            piece = chunk[low - start : high - start]
            lengths[t] += float(np.add.reduce(np.square(piece, out=piece)))
    return total, [math.sqrt(length) for length in lengths], squares


def _pieces(tensors: Sequence[TensorSpec], start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """Yield (tensor index, low, high) for the part of each tensor inside start..stop."""
    for t, spec in enumerate(tensors):
        low, high = max(start, spec.offset), min(stop, spec.stop)
        if low < high:
            yield t, low, high


def _require_equal_shapes(deltas: Sequence[Vector], weights: Sequence[float]) -> None:
    if len(deltas) != len(weights):
        raise FragmentMismatch(f"{len(deltas)} deltas but {len(weights)} weights")
    if not deltas:
        raise EmptyQuorum("a merge needs at least one contribution, got none")
    if len({delta.shape for delta in deltas}) != 1:
        raise FragmentMismatch(f"deltas have different shapes: {[delta.shape for delta in deltas]}")
