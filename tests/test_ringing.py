"""The bell: it rings for a quorum that nobody merges, with one key for all who look, and for nothing else."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from infra.store import Store
from islands import names
from islands.contributions import Contribution
from islands.types import Position, StoreUnavailable
from tasks import history, records
from tasks.clockwork import Kind
from tasks.local import Driver
from tasks.merging import Synchronizer
from tasks.ringing import RING_SECONDS, Bell, Ring
from tasks.runs import Run
from tests import runs

SMALL = ("total_tokens=1_400", "sync.num_fragments=2", "local.checkpoint_steps=7")
# Six steps of one second are a period, a quarter of it is grace; twice their sum is the time for doubt.
DOUBT_SECONDS = 2 * (6.0 + 1.5)


def waiting(folder: Path, *assignments: str, num_merges: int = 0) -> Run:
    """Return a run of file objects that has so many merges behind it, and quorums that nobody merges."""
    driver = runs.start(runs.tiny_config(folder, *SMALL, *assignments))
    while not (driver.events[0].kind is Kind.MERGE and is_due(driver, num_merges)):
        assert driver.advance()
    return driver.run


def is_due(driver: Driver, num_merges: int) -> bool:
    bell = Bell(driver.run)
    return bell.is_waiting(now=0.0) and bell.num_merges >= num_merges


def pending(run: Run, fragment: int) -> dict[str, Contribution]:
    """Return learner -> its newest contribution on the fragment's head."""
    head, _ = records.find_head(run.store, fragment)
    found = {}
    for name in run.store.list_names(f"inbox/f{fragment:04d}/"):
        read = records.read_contribution(run.store, name)
        assert read is not None
        if read[0].base_version == head.version:
            found[read[0].learner] = read[0]
    return found


def leave_only(run: Run, *learners: str) -> dict[str, Contribution]:
    """Delete all contributions but these learners' newest to one fragment; return those."""
    kept: dict[str, Contribution] = {}
    for layout in run.layouts:
        here = pending(run, layout.index)
        if not kept and set(learners) <= set(here):
            kept = {learner: here[learner] for learner in learners}
    assert kept, "no fragment has contributions of all of them"
    wanted = {offer.name for offer in kept.values()}
    for name in set(run.store.list_names("inbox/")) - wanted:
        run.store.delete(name)
    return kept


def two(run: Run) -> tuple[str, str]:
    """Return two learners with a contribution to the same fragment."""
    for layout in run.layouts:
        here = sorted(pending(run, layout.index))
        if len(here) >= 2:
            return here[0], here[1]
    raise AssertionError("no fragment has two")


def without_synchronizer(folder: Path) -> Run:
    """Return a run that nobody has merged anything of, with a quorum for both of its fragments."""
    driver = runs.start(runs.tiny_config(folder, *SMALL))
    while not all(len(pending(driver.run, fragment)) >= 2 for fragment in (0, 1)):
        if driver.events[0].kind is Kind.MERGE:
            heapq.heappop(driver.events)
        else:
            assert driver.advance()
    return driver.run


def merge_one(run: Run, fragment: int) -> None:
    """Let a synchronizer come, merge one fragment, and go."""
    others = [f"inbox/f{layout.index:04d}" for layout in run.layouts if layout.index != fragment]
    hidden = runs.objects(run, others)
    for name in hidden:
        run.store.delete(name)
    attempts = iter(range(100))
    synchronizer = Synchronizer(run, lambda: f"a-m{next(attempts)}", stamp=float)
    published = [synchronizer.poll(now=now).published for now in (0.0, 100.0)]
    assert sum(published, ()) == ((fragment, 1),)
    for name, data in hidden.items():
        run.store.create(name, data)


def test_before_the_first_merge_a_complete_quorum_rings_at_once(tmp_path: Path) -> None:
    run = waiting(tmp_path)
    assert Bell(run).look(now=1234.5) == Ring("r", 0, 0, 0)
    assert Ring("r", 0, 0, 0).key == "r-m0-n0-k0"


