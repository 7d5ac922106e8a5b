"""How a float32 vector becomes the numbers that travel, and back.

Knows arrays; must not know what they mean or where they go. A codec is elementwise, so a vector may be coded piece by
piece. bfloat16 is kept as its 16 bits in uint16, because zarr has no such type.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from islands.types import ConfigError

STORED_DTYPE = {"float32": "float32", "bfloat16": "uint16"}


@dataclass(frozen=True, slots=True)
class Encoded:
    """A coded array: which codec, and its numbers in the shape of the original."""

    codec: str
    values: npt.NDArray[Any]

    @property
    def num_bytes(self) -> int:
        return int(self.values.nbytes)


def encode(values: npt.NDArray[np.float32], codec: str) -> Encoded:
    """Return `values` (any shape) in `codec`: a new array, never a view of the input.

    "float32" is exact; "bfloat16" rounds to nearest, ties to even: relative error at most 2**-8, infinities and NaN
    stay what they are.

    Raises:
        ConfigError: no such codec.
    """
    plain = np.array(values, dtype=np.float32, order="C")
    if codec == "float32":
        return Encoded(codec, plain)
    if codec == "bfloat16":
        return Encoded(codec, _round_to_bfloat16(plain))
    raise ConfigError(f"codec must be one of {', '.join(STORED_DTYPE)}, got {codec!r}")


def decode(encoded: Encoded) -> npt.NDArray[np.float32]:
    """Return the float32 values that `encoded` stands for, in its shape; "float32" is handed through uncopied.

    Raises:
        ConfigError: no such codec.
    """
    if encoded.codec == "float32":
        return np.asarray(encoded.values, dtype=np.float32)
    if encoded.codec == "bfloat16":
        bits = np.asarray(encoded.values, dtype=np.uint16).astype(np.uint32) << np.uint32(16)
        return np.asarray(bits).view(np.float32)
    raise ConfigError(f"codec must be one of {', '.join(STORED_DTYPE)}, got {encoded.codec!r}")


def _round_to_bfloat16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    bits = values.view(np.uint32)
    # Half of the last kept bit, plus that bit itself: ties go to even. NaN is set apart, since adding could carry its
    # payload over into infinity.
    rounded = bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))
    short = np.asarray(rounded >> np.uint32(16), dtype=np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), short)
