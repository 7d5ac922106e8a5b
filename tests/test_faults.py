"""Every write that takes several steps, struck at each of them: killed, disk full, answer lost, half read, stale list.

Whatever happens: what was there before is there still, bit for bit; the work done again succeeds, nobody having cleared
anything away; the run goes on to its end, and `verify` finds nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import pytest

from infra.store import Store
from islands import names
from islands.contributions import Telemetry
from islands.data import batch_at
from islands.types import StoreUnavailable, VersionTaken
from tasks import (
    adjusting,
    building,
    collecting,
    creating,
    evaluating,
    exchanging,
    history,
    records,
    returning,
    stopping,
)
from tasks.clockwork import Kind
from tasks.exchanging import Exchange
from tasks.merging import Synchronizer
from tasks.runs import Run, open_run, read_shard
from tasks.verifying import verify
from tests import runs
from tests.faulty import (
    Dying,
    Full,
    Halving,
    Killed,
    LostAnswer,
    Mute,
    Passing,
    Stale,
    Striking,
    Undeletable,
)

SMALL = ("total_tokens=2_800", "sync.num_fragments=2", "local.checkpoint_steps=7")
ISLAND = "east"
Work = Callable[[], object]
# What a step does first, unharmed, and returns what it then does under fault, with a store of its own.
Step = Callable[[Run], Work]
Fault = TypeVar("Fault", bound=Passing)


@dataclass(frozen=True, slots=True)
class World:
    """A run under way, and all it held at one moment: the store is brought back there again and again."""

    run: Run
    saved: dict[str, bytes]

    def reset(self) -> Run:
        runs.fill(self.run.store, self.saved)
        return open_run(self.run.store_url, self.run.run_id)


def _world(folder: Path) -> World:
    """Return a run with versions, checkpoints and a score, before a merge and a snapshot that let much be collected."""
    url = f"memory://faults-{time.monotonic_ns()}"
    driver = runs.start(runs.tiny_config(folder, *SMALL, store=url))
    while True:
        driver.advance()
        if driver.events[0].kind is not Kind.MERGE or driver.now < 10:
            continue
        saved = runs.objects(driver.run)
        world = World(driver.run, {n: data for n, data in saved.items() if "driver/" not in n})
        if _is_rich(world):
            evaluating.evaluate(world.reset())
            return World(driver.run, runs.objects(driver.run))
        runs.fill(driver.run.store, saved)


def _is_rich(world: World) -> bool:
    """Say whether in this moment a merge publishes a version and a snapshot, and a collection then finds much to do."""
    run = world.reset()
    before = records.numbers_in(run.store, "snapshots")
    published = Synchronizer(run, records.new_attempt, stamp=float).poll(now=1e9).published
    has_snapshot = records.numbers_in(run.store, "snapshots") != before
    is_living = not records.departed(run.store)
    return is_living and bool(published) and has_snapshot and collecting.collect(run) > 3


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return _world(tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory) -> World:
    """A run whose creation went as far as `run.json`."""
    folder = tmp_path_factory.mktemp("empty")
    url = f"memory://faults-{time.monotonic_ns()}"
    run = runs.start(runs.tiny_config(folder, *SMALL, store=url)).run
    for name in run.store.list_names(""):
        if name.startswith(("versions/", "payloads/versions/")):
            run.store.delete(name)
    return World(run, runs.objects(run))


# --- the steps ---


def _exchange(run: Run) -> tuple[Exchange, Any]:
    """Return the exchange of a new incarnation, and its learner after some steps."""
    past = history.register(run, ISLAND, records.new_attempt, stamp=float)
    link = exchanging.link_of(run, ISLAND, past.last)
    learner = building.build_learner(run, ISLAND)
    owed = returning.take_up(run, learner, past, exchanging.fetch_heads(run))
    exchange = Exchange(
        run,
        ISLAND,
        past.incarnation,
        past.last_digest,
        records.new_attempt,
        stamp=float,
        link=link,
        feedback=owed,
    )
    shard, context = read_shard(run, ISLAND), run.config.model.context
    for _ in range(2):
        batch = batch_at(
            shard, cursor=learner.cursor, batch_size=2, context=context, seed=0, learner=ISLAND
        )
        learner.step(batch, num_tokens=2 * context, num_samples=2)
    return exchange, learner


def register(run: Run) -> Work:
    return lambda: history.register(run, ISLAND, records.new_attempt, stamp=float)


def push(run: Run) -> Work:
    exchange, learner = _exchange(run)
    copy = learner.copy(0, next_push_steps=6)

    def work() -> None:
        account = learner.record("")
        try:
            exchange.push(copy, account, step_seconds=1.0, telemetry=Telemetry(loss=1.0))
        except VersionTaken:  # as the sender takes it: the answer to the first try was lost
            key = names.ContributionKey(0, ISLAND, copy.base_version, copy.stop)
            assert records.require(run.store, names.contribution(key))

    return work


def save(run: Run) -> Work:
    exchange, learner = _exchange(run)
    state = learner.state("")

    def work() -> None:
        try:
            exchange.save(state)
        except VersionTaken:
            assert records.require(run.store, names.checkpoint(ISLAND, learner.position))

    return work


def leave(run: Run) -> Work:
    exchange, learner = _exchange(run)
    return lambda: history.leave(run, exchange.linked(learner.record("")), stamp=float)


def write_off(run: Run) -> Work:
    def work() -> None:
        history.register(run, ISLAND, records.new_attempt, stamp=float)
        history.write_off(run, ISLAND, stamp=float)

    return work


def merge(run: Run) -> Work:
    """Enlist, publish a version of each fragment that is due, and the snapshot."""
    synchronizer = Synchronizer(run, records.new_attempt, stamp=float)
    return lambda: synchronizer.poll(now=1e9)


def merge_anew(run: Run) -> Work:
    """The same, the views being opened under fault too."""
    return lambda: Synchronizer(run, records.new_attempt, stamp=float).poll(now=1e9)


def score(run: Run) -> Work:
    for name in run.store.list_names("evaluations/"):
        run.store.delete(name)
    return lambda: evaluating.evaluate(run)


def adjust(run: Run) -> Work:
    return lambda: adjusting.adjust(run, ["inner.weight_decay=0.03"])


def stop(run: Run) -> Work:
    return lambda: stopping.ask(run, is_stop=True, reason="test", mark="m", island=ISLAND)


def go_on(run: Run) -> Work:
    stopping.ask(run, is_stop=True, reason="test", mark="m", island=ISLAND)
    return lambda: stopping.let_go_on(run, lambda: "g", ISLAND)


def collect(run: Run) -> Work:
    Synchronizer(run, records.new_attempt, stamp=float).poll(now=1e9)
    return lambda: collecting.collect(run)


def finish(run: Run) -> Work:
    _all_leave(run)
    return lambda: _settle(run)


def complete(run: Run) -> Work:
    return lambda: creating.complete_run(run)


STEPS = (register, push, save, leave, write_off, merge, merge_anew, score, adjust, stop, go_on)
DELETING = (collect, finish)
ALL = [*STEPS, collect, pytest.param(finish, marks=pytest.mark.slow)]
# Steps without an operation of the kind that a fault strikes.
SPARED: Mapping[type[Striking], tuple[Step, ...]] = {
    Full: (collect,),
    LostAnswer: (collect,),
    Mute: (leave,),
}


# --- what comes after ---


def _all_leave(run: Run) -> None:
    for island in run.config.islands:
        if island.name not in records.departed(run.store):
            history.register(run, island.name, records.new_attempt, stamp=float)
            history.write_off(run, island.name, stamp=float)


def _settle(run: Run) -> None:
    synchronizer, now = Synchronizer(run, records.new_attempt, stamp=float), 1e9
    while not synchronizer.poll(now=now).is_settled:
        now += 1e9
    evaluating.evaluate_if_merged(run, closes=True)
    collecting.finish(run, synchronizer.verdicts())


def _require_end(run: Run) -> None:
    """Everybody leaves, and the run ends: nothing is wrong with it, and nothing without a header is left beside one."""
    if run.store.read(names.FINISHED) is None:
        _all_leave(run)
        _settle(run)
    found = verify(run.store_url, run.run_id)
    assert found.problems == []
    assert [row.imbalance for row in found.rows] == [0] * len(run.config.islands)
    assert found.num_objects == len(run.store.list_names(""))


def _require_untouched(run: Run, before: dict[str, bytes], *, deletes: bool) -> None:
    """What was there is there, bit for bit; where a step deletes, verify demands all that must stay."""
    now = runs.objects(run)
    changed = [name for name, data in before.items() if now.get(name, data) != data]
    assert changed == []
    if not deletes:
        assert before.keys() <= now.keys()


def _faulty_runs(
    world: World, step: Step, make: Callable[[Store], Fault]
) -> Iterator[tuple[Run, Fault, Work]]:
    """Yield, again and again: the run as it was, its store's fault (asleep), and the step's work, ready."""
    while True:
        run = world.reset()
        store = make(run.store)
        yield run, store, step(replace(run, store=store))


# --- the matrix ---


@pytest.mark.parametrize("step", ALL, ids=lambda step: step.__name__)
def test_a_process_killed_at_any_operation_leaves_what_was_and_the_next_one_goes_on(
    world: World, step: Step
) -> None:
    n = 0
    for run, store, work in _faulty_runs(world, step, Dying):
        before = runs.objects(run)
        store.arm(n)
        try:
            work()
        except Killed:
            assert verify(run.store_url, run.run_id).problems == [] or step is finish
            _require_untouched(run, before, deletes=step in DELETING)
            if n % 5 == 0:  # each of the others costs as much again
                step(run)()
                _require_end(run)
            n += 1
            continue
        break
    assert n > 0


@pytest.mark.parametrize("fault", [Full, LostAnswer, Mute], ids=lambda fault: fault.__name__)
@pytest.mark.parametrize("step", ALL, ids=lambda step: step.__name__)
def test_an_error_at_any_operation_leaves_what_was_and_the_same_process_goes_on(
    world: World, step: Step, fault: type[Striking]
) -> None:
    n = 0
    for run, store, work in _faulty_runs(world, step, fault):
        before = runs.objects(run)
        store.arm(n)
        try:
            work()
        except StoreUnavailable:
            _require_untouched(run, before, deletes=step in DELETING)
        store.rest()
        if store.num_struck == 0:
            break
        work()
        assert verify(run.store_url, run.run_id).problems == []
        if n % 5 == 0:
            _require_end(run)
        n += 1
    assert n > 0 or step in SPARED[fault]


def test_a_disk_that_stays_full_is_said_in_one_line_and_harms_nothing(world: World) -> None:
    for step in STEPS:
        for run, store, work in _faulty_runs(world, step, Full):
            before = runs.objects(run)
            store.arm(0, 10**9)
            for _ in range(3):
                with pytest.raises(StoreUnavailable, match="No space left") as caught:
                    work()
                assert "\n" not in str(caught.value)
            assert runs.objects(run) == before
            store.rest()
            work()
            _require_end(run)
            break


@pytest.mark.parametrize("step", ALL, ids=lambda step: step.__name__)
def test_an_object_read_by_half_once_changes_nothing(world: World, step: Step) -> None:
    for n, (run, store, work) in enumerate(_faulty_runs(world, step, Halving)):
        store.arm(n)
        work()
        store.rest()
        assert verify(run.store_url, run.run_id).problems == []
        refused = {v.reason for commit in _commits(run) for v in commit.refused}
        assert "damaged" not in refused
        if store.num_struck == 0:
            break
    _require_end(run)


def _commits(run: Run) -> Iterator[Any]:
    for layout in run.layouts:
        head, _ = records.find_head(run.store, layout.index)
        for version in range(head.version + 1):
            yield records.require_commit(run.store, layout.index, version)[0]


def test_a_delete_that_fails_is_made_up_for_by_the_next_collection(world: World) -> None:
    n = 0
    for run, store, work in _faulty_runs(world, collect, Undeletable):
        store.arm(n)
        try:
            work()
        except StoreUnavailable:
            store.rest()
            assert verify(run.store_url, run.run_id).problems == []
            work()
            n += 1
        assert collecting.collect(run) == 0
        if store.num_struck == 0:
            break
    assert n > 3
    _require_end(run)


@pytest.mark.parametrize("num_creates", [1, 2, 5, 20])
def test_a_listing_that_lags_behind_harms_nothing(world: World, num_creates: int) -> None:
    """Each step sees the listings of some creates ago, and so does the end: a lag may put off, never lose."""
    for step in (register, push, save, leave, write_off, merge, stop, go_on, adjust, score):
        run = world.reset()
        store = Stale(run.store, num_creates)
        stale = replace(run, store=store)
        step(stale)()
        collecting.collect(stale)
        assert verify(run.store_url, run.run_id).problems == []
        _require_end(run)


def test_the_creation_of_a_run_struck_at_any_operation_is_completed(empty: World) -> None:
    """Version 0 of every fragment, by whoever goes on: bit for bit what one creation without a fault makes."""
    run = empty.reset()
    creating.complete_run(run)
    expected = {name: data for name, data in runs.objects(run).items() if "versions/" in name}
    for fault in (Dying, Full, LostAnswer):
        for n in range(1000):
            run = empty.reset()
            store = Dying(run.store, n) if fault is Dying else fault(run.store, n, 1)
            try:
                creating.complete_run(replace(run, store=store))
                break
            except (Killed, StoreUnavailable):
                creating.complete_run(open_run(run.store_url, run.run_id))
            found = {name: data for name, data in runs.objects(run).items() if "versions/" in name}
            values = sorted(data for name, data in expected.items() if "/c/" in name)
            assert set(values) <= {data for name, data in found.items() if "/c/" in name}
            assert verify(run.store_url, run.run_id).problems == []
        assert n > 3
