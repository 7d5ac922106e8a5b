"""Flow `chaos`: faults against a live run, from a list or at random with a seed, struck where this flow runs."""

from __future__ import annotations

from typing import Annotated, Any

from prefect import flow, get_run_logger
from prefect.client.schemas.objects import State
from prefect.states import Completed, Failed
from pydantic import Field

from islands.chaos import KINDS, TARGETS, Fault, Kind, Plan, Target, checked, random_plan
from islands.types import ConfigError
from tasks.chaos import require_strikable, strikable_islands, unleash
from tasks.runs import open_run

Seconds = Annotated[float, Field(gt=0, le=86_400)]
# This flow is a child of the process that serves it, and would end with it.
_OUT_OF_REACH = "serve"


@flow(name="chaos", flow_run_name="chaos on {run}")
def chaos(
    store: str,
    run: str,
    faults: tuple[Fault, ...] = (),
    seed: int = 0,
    seconds: Seconds = 60.0,
    every_seconds: Seconds = 20.0,
    kinds: tuple[Kind, ...] = KINDS,
    targets: tuple[Target, ...] = tuple(t for t in TARGETS if t != _OUT_OF_REACH),
) -> State[Any]:
    """Strike a run that is under way with faults, on the machine that serves this flow. Each leaves a record.

    Args:
        store: URL of the store.
        run: Name of the run.
        faults: What strikes whom, and when. Empty: at random, as the values below say.
        seed: The same seed is the same plan.
        seconds: How long the random plan goes on.
        every_seconds: Seconds between two random faults.
        kinds: What a random fault may be.
        targets: Whom it may strike. `serve` can only be struck from outside, by `diloco chaos`.
    """
    opened = require_strikable(open_run(store, run))
    log = get_run_logger()
    if faults:
        members = [island.name for island in opened.config.members]
        plan = checked(Plan(faults), members, source="faults")
    else:
        plan = random_plan(
            strikable_islands(opened),
            seed=seed,
            seconds=seconds,
            every_seconds=every_seconds,
            kinds=kinds,
            targets=targets,
        )
    if any(fault.target == _OUT_OF_REACH for fault in plan.faults):
        raise ConfigError(
            f"targets must spare {_OUT_OF_REACH}, which this flow runs below, got it; use `diloco chaos {run}`"
        )
    missed = unleash(opened, plan, say=log.warning)
    if missed:
        return Failed(message=f"did not strike: {'; '.join(map(str, missed))}")
    return Completed(message=f"{len(plan.faults)} faults struck")
