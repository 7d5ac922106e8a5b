"""Lives under algorithms whose learners wait for each other: on a real store, with a synchronizer beside them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from islands.types import IslandsError, Position
from tasks import history, records, stopping
from tasks.living import Life
from tasks.runs import Run
from tasks.segments import Stretch
from tests import runs
from tests.test_living import Merging, mergings
from tests.test_sending import created, require_sound, wait_for

ISLANDS = """
[pipeline]
checkpoint_seconds = 0.05
[[islands]]
name = "east"
batch_size = 3
[[islands]]
name = "west"
batch_size = 1
"""
TEXT = runs.TINY[: runs.TINY.index("[[islands]]")] + ISLANDS
STEP_TOKENS = 4 * 16
ALGORITHMS = {
    "diloco": ("sync.algorithm=diloco", "sync.num_fragments=1"),
    "streaming": ("sync.algorithm=streaming", "sync.overlap_steps=1", "sync.alpha=0.25"),
    "data-parallel": (
        *("sync.algorithm=data-parallel", "sync.num_fragments=1", "sync.period_steps=1"),
        *("outer.merge=mean", "outer.weighting=tokens", "sync.codec_down=float32"),
    ),
}


class Island:
    """An island's lives, one after the other, segment after segment, in a thread of its own."""

    def __init__(self, run: Run, name: str) -> None:
        self.run, self.name = run, name
        self.stretches: list[Stretch] = []
        self.error: BaseException | None = None
        self.num_deaths = 0
        self._must_die = threading.Event()
        self._thread = threading.Thread(target=self._work)
        self._thread.start()

    def _work(self) -> None:
        try:
            while not self.stretches or self.stretches[-1].outcome == "goes on":
                self._live()
        except IslandsError as exc:
            self.error = exc

    def _live(self) -> None:
        """Live until the end, or until told to die: then with all that is not written."""
        life = Life(
            self.run, self.name, records.new_attempt, stamp=time.time, tell=lambda message: None
        )
        self._must_die.clear()
        while not self._must_die.is_set():
            self.stretches.append(life.train(0.05))
            if self.stretches[-1].outcome != "goes on":
                break
        else:
            self.num_deaths += 1
        life.close()

    def die(self) -> None:
        """Let the present life end as a killed process would, and the next begin."""
        self._must_die.set()

    def join(self) -> str:
        """Wait for the end and return how it ended."""
        self._thread.join(60)
        assert not self._thread.is_alive()
        assert self.error is None
        return self.stretches[-1].outcome


@pytest.fixture
def island() -> Iterator[Callable[[Run, str], Island]]:
    """Start islands; what still trains at the end of a test is asked to stop."""
    started: list[Island] = []

    def start(run: Run, name: str) -> Island:
        started.append(Island(run, name))
        return started[-1]

    yield start
    for one in started:
        stopping.ask(
            one.run, is_stop=True, reason="over", mark=records.new_attempt(), island=one.name
        )
        one._thread.join(30)


merging = pytest.fixture(mergings)


def heads(run: Run) -> list[int]:
    return [records.find_head(run.store, p)[0].version for p in range(len(run.layouts))]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_learners_that_wait_for_each_other_train_in_step(
    tmp_path: Path,
    algorithm: str,
    island: Callable[[Run, str], Island],
    merging: Callable[[Run], Merging],
) -> None:
    run = created(tmp_path, f"total_tokens={24 * STEP_TOKENS}", *ALGORITHMS[algorithm], text=TEXT)
    synchronizer = merging(run)
    both = [island(run, name) for name in ("east", "west")]
    assert [one.join() for one in both] == ["left", "left"]
    assert [one.stretches[-1].step for one in both] == [24, 24]
    synchronizer.finish()
    require_sound(run)
    for p in range(len(run.layouts)):
        for version in range(1, heads(run)[p] + 1):
            commit, _ = records.require_commit(run.store, p, version)
            assert [entry.learner for entry in commit.consumed] == ["east", "west"]
    # 24 steps: every 6 the whole model; every 6 each of 3 fragments in turn, and the rest of each at the end; every 1.
    expected = {"diloco": [4], "streaming": [5, 5, 5], "data-parallel": [24]}
    assert heads(run) == expected[algorithm]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_learner_that_is_killed_again_and_again_holds_the_others_up_and_no_longer(
    tmp_path: Path,
    algorithm: str,
    island: Callable[[Run, str], Island],
    merging: Callable[[Run], Merging],
) -> None:
    """It dies at any point: in the middle of a turn, between copy and push, while it waits."""
    run = created(tmp_path, f"total_tokens={120 * STEP_TOKENS}", *ALGORITHMS[algorithm], text=TEXT)
    synchronizer = merging(run)
    east, west = island(run, "east"), island(run, "west")
    for death in range(1, 5):
        known = sum(heads(run))
        wait_for(lambda known=known: sum(heads(run)) > known)
        victim = west if death % 2 else east
        before = victim.num_deaths
        victim.die()
        wait_for(lambda victim=victim, before=before: victim.num_deaths > before)
    assert [east.join(), west.join()] == ["left", "left"]
    assert (east.num_deaths, west.num_deaths) == (2, 2)
    synchronizer.finish()
    require_sound(run)


