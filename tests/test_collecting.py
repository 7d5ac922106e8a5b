"""What collection keeps in a real run, and that a run with foreign or damaged objects in it comes to its end."""

from __future__ import annotations

from pathlib import Path

import pytest

from islands import names
from islands.sealing import seal
from tasks import history, records
from tasks.clockwork import Kind
from tasks.collecting import collect
from tasks.verifying import verify
from tests import runs

SMALL = ("total_tokens=1_400", "sync.num_fragments=2", "local.checkpoint_steps=7")
FOREIGN = [
    "inbox/f0099/east/0-0-6.json",
    "inbox/f0000/east/x.json",
    "versions/f0099/v00000000.json",
    "advisories/f0000/x.json",
    "advisories/x.json",
    "evaluations/x.json",
    "learners/5.json",
    "learners/foo/0.json",
    "learners/foo/left.json",
    "driver/x.json",
]


@pytest.mark.parametrize("name", FOREIGN)
def test_an_object_of_a_foreign_name_is_named_and_stops_nothing(tmp_path: Path, name: str) -> None:
    driver = runs.start(
        runs.tiny_config(tmp_path, *SMALL, store=f"memory://foreign-{name.replace('/', '-')}")
    )
    for _ in range(60):
        driver.advance()
    driver.run.store.create(name, seal({})[0])
    collect(driver.run)
    assert name in {problem.name for problem in verify(driver.run.store_url, "r").problems}
    for _ in range(1000):
        if not driver.advance():
            break
    assert driver.is_finished
    assert {problem.name for problem in verify(driver.run.store_url, "r").problems} == {name}


@pytest.mark.parametrize("retention", ["bounded", "all"])
def test_a_damaged_header_does_not_keep_a_run_from_ending(tmp_path: Path, retention: str) -> None:
    store = f"memory://damaged-end-{retention}"
    driver = runs.start(runs.tiny_config(tmp_path, *SMALL, f'retention="{retention}"', store=store))
    for _ in range(60):
        driver.advance()
    driver.run.store.create("inbox/f0000/east/0-0-999.json", b"{}")
    runs.finish(driver)
    assert driver.is_finished


@pytest.mark.parametrize("step", [13, 28])
def test_a_learner_away_for_long_goes_on_from_its_last_account(tmp_path: Path, step: int) -> None:
    """While it is away its merged contributions are collected, and it never saved, or pushed after it had saved."""
    fault = f'local.faults=[{{island="north", step={step}, return_after_steps=60}}]'
    settings = (fault, "local.checkpoint_steps=30", "total_tokens=8_000")
    driver = runs.start(runs.tiny_config(tmp_path, *settings, store=f"memory://away-{step}"))
    while not (driver.events[0].kind is Kind.RETURN and driver.events[0].time > 3):
        driver.advance()
    merged_to = max(head.tallies["north"].consumed_to for head in driver.synchronizer.heads())
    last = history.look_back(driver.run, "north").last
    assert last is not None
    assert last.position >= merged_to
    offered = [head.tallies["north"].offered for head in driver.synchronizer.heads()]
    assert all(
        clock.all_offered >= taken for clock, taken in zip(last.clocks, offered, strict=True)
    )
    run = runs.finish(driver)
    assert verify(run.store_url, run.run_id).problems == []


def test_a_version_still_under_way_to_a_far_island_is_kept(tmp_path: Path) -> None:
    settings = ("total_tokens=6_000", "islands.north.fetch_delay_steps=40")
    run = runs.train(runs.tiny_config(tmp_path, *settings, store="memory://far"))
    assert verify(run.store_url, run.run_id).problems == []


def test_a_push_between_looking_back_and_registering_is_part_of_the_past(tmp_path: Path) -> None:
    """The predecessor is still alive, and its push may be merged: its work must not be done again."""
    driver = runs.start(runs.tiny_config(tmp_path, *SMALL, store="memory://zombie"))
    run = driver.run
    while len(run.store.list_names("inbox/f0000/east/")) < 2:
        driver.advance()
    late = run.store.list_names("inbox/f0000/east/")[-1]
    data = run.store.read(late)
    assert data is not None
    run.store.delete(late)
    for fragment in range(2):  # whatever it wrote at the same time is on its way as well
        for name in run.store.list_names(f"inbox/f{fragment:04d}/east/"):
            key, kept = names.parse_contribution(name), names.parse_contribution(late)
            if key is not None and kept is not None and key.stop >= kept.stop:
                run.store.delete(name)

    def attempt() -> str:  # asked for between looking back and writing
        if run.store.read(late) is None:
            run.store.create(late, data)
        return "a-s"

    past = history.register(run, "east", attempt, stamp=float)
    found = records.read_contribution(run.store, late)
    assert found is not None
    assert past.last is not None
    assert records.progress(past.last) >= records.progress(found[0].record)
    assert late not in past.listed
