"""One contract over every kind of store, then what only a disk or only a URL can get wrong."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from infra.disk import PARTIAL, LocalDisk
from infra.store import Store, open_store
from islands.types import ConfigError, StoreUnavailable, VersionTaken

ROOT = Path(__file__).parent.parent
BAD_NAMES = ["", "/a", "a/", "a//b", "../x", "a/../b", ".", "./a", "a\\b", "a\nb", "a\0", "x" * 201]
BAD_NAMES += [f"{PARTIAL}/x", f"a/{PARTIAL}/x"]

Client = Callable[[], Store]


@pytest.fixture(scope="session")
def s3_endpoint() -> Iterator[str]:
    moto = pytest.importorskip("moto.server")
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def s3_environment(s3_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_endpoint)
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    return s3_endpoint


def make_bucket(endpoint: str) -> str:
    boto3 = pytest.importorskip("boto3")
    client = boto3.client("s3", endpoint_url=endpoint)
    name = f"bucket-{uuid.uuid4().hex[:12]}"
    client.create_bucket(Bucket=name)
    return name


@pytest.fixture(params=["memory", "disk", "durable disk", "s3"])
def client(request: pytest.FixtureRequest, tmp_path: Path) -> Client:
    """Return a function that opens one more client on one empty place."""
    if request.param == "s3":
        endpoint = request.getfixturevalue("s3_environment")
        url = f"s3://{make_bucket(endpoint)}/runs"
    elif request.param == "memory":
        url = f"memory://{uuid.uuid4().hex}"
    else:
        url = f"file://{tmp_path}/new/runs"
    durable = request.param != "disk"
    return lambda: open_store(url, durable=durable)


class TestEveryStore:
    def test_what_was_created_is_read_by_another_client(self, client: Client) -> None:
        client().create("a/b.json", b"bytes")
        assert client().read("a/b.json") == b"bytes"

    def test_an_empty_object_is_not_an_absent_one(self, client: Client) -> None:
        store = client()
        store.create("empty", b"")
        assert store.read("empty") == b""

    def test_an_absent_object_reads_as_none(self, client: Client) -> None:
        store = client()
        store.create("a/b", b"")
        assert [store.read(name) for name in ("x", "a", "a/c", "a/b/c")] == [None] * 4

    def test_nothing_can_be_overwritten(self, client: Client) -> None:
        store = client()
        store.create("a", b"first")
        for sync in (True, False):
            with pytest.raises(VersionTaken, match="a exists already"):
                client().create("a", b"second", sync=sync)
        assert store.read("a") == b"first"

    def test_of_eight_racing_threads_exactly_one_creates_each_name(self, client: Client) -> None:
        stores = [client() for _ in range(8)]
        start = threading.Barrier(8)
        wins: list[tuple[str, bytes]] = []

        def race(index: int) -> None:
            start.wait()
            for key in range(50):
                try:
                    stores[index].create(f"r/{key}", bytes([index]), sync=False)
                except VersionTaken:
                    continue
                wins.append((f"r/{key}", bytes([index])))

        threads = [threading.Thread(target=race, args=(index,)) for index in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(name for name, _ in wins) == stores[0].list_names("r")
        assert len(wins) == 50
        assert all(stores[0].read(name) == data for name, data in wins)

    def test_a_listing_is_recursive_sorted_and_sees_another_client_at_once(
        self, client: Client
    ) -> None:
        one, two = client(), client()
        assert one.list_names("") == []
        for name in ("b/2", "b/10", "a", "b/c/d/e"):
            two.create(name, b"")
            assert name in one.list_names("")
        assert one.list_names("") == ["a", "b/10", "b/2", "b/c/d/e"]
        two.delete("b/2")
        assert one.list_names("b") == ["b/10", "b/c/d/e"]

    def test_a_prefix_is_a_folder_and_not_a_beginning(self, client: Client) -> None:
        store = client()
        for name in ("inbox/f1/a", "inbox/f10/a", "inbox/f1.json"):
            store.create(name, b"")
        assert store.list_names("inbox/f1") == ["inbox/f1/a"]
        assert store.list_names("inbox/f1/") == ["inbox/f1/a"]
        assert store.list_names("inbox/f1.json") == []
        assert store.list_names("nowhere") == []

    def test_deleting_twice_is_fine_and_frees_the_name(self, client: Client) -> None:
        store = client()
        store.create("a/b", b"1")
        store.delete("a/b")
        store.delete("a/b")
        store.delete("a/c/d")
        assert store.read("a/b") is None
        store.create("a/b", b"2")
        assert store.read("a/b") == b"2"

    def test_a_view_shows_its_folder_under_shorter_names(self, client: Client) -> None:
        store = client()
        view = store.within("x").within("run/")
        view.create("a/b", b"1")
        store.create("y", b"2")
        assert store.list_names("") == ["x/run/a/b", "y"]
        assert view.list_names("") == view.list_names("a") == ["a/b"]
        assert view.read("a/b") == b"1"
        assert view.read("y") is None
        assert view.url == f"{store.url}/x/run"
        view.sync("a")
        view.delete("a/b")
        assert store.list_names("") == ["y"]

    def test_a_view_is_the_store_at_its_url(self, client: Client) -> None:
        view = client().within("run")
        view.create("a", b"1")
        assert open_store(view.url).read("a") == b"1"

    @pytest.mark.parametrize("name", BAD_NAMES)
    def test_a_bad_name_is_refused_by_every_verb(self, client: Client, name: str) -> None:
        store = client()
        for verb in (store.read, store.delete, lambda n: store.create(n, b"")):
            with pytest.raises(ValueError, match="object name"):
                verb(name)
        if name not in ("", "a/"):  # as prefixes these are everything, and a folder
            for verb in (store.list_names, store.sync, store.within):
                with pytest.raises(ValueError, match="object name"):
                    verb(name)

    def test_odd_but_legal_names_survive(self, client: Client) -> None:
        store = client()
        names = sorted(["sp ace", "häß/ü", "100%25", "a#b?c", "~[x]*", ".hidden", "x" * 200])
        for name in names:
            store.create(name, name.encode())
        assert store.list_names("") == names
        assert all(store.read(name) == name.encode() for name in names)

    def test_a_store_keeps_a_copy_of_what_it_was_given(self, client: Client) -> None:
        store = client()
        data = bytearray(b"before")
        store.create("a", data)  # type: ignore[arg-type]
        data[:] = b"after!"
        assert store.read("a") == b"before"

    def test_an_object_given_in_parts_is_their_sum(self, client: Client) -> None:
        store = client()
        first = bytearray(os.urandom(2**20))
        whole = bytes(first) + b"end"
        store.create("parts", (memoryview(first), b"", b"end"))
        store.create("none", ())
        first[:] = bytes(2**20)
        assert store.read("parts") == whole
        assert store.read("none") == b""

    def test_a_big_object_makes_the_round_trip(self, client: Client) -> None:
        store = client()
        data = os.urandom(2**20) * 20
        store.create("big", data)
        assert store.read("big") == data

    def test_a_listing_pages_through_more_than_a_thousand_names(self, client: Client) -> None:
        store = client()
        names = [f"many/{index:05d}" for index in range(1100)]
        for name in names:
            store.create(name, b"", sync=False)
        assert store.list_names("many") == names


def run_python(script: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", script, *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )


def finish_python(process: subprocess.Popen[str]) -> str:
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    return output


RACE = """
import sys
from infra.store import open_store
from islands.types import VersionTaken
store, wins = open_store(sys.argv[1]), 0
for key in range(100):
    try:
        store.create(f"r/{key}", sys.argv[2].encode())
        wins += 1
    except VersionTaken:
        pass
