"""The synchronizer's loop: it ends for one of four reasons, outlives an outage, and knows when it is not needed."""

from __future__ import annotations

import heapq
import re
import threading
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from infra.store import Store
from islands import names
from islands.types import StoreLost, StoreUnavailable
from tasks import history, records, stopping, synchronizing
from tasks.clockwork import Kind
from tasks.merging import Synchronizer
from tasks.records import new_attempt
from tasks.ringing import Bell
from tasks.runs import Run
from tasks.synchronizing import Drain, Merged, is_needed, name_of
from tests import runs
from tests.faulty import Deed, Passing

SMALL = ("total_tokens=1_400", "sync.num_fragments=2", "local.checkpoint_steps=7")
PROMPT = ("sync.grace_fraction=0", "pipeline.linger_periods=0")


def waiting(folder: Path, *assignments: str, num_merges: int = 0) -> Run:
    """Return a run that has so many merges behind it and a quorum that nobody merges."""
    driver = runs.start(runs.tiny_config(folder, *SMALL, *PROMPT, *assignments))
    while True:
        bell = Bell(driver.run)
        is_due = driver.events[0].kind is Kind.MERGE and bell.is_waiting(now=0.0)
        if is_due and bell.num_merges >= num_merges:
            return driver.run
        assert driver.advance()


@dataclass
class Heard:
    """What a loop told while it ran, and how it ended."""

    merged: list[Merged] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    ending: str = ""
    is_over: threading.Event = field(default_factory=threading.Event)


def work(run: Run, heard: Heard, synchronizer: Synchronizer | None = None) -> Heard:
    heard.ending = synchronizing.synchronize(
        run,
        synchronizer or Synchronizer(run, new_attempt, stamp=time.time),
        on_merges=heard.merged.extend,
        say=heard.said.append,
        is_stopped=heard.is_over.is_set,
    )
    return heard


def heads(run: Run) -> dict[int, int]:
    return {p.index: records.find_head(run.store, p.index)[0].version for p in run.layouts}


# --- endings ---


def test_it_ends_settled_once_all_have_left_and_everything_is_merged(tmp_path: Path) -> None:
    run = waiting(tmp_path)
    before = heads(run)
    for island in run.config.islands:
        history.write_off(run, island.name, stamp=time.time)
    heard = work(run, Heard())
    assert (heard.ending, heard.said) == ("settled", [])
    assert {merged.fragment: merged.version for merged in heard.merged} == {
        fragment: version for fragment, version in heads(run).items() if version > before[fragment]
    }
    learners = {name for merged in heard.merged for name in merged.learners}
    assert learners
    assert learners <= {island.name for island in run.config.islands}
    assert records.read_snapshots(run.store)


def test_it_ends_superseded_when_a_later_one_has_enlisted(tmp_path: Path) -> None:
    run = waiting(tmp_path)
    for number in (0, 1):
        name = names.numbered("synchronizers", number)
        records.write(run.store, name, {"number": number, "mark": f"a-{number}", "at": 0.0})
    early = Synchronizer(run, new_attempt, stamp=time.time)
    early.number = 0
    before = heads(run)
    heard = work(run, Heard(), early)
    assert (heard.ending, heard.merged) == ("superseded", [])
    assert heads(run) == before


@pytest.mark.slow
def test_it_ends_idle_when_nothing_has_come_for_ten_seconds(tmp_path: Path) -> None:
    run = waiting(tmp_path)
    begun = time.monotonic()
    heard = work(run, Heard())
    assert (heard.ending, bool(heard.merged)) == ("idle", True)
    assert 10 <= time.monotonic() - begun < 15


def test_it_ends_when_the_run_is_asked_to_stop_and_merges_nothing_more(tmp_path: Path) -> None:
    run = waiting(tmp_path)
    stopping.ask(run, is_stop=True, reason="a test", mark="a-1")
    before = heads(run)
    heard = work(run, Heard())
    assert (heard.ending, heard.merged, heads(run)) == ("stopped", [], before)


