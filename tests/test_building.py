"""From a configuration to a learner: what mixed precision changes, and what it must not."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from islands.landing import landed
from islands.learner import Base, Learner, trainable
from tasks import building, creating
from tasks.creating import Prepared
from tests import runs

BATCH = np.tile(np.arange(17), (4, 1))  # four rows that count from 0 to 16: easily learned


@pytest.fixture
def prepared(tmp_path: Path) -> Prepared:
    config = runs.tiny_config(tmp_path, "sync.num_fragments=2", store=f"memory://{tmp_path}")
    return creating.prepare_run(config, "r")


def a_learner(prepared: Prepared, precision: str) -> Learner:
    inner = prepared.config.inner.model_copy(update={"precision": precision})
    config = prepared.config.model_copy(update={"inner": inner})
    shape = building.model_shape(config)
    model = building.build_model(shape, config.seed)
    learner = building.assemble(
        config, "east", model, prepared.layouts, schedule=building.schedule_of(config, 4_000)
    )
    values = [learner.local_values(p) for p in range(2)]
    learner.begin([Base(0, "", vector) for vector in values], incarnation=0)
    return learner


def train(learner: Learner, num_steps: int) -> list[float]:
    return [learner.step(BATCH, num_tokens=64, num_samples=4) for _ in range(num_steps)]


def test_under_bfloat16_the_loss_falls_and_everything_kept_stays_float32(
    prepared: Prepared,
) -> None:
    learner = a_learner(prepared, "bfloat16")
    losses = train(learner, 20)
    assert losses[-1] < losses[0] - 1
    parameters = trainable(learner.model).values()
    assert {parameter.dtype for parameter in parameters} == {torch.float32}
    assert {parameter.grad.dtype for parameter in parameters if parameter.grad is not None} == {
        torch.float32
    }
    moments = [state["exp_avg_sq"].dtype for state in learner.optimizer.state.values()]
    assert set(moments) == {torch.float32}
    copy = learner.copy(0, next_push_steps=6)
    assert landed(copy.local).dtype == np.float32
    # Masters, not rounded numbers: some need more than the eight bits of a bfloat16's fraction.
    assert (landed(copy.local).view(np.uint32) & 0xFFFF).any()


def test_bfloat16_differs_from_float32_by_its_rounding_alone(prepared: Prepared) -> None:
    plain = train(a_learner(prepared, "float32"), 5)
    mixed = train(a_learner(prepared, "bfloat16"), 5)
    assert mixed != plain
    assert mixed == pytest.approx(plain, rel=2**-6)


def test_a_learner_under_bfloat16_goes_on_bit_for_bit_where_it_was_restored(
    prepared: Prepared,
) -> None:
    straight, other = (a_learner(prepared, "bfloat16") for _ in range(2))
    train(straight, 3)
    anchors = [straight.copy(p, next_push_steps=6).anchor for p in range(2)]
    other.restore(straight.state(""), anchors)
    assert train(other, 3) == train(straight, 3)
    for p in range(2):
        assert np.array_equal(other.local_values(p), straight.local_values(p))