print(wins)
"""

ORDER = """
import json, os, sys
from infra.store import open_store
events, fsync, link, unlink = [], os.fsync, os.link, os.unlink
def logged(verb, path):
    events.append([verb, path])
def traced_fsync(descriptor):
    logged("fsync", os.readlink(f"/proc/self/fd/{descriptor}"))
    fsync(descriptor)
def traced_link(source, target):
    logged("link", target)
    link(source, target)
store = open_store(sys.argv[1])
os.fsync, os.link = traced_fsync, traced_link
store.create("h/one", b"1")
store.create("p/c/0", b"2", sync=False)
store.create("p/zarr.json", b"3", sync=False)
logged("sync", "")
store.sync("p")
print(json.dumps(events))
"""

CREATE_FOR_EVER = """
import itertools, sys
from infra.store import open_store
store = open_store(sys.argv[1])
for key in itertools.count():
    store.create(f"k/{sys.argv[2]}-{key}", bytes([key % 256]) * 1_000_000, sync=key % 2 == 0)
    if key == 3:
        print("started", flush=True)
"""

FULL_DISK = """
import resource, sys
from infra.store import open_store
from islands.types import StoreUnavailable
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
store = open_store(sys.argv[1])
store.create("a/small", bytes(900))
try:
    store.create("a/large", bytes(5000))
