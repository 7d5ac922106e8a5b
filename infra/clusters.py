"""An island's Dask cluster: opened, given one function at a time, watched, closed. The only file that imports Dask.

Knows schedulers, workers and their deaths; must not know what the function does. No Prefect code comes near a worker.
A worker's death is told as `LearnerLost`, at once and once: Dask itself repeats nothing, whoever called decides.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import signal
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Generic, TypeVar

import dask
from distributed import Client, Future, LocalCluster, get_worker, wait
from distributed.client import FutureCancelledError
from distributed.comm.core import connect
from distributed.diagnostics.plugin import WorkerPlugin
from distributed.scheduler import KilledWorker
from distributed.security import Security
from distributed.utils import LoopRunner
from distributed.worker import Worker

from islands.types import ClusterUnavailable, LearnerLost

Result = TypeVar("Result")
Message = Mapping[str, Any]

_CONNECT_SECONDS = 10
_START_SECONDS = 120
_NICENESS = 10
# One attempt at everything, no spilling, no statistical profiler; a long step that holds the GIL is no death.
_SETTINGS = MappingProxyType(
    {
        "distributed.scheduler.allowed-failures": 0,
        "distributed.scheduler.worker-ttl": "10 minutes",
        "distributed.scheduler.work-stealing": False,
        # A nanny needs longer than the default of 15 s to replace a killed worker where the machine is busy; a cluster
        # that has given the worker up by then closes the nanny, and stays empty for good.
        "distributed.deploy.lost-worker-timeout": "10 minutes",
        "distributed.worker.daemon": False,
        "distributed.worker.memory.target": False,
        "distributed.worker.memory.spill": False,
        "distributed.worker.memory.pause": False,
        "distributed.worker.memory.terminate": False,
        "distributed.worker.profile.enabled": False,
        "distributed.admin.tick.limit": "30s",
        "distributed.comm.timeouts.connect": f"{_CONNECT_SECONDS}s",
        "distributed.diagnostics.nvml": False,
    }
)


@dataclass(frozen=True, slots=True)
class ClusterSpec:
    """Where to run: a scheduler's address with its TLS files, or, without an address, a cluster of our own.

    `name`: of the island, for people. `threads`: that a learner computes on. A scheduler at an address has settings of
    its own: with `distributed.scheduler.allowed-failures` above 0 it repeats a call whose worker died, in silence.
    """

    name: str
    threads: int = 1
    address: str | None = None
    ca_file: str | None = None
    cert_file: str | None = None
    key_file: str | None = None


class Call(Generic[Result]):
    """One function at work on the cluster."""

    def __init__(self, future: Future[Any]) -> None:
        self._future = future

    def is_done(self, seconds: float) -> bool:
        """Wait at most so long, and say whether it has ended, well or not."""
        with contextlib.suppress(TimeoutError, FutureCancelledError):
            wait(self._future, timeout=seconds)
        return bool(self._future.done())

    def result(self) -> Result:
        """Return what the function returned; what it raised is raised here, with its traceback.

        Raises:
            LearnerLost: its process died, or the scheduler lost sight of it.
        """
        try:
            result: Result = self._future.result()
        except KilledWorker as exc:
            raise LearnerLost(f"the worker process died ({_last_worker(exc)})") from exc
        except (FutureCancelledError, OSError) as exc:
            if self._future.status == "error":
                raise  # the function's own
            raise LearnerLost(f"the scheduler lost the call ({type(exc).__name__}: {exc})") from exc
        return result


class Cluster:
    """An open cluster with one topic of messages. One thread."""

    def __init__(self, client: Client, topic: str) -> None:
        self._client = client
        self._last: Future[Any] | None = None
        self._messages: queue.SimpleQueue[Message] = queue.SimpleQueue()
        client.subscribe_topic(topic, lambda event: self._messages.put(event[1]))

    def call(self, function: Callable[[Any], Result], argument: object) -> Call[Result]:
        """Start a function on a worker, waiting for one if the last one is just being replaced.

        Raises:
            ClusterUnavailable: no worker came.
        """
        try:
            self._client.wait_for_workers(1, timeout=_START_SECONDS)
            # Where it was before it is warm: elsewhere it would begin again from a checkpoint.
            there = self._last_workers()
            future = self._client.submit(
                function,
                argument,
                pure=False,
                retries=0,
                workers=there,
                allow_other_workers=there is not None,
            )
        except (TimeoutError, OSError) as exc:
            raise ClusterUnavailable(
                f"a cluster must have a worker within {_START_SECONDS} s, got none; "
                "see the scheduler's log, or start a worker"
            ) from exc
        self._last = future
        return Call(future)

    def _last_workers(self) -> list[str] | None:
        """Return where the last call ended well, while that worker is there."""
        if self._last is None or self._last.status != "finished":
            return None
        there = self._client.who_has([self._last]).get(self._last.key, ())
        return list(there) or None

    def messages(self) -> list[Message]:
        """Return what the functions told since the last call."""
        told = []
        with contextlib.suppress(queue.Empty):
            while True:
                told.append(self._messages.get_nowait())
        return told


@contextlib.contextmanager
def open_cluster(spec: ClusterSpec, topic: str) -> Iterator[Cluster]:
    """Open the cluster, or connect to it; what was started here ends with the block.

    Raises:
        ClusterUnavailable: it does not answer or does not start.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(dask.config.set({**_SETTINGS, **_environment(spec)}))
        try:
            if spec.address is None:
                cluster = stack.enter_context(_start(spec))
                client = stack.enter_context(Client(cluster, timeout=_CONNECT_SECONDS))
                client.register_plugin(_Shielded())
            else:
                security = _security(spec)
                _greet(spec.address, security)
                client = stack.enter_context(
                    Client(spec.address, security=security, timeout=_CONNECT_SECONDS)
                )
        except (OSError, TimeoutError, RuntimeError, ValueError, TypeError) as exc:
            where = spec.address or "a cluster of its own"
            raise ClusterUnavailable(
                f"island {spec.name}: its cluster must answer within {_CONNECT_SECONDS} s, got {where}: {exc}; "
                "check that the scheduler runs there and the certificates fit"
            ) from exc
        yield Cluster(client, topic)


