"""The log of who looks after a run: numbers without gaps, the newest one counts, deaths for nothing are counted."""

from __future__ import annotations

from pathlib import Path

import pytest
from prefect.logging import disable_run_logger

from infra import processes
from islands import names
from tasks import collecting, records, trainers
from tasks.closing import close_run
from tasks.merging import Synchronizer
from tasks.records import new_attempt
from tasks.runs import Run
from tasks.trainers import Trainer
from tasks.verifying import verify
from tests import runs


def enlist(run: Run, flow_run: str) -> int:
    return trainers.enlist(run, flow_run, new_attempt, stamp=lambda: 5.0)


def test_the_newest_to_enlist_looks_after_the_run(tmp_path: Path) -> None:
    run = runs.start(runs.tiny_config(tmp_path)).run
    assert (trainers.newest(run), trainers.count(run)) == (None, 0)
    assert [enlist(run, "a"), enlist(run, "b")] == [0, 1]
    assert trainers.newest(run) == Trainer(1, "b", 0)
    assert [trainers.number_of(run, x) for x in ("a", "b", "c")] == [0, 1, None]
    body, _ = records.require(run.store, names.numbered("trainers", 0))
    assert body["where"] == processes.here()


def test_those_that_enlisted_at_as_many_merges_as_now_died_in_vain(tmp_path: Path) -> None:
    driver = runs.start(runs.tiny_config(tmp_path))
    run = driver.run
    assert trainers.num_vain(run) == 0
    enlist(run, "a")
    assert trainers.num_vain(run) == 1
    while not any(records.find_head(run.store, fragment)[0].version for fragment in range(3)):
        assert driver.advance()
    assert trainers.num_vain(run) == 0
    enlist(run, "b")
    enlist(run, "c")
    assert trainers.num_vain(run) == 2  # "a" had begun with fewer


def test_a_damaged_record_ends_nobodys_work_and_is_named(tmp_path: Path) -> None:
    run = runs.start(runs.tiny_config(tmp_path)).run
    for flow_run in ("a", "b", "c"):
        enlist(run, flow_run)
    name = names.numbered("trainers", 1)
    run.store.delete(name)
    run.store.create(name, b"torn")
    assert (trainers.number_of(run, "a"), trainers.number_of(run, "b")) == (0, None)
    assert (trainers.num_vain(run), enlist(run, "d")) == (3, 3)
    run.store.delete(names.numbered("trainers", 3))
    run.store.create(names.numbered("trainers", 3), b"torn")
    assert trainers.newest(run) is None
    assert name in [problem.name for problem in verify(run.store_url, "r").problems]


def test_a_gap_among_them_is_a_problem_and_a_late_one_is_none(tmp_path: Path) -> None:
    run = runs.train(runs.tiny_config(tmp_path, "total_tokens=300"))
    enlist(run, "late")  # the run has ended, and lists all it had by then
    assert verify(run.store_url, "r").problems == []
    enlist(run, "later")
    run.store.delete(names.numbered("trainers", 0))
    found = [problem.name for problem in verify(run.store_url, "r").problems]
    assert found == ["trainers/0.json"]


def test_of_two_that_end_a_run_the_slower_one_finds_it_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = runs.start(runs.tiny_config(tmp_path)).run
    others = {"verdicts": [], "inventory": {"run.json": "as the other one saw it"}}

    def be_quicker(run: Run) -> int:
        records.write(run.store, names.FINISHED, others)
        return 0

    monkeypatch.setattr(collecting, "collect", be_quicker)
    synchronizer = Synchronizer(run, new_attempt, stamp=lambda: 5.0)
    with disable_run_logger():
        assert close_run.fn(run, synchronizer) is None  # nothing was ever merged
    assert records.require(run.store, names.FINISHED)[0] == others
