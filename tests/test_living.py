"""A learner's life on a real store: its share, stops, deaths, successors, broken numbers, outages, warm segments."""

from __future__ import annotations

import itertools
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from infra.store import Store
from islands import names
from islands.landing import landed
from islands.ledger import record_from_json
from islands.types import LearnerLost, Position, Refused, StoreLost, StoreUnavailable
from tasks import (
    adjusting,
    collecting,
    creating,
    evaluating,
    exchanging,
    history,
    living,
    records,
    segments,
    stopping,
)
from tasks.living import Life
from tasks.merging import Synchronizer
from tasks.reporting import status
from tasks.runs import Run, open_run
from tests import runs
from tests.faulty import Deed, Passing
from tests.test_sending import Weather, created, require_sound, wait_for

NAME = "solo"
SOLO = (
    runs.TINY[: runs.TINY.index("[[islands]]")]
    + f'[pipeline]\ncheckpoint_seconds = 0.1\n[[islands]]\nname = "{NAME}"\nbatch_size = 2\n'
)
LONG = "total_tokens=100_000_000"
ROOT = Path(__file__).resolve().parent.parent


class Merging:
    """A synchronizer at work in a thread of its own, as a second process would be."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self._synchronizer = Synchronizer(run, records.new_attempt, stamp=time.time)
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._work)
        self._thread.start()

    def _work(self) -> None:
        while not self._is_over.wait(0.01):
            self._synchronizer.poll(now=time.monotonic())

    def close(self) -> None:
        self._is_over.set()
        self._thread.join()

    def finish(self) -> None:
        """Merge what is pending, all having left, and end the run."""
        self.close()
        while not self._synchronizer.poll(now=time.monotonic() + 1e6).is_settled:
            pass
        evaluating.evaluate(self.run, closes=True)
        collecting.finish(self.run, self._synchronizer.verdicts())


@pytest.fixture
def alive() -> Iterator[Callable[..., Life]]:
    """Begin lives; whatever a test leaves running is closed at its end."""
    lives: list[Life] = []

    def begin(run: Run, tell: Callable[[Mapping[str, Any]], None] = lambda message: None) -> Life:
        name = run.config.islands[0].name
        lives.append(Life(run, name, records.new_attempt, stamp=time.time, tell=tell))
        return lives[-1]

    yield begin
    for life in lives:
        life.close()


def mergings() -> Iterator[Callable[[Run], Merging]]:
    """Give what starts a synchronizer, and close all that it has started: a fixture's body."""
    started: list[Merging] = []

    def start(run: Run) -> Merging:
        started.append(Merging(run))
        return started[-1]

    yield start
    for one in started:
        one.close()


merging = pytest.fixture(mergings)


Begin = Callable[..., Life]
Start = Callable[[Run], Merging]


class Refusing(Passing):
    """Refuses one verb, while told to."""

    def __init__(self, inner: Store, verb: str, *, is_refusing: bool = False) -> None:
        super().__init__(inner)
        self.verb, self.is_refusing = verb, is_refusing

    def act(self, verb: str, name: str, deed: Deed) -> Any:
        if self.is_refusing and verb == self.verb:
            raise StoreUnavailable("no room" if verb == "create" else "no answer")
        return deed()


def solo(folder: Path, *assignments: str) -> Run:
    return created(folder, *assignments, text=SOLO)


def head(run: Run) -> int:
    return records.find_head(run.store, 0)[0].version


def checkpoints(run: Run) -> list[str]:
    return history.checkpoints(run, NAME)


def ask_to_stop(run: Run) -> None:
    mark = records.new_attempt()
    stopping.ask(run, is_stop=True, reason="test", mark=mark, island=NAME)


def exchange_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("diloco-")]


# --- the whole of a life ---


