"""A learner that hands out gradients: data-parallel training, where the optimizer is the synchronizer's.

Knows the learner it varies; must not know what becomes of a gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from islands.learner import Base, Copy, Learner, LearnerState, flatten, trainable
from islands.ledger import LearnerRecord
from islands.schedule import Schedule
from islands.types import FragmentLayout


class GradientLearner(Learner):
    """A learner whose step computes a gradient, unclipped, and leaves the model where it is.

    A copy's `anchor` is the gradient and its `local` is zero, so that anchor minus local is the gradient, bit for bit.
    """

    def __init__(
        self,
        name: str,
        model: nn.Module,
        loss: Callable[[Any], Tensor],
        *,
        layouts: Sequence[FragmentLayout],
        schedule: Schedule,
    ) -> None:
        super().__init__(
            name,
            model,
            _StandStill(trainable(model).values()),
            loss,
            layouts=layouts,
            schedule=schedule,
            clip_norm=float("inf"),
            period_steps=1,
        )

    def copy(self, fragment: int, *, next_push_steps: int) -> Copy:
        """Return the last step's gradient of a fragment for pushing, and enter it into the ledger."""
        gradients = {
            name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            for name, parameter in trainable(self.model).items()
        }
        gradient = flatten(self.layouts[fragment], gradients)
        copy = super().copy(fragment, next_push_steps=next_push_steps)
        return replace(copy, anchor=gradient, local=np.zeros_like(gradient))

    def retune(self, *, schedule: Schedule, clip_norm: float, period_steps: int) -> None:
        """Go on under changed settings; what is clipped is the merged gradient, not this one."""
        super().retune(schedule=schedule, clip_norm=float("inf"), period_steps=period_steps)

    def come_back(
        self,
        state: LearnerState | None,
        last: LearnerRecord,
        heads: Sequence[Base],
        *,
        incarnation: int,
    ) -> None:
        """Start the next incarnation from the heads: no checkpoint holds a gradient, so nothing open is kept."""
        if state is not None:
            self.load(state)  # the model's buffers; its parameters are the heads'
        super().come_back(None, last, heads, incarnation=incarnation)


class _StandStill(torch.optim.Optimizer):
    """An optimizer whose step changes nothing."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(list(parameters), {"lr": 0.0})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Leave every parameter and every gradient as it is."""
