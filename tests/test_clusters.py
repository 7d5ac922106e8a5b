"""Dask clusters as islands use them: calls, exceptions, deaths, messages, signals, orphans, addresses and TLS."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from infra import clusters
from infra.clusters import Call, Cluster, ClusterSpec, is_told_to_end, open_cluster, teller
from islands.types import ClusterUnavailable, ConfigError, LearnerLost

TOPIC = "diloco/test/east"
ROOT = Path(__file__).resolve().parent.parent
pytestmark = pytest.mark.slow


# --- what runs on a worker ---


def doubled(number: int) -> int:
    return 2 * number


def process_of(_: object) -> int:
    return os.getpid()


def refuse(text: str) -> None:
    raise ConfigError(text)


def miss(path: str) -> bytes:
    return Path(path).read_bytes()


def count_and_hang(folder: str) -> None:
    """Leave a mark of each attempt, then work for a long time."""
    mark = Path(folder) / f"attempt-{time.monotonic_ns()}"
    mark.write_text(str(os.getpid()))
    time.sleep(600)


def wait_for_file(path: str) -> str:
    while not Path(path).exists():
        time.sleep(0.02)
    return "went on"


def tell_from_a_thread(texts: list[str]) -> None:
    import threading

    tell = teller(TOPIC)
    thread = threading.Thread(target=lambda: [tell({"text": text}) for text in texts])
    thread.start()
    thread.join()


def threads_of(_: object) -> tuple[int, str]:
    import torch

    return torch.get_num_threads(), os.environ["OMP_NUM_THREADS"]


def hold_the_interpreter(seconds: int) -> int:
    """Let no other thread of this process run for so long: not one heartbeat goes out."""
    ctypes.PyDLL(None).usleep(seconds * 10**6)
    return os.getpid()


def num_wakes(seconds: float) -> int:
    """Return how often a thread of this process woke up (voluntary context switches) in so many idle seconds."""
    import resource

    before = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw
    time.sleep(seconds)
    return resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw - before


# --- a cluster of one's own ---


@pytest.fixture(scope="module")
def own() -> Iterator[Cluster]:
    with open_cluster(ClusterSpec("east", threads=2), TOPIC) as cluster:
        yield cluster


def result_of(cluster: Cluster, function: Callable[[Any], Any], argument: object) -> Any:
    call = cluster.call(function, argument)
    assert call.is_done(60)
    return call.result()


def is_alive(process: int) -> bool:
    """Say whether a process runs; one that nobody has waited for yet is dead all the same."""
    try:
        status = Path(f"/proc/{process}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return status.rpartition(")")[2].split()[0] not in "ZX"


def wait_for(claim: Callable[[], object], seconds: float) -> None:
    ends = time.monotonic() + seconds
    while not claim():
        assert time.monotonic() < ends, "it did not become true in time"
        time.sleep(0.02)


def test_a_call_returns_its_value(own: Cluster) -> None:
    assert result_of(own, doubled, 21) == 42


def test_the_same_call_twice_runs_twice(own: Cluster, tmp_path: Path) -> None:
    (tmp_path / "go").touch()
    first = own.call(wait_for_file, str(tmp_path / "go"))
    second = own.call(wait_for_file, str(tmp_path / "go"))
    assert first.is_done(30)
    assert second.is_done(30)
    assert first._future.key != second._future.key


def test_a_call_that_is_not_over_is_not_done(own: Cluster, tmp_path: Path) -> None:
    call = own.call(wait_for_file, str(tmp_path / "go"))
    begun = time.monotonic()
    assert not call.is_done(0.2)
    assert 0.15 < time.monotonic() - begun < 5
    (tmp_path / "go").touch()
    assert call.is_done(30)
    assert call.result() == "went on"


def test_an_exception_arrives_with_its_type_and_the_workers_traceback(own: Cluster) -> None:
    with pytest.raises(ConfigError, match=r"^rule, value, remedy$") as caught:
        result_of(own, refuse, "rule, value, remedy")
    assert "refuse" in [entry.name for entry in caught.traceback]


def test_an_operating_system_error_of_the_function_is_its_own(own: Cluster) -> None:
    """It is not mistaken for a lost connection to the scheduler."""
    with pytest.raises(FileNotFoundError, match="absent"):
        result_of(own, miss, "/nowhere/absent")


def test_messages_of_a_thread_in_the_worker_arrive_in_order(own: Cluster) -> None:
    own.messages()
    texts = [str(number) for number in range(50)]
    result_of(own, tell_from_a_thread, texts)
    told: list[str] = []

    def all_arrived() -> bool:
        told.extend(message["text"] for message in own.messages())
        return len(told) == len(texts)

    wait_for(all_arrived, 10)
    assert told == texts
    assert own.messages() == []


def test_a_killed_worker_is_a_lost_learner_once_and_the_next_call_works(
    own: Cluster, tmp_path: Path
) -> None:
    call = own.call(count_and_hang, str(tmp_path))
    wait_for(lambda: any(mark.read_text() for mark in tmp_path.iterdir()), 30)
    process = int(next(tmp_path.iterdir()).read_text())
    os.kill(process, signal.SIGKILL)
    begun = time.monotonic()
    assert call.is_done(5)
    with pytest.raises(LearnerLost, match="died"):
        call.result()
    assert time.monotonic() - begun < 5
    assert result_of(own, process_of, None) != process
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_whole_group_does_not_end_the_call_at_work(
    own: Cluster, tmp_path: Path, number: signal.Signals
) -> None:
    process = result_of(own, process_of, None)
    call = own.call(wait_for_file, str(tmp_path / "go"))
    assert not call.is_done(0.1)
    os.kill(process, number)
    assert not call.is_done(0.5)
    (tmp_path / "go").touch()
    assert call.is_done(30)
    assert call.result() == "went on"
    # Of these only SIGTERM says that the process must end soon; then it gets no further call.
    is_same = result_of(own, process_of, None) == process
    assert is_same == (number == signal.SIGINT)


def test_a_restarted_worker_is_shielded_and_has_its_threads_too(own: Cluster) -> None:
    process = result_of(own, process_of, None)
    os.kill(process, signal.SIGKILL)
    wait_for(lambda: not is_alive(process), 10)
    successor = _retried(own, process_of)
    assert successor != process
    os.kill(successor, signal.SIGINT)
    assert result_of(own, process_of, None) == successor
    assert result_of(own, threads_of, None) == (2, "2")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_call_after_the_only_workers_end_does_not_wait_for_that_one(
    own: Cluster, number: signal.Signals
) -> None:
    process, call = _call_kept_for_one_that_ends(own, number)
    assert call.is_done(60)
    assert call.result() != process


def test_a_call_at_work_for_long_is_begun_once(own: Cluster, tmp_path: Path) -> None:
    result_of(own, process_of, None)
    call = own.call(count_and_hang, str(tmp_path))
    assert not call.is_done(3.0)
    assert len(list(tmp_path.iterdir())) == 1
    os.kill(int(next(tmp_path.iterdir()).read_text()), signal.SIGKILL)
    assert call.is_done(30)


def test_a_call_that_has_just_failed_is_not_begun_anew(own: Cluster) -> None:
    result_of(own, process_of, None)
    call = own.call(refuse, "once")
    assert call._is_over(time.monotonic() + 60)
    call._unbind()
    assert call.is_done(0.0)
    with pytest.raises(ConfigError, match="once"):
        call.result()


def test_a_call_is_looked_at_again_where_its_scheduler_did_not_say(
    own: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    process, call = _call_kept_for_one_that_ends(own, signal.SIGKILL)
    monkeypatch.setattr("infra.clusters._ANSWER_SECONDS", 0.0)
    assert not call.is_done(3.0)
    monkeypatch.undo()
    assert call.is_done(60)
    assert call.result() != process


def _call_kept_for_one_that_ends(cluster: Cluster, number: signal.Signals) -> tuple[int, Call[int]]:
    """End the only worker, and return its process with a call made for it before another one is there."""
    before = cluster.call(process_of, None)
    assert before.is_done(60)
    process = before.result()
    os.kill(process, number)
    wait_for(lambda: not cluster._client.run_on_scheduler(num_at_work), 30)
    submit = partial(cluster._submit, process_of, None)
    call: Call[int] = Call(cluster._client, submit, before.place, {})
    assert cluster._client.run_on_scheduler(num_at_work) == 0, "its successor came too soon to tell"
    return process, call


def num_at_work(dask_scheduler: Any) -> int:
    return len(dask_scheduler.running)


def test_a_call_that_holds_its_interpreter_is_not_taken_for_dead(own: Cluster) -> None:
    """A scheduler that gave up silent workers sooner would not hear of this one for ten of its heartbeats."""
    process = result_of(own, process_of, None)
    assert result_of(own, hold_the_interpreter, 10) == process
    assert result_of(own, process_of, None) == process
    longest = own._client.run_on_scheduler(silence_allowed)
    assert longest >= 600


def silence_allowed(dask_scheduler: Any) -> float:
    return float(dask_scheduler.worker_ttl)


def test_a_worker_beside_a_learner_hardly_ever_wakes_up(own: Cluster) -> None:
    assert result_of(own, num_wakes, 3.0) < 60  # 50 a second by Dask's default


# --- spares, notices, memory ---


@pytest.fixture(scope="module")
def spared() -> Iterator[Cluster]:
    spec = ClusterSpec("west", spares=1, memory_mb=600, preload="tests.test_clusters.load_wave")
    with open_cluster(spec, TOPIC) as cluster:
        cluster._client.wait_for_workers(2, timeout=60)
        yield cluster


def load_wave() -> None:
    import wave as wave


def has_loaded(module: str) -> bool:
    return module in sys.modules


def wait_for_notice(seconds: float) -> int:
    """Work until this process is told to end, and so much longer."""
    while not is_told_to_end():
        time.sleep(0.02)
    time.sleep(seconds)
    return os.getpid()


def grow(num_bytes: int) -> None:
    held = bytearray(num_bytes)
    held[:: 2**12] = b"x" * len(held[:: 2**12])  # touched, so that it is really there
    time.sleep(60)


def test_after_a_death_the_next_call_goes_to_the_spare_at_once(
    spared: Cluster, tmp_path: Path
) -> None:
    process = result_of(spared, process_of, None)
    assert result_of(spared, process_of, None) == process, "it stays where it is warm"
    call = spared.call(count_and_hang, str(tmp_path))
    wait_for(lambda: any(mark.read_text() for mark in tmp_path.iterdir()), 30)
    os.kill(process, signal.SIGKILL)
    begun = time.monotonic()
    assert call.is_done(5)
    with pytest.raises(LearnerLost, match="died"):
        call.result()
    assert result_of(spared, process_of, None) != process
    assert time.monotonic() - begun < 2, "a process of Python alone takes longer to start"
    assert result_of(spared, has_loaded, "wave")
    spared._client.wait_for_workers(2, timeout=60)  # the replacement is the next spare


def test_a_worker_told_to_end_ends_its_call_and_then_itself_and_the_next_goes_elsewhere(
    spared: Cluster,
) -> None:
    process = result_of(spared, process_of, None)
    call = spared.call(wait_for_notice, 1.0)
    assert not call.is_done(0.3)
    os.kill(process, signal.SIGTERM)
    begun = time.monotonic()
    other = spared.call(process_of, None)
    assert call.is_done(10)
    assert call.result() == process
    assert other.is_done(10)
    assert other.result() != process
    wait_for(lambda: not is_alive(process), 10)
    assert time.monotonic() - begun < 10
    assert not result_of(spared, told_to_end, None), "whoever follows was told nothing"
    spared._client.wait_for_workers(2, timeout=60)


def told_to_end(_: object) -> bool:
    return is_told_to_end()


def test_an_idle_worker_told_to_end_is_replaced(spared: Cluster) -> None:
    process = result_of(spared, process_of, None)
    os.kill(process, signal.SIGTERM)
    wait_for(lambda: not is_alive(process), 10)
    assert result_of(spared, process_of, None) != process
    spared._client.wait_for_workers(2, timeout=60)


def test_a_result_that_was_fetched_is_not_computed_again_when_its_worker_dies(
    spared: Cluster, tmp_path: Path
) -> None:
    call = spared.call(count, str(tmp_path))
    assert call.is_done(30)
    process = call.result()
    os.kill(process, signal.SIGKILL)
    wait_for(lambda: not is_alive(process), 10)
    assert _retried(spared, process_of) != process
    spared._client.wait_for_workers(2, timeout=60)
    assert len(list(tmp_path.iterdir())) == 1


def count(folder: str) -> int:
    (Path(folder) / f"attempt-{time.monotonic_ns()}").touch()
    return os.getpid()


def test_a_worker_above_its_memory_is_a_lost_learner_with_that_reason(spared: Cluster) -> None:
    call = spared.call(grow, 700 * 2**20)
    assert call.is_done(30)
    with pytest.raises(LearnerLost, match=r"within cluster\.memory_mb, got [67]\d\d MB"):
        call.result()
    assert result_of(spared, doubled, 3) == 6


def _retried(cluster: Cluster, function: Callable[[Any], Any]) -> Any:
    """Call until no call is lost: one may have been sent to the process that just died."""
    while True:
        try:
            return result_of(cluster, function, None)
        except LearnerLost:
            continue


def test_what_was_opened_ends_with_the_block_also_with_a_call_at_work(tmp_path: Path) -> None:
    with open_cluster(ClusterSpec("west"), TOPIC) as cluster:
        process = result_of(cluster, process_of, None)
        cluster.call(count_and_hang, str(tmp_path))
        wait_for(lambda: list(tmp_path.iterdir()), 30)
        begun = time.monotonic()
    assert time.monotonic() - begun < 15
    wait_for(lambda: not is_alive(process), 5)


_OWNER = """
import sys, time
from infra.clusters import ClusterSpec, open_cluster
from tests.test_clusters import TOPIC, count_and_hang, process_of
if __name__ == "__main__":
    with open_cluster(ClusterSpec("east"), TOPIC) as cluster:
        print(cluster.call(process_of, None).result(), flush=True)
        cluster.call(count_and_hang, sys.argv[1])
        time.sleep(600)
