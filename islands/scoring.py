"""Scores a model on held-out text, in bits per byte.

This module knows windows over a text and a model's logits. It must not know training, sampling or
where the text comes from.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from islands.types import ConfigError


@torch.inference_mode()
def bits_per_byte(
    model: nn.Module,
    tokens: npt.NDArray[np.uint8],
    *,
    context: int,
    max_bytes: int,
    batch_size: int = 64,
) -> float:
    """Return the mean bits the model needs for a byte of `tokens`; the model's mode is restored.

    Windows of `context` bytes follow each other and the last one may be shorter, so each byte
    counts once, however the windows are batched. The first byte only serves as context. A byte at
    the start of a window is predicted from one byte before it, one at the end from `context`.

    Args:
        model: maps int64 (batch, time) to logits (batch, time, 256), time <= context.
        tokens: uint8 (num_bytes,).
        max_bytes: score the first `max_bytes` bytes after the first one, or all if there are
            fewer.

    Raises:
        ConfigError: there is not one byte to score.
    """
    num_scored = min(len(tokens) - 1, max_bytes)
    if num_scored < 1:
        raise ConfigError(
            f"a scored text must have >= 2 bytes and max_bytes must be >= 1, got {len(tokens)} "
            f"and {max_bytes}: hold more text out"
        )
    device = next(model.parameters()).device
    was_training = model.training
    model.eval()
    try:
        nats = 0.0
        for batch in _batches(tokens[: num_scored + 1], context, batch_size):
            nats += _summed_nats(model, torch.from_numpy(batch).to(device))
    finally:
        model.train(was_training)
    return nats / num_scored / math.log(2)


def _batches(
    tokens: npt.NDArray[np.uint8], context: int, batch_size: int
) -> Iterator[npt.NDArray[np.int64]]:
    """Yield (batch, context + 1) windows that overlap by one byte, then the rest as one row."""
    num_full = (len(tokens) - 1) // context
    starts = np.arange(num_full)[:, None] * context
    for first in range(0, num_full, batch_size):
        yield tokens[starts[first : first + batch_size] + np.arange(context + 1)].astype(np.int64)
    rest = tokens[num_full * context :]
    if len(rest) > 1:
        yield rest[None].astype(np.int64)


def _summed_nats(model: nn.Module, batch: Tensor) -> float:
    logits = model(batch[:, :-1]).float()
    return float(F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten(), reduction="sum"))
