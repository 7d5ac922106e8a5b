"""From a configuration to a learner: model, optimizer, loss, schedule, wired together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from islands.config import RunConfig
from islands.gradients import GradientLearner
from islands.landing import sent
from islands.learner import Learner, adamw
from islands.model import ModelShape, build_model
from islands.model import loss as model_loss
from islands.schedule import Schedule
from islands.sections import InnerConfig
from islands.types import ConfigError, FragmentLayout
from tasks.runs import Run
from tasks.stepping import schedule_of


def model_shape(config: RunConfig) -> ModelShape:
    """Return the shape record of the configured model."""
    m = config.model
    return ModelShape(m.width, m.num_layers, m.num_heads, m.context, m.tied)


def use_one_thread() -> None:
    """Let torch compute on one thread in this process: the same sums in the same order, on any machine."""
    torch.set_num_threads(1)


def require_devices(config: RunConfig) -> None:
    """Raise ConfigError if an island names a device that this machine lacks."""
    num_cuda = torch.cuda.device_count()
    for island in config.islands:
        kind, _, index = island.device.partition(":")
        if kind == "cuda" and int(index or 0) >= num_cuda:
            raise ConfigError(
                f"islands.{island.name}.device must be one this machine has (cpu, {num_cuda} cuda), "
                f'got "{island.device}"; choose another'
            )


def build_learner(run: Run, name: str) -> Learner:
    """Return an island's learner with the run's initial model; it has not begun."""
    device = run.island(name).device
    model = build_model(model_shape(run.config), run.config.seed).to(device)
    schedule = schedule_for(run, name)
    if run.config.sync.sends_gradients:
        loss = _loss_of(model, device, run.config.inner)
        return GradientLearner(name, model, loss, layouts=run.layouts, schedule=schedule)
    return assemble(run.config, name, model, run.layouts, schedule=schedule, device=device)


def schedule_for(run: Run, name: str) -> Schedule:
    """Return an island's learning-rate schedule over its own share."""
    return schedule_of(run.config, run.own_tokens(name), begins_at=run.island(name).joined_at)


def retune(learner: Learner, run: Run) -> None:
    """Let a learner go on under the run's settings, its AdamW included, from its next step on."""
    inner = run.config.inner
    learner.retune(
        schedule=schedule_for(run, learner.name),
        clip_norm=inner.clip_norm,
        period_steps=run.config.sync.period_steps,
    )
    for group in learner.optimizer.param_groups:
        group["betas"] = (inner.beta1, inner.beta2)
        is_decayed = group["params"][0].ndim >= 2
        group["weight_decay"] = inner.weight_decay if is_decayed else 0.0


def assemble(
    config: RunConfig,
    name: str,
    model: nn.Module,
    layouts: tuple[FragmentLayout, ...],
    *,
    schedule: Schedule,
    device: str = "cpu",
) -> Learner:
    """Return a learner over `model` with the configured optimizer; batches are numpy arrays (batch, context + 1).

    Whatever the precision of the passes, parameters, gradients and moments are float32, as is all that is exchanged.
    """
    inner = config.inner
    return Learner(
        name,
        model,
        adamw(
            model,
            learning_rate=inner.learning_rate,
            betas=(inner.beta1, inner.beta2),
            weight_decay=inner.weight_decay,
        ),
        _loss_of(model, device, inner),
        layouts=layouts,
        schedule=schedule,
        clip_norm=inner.clip_norm,
        period_steps=config.sync.period_steps,
    )


def _loss_of(model: nn.Module, device: str, inner: InnerConfig) -> Callable[[Any], Tensor]:
    place, is_mixed = torch.device(device), inner.precision == "bfloat16"

    def loss(batch: Any) -> Tensor:
        with torch.autocast(place.type, dtype=torch.bfloat16, enabled=is_mixed):
            return model_loss(model, sent(batch, place))

    return loss