"""


def _children(process: int) -> set[int]:
    found = subprocess.run(
        ["ps", "-o", "pid=", "--ppid", str(process)], capture_output=True, text=True, check=False
    )
    direct = {int(line) for line in found.stdout.split()}
    return direct.union(*(_children(child) for child in direct))


def test_a_killed_owner_leaves_no_worker_behind(tmp_path: Path) -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", _OWNER, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    try:
        assert owner.stdout is not None
        worker = int(owner.stdout.readline())
        wait_for(lambda: list(tmp_path.iterdir()), 30)
        family = _children(owner.pid)
        assert worker in family
    finally:
        owner.kill()
        owner.wait()
        assert owner.stdout is not None
        owner.stdout.close()
    wait_for(lambda: not any(is_alive(process) for process in family), 10)


# --- a cluster of somebody else's ---


def free_port() -> int:
    with socket.socket() as opened:
        opened.bind(("127.0.0.1", 0))
        return int(opened.getsockname()[1])


@contextmanager
def served(*options: str, scheme: str = "tcp", at: str = "") -> Iterator[str]:
    """Run a scheduler and one worker as processes; yield the scheduler's address, `at` if that is given."""
    address = at or f"{scheme}://127.0.0.1:{free_port()}"
    port = address.rpartition(":")[2]
    scheduler = ["distributed.cli.dask_scheduler", "--host", address.rpartition(":")[0]]
    scheduler += ["--port", port, "--no-dashboard", "--no-jupyter", *options]
    worker = ["distributed.cli.dask_worker", address, "--nthreads", "1", "--no-dashboard", *options]
    with ExitStack() as stack:
        for command in (scheduler, worker):
            process = subprocess.Popen(
                [sys.executable, "-m", *command],
                cwd=ROOT,
                env={
                    **os.environ,
                    "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}",
                    "DASK_DISTRIBUTED__SCHEDULER__ALLOWED_FAILURES": "0",
                },
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
            stack.callback(_end, process)
            if command is scheduler:
                wait_for(lambda: _listens(int(port)), 30)
        yield address


def _end(process: subprocess.Popen[bytes]) -> None:
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _listens(port: int) -> bool:
    with socket.socket() as opened:
        return opened.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a file with a self-signed certificate and its key, good for client, scheduler and worker."""
    folder = tmp_path_factory.mktemp("tls")
    both, key, cert = folder / "both.pem", folder / "key.pem", folder / "cert.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
    command += ["-subj", "/CN=islands", "-keyout", str(key), "-out", str(cert)]
    subprocess.run(command, check=True, capture_output=True)
    both.write_text(cert.read_text() + key.read_text())
    return both


def test_a_cluster_at_an_address_does_the_same_and_outlives_the_block() -> None:
    with served() as address:
        spec = ClusterSpec("far", address=address)
        with open_cluster(spec, TOPIC) as cluster:
            process = result_of(cluster, process_of, None)
            with pytest.raises(ConfigError):
                result_of(cluster, refuse, "no")
            result_of(cluster, tell_from_a_thread, ["hello"])
            told: list[Any] = []
            wait_for(lambda: told.extend(cluster.messages()) or told, 10)
            assert [message["text"] for message in told] == ["hello"]
        with open_cluster(spec, TOPIC) as cluster:
            assert result_of(cluster, process_of, None) == process


def test_a_worker_that_dies_at_an_address_is_a_lost_learner(tmp_path: Path) -> None:
    with served() as address, open_cluster(ClusterSpec("far", address=address), TOPIC) as cluster:
        call = cluster.call(count_and_hang, str(tmp_path))
        wait_for(lambda: any(mark.read_text() for mark in tmp_path.iterdir()), 60)
        os.kill(int(next(tmp_path.iterdir()).read_text()), signal.SIGKILL)
        assert call.is_done(10)
        with pytest.raises(LearnerLost):
            call.result()


def test_a_scheduler_that_dies_is_a_lost_learner_and_the_next_call_finds_its_successor(
    tmp_path: Path,
) -> None:
    with ExitStack() as first:
        address = first.enter_context(served())
        with open_cluster(ClusterSpec("far", address=address), TOPIC) as cluster:
            call = cluster.call(count_and_hang, str(tmp_path))
            wait_for(lambda: list(tmp_path.iterdir()), 60)
            first.close()
            wait_for(lambda: call.is_done(0.1), 10)
            with pytest.raises(LearnerLost, match="the scheduler lost the call"):
                call.result()
            with served(at=address):
                assert result_of(cluster, doubled, 21) == 42


def test_a_cluster_behind_tls_answers_who_has_a_certificate(certificate: Path) -> None:
    pem = str(certificate)
    options = ("--tls-ca-file", pem, "--tls-cert", pem, "--tls-key", pem)
    with served(*options, scheme="tls") as address:
        spec = ClusterSpec("far", address=address, ca_file=pem, cert_file=pem)
        with open_cluster(spec, TOPIC) as cluster:
            assert result_of(cluster, doubled, 4) == 8
        require_unavailable(ClusterSpec("far", address=address))
        missing = ClusterSpec("far", address=address, ca_file="/nowhere", cert_file=pem)
        require_unavailable(missing)


def require_unavailable(spec: ClusterSpec) -> None:
    begun = time.monotonic()
    with pytest.raises(ClusterUnavailable) as caught, open_cluster(spec, TOPIC):
        pass
    assert time.monotonic() - begun < 20
    text = str(caught.value)
    assert "\n" not in text
    assert text.startswith("island far: ")
    assert str(spec.address) in text


def test_an_address_where_nobody_listens_is_an_unavailable_cluster() -> None:
    require_unavailable(ClusterSpec("far", address=f"tcp://127.0.0.1:{free_port()}"))


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clusters, "_CONNECT_SECONDS", 2)


@pytest.mark.usefixtures("impatient")
def test_a_name_that_does_not_exist_is_an_unavailable_cluster() -> None:
    require_unavailable(ClusterSpec("far", address="tcp://no-such-host.invalid:8786"))


@pytest.mark.usefixtures("impatient")
def test_a_scheduler_that_accepts_and_says_nothing_is_an_unavailable_cluster() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        port = silent.getsockname()[1]
        require_unavailable(ClusterSpec("far", address=f"tcp://127.0.0.1:{port}"))