def test_a_life_trains_its_share_leaves_and_every_token_has_a_fate(
    tmp_path: Path, alive: Begin, merging: Start
) -> None:
    run = solo(tmp_path, "total_tokens=8_000")
    synchronizer = merging(run)
    life = alive(run)
    stretch = life.train(60.0)
    life.close()
    assert stretch.outcome == "left"
    assert stretch.trained >= 8_000
    assert (stretch.step, stretch.num_steps) == (250, 250)
    assert stretch.loss > 0
    body, _ = records.require(run.store, names.left(NAME))
    assert record_from_json(body["record"]).trained == stretch.trained
    assert head(run) > 3
    synchronizer.finish()
    require_sound(run)
    assert exchange_threads() == []


def test_nothing_is_trained_when_the_share_is_trained_already(tmp_path: Path, alive: Begin) -> None:
    """It died between its last push and its farewell: the next one only says farewell."""
    run = solo(tmp_path, "total_tokens=2_000")
    weather = Weather(run.store)

    def strike(verb: str, name: str) -> None:
        if (verb, name) == ("create", names.left(NAME)):
            raise KeyboardInterrupt

    weather.before = strike
    with pytest.raises(KeyboardInterrupt):
        alive(replace(run, store=weather)).train(60.0)
    life = alive(run)
    stretch = life.train(60.0)
    assert (stretch.outcome, stretch.num_steps, stretch.incarnation) == ("left", 0, 1)
    assert stretch.trained >= 2_000
    require_balance_of_one(run)


def require_balance_of_one(run: Run) -> None:
    """Require a sound run; that it was not closed after everybody had left is no fault of a life."""
    from tasks.verifying import verify

    found = verify(run.store_url, run.run_id)
    assert [problem for problem in found.problems if problem.name != names.FINISHED] == []
    assert all(row.imbalance == 0 for row in found.rows)


def test_a_life_whose_clock_jumps_by_a_day_and_back_trains_its_share_and_balances(
    tmp_path: Path, merging: Start
) -> None:
    run = solo(tmp_path, "total_tokens=8_000")
    synchronizer = merging(run)
    jumps = itertools.cycle([0.0, 86_400.0, -3_600.0, -86_400.0])
    life = Life(
        run,
        NAME,
        records.new_attempt,
        stamp=lambda: time.time() + next(jumps),
        tell=lambda message: None,
    )
    try:
        assert life.train(60.0).outcome == "left"
    finally:
        life.close()
    synchronizer.finish()
    require_sound(run)


def test_a_life_whose_clock_is_set_back_by_a_day_goes_on_saving(tmp_path: Path) -> None:
    run, days = solo(tmp_path, LONG), [0.0]
    life = Life(
        run,
        NAME,
        records.new_attempt,
        stamp=lambda: time.time() + days[0],
        tell=lambda message: None,
    )
    try:
        life.train(0.1)
        assert life._sender.drain(10)  # what is saved now is stamped now
        days[0] = -86_400.0
        life.train(0.5)
        assert life._sender.drain(10)
    finally:
        life.close()
    saved, _ = records.require(run.store, checkpoints(run)[0])
    assert saved["at"] < time.time() - 80_000
    require_sound(run)


# --- stops ---


def test_a_stop_ends_in_a_checkpoint_and_the_next_life_goes_on_at_the_same_step(
    tmp_path: Path, alive: Begin
) -> None:
    """Without a merge in between, what was trained since the last copy is still there."""
    run = solo(tmp_path, LONG, "pipeline.checkpoint_seconds=1000", "sync.period_steps=10_000")
    life = alive(run)
    assert life.train(0.2).outcome == "goes on"
    ask_to_stop(run)
    stopped = life.train(30.0)
    assert stopped.outcome == "stopped"
    life.close()
    assert checkpoints(run) == [f"checkpoints/{NAME}/0-{stopped.step}.json"]
    require_sound(run)
    stopping.let_go_on(run, records.new_attempt, NAME)
    successor = alive(run)
    again = successor.train(0.2)
    assert again.incarnation == 1
    assert again.step == stopped.step + again.num_steps
    assert again.trained == stopped.trained + 32 * again.num_steps
    ask_to_stop(run)
    assert successor.train(30.0).outcome == "stopped"
    body, _ = records.require(run.store, checkpoints(run)[0])
    clocks = record_from_json(body["record"]).clocks
    assert all(clock.rolled_back == 0 for clock in clocks)
    assert all(clock.open_steps >= again.step for clock in clocks)
    require_sound(run)


