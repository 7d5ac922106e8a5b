"""Islands that come, go and come back in real runs: what is recorded, who takes it in, and where they go on."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from infra import processes
from islands import names
from islands.contributions import Tally
from islands.learner import Learner
from islands.schedule import learning_rate_at
from islands.types import ConfigError
from tasks import building, history, joining, records, returning
from tasks.adjusting import adjust
from tasks.clockwork import Beat
from tasks.evaluating import bigram_of
from tasks.inbox import Roster
from tasks.joining import join, leave, settle
from tasks.living import Life
from tasks.reporting import status
from tasks.runs import HELD_OUT, Run, change_config, open_run, read_shard, refreshed
from tasks.sharing import was_local
from tasks.verifying import verify
from tests import runs
from tests.test_living import Merging, mergings
from tests.test_sending import created, require_sound, wait_for

merging = pytest.fixture(mergings)

Live = Callable[[Run, str], Life]


@pytest.fixture
def live() -> Iterator[Live]:
    """Begin lives of any island; whatever is left is closed at the end."""
    lives: list[Life] = []

    def begin(run: Run, name: str) -> Life:
        told: Callable[[Any], None] = lambda message: None  # noqa: E731
        lives.append(Life(run, name, records.new_attempt, stamp=time.time, tell=told))
        return lives[-1]

    yield begin
    for life in lives:
        life.close()


QUICK = ("sync.min_learners=1", "pipeline.checkpoint_seconds=0.1", "total_tokens=200_000")


@pytest.fixture
def run(tmp_path: Path, live: Live, merging: Callable[[Run], Merging]) -> Run:
    """Return a run of which east and west have trained something, with a synchronizer at work."""
    made = created(tmp_path, *QUICK)
    merging(made)
    for name in ("east", "west"):
        life = live(made, name)
        life.train(0.5)
        assert life._sender.drain(5)
    return made


def tokens_of(run: Run, name: str) -> int:
    link = history.last_link(run, name)
    return 0 if link is None else link.trained


def test_who_joins_is_recorded_and_reads_the_founders_text_in_an_order_of_its_own(
    run: Run,
) -> None:
    trained = sum(tokens_of(run, name) for name in ("east", "north", "west"))
    made = join(run, "south", ["region=ap-south", "batch_size=4"])
    assert [change.key for change in made.changes] == ["islands.south"]
    now = refreshed(run)
    south = now.island("south")
    assert (south.region, south.batch_size, south.spare) == ("ap-south", 4, False)
    assert south.joined_at == trained / 200_000
    # Rates 2, 1.4, 2 and 4: the newcomer's part is 4 / 9.4.
    assert south.tokens == -(-(200_000 - trained) * 40 // 94)
    text = read_shard(now, "south")
    assert np.array_equal(
        text, np.concatenate([read_shard(now, n) for n in ("east", "north", "west")])
    )
    assert bigram_of(now) == bigram_of(run)
    assert [array.name for array in now.data.arrays if array.name != HELD_OUT] == [
        "shard-east",
        "shard-north",
        "shard-west",
    ]
    require_sound(now)


def test_a_newcomer_begins_at_the_heads_with_a_peers_moments_and_the_runs_learning_rate(
    run: Run, live: Live
) -> None:
    join(run, "south", ["batch_size=2"])
    now = open_run(run.store_url, "r")
    peer = returning.peer_checkpoint(now, "south")
    assert peer is not None
    most = max(t for n in ("east", "west") for _, t in history.saved_tokens(now, n))
    assert peer.state.record.trained == most
    newcomer = live(now, "south")._learner
    for p, clock in enumerate(newcomer.clocks):
        head, _ = records.find_head(now.store, p, clock.base_version)
        base, _ = records.require_commit(now.store, p, clock.base_version)
        assert clock.base_version > 0
        assert head.version - clock.base_version <= 3, "what was newest a moment ago"
        assert np.array_equal(newcomer.local_values(p), records.read_public(now.store, base))
    first, second, steps = _moments(newcomer)
    assert all(np.array_equal(*pair) for pair in zip(first, peer.state.first, strict=True))
    assert all(np.array_equal(*pair) for pair in zip(second, peer.state.second, strict=True))
    assert steps == peer.state.tensor_steps
    assert (newcomer.trained, newcomer.cursor) == (0, 0)
    begins_at = now.island("south").joined_at
    whole = building.schedule_of(now.config, 1_000_000)
    expected = learning_rate_at(round(1_000_000 * begins_at), whole)
    assert learning_rate_at(0, building.schedule_for(now, "south")) == pytest.approx(
        expected, rel=1e-4
    )


def _moments(learner: Learner) -> tuple[Any, Any, Any]:
    state = learner.state("")
    return state.first, state.second, state.tensor_steps


def test_a_newcomer_contributes_is_known_to_a_synchronizer_at_work_and_leaves_with_its_share(
    run: Run, live: Live
) -> None:
    adjust(run, ["total_tokens=60_000"])
    join(run, "south", ["batch_size=2"])
    now = open_run(run.store_url, "r")
    stretch = live(now, "south").train(60.0)
    assert stretch.outcome == "left"
    assert stretch.trained >= now.own_tokens("south") > 0

    def tallies() -> list[Tally]:
        heads = [records.find_head(now.store, p)[0] for p in range(3)]
        return [head.tallies.get("south", Tally()) for head in heads]

    wait_for(lambda: all(tally.merges > 0 for tally in tallies()), 60.0)
    assert not any("unknown" in tally.refused for tally in tallies())
    assert {i.name: i.state for i in status(now).islands}["south"] == "left"
    require_sound(now)


def test_the_roster_looks_again_when_somebody_it_does_not_know_has_registered(run: Run) -> None:
    roster = Roster(run)
    roster.members()
    join(run, "south", [])
    history.register(run, "south", records.new_attempt, stamp=time.time)
    assert roster.members().incarnations["south"] == 0
    history.register(run, "stranger", records.new_attempt, stamp=time.time)
    assert "stranger" not in roster.members().incarnations


def test_a_learner_asked_to_leave_pushes_its_rest_and_the_others_shares_grow(
    run: Run, live: Live
) -> None:
    trained, before = tokens_of(run, "west"), run.own_tokens("east")
    made = leave(run, "west")
    assert [str(change) for change in made.changes] == [f"islands.west.tokens null → {trained}"]
    now = open_run(run.store_url, "r")
    assert live(now, "west").train(30.0).outcome == "left"
    assert now.own_tokens("west") == trained
    # Of what west leaves, east and north get theirs by 2 to 1.4.
    assert now.own_tokens("east") == -(-(200_000 - trained) * 20 // 34)
    assert now.own_tokens("east") > before
    assert settle(now).num_changes == now.num_changes, "nothing is left to hand on"
    require_sound(now)


def test_what_an_island_leaves_undone_is_handed_on_once_and_a_spare_starts(
    tmp_path: Path, live: Live, merging: Callable[[Run], Merging]
) -> None:
    spare = '[[islands]]\nname = "south"\nbatch_size = 2\nspare = true\n'
    run = created(tmp_path, *QUICK, text=runs.TINY + spare)
    merging(run)
    assert len(read_shard(run, "south")) < len(read_shard(run, "east")) * 1.1, "a shard of its own"
    life = live(run, "east")
    life.train(0.5)
    assert life._sender.drain(5)
    assert settle(run).num_changes == 0
    assert {i.name: i.state for i in status(run).islands}["south"] == "spare"
    life.close()
    history.register(run, "east", records.new_attempt, stamp=time.time)
    history.write_off(run, "east", stamp=time.time)
    now = settle(run)
    trained = tokens_of(run, "east")
    assert (now.num_changes, now.island("south").spare) == (1, False)
    assert now.island("east").tokens == trained
    assert now.island("south").joined_at == trained / 200_000
    assert settle(now).num_changes == 1
    assert live(now, "south").train(0.3).outcome == "goes on"
    require_sound(now)


def test_a_spare_joins_by_hand_with_its_own_shard(tmp_path: Path) -> None:
    spare = '[[islands]]\nname = "south"\nbatch_size = 2\nspare = true\n'
    run = created(tmp_path, *QUICK, text=runs.TINY + spare)
    made = join(run, "south", ["speed=0.5"])
    assert {change.key for change in made.changes} == {"islands.south.spare", "islands.south.speed"}
    assert {change.acts for change in made.changes} == {"at once"}
    assert refreshed(run).own_tokens("south") == pytest.approx(200_000 * 1 / 6.4, abs=1)
    require_sound(run)


def test_who_is_asked_to_leave_twice_is_replaced_by_one_spare(tmp_path: Path) -> None:
    spares = "".join(f'[[islands]]\nname = "spare-{n}"\nspare = true\n' for n in (1, 2))
    run = created(tmp_path, *QUICK, text=runs.TINY + spares)
    assert leave(run, "east").changes
    assert leave(run, "east").changes == ()
    members = {island.name for island in refreshed(run).config.members}
    assert members == {"east", "north", "west", "spare-1"}


def test_a_run_that_wrote_an_island_off_is_still_one_on_prefect(tmp_path: Path) -> None:
    run = created(tmp_path)
    history.register(run, "west", records.new_attempt, stamp=time.time, where=processes.here())
    history.register(run, "east", records.new_attempt, stamp=time.time)
    history.write_off(run, "east", stamp=time.time)
    assert not was_local(run)
    assert {change.acts for change in join(run, "south", []).changes} == {"at once"}


def test_what_nobody_may_join_or_leave_is_refused_and_nothing_recorded(run: Run) -> None:
    history.write_off(run, "north", stamp=time.time)
    refused: list[tuple[Callable[[], object], str]] = [
        (lambda: join(run, "west", []), "'west', which takes part already"),
        (lambda: join(run, "north", []), "'north', which left for good"),
        (lambda: join(run, "No Name", []), "must match pattern|must be|match"),
        (lambda: join(run, "south", ["batch_size=0"]), "batch_size must be"),
        (lambda: join(run, "south", ["colour=red"]), "colour is unknown"),
        (lambda: join(run, "south", ["batch_size=60_000"]), "must hold one batch"),
        (lambda: leave(run, "south"), r"one at work \(east, west\), got 'south'"),
        (lambda: leave(run, "north"), r"one at work \(east, west\), got 'north'"),
        (lambda: adjust(run, ["islands.west.spare=true"]), r"islands\.west\.spare must stay"),
        (lambda: adjust(run, ["islands.west.joined_at=0.5"]), r"joined_at must stay \(0\.0\)"),
        (lambda: change_config(run, ["islands.west.spare=true"], {}), r"west\.spare must stay"),
        (lambda: adjust(run, ["islands.west.name=w"]), "identity cannot change.*islands.names"),
        (lambda: join(run, "a.b", ["batch_size=2"]), "name must be 1 to 64 .* got 'a.b'; choose"),
        *(
            (lambda dealt=dealt: join(run, "south", [dealt]), f"joining decides, got {key}")
            for dealt in ("name=oslo", "tokens=9", "joined_at=0.5", "spare=true")
            for key in [dealt.split("=")[0]]
        ),
        (lambda: join(run, "south", ["checkpoints=ftp://x"]), "must begin with file://.*'ftp'"),
        (
            lambda: adjust(run, ["islands.west.checkpoints=memory://x"]),
            r"must stay \(null\), where",
        ),
    ]
    for act, text in refused:
        with pytest.raises(ConfigError, match=text):
            act()
    assert records.numbers_in(run.store, "changes") == []
    adjust(run, ["total_tokens=10"])
    with pytest.raises(ConfigError, match="something must be left to train"):
        join(run, "south", [])


def test_islands_that_are_leaving_already_do_not_let_the_last_one_leave(run: Run) -> None:
    leave(run, "east")
    leave(run, "west")
    with pytest.raises(ConfigError, match="somebody must train on when an island leaves"):
        leave(run, "north")
    assert len(leave(run, "west").changes) == 0


def test_what_a_newcomer_saves_in_a_store_of_its_own_is_seen_by_who_knew_the_run_before(
    run: Run, tmp_path: Path, live: Live
) -> None:
    join(run, "south", ["batch_size=2", f"checkpoints={(tmp_path / 'own').as_uri()}"])
    life = live(open_run(run.store_url, "r"), "south")
    life.train(0.5)
    life.close()
    assert history.checkpoints(refreshed(run), "south") != []


def test_the_last_island_does_not_leave(tmp_path: Path) -> None:
    run = created(tmp_path)
    for name in ("east", "west"):
        history.write_off(run, name, stamp=time.time)
    with pytest.raises(ConfigError, match="somebody must train on when an island leaves"):
        leave(run, "north")
    asked = created(tmp_path / "asked")
    for name in ("east", "west"):
        leave(asked, name)  # they have not left yet, and will train no more
    with pytest.raises(ConfigError, match="somebody must train on when an island leaves"):
        leave(asked, "north")


def test_nobody_joins_a_run_whose_learners_wait_or_that_the_local_driver_trains(
    tmp_path: Path,
) -> None:
    with pytest.raises(ConfigError, match="learners wait for one another"):
        join(created(tmp_path / "a", "sync.algorithm=streaming"), "south", [])
    driver = runs.start(runs.tiny_config(tmp_path / "b"))
    for _ in range(40):
        driver.advance()
    with pytest.raises(ConfigError, match="which the local driver trains"):
        join(driver.run, "south", [])


def test_under_the_local_driver_an_island_leaves_when_the_run_is_resumed(tmp_path: Path) -> None:
    driver = runs.start(runs.tiny_config(tmp_path, "total_tokens=6_000"))
    while driver.trained["east"] < 600:
        driver.advance()
    driver.save()
    made = leave(driver.run, "east")
    assert made.changes[0].acts == joining.adjusting.RESUMED
    ended = runs.finish(runs.reopen(driver.run))
    found = {island.name: island.tokens for island in status(ended).islands}
    assert found["east"] < 800
    assert sum(found.values()) >= 6_000, "what it left undone, the others have trained"
    require_sound(ended)
    assert verify(ended.store_url, "r").problems == []
    assert ended.store.read(names.FINISHED) is not None


def test_under_the_local_driver_nobody_takes_the_place_of_who_leaves(tmp_path: Path) -> None:
    spare = '[[islands]]\nname = "south"\nbatch_size = 2\nspare = true\n'
    driver = runs.start(runs.tiny_config(tmp_path, text=runs.TINY + spare))
    while driver.trained["east"] < 200:
        driver.advance()
    driver.save()
    leave(driver.run, "east")
    leave(driver.run, "west")
    with pytest.raises(ConfigError, match="somebody must train on"):
        leave(driver.run, "north")
    ended = runs.finish(runs.reopen(driver.run))
    found = {island.name: island.state for island in status(ended).islands}
    assert found == {"east": "left", "north": "left", "west": "left", "south": "spare"}
    assert verify(ended.store_url, "r").problems == []


# --- coming back ---


def test_who_comes_back_adopts_the_newest_version_of_each_fragment_at_once_and_its_rate_goes_on(
    run: Run, live: Live
) -> None:
    """West dies with what it had not committed; east trains on, and several versions appear."""
    past = history.look_back(run, "west").last
    assert past is not None
    before = [clock.base_version for clock in past.clocks]
    east = live(run, "east")
    while any(records.find_head(run.store, p)[0].version < before[p] + 2 for p in range(3)):
        east.train(0.2)
    east.close()
    heads = [records.find_head(run.store, p)[0].version for p in range(3)]
    west = live(run, "west")
    assert all(c.base_version >= h for c, h in zip(west._learner.clocks, heads, strict=True))
    assert west._learner.trained == past.trained
    west.train(0.01)
    trained = west._learner.trained - 32  # as the last step began: 2 sequences of 16 tokens
    rate = learning_rate_at(trained, building.schedule_for(run, "west"))
    assert {group["lr"] for group in west._learner.optimizer.param_groups} == {rate}
    assert trained >= past.trained


def test_the_loss_of_a_learner_that_comes_back_goes_on_where_it_was(tmp_path: Path) -> None:
    """Killed after its step 120 of some 300, away for 30 steps: neither parameters nor moments begin anew."""
    fault = 'local.faults=[{island = "west", step = 120, return_after_steps = 30}]'
    driver = runs.start(runs.tiny_config(tmp_path, "total_tokens=25_000", fault))
    losses: list[float] = []
    marks: list[int] = []

    def watch(beat: Beat) -> None:
        if beat.island == "west" and beat.loss is not None:
            losses.append(beat.loss)
        elif beat.island == "west" and beat.what.startswith("comes back"):
            marks.append(len(losses))

    driver.watch = watch
    runs.finish(driver)
    (back,) = marks
    begun = sum(losses[:12]) / 12
    before, after = sum(losses[back - 12 : back]) / 12, sum(losses[back : back + 12]) / 12
    assert before < 0.8 * begun
    assert after < before + 0.05 * (begun - before)
