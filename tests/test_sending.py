"""The sender: order, replacement, outages, lost answers, refusals and its end. With a real learner and a real store."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from infra.arrays import ArrayReader
from infra.store import Store
from islands import names
from islands.codecs import Encoded, decode
from islands.contributions import Telemetry
from islands.data import batch_at
from islands.landing import landed
from islands.learner import Copy, Learner
from islands.ledger import LearnerRecord, check_link, record_from_json
from islands.types import LearnerLost, Refused, StoreUnavailable
from tasks import building, creating, exchanging, history, records
from tasks.exchanging import Exchange
from tasks.merging import Synchronizer
from tasks.runs import Run, read_shard
from tasks.sending import Sender, Standing
from tasks.verifying import verify
from tests import runs
from tests.faulty import Deed, Passing

NAME = "east"
PUSHES, SAVES = "inbox/", "checkpoints/"


class Weather(Passing):
    """A real store that can be down, stalled, or lose the answers to its creates, for names below some folders.

    Attributes:
        down: folders whose verbs fail.
        lost: folders whose next create is done, and then reported as failed; used up one by one.
        bugs: folders whose verbs raise what no store may raise.
        gate: verbs wait until it is set.
        written: names created, in order.
    """

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.down: tuple[str, ...] = ()
        self.lost: list[str] = []
        self.bugs: tuple[str, ...] = ()
        self.gate = threading.Event()
        self.gate.set()
        self.is_reached = threading.Event()
        self.written: list[str] = []
        self.num_failures = 0
        self.seen: list[tuple[str, str]] = []
        self.before: Callable[[str, str], None] = lambda verb, name: None

    def act(self, verb: str, name: str, deed: Deed) -> Any:
        self.seen.append((verb, name))
        self.before(verb, name)
        if not self.gate.is_set():
            self.is_reached.set()
            assert self.gate.wait(30)
        if name.startswith(self.bugs) and self.bugs:
            raise RuntimeError("a bug")
        if name.startswith(self.down) and self.down:
            self.num_failures += 1
            raise StoreUnavailable(f"{name}: no answer")
        done = deed()
        if verb == "create":
            self.written.append(name)
            if self.lost and name.startswith(self.lost[0]):
                self.lost.pop(0)
                raise StoreUnavailable(f"{name}: the answer was lost")
        return done


def created(folder: Path, *assignments: str, text: str = runs.TINY) -> Run:
    """Return a new run in this process's memory."""
    url = f"memory://{folder.name}-{id(folder)}"
    config = runs.tiny_config(folder, *assignments, store=url, text=text)
    prepared = creating.prepare_run(config, "r")
    return creating.create_run(prepared, creating.attempts_of(prepared))


def require_sound(run: Run) -> None:
    found = verify(run.store_url, run.run_id)
    assert found.problems == []
    assert all(row.imbalance == 0 for row in found.rows)


def wait_for(claim: Callable[[], object], seconds: float = 20.0) -> None:
    """Wait until a claim is true; it must become so in time."""
    ends = time.monotonic() + seconds
    while not claim():
        assert time.monotonic() < ends, "it did not become true in time"
        time.sleep(0.002)


@dataclass
class Desk:
    """A learner with a sender on a store with weather."""

    run: Run
    weather: Weather
    learner: Learner
    exchange: Exchange
    sender: Sender
    told: list[Mapping[str, Any]] = field(default_factory=list)

    def step(self, num_steps: int = 1) -> None:
        shard = read_shard(replace(self.run, store=self.weather.inner), NAME)
        for _ in range(num_steps):
            cursor, context = self.learner.cursor, self.run.config.model.context
            batch = batch_at(
                shard, cursor=cursor, batch_size=2, context=context, seed=0, learner=NAME
            )
            self.learner.step(batch, num_tokens=2 * context, num_samples=2)

    def standing(self) -> Standing:
        return Standing(self.learner.record(""), 0.01, Telemetry(loss=1.0))

    def offer(self, *fragments: int) -> list[Copy]:
        copies = [self.learner.copy(p, next_push_steps=6) for p in fragments]
        self.sender.offer(copies, self.standing())
        return copies

    def hold(self, fragment: int) -> None:
        """Bring the sender to a stand within a push of a fragment."""
        self.weather.is_reached.clear()
        self.weather.gate.clear()
        self.offer(fragment)
        assert self.weather.is_reached.wait(10)

    def let_go(self) -> None:
        self.weather.gate.set()
        assert self.sender.drain(20)

    def pushed(self) -> list[int]:
        return [message["fragment"] for message in self.told if message["kind"] == "pushed"]

    def links(self) -> list[tuple[str, LearnerRecord]]:
        """Return the learner's links in the order in which they were written."""
        headers = [name for name in self.weather.written if name.startswith((PUSHES, SAVES))]
        return [
            (
                name,
                record_from_json(records.require(self.weather.inner, name)[0]["record"]),
            )
            for name in headers
        ]

    def require_forward_chain(self) -> None:
        links = self.links()
        assert links
        for (before, earlier), (name, later) in pairwise(links):
            assert check_link(later, earlier) is None, name
            assert later.previous == records.require(self.weather.inner, before)[1], name


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    yield from desk_of(tmp_path)


