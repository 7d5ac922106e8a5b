"""The end of a run: its last score, then `finished.json`."""

from __future__ import annotations

from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE

from tasks import collecting, evaluating
from tasks.evaluating import Score
from tasks.merging import Synchronizer
from tasks.runs import Run


@task(
    name="close",
    task_run_name="evaluate and close {run.run_id}",
    cache_policy=NO_CACHE,
    persist_result=False,
)
def close_run(run: Run, synchronizer: Synchronizer) -> Score | None:
    """Score the newest snapshot and write the end of the run; None if nothing was ever merged."""
    score = evaluating.evaluate_if_merged(run, closes=True)
    if score is not None:
        get_run_logger().info(
            "snapshot %d after %s merged tokens: %.4f bits/byte (byte bigram %.4f)",
            score.snapshot,
            f"{score.merged_tokens:,}",
            score.bits_per_byte,
            score.bigram,
        )
    collecting.finish(run, synchronizer.verdicts())
    return score
