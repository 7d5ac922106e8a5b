"""Damage on purpose: refused by name, known to `verify`, and undone where it was merged all the same."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from islands import names
from islands.chaos import Fault
from islands.contributions import Tally
from tasks import records, spoiling
from tasks.local import Driver
from tasks.verifying import verify
from tests import runs
from tests.test_strikes import begin


@pytest.fixture
def driver(tmp_path: Path) -> Driver:
    url = f"memory://spoiling-{tmp_path.name}-{id(tmp_path)}"
    return runs.start(runs.tiny_config(tmp_path, store=url))


def advance_until_pending(driver: Driver, learner: str) -> spoiling.Spoil:
    while (found := spoiling.find_pending(driver.run, learner)) is None:
        assert driver.advance()
    return found


def test_a_corrupt_contribution_is_refused_and_verify_knows_who_did_it(tmp_path: Path) -> None:
    url = f"memory://corrupt-{id(tmp_path)}"
    driver = runs.start(runs.tiny_config(tmp_path, 'retention="all"', store=url))
    pending = advance_until_pending(driver, "north")
    under_way, told = begin(driver.run, Fault("corrupt", island="north", after_seconds=0.0))
    under_way.look()
    assert told == [
        f"north's learner: a byte of {pending.name} is another one; {pending.contribution} is damaged"
    ]
    run = runs.finish(driver)
    heads = [records.find_head(run.store, p)[0] for p in range(len(run.layouts))]
    refused = [head.tallies.get("north", Tally()).refused for head in heads]
    assert sum(counts.get("damaged", (0, 0))[0] for counts in refused) == 1
    assert verify(run.store_url, run.run_id).problems == []
    assert under_way.look() is None
    assert under_way.is_done
    (strike,) = (name for name in run.store.list_names("chaos/"))
    run.store.delete(strike)  # nobody says any more that it was on purpose
    found = {problem.name for problem in verify(run.store_url, run.run_id).problems}
    assert found == {pending.name, strike}


def test_bytes_of_what_was_merged_all_the_same_are_put_back_after_the_end_too(
    tmp_path: Path,
) -> None:
    url = f"memory://late-{id(tmp_path)}"
    driver = runs.start(runs.tiny_config(tmp_path, 'retention="all"', store=url))
    pending = advance_until_pending(driver, "north")
    under_way, _ = begin(driver.run, Fault("corrupt", island="north", after_seconds=0.0))
    under_way.look()
    damaged = driver.run.store.read(pending.name)
    assert damaged is not None
    driver.run.store.delete(pending.name)  # a merge that had read it before goes on from that
    driver.run.store.create(pending.name, pending.data)
    while records.find_head(driver.run.store, pending.fragment)[0].version == pending.version:
        assert driver.advance()
    driver.run.store.delete(pending.name)
    driver.run.store.create(pending.name, damaged)
    run = runs.finish(driver)
    under_way.look()
    assert under_way.is_over
    assert run.store.read(pending.name) == pending.data


def test_damage_to_what_later_work_has_passed_is_not_waited_for(driver: Driver) -> None:
    pending = advance_until_pending(driver, "north")
    key = names.parse_contribution(pending.contribution)
    assert key is not None
    while records.find_head(driver.run.store, pending.fragment)[0].version == pending.version:
        assert driver.advance()
    earlier = names.contribution(key._replace(stop=key.stop._replace(step=key.stop.step - 1)))
    driver.run.store.create(earlier, b"it lies there until somebody collects it")
    assert replace(pending, contribution=earlier).is_settled(driver.run)


def test_bytes_of_what_was_merged_all_the_same_are_put_back(driver: Driver) -> None:
    pending = advance_until_pending(driver, "north")
    pending.damage(driver.run)
    assert driver.run.store.read(pending.name) != pending.data
    assert not pending.is_settled(driver.run)
    driver.run.store.delete(pending.name)  # a merge that had read it before goes on from that
    driver.run.store.create(pending.name, pending.data)
    while records.find_head(driver.run.store, pending.fragment)[0].version == pending.version:
        assert driver.advance()
    damaged = bytes([pending.data[0] ^ 1]) + pending.data[1:]
    driver.run.store.delete(pending.name)
    driver.run.store.create(pending.name, damaged)
    merged = pending.version
    assert pending.is_settled(driver.run)
    assert driver.run.store.read(pending.name) == pending.data
    driver.run.store.delete(pending.contribution)  # collected before anybody looked
    pending.version = merged
    assert pending.is_settled(driver.run)
    assert driver.run.store.read(pending.name) is None