def _greet(address: str, security: Security | None) -> None:
    """Exchange greetings with a scheduler. `Client` would wait for ever on one that accepts and then says nothing."""

    async def exchange() -> None:
        arguments = (security or Security()).get_connection_args("client")
        comm = await asyncio.wait_for(
            connect(address, timeout=_CONNECT_SECONDS, **arguments), _CONNECT_SECONDS
        )
        comm.abort()

    runner = LoopRunner(asynchronous=False)
    runner.start()
    try:
        runner.run_sync(exchange)
    finally:
        runner.stop()


def teller(topic: str) -> Callable[[Message], None]:
    """Return, inside a worker, what sends a message to everybody who watches the topic; from any thread, at once."""
    worker = get_worker()
    return lambda message: worker.log_event(topic, dict(message))


class _Shielded(WorkerPlugin):
    """What a worker process on this machine is told at its start.

    A signal meant for a flow's whole process group must not kill the learner before its last checkpoint; without its
    parent a worker ends by itself. And it gives way: where learners share cores with servers and a synchronizer, those
    need little, but at once.
    """

    name = "diloco-shielded"
    idempotent = True

    def setup(self, worker: Worker) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        os.nice(_NICENESS)


def _start(spec: ClusterSpec) -> LocalCluster:
    return LocalCluster(
        name=spec.name,
        n_workers=1,
        threads_per_worker=1,
        processes=True,
        host="127.0.0.1",
        scheduler_port=0,
        dashboard_address="127.0.0.1:0",
        memory_limit=0,
    )


def _environment(spec: ClusterSpec) -> dict[str, Any]:
    # A nanny would hold every numeric library to one thread.
    threads = str(spec.threads)
    return {
        "distributed.nanny.pre-spawn-environ": {
            "OMP_NUM_THREADS": threads,
            "MKL_NUM_THREADS": threads,
            "OPENBLAS_NUM_THREADS": threads,
            "MALLOC_TRIM_THRESHOLD_": 65536,
        }
    }


def _security(spec: ClusterSpec) -> Security | None:
    if spec.ca_file is None:
        return None
    return Security(
        tls_ca_file=spec.ca_file,
        tls_client_cert=spec.cert_file,
        tls_client_key=spec.key_file or spec.cert_file,
        require_encryption=True,
    )


def _last_worker(exc: KilledWorker) -> str:
    last = getattr(exc, "last_worker", None)
    return str(getattr(last, "address", last))
