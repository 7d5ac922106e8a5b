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
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from infra import guard, settings
from islands.types import ServiceUnavailable

HOST = "127.0.0.1"
PREFECT_PORT = 4200
MLFLOW_PORT = 5000
RECORD = "services.json"
# The first start of a Prefect server creates its database: up to 25 s on a busy machine.
START_SECONDS = 120.0
SERVER_GRACE_SECONDS = 10.0
# Prefect gives each flow run 30 s to end before it kills it.
SERVE_GRACE_SECONDS = 45.0
# What a dead process's guards may take at most.
_LOCK_SECONDS = SERVE_GRACE_SECONDS + guard.KILL_SECONDS
_ANSWER_SECONDS = 5.0
_FIND_SECONDS = 2.0
_PATIENCE_SECONDS = 3.0
_POLL_SECONDS = 0.1
_TAIL_LINES = 20
_NO_TELEMETRY = {
    "DO_NOT_TRACK": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
}
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Services:
    """Where the services are.

    `mlflow_url` is MLflow's tracking URI, empty where `find` knows of none; `prefect_url` is the page for people.
    """

    prefect_api_url: str
    prefect_url: str
    mlflow_url: str


@dataclass(frozen=True, slots=True)
class Service:
    """What to start. `where` is what people are told; `variables` come on top of this process's environment."""

    name: str
    command: tuple[str, ...]
    variables: Mapping[str, str]
    log: Path
    where: str
    is_ready: Callable[[], bool]
    grace_seconds: float


class Started:
    """A service under its guard, from `start` to `stop`."""

    def __init__(self, service: Service, process: subprocess.Popen[bytes], log_offset: int) -> None:
        self.service = service
        self.process = process  # the guard; its status is the command's
        self._log_offset = log_offset

    def wait_until_ready(self, say: Say, *, deadline_seconds: float = START_SECONDS) -> None:
        """Return when the service is ready; raise `ServiceUnavailable` if it ends before, or takes too long."""
        service = self.service
        for waited in _poll(f"waiting for {service.name} on {service.where} …", say):
            status = self.process.poll()
            if status is None and service.is_ready():
                return
            if status is not None or waited > deadline_seconds:
                break
        problem = (
            f"is not after {waited:.0f} s" if status is None else f"ended with status {status}"
        )
        raise ServiceUnavailable(
            f"{service.name} must be ready on {service.where}, but {problem}; "
            f"mend what its log names, {service.log}, which ends:\n{self._log_tail()}"
        )

    def stop(self, say: Say) -> None:
        """Cut the lifeline and return when the service and all that descends from it is gone."""
        assert self.process.stdin is not None, "the guard is started with a pipe"
        self.process.stdin.close()
        try:
            self.process.wait(_PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            say(f"waiting for {self.service.name} to stop …")
            self.process.wait()  # the guard has its own limits

    def _log_tail(self) -> str:
        with self.service.log.open("rb") as file:
            file.seek(self._log_offset)
            lines = file.read().decode(errors="replace").splitlines()
        return "\n".join(f"    {line}" for line in lines[-_TAIL_LINES:]) or "    (nothing)"


def start(service: Service, *, held: Sequence[int] = ()) -> Started:
    """Start the service under a guard, its output appended to its log. The caller stops it.

    `held` are descriptors that the guard, not the service, keeps open until everything is gone: a lock.
    """
    service.log.parent.mkdir(parents=True, exist_ok=True)
    # By its file, wherever this process runs; without site packages it starts sooner, and needs none.
    own = [sys.executable, "-I", "-S", guard.__file__, "--grace", f"{service.grace_seconds:g}"]
    with service.log.open("ab") as log:
        process = subprocess.Popen(
            [*own, "--", *service.command],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=settings.child_environment(service.variables),
            pass_fds=tuple(held),
            # Ctrl-C reaches this process alone, which stops its services in order.
            start_new_session=True,
        )
        return Started(service, process, log.tell())


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
    url, folder = f"http://{HOST}:{port}", home / "prefect"
    return Service(
        name="Prefect",
        command=(sys.executable, *f"-m prefect server start --host {HOST} --port {port}".split()),
        variables={
            **_NO_TELEMETRY,
            "PREFECT_HOME": str(folder),
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
    own = {} if settings.prefect_api_url() else {"PREFECT_HOME": str(home / "prefect")}
    return Service(
        name="the process that serves the deployments",
        command=tuple(command),
        variables={**client_variables(services), **own},
        log=home / "logs" / "serve.log",
        where=services.prefect_url,
        is_ready=is_ready,
        grace_seconds=SERVE_GRACE_SECONDS,
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

    `PREFECT_API_URL` and `MLFLOW_TRACKING_URI` name servers to use instead of starting one.

    Args:
        home: the folder for all that the services keep; made where missing.
        serve: the command that serves the deployments, started once Prefect answers.
        is_served: whether the deployments are there.
        say: told what is awaited, if it takes long.

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
            started = start(service, held=[lock])
            stack.callback(started.stop, say)
            return started

        servers = [begin(service) for service in (prefect, mlflow) if service]
        if prefect:
            servers[0].wait_until_ready(say)
        deployments = serving(home, serve, services, lambda: is_served(services))
        for started in (*servers, begin(deployments)):
            started.wait_until_ready(say)
        stack.callback((home / RECORD).unlink, missing_ok=True)
        (home / RECORD).write_bytes(record)
        yield services


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
    for waited in _poll(f"waiting for the last services on {home} to end …", say):
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


def _poll(text: str, say: Say) -> Iterator[float]:
    """Yield the seconds waited so far, without end; say what is awaited once it takes long."""
    begun, has_said = time.monotonic(), False
    while True:
        waited = time.monotonic() - begun
        if waited > _PATIENCE_SECONDS and not has_said:
            say(text)
            has_said = True
        yield waited
        time.sleep(_POLL_SECONDS)


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
