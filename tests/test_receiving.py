"""The receiver: what it fetches and in which order, versions that vanish under its eyes, reasons to stop."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from infra.link import Link
from islands import names
from islands.chaos import FOLDER, Fault, Strike
from islands.types import LearnerLost, Position
from tasks import collecting, history, records, stopping
from tasks.enduring import Endured
from tasks.local import Driver
from tasks.receiving import Arrived, Receiver, arrived_from, newest_version
from tasks.runs import Run
from tests import runs
from tests.test_sending import Weather, created, require_sound, wait_for

NAME = "east"
ALONE = (
    runs.TINY[: runs.TINY.index("[[islands]]")] + f'[[islands]]\nname = "{NAME}"\nbatch_size = 2\n'
)
VERSIONS = ("versions/", "payloads/versions/")


class Post:
    """A receiver on a store with weather, and all it has brought so far."""

    def __init__(self, run: Run, bases: list[Arrived]) -> None:
        self.weather = Weather(run.store)
        self.told: list[Mapping[str, Any]] = []
        self.bases = bases
        self.run = replace(run, store=self.weather)
        self.arrived: dict[int, Arrived] = {}
        self.marks: list[tuple[int, Position]] = []
        self.receiver: Receiver | None = None

    def open(self, incarnation: int = 0) -> Receiver:
        self.receiver = Receiver(
            self.run,
            NAME,
            incarnation,
            self.bases,
            self.told.append,
            note_merge=lambda fragment, mark: self.marks.append((fragment, mark)),
        )
        self.receiver.poll_seconds = 0.02
        return self.receiver

    def versions(self) -> dict[int, int]:
        assert self.receiver is not None
        self.arrived |= self.receiver.take()
        return {fragment: arrived.base.version for fragment, arrived in self.arrived.items()}


@pytest.fixture
def opened() -> Iterator[Callable[[Run, list[Arrived]], Post]]:
    posts: list[Post] = []

    def open_post(run: Run, bases: list[Arrived]) -> Post:
        posts.append(Post(run, bases))
        return posts[-1]

    yield open_post
    for post in posts:
        post.weather.gate.set()
        if post.receiver is not None:
            post.receiver.close()


Opened = Callable[[Run, list[Arrived]], Post]


def advanced(folder: Path, version: int, *assignments: str) -> Driver:
    """Return a driver whose every fragment has reached a version."""
    url = f"memory://{folder.name}-{id(folder)}"
    driver = runs.start(runs.tiny_config(folder, *assignments, store=url, text=ALONE))
    go_on(driver, version)
    return driver


def go_on(driver: Driver, version: int) -> None:
    while min(heads(driver.run).values()) < version:
        assert driver.advance()


def heads(run: Run) -> dict[int, int]:
    return {
        layout.index: records.find_head(run.store, layout.index)[0].version
        for layout in run.layouts
    }


def bases_of(run: Run, version: int) -> list[Arrived]:
    return [
        arrived_from(run, *records.require_commit(run.store, layout.index, version))
        for layout in run.layouts
    ]


def test_only_the_newest_of_several_versions_is_fetched(tmp_path: Path, opened: Opened) -> None:
    driver = advanced(tmp_path, 3, 'retention="all"')
    post = opened(driver.run, bases_of(driver.run, 0))
    post.open()
    expected = heads(driver.run)
    wait_for(lambda: post.versions() == expected)
    payloads = {
        "/".join(name.split("/")[2:4])
        for verb, name in post.weather.seen
        if verb == "read" and name.startswith("payloads/versions/")
    }
    assert payloads == {f"f{p:04d}/v{version:08d}" for p, version in expected.items()}
    for p, version in expected.items():
        commit, digest = records.require_commit(driver.run.store, p, version)
        base = post.arrived[p].base
        assert base.digest == digest
        assert np.array_equal(base.values, records.read_public(driver.run.store, commit))
        assert len(post.arrived[p].step_seconds) == len(commit.tallies)
    require_sound(driver.run)


def test_coded_changes_are_fetched_one_after_the_other_and_marks_told_in_order(
    tmp_path: Path, opened: Opened
) -> None:
    driver = advanced(tmp_path, 3, 'retention="all"', "sync.codec_down=int4-delta")
    post = opened(driver.run, bases_of(driver.run, 0))
    post.open()
    expected = heads(driver.run)
    wait_for(lambda: post.versions() == expected)
    read = {name for verb, name in post.weather.seen if verb == "read" and "/c/" in name}
    assert {name.split("/")[5] for name in read} == {"public"}
    for p, version in expected.items():
        commits = [records.require_commit(driver.run.store, p, v)[0] for v in range(1, version + 1)]
        values = records.read_public(driver.run.store, commits[-1])
        assert np.array_equal(post.arrived[p].base.values, values)
        wanted = [commit.tallies[NAME].consumed_to for commit in commits]
        assert [mark for fragment, mark in post.marks if fragment == p] == wanted


def test_where_a_change_is_collected_the_newest_version_is_fetched_whole(
    tmp_path: Path, opened: Opened
) -> None:
    driver = advanced(tmp_path, 3, 'retention="all"', "sync.codec_down=int4-delta")
    bases, expected = bases_of(driver.run, 0), heads(driver.run)
    for p in expected:
        commit, _ = records.require_commit(driver.run.store, p, 1)
        for name in driver.run.store.list_names(commit.payload.folder):
            driver.run.store.delete(name)
    post = opened(driver.run, bases)
    post.open()
    wait_for(lambda: post.versions() == expected)
    for p, version in expected.items():
        commit, _ = records.require_commit(driver.run.store, p, version)
        values = records.read_public(driver.run.store, commit)
        assert np.array_equal(post.arrived[p].base.values, values)


def test_each_refusal_is_told_once_though_only_the_newest_version_is_fetched(
    tmp_path: Path, opened: Opened
) -> None:
    keep = ('quarantine=["east"]', 'retention="all"')
    driver = runs.start(runs.tiny_config(tmp_path, *keep, store=f"memory://{tmp_path.name}"))
    go_on(driver, 4)
    refused = [
        verdict.name
        for p, newest in heads(driver.run).items()
        for version in range(1, newest + 1)
        for verdict in records.require_commit(driver.run.store, p, version)[0].refused
    ]
    post = opened(driver.run, bases_of(driver.run, 0))
    post.weather.down = ("payloads/versions/",)  # the versions are looked at again and again
    receiver = post.open()
    wait_for(lambda: post.weather.num_failures > 2)
    post.weather.down = ()
    wait_for(lambda: post.versions() == heads(driver.run))
    receiver.close()
    told = [str(message["text"]) for message in post.told if "refused" in str(message["text"])]
    keys = map(names.parse_contribution, refused)
    assert sorted(told) == sorted(
        f"east: its work on fragment {key.fragment} up to step {key.stop.step} was refused as quarantined: "
        "the island is in quarantine; `diloco quarantine RUN ISLAND --release` lets it count again"
        for key in keys
        if key is not None
    )
    assert len(told) > 3


def test_headers_of_all_fragments_are_read_before_any_payload(
    tmp_path: Path, opened: Opened
) -> None:
    driver = advanced(tmp_path, 2)
    post = opened(driver.run, bases_of(driver.run, heads(driver.run)[0] - 1))
    post.bases = [newest_version(driver.run, p) for p in range(3)]
    go_on(driver, max(heads(driver.run).values()) + 1)
    post.open()
    wait_for(lambda: post.versions() == heads(driver.run))
    reads = [name for verb, name in post.weather.seen if verb == "read"]
    first_payload = next(n for n, name in enumerate(reads) if name.startswith("payloads/"))
    before = {name.split("/")[1] for name in reads[:first_payload] if name.startswith("versions/")}
    assert before == {"f0000", "f0001", "f0002"}


def test_nothing_is_fetched_twice(tmp_path: Path, opened: Opened) -> None:
    driver = advanced(tmp_path, 1)
    post = opened(driver.run, [newest_version(driver.run, p) for p in range(3)])
    go_on(driver, max(heads(driver.run).values()) + 1)
    receiver = post.open()
    wait_for(lambda: post.versions() == heads(driver.run))
    num_seen = len(post.weather.seen)
    wait_for(lambda: len(post.weather.seen) > num_seen + 20)
    assert not [name for _, name in post.weather.seen[num_seen:] if name.startswith("payloads/")]
    assert receiver.take() == {}


def collect_under(driver: Driver, post: Post) -> Callable[[str, str], None]:
    """Return what, at the first read of a version's payload, lets the run go on and collects that payload."""
    waiting = [True]

    def act(verb: str, name: str) -> None:
        if waiting and verb == "read" and name.startswith("payloads/versions/f0000/"):
            waiting.pop()
            go_on(driver, max(heads(driver.run).values()) + 3)
            collecting.collect(driver.run)
            assert driver.run.store.read(name) is None

    return act


