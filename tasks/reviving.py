"""Bringing back what died: dead flow runs are called dead, and a `train` that crashed is started again, with a limit.

For a thread of the process that serves the flows, which looks again and again: a lost event, or an outage of Prefect,
only makes it later. Whether a run needs somebody is decided by its store. No torch.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

from infra import deployments, processes, settings
from infra.deployments import FlowRun, RunState
from infra.events import unique_key
from infra.store import open_store
from islands import names
from islands.config import RunConfig
from islands.types import (
    ConfigError,
    DamagedObject,
    IslandsError,
    ServiceUnavailable,
    StoreUnavailable,
)
from tasks import stopping, trainers
from tasks.runs import Run, open_run

# A flow run whose process has ended is told of by whoever served it, at once, unless Prefect was away or it died too.
MISSING_SECONDS = 15.0
_GONE = "its process is gone, and whoever watched it"
_ENGINE = "prefect.engine"
_VARIABLE = "PREFECT__FLOW_RUN_ID"
# Tags of a flow run of `train`: how many had enlisted when it was started, how many crashed since before they could.
_KNOWN, _TRIES = "trainers:", "tries:"
_LATER = "a later one looks after the run"


@dataclass(slots=True)
class Reviver:
    """Looks for what died. `say` is told what was done about it. One thread."""

    say: Callable[[str], None]
    missing_since: dict[str, float] = field(default_factory=dict)
    judged: set[str] = field(default_factory=set)

    def look(self, *, now: float, patience_seconds: float = MISSING_SECONDS) -> None:
        """Look once at everything; what does not answer is looked at again next time.

        `patience_seconds`: how long a flow run must have been without a process; none is needed before anything is
        served: what an earlier process served is gone.
        """
        # Before anybody is asked: what ends meanwhile must not look as if it had died.
        at_work = _at_work()
        try:
            # Only of a server of this machine's own is it known that every flow run has its process here.
            if settings.is_prefect_ours() and processes.of(os.getpid()):
                self._bury(at_work, now, patience_seconds)
            self._revive(at_work)
        except ServiceUnavailable as exc:
            self.say(f"looking for what died: {exc}")

    def _bury(self, at_work: Set[str], now: float, patience_seconds: float) -> None:
        """Tell Prefect of flow runs without a process, and of processes that it took for dead."""
        unfinished = deployments.unfinished_runs()
        missing = [run for run in unfinished if run.id not in at_work]
        self.missing_since = {run.id: self.missing_since.get(run.id, now) for run in missing}
        for run in missing:
            # Between the word of whoever serves it and its process lie calls to a server that may be slow.
            patience = patience_seconds * (4 if run.state.kind == "PENDING" else 1)
            if now - self.missing_since[run.id] >= patience:
                state = _end_of(run)
                deployments.set_state(run.id, state)
                self.say(f"{run.name}: {state.kind.lower()}, {state.message}")
        for run in deployments.crashed_runs():
            if run.state.is_silent and run.id in at_work:
                deployments.set_state(run.id, RunState("RUNNING", "its heartbeats had been lost"))
                self.say(f"{run.name} lives: only its heartbeats had been lost")

    def _revive(self, at_work: Set[str]) -> None:
        crashed = deployments.crashed_runs("train")
        self.judged &= {run.id for run in crashed}
        for run in crashed:
            if run.id in self.judged or (run.state.is_silent and run.id in at_work):
                continue
            try:
                self.say(f"{run.name} crashed: {revive(run)}")
            except StoreUnavailable as exc:  # that of another run may answer
                self.say(f"{run.name} crashed, its store is asked again: {exc}")
            else:
                self.judged.add(run.id)


def start(
    config: RunConfig,
    run_id: str,
    *,
    num_known: int,
    resume: bool = False,
    origin: str | None = None,
) -> str:
    """Start the deployment `train` for a run, after so many that have enlisted for it, and return the flow run.

    Raises:
        ServiceUnavailable: Prefect did not answer, or does not know the deployment.
    """
    parameters = {
        "config": json.loads(config.model_dump_json()),
        "run": run_id,
        "resume": resume,
        "origin": origin,
    }
    tags = [f"{_KNOWN}{num_known}"]
    return deployments.start("train", parameters, tags=tags, name=f"train {run_id}")


def revive(dead: FlowRun) -> str:
    """Start `train` again for the run that a crashed one looked after, unless something speaks against it; say which.

    At most once for each crashed flow run, however often and by whomever it is called.

    Raises:
        ServiceUnavailable, StoreUnavailable: call again.
    """
    try:
        run = _run_of(dead)
        number = trainers.number_of(run, dead.id)
        num_known = _tag(dead, _KNOWN) if number is None else number + 1
        num_tries = _tag(dead, _TRIES) + 1 if number is None else 0
        if reason := _why_not(run, num_known, num_tries):
            return f"not started again: {reason}"
        flow_run = deployments.start(
            "train",
            {"config": _plain(run), "run": run.run_id, "resume": True},
            tags=[f"{_KNOWN}{num_known}", f"{_TRIES}{num_tries}"],
            key=unique_key(run.store_url, f"{run.run_id}-train-{num_known}-{num_tries}"),
            name=f"train {run.run_id}",
        )
    except StoreUnavailable:
        raise
    except (ConfigError, DamagedObject) as exc:
        return f"not started again: {exc}"
    return f"started again, as flow run {flow_run}"


def is_heir(tags: Sequence[str]) -> bool:
    """Say of a flow run's tags whether `revive` started it: nobody has asked for it, as `diloco resume` does."""
    return any(tag.startswith(_TRIES) for tag in tags)