def test_a_life_whose_process_is_told_to_end_saves_all_and_the_next_goes_on_at_the_same_step(
    tmp_path: Path, alive: Begin, merging: Start
) -> None:
    run = solo(tmp_path, LONG)
    merging(run)
    life = alive(run)
    life.train(0.3)
    told = iter([False, False, True])
    drained = life.train(60.0, is_told_to_end=lambda: next(told))
    life.close()
    assert (drained.outcome, drained.num_steps) == ("drained", 2)
    assert names.parse_checkpoint(checkpoints(run)[0]) == (NAME, (0, drained.step))
    assert records.newest_incarnation(run.store, NAME) == 0
    successor = alive(run)
    assert successor.train(0.0).step == drained.step
    assert successor.incarnation == 1
    require_sound(run)


def test_a_stop_during_an_outage_is_saved_once_the_store_is_back(
    tmp_path: Path, alive: Begin
) -> None:
    """The stop is known; then the store goes away for a moment, just while the state should be written."""
    run = solo(tmp_path, LONG, "pipeline.checkpoint_seconds=1000")
    weather = Weather(run.store)
    told: list[Mapping[str, Any]] = []
    life = alive(replace(run, store=weather), told.append)
    life.train(0.1)
    ask_to_stop(run)

    def fail_twice(verb: str, name: str) -> None:
        if name.startswith("payloads/checkpoints/") and weather.num_failures < 2:
            weather.num_failures += 1
            raise StoreUnavailable("no answer")

    weather.before = fail_twice
    stretch = life.train(30.0)
    assert stretch.outcome == "stopped"
    assert weather.num_failures == 2
    assert checkpoints(run) == [f"checkpoints/{NAME}/0-{stretch.step}.json"]
    require_sound(run)


def test_a_stop_from_before_does_not_end_a_warm_life(tmp_path: Path, alive: Begin) -> None:
    """It was seen between two segments, and taken back before the next one began."""
    run = solo(tmp_path, LONG)
    weather = Weather(run.store)
    life = alive(replace(run, store=weather))
    assert life.train(0.1).outcome == "goes on"
    ask_to_stop(run)
    weather.seen.clear()
    wait_for(lambda: ("read", "stops/0.json") in weather.seen, 5)
    wait_for(lambda: weather.seen[-1][1].startswith("versions/"), 5)
    stopping.let_go_on(run, records.new_attempt, NAME)
    assert life.train(0.1).outcome == "goes on"


# --- deaths and successors ---

_DOOMED = """
import sys, time
from tasks import records
from tasks.living import Life
from tasks.runs import open_run
run = open_run(sys.argv[1], "r")
life = Life(run, "solo", records.new_attempt, stamp=time.time, tell=lambda message: None)
life.train(600.0)
"""


@pytest.mark.slow
def test_a_killed_life_has_a_successor_and_the_ledger_balances(
    tmp_path: Path, alive: Begin, merging: Start
) -> None:
    config = runs.tiny_config(tmp_path, LONG, text=SOLO)
    prepared = creating.prepare_run(config, "r")
    run = creating.create_run(prepared, creating.attempts_of(prepared))
    synchronizer = merging(run)
    process = subprocess.Popen([sys.executable, "-c", _DOOMED, run.store_url], cwd=ROOT)
    try:
        wait_for(lambda: head(run) >= 2 and len(checkpoints(run)) >= 2, 60)
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    require_sound(run)
    last = history.look_back(run, NAME).last
    assert last is not None
    life = alive(open_run(run.store_url, "r"))
    assert life.incarnation == 1
    assert life.train(0.0).step == last.position.step > 0
    known = head(run)
    assert life.train(1.0).outcome == "goes on"
    wait_for(lambda: head(run) > known, 10)
    ask_to_stop(run)
    assert life.train(30.0).outcome == "stopped"
    synchronizer.close()
    require_sound(run)


