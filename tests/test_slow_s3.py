"""An S3 that throttles, stalls, cuts, lies and loses answers: bounded retries, no duplicate effect, no silent hole."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from infra.arrays import ArrayReader, write_arrays
from infra.store import Store, open_store
from islands.types import DamagedObject, StoreUnavailable, VersionTaken
from tasks import records
from tasks.verifying import verify
from tests import runs
from tests.slow_s3 import SlowS3, every, first
from tests.test_store import make_bucket
from tests.test_store import s3_endpoint as s3_endpoint
from tests.test_store import s3_environment as s3_environment


@pytest.fixture
def proxy(s3_environment: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowS3]:
    with SlowS3(s3_environment) as slow:
        monkeypatch.setenv("AWS_ENDPOINT_URL", slow.url)
        yield slow


@pytest.fixture
def store(s3_endpoint: str, proxy: SlowS3) -> Store:
    return open_store(f"s3://{make_bucket(s3_endpoint)}/runs")


# --- single verbs ---


@pytest.mark.parametrize("kind", ["busy", "failed", "reset", "cut"])
def test_a_read_is_repeated_until_it_is_whole(store: Store, proxy: SlowS3, kind: str) -> None:
    store.create("a", b"x" * 1000)
    proxy.follow(first("GET", kind, kind))
    assert store.read("a") == b"x" * 1000
    assert proxy.seen == ["GET"] * 3


@pytest.mark.parametrize("kind", ["busy", "failed", "reset"])
def test_a_listing_is_repeated_until_it_is_whole(store: Store, proxy: SlowS3, kind: str) -> None:
    store.create("a", b"")
    proxy.follow(first("GET", kind, kind))
    assert store.list_names("") == ["a"]
    assert proxy.seen == ["GET"] * 3


@pytest.mark.parametrize("kind", ["cut", "short"])
def test_half_a_listing_is_no_answer(store: Store, proxy: SlowS3, kind: str) -> None:
    store.create("a", b"")
    proxy.follow(first("GET", kind))
    with pytest.raises(StoreUnavailable, match="cannot list"):
        store.list_names("")
    assert store.list_names("") == ["a"]


@pytest.mark.parametrize(
    ("kind", "raised", "num_tries"),
    [("failed", VersionTaken, 2), ("reset", StoreUnavailable, 1)],
)
def test_a_create_that_was_done_is_never_done_twice_nor_taken_for_undone(
    store: Store, proxy: SlowS3, kind: str, raised: type[Exception], num_tries: int
) -> None:
    """Repeated, it meets its own object; a lost connection is not repeated, since nobody knows."""
    proxy.follow(first("PUT", kind))
    with pytest.raises(raised):
        store.create("a", b"first")
    assert proxy.seen.count("PUT") == num_tries
    with pytest.raises(VersionTaken):
        store.create("a", b"second")
    assert store.read("a") == b"first"


def test_a_delete_is_repeated(store: Store, proxy: SlowS3) -> None:
    store.create("a", b"")
    proxy.follow(first("POST", "busy", "failed"))
    store.delete("a")
    assert store.read("a") is None


def test_a_busy_store_is_asked_with_growing_pauses_and_not_for_ever(
    store: Store, proxy: SlowS3
) -> None:
    """0.1 s and up to twice as long each time, by lot: five more tries take at most 0.1 + ... + 1.6 + 3 s."""
    proxy.follow(every(1, "busy"))
    begun = time.monotonic()
    with pytest.raises(StoreUnavailable, match="cannot read") as caught:
        store.read("a")
    assert 0.4 < time.monotonic() - begun < 15.0
    assert proxy.seen == ["GET"] * 6
    assert "\n" not in str(caught.value)


def test_a_refusal_is_said_at_once_and_not_repeated(store: Store, proxy: SlowS3) -> None:
    proxy.follow(every(1, "denied"))
    with pytest.raises(StoreUnavailable, match="privileges"):
        store.create("a", b"")
    with pytest.raises(StoreUnavailable, match="privileges"):
        store.read("a")
    assert proxy.seen == ["PUT", "GET"]


@pytest.mark.slow
def test_a_connection_that_falls_silent_is_given_up_after_eight_seconds(
    store: Store, proxy: SlowS3
) -> None:
    store.create("a", b"x")
    proxy.stall_seconds = 30.0
    proxy.follow(first("GET", "stall"))
    begun = time.monotonic()
    assert store.read("a") == b"x"  # asked again
    proxy.follow(first("PUT", "stall"))
    with pytest.raises(StoreUnavailable, match="cannot create"):  # nobody knows whether it was done
        store.create("b", b"y")
    assert 16.0 <= time.monotonic() - begun < 25.0
    assert store.read("b") == b"y"


# --- records and payloads ---


def test_half_a_record_or_payload_is_read_again_and_never_taken_for_the_whole(
    store: Store, proxy: SlowS3
) -> None:
    records.write(store, "a.json", {"n": 1})
    manifest = write_arrays(store, "p", {"x": np.arange(1000, dtype="float32")})
    proxy.follow(first("GET", "short"))
    assert records.require(store, "a.json")[0] == {"n": 1}
    proxy.follow(first("GET", "short", "none", "short"))
    assert (ArrayReader(store, manifest).read("x") == np.arange(1000)).all()
    proxy.follow(every(1, "short"))
    with pytest.raises(DamagedObject):
        records.require(store, "a.json")
    with pytest.raises(DamagedObject):
        ArrayReader(store, manifest).read("x")


def test_records_and_payloads_whose_answers_were_lost_are_written_once(
    store: Store, proxy: SlowS3
) -> None:
    values = np.arange(300, dtype="float32")
    proxy.follow(lambda method, n: "failed" if method == "PUT" and n % 2 == 0 else None)
    manifest = write_arrays(store, "p", {"x": values}, chunk_elements=100)
    digest = records.write(store, "a.json", manifest.to_json())
    proxy.follow(lambda method, n: None)
    assert records.write(store, "a.json", manifest.to_json()) == digest
    with pytest.raises(VersionTaken):
        records.write(store, "a.json", {"n": 2})
    assert (ArrayReader(store, manifest).read("x") == values).all()
    assert len(store.list_names("p")) == len(manifest.objects) == 5


# --- whole runs ---

SHORT = ("total_tokens=900", "sync.num_fragments=2", "local.checkpoint_steps=9")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("method", "kind", "period"), [("GET", "busy", 3), ("PUT", "failed", 4)])
def test_a_run_over_a_bad_s3_writes_what_a_run_over_a_good_store_writes(
    tmp_path: Path, s3_endpoint: str, proxy: SlowS3, method: str, kind: str, period: int
) -> None:
    """Every third read or listing is turned away; every fourth create is done, and answered by an error."""
    script = every(period, kind)
    urls = f"memory://good-{kind}", f"s3://{make_bucket(s3_endpoint)}/runs"
    proxy.follow(lambda seen, n: script(seen, n) if seen == method else None)
    trained = [runs.train(runs.tiny_config(tmp_path, *SHORT, store=url)) for url in urls]
    proxy.follow(lambda seen, n: None)
    assert verify(urls[1], "r").problems == []
    good, bad = (
        {n: run.store.read(n) for n in run.store.list_names("payloads/") if "/c/" in n}
        for run in trained
    )
    assert good == bad


# --- many names ---


def test_2500_names_come_in_three_pages_and_all_of_them(s3_endpoint: str, proxy: SlowS3) -> None:
    from moto.core import DEFAULT_ACCOUNT_ID
    from moto.s3.models import s3_backends

    bucket = make_bucket(s3_endpoint)
    backend = s3_backends[DEFAULT_ACCOUNT_ID]["aws"]
    names = [f"versions/f0000/v{n:08d}.json" for n in range(2500)]
    for name in names:
        backend.put_object(bucket, f"runs/r/{name}", b"")
    store = open_store(f"s3://{bucket}/runs/r")
    proxy.follow(lambda method, n: None)
    assert store.list_names("versions") == names
    assert proxy.seen == ["GET"] * 3
