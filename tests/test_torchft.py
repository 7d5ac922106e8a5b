"""torchft's regression numbers through our learner, driver, synchronizer and store, with algorithm = "streaming".

Source of the numbers: meta-pytorch/torchft, test_fixtures/ (BSD-3-Clause, Copyright (c) Meta Platforms, Inc. and
affiliates). Two replicas; two fragments of one scalar that starts at 1; every inner step subtracts 2; period 6; outer
SGD with rate 2 and no momentum. Every number is a dyadic rational, so the comparison is exact.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from islands.learner import Learner
from islands.schedule import Schedule
from tasks import creating, records
from tasks.clockwork import Kind
from tasks.local import Driver
from tests.runs import driver_of, tiny_config

FIXTURES = Path(__file__).parents[2] / "shared" / "fixtures" / "torchft"
LAYERS = ("layers.0.weight", "layers.1.weight")

# Per fixture: overlap (tau), alpha, local value of the synced layer after steps 3/6/9/12/15, and the published value
# of that layer after the same steps.
TABLES = [
    (0, 0.0, (-11, -23, -35, -47, -59), (-11, -23, -35, -47, -59)),
    (0, 0.5, (-8, -17, -24.5, -32, -40.25), (-11, -23, -29, -35, -44)),
    (0, 1.0, (-5, -11, -17, -23, -29), (-11, -23, -23, -23, -35)),
    (1, 0.0, (-7, -19, -27, -39, -47), (-7, -19, -27, -39, -47)),
    (1, 0.5, (-6, -15, -21.5, -29, -35.75), (-7, -19, -25, -31, -38)),
    (1, 1.0, (-5, -11, -17, -23, -29), (-7, -19, -23, -23, -31)),
]

STREAMING = """
durable = false
total_tokens = {tokens}
seed = 0
[model]
context = 16
[data]
eval_bytes = 64
[outer]
learning_rate = 2.0
momentum = 0.0
merge = "mean"
[sync]
algorithm = "streaming"
num_fragments = 2
period_steps = 6
overlap_steps = {overlap}
alpha = {alpha}
codec_down = "float32"
[local]
checkpoint_steps = 1
{faults}
[[islands]]
name = "replica-0"
batch_size = 1
[[islands]]
name = "replica-1"
batch_size = 1
"""


class Scalars(nn.Module):
    """Layers of one scalar weight each, initially 1, whose gradient is 2 whatever the batch."""

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1, 1, bias=False) for _ in range(num_layers))
        for parameter in self.parameters():
            nn.init.ones_(parameter)

    def loss(self) -> torch.Tensor:
        return 2.0 * torch.stack([parameter.sum() for parameter in self.parameters()]).sum()


def run_scalars(
    folder: Path, text: str, num_layers: int = 2
) -> tuple[Driver, dict[str, dict[int, list[float]]]]:
    """Train scalars to the end; return the driver and, per replica, step -> local values before the next step."""
    config = tiny_config(folder, text=text)
    prepared = creating.prepare_run(config, "r", model=Scalars(num_layers))
    run = creating.create_run(prepared, creating.attempts_of(prepared))

    def build(name: str) -> Learner:
        model = Scalars(num_layers)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        return Learner(
            name,
            model,
            optimizer,
            lambda batch: model.loss(),
            layouts=run.layouts,
            schedule=Schedule(1.0, 1, 0.0, 1.0),
            clip_norm=float("inf"),
            period_steps=config.sync.period_steps,
        )

    driver = driver_of(run, build)
    driver.evaluate = lambda run: None  # there is no language model to score
    driver.start()
    history: dict[str, dict[int, list[float]]] = {island.name: {} for island in config.islands}
    while True:
        event = driver.events[0]
        if event.kind in (Kind.STEP_ENDS, Kind.LEAVE):
            learner = driver.seats[event.island].learner
            if learner is not None:
                values = [float(learner.local_values(p)[0]) for p in range(num_layers)]
                history[event.island][learner.position.step] = values
        if not driver.advance():
            return driver, history


def published(driver: Driver, fragment: int) -> list[float]:
    """Return the fragment's published value, version after version."""
    head, _ = records.find_head(driver.run.store, fragment)
    commits = [
        records.require_commit(driver.run.store, fragment, v)[0] for v in range(head.version + 1)
    ]
    return [float(records.read_public(driver.run.store, commit)[0]) for commit in commits]