def test_a_version_collected_while_it_is_read_gives_way_to_its_successor(
    tmp_path: Path, opened: Opened
) -> None:
    driver = advanced(tmp_path, 1, "total_tokens=20_000")
    post = opened(driver.run, [newest_version(driver.run, p) for p in range(3)])
    go_on(driver, max(heads(driver.run).values()) + 1)
    post.weather.before = collect_under(driver, post)
    receiver = post.open()
    wait_for(lambda: post.versions() == heads(driver.run))
    assert {message["level"] for message in post.told} == {"warning"}
    assert receiver.failure is None
    require_sound(driver.run)


def test_a_learner_that_starts_finds_the_successor_of_a_version_collected_meanwhile(
    tmp_path: Path, opened: Opened
) -> None:
    driver = advanced(tmp_path, 1, "total_tokens=20_000")
    post = opened(driver.run, [])
    post.weather.before = collect_under(driver, post)
    assert newest_version(post.run, 0).base.version == heads(driver.run)[0]


def test_damage_to_one_fragment_does_not_hold_up_the_others(tmp_path: Path, opened: Opened) -> None:
    driver = advanced(tmp_path, 1)
    post = opened(driver.run, [newest_version(driver.run, p) for p in range(3)])
    go_on(driver, max(heads(driver.run).values()) + 1)
    commit, _ = records.find_head(driver.run.store, 0)
    driver.run.store.delete(f"{commit.payload.folder}/public/c/0")
    receiver = post.open()
    expected = {p: version for p, version in heads(driver.run).items() if p != 0}
    wait_for(lambda: post.versions() == expected)
    wait_for(lambda: post.told)
    assert receiver.failure is None


