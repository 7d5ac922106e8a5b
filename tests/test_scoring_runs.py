"""Which runs and snapshots get a score, and that none gets it twice."""

from __future__ import annotations

from pathlib import Path

import pytest
from prefect.logging import disable_run_logger

from islands import names
from islands.types import ConfigError
from tasks.collecting import SUITE
from tasks.local import Driver
from tasks.runs import Run
from tasks.scoring_runs import ALL, newest_snapshot, score_snapshot, unscored
from tests import runs


def with_snapshot(folder: Path, run_id: str, *assignments: str) -> Driver:
    """Return the driver of a run that is under way and has a snapshot."""
    driver = runs.start(runs.tiny_config(folder, *assignments), run_id)
    while newest_snapshot(driver.run) is None:
        assert driver.advance()
    return driver


def score(run: Run, number: int | None = None) -> str:
    with disable_run_logger():
        words: str = score_snapshot.fn(run.store_url, run.run_id, number)
    return words


def scores(run: Run) -> list[str]:
    return run.store.list_names("evaluations/")


def test_a_named_run_is_scored_as_asked_whatever_its_state(tmp_path: Path) -> None:
    url = runs.tiny_config(tmp_path).store
    assert unscored(url, "any", None) == [("any", None)]
    assert unscored(url, "any", 3) == [("any", 3)]


def test_of_all_runs_those_are_scored_that_go_on_and_whose_newest_snapshot_has_no_score(
    tmp_path: Path,
) -> None:
    going = with_snapshot(tmp_path, "going").run
    runs.start(runs.tiny_config(tmp_path), "young")  # no snapshot yet
    runs.train(runs.tiny_config(tmp_path, "total_tokens=600"), "over")
    assert unscored(going.store_url, ALL, None) == [("going", None)]
    score(going)
    assert unscored(going.store_url, ALL, None) == []


def test_a_later_snapshot_wants_a_score_again(tmp_path: Path) -> None:
    driver = with_snapshot(tmp_path, "going")
    run, first = driver.run, newest_snapshot(driver.run)
    score(run)
    while newest_snapshot(run) == first:
        assert driver.advance()
    assert unscored(run.store_url, ALL, None) == [("going", None)]


def test_an_empty_store_has_nothing_to_score(tmp_path: Path) -> None:
    assert unscored(runs.tiny_config(tmp_path).store, ALL, None) == []
    assert not (tmp_path / "runs").exists()


def test_a_damaged_run_does_not_keep_the_others_from_their_scores(tmp_path: Path) -> None:
    broken, sound = (with_snapshot(tmp_path, name).run for name in ("broken", "sound"))
    broken.store.delete(names.RUN)
    broken.store.create(names.RUN, b"{}")
    with disable_run_logger():
        assert unscored(sound.store_url, ALL, None) == [("sound", None)]


def test_a_score_is_made_once_and_told_by_number_and_size(tmp_path: Path) -> None:
    run = with_snapshot(tmp_path, "going").run
    number = newest_snapshot(run)
    assert number is not None
    words = score(run)
    assert words.startswith(f"going snapshot {number}: ")
    assert " bits/byte after " in words
    assert scores(run) == [names.evaluation(SUITE, number)]
    before = runs.objects(run)
    assert score(run) == score(run, number) == words
    assert runs.objects(run) == before


def test_a_snapshot_that_does_not_exist_is_named(tmp_path: Path) -> None:
    run = with_snapshot(tmp_path, "going").run
    with pytest.raises(ConfigError, match="99"):
        score(run, 99)
    assert scores(run) == []