def test_a_run_without_a_contribution_is_not_rung_for(tmp_path: Path) -> None:
    bell = Bell(runs.start(runs.tiny_config(tmp_path, *SMALL)).run)
    assert bell.look(now=0.0) is None
    assert not bell.is_waiting(now=1e6)
    assert bell.look(now=1e6) is None


def test_one_learner_of_two_is_no_quorum(tmp_path: Path) -> None:
    run = waiting(tmp_path)
    leave_only(run, two(run)[0])
    assert Bell(run).look(now=0.0) is None
    assert not Bell(run).is_waiting(now=0.0)


def test_after_a_merge_a_quorum_rings_once_it_has_waited_longer_than_a_synchronizer_takes(
    tmp_path: Path,
) -> None:
    run = waiting(tmp_path, num_merges=1)
    bell = Bell(run)
    assert bell.look(now=100.0) is None
    assert bell.is_waiting(now=100.0)
    assert bell.look(now=100.0 + DOUBT_SECONDS - 0.1) is None
    ring = bell.look(now=100.0 + DOUBT_SECONDS)
    assert ring is not None
    assert ring.num_merges == bell.num_merges > 0


def test_a_merge_starts_the_doubt_anew_for_what_still_waits(tmp_path: Path) -> None:
    run = without_synchronizer(tmp_path)
    bell = Bell(run)
    assert bell.look(now=0.0) == Ring("r", 0, 0, 0)
    merge_one(run, 0)
    for now in (RING_SECONDS, RING_SECONDS + DOUBT_SECONDS - 0.1):
        assert bell.look(now=now) is None
        assert bell.is_waiting(now=now)
    assert bell.look(now=RING_SECONDS + DOUBT_SECONDS) == Ring("r", 1, 1, 1)


def test_a_run_whose_synchronizer_lives_is_never_rung_for_after_its_first_merge(
    tmp_path: Path,
) -> None:
    driver = runs.start(runs.tiny_config(tmp_path, "total_tokens=2_000", store="memory://lively"))
    bell, rung = Bell(driver.run), set()
    while driver.advance():
        ring = bell.look(now=driver.now)
        if ring is not None:
            rung.add(ring.num_merges)
    assert rung <= {0}
    assert bell.num_merges > 6


def test_all_who_look_at_about_the_same_time_ring_with_one_key(tmp_path: Path) -> None:
    run = waiting(tmp_path, num_merges=1)
    early, late = Bell(run), Bell(run)
    early.look(now=0.0)
    late.look(now=3.0)
    rings = [early.look(now=18.0), late.look(now=18.5)]
    assert rings[0] is not None
    assert rings[0] == rings[1]
    # Another host's clock has another zero, and which fragment waits is not part of the key.
    leave_only(run, *two(run))
    other = Bell(run)
    other.look(now=-1e6)
    assert other.look(now=-1e6 + 18.0) == rings[0]


def test_the_key_changes_with_every_interval_that_nobody_answers_each_longer_than_the_last(
    tmp_path: Path,
) -> None:
    bell = Bell(waiting(tmp_path))
    moments = (0.0, 9.9, 10.0, 29.9, 30.0, 69.9, 70.0)
    rings = [bell.look(now=7.0 + moment) for moment in moments]
    assert [ring.num_intervals for ring in rings if ring] == [0, 0, 1, 1, 2, 2, 3]
    assert len({ring.key for ring in rings if ring}) == 4


def test_the_key_changes_when_the_synchronizer_that_answered_dies_before_its_first_merge(
    tmp_path: Path,
) -> None:
    run = waiting(tmp_path)
    bell = Bell(run)
    first = bell.look(now=0.0)
    records.write(run.store, names.numbered("synchronizers", 0), {"number": 0, "mark": "a-x"})
    second = bell.look(now=1.0)
    assert first is not None
    assert second == replace(first, num_synchronizers=1)
    assert second.key != first.key