@pytest.fixture
def four_bits(tmp_path: Path) -> Iterator[Desk]:
    yield from desk_of(tmp_path, "sync.codec=int4")


def desk_of(folder: Path, *assignments: str) -> Iterator[Desk]:
    run = created(folder, 'retention="all"', "sync.min_learners=1", *assignments)
    weather = Weather(run.store)
    outside = replace(run, store=weather)
    learner = building.build_learner(run, NAME)
    past = history.register(run, NAME, records.new_attempt, stamp=time.time)
    learner.begin(exchanging.fetch_heads(run), incarnation=past.incarnation)
    exchange = Exchange(
        outside,
        NAME,
        past.incarnation,
        past.last_digest,
        records.new_attempt,
        stamp=time.time,
        link=exchanging.link_of(outside, NAME, past.last),
    )
    told: list[Mapping[str, Any]] = []
    desk = Desk(outside, weather, learner, exchange, Sender(exchange, 3, told.append), told)
    yield desk
    weather.gate.set()
    desk.sender.close()


def test_the_fragment_whose_last_commit_is_oldest_goes_first(desk: Desk) -> None:
    for fragment in (0, 2, 1):
        desk.step()
        desk.offer(fragment)
        assert desk.sender.drain(10)
    desk.step()
    desk.hold(1)
    desk.step()
    desk.offer(0, 1, 2)
    desk.let_go()
    assert desk.pushed() == [0, 2, 1, 1, 0, 2, 1]
    desk.require_forward_chain()
    require_sound(desk.run)


def test_a_newer_copy_of_the_same_interval_replaces_the_older_silently(desk: Desk) -> None:
    desk.step()
    desk.hold(1)
    desk.offer(0)
    desk.step(2)
    desk.offer(0)
    desk.let_go()
    assert desk.pushed() == [1, 0]
    assert desk.sender.take_dropped() == []
    offers = [name for name in desk.weather.written if name.startswith("inbox/f0000/")]
    found = records.read_contribution(desk.weather.inner, offers[0])
    assert found is not None
    assert (found[0].stop.step, found[0].num_steps) == (3, 3)
    require_sound(desk.run)


def test_a_newer_copy_of_a_later_interval_counts_the_older_as_dropped(desk: Desk) -> None:
    desk.step()
    desk.offer(0)
    assert desk.sender.drain(10)
    inner = replace(desk.run, store=desk.weather.inner)
    synchronizer = Synchronizer(inner, records.new_attempt, stamp=time.time)
    assert (0, 1) in synchronizer.poll(now=1e9).published
    desk.step(2)
    desk.hold(1)
    unsent = desk.offer(0)[0]
    desk.learner.adopt(0, exchanging.fetch(inner, 0, 1), alpha=0.0, next_push_steps=6)
    desk.step()
    desk.offer(0)
    assert desk.sender.take_dropped() == [(0, unsent.num_tokens)]
    assert desk.sender.take_dropped() == []
    desk.learner.count_replaced(0, unsent.num_tokens)
    desk.step()
    desk.offer(2)
    desk.let_go()
    assert desk.pushed() == [0, 1, 2, 0] or desk.pushed() == [0, 1, 0, 2]
    desk.require_forward_chain()
    require_sound(desk.run)


def test_a_copy_that_comes_back_from_a_failed_push_counts_as_dropped_too(desk: Desk) -> None:
    """It was under way when its successor, of a later interval, was handed over."""
    desk.step()
    desk.offer(0)
    assert desk.sender.drain(10)
    inner = replace(desk.run, store=desk.weather.inner)
    Synchronizer(inner, records.new_attempt, stamp=time.time).poll(now=1e9)
    desk.step()
    desk.weather.down = ("payloads/inbox/",)
    desk.hold(0)
    tokens = desk.learner.clock(0).copied_tokens
    desk.learner.adopt(0, exchanging.fetch(inner, 0, 1), alpha=0.0, next_push_steps=6)
    desk.step()
    desk.offer(0)
    desk.weather.gate.set()
    wait_for(lambda: desk.weather.num_failures)
    desk.weather.down = ()
    assert desk.sender.drain(20)
    assert desk.sender.take_dropped() == [(0, tokens)]
    assert desk.pushed() == [0, 0]
    require_sound(desk.run)