def test_an_outage_is_told_and_survived(tmp_path: Path, opened: Opened) -> None:
    driver = advanced(tmp_path, 1)
    post = opened(driver.run, [newest_version(driver.run, p) for p in range(3)])
    go_on(driver, max(heads(driver.run).values()) + 1)
    post.weather.down = ("",)
    receiver = post.open()
    wait_for(lambda: post.weather.num_failures >= 3)
    assert post.versions() == {}
    post.weather.down = ()
    wait_for(lambda: post.versions() == heads(driver.run))
    wait_for(lambda: len(post.told) == 2)  # of its beginning and of its end, however often it asked
    assert [message["level"] for message in post.told] == ["warning", "info"]
    assert receiver.reason is None


# --- reasons to stop ---


def waiting(folder: Path, opened: Opened) -> tuple[Run, Receiver, Post]:
    run = created(folder)
    history.register(run, NAME, records.new_attempt, stamp=time.time)
    post = opened(run, bases_of(run, 0))
    receiver = post.open()
    wait_for(lambda: len(post.weather.seen) > 10)
    assert receiver.reason is None
    return run, receiver, post


def ask(run: Run, island: str | None, *, is_stop: bool = True) -> None:
    mark = records.new_attempt()
    stopping.ask(run, is_stop=is_stop, reason="test", mark=mark, island=island)


@pytest.mark.parametrize("island", [None, NAME])
def test_a_request_to_stop_is_seen(tmp_path: Path, opened: Opened, island: str | None) -> None:
    run, receiver, _ = waiting(tmp_path, opened)
    ask(run, "west")
    ask(run, island)
    wait_for(lambda: receiver.reason, 5)
    assert receiver.reason == "stopped"
    require_sound(run)


def test_another_islands_stop_is_none_of_ours(tmp_path: Path, opened: Opened) -> None:
    run, receiver, post = waiting(tmp_path, opened)
    ask(run, "west")
    post.weather.seen.clear()
    wait_for(lambda: ("list", "stops/") in post.weather.seen, 5)
    assert receiver.reason is None


def test_a_stop_that_was_taken_back_is_forgotten(tmp_path: Path, opened: Opened) -> None:
    """The learner stays warm between segments; what it saw then may be over when the next one begins."""
    run, receiver, post = waiting(tmp_path, opened)
    ask(run, NAME)
    wait_for(lambda: receiver.reason, 5)
    stopping.let_go_on(run, records.new_attempt, NAME)
    receiver.forget_stop()
    post.weather.seen.clear()
    wait_for(lambda: ("list", "stops/") in post.weather.seen, 5)
    num_seen = len(post.weather.seen)
    wait_for(lambda: len(post.weather.seen) > num_seen + 6)
    assert receiver.reason is None