def again(offer: Contribution, run: Run) -> Contribution:
    """Return a second contribution of the same learner to the same version."""
    stop = Position(offer.stop.incarnation, offer.stop.step + 1)
    return replace(offer, stop=stop)


def fenced(offer: Contribution, run: Run) -> Contribution:
    """Return what a learner wrote whose successor had registered before, and does not know it."""
    run.store.delete(offer.name)
    history.register(run, offer.learner, lambda: "a-successor", stamp=float)
    return again(offer, run)


def stale(offer: Contribution, run: Run) -> Contribution:
    """Return it as measured from the version before; nothing so old is taken here."""
    run.store.delete(offer.name)
    return replace(offer, base_version=offer.base_version - 1)


def empty(offer: Contribution, run: Run) -> Contribution:
    """Return it without a token."""
    run.store.delete(offer.name)
    return replace(offer, num_tokens=0)


@pytest.mark.parametrize("spoil", [fenced, stale, empty])
def test_what_may_not_be_merged_does_not_complete_a_quorum(
    tmp_path: Path, spoil: Callable[[Contribution, Run], Contribution]
) -> None:
    run = waiting(tmp_path, "sync.max_staleness=0", num_merges=1)
    good, bad = two(run)
    kept = leave_only(run, good, bad)
    assert Bell(run).is_waiting(now=0.0)
    spoiled = spoil(kept[bad], run)
    records.write(run.store, spoiled.name, spoiled.to_json())
    bell = Bell(run)
    assert not bell.is_waiting(now=0.0)
    assert bell.look(now=0.0) is None
    assert bell.look(now=1e6) is None


def test_two_contributions_of_one_learner_are_no_quorum_of_two(tmp_path: Path) -> None:
    run = waiting(tmp_path)
    learner = two(run)[0]
    offer = leave_only(run, learner)[learner]
    records.write(run.store, again(offer, run).name, again(offer, run).to_json())
    assert len(run.store.list_names("inbox/")) == 2
    assert Bell(run).look(now=1e6) is None


@pytest.mark.parametrize(("num_merges", "doubt"), [(0, 0.0), (1, DOUBT_SECONDS)])
def test_when_all_have_left_a_single_pending_contribution_rings(
    tmp_path: Path, num_merges: int, doubt: float
) -> None:
    run = waiting(tmp_path, num_merges=num_merges)
    leave_only(run, two(run)[0])
    assert Bell(run).look(now=0.0) is None
    for island in run.config.islands:
        history.write_off(run, island.name, stamp=float)
    bell = Bell(run)
    assert (bell.look(now=0.0) is None) == (doubt > 0)
    assert bell.look(now=doubt) is not None


def test_when_all_have_left_and_nothing_is_pending_all_is_quiet(tmp_path: Path) -> None:
    run = waiting(tmp_path)
    for name in run.store.list_names("inbox/"):
        run.store.delete(name)
    for island in run.config.islands:
        history.write_off(run, island.name, stamp=float)
    bell = Bell(run)
    assert bell.look(now=0.0) is None
    assert bell.look(now=1e6) is None


class Outage:
    """A run's store; while it is away, nothing is listed."""

    def __init__(self, store: Store) -> None:
        self.store, self.is_away = store, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)

    def list_names(self, prefix: str) -> list[str]:
        if self.is_away:
            raise StoreUnavailable(f"no answer for {prefix}")
        return self.store.list_names(prefix)


def test_an_outage_of_the_store_does_not_start_the_doubt_anew(tmp_path: Path) -> None:
    run = waiting(tmp_path, num_merges=1)
    store = Outage(run.store)
    bell = Bell(replace(run, store=store))
    assert bell.look(now=0.0) is None
    store.is_away = True
    with pytest.raises(StoreUnavailable):
        bell.look(now=5.0)
    store.is_away = False
    assert bell.look(now=DOUBT_SECONDS) is not None
