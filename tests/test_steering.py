"""Settings changed while a run is under way: what is recorded, who takes it over when, and islands in quarantine."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from islands import names
from islands.config import IDENTITY_KEYS, RunConfig, parse_config
from islands.ledger import FragmentClock, after_new_period
from islands.schedule import learning_rate_at
from islands.steering import (
    ACTS,
    AT_ONCE,
    LOCKSTEP_KEYS,
    NEXT_INCARNATION,
    ON_RESUME,
    _flat,
    _tree,
    changes_between,
    when_it_acts,
)
from islands.types import ConfigError, Position
from tasks import building, history, records, stopping
from tasks.adjusting import RESUMED, adjust, quarantine
from tasks.inbox import Roster, View
from tasks.joining import leave
from tasks.living import Life
from tasks.ringing import Bell
from tasks.runs import Run, as_most_forgiving, open_run, refreshed
from tasks.supervising import Supervisor
from tasks.verifying import verify
from tests import runs
from tests.test_living import LONG, solo
from tests.test_living import alive as alive
from tests.test_sending import Weather, created, require_sound, wait_for
from tests.test_synchronizing import Heard, heads, waiting, work

Begin = Callable[..., Life]


# --- the table ---


def test_every_setting_is_part_of_the_identity_or_has_a_moment_in_the_table() -> None:
    keys = [key for key, _ in _flat(_tree(RunConfig())) if key not in IDENTITY_KEYS]
    undecided = [
        key for key in keys if key != "store" and not any(_fits(key, pattern) for pattern in ACTS)
    ]
    assert undecided == []
    assert set(LOCKSTEP_KEYS) <= set(keys)


def _fits(key: str, pattern: str) -> bool:
    return key == pattern or ("*" in pattern and key.startswith(pattern.partition("*")[0]))


@pytest.mark.parametrize(
    ("key", "when"),
    [
        ("sync.min_learners", AT_ONCE),
        ("inner.beta2", AT_ONCE),
        ("pipeline.segment_seconds", AT_ONCE),
        ("islands.east.speed", AT_ONCE),
        ("islands.east.batch_size", NEXT_INCARNATION),
        ("islands.east.tokens", AT_ONCE),
        ("islands.east.spare", AT_ONCE),
        ("islands.east.cluster.spares", ON_RESUME),
        ("islands.east.cluster.threads", ON_RESUME),
        ("local.faults", ON_RESUME),
        ("something.new", ON_RESUME),
    ],
)
def test_the_first_pattern_that_fits_says_when(key: str, when: str) -> None:
    assert when_it_acts(key) == when


def test_a_change_names_an_island_by_its_name_and_both_values() -> None:
    old = parse_config("", source="old")
    assignments = ["islands.east.batch_size=4", "sync.min_learners=3", 'quarantine=["asia"]']
    new = parse_config("", assignments=assignments, source="new")
    assert [str(change) for change in changes_between(old, new)] == [
        "sync.min_learners null → 3",
        "islands.east.batch_size 8 → 4",
        'quarantine [] → ["asia"]',
    ]
    assert changes_between(old, old) == ()


def test_under_another_period_a_push_keeps_its_place_in_it() -> None:
    clock = FragmentClock(3, "d3", Position(0, 8), 18)
    # 18 of 24 steps are left; of 8 that is 6, of 40 it is 30, of 5 it is 3.75, rounded up.
    for new, left in ((8, 6), (40, 30), (5, 4), (24, 18)):
        assert after_new_period(clock, old_steps=24, new_steps=new) == replace(
            clock, steps_to_push=left
        )
    due = replace(clock, steps_to_push=-2)
    assert after_new_period(due, old_steps=24, new_steps=6).steps_to_push == 0


# --- the record ---


def test_a_run_without_a_new_change_is_the_same_object(tmp_path: Path) -> None:
    run = created(tmp_path)
    assert refreshed(run) is run
    adjust(run, ["sync.alpha=0.5"])
    adjust(run, ["sync.max_staleness=2"])
    newer = refreshed(run)
    assert (newer.config.sync.alpha, newer.config.sync.max_staleness) == (0.5, 2)
    assert newer.num_changes == 2
    assert newer.store is run.store
    assert refreshed(newer) is newer
    assert open_run(run.store_url, run.run_id).num_changes == 2
    require_sound(run)


def test_a_damaged_change_is_named_by_verify_and_ends_nobody(tmp_path: Path) -> None:
    run = created(tmp_path)
    run.store.create("changes/0.json", b"{}")
    assert refreshed(run) is run
    assert [problem.name for problem in verify(run.store_url, "r").problems] == ["changes/0.json"]


def test_nothing_is_recorded_where_nothing_differs(tmp_path: Path) -> None:
    run = created(tmp_path)
    assert adjust(run, ["sync.period_steps=6"]).changes == ()
    assert records.numbers_in(run.store, "changes") == []


def test_of_two_adjustments_at_once_both_end_up_in_force(tmp_path: Path) -> None:
    run = created(tmp_path)
    weather = Weather(run.store)

    def overtake(verb: str, name: str) -> None:
        if (verb, name) == ("create", "changes/0.json"):
            weather.before = lambda verb, name: None
            adjust(run, ["sync.alpha=0.5"])

    weather.before = overtake
    made = adjust(replace(run, store=weather), ["sync.grace_fraction=0"])
    assert [change.key for change in made.changes] == ["sync.grace_fraction"]
    sync = refreshed(run).config.sync
    assert (sync.alpha, sync.grace_fraction) == (0.5, 0.0)
    assert records.numbers_in(run.store, "changes") == [0, 1]
    require_sound(run)


REFUSED = {
    "sync.num_fragments=2": "sync.num_fragments",
    "sync.codec=bfloat16": "sync.codec",
    "sync.min_learner=2": "did you mean sync.min_learners",
    "sync.min_learners=4": "sync.min_learners must be <=",
    "store=file:///elsewhere": "store must stay",
    "islands.east.batch_size=60000": "batch_size",
}


@pytest.mark.parametrize("assignment", REFUSED)
def test_what_no_change_may_be_is_refused_and_nothing_recorded(
    tmp_path: Path, assignment: str
) -> None:
    run = created(tmp_path)
    with pytest.raises(ConfigError, match=REFUSED[assignment]):
        adjust(run, [assignment])
    assert records.numbers_in(run.store, "changes") == []


def test_every_identity_key_that_would_change_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"seed, model\.width, sync\.codec_down;"):
        adjust(created(tmp_path), ["seed=7", "model.width=32", "sync.codec_down=float32"])


def test_a_finished_run_is_changed_no_more(tmp_path: Path) -> None:
    run = runs.train(runs.tiny_config(tmp_path, "total_tokens=1_400"))
    for act in (
        lambda: adjust(run, ["sync.alpha=0.5"]),
        lambda: quarantine(run, "west", is_released=False),
    ):
        with pytest.raises(ConfigError, match="needs a run that has not ended"):
            act()
    require_sound(run)


def test_learners_that_wait_for_one_another_keep_their_period(tmp_path: Path) -> None:
    run = created(tmp_path, "sync.algorithm=streaming")
    with pytest.raises(ConfigError, match=r"sync\.period_steps must stay while learners wait"):
        adjust(run, ["sync.period_steps=12"])
    assert adjust(run, ["outer.momentum=0.5"]).changes[0].acts == AT_ONCE


def test_it_is_said_when_a_change_acts(tmp_path: Path) -> None:
    run = created(tmp_path)
    assert adjust(run, ["sync.alpha=0.5"]).changes[0].acts == AT_ONCE
    stopping.ask(run, is_stop=True, reason="a test", mark="a-1")
    assert adjust(run, ["sync.alpha=0.6"]).changes[0].acts == RESUMED
    local = waiting(tmp_path / "local").run_id, waiting(tmp_path / "local2")
    assert adjust(local[1], ["sync.alpha=0.5"]).changes[0].acts == RESUMED
    history.write_off(run, "west", stamp=time.time)
    assert adjust(run, ["total_tokens=9_000"]).departed == ("west",)


# --- what verify makes of it ---


def test_what_an_earlier_setting_let_go_is_not_missed_under_a_later_one(tmp_path: Path) -> None:
    """Collected under retention = "bounded" and max_staleness 1; then both are set to keep more."""
    driver = runs.start(runs.tiny_config(tmp_path, "sync.max_staleness=1"))
    while min(heads(driver.run).values()) < 6:
        assert driver.advance()
    driver.save()
    assert adjust(driver.run, ["retention=all", "sync.max_staleness=9"]).changes
    require_sound(driver.run)
    opened = open_run(driver.run.store_url, "r")
    assert (opened.config.retention, opened.config.sync.max_staleness) == ("all", 9)
    forgiving = as_most_forgiving(opened).config
    assert (forgiving.retention, forgiving.sync.max_staleness) == ("bounded", 1)
    require_sound(runs.finish(runs.reopen(opened)))


# --- the synchronizer and the bell ---


@pytest.fixture
def loops() -> Iterator[Callable[[Run], Heard]]:
    """Start synchronizers' loops in threads; all are ended with the test."""
    started: list[tuple[threading.Thread, Heard]] = []

    def start(run: Run) -> Heard:
        heard = Heard()
        thread = threading.Thread(target=work, args=(run, heard))
        thread.start()
        started.append((thread, heard))
        return heard

    yield start
    for thread, heard in started:
        heard.is_over.set()
        thread.join(30)
        assert not thread.is_alive()


