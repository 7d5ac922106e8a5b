"""What finding the newest version, and saving a run, cost as a run grows: store operations, not seconds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from infra.store import open_store
from islands import names
from islands.ledger import record_from_json
from tasks import history, records
from tests import runs
from tests.faulty import Counting

NUM_VERSIONS = 2500


@pytest.mark.parametrize(
    ("known", "most_reads"),
    # 1 + 12 strides of 1, 2, ... 2048 with one beyond the end, then 11 halves; or at the head one look beyond.
    [(0, 25), (NUM_VERSIONS - 2, 4), (NUM_VERSIONS - 1, 2)],
)
def test_the_newest_of_2500_versions_is_found_in_a_few_reads(
    tmp_path: Path, known: int, most_reads: int
) -> None:
    run = runs.start(runs.tiny_config(tmp_path)).run
    first, _ = records.require_commit(run.store, 0, 0)
    store = Counting(open_store("memory://"))
    for version in range(NUM_VERSIONS):
        commit = replace(first, version=version)
        records.write(store, names.version(0, version), commit.to_json())
    store.counts.clear()
    assert records.find_head(store, 0, known)[0].version == NUM_VERSIONS - 1
    assert store.counts["read"] <= most_reads
    assert store.counts.keys() == {"read"}


def test_every_number_of_versions_has_its_newest_found(tmp_path: Path) -> None:
    run = runs.start(runs.tiny_config(tmp_path)).run
    first, _ = records.require_commit(run.store, 0, 0)
    store = open_store("memory://")
    for version in range(40):
        commit = replace(first, version=version)
        records.write(store, names.version(0, version), commit.to_json())
        found = [records.find_head(store, 0, known)[0].version for known in range(version + 1)]
        assert found == [version] * (version + 1)


def test_a_learners_last_account_is_found_in_as_few_reads_when_all_of_its_past_is_kept(
    tmp_path: Path,
) -> None:
    config = runs.tiny_config(
        tmp_path, 'retention="all"', "total_tokens=16_000", store="memory://past"
    )
    driver, costs = runs.start(config), []
    run = driver.run
    for num_versions in (5, 20):
        while records.find_head(run.store, 0)[0].version < num_versions:
            assert driver.advance()
        store = Counting(run.store)
        found = history.look_back(replace(run, store=store), "east")
        costs.append(store.counts["read"])
        bodies = [
            records.require(run.store, name)[0]["record"]
            for folder in ("inbox", "checkpoints")
            for name in run.store.list_names(f"{folder}/")
            if "/east/" in name
        ]
        links = map(record_from_json, bodies)
        assert found.last == max(links, key=records.progress), "the same as of all of them"
    assert costs == [len(run.layouts) + 1] * 2


def test_saving_costs_no_more_when_the_run_has_grown(tmp_path: Path) -> None:
    """No listing of the local driver's save, nor its state, holds the versions, of which there are ever more."""
    config = runs.tiny_config(tmp_path, "total_tokens=16_000", store="memory://grown")
    driver = runs.start(config)
    plain, costs = driver.run, []
    for num_versions in (5, 20):
        while records.find_head(plain.store, 0)[0].version < num_versions:
            assert driver.advance()
        store = Counting(plain.store)
        driver.run = replace(plain, store=store)
        driver.save(reschedule=False)
        driver.run = plain
        newest = max(plain.store.list_names("driver/"), key=lambda n: names.number_of(n) or 0)
        num_bytes = len(plain.store.read(newest) or b"")
        costs.append((store.num_listed, store.num_operations, num_bytes))
    for few, many in zip(*costs, strict=True):
        assert many <= 1.3 * few
