"""The services of one machine: found or started, refused with a reason, and gone afterwards."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from infra import services, settings
from infra.keeping import Service, Started
from infra.services import Services, ServiceUnavailable

NEEDS_SERVICES = pytest.mark.skipif(
    not all(importlib.util.find_spec(name) for name in ("prefect", "mlflow")),
    reason="Prefect or MLflow is not installed",
)
ROOT = Path(__file__).resolve().parent.parent
PYTHON = (sys.executable, "-I", "-S", "-c")
NOBODY = "http://127.0.0.1:9/api"  # the discard port: nothing listens there
# A command that tells who and with what it runs, and that has a grandchild in a session of its own.
SERVE = """
import json, os, time
if not os.fork():
    os.setsid()
    time.sleep(1000)
with open("{folder}/serve.partial", "w") as file:
    json.dump(dict(os.environ, PID=os.getpid(), CWD=os.getcwd()), file)
os.rename("{folder}/serve.partial", "{folder}/serve.json")
time.sleep(1000)
"""


class Answers(BaseHTTPRequestHandler):
    """Answers on the health addresses of both servers as they do; all else is a page, as Prefect's is."""

    def do_GET(self) -> None:
        known = {"/api/health": b"true", "/health": b"OK"}
        if self.path == "/locked/health":
            self.send_error(401)
            return
        self.send_response(200)
        self.end_headers()
        self.wfile.write(known.get(self.path, b"<!DOCTYPE html>"))

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@pytest.fixture
def server() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as http_server:
        thread = threading.Thread(target=http_server.serve_forever, args=[0.02])
        thread.start()
        yield f"http://127.0.0.1:{http_server.server_port}"
        http_server.shutdown()
        thread.join()


@pytest.fixture(autouse=True)
def _no_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (settings.PREFECT_API_URL, settings.MLFLOW_TRACKING_URI, settings.HOME):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def given(server: str, monkeypatch: pytest.MonkeyPatch) -> Services:
    """Have the environment name a server for both, so that only the serve process is left to start."""
    monkeypatch.setenv(settings.PREFECT_API_URL, f"{server}/api")
    monkeypatch.setenv(settings.MLFLOW_TRACKING_URI, server)
    return Services(f"{server}/api", server, server)


def serve(folder: Path) -> list[str]:
    return [*PYTHON, SERVE.format(folder=folder)]


def is_served(folder: Path) -> Callable[[Services], bool]:
    return lambda _: (folder / "serve.json").exists()


def until(claim: Callable[[], object], *, seconds: float = 30) -> None:
    limit = time.monotonic() + seconds
    while not claim():
        assert time.monotonic() < limit, "it did not come to that"
        time.sleep(0.05)


def processes_of(folder: Path) -> list[str]:
    """Return what runs with the folder in its command line, guards included."""
    done = subprocess.run(["ps", "-ewwo", "pid=,stat=,args="], capture_output=True, text=True)
    lines = [line.split(None, 2) for line in done.stdout.splitlines()]
    return [
        line[2]
        for line in lines
        if line[1][0] != "Z" and int(line[0]) != os.getpid() and str(folder) in line[2]
    ]


def service(folder: Path, command: Sequence[str], is_ready: Callable[[], bool]) -> Service:
    return Service(
        name="The example",
        command=tuple(command),
        variables={"EXAMPLE": "yes"},
        log=folder / "logs" / "example.log",
        where="http://127.0.0.1:1",
        is_ready=is_ready,
        grace_seconds=5,
    )


def fail(message: str) -> None:
    pytest.fail(f"said {message!r}")


# --- what the environment says -------------------------------------------------------------------


def test_the_home_is_no_option_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DILOCO_HOME", "/srv/diloco")
    monkeypatch.setenv("DILOCO_SEED", "5")
    assert "DILOCO_HOME" not in settings.environment()
    assert settings.environment()["DILOCO_SEED"] == "5"
    assert settings.home() == Path("/srv/diloco")