def test_a_synchronizer_at_work_takes_over_another_quorum(
    tmp_path: Path, loops: Callable[[Run], Heard]
) -> None:
    run = waiting(tmp_path)
    adjust(run, ["sync.min_learners=3", "pipeline.linger_periods=1_000"])
    heard = loops(open_run(run.store_url, "r"))
    before = heads(run)
    time.sleep(1.5)
    assert heads(run) == before
    adjust(run, ["sync.min_learners=1", "outer.momentum=0.25"])
    wait_for(lambda: heads(run) != before, 10)
    fragment = next(p for p, version in heads(run).items() if version != before[p])
    commit, _ = records.require_commit(run.store, fragment, before[fragment] + 1)
    assert commit.momentum == 0.25
    assert heard.said == []


def test_a_bell_rings_for_the_quorum_that_holds_now(tmp_path: Path) -> None:
    run = waiting(tmp_path)
    bell = Bell(run)
    adjust(run, ["sync.min_learners=3"])
    assert bell.is_waiting(now=0.0)
    bell.steer(refreshed(run))
    assert not bell.is_waiting(now=0.0)


def test_a_supervisor_takes_over_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = created(tmp_path)
    supervisor = Supervisor(run, logging.getLogger("tests.steering"))
    adjust(run, ["pipeline.max_restarts=1"])
    with caplog.at_level(logging.INFO):
        supervisor._steer()
        supervisor._steer()
    assert supervisor.run.config.pipeline.max_restarts == 1
    assert caplog.messages == ["settings changed: pipeline.max_restarts 5 → 1"]