def test_a_second_life_of_the_same_name_fences_the_first(
    tmp_path: Path, alive: Begin, merging: Start
) -> None:
    run = solo(tmp_path, LONG, "pipeline.checkpoint_seconds=0.01")
    synchronizer = merging(run)
    first = alive(run)
    first.train(0.3)
    ended: list[str] = []
    thread = threading.Thread(target=lambda: ended.append(first.train(60.0).outcome))
    thread.start()
    second = alive(run)
    begun = time.monotonic()
    assert second.train(0.5).outcome == "goes on"
    thread.join(20)
    assert ended == ["superseded"]
    assert time.monotonic() - begun < 10
    first.close()
    assert second.incarnation == first.incarnation + 1
    ask_to_stop(run)
    assert second.train(30.0).outcome == "stopped"
    synchronizer.close()
    require_sound(run)


def test_a_checkpoint_written_after_its_successor_registered_is_no_part_of_its_past(
    tmp_path: Path, alive: Begin
) -> None:
    run = solo(tmp_path, LONG, "pipeline.checkpoint_seconds=1000", "sync.period_steps=10_000")
    first = alive(run)
    first.train(0.1)
    ask_to_stop(run)
    saved = first.train(30.0)
    stopping.let_go_on(run, records.new_attempt, NAME)
    weather = Weather(run.store)
    late: list[int] = []

    def write_late(verb: str, name: str) -> None:
        is_registered = records.newest_incarnation(run.store, NAME) == 1
        if not late and is_registered and name.startswith("payloads/versions/"):
            first._receiver.forget_stop()
            late.append(0)
            for _ in range(5):
                first._one_step(time.perf_counter())
            first._save()
            assert first._sender.drain(10)
            late[0] = first._learner.position.step

    weather.before = write_late
    second = alive(replace(run, store=weather))
    assert late == [saved.step + 5]
    assert len(checkpoints(run)) == 2
    stretch = second.train(0.0)
    assert (stretch.step, stretch.trained) == (saved.step, saved.trained)
    ask_to_stop(run)
    assert second.train(30.0).outcome == "stopped"
    require_sound(run)


def test_a_life_whose_newest_checkpoint_is_cut_short_goes_on_from_the_one_before(
    tmp_path: Path, alive: Begin
) -> None:
    run = solo(tmp_path, LONG, "pipeline.checkpoint_seconds=1000", "sync.period_steps=10_000")
    first = alive(run)
    first.train(0.1)
    first._save()
    assert first._sender.drain(10)
    ask_to_stop(run)
    first.train(0.0)
    stopping.let_go_on(run, records.new_attempt, NAME)
    first._receiver.forget_stop()
    first._one_step(time.perf_counter())
    first._save()
    assert first._sender.drain(10)
    first.close()
    newest, older = checkpoints(run)
    folder = f"payloads/{newest.removesuffix('.json')}"
    chunk = next(name for name in run.store.list_names(folder) if "values-0/c/" in name)
    whole = run.store.read(chunk)
    assert whole is not None
    run.store.delete(chunk)
    run.store.create(chunk, whole[:-1])
    second = alive(run)._learner
    saved = exchanging.read_checkpoint(run, older).state
    for p, values in enumerate(saved.values):
        assert np.array_equal(second.local_values(p), landed(values))
    assert second.position == Position(1, first._learner.position.step)
    assert (second.trained, second.cursor) == (first._learner.trained, first._learner.cursor)
    tokens_of_a_step = first._learner.trained - saved.record.trained
    assert all(clock.rolled_back == tokens_of_a_step > 0 for clock in second.clocks)


def test_a_life_that_is_superseded_says_no_farewell(tmp_path: Path, alive: Begin) -> None:
    run = solo(tmp_path, "total_tokens=2_000")
    weather = Weather(run.store)
    first = alive(replace(run, store=weather))
    first._receiver.close()  # it has not noticed yet
    history.register(run, NAME, records.new_attempt, stamp=time.time)
    assert first.train(30.0).outcome == "superseded"
    assert run.store.read(names.left(NAME)) is None
    require_sound(run)


