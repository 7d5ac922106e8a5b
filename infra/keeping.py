"""A service under its guard: started, awaited, started again when it dies, stopped.

Knows commands, logs and guards (`infra/guard.py`); must not know what a service does.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from infra import guard, settings
from islands.types import ServiceUnavailable

# The first start of a Prefect server creates its database: up to 25 s on a busy machine.
START_SECONDS = 120.0
# So often a service that dies is started again, unless one of its lives was a steady one.
MOST_RESTARTS = 5
STEADY_SECONDS = 60.0
_LONGEST_PAUSE_SECONDS = 30.0
_PATIENCE_SECONDS = 3.0
_POLL_SECONDS = 0.1
_TAIL_LINES = 20
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Service:
    """What to start.

    `where` is what people are told; `variables` come on top of this process's environment; `may_start`: whether what
    it needs is there, asked before it is started again.
    """

    name: str
    command: tuple[str, ...]
    variables: Mapping[str, str]
    log: Path
    where: str
    is_ready: Callable[[], bool]
    grace_seconds: float
    may_start: Callable[[], bool] = lambda: True


class Started:
    """A service under its guard, from `start` to `stop`. One thread at a time.

    `held` are descriptors that the guard, not the service, keeps open until everything is gone: a lock.
    """

    def __init__(self, service: Service, *, held: Sequence[int] = ()) -> None:
        self.service = service
        self._held = tuple(held)
        self.begin()

    def begin(self) -> None:
        """Start it, once more where it has died; its output is appended to its log."""
        service = self.service
        service.log.parent.mkdir(parents=True, exist_ok=True)
        # By its file, wherever this process runs; without site packages it starts sooner, and needs none.
        own = [sys.executable, "-I", "-S", guard.__file__, "--grace", f"{service.grace_seconds:g}"]
        with service.log.open("ab") as log:
            self._log_offset = log.tell()
            self.process = subprocess.Popen(  # the guard; its status is the command's
                [*own, "--", *service.command],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=settings.child_environment(service.variables),
                pass_fds=self._held,
                # Ctrl-C reaches this process alone, which stops its services in order.
                start_new_session=True,
            )

    def wait_until_ready(self, say: Say, *, deadline_seconds: float = START_SECONDS) -> None:
        """Return when the service is ready; raise `ServiceUnavailable` if it ends before, or takes too long."""
        service = self.service
        for waited in poll(f"waiting for {service.name} on {service.where} …", say):
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


@dataclass(slots=True)
class _Life:
    """A service that is kept alive: since when it lives or is dead, and how often it died soon."""

    started: Started
    since: float = field(default_factory=time.monotonic)
    num_deaths: int = 0
    is_dead: bool = False

    def look(self, now: float, say: Say) -> None:
        """Start the service again if it has died, soon the first time, later the next times, at last not at all."""
        status, service = self.started.process.poll(), self.started.service
        if status is None or self.num_deaths > MOST_RESTARTS:
            return
        if not self.is_dead:
            self.num_deaths = 1 if now - self.since >= STEADY_SECONDS else self.num_deaths + 1
            self.is_dead, self.since = True, now
            say(f"{service.name} ended with status {status}: {self._outlook()}")
            return
        pause = min(2.0 ** (self.num_deaths - 1) - 1.0, _LONGEST_PAUSE_SECONDS)
        if now - self.since >= pause and service.may_start():
            assert self.started.process.stdin is not None, "the guard is started with a pipe"
            self.started.process.stdin.close()
            self.started.begin()
            self.is_dead, self.since = False, now

    def _outlook(self) -> str:
        service = self.started.service
        if self.num_deaths <= MOST_RESTARTS:
            return f"it is started again on {service.where}"
        return (
            f"a service may die {MOST_RESTARTS} times soon after its start, this one died {self.num_deaths} times, "
            f"so it is not started again; mend what its log names, {service.log}, and start all anew"
        )


def keep(services: Sequence[Started], *, is_over: threading.Event, say: Say) -> None:
    """Start again what dies, each service with a limit, until it is over; for a thread of its own."""
    lives = [_Life(started) for started in services]
    while not is_over.wait(_POLL_SECONDS):
        for life in lives:
            life.look(time.monotonic(), say)


def poll(text: str, say: Say) -> Iterator[float]:
    """Yield the seconds waited so far, without end; say what is awaited once it takes long."""
    begun, has_said = time.monotonic(), False
    while True:
        waited = time.monotonic() - begun
        if waited > _PATIENCE_SECONDS and not has_said:
            say(text)
            has_said = True
        yield waited
        time.sleep(_POLL_SECONDS)
