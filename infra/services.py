"""Starts and stops the services of one machine: Prefect, MLflow, and the process that serves the deployments.

This module knows commands, variables, ports and health addresses. It starts Prefect and MLflow as processes and must
not import either, nor know a flow. Everything that it starts hangs on a guard (`infra/guard.py`), so nothing outlives
this process by more than a grace, however this process ends. A lifeline is a pipe: do not fork this process without
exec while services run, for the copy would hold it open.

    <home>/lock            held by a living set of services and by the guards of a dying one
    <home>/services.json   the addresses, while the services run
    <home>/logs/           what each service printed, this start and earlier ones
    <home>/prefect/, mlflow/    what the two servers keep
"""

from __future__ import annotations

import fcntl
import http.client
import json
import os
import socket
import sys
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from infra import guard, settings
from infra.keeping import Say, Service, Started, keep, poll
from islands.types import ServiceUnavailable

HOST = "127.0.0.1"
PREFECT_PORT = 4200
MLFLOW_PORT = 5000
RECORD = "services.json"
SERVER_GRACE_SECONDS = 10.0
# Prefect gives each flow run 30 s to end before it kills it.
SERVE_GRACE_SECONDS = 45.0
# What a dead process's guards may take at most.
_LOCK_SECONDS = SERVE_GRACE_SECONDS + guard.KILL_SECONDS
_ANSWER_SECONDS = 5.0
_FIND_SECONDS = 2.0
_NO_TELEMETRY = {
    "DO_NOT_TRACK": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
}
# What bounds the database of a Prefect server that runs for months: events are hints and history of hours, heartbeats
# say nothing after minutes, and what a flow run of last week has trained stays in MLflow and in the store.
_BOUNDS = {
    "PREFECT_SERVER_SERVICES_DB_VACUUM_ENABLED": "events,flow_runs",
    "PREFECT_SERVER_SERVICES_DB_VACUUM_LOOP_SECONDS": "600",
    "PREFECT_SERVER_SERVICES_DB_VACUUM_RETENTION_PERIOD": f"{7 * 86_400}",
    "PREFECT_SERVER_EVENTS_RETENTION_PERIOD": "P1D",
    "PREFECT_SERVER_SERVICES_DB_VACUUM_EVENT_RETENTION_OVERRIDES": json.dumps(
        {"prefect.flow-run.heartbeat": 3600}
    ),
}


@dataclass(frozen=True, slots=True)
class Services:
    """Where the services are.

    `mlflow_url` is MLflow's tracking URI, empty where `find` knows of none; `prefect_url` is the page for people.
    """

    prefect_api_url: str
    prefect_url: str
    mlflow_url: str


def free_port(preferred: int) -> int:
    """Return `preferred` if a server can bind it on this machine's loopback now, otherwise one that can be."""
    with socket.socket() as probe:
        # As servers do: a port whose last server has just ended is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, preferred))
        except OSError:
            probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def prefect_server(home: Path, port: int) -> Service:
    """Return the Prefect server that keeps everything under `home/prefect`."""
    url, folder = f"http://{HOST}:{port}", settings.prefect_home(home)
    return Service(
        name="Prefect",
        command=(sys.executable, *f"-m prefect server start --host {HOST} --port {port}".split()),
        variables={
            **_NO_TELEMETRY,
            **_BOUNDS,
            settings.PREFECT_HOME: str(folder),
            "PREFECT_SERVER_DATABASE_CONNECTION_URL": f"sqlite+aiosqlite:///{folder}/prefect.db",
            # The default keeps leases in memory: a server killed while one is held never frees its slot.
            "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": "prefect.server.concurrency.lease_storage.filesystem",
            "PREFECT_SERVER_UI_API_URL": f"{url}/api",
        },
        log=home / "logs" / "prefect.log",
        where=url,
        is_ready=lambda: _problem(f"{url}/api") is None,
        grace_seconds=SERVER_GRACE_SECONDS,
    )


