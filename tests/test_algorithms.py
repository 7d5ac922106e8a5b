"""Each algorithm beside a slow, obvious twin: DiLoCo, FedAvg, data-parallel. That of streaming: test_torchft.py."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch

from infra.arrays import ArrayReader
from islands.data import batch_at
from islands.fragments import pseudo_gradient
from islands.learner import Base, flatten, trainable, unflatten
from islands.merging import Vector
from islands.outer import AdamW, adamw_step, clip_factor, decay_of
from islands.types import FragmentLayout, TensorSpec
from tasks import building, records
from tasks.evidence import Verification
from tasks.replaying import replay_into
from tasks.runs import Run, read_shard
from tasks.verifying import verify
from tests import runs

TWO = (
    """
total_tokens = {tokens}
durable = false
retention = "all"
"""
    + runs.MODEL
    + """[sync]
num_fragments = 1
codec_down = "float32"
[local]
checkpoint_steps = 7
[[islands]]
name = "east"
batch_size = 3
[[islands]]
name = "west"
batch_size = 1
speed = 0.5
"""
)
STEP_TOKENS = (3 + 1) * 16  # of both islands together
DILOCO = ("sync.algorithm=diloco", "sync.period_steps=4")
FEDAVG = (
    *DILOCO,
    *("outer.merge=mean", "outer.learning_rate=1.0", "outer.momentum=0.0"),
    "outer.weighting=tokens",
)
DATA_PARALLEL = (
    *("sync.algorithm=data-parallel", "sync.period_steps=1"),
    *("outer.merge=mean", "outer.weighting=tokens"),
)


def trained(folder: Path, num_steps: int, *assignments: str) -> Run:
    """Train both islands for so many steps on the local driver."""
    text = TWO.format(tokens=num_steps * STEP_TOKENS)
    url = f"memory://{folder.name}-{id(folder)}"
    return runs.train(runs.tiny_config(folder, *assignments, store=url, text=text))


def require_sound(run: Run) -> None:
    """Require that the ledger balances and that every version follows, bit by bit, from what it consumed."""
    found = verify(run.store_url, run.run_id)
    assert found.problems == []
    assert all(row.imbalance == 0 and row.merged == row.trained for row in found.rows)
    replayed = Verification()
    replay_into(run, replayed, watch=lambda done: None)
    assert replayed.problems == []


def version_of(run: Run, number: int, array: str = "params") -> Vector:
    """Return the whole model as version `number` has it."""
    commit, _ = records.require_commit(run.store, 0, number)
    return ArrayReader(run.store, commit.payload).read(array)


def batch_of(run: Run, name: str, step: int) -> npt.NDArray[np.int64]:
    """Return the batch an island trains its step number `step` (from 0) on."""
    batch_size = run.island(name).batch_size
    return batch_at(
        read_shard(run, name),
        cursor=step * batch_size,
        batch_size=batch_size,
        context=run.config.model.context,
        seed=run.config.seed,
        learner=name,
    )


def twin_of(run: Run, name: str) -> Callable[[Vector, int], Vector]:
    """Return a function that trains an island's twin from given values for so many steps; moments stay its own."""
    learner = building.build_learner(run, name)
    (layout,) = run.layouts
    taken = 0

    def train(values: Vector, num_steps: int) -> Vector:
        nonlocal taken
        unflatten(layout, values, trainable(learner.model))
        for _ in range(num_steps):
            batch = batch_of(run, name, taken)
            learner.step(batch, num_tokens=batch.shape[0] * 16, num_samples=batch.shape[0])
            taken += 1
        return learner.local_values(0)

    return train


def close(left: Vector, right: Vector) -> bool:
    return bool(np.abs(left - right).max() <= 1e-5 * np.abs(right).max())


# --- DiLoCo and FedAvg ---