def test_a_request_to_one_island_does_not_end_it(tmp_path: Path) -> None:
    run = waiting(tmp_path)
    stopping.ask(run, is_stop=True, reason="a test", mark="a-1", island="east")
    for island in run.config.islands:
        history.write_off(run, island.name, stamp=time.time)
    assert work(run, Heard()).ending == "settled"


def test_it_ends_when_its_owner_says_so(tmp_path: Path) -> None:
    heard = Heard()
    heard.is_over.set()
    assert work(waiting(tmp_path), heard).ending == "stopped"


# --- outages ---


class Outage:
    """A run's store that does not answer once: the n-th listing, or the first look at a version it was given itself."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.failing_listing = self.num_listings = self.num_refused = 0
        self.is_failing_after_publication = False
        self.published: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)

    def create(self, name: str, data: bytes, *, sync: bool = True) -> None:
        self.store.create(name, data, sync=sync)
        if name.startswith("versions/"):
            self.published.add(name)

    def list_names(self, prefix: str) -> list[str]:
        self.num_listings += 1
        if self.num_listings == self.failing_listing:
            self._refuse()
        return self.store.list_names(prefix)

    def read(self, name: str) -> bytes | None:
        if name in self.published and self.is_failing_after_publication and not self.num_refused:
            self._refuse()
        return self.store.read(name)

    def _refuse(self) -> None:
        self.num_refused += 1
        raise StoreUnavailable("no answer")


class Dead(Passing):
    """Answers nothing any more, once it is dead."""

    is_dead = False

    def act(self, verb: str, name: str, deed: Deed) -> Any:
        if self.is_dead:
            raise StoreUnavailable("no answer")
        return deed()


def abandoned(folder: Path) -> tuple[Run, Outage]:
    """Return a run that all have left with work pending, over a store that fails on request."""
    run = waiting(folder)
    for island in run.config.islands:
        history.write_off(run, island.name, stamp=time.time)
    store = Outage(run.store)
    return replace(run, store=store), store


@pytest.mark.parametrize(
    "nth", [2, 3, 5]
)  # the first listing is of the snapshots, before it begins
def test_it_outlives_an_outage_and_says_so(tmp_path: Path, nth: int) -> None:
    run, store = abandoned(tmp_path)
    store.failing_listing = nth
    heard = work(run, Heard())
    assert (heard.ending, store.num_refused) == ("settled", 1)
    assert heard.said[0] == "the store: no answer; asked until it answers"
    assert re.fullmatch(r"the store answers again, after 0\.[2-9] s", heard.said[1])
    assert len(heard.said) == 2
    assert store.published


def test_it_gives_up_a_store_that_never_answers_and_says_so_once(tmp_path: Path) -> None:
    run = waiting(tmp_path, "pipeline.store_patience_seconds=2")
    store = Dead(run.store)
    synchronizer = Synchronizer(replace(run, store=store), new_attempt, stamp=time.time)
    store.is_dead = True
    heard = Heard()
    begun = time.monotonic()
    with pytest.raises(StoreLost, match=r"within pipeline.store_patience_seconds \(2\).*no answer"):
        work(replace(run, store=store), heard, synchronizer)
    assert 2.0 <= time.monotonic() - begun < 10.0
    assert heard.said == ["the store: no answer; asked until it answers"]


def test_it_outlives_an_outage_right_after_it_has_published(tmp_path: Path) -> None:
    run, store = abandoned(tmp_path)
    store.is_failing_after_publication = True
    heard = work(run, Heard())
    assert (heard.ending, store.num_refused, len(heard.said)) == ("settled", 1, 2)
    assert sum(heads(run).values()) == len(store.published) > 0


# --- whether one is needed ---


class Clock:
    """Monotonic seconds that pass only while somebody sleeps."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def now(self) -> float:
        return self.seconds

    def sleep(self, seconds: float) -> None:
        self.seconds += seconds


def needed(run: Run) -> tuple[bool, float]:
    """Say whether a synchronizer is needed, and after how many seconds that was known."""
    clock = Clock()
    return is_needed(Bell(run), now=clock.now, sleep=clock.sleep), clock.seconds