def test_a_life_whose_beginning_fails_leaves_no_thread(tmp_path: Path, alive: Begin) -> None:
    run = solo(tmp_path, LONG)
    weather = Weather(run.store)
    weather.down = ("versions/",)
    with pytest.raises(StoreUnavailable):
        alive(replace(run, store=weather))

    def refuse(message: Mapping[str, Any]) -> None:
        raise RuntimeError("the connection is closed")

    with pytest.raises(RuntimeError):
        alive(run, refuse)
    assert exchange_threads() == []
    assert alive(run).incarnation == 2
    require_sound(run)


# --- broken numbers, broken threads ---


def test_broken_numbers_end_a_life_and_the_next_comes_back_healthy(
    tmp_path: Path, alive: Begin, merging: Start
) -> None:
    run = solo(tmp_path, "total_tokens=20_000")
    synchronizer = merging(run)
    first = alive(run)
    while not checkpoints(run):
        assert first.train(0.02).outcome == "goes on"
    for moments in first._learner.optimizer.state.values():  # an adoption would heal parameters
        moments["exp_avg"].fill_(float("nan"))
    with pytest.raises(Refused, match="non-finite"):
        first.train(60.0)
    first.close()
    second = alive(run)
    stretch = second.train(60.0)
    second.close()
    assert (stretch.outcome, stretch.incarnation) == ("left", 1)
    assert 0 < stretch.loss < 10
    synchronizer.finish()
    require_sound(run)
    for layout in run.layouts:
        commit, _ = records.find_head(run.store, layout.index)
        assert bool((abs(records.read_public(run.store, commit)) < 1e3).all())


def test_broken_numbers_in_the_last_push_are_no_farewell(tmp_path: Path, alive: Begin) -> None:
    run = solo(tmp_path, "total_tokens=320", "sync.period_steps=10_000")
    life = alive(run)
    next(iter(life._learner.model.parameters())).data.fill_(float("nan"))
    with pytest.raises(Refused, match="non-finite"):
        life.train(30.0)
    assert run.store.read(names.left(NAME)) is None
    require_sound(run)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("folder", ["payloads/inbox/", "versions/"])
def test_a_life_does_not_train_on_without_its_exchange(
    tmp_path: Path, alive: Begin, folder: str
) -> None:
    """A thread that dies of a bug, sender or receiver, ends the life; unseen, all its work would be in vain."""
    run = solo(tmp_path, LONG)
    weather = Weather(run.store)
    life = alive(replace(run, store=weather))
    life.train(0.1)
    weather.bugs = (folder,)
    with pytest.raises(LearnerLost, match="a bug"):
        life.train(30.0)
    weather.bugs = ()
    life.close()
    require_sound(run)
    assert alive(run).train(0.1).outcome == "goes on"


# --- outages ---


def test_an_outage_stops_no_training_and_loses_nothing(
    tmp_path: Path, alive: Begin, merging: Start
) -> None:
    run = solo(tmp_path, LONG)
    merging(run)
    weather = Weather(run.store)
    told: list[Mapping[str, Any]] = []
    life = alive(replace(run, store=weather), told.append)
    before = life.train(0.3)
    weather.down = ("",)
    during = life.train(1.0)
    assert during.num_steps > before.num_steps / 2
    assert life.is_superseded is False  # unknown is no reason to give up a healthy learner
    num_pushed = sum(message["kind"] == "pushed" for message in told)
    weather.down = ()
    wait_for(lambda: sum(message["kind"] == "pushed" for message in told) >= num_pushed + 3, 30)
    ask_to_stop(run)
    assert life.train(30.0).outcome == "stopped"
    life.close()
    require_sound(run)