def mlflow_server(home: Path, port: int) -> Service:
    """Return the MLflow server that keeps everything under `home/mlflow`; makes that folder."""
    url, folder = f"http://{HOST}:{port}", home / "mlflow"
    folder.mkdir(parents=True, exist_ok=True)
    address = f"-m mlflow server --host {HOST} --port {port} --workers 1"
    stores = ("--backend-store-uri", f"sqlite:///{folder}/mlflow.db")
    artifacts = ("--artifacts-destination", str(folder / "artifacts"), "--serve-artifacts")
    return Service(
        name="MLflow",
        command=(sys.executable, *address.split(), *stores, *artifacts),
        # Its job runner is eight processes and a gigabyte, for what nobody here asks.
        variables={**_NO_TELEMETRY, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"},
        log=home / "logs" / "mlflow.log",
        where=url,
        is_ready=lambda: _problem(url) is None,
        grace_seconds=SERVER_GRACE_SECONDS,
    )


def serving(
    home: Path, command: Sequence[str], services: Services, is_ready: Callable[[], bool]
) -> Service:
    """Return the process that serves the deployments; its environment names the services."""
    # Where the server is ours, its clients too keep nothing outside of home.
    own = (
        {}
        if settings.prefect_api_url()
        else {settings.HOME: str(home), settings.PREFECT_HOME: str(settings.prefect_home(home))}
    )
    return Service(
        name="the process that serves the deployments",
        command=tuple(command),
        variables={**client_variables(services), **own},
        log=home / "logs" / "serve.log",
        where=services.prefect_url,
        is_ready=is_ready,
        grace_seconds=SERVE_GRACE_SECONDS,
        # Without a server it would end at once, and use up its restarts.
        may_start=lambda: _problem(services.prefect_api_url) is None,
    )


def client_variables(services: Services) -> dict[str, str]:
    """Return the environment with which a process works with these services, and gives up soon where they are gone."""
    return {
        **_NO_TELEMETRY,
        "PREFECT_API_URL": services.prefect_api_url,
        # A server that takes a call and never answers must not hold anybody up for minutes.
        "PREFECT_API_REQUEST_TIMEOUT": "10",
        "PREFECT_RUNNER_POLL_FREQUENCY": "1",
        "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30",
        "PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW": "ignore",
        "MLFLOW_TRACKING_URI": services.mlflow_url,
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
        "MLFLOW_HTTP_REQUEST_TIMEOUT": "5",
        "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",  # MLflow takes whole numbers only
    }


@contextmanager
def running(
    home: Path, *, serve: Sequence[str], is_served: Callable[[Services], bool], say: Say
) -> Iterator[Services]:
    """Give the services of this machine, starting what is missing; at the end stop that again, last one first.

    Meanwhile one that dies is started again where it was, with a limit.

    `PREFECT_API_URL` and `MLFLOW_TRACKING_URI` name servers to use instead of starting one.

    Args:
        home: the folder for all that the services keep; made where missing.
        serve: the command that serves the deployments, started once Prefect answers.
        is_served: whether the deployments are there.
        say: told what is awaited, if it takes long, and what has died; by another thread, too.

    Raises:
        ServiceUnavailable: a service does not start or answer, or `home` is in use.
    """
    home = home.absolute()
    home.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        lock = _take_lock(home, say)
        stack.callback(os.close, lock)
        api_url = _given(settings.PREFECT_API_URL, settings.prefect_api_url())
        tracking_uri = _given(settings.MLFLOW_TRACKING_URI, settings.mlflow_tracking_uri())
        prefect = None if api_url else prefect_server(home, _claim_port(PREFECT_PORT, stack))
        mlflow = None if tracking_uri else mlflow_server(home, _claim_port(MLFLOW_PORT, stack))
        services = _services(
            api_url or (f"{prefect.where}/api" if prefect else ""),
            tracking_uri or (mlflow.where if mlflow else ""),
        )
        record = json.dumps({**asdict(services), "pid": os.getpid()}).encode()
        os.ftruncate(lock, 0)
        os.pwrite(lock, record, 0)

        def begin(service: Service) -> Started:
            started = Started(service, held=[lock])
            stack.callback(started.stop, say)
            return started

        servers = [begin(service) for service in (prefect, mlflow) if service]
        if prefect:
            servers[0].wait_until_ready(say)
        deployments = serving(home, serve, services, lambda: is_served(services))
        all_started = [*servers, begin(deployments)]
        for started in all_started:
            started.wait_until_ready(say)
        stack.enter_context(_kept(all_started, say))
        stack.callback((home / RECORD).unlink, missing_ok=True)
        (home / RECORD).write_bytes(record)
        yield services


@contextmanager
def _kept(services: Sequence[Started], say: Say) -> Iterator[None]:
    """Start again what dies while the block runs."""
    is_over = threading.Event()
    keeper = threading.Thread(
        target=keep, args=(services,), kwargs={"is_over": is_over, "say": say}, name="diloco-keeper"
    )
    keeper.start()
    try:
        yield
    finally:
        is_over.set()
        keeper.join()


def find(home: Path) -> Services | None:
    """Return where the running services are: what the environment names, else what runs on `home` and answers."""
    recorded, pid = _read_record(home / RECORD) or (None, 0)
    if recorded and not guard.is_alive(pid):
        (home / RECORD).unlink(missing_ok=True)  # its process was killed
        recorded = None
    api_url = settings.prefect_api_url()
    if not api_url:
        if not recorded or _problem(recorded.prefect_api_url, timeout_seconds=_FIND_SECONDS):
            return None
        api_url = recorded.prefect_api_url
    tracking_uri = settings.mlflow_tracking_uri() or (recorded.mlflow_url if recorded else "")
    return _services(api_url, tracking_uri)


def starter(home: Path) -> int | None:
    """Return the process below which the services of `home` run, or ran last; None where none is recorded."""
    return (_read_record(home / RECORD) or (None, None))[1]


def _services(prefect_api_url: str, mlflow_url: str) -> Services:
    api_url = prefect_api_url.rstrip("/")
    return Services(api_url, api_url.removesuffix("/api"), mlflow_url)


def _claim_port(preferred: int, stack: ExitStack) -> int:
    """Return a free port that no other `running` on this machine takes until the stack closes.

    A server binds its port seconds after it was found free. Until then a UDP socket of the same number, which
    belongs to nobody else and ends with this process, holds the claim.
    """
    port = free_port(preferred)
    claim = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
    try:
        claim.bind((HOST, port))
    except OSError:
        return _claim_port(0, stack)
    return port


def _given(variable: str, url: str | None) -> str | None:
    """Return the address that a variable names, if it does, once its server has answered."""
    # MLflow also takes a database or a folder: there nobody answers, and the first use will tell.
    if not url or (variable == settings.MLFLOW_TRACKING_URI and not url.startswith("http")):
        return url
    problem = _problem(url)
    if problem:
        raise ServiceUnavailable(
            f"{variable} must name a server that answers, got {url}: {problem}; "
            "start that server, correct the variable, or unset it to have a server started here"
        )
    return url


def _problem(url: str, *, timeout_seconds: float = _ANSWER_SECONDS) -> str | None:
    """Return why the API at that address does not say that it is well, None if it does."""
    health = f"{url.rstrip('/')}/health"
    try:
        is_near = urllib.parse.urlsplit(health).hostname in (HOST, "localhost")
        proxies = [urllib.request.ProxyHandler({})] if is_near else []
        with urllib.request.build_opener(*proxies).open(health, timeout=timeout_seconds) as answer:
            return f"{health} is a web page, no API" if answer.read(1) == b"<" else None
    except urllib.error.HTTPError as exc:
        exc.close()
        # Who may use the server is between it and its clients.
        return None if exc.code in (401, 403) else f"{health} answers {exc.code}"
    except (OSError, http.client.HTTPException, ValueError) as exc:
        return f"{health} does not answer: {exc}"


def _take_lock(home: Path, say: Say) -> int:
    """Return a descriptor that holds the lock of `home`, once the guards of a dead process have let go of it."""
    lock = os.open(home / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    for waited in poll(f"waiting for the last services on {home} to end …", say):
        if _try_lock(lock):
            break
        holder = _read_record(home / "lock")
        is_given_up = holder and not guard.is_alive(holder[1]) and waited < _LOCK_SECONDS
        # A holder needs a moment to note itself: until then the lock tells of the one before.
        if waited > 1 and not is_given_up:
            os.close(lock)
            services, pid = holder or (Services("?", "?", "?"), "?")
            raise ServiceUnavailable(
                f"one set of services must run per home, got a second one for {home}: process {pid} has Prefect on "
                f"{services.prefect_url} and MLflow on {services.mlflow_url}; use those, end that process, "
                f"or set {settings.HOME} to another folder"
            )
    return lock


def _try_lock(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _read_record(path: Path) -> tuple[Services, int] | None:
    """Return the addresses and whose they are; None where nothing is recorded, or nothing that can be read."""
    try:
        found = json.loads(path.read_bytes())
        return _services(found["prefect_api_url"], found["mlflow_url"]), int(found["pid"])
    except (FileNotFoundError, ValueError, TypeError, KeyError):
        return None