def test_the_home_is_absolute_and_here_unless_said_otherwise(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert settings.home() == tmp_path / ".diloco"
    monkeypatch.setenv("DILOCO_HOME", "elsewhere")
    assert settings.home() == tmp_path / "elsewhere"
    monkeypatch.setenv("DILOCO_HOME", "~/diloco")
    assert settings.home() == Path.home() / "diloco"


def test_an_empty_address_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFECT_API_URL", " ")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:///runs.db")
    assert settings.prefect_api_url() is None
    assert settings.mlflow_tracking_uri() == "sqlite:///runs.db"


def test_a_childs_environment_is_ours_and_what_is_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DILOCO_SEED", "5")
    child = settings.child_environment({"DILOCO_SEED": "6", "ANOTHER": "7"})
    assert child == {**os.environ, "DILOCO_SEED": "6", "ANOTHER": "7"}
    assert os.environ["DILOCO_SEED"] == "5"


# --- ports -----------------------------------------------------------------------------------------


def test_a_free_port_is_taken_and_a_used_one_replaced() -> None:
    free = services.free_port(0)
    assert services.free_port(free) == free
    with socket.create_server(("127.0.0.1", free)):
        other = services.free_port(free)
        assert other != free
        with socket.create_server(("127.0.0.1", other)):
            pass


def test_a_port_whose_last_server_has_just_ended_is_free() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client:
            accepted, _ = listener.accept()
            accepted.close()  # the server's end closes first: that leaves the port in TIME_WAIT
            assert client.recv(1) == b""
    assert services.free_port(port) == port


def test_a_port_is_claimed_before_its_server_has_bound_it() -> None:
    free = services.free_port(0)
    with ExitStack() as first, ExitStack() as second:
        assert services._claim_port(free, first) == free
        assert services._claim_port(free, second) != free
    with ExitStack() as third:
        assert services._claim_port(free, third) == free


# --- one service -----------------------------------------------------------------------------------


def test_a_service_that_ends_at_once_is_told_with_the_end_of_its_log(tmp_path: Path) -> None:
    source = "print('before', flush=True); raise SystemExit('no database')"
    example = service(tmp_path, [*PYTHON, source], lambda: False)
    example.log.parent.mkdir()
    example.log.write_text("of an earlier start\n")
    started = Started(example)
    with pytest.raises(ServiceUnavailable) as caught:
        started.wait_until_ready(fail)
    started.stop(fail)
    assert str(caught.value) == (
        "The example must be ready on http://127.0.0.1:1, but ended with status 1; "
        f"mend what its log names, {example.log}, which ends:\n    before\n    no database"
    )
    assert example.log.read_text() == "of an earlier start\nbefore\nno database\n"


def test_a_service_that_does_not_get_ready_is_given_up(tmp_path: Path) -> None:
    started = Started(service(tmp_path, ["sleep", "100"], lambda: False))
    with pytest.raises(ServiceUnavailable, match=r"but is not after 0 s; .*\n    \(nothing\)"):
        started.wait_until_ready(fail, deadline_seconds=0.2)
    started.stop(fail)
    assert started.process.returncode == 128 + signal.SIGTERM


@pytest.mark.slow
def test_what_takes_long_to_start_or_to_stop_is_announced_once(tmp_path: Path) -> None:
    source = """
import signal, time
def stop(*_):
    time.sleep(4)
    raise SystemExit
signal.signal(signal.SIGTERM, stop)
print("on", flush=True)
time.sleep(100)
"""
    begun = time.monotonic()
    example = service(tmp_path, [*PYTHON, source], lambda: time.monotonic() - begun > 4)
    said: list[str] = []
    started = Started(example)
    started.wait_until_ready(said.append)
    started.stop(said.append)
    assert said == [
        "waiting for The example on http://127.0.0.1:1 …",
        "waiting for The example to stop …",
    ]


# --- servers that the environment names ----------------------------------------------------------