def test_a_blocked_learner_ends_its_segment_and_its_life_when_asked(
    tmp_path: Path, merging: Callable[[Run], Merging]
) -> None:
    """The other one never comes: the segment's seconds pass, the next one waits on, a stop is honoured."""
    run = created(tmp_path, "total_tokens=100_000", *ALGORITHMS["diloco"], text=TEXT)
    synchronizer = merging(run)
    tell = lambda message: None  # noqa: E731
    life = Life(run, "east", records.new_attempt, stamp=time.time, tell=tell)
    try:
        first = reach_the_turn(life)
        assert (first.outcome, first.step) == ("goes on", 6)
        begun = time.monotonic()
        second = life.train(0.2)
        assert (second.outcome, second.step, second.num_steps) == ("goes on", 6, 0)
        assert 0.2 <= time.monotonic() - begun < 10
        assert second.idle_share > first.idle_share > 0
        stopping.ask(run, is_stop=True, reason="test", mark=records.new_attempt(), island="east")
        assert life.train(60.0).outcome == "stopped"
    finally:
        life.close()
    assert heads(run) == [0]
    synchronizer.close()
    require_sound(run)


def test_a_push_that_can_never_be_merged_is_made_again_by_the_next_life(
    tmp_path: Path, island: Callable[[Run, str], Island], merging: Callable[[Run], Merging]
) -> None:
    """Damaged in the store, all would wait for it; whole, it is not made twice."""
    run = created(tmp_path, f"total_tokens={12 * STEP_TOKENS}", *ALGORITHMS["diloco"], text=TEXT)
    merging(run)
    stop_at_the_turn(run, "east")
    stop_at_the_turn(run, "east")
    (pushed,) = run.store.list_names("inbox/f0000/east/")
    (chunk, *_) = [
        name for name in run.store.list_names(f"payloads/{pushed[:-5]}") if "/c/" in name
    ]
    run.store.delete(chunk)
    both = [island(run, name) for name in ("east", "west")]
    assert [one.join() for one in both] == ["left", "left"]
    assert [one.stretches[-1].step for one in both] == [12, 12]
    first, _ = records.require_commit(run.store, 0, 1)
    assert [entry.stop for entry in first.consumed] == [Position(2, 6), Position(0, 6)]


def reach_the_turn(life: Life) -> Stretch:
    """Let a learner train until it waits."""
    while (stretch := life.train(0.1)).num_steps > 0:
        pass
    return stretch


def stop_at_the_turn(run: Run, name: str) -> None:
    """Let an island live until it waits at step 6, and stop it there."""
    stopping.let_go_on(run, records.new_attempt, name)
    life = Life(run, name, records.new_attempt, stamp=time.time, tell=lambda message: None)
    assert reach_the_turn(life).step == 6
    stopping.ask(run, is_stop=True, reason="test", mark=records.new_attempt(), island=name)
    assert life.train(30.0).outcome == "stopped"
    life.close()
    stopping.let_go_on(run, records.new_attempt, name)


def test_one_that_leaves_is_not_waited_for(
    tmp_path: Path, island: Callable[[Run, str], Island], merging: Callable[[Run], Merging]
) -> None:
    """Written off, it stands for nobody any more, though its last push lies there."""
    run = created(tmp_path, f"total_tokens={24 * STEP_TOKENS}", *ALGORITHMS["diloco"], text=TEXT)
    synchronizer = merging(run)
    tell = lambda message: None  # noqa: E731
    lost = Life(run, "west", records.new_attempt, stamp=time.time, tell=tell)
    assert reach_the_turn(lost).step == 6
    lost.close()
    history.write_off(run, "west", stamp=time.time)
    east = island(run, "east")
    assert east.join() == "left"
    synchronizer.finish()
    require_sound(run)
    merged = [records.require_commit(run.store, 0, v)[0].consumed for v in (1, 2, 3, 4)]
    assert [[entry.learner for entry in consumed] for consumed in merged] == [
        ["east", "west"],
        ["east"],
        ["east"],
        ["east"],
    ]
