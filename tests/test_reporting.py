"""What a run looks like from outside: speeds and last signs of life, by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from flows import screen
from islands import names
from islands.metrics import moved_bytes
from tasks import history, records, stopping
from tasks.reporting import as_plain, status
from tasks.runs import Run
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


def test_who_was_asked_to_stop_is_at_work_no_more(tmp_path: Path) -> None:
    driver = runs.start(runs.tiny_config(tmp_path))
    while min(island.tokens for island in status(driver.run).islands) == 0:
        assert driver.advance()
    run = driver.run

    def seen() -> tuple[str, int, list[str]]:
        found = status(run)
        assert as_plain(found)["state"] == found.state
        return found.state, found.live, [island.state for island in found.islands]

    assert seen() == ("unfinished", 3, ["training"] * 3)
    stopping.ask(run, is_stop=True, reason="test", mark="1", island="west")
    assert seen() == ("unfinished", 2, ["training", "training", "stopped"])
    stopping.ask(run, is_stop=True, reason="test", mark="2")
    assert seen() == ("stopped", 0, ["stopped"] * 3)
    stopping.let_go_on(run, records.new_attempt)
    assert seen() == ("unfinished", 3, ["training"] * 3)
    assert status(runs.finish(driver)).state == "finished"


def test_a_followed_run_that_grows_is_shown_as_the_share_it_has_trained_then(
    tmp_path: Path,
) -> None:
    run = runs.start(runs.tiny_config(tmp_path)).run
    told: list[tuple[int, str]] = []
    follower = screen.FlowFollower(lambda done, note: told.append((done, note)))
    follower(status(run))
    follower(replace(status(run), trained=3_000, total_tokens=4_000))
    follower(replace(status(run), trained=3_000, total_tokens=12_000))
    assert [done for done, _ in told] == [0, 750_000, 250_000]
    assert told[0][1].startswith("the islands start")
    assert told[1][1] == "0 merges, merged share 0.00"


def test_heads_are_found_from_where_they_stood(tmp_path: Path) -> None:
    run = runs.train(runs.tiny_config(tmp_path))
    first = status(run)
    assert status(run, first) == first


def test_a_fragment_says_how_many_islands_wait_for_how_many(tmp_path: Path) -> None:
    """West starts late, and all three are needed; once it is written off, two are."""
    late = ("sync.min_learners=3", "islands.west.start_steps=500")
    driver = runs.start(runs.tiny_config(tmp_path, *late))
    assert [(f.waiting, f.quorum) for f in status(driver.run).fragments] == [(0, 3)] * 3
    while driver.now < 30:
        driver.advance()
    assert [(f.waiting, f.quorum, f.version) for f in status(driver.run).fragments] == [
        (2, 3, 0)
    ] * 3
    history.write_off(driver.run, "west", stamp=lambda: 30.0)
    assert {f.quorum for f in status(driver.run).fragments} == {2}


def pushed_bytes(run: Run, learner: str) -> int:
    """Return the bytes of every contribution's payload the store holds of a learner."""
    return sum(
        len(data)
        for name, data in runs.objects(run, ["payloads/inbox"]).items()
        if name.split("/")[3] == learner
    )


def test_bytes_are_counted_over_all_incarnations_and_per_merged_token(tmp_path: Path) -> None:
    """North dies in its 14th step and comes back; with everything kept, the store still holds all that was pushed."""
    fault = 'local.faults=[{island="north", step=13, return_after_steps=8}]'
    run = runs.train(runs.tiny_config(tmp_path, fault, 'retention="all"'))
    seen = status(run)
    assert records.newest_incarnation(run.store, "north") == 1
    for island in seen.islands:
        assert island.bytes_up == pushed_bytes(run, island.name) > 0
        # A version is at least its 2 bytes an element; the heads of version 0 were fetched too.
        least = sum(2 * fragment.elements for fragment in seen.fragments)
        assert island.bytes_down >= least
    merged = sum(fragment.merged_tokens for fragment in seen.fragments) / len(seen.fragments)
    up = sum(island.bytes_up for island in seen.islands)
    down = sum(island.bytes_down for island in seen.islands)
    assert seen.bytes_per_merged_token_up == up / merged
    assert seen.bytes_per_merged_token_down == down / merged


def test_what_the_last_commits_tell_of_bytes_is_no_more_than_the_accounts(tmp_path: Path) -> None:
    """MLflow is told with a merge; what is pushed or fetched after a learner's last one is in its farewell alone."""
    run = runs.train(runs.tiny_config(tmp_path))
    heads = [records.find_head(run.store, p)[0] for p in range(len(run.layouts))]
    seen = status(run)
    up, down = moved_bytes(heads)
    assert 0.9 * sum(i.bytes_up for i in seen.islands) < up <= sum(i.bytes_up for i in seen.islands)
    assert 0 < down <= sum(i.bytes_down for i in seen.islands)


def test_before_the_first_merge_bytes_per_token_are_unknown(tmp_path: Path) -> None:
    seen = status(runs.start(runs.tiny_config(tmp_path)).run)
    assert (seen.bytes_per_merged_token_up, seen.bytes_per_merged_token_down) == (None, None)