def test_servers_that_the_environment_names_are_used_and_none_started(
    given: Services, tmp_path: Path
) -> None:
    home = tmp_path / "home"
    with services.running(
        home, serve=serve(tmp_path), is_served=is_served(tmp_path), say=fail
    ) as found:
        assert found == given
        assert len(processes_of(tmp_path)) == 3  # the guard, the command, and its child
        recorded = json.loads((home / "services.json").read_text())
        assert recorded["prefect_api_url"] == given.prefect_api_url
        assert recorded["mlflow_url"] == given.mlflow_url
        assert recorded["pid"] == os.getpid()
        assert services.find(home) == given
    assert sorted(path.name for path in home.iterdir()) == ["lock", "logs"]
    assert processes_of(tmp_path) == []


def test_the_serve_process_knows_where_the_services_are_and_gives_up_soon(
    given: Services, tmp_path: Path
) -> None:
    with services.running(
        tmp_path / "home", serve=serve(tmp_path), is_served=is_served(tmp_path), say=fail
    ):
        child = json.loads((tmp_path / "serve.json").read_text())
    expected = {
        "PREFECT_API_URL": given.prefect_api_url,
        "MLFLOW_TRACKING_URI": given.mlflow_url,
        "PREFECT_RUNNER_POLL_FREQUENCY": "1",
        "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30",
        "PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW": "ignore",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
        "MLFLOW_HTTP_REQUEST_TIMEOUT": "5",
        "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "DO_NOT_TRACK": "1",
    }
    assert {name: child[name] for name in expected} == expected
    # Whoever brings a Prefect server may also have a profile to speak with it.
    assert child.get("PREFECT_HOME") == os.environ.get("PREFECT_HOME")
    assert child["CWD"] == os.getcwd()


@pytest.mark.parametrize(
    ("variable", "url", "problem"),
    [
        ("PREFECT_API_URL", NOBODY, "does not answer: <urlopen error"),
        ("PREFECT_API_URL", "{server}/pages", "/pages/health is a web page, no API"),
        ("PREFECT_API_URL", "127.0.0.1:4200/api", "does not answer: <urlopen error unknown url"),
        ("MLFLOW_TRACKING_URI", NOBODY, "does not answer: <urlopen error"),
    ],
)
def test_a_named_server_that_does_not_answer_is_an_error_and_not_replaced(
    given: Services,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    variable: str,
    url: str,
    problem: str,
) -> None:
    url = url.format(server=given.prefect_url)
    monkeypatch.setenv(variable, url)
    with (
        pytest.raises(ServiceUnavailable) as caught,
        services.running(tmp_path, serve=serve(tmp_path), is_served=is_served(tmp_path), say=fail),
    ):
        pytest.fail("it started")
    message = str(caught.value)
    assert message.startswith(f"{variable} must name a server that answers, got {url}: ")
    assert problem in message
    assert message.endswith("or unset it to have a server started here")
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]


def test_a_server_that_asks_who_is_there_answers_and_a_database_need_not(
    given: Services, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREFECT_API_URL", f"{given.prefect_url}/locked/")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:///runs.db")
    with services.running(
        tmp_path, serve=serve(tmp_path), is_served=is_served(tmp_path), say=fail
    ) as found:
        assert found.prefect_api_url == f"{given.prefect_url}/locked"
        assert found.mlflow_url == "sqlite:///runs.db"


# --- the end ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_everything_is_gone_after_any_way_out(
    given: Services, tmp_path: Path, error: type[BaseException]
) -> None:
    with (
        pytest.raises(error),
        services.running(tmp_path, serve=serve(tmp_path), is_served=is_served(tmp_path), say=fail),
    ):
        raise error
    assert processes_of(tmp_path) == []
    assert services.find(tmp_path) == given  # what the environment names is not ours to end
    assert not (tmp_path / "services.json").exists()


def test_a_serve_process_that_cannot_start_ends_all_and_is_named(
    given: Services, tmp_path: Path
) -> None:
    with (
        pytest.raises(
            ServiceUnavailable, match=r"the process that serves .*\n    no flows"
        ) as caught,
        services.running(
            tmp_path,
            serve=[*PYTHON, "raise SystemExit('no flows')"],
            is_served=lambda _: False,
            say=fail,
        ),
    ):
        pytest.fail("it started")
    assert given.prefect_url in str(caught.value)
    assert processes_of(tmp_path) == []


# --- one set per home ------------------------------------------------------------------------------