def test_with_a_larger_staleness_a_view_judges_as_one_opened_now(tmp_path: Path) -> None:
    driver = runs.start(runs.tiny_config(tmp_path, "sync.max_staleness=0", "retention=all"))
    while min(heads(driver.run).values()) < 5:
        assert driver.advance()
    view = View(driver.run, driver.run.layouts[0])
    adjust(driver.run, ["sync.max_staleness=3"])
    steered = refreshed(driver.run)
    view.steer(steered)
    fresh = View(steered, steered.layouts[0])
    view.observe(0.0)
    fresh.observe(0.0)
    members = Roster(steered).members()
    assert view.lineage(members) == fresh.lineage(members)
    assert (
        len(view.lineage(members).digests) == 6
    )  # the head, three that may be a base, and two more
    assert view.refusals(view.lineage(members)) == fresh.refusals(fresh.lineage(members))


# --- a learner ---


def later(seconds: float, act: Callable[[], object]) -> threading.Timer:
    timer = threading.Timer(seconds, act)
    timer.start()
    return timer


def test_a_learner_leaves_once_its_share_has_become_smaller(tmp_path: Path, alive: Begin) -> None:
    run = solo(tmp_path, LONG)
    told: list[Mapping[str, Any]] = []
    life = alive(run, told.append)
    timer = later(0.3, lambda: adjust(run, ["total_tokens=32"]))
    stretch = life.train(60.0)
    timer.join()
    assert stretch.outcome == "left"
    assert stretch.trained > 32
    said = [message["text"] for message in told if "settings changed" in message.get("text", "")]
    assert len(said) == 1
    assert said[0].endswith("settings changed: total_tokens 100000000 → 32")
    assert verify(run.store_url, "r").problems[0].name == names.FINISHED