def test_a_stop_that_holds_is_seen_again_at_once(tmp_path: Path, opened: Opened) -> None:
    run, receiver, _ = waiting(tmp_path, opened)
    ask(run, None)
    wait_for(lambda: receiver.reason, 5)
    receiver.forget_stop()
    assert receiver.reason is None
    wait_for(lambda: receiver.reason == "stopped", 0.5)


def test_a_stop_read_before_it_was_forgotten_does_not_come_back(
    tmp_path: Path, opened: Opened
) -> None:
    """The look that found it was under way when the next segment began."""
    run, receiver, post = waiting(tmp_path, opened)
    ask(run, NAME)
    is_forgotten: list[bool] = []

    def forget(verb: str, name: str) -> None:
        if not is_forgotten and verb == "read" and name.startswith("stops/"):
            is_forgotten.append(True)
            body = run.store.read(name)
            stopping.let_go_on(run, records.new_attempt, NAME)
            receiver.forget_stop()
            assert body is not None

    post.weather.before = forget
    wait_for(lambda: is_forgotten, 5)
    post.weather.seen.clear()
    wait_for(lambda: ("list", "stops/") in post.weather.seen, 5)
    assert receiver.reason is None


def test_a_later_incarnation_supersedes(tmp_path: Path, opened: Opened) -> None:
    run, receiver, _ = waiting(tmp_path, opened)
    ask(run, None)
    history.register(run, NAME, records.new_attempt, stamp=time.time)
    wait_for(lambda: receiver.reason, 5)
    assert receiver.reason in ("stopped", "superseded")
    receiver.forget_stop()
    wait_for(lambda: receiver.reason == "superseded", 5)
    receiver.forget_stop()
    assert receiver.reason == "superseded"
    require_sound(run)


def test_a_learner_that_was_written_off_has_left(tmp_path: Path, opened: Opened) -> None:
    run, receiver, _ = waiting(tmp_path, opened)
    history.write_off(run, NAME, stamp=time.time)
    wait_for(lambda: receiver.reason == "left", 5)
    require_sound(run)


def test_the_end_of_the_run_is_seen(tmp_path: Path, opened: Opened) -> None:
    run, receiver, _ = waiting(tmp_path, opened)
    records.write(run.store, names.FINISHED, {"inventory": {}})
    wait_for(lambda: receiver.reason == "finished", 5)


# --- its own end ---


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_receiver_that_dies_of_a_bug_says_so(tmp_path: Path, opened: Opened) -> None:
    _, receiver, post = waiting(tmp_path, opened)
    post.weather.bugs = VERSIONS
    wait_for(lambda: receiver.failure, 5)
    assert isinstance(receiver.failure, LearnerLost)
    assert "a bug" in str(receiver.failure)


def test_close_does_not_wait_out_a_pause(tmp_path: Path, opened: Opened) -> None:
    _, receiver, post = waiting(tmp_path, opened)
    receiver.poll_seconds = 60.0
    post.weather.down = ("",)
    wait_for(lambda: post.weather.num_failures >= 2)
    begun = time.monotonic()
    receiver.close()
    assert time.monotonic() - begun < 0.4


def test_what_else_is_looked_after_as_often_as_a_reason_to_end(
    tmp_path: Path, opened: Opened
) -> None:
    """A strike against this island's link is seen within seconds, and the reason to end after the cut is over."""
    driver = advanced(tmp_path, 1)
    post = opened(driver.run, bases_of(driver.run, 1))
    link = Link(driver.run.store, counted=())
    post.run = replace(post.run, store=link)
    receiver = post.open()
    receiver.also = Endured(post.run, NAME, link).look
    strike = Strike(Fault("cut", island=NAME, after_seconds=0.0, seconds=1.0), "", 0.0, "m", 0)
    records.write(driver.run.store, names.numbered(FOLDER, 0), strike.to_json())
    wait_for(lambda: any("cut on purpose" in str(one["text"]) for one in post.told))
    stopping.ask(driver.run, is_stop=True, reason="test", mark="x")
    wait_for(lambda: receiver.reason == "stopped")