def test_a_second_set_on_one_home_is_refused_with_the_firsts_addresses(
    given: Services, tmp_path: Path
) -> None:
    def run() -> None:
        with services.running(
            tmp_path, serve=serve(tmp_path), is_served=is_served(tmp_path), say=fail
        ):
            (tmp_path / "serve.json").unlink()
            with pytest.raises(ServiceUnavailable) as caught:
                run()
            assert str(caught.value) == (
                f"one set of services must run per home, got a second one for {tmp_path}: process {os.getpid()} "
                f"has Prefect on {given.prefect_url} and MLflow on {given.mlflow_url}; "
                "use those, end that process, or set DILOCO_HOME to another folder"
            )

    run()


STARTER = """
import sys, time
from pathlib import Path
from infra import services
folder = Path(sys.argv[1])
with services.running(folder / "home", serve=sys.argv[2:], is_served=lambda _: (folder / "serve.json").exists(),
                      say=print) as found:
    print(found, flush=True)
    time.sleep(1000)
"""


def kill_a_starter(folder: Path, command: Sequence[str]) -> None:
    """Start a set of services in another process, and kill that once they are up."""
    starter = subprocess.Popen(
        [sys.executable, "-c", STARTER, str(folder), *command],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    with starter:
        try:
            assert starter.stdout is not None
            assert any("Services(" in line for line in starter.stdout)
            assert processes_of(folder)
        finally:
            starter.kill()


def test_a_killed_starter_leaves_nothing_and_its_home_is_free_again(
    given: Services, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kill_a_starter(tmp_path, serve(tmp_path))
    until(lambda: processes_of(tmp_path) == [])
    home = tmp_path / "home"
    assert (home / "services.json").exists()
    monkeypatch.delenv("PREFECT_API_URL")
    assert services.find(home) is None
    assert not (home / "services.json").exists()
    monkeypatch.setenv("PREFECT_API_URL", given.prefect_api_url)
    with services.running(
        home, serve=serve(tmp_path), is_served=is_served(tmp_path), say=fail
    ) as found:
        assert found == given


def test_the_next_set_waits_until_the_guards_of_a_killed_one_are_done(
    given: Services, tmp_path: Path
) -> None:
    stubborn = f"""
import signal, time
signal.signal(signal.SIGTERM, lambda *_: (time.sleep(2), open("{tmp_path}/ended", "w"), exit()))
open("{tmp_path}/serve.json", "w")
time.sleep(1000)
"""
    kill_a_starter(tmp_path, [*PYTHON, stubborn])
    assert not (tmp_path / "ended").exists()
    # The next one tells what it finds when it starts.
    looks = [
        "sh",
        "-c",
        'test -e "$0" && touch "$0.before"; touch "$0.next"; sleep 100',
        str(tmp_path / "ended"),
    ]
    with services.running(
        tmp_path / "home",
        serve=looks,
        is_served=lambda _: (tmp_path / "ended.next").exists(),
        say=fail,
    ) as found:
        assert found == given
        assert (tmp_path / "ended.before").exists()


# --- finding them ----------------------------------------------------------------------------------


def test_nothing_is_found_where_nothing_was_recorded(tmp_path: Path) -> None:
    assert services.find(tmp_path) is None
    assert list(tmp_path.iterdir()) == []


def test_a_record_counts_if_its_process_lives_and_its_server_answers(
    server: str, tmp_path: Path
) -> None:
    def record(api_url: str, pid: int) -> None:
        addresses = {"prefect_api_url": api_url, "mlflow_url": "http://m", "pid": pid}
        (tmp_path / "services.json").write_text(json.dumps(addresses))

    record(f"{server}/api", os.getpid())
    assert services.find(tmp_path) == Services(f"{server}/api", server, "http://m")
    record(NOBODY, os.getpid())
    assert services.find(tmp_path) is None
    assert (tmp_path / "services.json").exists()
    with subprocess.Popen(["true"]) as ended:
        pass
    record(f"{server}/api", ended.pid)
    assert services.find(tmp_path) is None
    assert not (tmp_path / "services.json").exists()
    (tmp_path / "services.json").write_text("{")
    assert services.find(tmp_path) is None


def test_what_the_environment_names_comes_before_what_is_recorded(
    server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREFECT_API_URL", "http://elsewhere/api/")
    assert services.find(tmp_path) == Services("http://elsewhere/api", "http://elsewhere", "")
    addresses = {"prefect_api_url": f"{server}/api", "mlflow_url": "http://m", "pid": os.getpid()}
    (tmp_path / "services.json").write_text(json.dumps(addresses))
    assert services.find(tmp_path) == Services(
        "http://elsewhere/api", "http://elsewhere", "http://m"
    )
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://n")
    assert services.find(tmp_path) == Services(
        "http://elsewhere/api", "http://elsewhere", "http://n"
    )


# --- the real servers ------------------------------------------------------------------------------


def get(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=10) as answer:
        body: bytes = answer.read()
    return body


@NEEDS_SERVICES
@pytest.mark.slow
def test_prefect_and_mlflow_start_on_other_ports_than_taken_ones_and_are_gone_afterwards(
    tmp_path: Path,
) -> None:
    with ExitStack() as stack:
        for port in (services.PREFECT_PORT, services.MLFLOW_PORT):
            if services.free_port(port) == port:
                stack.enter_context(socket.create_server(("127.0.0.1", port)))
        with services.running(
            tmp_path, serve=serve(tmp_path), is_served=is_served(tmp_path), say=print
        ) as found:
            assert not found.prefect_url.endswith(":4200")
            assert not found.mlflow_url.endswith(":5000")
            ui = json.loads(get(f"{found.prefect_url}/ui-settings"))
            assert ui["api_url"] == found.prefect_api_url
            assert b"<html" in get(found.prefect_url)
            assert b"<html" in get(found.mlflow_url)
            assert services.find(tmp_path) == found
            child = json.loads((tmp_path / "serve.json").read_text())
            assert child["PREFECT_HOME"] == str(tmp_path / "prefect")
            assert (tmp_path / "prefect" / "prefect.db").exists()
            assert (tmp_path / "mlflow" / "mlflow.db").exists()
            # By the home in their command line: MLflow and the serve process, their guards, the child of the latter.
            assert len(processes_of(tmp_path)) == 5
        assert processes_of(tmp_path) == []
        assert services.find(tmp_path) is None
        for url in (found.prefect_url, found.mlflow_url):
            with pytest.raises(OSError, match="refused"):
                get(url)


@NEEDS_SERVICES
def test_the_database_of_a_prefect_server_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What its variables say is what Prefect understands: by itself it would keep flow runs and their logs for ever."""
    from prefect.settings import Settings

    for name, value in services.prefect_server(tmp_path, 1).variables.items():
        monkeypatch.setenv(name, value)
    server = Settings().server
    vacuum = server.services.db_vacuum
    assert vacuum.enabled_vacuum_types == {"events", "flow_runs", "orphans"}
    assert vacuum.loop_seconds == 600
    assert vacuum.retention_period == timedelta(days=7)
    assert server.events.retention_period == timedelta(days=1)
    heartbeats = vacuum.event_retention_overrides["prefect.flow-run.heartbeat"]
    assert heartbeats == timedelta(hours=1)


@NEEDS_SERVICES
@pytest.mark.slow
def test_prefect_and_mlflow_are_gone_after_their_starter_was_killed(tmp_path: Path) -> None:
    kill_a_starter(tmp_path, serve(tmp_path))
    until(lambda: processes_of(tmp_path) == [])
    until(lambda: _is_free(tmp_path / "home" / "lock"))
    recorded = json.loads((tmp_path / "home" / "services.json").read_text())
    for url in (recorded["prefect_api_url"], recorded["mlflow_url"]):
        with pytest.raises(OSError, match="refused"):
            get(f"{url}/health")


def _is_free(lock: Path) -> bool:
    """Say whether nobody, and no guard either, holds the lock any more."""
    descriptor = os.open(lock, os.O_RDWR)
    try:
        return services._try_lock(descriptor)
    finally:
        os.close(descriptor)