def streaming(tokens: int, overlap: int, alpha: float, faults: str = "") -> str:
    return STREAMING.format(tokens=tokens, overlap=overlap, alpha=alpha, faults=faults)


@pytest.mark.parametrize(("overlap", "alpha", "local", "shared"), TABLES)
def test_six_update_tables_are_met_exactly(
    tmp_path: Path, overlap: int, alpha: float, local: tuple[float, ...], shared: tuple[float, ...]
) -> None:
    text = 'retention = "all"\n' + streaming(15 * 16 * 2, overlap, alpha)
    driver, history = run_scalars(tmp_path, text)
    for table in history.values():
        assert sorted(table) == list(range(16))
        assert tuple(table[step][i % 2] for i, step in enumerate((3, 6, 9, 12, 15))) == local
    for p in (0, 1):
        assert published(driver, p)[1 : 4 - p] == list(shared[p::2])


def test_a_replica_that_dies_and_returns_leaves_the_published_values_as_they_were(
    tmp_path: Path,
) -> None:
    fault = 'faults = [{ island = "replica-1", step = 6, return_after_steps = 4 }]'
    driver, history = run_scalars(
        tmp_path, 'retention = "all"\n' + streaming(21 * 16 * 2, 0, 0.0, fault)
    )
    assert published(driver, 0)[:5] == [1, -11, -35, -59, -83]
    assert published(driver, 1)[:4] == [1, -23, -47, -71]
    rows = [history["replica-0"][step][0 if step % 2 else 1] for step in range(3, 22, 3)]
    assert rows == [-11, -23, -35, -47, -59, -71, -83]


@pytest.mark.skipif(not FIXTURES.is_dir(), reason="torchft's own files are not here")
@pytest.mark.parametrize("number", range(6))
def test_every_row_of_the_fixture_files_is_met(tmp_path: Path, number: int) -> None:
    overlap, alpha, _, _ = TABLES[number]
    driver, history = run_scalars(
        tmp_path, 'retention = "all"\n' + streaming(15 * 16 * 2, overlap, alpha)
    )
    for replica, ours in zip(_fixture(f"mocked_updates_{number}"), history.values(), strict=True):
        _compare(replica, ours, driver)


@pytest.mark.skipif(not FIXTURES.is_dir(), reason="torchft's own files are not here")
def test_the_survivors_rows_of_the_recovery_file_are_met(tmp_path: Path) -> None:
    fault = 'faults = [{ island = "replica-1", step = 6, return_after_steps = 4 }]'
    driver, history = run_scalars(
        tmp_path, 'retention = "all"\n' + streaming(21 * 16 * 2, 0, 0.0, fault)
    )
    _compare(_fixture("mocked_failure_recovery_0")[0], history["replica-0"], driver)


def _fixture(name: str) -> list[dict[str, dict[str, dict[str, list[list[float]]]]]]:
    replicas = json.loads((FIXTURES / f"{name}.json").read_text(encoding="utf-8"))
    return [ranks[0] for ranks in replicas]


def _compare(
    expected: dict[str, dict[str, dict[str, list[list[float]]]]],
    ours: dict[int, list[float]],
    driver: Driver,
) -> None:
    local = {
        int(step): [row[layer][0][0] for layer in LAYERS]
        for step, row in expected["history"].items()
    }
    assert ours == local
    for step, row in expected["global_parameter_history"].items():
        for p, layer in enumerate(LAYERS):
            version = (int(step) + 3 * (1 - p)) // 6
            assert published(driver, p)[version] == row[layer][0][0], (step, layer)