def is_awaited(run: Run, flow_run: str, num_known: int) -> bool:
    """Say whether, should this `train` have crashed, another one will come, or has."""
    number = trainers.number_of(run, flow_run)
    return _why_not(run, num_known if number is None else number + 1, 0) in (None, _LATER)


def _why_not(run: Run, num_known: int, num_tries: int) -> str | None:
    """Return why no `train` is to be started after a crashed one, None if one is.

    Args:
        run: that it looked after.
        num_known: how many had enlisted by the time it began its work, itself included.
        num_tries: how many in a row have crashed before they could enlist.
    """
    if run.store.read(names.FINISHED) is not None:
        return "the run has ended"
    if stopping.is_asked(run):
        return f"the run was asked to stop; `diloco resume {run.run_id}` continues"
    if trainers.count(run) > num_known:
        return _LATER
    most = run.config.pipeline.max_restarts
    if max(trainers.num_vain(run) + num_tries - 1, 0) >= most:
        return (
            f"pipeline.max_restarts allows {most} restarts in a row without a merge in between, got as many; "
            f"see why they crashed, then `diloco resume {run.run_id}`"
        )
    return None


def _run_of(train: FlowRun) -> Run:
    """Return the run that a flow run of `train` looks after.

    Raises:
        ConfigError: it had not created one.
    """
    config = train.parameters.get("config") or {}
    store = open_store(config.get("store") or RunConfig().store).url
    # One that was to find a name itself says it in its own.
    return open_run(store, train.parameters.get("run") or train.name.rpartition(" ")[2])


def _plain(run: Run) -> dict[str, Any]:
    plain: dict[str, Any] = json.loads(run.config.model_dump_json())
    return {**plain, "store": run.store_url}


def _tag(flow_run: FlowRun, prefix: str) -> int:
    """Return the number after a prefix among the flow run's tags; 0 without one."""
    found = (tag.removeprefix(prefix) for tag in flow_run.tags if tag.startswith(prefix))
    return next((int(number) for number in found if number.isdecimal()), 0)


def _at_work() -> Set[str]:
    """Return the flow runs that processes of this machine execute; what those have started does not count."""
    running = processes.with_variable(_VARIABLE)
    return {its for process, its in running.items() if _ENGINE in processes.command_line(process)}


def _end_of(flow_run: FlowRun) -> RunState:
    """Return how a flow run without a process has ended: what it was to do may be done, and Prefect was away."""
    if flow_run.state.kind == "CANCELLING":
        return RunState("CANCELLED", _GONE)
    try:
        if _is_done(flow_run):
            return RunState("COMPLETED", "it ended while Prefect was away")
    except IslandsError:
        pass  # nothing is known of its run
    return RunState("CRASHED", _GONE)


def _is_done(flow_run: FlowRun) -> bool:
    given = flow_run.parameters
    if flow_run.flow == "train":
        return _run_of(flow_run).store.read(names.FINISHED) is not None
    if flow_run.flow != "island":
        return False
    store = open_run(given["store"], given["run"]).store
    return store.read(names.left(given["island"])) is not None
