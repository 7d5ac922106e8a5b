"""How a float32 vector becomes the numbers that travel, and back.

Knows arrays; must not know what they mean or where they go. "float32" and "bfloat16" are elementwise. "int8", "int4"
and "e3m0" code blocks of consecutive elements, each beside its own peak (the largest magnitude, float32), so that one
outlier coarsens no more than its block. A vector may be coded in pieces, if every piece but the last is whole blocks.

    int8, int4   k / 127 and k / 7 of the peak, k whole: symmetric, so a mean of zero stays one
    e3m0         sign and three bits of exponent: 0, and peak / 64, peak / 32, … peak

A block lies as four bytes of peak, then its codes, two to a byte for the 4-bit codecs; the last block ends where the
vector does. bfloat16 is kept as its 16 bits in uint16, because zarr has no such type.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from islands.types import ConfigError

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]

# Elements that share a peak: its four bytes add 6 % to 4-bit codes.
BLOCK_SIZE = 128
DELTA_SUFFIX = "-delta"
STORED_DTYPE = {
    "float32": "float32",
    "bfloat16": "uint16",
    "int8": "uint8",
    "int4": "uint8",
    "e3m0": "uint8",
}
_CODE_BITS = {"int8": 8, "int4": 4, "e3m0": 4}
_PEAK_BYTES = 4
# Elements worked on at a time, so that the copies every operation makes stay in the cache.
_PIECE = 2**16


@dataclass(frozen=True, slots=True)
class Encoded:
    """A coded array: which codec, its numbers, the shape of the original, elements per block (of block codecs).

    `values` has the original's shape under an elementwise codec, one dimension of bytes under a block codec.
    """

    codec: str
    values: npt.NDArray[Any]
    shape: tuple[int, ...]
    block_size: int = BLOCK_SIZE

    @property
    def num_bytes(self) -> int:
        return int(self.values.nbytes)


def encode(values: Floats, codec: str, *, block_size: int = BLOCK_SIZE) -> Encoded:
    """Return `values` (any shape) in `codec`: a new array, never a view of the input.

    "float32" is exact; "bfloat16" rounds to nearest, ties to even: relative error at most 2**-8, infinities and NaN
    stay what they are. Block codecs round to the nearest code: the error is at most 1/254 of the block's peak (int8),
    1/14 (int4), 1/4 (e3m0; of the value itself at most 1/3 above 1/128 of the peak). Zeros stay zero and the peak is
    exact; a block that holds a number that is not finite decodes to NaN as a whole.

    Args:
        values: float32, any memory order.
        codec: a key of `STORED_DTYPE`.
        block_size: elements per block, even.

    Raises:
        ConfigError: no such codec, or an odd block.
    """
    _require_known(codec, block_size)
    if codec == "float32":
        return Encoded(codec, np.array(values, dtype=np.float32, order="C"), values.shape)
    flat = np.asarray(values, dtype=np.float32).reshape(-1)
    if codec == "bfloat16":
        return Encoded(codec, _round_to_bfloat16(flat).reshape(values.shape), values.shape)
    return Encoded(codec, _encode_blocks(flat, codec, block_size), values.shape, block_size)


def decode(encoded: Encoded) -> Floats:
    """Return the float32 values that `encoded` stands for, in its shape; "float32" is handed through uncopied.

    Raises:
        ConfigError: no such codec.
    """
    _require_known(encoded.codec, encoded.block_size)
    if encoded.codec == "float32":
        return np.asarray(encoded.values, dtype=np.float32)
    if encoded.codec == "bfloat16":
        bits = np.asarray(encoded.values, dtype=np.uint16).astype(np.uint32) << np.uint32(16)
        return np.asarray(bits).view(np.float32)
    flat = np.empty(int(np.prod(encoded.shape, dtype=np.int64)), dtype=np.float32)
    _decode_blocks(encoded, flat)
    return flat.reshape(encoded.shape)


def wire_codec(codec: str) -> str:
    """Return the codec of what travels: of "int4-delta", which codes the change since the parent version, "int4"."""
    return codec.removesuffix(DELTA_SUFFIX)


def codes_change(codec: str) -> bool:
    """Say whether a codec of published parameters codes their change since the parent version."""
    return codec.endswith(DELTA_SUFFIX)


def coded_length(codec: str, num_elements: int, *, block_size: int = BLOCK_SIZE) -> int:
    """Return how many numbers of `STORED_DTYPE[codec]` stand for a vector of `num_elements`."""
    if codec not in _CODE_BITS:
        return num_elements
    num_blocks = -(-num_elements // block_size)
    return num_blocks * _PEAK_BYTES + -(-num_elements * _CODE_BITS[codec] // 8)


def _require_known(codec: str, block_size: int) -> None:
    if codec not in STORED_DTYPE:
        raise ConfigError(f"codec must be one of {', '.join(STORED_DTYPE)}, got {codec!r}")
    if block_size < 2 or block_size % 2:
        raise ConfigError(f"block_size must be even and >= 2, got {block_size}; 128 is usual")


def _round_to_bfloat16(flat: Floats) -> npt.NDArray[np.uint16]:
    coded = np.empty(flat.size, dtype=np.uint16)
    for start in range(0, flat.size, _PIECE):
        part = np.ascontiguousarray(flat[start : start + _PIECE])
        bits = part.view(np.uint32)
        # Half of the last kept bit, plus that bit itself: ties go to even. NaN is set apart, since adding could carry
        # its payload over into infinity.
        rounded = bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))
        short = (rounded >> np.uint32(16)).astype(np.uint16)
        short[np.isnan(part)] = 0x7FC0
        coded[start : start + part.size] = short
    return coded


# --- blocks ---


def _encode_blocks(flat: Floats, codec: str, block_size: int) -> Bytes:
    coded = np.empty(coded_length(codec, flat.size, block_size=block_size), dtype=np.uint8)
    piece = max(1, _PIECE // block_size) * block_size
    for start in range(0, flat.size, piece):
        part = flat[start : start + piece]
        begin = coded_length(codec, start, block_size=block_size)
        end = coded_length(codec, start + part.size, block_size=block_size)
        coded[begin:end] = _encode_piece(part, codec, block_size)
    return coded


def _encode_piece(part: Floats, codec: str, block_size: int) -> Bytes:
    """Return some whole blocks, the last one perhaps cut, as bytes."""
    length = coded_length(codec, part.size, block_size=block_size)
    if ragged := -part.size % block_size:
        part = np.concatenate([part, np.zeros(ragged, dtype=np.float32)])
    blocks = part.reshape(-1, block_size)
    with np.errstate(invalid="ignore"):  # what is not finite is told by its peak alone
        peaks = np.abs(blocks).max(axis=1)
        is_plain = np.isfinite(peaks) & (peaks > 0)
        # A division, since the inverse of a tiny peak is infinite.
        scales = np.where(is_plain, peaks, np.float32(1))[:, None]
        ratios = np.divide(blocks, scales, dtype=np.float32)
    ratios[~is_plain] = 0
    codes = _ENCODERS[codec](ratios)
    rows = np.empty((len(blocks), _PEAK_BYTES + codes.shape[1]), dtype=np.uint8)
    rows[:, :_PEAK_BYTES] = peaks.astype("<f4").view(np.uint8).reshape(-1, _PEAK_BYTES)
    rows[:, _PEAK_BYTES:] = codes
    return rows.reshape(-1)[:length]


def _decode_blocks(encoded: Encoded, flat: Floats) -> None:
    """Fill `flat` with what the bytes stand for."""
    codec, size = encoded.codec, encoded.block_size
    table = _TABLES[codec]
    piece = max(1, _PIECE // size) * size
    row = coded_length(codec, size, block_size=size)
    for start in range(0, flat.size, piece):
        part = flat[start : start + piece]
        begin = coded_length(codec, start, block_size=size)
        coded = encoded.values[begin : begin + coded_length(codec, part.size, block_size=size)]
        if ragged := -coded.size % row:
            coded = np.concatenate([coded, np.zeros(ragged, dtype=np.uint8)])
        rows = coded.reshape(-1, row)
        peaks = np.ascontiguousarray(rows[:, :_PEAK_BYTES]).view("<f4")
        levels = table[rows[:, _PEAK_BYTES:]].reshape(len(rows), size)
        # Zero times a peak that is not finite is NaN, and is meant to be.
        with np.errstate(invalid="ignore"):
            part[:] = (levels * peaks).reshape(-1)[: part.size]


def _int8_codes(ratios: Floats) -> Bytes:
    return np.asarray(np.rint(ratios * np.float32(127)).astype(np.int8).view(np.uint8))


def _int4_codes(ratios: Floats) -> Bytes:
    return _pack(np.rint(ratios * np.float32(7)).astype(np.int8).view(np.uint8) & np.uint8(0xF))


def _e3m0_codes(ratios: Floats) -> Bytes:
    # Half of the leading bit added: the exponent then is that of the nearest power of two.
    sizes = np.abs(ratios)
    exponents = ((sizes.view(np.uint32) + np.uint32(0x400000)) >> np.uint32(23)).astype(
        np.int16
    ) - 127
    codes = np.where(sizes >= np.float32(2**-7), np.clip(exponents + 7, 1, 7), 0).astype(np.uint8)
    return _pack(codes | ((ratios < 0) & (codes > 0)).astype(np.uint8) << np.uint8(3))


def _pack(nibbles: Bytes) -> Bytes:
    """Return two codes to a byte, the earlier one in the lower half."""
    return np.asarray(nibbles[:, 0::2] | (nibbles[:, 1::2] << np.uint8(4)))


def _pairs(levels: list[float]) -> Floats:
    """Return byte -> the two levels packed in it."""
    single = np.array(levels, dtype=np.float32)
    every = np.arange(256)
    return np.stack([single[every & 0xF], single[every >> 4]], axis=1)


_ENCODERS: dict[str, Callable[[Floats], Bytes]] = {
    "int8": _int8_codes,
    "int4": _int4_codes,
    "e3m0": _e3m0_codes,
}
# The most negative two's complement is no code of ours: it must not pass for a number.
_INT4_LEVELS = [*(k / 7 for k in range(8)), np.nan, *(k / 7 for k in range(-7, 0))]
_E3M0_SIZES = [0.0, *(2.0**k for k in range(-6, 1))]
_TABLES: dict[str, Floats] = {
    "int8": np.array([*range(128), np.nan, *range(-127, 0)], dtype=np.float32) / np.float32(127),
    "int4": _pairs(_INT4_LEVELS),
    "e3m0": _pairs([*_E3M0_SIZES, *(-size for size in _E3M0_SIZES)]),
}