def test_a_learner_trains_on_once_its_share_has_become_larger(tmp_path: Path, alive: Begin) -> None:
    run = solo(tmp_path, "total_tokens=3_200")
    life = alive(run)
    adjust(run, ["total_tokens=6_400"])
    wait_for(lambda: life._receiver.run.num_changes == 1, 10)
    stretch = life.train(60.0)
    assert (stretch.outcome, stretch.trained) == ("left", 6_400)


def test_inner_settings_act_at_the_next_step_and_the_period_at_the_next_push(
    tmp_path: Path, alive: Begin
) -> None:
    run = solo(tmp_path, LONG, "sync.period_steps=600")
    life = alive(run)
    life.train(0.05)
    left = [life._learner.clock(p).steps_to_push for p in range(3)]
    assignments = ("inner.learning_rate=0.001", "inner.beta1=0.5", "inner.weight_decay=0.25")
    adjust(run, [*assignments, "inner.clip_norm=0.5", "sync.period_steps=60", "sync.alpha=0.5"])
    wait_for(lambda: life._receiver.run.num_changes == 1, 10)
    life._steer()
    steered = [life._learner.clock(p).steps_to_push for p in range(3)]
    assert steered == [-(-steps * 60 // 600) for steps in left]
    trained = life._learner.trained
    life._one_step(time.perf_counter())
    matrices, vectors = life._learner.optimizer.param_groups
    schedule = building.schedule_of(life.run.config, life.run.own_tokens("solo"))
    assert matrices["lr"] == learning_rate_at(trained, schedule) <= 0.001
    assert (matrices["betas"], matrices["weight_decay"]) == ((0.5, 0.99), 0.25)
    assert vectors["weight_decay"] == 0.0
    assert life.run.config.sync.alpha == 0.5


def test_a_batch_size_waits_for_the_next_incarnation(tmp_path: Path, alive: Begin) -> None:
    run = solo(tmp_path, LONG)
    first = alive(run)
    adjust(run, ["islands.solo.batch_size=1"])
    wait_for(lambda: first._receiver.run.num_changes == 1, 10)
    stretch = first.train(0.1)
    assert stretch.trained == 32 * stretch.num_steps > 0  # 2 sequences of 16 tokens
    first.close()
    second = alive(open_run(run.store_url, "r"))
    before = second._learner.trained
    stretch = second.train(0.1)
    assert stretch.trained - before == 16 * stretch.num_steps > 0


def test_a_learner_never_waits_for_a_change(tmp_path: Path, alive: Begin) -> None:
    """The store stalls while the receiver looks; the learner trains on."""
    run = solo(tmp_path, LONG, "sync.period_steps=10_000", "pipeline.checkpoint_seconds=1000")
    weather = Weather(run.store)
    life = alive(replace(run, store=weather))
    life.train(0.1)
    stalled = threading.Event()

    def stall(verb: str, name: str) -> None:
        if name == "changes/0.json" and not stalled.is_set():
            stalled.set()
            time.sleep(1.5)

    weather.before = stall
    stretch = life.train(1.0)
    assert stalled.is_set()
    assert stretch.num_steps > 50
    assert stretch.seconds < 1.4


# --- quarantine ---


BROKEN = {
    'quarantine=["mars"]': 'quarantine must name islands (east, north, west), got "mars"',
    'quarantine=["east", "north", "west"]': "must leave as many islands as a merge needs (1), got 0",
}


@pytest.mark.parametrize("assignment", BROKEN)
def test_a_quarantine_names_islands_and_leaves_some(tmp_path: Path, assignment: str) -> None:
    with pytest.raises(ConfigError) as caught:
        runs.tiny_config(tmp_path, assignment)
    assert BROKEN[assignment] in str(caught.value)


def test_where_learners_wait_for_one_another_none_is_set_apart(tmp_path: Path) -> None:
    """It would wait at its turn for a version that nobody makes once all others have left."""
    waits = ('sync.algorithm="diloco"', "sync.num_fragments=1", 'quarantine=["west"]')
    with pytest.raises(ConfigError, match=r"must be empty .* \(sync.algorithm diloco\), got west;"):
        runs.tiny_config(tmp_path, *waits)


def test_a_quarantine_leaves_what_min_learners_asks_for(tmp_path: Path) -> None:
    run = created(tmp_path, "sync.min_learners=2")
    quarantine(run, "west", is_released=False)
    with pytest.raises(ConfigError, match=r"merge needs \(2\), got 1 left; release one, or lower"):
        quarantine(run, "north", is_released=False)
    with pytest.raises(ConfigError, match="must be one of the run's"):
        quarantine(run, "mars", is_released=False)
    assert refreshed(run).config.quarantine == ("west",)
    quarantine(run, "west", is_released=True)
    assert refreshed(run).config.quarantine == ()


def test_a_quarantine_leaves_somebody_who_trains_on(tmp_path: Path) -> None:
    run = created(tmp_path)
    leave(run, "north")
    quarantine(run, "west", is_released=False)
    with pytest.raises(ConfigError, match="outside quarantine must train on, got west left, all"):
        leave(run, "east")
    with pytest.raises(ConfigError, match="got east, west left, all in it; `diloco quarantine r "):
        adjust(run, ['quarantine=["east", "west"]'])
    quarantine(run, "west", is_released=True)
    leave(run, "east")
    with pytest.raises(ConfigError, match="`diloco stop r` stops the run"):
        quarantine(run, "west", is_released=False)
    assert refreshed(run).config.quarantine == ()


def tally_of(run: Run, learner: str) -> tuple[int, dict[str, int]]:
    """Return (merges, refusals by reason) of a learner, over all fragments."""
    merges, refused = 0, dict[str, int]()
    for p in range(len(run.layouts)):
        tally = records.find_head(run.store, p)[0].tallies[learner]
        merges += tally.merges
        for reason, (count, _) in tally.refused.items():
            refused[reason] = refused.get(reason, 0) + count
    return merges, refused


def test_an_island_in_quarantine_trains_and_adopts_and_counts_for_nothing(tmp_path: Path) -> None:
    run = runs.train(runs.tiny_config(tmp_path, 'quarantine=["west"]'))
    merges, refused = tally_of(run, "west")
    assert merges == 0
    assert refused["quarantined"] > 3
    body, _ = records.require(run.store, names.left("west"))
    assert min(clock["base_version"] for clock in body["record"]["clocks"]) > 0
    assert tally_of(run, "east")[0] > 0
    require_sound(run)


def test_after_its_release_an_island_counts_again(tmp_path: Path) -> None:
    driver = runs.start(runs.tiny_config(tmp_path, 'quarantine=["west"]'))
    while min(heads(driver.run).values()) < 3:
        assert driver.advance()
    driver.save(reschedule=False)
    quarantine(driver.run, "west", is_released=True)
    run = runs.finish(runs.reopen(driver.run))
    merges, refused = tally_of(run, "west")
    assert merges > 0
    assert refused["quarantined"] > 0
    require_sound(run)


def test_the_quorum_is_of_islands_that_count(tmp_path: Path) -> None:
    """Two of three must merge; of the two that count one has left: the last one is enough."""
    run = created(tmp_path, "sync.min_learners=2", 'quarantine=["west"]')
    view, roster = View(run, run.layouts[0]), Roster(run)
    assert view.round(roster.members(), {}).min_learners == 2
    for name in ("east", "west"):
        history.register(run, name, records.new_attempt, stamp=time.time)
    state = view.round(roster.members(), {})
    assert [expectation.learner for expectation in state.expected] == ["east"]
    history.write_off(run, "north", stamp=time.time)
    state = view.round(roster.members(), {})
    assert (state.min_learners, state.is_final) == (1, False)
    history.write_off(run, "east", stamp=time.time)
    state = view.round(roster.members(), {})
    assert (state.min_learners, state.is_final, state.expected) == (1, True, ())


def test_a_run_ends_though_all_but_the_island_in_quarantine_left_long_ago(tmp_path: Path) -> None:
    config = runs.tiny_config(tmp_path, 'quarantine=["west"]', "islands.west.start_steps=90")
    driver = runs.start(config)
    while records.departed(driver.run.store) != {"east", "north"}:
        assert driver.advance()
    before = heads(driver.run)
    run = runs.finish(driver)
    assert records.departed(run.store) == {"east", "north", "west"}
    after = heads(run)
    assert all(after[p] - before[p] <= 1 for p in before)  # what was pending, and nothing of west's
    assert tally_of(run, "west")[0] == 0
    body, _ = records.require(run.store, names.FINISHED)
    assert {verdict["reason"] for verdict in body["verdicts"]} >= {"quarantined"}
    require_sound(run)


@pytest.fixture
def two(alive: Begin) -> Iterator[Callable[[Run, Callable[[Mapping[str, Any]], None]], None]]:
    """Let east and north train, each in a thread; east is listened to."""
    is_over = threading.Event()
    threads: list[threading.Thread] = []

    def train(life: Life) -> None:
        while not is_over.is_set():
            life.train(0.2)

    def start(run: Run, tell: Callable[[Mapping[str, Any]], None]) -> None:
        north = tuple(island for island in run.config.islands if island.name == "north")
        alone = replace(run, config=run.config.model_copy(update={"islands": north}))
        for life in (alive(run, tell), alive(alone)):
            threads.append(threading.Thread(target=train, args=(life,)))
            threads[-1].start()

    yield start
    is_over.set()
    for thread in threads:
        thread.join(30)


@pytest.mark.slow
def test_a_living_island_is_set_apart_told_so_and_taken_back(
    tmp_path: Path,
    two: Callable[[Run, Callable[[Mapping[str, Any]], None]], None],
    loops: Callable[[Run], Heard],
) -> None:
    run = created(tmp_path, LONG, "sync.min_learners=1", "retention=all")
    told: list[Mapping[str, Any]] = []
    two(run, told.append)
    heard = loops(run)
    wait_for(lambda: tally_of(run, "east")[0] > 2)
    quarantine(run, "east", is_released=False)
    wait_for(lambda: any("was refused as quarantined" in str(m.get("text")) for m in told))
    merges, before = tally_of(run, "east")[0], heads(run)
    wait_for(lambda: min(version - before[p] for p, version in heads(run).items()) > 3)
    assert tally_of(run, "east")[0] == merges
    quarantine(run, "east", is_released=True)
    wait_for(lambda: tally_of(run, "east")[0] > merges + 2)
    heard.is_over.set()
    text = next(m["text"] for m in told if "quarantined" in str(m.get("text")))
    assert text.startswith("east: its work on fragment ")
    assert text.endswith("--release` lets it count again")
