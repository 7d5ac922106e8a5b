"""An island's Dask cluster: opened, given one function at a time, watched, closed. The only file that imports Dask.

Knows schedulers, workers and their deaths; must not know what the function does. No Prefect code comes near a worker.
A worker's death is told as `LearnerLost`, at once and once: Dask itself repeats nothing, whoever called decides.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, Generic, TypeVar

import dask
from distributed import Client, Future, LocalCluster, get_worker, wait
from distributed.comm.core import connect
from distributed.core import Status
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
# A worker told to end has so long for what it works on, and its result so long to be fetched.
_NOTICE_SECONDS = 25.0
_FETCH_SECONDS = 2.0
_LOOK_SECONDS = 0.2
# A call that no worker has taken after so long is no longer kept for the worker of the one before.
_BOUND_SECONDS = 2.0
# So long a scheduler may take to answer a question that a call can also do without.
_ANSWER_SECONDS = 1.0
_MEMORY_TOPIC = "worker-restart-memory"  # a nanny tells there that it ended a worker for its memory
_noticed = threading.Event()  # in a worker: it was told to end
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
        "distributed.worker.profile.enabled": False,
        # By default each process of a cluster wakes 50 times a second to see whether it is late, beside a learner too.
        "distributed.admin.tick.interval": "1s",
        "distributed.admin.tick.limit": "30s",
        "distributed.admin.system-monitor.interval": "5s",
        "distributed.comm.timeouts.connect": f"{_CONNECT_SECONDS}s",
        "distributed.diagnostics.nvml": False,
    }
)


@dataclass(frozen=True, slots=True)
class ClusterSpec:
    """Where to run: a scheduler's address with its TLS files, or, without an address, a cluster of our own.

    `name`: of the island, for people. `threads`: that a learner computes on. A scheduler at an address has settings of
    its own: with `distributed.scheduler.allowed-failures` above 0 it repeats a call whose worker died, in silence.
    Of a cluster of our own alone: `spares`, worker processes that wait for the death of the one at work; `memory_mb`,
    what a worker may use before it is ended; `preload`, "module.function", what every worker calls at its start.
    """

    name: str
    threads: int = 1
    spares: int = 0
    memory_mb: int | None = None
    preload: str = ""
    address: str | None = None
    ca_file: str | None = None
    cert_file: str | None = None
    key_file: str | None = None


class Call(Generic[Result]):
    """One function at work on the cluster.

    `place`: the addresses of the workers where it has ended well; empty before its result was fetched.

    Args:
        submit: submits it for these workers, or any other if they have gone; for any if there are none.
        there: the addresses it is submitted for first.
        memory: address -> bytes used, of the workers that were ended for that; it may grow.
    """

    def __init__(
        self,
        client: Client,
        submit: Callable[[Sequence[str]], Future[Any]],
        there: Sequence[str],
        memory: Mapping[str, int],
    ) -> None:
        self.place: tuple[str, ...] = ()
        self._client = client
        self._submit = submit
        self._future = submit(there)
        self._bound_until = time.monotonic() + _BOUND_SECONDS if there else None
        self._ended_for_memory = memory

    def is_done(self, seconds: float) -> bool:
        """Wait about so long, and say whether it has ended, well or not."""
        ends = time.monotonic() + seconds
        while self._bound_until is not None and self._bound_until < ends:
            if self._is_over(self._bound_until):
                return True
            self._unbind()
        return self._is_over(ends)

    def _is_over(self, ends: float) -> bool:
        with contextlib.suppress(TimeoutError, CancelledError):
            wait(self._future, timeout=max(0.0, ends - time.monotonic()))
        return bool(self._future.done())

    def _unbind(self) -> None:
        """Submit a call anew, for any worker, if none can take it.

        One that is submitted while no worker takes calls Dask keeps for its first address alone, whoever comes later.
        """
        state = self._state()
        is_unknown = state in ("", "released", "waiting")
        self._bound_until = time.monotonic() + _BOUND_SECONDS if is_unknown else None
        if state == "no-worker":
            self._future.cancel()
            self._future = self._submit(())

    def _state(self) -> str:
        """Return what its scheduler calls its state; "" if it did not say."""
        key = self._future.key

        # A function in a function: a scheduler at an address need not have this project installed.
        def look(dask_scheduler: Any) -> str:
            task = dask_scheduler.tasks.get(key)
            return "" if task is None else str(task.state)

        # One that takes no functions, or has another Python, may raise anything; it said nothing all the same.
        with contextlib.suppress(Exception):
            ask = self._client._run_on_scheduler
            return str(self._client.sync(ask, look, callback_timeout=_ANSWER_SECONDS))
        return ""

    def result(self) -> Result:
        """Return what the function returned, once; what it raised is raised here, with its traceback.

        Raises:
            LearnerLost: its process died, or the scheduler lost sight of it.
        """
        try:
            result: Result = self._future.result()
        except KilledWorker as exc:
            raise LearnerLost(self._how_it_died(_last_worker(exc))) from exc
        except (CancelledError, OSError) as exc:
            if self._future.status == "error":
                raise  # the function's own
            reason = f"{type(exc).__name__}: {exc}".partition("\n")[0]
            raise LearnerLost(f"the scheduler lost the call ({reason})") from exc
        # It is only about where the next call goes.
        with contextlib.suppress(OSError, TimeoutError):
            self.place = tuple(self._client.who_has([self._future]).get(self._future.key, ()))
        # Of a result that somebody still holds Dask would repeat the whole call, should the worker that has it die.
        self._future.release()
        return result

    def _how_it_died(self, worker: str) -> str:
        used = self._ended_for_memory.get(worker)
        if used is None:
            return f"the worker process died ({worker})"
        return (
            f"a worker must stay within cluster.memory_mb, got {used // 2**20} MB ({worker}), and was ended; "
            "raise it, or lower batch_size"
        )


class Cluster:
    """An open cluster with one topic of messages. One thread."""

    def __init__(self, client: Client, topic: str) -> None:
        self._client = client
        self._last: Call[Any] | None = None
        self._messages: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._ended_for_memory: dict[str, int] = {}
        client.subscribe_topic(topic, lambda event: self._messages.put(event[1]))
        client.subscribe_topic(_MEMORY_TOPIC, lambda event: self._note_memory(event[1]))

    def call(self, function: Callable[[Any], Result], argument: object) -> Call[Result]:
        """Start a function on a worker, waiting for one if the last one is just being replaced.

        Raises:
            ClusterUnavailable: no worker came.
        """
        try:
            self._client.wait_for_workers(1, timeout=_START_SECONDS)
            # Where it was before it is warm: elsewhere it would begin again from a checkpoint.
            there = () if self._last is None else self._last.place
            submit = partial(self._submit, function, argument)
            self._last = Call(self._client, submit, there, self._ended_for_memory)
        except (TimeoutError, OSError) as exc:
            raise ClusterUnavailable(
                f"a cluster must have a worker within {_START_SECONDS} s, got none; "
                "see the scheduler's log, or start a worker"
            ) from exc
        return self._last

    def _submit(
        self, function: Callable[[Any], Result], argument: object, there: Sequence[str]
    ) -> Future[Result]:
        return self._client.submit(
            function,
            argument,
            pure=False,
            retries=0,
            workers=there or None,
            allow_other_workers=bool(there),
        )

    def _note_memory(self, event: Message) -> None:
        self._ended_for_memory[event["worker"]] = event["rss"]

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
                client.register_plugin(_Shielded(spec.preload))
            else:
                security = _security(spec)
                _greet(spec.address, security)
                client = stack.enter_context(
                    Client(spec.address, security=security, timeout=_CONNECT_SECONDS)
                )
        except (OSError, TimeoutError, RuntimeError, ValueError, TypeError) as exc:
            raise _unavailable(spec, exc) from exc
        yield Cluster(client, topic)


def _unavailable(spec: ClusterSpec, exc: Exception) -> ClusterUnavailable:
    if spec.address is None:
        return ClusterUnavailable(
            f"island {spec.name}: a cluster of its own must start, got: {exc}; see what is logged above. A script that "
            'starts one must be a file, and do so below `if __name__ == "__main__":`, for its workers import it'
        )
    return ClusterUnavailable(
        f"island {spec.name}: its cluster must answer within {_CONNECT_SECONDS} s, got {spec.address}: {exc}; "
        "check that the scheduler runs there and the certificates fit"
    )


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


def is_told_to_end() -> bool:
    """Say whether this process, a worker, was told to end soon: by a SIGTERM, such as a notice of its machine."""
    return _noticed.is_set()


class _Shielded(WorkerPlugin):
    """What a worker process on this machine is told at its start.

    A signal meant for a flow's whole process group must not kill the learner before its last checkpoint; without its
    parent a worker ends by itself. So SIGTERM is a notice: the worker takes no further call, ends the one at work in
    its own time (see `is_told_to_end`), and then its process. And it gives way: where learners share cores with
    servers and a synchronizer, those need little, but at once.
    """

    name = "diloco-shielded"
    idempotent = True

    def __init__(self, preload: str) -> None:
        self._preload = preload

    def setup(self, worker: Worker) -> None:
        loop = worker.loop.asyncio_loop  # type: ignore[attr-defined]
        notice = partial(_take_notice, worker)
        signal.signal(signal.SIGTERM, lambda *_: loop.call_soon_threadsafe(notice))
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        if self._preload:
            # In a thread of its own: the worker answers meanwhile. It does not give way, as all threads that begin
            # later do: who waits for a dead learner's successor waits for this.
            load = partial(_call, self._preload)
            threading.Thread(target=load, name="diloco-preload", daemon=True).start()
        os.nice(_NICENESS)


def _call(path: str) -> None:
    module, _, function = path.rpartition(".")
    getattr(importlib.import_module(module), function)()


def _take_notice(worker: Worker) -> None:
    """Let a worker end: it gets no further call, and its process ends with the one it has."""
    if not _noticed.is_set():
        _noticed.set()
        worker.status = Status.paused  # which its scheduler is told
        threading.Thread(target=_end_process, args=(worker,), daemon=True).start()


def _end_process(worker: Worker) -> None:
    ends = time.monotonic() + _NOTICE_SECONDS
    while worker.state.executing and time.monotonic() < ends:
        time.sleep(_LOOK_SECONDS)
    time.sleep(min(_FETCH_SECONDS, max(0.0, ends - time.monotonic())))
    os._exit(0)


def _start(spec: ClusterSpec) -> LocalCluster:
    return LocalCluster(
        name=spec.name,
        n_workers=1 + spec.spares,
        threads_per_worker=1,
        processes=True,
        host="127.0.0.1",
        scheduler_port=0,
        dashboard_address="127.0.0.1:0",
        memory_limit=0 if spec.memory_mb is None else spec.memory_mb * 2**20,
    )


def _environment(spec: ClusterSpec) -> dict[str, Any]:
    # In place of what a nanny sets: one thread for each of these, and freed memory given back to the kernel at once.
    libraries = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    return {
        "distributed.nanny.pre-spawn-environ": dict.fromkeys(libraries, str(spec.threads)),
        "distributed.worker.memory.terminate": 1.0 if spec.memory_mb is not None else False,
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
