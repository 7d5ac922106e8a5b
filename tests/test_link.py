"""A link to a real store: what is counted, what is paced, and that control passes at once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np
import pytest

from infra.arrays import write_arrays
from infra.link import Link
from infra.store import Store, open_store
from islands.types import StoreUnavailable

DATA = "payloads/"


@pytest.fixture
def inner() -> Store:
    return open_store("memory://")


def paced(inner: Store, bytes_per_second: float) -> Link:
    link = Link(inner, counted=(DATA,), paced=(DATA,))
    link.bytes_per_second = bytes_per_second
    return link


def seconds(act: Callable[[], object]) -> float:
    begun = time.monotonic()
    act()
    return time.monotonic() - begun


def test_payloads_take_their_time_both_ways_and_each_way_for_itself(inner: Store) -> None:
    """60,000 bytes at 100,000 a second: 0.6 s, and 1.2 one after the other."""
    link = paced(inner, 100_000)
    assert 0.6 <= seconds(lambda: link.create("payloads/a", bytes(60_000))) < 1.6
    assert 0.6 <= seconds(lambda: link.read("payloads/a")) < 1.6
    threads = [
        threading.Thread(target=link.read, args=("payloads/a",)),
        threading.Thread(target=link.create, args=("payloads/b", bytes(60_000))),
    ]
    begun = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert 0.6 <= time.monotonic() - begun < 1.1


def test_two_threads_in_one_direction_share_the_cap(inner: Store) -> None:
    link = paced(inner, 100_000)
    names = ("payloads/a", "payloads/b")
    threads = [threading.Thread(target=link.create, args=(n, bytes(15_000))) for n in names]
    begun = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert time.monotonic() - begun >= 0.3


@pytest.mark.parametrize("cap", [None, 1e6])
def test_what_is_on_its_way_follows_a_new_cap(inner: Store, cap: float | None) -> None:
    """A minute's worth of bytes, and whatever waits behind it, are through soon after the cap was raised."""
    link = paced(inner, 1_000)
    names = ("payloads/a", "payloads/b")
    threads = [threading.Thread(target=link.create, args=(n, bytes(60_000))) for n in names]
    for thread in threads:
        thread.start()
    time.sleep(0.1)
    link.bytes_per_second = cap
    begun = time.monotonic()
    for thread in threads:
        thread.join(10)
    assert time.monotonic() - begun < 3
    assert inner.list_names("") == [*names]


def test_time_in_which_nothing_was_sent_is_not_saved_up(inner: Store) -> None:
    link = paced(inner, 100_000)
    time.sleep(0.3)
    assert seconds(lambda: link.create("payloads/a", bytes(20_000))) >= 0.2


def test_headers_listings_and_stops_pass_while_a_payload_waits(inner: Store) -> None:
    link = paced(inner, 1_000)

    def send() -> None:
        with pytest.raises(StoreUnavailable):
            link.create("payloads/a", bytes(60_000))

    thread = threading.Thread(target=send)
    thread.start()
    time.sleep(0.05)

    def control() -> None:
        link.create("inbox/f0000/east/0-0-1.json", b"x" * 10_000)
        assert link.read("inbox/f0000/east/0-0-1.json") is not None
        assert link.read("stops/0.json") is None
        assert link.list_names("") == ["inbox/f0000/east/0-0-1.json"]
        link.delete("inbox/f0000/east/0-0-1.json")
        link.sync("payloads/")

    assert seconds(control) < 0.5
    assert thread.is_alive()
    link.close()
    thread.join(1)
    assert not thread.is_alive()


def test_a_closed_link_lets_nothing_through_and_nothing_of_it_was_created(inner: Store) -> None:
    link = paced(inner, 10)
    timer = threading.Timer(0.1, link.close)
    timer.start()
    with pytest.raises(StoreUnavailable, match="payloads/a"):
        link.create("payloads/a", bytes(1_000))
    assert inner.list_names("") == []
    assert link.bytes_up == 0


def test_without_a_cap_payloads_are_counted_and_not_paced(inner: Store) -> None:
    link = Link(inner, counted=(DATA,), paced=(DATA,), bytes_up=5, bytes_down=7)
    assert seconds(lambda: link.create("payloads/a", bytes(10**7))) < 1.0
    link.create("other", b"123")
    assert link.read("payloads/a") is not None
    assert (link.read("other"), link.read("payloads/none")) == (b"123", None)
    assert (link.bytes_up, link.bytes_down) == (10**7 + 5, 10**7 + 7)


def test_a_large_payload_is_paced_chunk_by_chunk(inner: Store) -> None:
    """Chunks of 4,000 bytes appear one after another, not all at the end."""
    link = paced(inner, 40_000)
    values = np.arange(5_000, dtype=np.float32)
    thread = threading.Thread(
        target=write_arrays,
        args=(link, "payloads/p", {"v": values}),
        kwargs={"chunk_elements": 1_000},
    )
    thread.start()
    seen = set()
    while thread.is_alive():
        seen.add(len([name for name in inner.list_names("payloads/") if "/c/" in name]))
        time.sleep(0.01)
    thread.join()
    assert {1, 2, 3, 4} <= seen


def test_a_cut_link_refuses_everything_until_its_time_is_over(inner: Store) -> None:
    inner.create("a", b"1")
    link = Link(inner, counted=())
    link.cut(0.5)
    verbs: list[Callable[[], object]] = [
        lambda: link.create("b", b"2"),
        lambda: link.read("a"),
        lambda: link.list_names(""),
        lambda: link.delete("a"),
        lambda: link.sync(""),
    ]
    for verb in verbs:
        with pytest.raises(
            StoreUnavailable, match=r"the link is cut on purpose for another 0\.\d s"
        ):
            verb()
    link.cut(0.0)  # a shorter one does not shorten it
    with pytest.raises(StoreUnavailable):
        link.read("a")
    time.sleep(0.6)
    assert link.read("a") == b"1"
    assert inner.list_names("") == ["a"]


def test_a_full_disk_refuses_only_what_creates(inner: Store) -> None:
    inner.create("a", b"1")
    link = Link(inner, counted=())
    link.fill(600.0)
    with pytest.raises(StoreUnavailable, match="cannot create b: no space left, on purpose"):
        link.create("b", b"2")
    assert link.read("a") == b"1"
    link.delete("a")
    assert link.list_names("") == []


def test_what_waits_for_its_bytes_to_pass_is_refused_too_once_the_link_is_cut(inner: Store) -> None:
    """50,000 bytes at 100,000 a second take 0.5 s; the link is cut after 0.1 s for a minute."""
    link = paced(inner, 100_000)
    threading.Timer(0.1, link.cut, (60.0,)).start()
    with pytest.raises(StoreUnavailable, match="cut on purpose"):
        link.create("payloads/a", bytes(50_000))
    assert inner.list_names("") == []