except StoreUnavailable as exc:
    print(exc)
"""


class TestLocalDisk:
    def test_of_four_racing_processes_exactly_one_creates_each_name(self, tmp_path: Path) -> None:
        url = f"file://{tmp_path}/runs"
        racers = [run_python(RACE, url, str(index)) for index in range(4)]
        wins = [int(finish_python(racer)) for racer in racers]
        assert sum(wins) == 100
        store = open_store(url)
        held = [store.read(name) for name in store.list_names("r")]
        assert [held.count(str(index).encode()) for index in range(4)] == wins

    def test_bytes_are_durable_before_their_name_and_the_name_before_the_return(
        self, tmp_path: Path
    ) -> None:
        events = json.loads(finish_python(run_python(ORDER, f"file://{tmp_path}/runs")))
        root = f"{tmp_path}/runs"
        cut = events.index(["sync", ""])
        first, *header = events[: cut - 2]
        assert first[0] == "fsync"
        assert first[1].startswith(f"{root}/{PARTIAL}/")
        assert header == [
            ["link", f"{root}/h/one"],
            ["fsync", f"{root}/h"],
            ["fsync", root],
            ["fsync", str(tmp_path)],
        ]
        assert events[cut - 2 : cut] == [["link", f"{root}/p/c/0"], ["link", f"{root}/p/zarr.json"]]
        synced = [path for _, path in events[cut + 1 :]]
        assert sorted(synced[:3]) == [f"{root}/p/c", f"{root}/p/c/0", f"{root}/p/zarr.json"]
        assert synced[3:] == [f"{root}/p", root, str(tmp_path)]

    def test_without_durability_nothing_is_synced(self, tmp_path: Path) -> None:
        script = ORDER.replace("open_store(sys.argv[1])", "open_store(sys.argv[1], durable=False)")
        events = json.loads(finish_python(run_python(script, f"file://{tmp_path}/runs")))
        assert {verb for verb, _ in events} == {"link", "sync"}

    def test_a_kill_amid_creates_leaves_only_whole_objects(self, tmp_path: Path) -> None:
        url = f"file://{tmp_path}/runs"
        for attempt in range(5):
            process = run_python(CREATE_FOR_EVER, url, str(attempt))
            assert process.stdout is not None
            assert process.stdout.readline() == "started\n"
            time.sleep(0.01 * attempt)
            process.send_signal(signal.SIGKILL)
            process.communicate()
        store = open_store(url)
        names = store.list_names("")
        assert len(names) >= 20
        for name in names:
            key = int(name.rpartition("-")[2])
            assert store.read(name) == bytes([key % 256]) * 1_000_000

    def test_a_full_disk_is_an_error_that_leaves_nothing_behind(self, tmp_path: Path) -> None:
        url = f"file://{tmp_path}/runs"
        message = finish_python(run_python(FULL_DISK, url))
        assert f"cannot create {url}/a/large" in message
        assert "File too large" in message
        assert open_store(url).list_names("") == ["a/small"]
        assert list((tmp_path / "runs" / PARTIAL).iterdir()) == []

    def test_opening_sweeps_only_old_partial_files(self, tmp_path: Path) -> None:
        litter = tmp_path / PARTIAL
        litter.mkdir()
        for name, age_seconds in (("old", 3700), ("young", 3500)):
            (litter / name).write_bytes(b"x")
            os.utime(litter / name, (time.time() - age_seconds,) * 2)
        store = open_store(f"file://{tmp_path}")
        assert [path.name for path in litter.iterdir()] == ["young"]
        assert store.list_names("") == []

    def test_deleting_leaves_no_empty_folders(self, tmp_path: Path) -> None:
        store = open_store(f"file://{tmp_path}/runs")
        store.create("a/b/c", b"")
        store.create("a/d", b"")
        store.delete("a/b/c")
        assert not (tmp_path / "runs/a/b").exists()
        store.within("a").delete("d")
        assert [path.name for path in (tmp_path / "runs").iterdir()] == [PARTIAL]

    def test_creates_survive_deletes_that_remove_their_folder(self, tmp_path: Path) -> None:
        store = open_store(f"file://{tmp_path}/runs", durable=False)
        failures: list[Exception] = []

        def churn(index: int) -> None:
            try:
                for step in range(300):
                    store.create(f"a/b/{index}-{step}", b"x")
                    store.delete(f"a/b/{index}-{step}")
            except StoreUnavailable as exc:
                failures.append(exc)

        threads = [threading.Thread(target=churn, args=(index,)) for index in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []
        assert store.list_names("") == []

    def test_a_name_that_is_a_folder_is_no_object_and_not_taken(self, tmp_path: Path) -> None:
        store = open_store(f"file://{tmp_path}")
        store.create("a/b", b"")
        with pytest.raises(StoreUnavailable, match="is a folder"):
            store.create("a", b"")
        with pytest.raises(StoreUnavailable, match="a/b/c"):
            store.create("a/b/c", b"")

    def test_opening_creates_nothing(self, tmp_path: Path) -> None:
        store = open_store(f"file://{tmp_path}/new/runs")
        assert store.list_names("") == []
        assert list(tmp_path.iterdir()) == []

    def test_a_relative_url_becomes_absolute(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        assert open_store("file://./runs").url == f"file://{tmp_path}/runs"
        assert open_store("file://.").url == f"file://{tmp_path}"


class TestOpening:
    @pytest.mark.parametrize(
        ("url", "message"),
        [
            ("runs", "got 'runs'.*write file://./runs"),
            ("http://user:secret@host/x", "got 'http'"),
            ("file://runs", "write file://./runs"),
            ("file://", "write file://./runs"),
            ("file:///tmp/a\nb", "control characters"),
            ("memory://name/../x", "plain folder.*choose another"),
            ("s3://", "s3://bucket/prefix"),
            ("s3://bucket//x", "plain folder"),
        ],
    )
    def test_a_url_that_means_nothing_is_refused_with_a_remedy(
        self, url: str, message: str
    ) -> None:
        with pytest.raises(ConfigError, match=message):
            open_store(url)

    def test_credentials_in_a_url_are_refused_and_not_repeated(self) -> None:
        with pytest.raises(ConfigError, match="environment") as caught:
            open_store("s3://key:hunter2@bucket/x")
        assert "hunter2" not in str(caught.value)

    @pytest.mark.parametrize("path", ["file", "file/below"])
    def test_a_path_through_a_file_is_refused(self, tmp_path: Path, path: str) -> None:
        (tmp_path / "file").write_bytes(b"")
        with pytest.raises(ConfigError, match=r"file is none; choose another"):
            open_store(f"file://{tmp_path}/{path}")

    @pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
    def test_a_folder_that_cannot_be_written_is_refused(self, tmp_path: Path) -> None:
        tmp_path.chmod(0o500)
        with pytest.raises(ConfigError, match="must be writable"):
            open_store(f"file://{tmp_path}/runs")

    def test_memory_without_a_name_is_new_each_time(self) -> None:
        open_store("memory://").create("a", b"")
        assert open_store("memory://").list_names("") == []

    def test_local_disk_is_our_own(self, tmp_path: Path) -> None:
        assert isinstance(open_store(f"file://{tmp_path}"), LocalDisk)

    def test_a_missing_bucket_is_refused(self, s3_environment: str) -> None:
        with pytest.raises(ConfigError, match=r"s3://no-such-bucket.*check the bucket"):
            open_store("s3://no-such-bucket/runs")

    def test_a_plain_http_endpoint_wants_a_switch(
        self, s3_environment: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv("AWS_ALLOW_HTTP")
        with pytest.raises(ConfigError, match="AWS_ALLOW_HTTP=true"):
            open_store("s3://bucket/runs")

    def test_an_endpoint_that_never_answers_is_given_up(
        self, s3_environment: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            listener.listen()
            monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{listener.getsockname()[1]}")
            began = time.monotonic()
            with pytest.raises(ConfigError, match="must answer") as caught:
                open_store("s3://bucket/runs")
        assert time.monotonic() - began < 12
        assert isinstance(caught.value, StoreUnavailable)  # whoever had it open before may wait

    def test_a_bucket_that_goes_away_is_unavailable_and_not_empty(
        self, s3_environment: str
    ) -> None:
        boto3 = pytest.importorskip("boto3")
        bucket = make_bucket(s3_environment)
        store = open_store(f"s3://{bucket}")
        boto3.client("s3", endpoint_url=s3_environment).delete_bucket(Bucket=bucket)
        with pytest.raises(StoreUnavailable, match="cannot create"):
            store.create("a", b"")
        with pytest.raises(StoreUnavailable, match="cannot list"):
            store.list_names("")
