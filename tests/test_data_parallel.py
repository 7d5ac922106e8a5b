"""Data-parallel jobs that lose a process, elastic or not, with real ranks."""

from __future__ import annotations

import pickle
import signal
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from islands.data import batch_at
from islands.learner import Base, LearnerState, flatten, trainable
from islands.model import build_model
from tasks import (
    building,
    creating,
)
from tasks.data_parallel import Job, lost_mark, open_job, ring_seconds, works_in
from tasks.runs import Run, open_run, read_shard
from tasks.step_log import read_steps
from tasks.stepping import schedule_of
from tests.runs import tiny_config


def wait_until(is_so: Callable[[], bool], job: Job) -> None:
    ends = time.monotonic() + 150
    while not is_so():
        assert time.monotonic() < ends, (job.folder / "ranks.log").read_text()
        job.mend()
        time.sleep(0.01)


def num_logs(folder: Path, generation: int) -> int:
    return sum(len(read_steps(path)) > 2 for path in folder.glob(f"{generation:03d}-*.steps"))


def small_run(folder: Path, *assignments: str) -> Run:
    config = tiny_config(folder, "total_tokens=1_000_000", *assignments)
    prepared = creating.prepare_run(config, "r")
    return creating.create_run(prepared, creating.attempts_of(prepared))


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_survivors_go_on_with_the_spare_and_lose_at_most_the_step_under_way(tmp_path: Path) -> None:
    run, folder = small_run(tmp_path), tmp_path / "job"
    with open_job(run, folder, 0.0, has_links=True) as job:
        job.begin()
        wait_until(lambda: num_logs(folder, 0) == 3, job)
        assert job.kill("north")
        wait_until(lambda: job.generation == 1 and num_logs(folder, 1) == 3, job)
        (spare,) = job.spares
        assert not job.kill("nobody")
    assert all(rank.poll() is not None for rank in (*job.ranks.values(), spare))
    works = works_in(folder)
    (first,) = {int(path.stem.rpartition("-")[2]) for path in folder.glob("001-*.steps")}
    assert first > 0  # the spare too goes on from there, with the survivors' state
    lost = {name: 0 for name in ("east", "north", "west")}
    for work in works:
        lost[work.island] += 1 - work.num_kept
    assert max(lost.values()) <= 1


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_job_that_is_not_elastic_begins_anew_from_its_checkpoint(tmp_path: Path) -> None:
    run, folder = small_run(tmp_path), tmp_path / "job"
    with open_job(run, folder, 0.3, has_links=True) as job:
        job.begin()
        first_ranks = list(job.ranks.values())
        wait_until(lambda: (folder / "checkpoint").exists() and num_logs(folder, 0) == 3, job)
        assert job.kill("east")
        wait_until(lambda: num_logs(folder, 1) == 3, job)
        assert all(rank.poll() is not None for rank in first_ranks)
    (first,) = {int(path.stem.rpartition("-")[2]) for path in folder.glob("001-*.steps")}
    assert first > 0
    begun = [len(read_steps(path)) for path in folder.glob("000-*.steps")]
    dropped = sum(1 - work.num_kept for work in works_in(folder))
    assert dropped == sum(max(0, num_steps - first) for num_steps in begun)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("checkpoint_seconds", [0.0, 0.3])
def test_a_group_that_breaks_though_nobody_has_died_forms_anew(
    tmp_path: Path, checkpoint_seconds: float
) -> None:
    run, folder = small_run(tmp_path), tmp_path / "job"
    with open_job(run, folder, checkpoint_seconds, has_links=True) as job:
        job.begin()
        wait_until(lambda: num_logs(folder, 0) == 3, job)
        still = job.ranks["north"]
        still.send_signal(signal.SIGSTOP)
        wait_until(lost_mark(folder, 0).exists, job)  # the others give it up
        still.send_signal(signal.SIGCONT)
        wait_until(lambda: num_logs(folder, job.generation) == 3 and job.generation > 0, job)
        assert job.ranks["north"] is still


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_ranks_steps_are_those_of_one_learner_on_the_joined_batch(tmp_path: Path) -> None:
    run, folder = small_run(tmp_path), tmp_path / "job"
    with open_job(run, folder, 0.05, has_links=True) as job:
        job.begin()
        wait_until((folder / "checkpoint").exists, job)
        state: LearnerState = pickle.loads((folder / "checkpoint").read_bytes())
    joined = joined_learner(open_run(run.store_url, run.run_id), state.record.position.step)
    assert joined.trained == state.record.trained > 0
    for fragment, values in enumerate(state.values):
        np.testing.assert_allclose(values, joined.local_values(fragment), atol=1e-4)


def test_a_ring_moves_three_halves_of_the_bytes_through_each_of_four_links_and_one_rank_moves_none() -> (
    None
):
    assert ring_seconds(1_000, 4, 500.0) == pytest.approx(3.0)
    assert ring_seconds(1_000, 1, 500.0) == 0.0
    assert ring_seconds(1_000, 4, None) == 0.0


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("has_links", [True, False])
def test_a_step_over_links_takes_as_long_as_they_need_and_that_is_no_training(
    tmp_path: Path, has_links: bool
) -> None:
    caps = [f"islands.{name}.bandwidth_mbit=0.5" for name in ("east", "north", "west")]
    run, folder = small_run(tmp_path, *caps), tmp_path / "job"
    num_bytes = 4 * sum(layout.size for layout in run.layouts)
    least = ring_seconds(num_bytes, 3, 0.5e6 / 8)
    with open_job(run, folder, 0.0, has_links=has_links) as job:
        job.begin()
        wait_until(lambda: num_logs(folder, 0) == 3, job)
    works = works_in(folder)
    assert (statistics.median(work.span.seconds for work in works) >= least) == has_links
    if has_links:
        assert statistics.median(work.kept_seconds for work in works) < least / 2


def joined_learner(run: Run, num_steps: int) -> building.Learner:
    """Return a learner after so many steps on all islands' batches together."""
    building.use_one_thread()
    config, model = run.config, build_model(building.model_shape(run.config), run.config.seed)
    schedule = schedule_of(config, config.total_tokens)
    learner = building.assemble(config, "joined", model, run.layouts, schedule=schedule)
    learner.begin(
        [Base(0, "", flatten(layout, trainable(model))) for layout in run.layouts], incarnation=0
    )
    for step in range(num_steps):
        batches = [
            batch_at(
                read_shard(run, island.name),
                cursor=step * island.batch_size,
                batch_size=island.batch_size,
                context=config.model.context,
                seed=config.seed,
                learner=island.name,
            )
            for island in config.islands
        ]
        batch = np.concatenate(batches)
        num_tokens = len(batch) * config.model.context
        learner.step(batch, num_tokens=num_tokens, num_samples=len(batch))
    return learner
