"""A run on Prefect and Dask, as the command line sees it: started, followed through its store, asked to stop.

Knows deployments and the store; must not know what the flows do. Losing sight of Prefect does not end the following:
the store tells how a run is doing.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from infra import deployments
from infra.deployments import RunState
from islands.config import RunConfig
from islands.types import IslandsError, ServiceUnavailable
from tasks import reporting, reviving, supervising, trainers
from tasks.health import Doctor
from tasks.reporting import Status
from tasks.runs import Run, open_run, refreshed

_LOOK_SECONDS = 2.0
# A flow that has been asked to stop ends within 30 s.
_STOP_SECONDS = 60.0
# A crashed one is started again within seconds, or, if who serves the flows died too, once all that is left has ended.
_REVIVAL_SECONDS = 180.0
Look = Callable[[Status], None]


@dataclass(frozen=True, slots=True)
class Started:
    """A run that Prefect trains: where it lies, the flow run of `train`, and how many had looked after it before."""

    store_url: str
    run_id: str
    flow_run: str
    num_before: int = 0


def start(
    config: RunConfig, run_id: str, *, resume: bool = False, origin: str | None = None
) -> Started:
    """Start the deployment `train` for a new run, or for one to go on with, and return at once.

    `origin`: what a new run begins from, named as every process understands it.

    Raises:
        ServiceUnavailable: Prefect did not answer, or does not know the deployment.
    """
    num_before = trainers.count(open_run(config.store, run_id)) if resume else 0
    flow_run = reviving.start(config, run_id, resume=resume, origin=origin, num_known=num_before)
    return Started(config.store, run_id, flow_run, num_before)


def follow(started: Started, look: Look, is_stopped: Callable[[], bool]) -> RunState:
    """Tell `look` how the run is doing until its flow ends; return how it ended.

    Where another flow run takes over, that one is followed. Asked to stop, it asks the run to, and waits for that.
    """
    stop_by: float | None = None
    run, seen, doctor, heir = None, None, None, _Heir(started)
    while True:
        run = _find(started) if run is None else _newest(run)
        if run is not None:
            doctor = doctor or Doctor(run)
            seen = _look(run, seen, doctor)
            if seen is not None:
                look(seen)
            if is_stopped() and stop_by is None:
                stop_by = time.monotonic() + _STOP_SECONDS
                supervising.ask_all_to_stop(run, "asked by the command line")
        state = _state(heir.flow_run)
        if state.is_over and not (run is not None and heir.is_there(run, state)):
            return _done(state) if seen is not None and seen.is_finished else state
        if stop_by is not None and time.monotonic() > stop_by:
            return RunState("RUNNING", "did not stop in time; see its flow run")
        if is_stopped() and run is None:
            return RunState("PENDING", "had not begun; cancel its flow run, or it will")
        time.sleep(_LOOK_SECONDS)


def wait_for_islands(run: Run, wait_seconds: float) -> bool:
    """Wait until no island of a run is at work; say whether that was so in time."""
    ends = time.monotonic() + wait_seconds
    tags = [supervising.tag_of(run)]
    while deployments.living_run("island", tags) is not None:
        if time.monotonic() > ends:
            return False
        time.sleep(_LOOK_SECONDS)
    return True


class _Heir:
    """Who looks after a run: first who was started for it, later whoever takes over."""

    def __init__(self, started: Started) -> None:
        self.flow_run, self._num_known = started.flow_run, started.num_before
        self._waits_until: float | None = None

    def is_there(self, run: Run, state: RunState) -> bool:
        """Say whether, now that the last one is over, another goes on or will soon."""
        try:
            newest = trainers.newest(run)
            if newest and newest.number >= self._num_known and newest.flow_run != self.flow_run:
                self.flow_run, self._num_known = newest.flow_run, newest.number + 1
                self._waits_until = None
                return True
            is_awaited = reviving.is_awaited(run, self.flow_run, self._num_known)
        except IslandsError:
            is_awaited = True  # the store does not answer for a moment
        self._waits_until = self._waits_until or time.monotonic() + _REVIVAL_SECONDS
        return state.kind == "CRASHED" and is_awaited and time.monotonic() < self._waits_until


def _done(state: RunState) -> RunState:
    """Return the state of a flow run whose run has ended, whatever became of its process after that."""
    return RunState("COMPLETED", state.message) if state.kind == "CRASHED" else state


def _find(started: Started) -> Run | None:
    """Return the run once it has been created whole."""
    try:
        return open_run(started.store_url, started.run_id)
    except IslandsError:
        return None  # not there yet, or the store does not answer for a moment


def _newest(run: Run) -> Run:
    """Return the run under the settings it has now: somebody may have joined."""
    try:
        return refreshed(run)
    except IslandsError:
        return run  # the store does not answer for a moment


def _look(run: Run, before: Status | None, doctor: Doctor) -> Status | None:
    try:
        return reporting.status(run, before, doctor)
    except IslandsError:
        return before  # its creation is under way, or the store does not answer for a moment


def _state(flow_run: str) -> RunState:
    try:
        return deployments.state_of(flow_run)
    except ServiceUnavailable:
        return RunState("RUNNING", "Prefect does not answer")
