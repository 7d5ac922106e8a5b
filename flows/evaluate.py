"""Flow `evaluate`: scores snapshots on held-out text; on a schedule, or by hand; none twice."""

from __future__ import annotations

from prefect import flow
from prefect.client.schemas.objects import State
from prefect.states import Completed, Failed

from tasks.scoring_runs import score_snapshot, unscored


@flow(name="evaluate", flow_run_name="evaluate {run}")
def evaluate(store: str, run: str = "all", snapshot: int | None = None) -> State[str]:
    """Score the newest snapshot of a run, or of every unfinished run.

    Args:
        store: URL of the store.
        run: name of the run; "all" for every run that is not finished.
        snapshot: number of the snapshot; empty for the newest. Only with a named run.
    """
    states = [
        score_snapshot(store, *each, return_state=True) for each in unscored(store, run, snapshot)
    ]
    if failed := [state for state in states if not state.is_completed()]:
        return Failed(message="; ".join(state.message or "failed" for state in failed))
    words = "; ".join(state.result() for state in states)
    return Completed(message=words or "nothing new to score", data=words)