def test_a_waiting_checkpoint_goes_before_any_push(desk: Desk) -> None:
    """The pushes carry the account of a later step: after them the checkpoint would link a past to its future."""
    desk.step()
    desk.hold(1)
    desk.step(2)
    desk.sender.save(desk.learner.state(""))
    desk.step(2)
    desk.offer(0, 2)
    desk.let_go()
    kinds = [name.split("/")[0] for name, _ in desk.links()]
    assert kinds == ["inbox", "checkpoints", "inbox", "inbox"]
    assert [record.position.step for _, record in desk.links()] == [1, 3, 5, 5]
    desk.require_forward_chain()
    require_sound(desk.run)


def test_a_newer_checkpoint_takes_the_place_of_one_that_waits(desk: Desk) -> None:
    desk.step()
    desk.hold(1)
    desk.sender.save(desk.learner.state(""))
    assert desk.sender.is_saving
    desk.step(2)
    desk.sender.save(desk.learner.state(""))
    desk.let_go()
    assert not desk.sender.is_saving
    assert [m["name"] for m in desk.told if m["kind"] == "saved"] == [
        f"checkpoints/{NAME}/0-3.json"
    ]
    require_sound(desk.run)


def test_no_handing_over_waits_for_a_store_that_stalls(desk: Desk) -> None:
    desk.step()
    desk.hold(1)
    timer = threading.Timer(1.0, desk.weather.gate.set)
    timer.start()
    seconds: list[float] = []
    while not desk.weather.gate.is_set():
        desk.step()
        copies = [desk.learner.copy(p, next_push_steps=6) for p in range(3)]
        state, standing = desk.learner.state(""), desk.standing()
        for act in (
            lambda: desk.sender.offer(copies, standing),  # noqa: B023
            lambda: desk.sender.save(state),  # noqa: B023
            desk.sender.take_dropped,
        ):
            begun = time.perf_counter()
            act()
            seconds.append(time.perf_counter() - begun)
    timer.join()
    assert len(seconds) > 30
    assert sorted(seconds)[len(seconds) * 9 // 10] < 0.01
    assert max(seconds) < 0.3  # other processes may hold the core for a while
    assert desk.sender.drain(20)
    desk.require_forward_chain()
    require_sound(desk.run)


def test_nothing_is_lost_while_the_store_is_down(desk: Desk) -> None:
    desk.weather.down = ("",)
    for _ in range(4):
        desk.step()
        desk.offer(0, 1, 2)
    wait_for(lambda: desk.weather.num_failures >= 2)
    assert not desk.sender.drain(0.01)
    desk.weather.down = ()
    assert desk.sender.drain(20)
    assert desk.sender.failure is None
    assert sorted(desk.pushed()) == [0, 1, 2]
    assert {record.position.step for _, record in desk.links()} == {4}
    tokens = {key.stop.step for name, _ in desk.links() if (key := names.parse_contribution(name))}
    assert tokens == {4}
    assert desk.sender.take_dropped() == []
    desk.require_forward_chain()
    require_sound(desk.run)


def test_a_checkpoint_survives_an_outage(desk: Desk) -> None:
    desk.weather.down = ("",)
    desk.step()
    desk.sender.save(desk.learner.state(""))
    wait_for(lambda: desk.weather.num_failures)
    assert not desk.sender.drain(0.01)
    desk.weather.down = ()
    assert desk.sender.drain(20)
    assert [m["name"] for m in desk.told if m["kind"] == "saved"] == [
        f"checkpoints/{NAME}/0-1.json"
    ]
    require_sound(desk.run)


def test_pushes_go_on_while_only_the_place_of_checkpoints_is_down(desk: Desk) -> None:
    desk.weather.down = ("payloads/checkpoints/", SAVES)
    desk.step()
    desk.sender.save(desk.learner.state(""))
    wait_for(lambda: desk.weather.num_failures)
    for _ in range(3):
        desk.step()
        desk.offer(0, 1, 2)
        wait_for(lambda: len(desk.pushed()) >= 3)
    assert desk.sender.drain(20)
    assert not desk.sender.is_saving  # given up: newer work was sent
    desk.weather.down = ()
    desk.sender.save(desk.learner.state(""))
    assert desk.sender.drain(20)
    assert [m["name"] for m in desk.told if m["kind"] == "saved"] == [
        f"checkpoints/{NAME}/0-4.json"
    ]
    desk.require_forward_chain()
    require_sound(desk.run)


@pytest.mark.parametrize("folder", [PUSHES, SAVES])
def test_a_header_whose_answer_was_lost_is_found_and_linked_to(desk: Desk, folder: str) -> None:
    """The retry meets its own record, under a name that nobody else writes."""
    desk.weather.lost = [folder]
    desk.step()
    if folder == PUSHES:
        desk.offer(0)
    else:
        desk.sender.save(desk.learner.state(""))
    assert desk.sender.drain(20)
    assert desk.weather.lost == []
    desk.step()
    desk.offer(1, 2)
    assert desk.sender.drain(20)
    assert desk.sender.failure is None
    assert len(desk.links()) == 3
    desk.require_forward_chain()
    require_sound(desk.run)


def test_of_a_push_whose_answer_was_lost_the_error_of_what_was_written_is_remembered(
    four_bits: Desk,
) -> None:
    """Between the two tries an earlier push is merged, so something else is owed at the second one."""
    desk = four_bits
    desk.step()
    first = desk.offer(0)[0]
    assert desk.sender.drain(20)
    desk.step()
    desk.weather.lost = [PUSHES]
    copy = desk.offer(0)[0]
    wait_for(lambda: not desk.weather.lost)
    desk.sender.note_merge(0, first.stop)
    assert desk.sender.drain(20)
    assert desk.pushed() == [0, 0]
    owed = desk.exchange.feedback[0]
    assert owed.residual is not None
    assert owed.residual.any()
    name = names.contribution(names.ContributionKey(0, NAME, copy.base_version, copy.stop))
    written = records.read_contribution(desk.weather.inner, name)
    assert written is not None
    coded = ArrayReader(desk.weather.inner, written[0].payload).read("delta")
    arrives = decode(Encoded("int4", coded, copy.anchor.shape))
    assert np.array_equal(owed.outstanding[-1].error, copy.anchor - landed(copy.local) - arrives)


def test_numbers_that_are_not_finite_end_the_sender(desk: Desk) -> None:
    desk.step()
    desk.offer(0)
    assert desk.sender.drain(10)
    next(iter(desk.learner.model.parameters())).data.fill_(float("nan"))
    desk.step()
    desk.offer(0, 1, 2)
    assert not desk.sender.drain(10)
    assert isinstance(desk.sender.failure, Refused)
    assert desk.sender.failure.reason == "non-finite"
    desk.offer(0)
    assert not desk.sender.drain(0.01)
    assert desk.pushed() == [0]
    require_sound(desk.run)


def test_drain_reports_a_failure_also_when_nothing_is_left(desk: Desk) -> None:
    """The last push before a farewell: were it taken for sent, broken work would count as done."""
    next(iter(desk.learner.model.parameters())).data.fill_(float("nan"))
    desk.step()
    desk.offer(0)
    wait_for(lambda: desk.sender.failure)
    assert not desk.sender.drain(10)


def test_a_broken_checkpoint_ends_the_sender_and_is_not_written(desk: Desk) -> None:
    desk.step()
    parameter = next(iter(desk.learner.model.parameters()))
    desk.learner.optimizer.state[parameter]["exp_avg"].fill_(np.inf)
    desk.sender.save(desk.learner.state(""))
    assert not desk.sender.drain(10)
    assert isinstance(desk.sender.failure, Refused)
    assert desk.links() == []
    require_sound(desk.run)


def test_a_push_to_a_finished_run_ends_the_sender(desk: Desk) -> None:
    desk.step()
    records.write(desk.weather.inner, names.FINISHED, {"inventory": {}})
    desk.offer(0)
    assert not desk.sender.drain(10)
    assert isinstance(desk.sender.failure, Refused)
    assert desk.sender.failure.reason == "finished"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("what", ["push", "checkpoint"])
def test_a_sender_that_dies_of_a_bug_says_so(desk: Desk, what: str) -> None:
    desk.weather.bugs = ("payloads/",)
    desk.step()
    if what == "push":
        desk.offer(0, 1)
    else:
        desk.sender.save(desk.learner.state(""))
    assert not desk.sender.drain(10)
    assert isinstance(desk.sender.failure, LearnerLost)
    assert "a bug" in str(desk.sender.failure)
    assert desk.links() == []


def test_close_ends_within_the_write_at_hand(desk: Desk) -> None:
    desk.step()
    desk.hold(1)
    desk.offer(0, 2)
    timer = threading.Timer(0.3, desk.weather.gate.set)
    timer.start()
    desk.sender.close()
    timer.join()
    assert [name for name, _ in desk.links()] == [f"inbox/f0001/{NAME}/0-0-1.json"]
    assert desk.exchange.previous == records.require(desk.weather.inner, desk.links()[0][0])[1]
    require_sound(desk.run)


def test_close_does_not_wait_for_a_store_that_is_down(desk: Desk) -> None:
    desk.weather.down = ("",)
    desk.step()
    desk.offer(0)
    wait_for(lambda: desk.weather.num_failures >= 2)
    begun = time.monotonic()
    desk.sender.close()
    assert time.monotonic() - begun < 0.5
    assert desk.links() == []