def test_diloco_is_local_training_an_average_and_a_nesterov_step_round_after_round(
    tmp_path: Path,
) -> None:
    run = trained(tmp_path, 12, *DILOCO, "outer.merge=mean", "outer.momentum=0.9")
    twins = {name: twin_of(run, name) for name in ("east", "west")}
    params = version_of(run, 0).astype(np.float64)
    momentum = np.zeros_like(params)
    for number in (1, 2, 3):
        start = params.astype(np.float32)
        local = {name: train(start, 4) for name, train in twins.items()}
        # Tokens squared over steps: (3*16*4)^2/4 against (16*4)^2/4, so 9 to 1.
        average = (9.0 * local["east"] + 1.0 * local["west"]) / 10.0
        delta = params - average
        momentum = 0.9 * momentum + delta
        params = params - 0.7 * (delta + 0.9 * momentum)
        assert close(version_of(run, number), params.astype(np.float32))
    assert records.find_head(run.store, 0)[0].version == 3
    require_sound(run)


def test_fedavg_is_the_average_of_locally_trained_models_weighted_by_their_samples(
    tmp_path: Path,
) -> None:
    run = trained(tmp_path, 12, *FEDAVG)
    twins = {name: twin_of(run, name) for name in ("east", "west")}
    for number in (0, 1, 2):
        start = version_of(run, number)
        local = {name: train(start, 4) for name, train in twins.items()}
        average = (3 * local["east"].astype(np.float64) + 1 * local["west"]) / 4
        # One rounding of the delta and one of the sum.
        assert np.abs(version_of(run, number + 1) - average).max() <= 3e-7
    weights = [e.weight for e in records.require_commit(run.store, 0, 1)[0].consumed]
    assert weights == [3 * 16 * 4, 16 * 4]
    require_sound(run)


# --- data-parallel ---


def joined_adamw(run: Run, num_steps: int) -> Vector:
    """Return the model after so many steps of one AdamW on the joined batch."""
    config = run.config
    model = building.build_model(building.model_shape(config), config.seed)
    learner = building.assemble(
        config,
        "joined",
        model,
        run.layouts,
        schedule=building.schedule_of(config, config.total_tokens),
    )
    learner.begin([Base(0, "", version_of(run, 0))], incarnation=0)
    for step in range(num_steps):
        batch = np.concatenate([batch_of(run, name, step) for name in ("east", "west")])
        learner.step(batch, num_tokens=STEP_TOKENS, num_samples=4)
    return learner.local_values(0)


@pytest.mark.parametrize("clip_norm", [1.0, 2.0, 100.0])
def test_data_parallel_is_one_adamw_on_the_joined_batch(tmp_path: Path, clip_norm: float) -> None:
    """Islands of unequal speed and batch. Gradients' norms fall from 2.9 to 1.7: every step clipped, some, none."""
    run = trained(tmp_path, 20, *DATA_PARALLEL, f"inner.clip_norm={clip_norm}")
    head, _ = records.find_head(run.store, 0)
    assert head.version == 20
    expected = joined_adamw(run, 20)
    assert np.abs(expected - version_of(run, 0)).max() > 1e-2
    assert np.abs(version_of(run, 20) - expected).max() <= 1e-5
    require_sound(run)


def test_a_gradient_travels_unclipped_bit_for_bit_and_moves_nobody(tmp_path: Path) -> None:
    """Also once settings have changed under way."""
    config = runs.tiny_config(
        tmp_path,
        *DATA_PARALLEL,
        "inner.clip_norm=0.001",
        store=f"memory://{tmp_path.name}-{id(tmp_path)}",
        text=TWO.format(tokens=640),
    )
    run = runs.start(config).run
    learner = building.build_learner(run, "east")
    learner.begin([Base(0, "d", version_of(run, 0))], incarnation=0)
    building.retune(learner, run)
    learner.step(batch_of(run, "east", 0), num_tokens=48, num_samples=3)
    copy = learner.copy(0, next_push_steps=0)
    gradients = {name: p.grad for name, p in trainable(learner.model).items() if p.grad is not None}
    expected = flatten(run.layouts[0], gradients)
    assert np.linalg.norm(expected) > 0.5
    assert np.array_equal(pseudo_gradient(copy.anchor, copy.local), expected)
    assert (copy.num_tokens, copy.num_steps) == (48, 1)
    assert np.array_equal(learner.local_values(0), version_of(run, 0))


