"""Scores a text by a byte bigram: the least a language model has to beat.

This module knows counts of byte pairs. It must not know torch, windows or islands.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from islands.types import ConfigError

NUM_BYTES = 256
# Added to the count of each byte in the unigram, so that a byte never seen costs a finite number.
UNIGRAM_PRIOR = 0.1


def bigram_bits_per_byte(train: npt.NDArray[np.uint8], held_out: npt.NDArray[np.uint8]) -> float:
    """Return the mean bits per byte of `held_out` under a byte bigram counted on `train`.

    Witten-Bell smoothing: where a was followed n times, by t different bytes,

        P(b | a) = (count(a, b) + t * P(b)) / (n + t),    P(b) = (count(b) + 0.1) / (N + 25.6)

    and P(b | a) = P(b) where a was never followed. The first byte of `held_out` only serves as
    context and is not scored, as in `scoring.bits_per_byte`.

    Raises:
        ConfigError: `held_out` has fewer than 2 bytes.
    """
    if len(held_out) < 2:
        raise ConfigError(
            f"a scored text must have >= 2 bytes, got {len(held_out)}: hold more text out"
        )
    counts = np.bincount(train, minlength=NUM_BYTES).astype(np.float64)
    unigram = (counts + UNIGRAM_PRIOR) / (len(train) + NUM_BYTES * UNIGRAM_PRIOR)
    pairs = np.bincount(_pair_codes(train), minlength=NUM_BYTES**2).astype(np.float64)
    pairs = pairs.reshape(NUM_BYTES, NUM_BYTES)  # (first, second)
    followed = pairs.sum(axis=1, keepdims=True)
    kinds = np.maximum((pairs > 0).sum(axis=1, keepdims=True), 1)  # 1 where never followed: P(b)
    bigram = (pairs + kinds * unigram) / (followed + kinds)
    return float(-np.log2(bigram.ravel()[_pair_codes(held_out)]).mean())


def _pair_codes(text: npt.NDArray[np.uint8]) -> npt.NDArray[np.int64]:
    """Return first * 256 + second for each pair of neighbours."""
    wide = text.astype(np.int64)
    return wide[:-1] * NUM_BYTES + wide[1:]
