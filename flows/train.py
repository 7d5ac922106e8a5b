"""Flow `train`: one run, from an empty store to an evaluated model; or the rest of an interrupted one."""

from __future__ import annotations

import os
import time
from typing import Any

from prefect import flow, get_run_logger
from prefect.client.schemas.objects import State
from prefect.exceptions import TerminationSignal
from prefect.runtime import flow_run
from prefect.states import Cancelled, Completed, Failed

from islands.config import RunConfig
from tasks import starting, supervising
from tasks.closing import close_run
from tasks.supervising import Supervisor

_TICK_SECONDS = 1.0
# Prefect kills a cancelled flow after 30 s.
_STOP_SECONDS = 25.0


def _name() -> str:
    # Until it has found a name for its run it bears none that a run could have: by that it would be started again.
    return f"train {flow_run.parameters.get('run') or '(a new run)'}"


# The configuration is checked by the project's own door, which is stricter than Prefect's, as the first act.
@flow(name="train", flow_run_name=_name, validate_parameters=False)
def train(
    config: RunConfig = RunConfig(),  # noqa: B008  frozen
    run: str | None = None,
    resume: bool = False,
    origin: str | None = None,
) -> State[Any]:
    """Train one model on several islands, from an empty store to an evaluated model.

    Args:
        config: Everything the run can be told.
        run: Name of the run: a new one, or with `resume` one that exists. Empty: run-1, run-2, …
        resume: Go on with the run of that name; of the configuration, only `store` is looked at.
        origin: What a new run begins from: RUN, RUN@SNAPSHOT, URL/RUN@SNAPSHOT or PATH.safetensors, as the machine
            that serves the flow sees it. Empty: random parameters, from the seed.
    """
    served_by = os.getppid()
    is_heir = starting.is_heir()
    opened = starting.open_or_create(config, run, resume=resume, origin=origin, is_heir=is_heir)
    supervisor = Supervisor(opened, get_run_logger(), starting.enlist(opened), is_heir)
    starting.name_flow_run(f"train {opened.run_id}")
    with starting.tracked(opened) as ending:
        try:
            ending.status = _supervise(supervisor)
        except TerminationSignal:
            ending.status = _told_to_end(supervisor, is_orphan=os.getppid() != served_by)
            raise
    if not ending.status:
        return Completed(message=f"superseded: a later train looks after {opened.run_id}")
    if ending.status == "KILLED":
        return Cancelled(message=f"stopped on request; `diloco resume {opened.run_id}` continues")
    if ending.status == "FAILED":
        return Failed(message="every island died before its first merge")
    return Completed(message="trained, merged and evaluated", data=opened.run_id)


def _supervise(supervisor: Supervisor) -> str:
    """Tick until all islands have left, then close the run; return how MLflow calls that, nothing if superseded."""
    while (outlook := supervisor.outlook()) != "left":
        if outlook == "superseded":
            return ""
        if outlook == "stopped":
            supervising.wait_until_away(supervisor, _STOP_SECONDS)
            return "KILLED"
        supervisor.tick()
        time.sleep(_TICK_SECONDS)
    run = supervisor.run
    score = close_run(run, supervising.settle(run, sleep=time.sleep))
    return "FAILED" if score is None else "FINISHED"


def _told_to_end(supervisor: Supervisor, *, is_orphan: bool) -> str:
    """Stop the run with its state saved, unless it goes on elsewhere; return how MLflow calls that ending.

    An orphan is told to end because the process that served it died: whoever serves next starts `train` again.
    """
    if is_orphan or supervisor.outlook() == "superseded":
        return ""
    supervising.ask_all_to_stop(supervisor.run, "the flow run of train was cancelled")
    supervising.wait_until_away(supervisor, _STOP_SECONDS)
    return "KILLED"