@pytest.mark.parametrize("verb", ["create", "read"])
def test_a_store_that_is_gone_for_good_ends_a_life_in_one_message(
    tmp_path: Path, alive: Begin, verb: str
) -> None:
    """A full disk answers what is read, and takes nothing: that counts too."""
    run = solo(tmp_path, LONG, "pipeline.store_patience_seconds=2")
    store = Refusing(run.store, verb)
    told: list[Mapping[str, Any]] = []
    life = alive(replace(run, store=store), told.append)
    assert life.train(0.5).outcome == "goes on"
    store.is_refusing = True
    begun = time.monotonic()
    with pytest.raises(StoreLost) as caught:
        life.train(60.0)
    assert 2.0 <= time.monotonic() - begun < 20.0
    rule = (
        r"a store must answer within pipeline.store_patience_seconds \(2\), and has not for \d+ s"
    )
    assert re.search(rule + r": no .*; mend it, then `diloco resume` goes on", str(caught.value))
    complaints = [m["text"] for m in told if "until it answers" in m.get("text", "")]
    assert 1 <= len(complaints) <= 3  # of pushes, of checkpoints, of fetching: each once
    life.close()
    store.is_refusing = False
    again = alive(run)
    assert again.train(0.5).outcome == "goes on"
    assert again.incarnation == 1
    again.close()
    require_sound(run)


def test_checkpoints_that_cannot_be_written_stop_no_training_and_no_farewell(
    tmp_path: Path, alive: Begin, merging: Start
) -> None:
    run = solo(tmp_path, "total_tokens=120_000", "pipeline.store_patience_seconds=1")
    merging(run)
    weather = Weather(run.store)
    weather.down = ("payloads/checkpoints/",)
    told: list[Mapping[str, Any]] = []
    life = alive(replace(run, store=weather), told.append)
    begun = time.monotonic()
    stretch = life.train(60.0)
    assert (stretch.outcome, stretch.trained) == ("left", 120_000)
    assert time.monotonic() - begun > 1.1  # longer than pushes would be tried
    assert checkpoints(run) == []
    assert sum("no answer" in m.get("text", "") for m in told) == 1
    life.close()
    require_balance_of_one(run)


def test_a_new_incarnation_waits_for_a_store_that_takes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a full disk nothing is written, so it uses up no restart; a store away for good ends it by name."""
    run = solo(tmp_path, LONG)
    store = Refusing(run.store, "create", is_refusing=True)
    monkeypatch.setattr(segments, "open_run", lambda *where: replace(run, store=store))
    told: list[Mapping[str, Any]] = []
    monkeypatch.setattr(segments, "teller", lambda topic: told.append)
    with pytest.raises(StoreLost, match="no room"):
        segments.train_segment(replace(segment_of(run), patience_seconds=1.0))
    timer = threading.Timer(1.0, lambda: setattr(store, "is_refusing", False))
    timer.start()
    stretch = segments.train_segment(segment_of(run))
    timer.join()
    assert (stretch.outcome, stretch.incarnation) == ("goes on", 0)
    assert [m["text"] for m in told if "room" in m.get("text", "")] == [
        "the store: no room; asked until it answers"
    ] * 2
    segments._lives.pop((run.store_url, run.run_id, NAME)).close()


def test_a_farewell_waits_for_the_store(tmp_path: Path, alive: Begin) -> None:
    run = solo(tmp_path, "total_tokens=2_000")
    weather = Weather(run.store)
    weather.down = (names.left(NAME),)
    told: list[Mapping[str, Any]] = []
    life = alive(replace(run, store=weather), told.append)
    timer = threading.Timer(1.5, lambda: setattr(weather, "down", ()))
    timer.start()
    stretch = life.train(30.0)
    timer.join()
    assert stretch.outcome == "left"
    assert any("farewell" in message.get("text", "") for message in told)
    assert run.store.read(names.left(NAME)) is not None
    require_balance_of_one(run)


def test_a_farewell_whose_answer_was_lost_counts(tmp_path: Path, alive: Begin) -> None:
    run = solo(tmp_path, "total_tokens=2_000")
    weather = Weather(run.store)
    weather.lost = [names.left(NAME)]
    assert alive(replace(run, store=weather)).train(30.0).outcome == "left"
    require_balance_of_one(run)


def test_neither_a_slow_store_nor_a_slow_listener_makes_a_learner_idle(
    tmp_path: Path, alive: Begin
) -> None:
    run = solo(tmp_path, LONG, "model.width=64", "pipeline.checkpoint_seconds=0.01")
    weather = Weather(run.store)
    life = alive(replace(run, store=weather), lambda message: time.sleep(0.1))
    weather.before = lambda verb, name: time.sleep(0.05)
    stretch = life.train(3.0)
    assert stretch.num_steps > 50
    assert 0 < stretch.idle_share < 0.3
    require_sound(run)


# --- segments ---


@pytest.fixture
def train_here(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Train segments in this process; there is no Dask worker here to tell anything through."""
    from tasks import segments

    monkeypatch.setattr(segments, "teller", lambda topic: lambda message: None)
    yield segments.train_segment
    for life in segments._lives.values():
        life.close()
    segments._lives.clear()


