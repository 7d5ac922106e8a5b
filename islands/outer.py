"""The outer step as a record, and AdamW on merged gradients: the outer optimizer of data-parallel training.

Knows float32 vectors and numbers; must not know torch, a store, or how the gradients were merged. The other outer step,
Nesterov momentum, is in `islands/merging.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from islands.merging import Vector, sum_of_squares
from islands.types import TensorSpec

# torch's own default; no option of the inner optimizer either.
EPSILON = 1e-8


@dataclass(frozen=True, slots=True)
class AdamW:
    """What an AdamW step depends on besides arrays and its rate; a version's commit holds it.

    `num_steps`: steps taken, this one included. `clip_norm`: largest norm of the whole model's merged gradient.
    """

    num_steps: int
    beta1: float
    beta2: float
    weight_decay: float
    clip_norm: float


@dataclass(frozen=True, slots=True)
class OuterStep:
    """The outer step that makes a version: Nesterov's, with its rate and momentum factor; or AdamW's, with its rate."""

    learning_rate: float
    momentum: float
    adamw: AdamW | None = None


def clip_factor(gradient: Vector, clip_norm: float) -> float:
    """Return what to scale a whole model's gradient by, at most 1. torch's `clip_grad_norm_`."""
    return min(1.0, clip_norm / (math.sqrt(sum_of_squares(gradient)) + 1e-6))


def decay_of(tensors: Sequence[TensorSpec], weight_decay: float) -> Vector:
    """Return each element's weight decay: that of its tensor, none for vectors and scalars (norm gains, biases)."""
    decay = np.zeros(tensors[-1].stop if tensors else 0, dtype=np.float32)
    for spec in tensors:
        if len(spec.shape) >= 2:
            decay[spec.offset : spec.stop] = weight_decay
    return decay


def adamw_step(
    params: Vector,
    moments: tuple[Vector, Vector],
    gradient: Vector,
    *,
    decay: Vector,
    learning_rate: float,
    adamw: AdamW,
) -> tuple[Vector, tuple[Vector, Vector]]:
    """Return (parameters, moments) after one step; elementwise, so it may be called piece by piece.

    m' = b1 m + (1 - b1) g; v' = b2 v + (1 - b2) g^2; parameters' = (1 - lr decay) parameters
    - lr (m' / (1 - b1^t)) / (sqrt(v' / (1 - b2^t)) + epsilon). PyTorch's form, in its order of operations.

    Source: Loshchilov and Hutter, arXiv:1711.05101, algorithm 2.
    """
    first, second = moments
    one, beta2 = np.float32(1), np.float32(adamw.beta2)
    new_first = first + np.float32(1 - adamw.beta1) * (gradient - first)
    new_second = beta2 * second + np.float32(1 - adamw.beta2) * (gradient * gradient)
    rate = np.float32(learning_rate / (1 - adamw.beta1**adamw.num_steps))
    spread = np.float32(math.sqrt(1 - adamw.beta2**adamw.num_steps))
    kept = params * (one - np.float32(learning_rate) * decay)
    stride = rate * (new_first / (np.sqrt(new_second) / spread + np.float32(EPSILON)))
    new_params: Vector = np.subtract(kept, stride, dtype=np.float32)
    return new_params, (new_first, new_second)