def test_one_is_needed_at_once_where_nothing_was_ever_merged(tmp_path: Path) -> None:
    assert needed(waiting(tmp_path)) == (True, 0.0)


def test_none_is_needed_where_nothing_waits(tmp_path: Path) -> None:
    assert needed(runs.start(runs.tiny_config(tmp_path, *SMALL)).run) == (False, 0.0)


def test_one_is_needed_where_the_last_one_has_died(tmp_path: Path) -> None:
    is_it, seconds = needed(waiting(tmp_path, num_merges=1))
    assert is_it
    assert seconds == pytest.approx(2 * 6.0, abs=0.1)  # two periods of six steps of a second


def test_none_is_needed_while_a_living_one_merges(tmp_path: Path) -> None:
    run, heard = waiting(tmp_path, num_merges=1), Heard()
    bell = Bell(run)
    assert bell.is_waiting(now=time.monotonic())
    living = threading.Thread(target=work, args=(run, heard))
    living.start()
    try:
        assert not is_needed(bell, now=time.monotonic, sleep=time.sleep)
    finally:
        heard.is_over.set()
        living.join(30)
    assert not living.is_alive()
    assert heard.merged


def both_waiting(folder: Path) -> Run:
    """Return a run with a merge behind it and since then no synchronizer: both fragments have a quorum."""
    driver = runs.start(runs.tiny_config(folder, *SMALL, *PROMPT))
    run = driver.run
    while not (
        sum(heads(run).values()) and all(len(pushed(run, fragment)) > 1 for fragment in (0, 1))
    ):
        if driver.events[0].kind is Kind.MERGE and sum(heads(run).values()):
            heapq.heappop(driver.events)
        else:
            assert driver.advance()
    return run


def pushed(run: Run, fragment: int) -> set[str]:
    """Return who has pushed to the head of a fragment."""
    keys = map(names.parse_contribution, run.store.list_names(f"inbox/f{fragment:04d}/"))
    return {key.learner for key in keys if key and key.base_version == heads(run)[fragment]}


def test_none_is_needed_where_a_head_moves_while_another_waits(tmp_path: Path) -> None:
    """Somebody merges one fragment, and not yet the other: in a busy run some quorum always waits."""
    run, clock = both_waiting(tmp_path), Clock()

    def sleep(seconds: float) -> None:
        clock.sleep(seconds)
        hidden = runs.objects(run, ["inbox/f0001"])
        for name in hidden:
            run.store.delete(name)
        Synchronizer(run, new_attempt, stamp=time.time).poll(now=0.0)
        for name, data in hidden.items():
            run.store.create(name, data)

    bell = Bell(run)
    assert not is_needed(bell, now=clock.now, sleep=sleep)
    assert bell.is_waiting(now=clock.now())
    assert clock.seconds < 1


# --- notes ---


def test_a_note_is_named_by_what_moved_and_who_was_in_it() -> None:
    west = Merged(2, 18, ("west", "east"))
    assert name_of([west]) == "merge f2 v17→v18 (east, west)"
    both = [west, Merged(0, 5, ("asia",)), Merged(2, 19, ("west",))]
    assert name_of(both) == "merge f0 v4→v5, f2 v17→v19 (asia, east, west)"


def test_merges_within_ten_seconds_share_a_note() -> None:
    notes: list[tuple[str, list[str]]] = []
    drain = Drain(lambda name, lines: notes.append((name, lines)))
    drain.flush()
    assert notes == []
    drain.add([Merged(0, 1, ("east",))])
    assert notes == [("merge f0 v0→v1 (east)", ["merge f0 v0→v1 (east)"])]
    drain.add([Merged(1, 1, ("east",)), Merged(1, 2, ("west",))])
    drain.add([Merged(0, 2, ("west",))])
    assert len(notes) == 1
    drain.flush()
    drain.flush()
    assert notes[1:] == [
        (
            "merge f0 v1→v2, f1 v0→v2 (east, west)",
            ["merge f1 v0→v1 (east)", "merge f1 v1→v2 (west)", "merge f0 v1→v2 (west)"],
        )
    ]
    assert drain.num_merges == 4