def segment_of(run: Run, seconds: float = 0.2) -> Any:
    from tasks.segments import Segment

    return Segment(run.store_url, run.run_id, NAME, seconds, patience_seconds=60.0)


def test_two_segments_keep_the_learner_warm(tmp_path: Path, train_here: Any) -> None:
    run = solo(tmp_path, LONG)
    first = train_here(segment_of(run))
    second = train_here(segment_of(run))
    assert (first.outcome, second.outcome) == ("goes on", "goes on")
    assert second.incarnation == first.incarnation == 0
    assert second.step == first.step + second.num_steps
    assert records.numbers_in(run.store, f"learners/{NAME}") == [0]
    require_sound(run)


def test_after_an_exception_the_next_segment_begins_a_new_incarnation(
    tmp_path: Path, train_here: Any
) -> None:
    from tasks import segments

    run = solo(tmp_path, LONG)
    train_here(segment_of(run))
    (life,) = segments._lives.values()
    next(iter(life._learner.model.parameters())).data.fill_(float("nan"))
    with pytest.raises(Refused):
        train_here(segment_of(run, 30.0))
    assert exchange_threads() == []
    again = train_here(segment_of(run))
    assert (again.outcome, again.incarnation) == ("goes on", 1)
    assert again.loss < 10
    require_sound(run)


def test_a_warm_learner_that_was_superseded_gives_way_to_a_new_incarnation(
    tmp_path: Path, train_here: Any
) -> None:
    from tasks import segments

    run = solo(tmp_path, LONG)
    train_here(segment_of(run))
    history.register(run, NAME, records.new_attempt, stamp=time.time)
    (warm,) = segments._lives.values()
    ends = time.monotonic() + 20
    while not warm.is_superseded:  # its receiver looks about once a second
        assert time.monotonic() < ends
        time.sleep(0.05)
    again = train_here(segment_of(run))
    assert (again.outcome, again.incarnation) == ("goes on", 2)
    require_sound(run)


def test_after_the_end_no_learner_registers_any_more(
    tmp_path: Path, train_here: Any, merging: Start
) -> None:
    run = solo(tmp_path, "total_tokens=2_000")
    synchronizer = merging(run)
    left = train_here(segment_of(run, 30.0))
    assert left.outcome == "left"
    again = train_here(segment_of(run))
    assert (again.outcome, again.num_steps, again.incarnation) == ("left", 0, 0)
    assert (again.step, again.trained) == (left.step, left.trained)
    synchronizer.finish()
    assert train_here(segment_of(run)).outcome == "finished"
    assert exchange_threads() == []
    require_sound(run)


# --- a narrow link ---


def saved(told: list[Mapping[str, Any]]) -> list[str]:
    return [message["name"] for message in told if message["kind"] == "saved"]


def test_a_link_too_narrow_costs_copies_and_no_step(
    tmp_path: Path, alive: Begin, merging: Start
) -> None:
    """A period of 6 steps makes three payloads, together some 20 kB: 0.8 s at 0.2 Mbit/s, and 20 ms of training."""
    elsewhere = f'islands.{NAME}.checkpoints="memory://near-{tmp_path.name}"'
    narrow = f"islands.{NAME}.bandwidth_mbit=0.2"
    run = solo(tmp_path, "total_tokens=60_000", narrow, elsewhere)
    synchronizer = merging(run)
    told: list[Mapping[str, Any]] = []
    life = alive(run, told.append)
    begun = time.monotonic()
    while (stretch := life.train(0.5)).outcome == "goes on":
        # Waiting for its copies, it would be idle for nearly all of the time.
        assert stretch.idle_share < 0.3
    elapsed = time.monotonic() - begun
    life.close()
    assert stretch.outcome == "left"
    body, _ = records.require(run.store, names.left(NAME))
    last = record_from_json(body["record"])
    assert last.bytes_up <= 1.1 * 25_000 * elapsed
    assert last.replaced_copies > 0
    assert last.replaced_tokens > 0
    # Checkpoints lie near: they do not pay, and none of them waited for more than a push.
    assert len(saved(told)) >= elapsed / 4
    synchronizer.finish()
    require_sound(run)
    island = status(run).islands[0]
    assert (island.replaced_copies, island.replaced_tokens) == (
        last.replaced_copies,
        last.replaced_tokens,
    )


