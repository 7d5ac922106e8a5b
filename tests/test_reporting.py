"""What a run looks like from outside: speeds and last signs of life, by hand."""

from __future__ import annotations

from pathlib import Path

from islands import names
from tasks import history, records
from tasks.reporting import status
from tests import runs


def test_an_island_is_as_fast_as_its_last_merged_step_says_and_seen_when_it_left(
    tmp_path: Path,
) -> None:
    run = runs.train(runs.tiny_config(tmp_path))
    seen = {island.name: island for island in status(run).islands}
    # 2 sequences of 16 bytes a step; one step a base step, 0.7 at north.
    assert seen["east"].tokens_per_second == 32.0
    assert round(seen["north"].tokens_per_second, 6) == 22.4
    for name, island in seen.items():
        body, _ = records.require(run.store, names.left(name))
        assert island.last_seen == body["at"] > 0


def test_an_island_that_has_not_begun_is_not_seen_and_damage_is_passed_over(tmp_path: Path) -> None:
    run = runs.start(runs.tiny_config(tmp_path)).run
    assert [(i.tokens_per_second, i.last_seen) for i in status(run).islands] == [(0.0, 0.0)] * 3
    history.register(run, "east", records.new_attempt, stamp=lambda: 7.0)
    assert history.last_seen(run, "east") == 7.0
    run.store.create(names.left("east"), b"no record")
    assert history.last_seen(run, "east") == 7.0


def test_heads_are_found_from_where_they_stood(tmp_path: Path) -> None:
    run = runs.train(runs.tiny_config(tmp_path))
    first = status(run)
    assert status(run, first) == first
