"""The end of a run: its last score, then `finished.json`. Torch is loaded only then."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE

from islands import names
from islands.types import VersionTaken
from tasks import collecting
from tasks.merging import Synchronizer
from tasks.runs import Run

if TYPE_CHECKING:
    from tasks.evaluating import Score


@task(
    name="close",
    task_run_name="evaluate and close {run.run_id}",
    cache_policy=NO_CACHE,
    persist_result=False,
)
def close_run(run: Run, synchronizer: Synchronizer) -> Score | None:
    """Score the newest snapshot and write the end of the run; None if nothing was ever merged."""
    from tasks import evaluating  # torch

    score = evaluating.evaluate_if_merged(run, closes=True)
    if score is not None:
        get_run_logger().info(
            "snapshot %d after %s merged tokens: %.4f bits/byte (byte bigram %.4f)",
            score.snapshot,
            f"{score.merged_tokens:,}",
            score.bits_per_byte,
            score.bigram,
        )
    if run.store.read(names.FINISHED) is None:
        with contextlib.suppress(VersionTaken):  # another `train` was quicker
            collecting.finish(run, synchronizer.verdicts())
    return score