def test_a_learner_behind_a_narrow_link_is_waited_for_until_its_last_work_is_pushed(
    tmp_path: Path, alive: Begin
) -> None:
    """Some 20 kB in chunks of 4 kB, at 5 kB/s: four seconds, longer than a store is asked that does not answer."""
    elsewhere = f'islands.{NAME}.checkpoints="memory://near-{tmp_path.name}"'
    narrow = (f"islands.{NAME}.bandwidth_mbit=0.04", "sync.chunk_bytes=4096", elsewhere)
    patience = "pipeline.store_patience_seconds=2"
    run = solo(tmp_path, "total_tokens=320", "sync.period_steps=10_000", patience, *narrow)
    life = alive(run)
    begun = time.monotonic()
    assert life.train(60.0).outcome == "left"
    assert time.monotonic() - begun > 3.0
    life.close()
    require_balance_of_one(run)


def test_a_wider_link_lets_a_learner_leave_that_was_pushing_its_last_work(
    tmp_path: Path, alive: Begin
) -> None:
    """At 80 bits a second its last push would take half an hour."""
    narrow = f"islands.{NAME}.bandwidth_mbit=0.00008"
    run = solo(tmp_path, "total_tokens=320", "sync.period_steps=10_000", narrow)
    life = alive(run)
    wide = f"islands.{NAME}.bandwidth_mbit=100"
    timer = threading.Timer(2.0, lambda: adjusting.adjust(run, [wide]))
    timer.start()
    assert life.train(30.0).outcome == "left"
    timer.join()
    life.close()
    require_balance_of_one(run)


def test_a_stop_through_a_blocked_link_is_seen_and_its_checkpoint_written(
    tmp_path: Path, alive: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At 80 bits a second the first push would take minutes; the stop, the last checkpoint and the next life do not."""
    monkeypatch.setattr(living, "DRAIN_SECONDS", 2.0)
    run = solo(tmp_path, LONG, f"islands.{NAME}.bandwidth_mbit=0.00008")
    life = alive(run)
    assert life.train(0.5).outcome == "goes on"
    ask_to_stop(run)
    begun = time.monotonic()
    stretch = life.train(60.0)
    life.close()
    assert stretch.outcome == "stopped"
    assert time.monotonic() - begun < 8.0
    assert alive(run).train(0.0).step == stretch.step


def test_a_successor_is_seen_while_a_version_trickles_in(
    tmp_path: Path, alive: Begin, merging: Start
) -> None:
    """What the first life pushed is merged once the second is there: at 100 bytes a second that takes it minutes."""
    run = solo(tmp_path, LONG)
    first = alive(run)
    first.train(0.3)
    first.close()
    island = run.config.islands[0].model_copy(update={"bandwidth_mbit": 0.0008})
    slow = replace(run, config=run.config.model_copy(update={"islands": (island,)}))
    weather = Weather(slow.store)
    life = alive(replace(slow, store=weather))
    merging(run)
    first_version = re.compile("payloads/versions/f..../v00000001/")
    wait_for(lambda: any(first_version.match(name) for _, name in weather.seen))
    history.register(run, NAME, records.new_attempt, stamp=time.time)
    begun = time.monotonic()
    assert life.train(60.0).outcome == "superseded"
    assert time.monotonic() - begun < 8.0
    assert life._receiver.take() == {}