def test_a_data_parallel_run_survives_deaths_and_merges_no_gradient_of_older_parameters(
    tmp_path: Path,
) -> None:
    deaths = (("west", 5, 3), ("east", 9, 0))
    faults = (
        f"{{island='{name}', step={step}, return_after_steps={away}}}"
        for name, step, away in deaths
    )
    run = trained(tmp_path, 20, *DATA_PARALLEL, f"local.faults=[{','.join(faults)}]")
    found = verify(run.store_url, run.run_id)
    assert found.problems == []
    assert all(row.imbalance == 0 for row in found.rows)
    replayed = Verification()
    replay_into(run, replayed, watch=lambda done: None)
    assert replayed.problems == []
    for number in range(1, records.find_head(run.store, 0)[0].version):
        commit, _ = records.require_commit(run.store, 0, number)
        assert {entry.staleness for entry in commit.consumed} == {0}


# --- AdamW ---

LAYOUT = FragmentLayout(
    0, (TensorSpec("matrix", (3, 4), 0, "mean"), TensorSpec("gain", (5,), 12, "mean"))
)


def test_an_adamw_step_is_torchs(tmp_path: Path) -> None:
    """Ten steps with changing rates, clipped and not; matrices are decayed, vectors are not."""
    generator = np.random.default_rng(3)
    values = generator.standard_normal(17).astype(np.float32)
    matrix = torch.nn.Parameter(torch.from_numpy(values[:12].copy()).reshape(3, 4))
    gain = torch.nn.Parameter(torch.from_numpy(values[12:].copy()))
    groups = [{"params": [matrix]}, {"params": [gain], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.8, 0.95), weight_decay=0.2)
    params, moments = values, (values * 0, values * 0)
    for t in range(1, 11):
        gradient = generator.standard_normal(17).astype(np.float32) * np.float32(t / 5)
        matrix.grad = torch.from_numpy(gradient[:12].copy()).reshape(3, 4)
        gain.grad = torch.from_numpy(gradient[12:].copy())
        torch.nn.utils.clip_grad_norm_([matrix, gain], 3.0)
        for group in optimizer.param_groups:
            group["lr"] = 0.1 / t
        optimizer.step()
        params, moments = adamw_step(
            params,
            moments,
            gradient * np.float32(clip_factor(gradient, 3.0)),
            decay=decay_of(LAYOUT.tensors, 0.2),
            learning_rate=0.1 / t,
            adamw=AdamW(t, 0.8, 0.95, 0.2, 3.0),
        )
        expected = np.concatenate([matrix.detach().numpy().reshape(-1), gain.detach().numpy()])
        assert params.dtype == np.float32
        assert np.abs(params - expected).max() <= 1e-6


def test_one_adamw_step_by_hand() -> None:
    """t = 1: both moments' corrections undo (1 - beta), so the step is lr * g / |g| = lr, after the decay."""
    one, four = np.ones(1, np.float32), np.full(1, 4.0, np.float32)
    params, (first, second) = adamw_step(
        one * 2,
        (one * 0, one * 0),
        four,
        decay=one / 2,
        learning_rate=0.25,
        adamw=AdamW(1, 0.5, 0.75, 0.5, 1.0),
    )
    assert (first[0], second[0]) == (2.0, 4.0)
    assert params[0] == pytest.approx(2 * (1 - 0.25 * 0.5) - 0.25)


def test_a_gradient_is_clipped_to_the_norm_and_never_lengthened() -> None:
    gradient = np.array([3.0, 4.0], np.float32)
    assert clip_factor(gradient, 1.0) == pytest.approx(0.2, rel=1e-6)
    assert clip_factor(gradient, 6.0) == 1.0
    assert clip_factor(gradient * 0, 1.0) == 1.0
