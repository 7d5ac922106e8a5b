"""Which snapshots want a score, and the Prefect task that gives them one. Torch is loaded only if there is work."""

from __future__ import annotations

from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE

from islands import names
from islands.types import IslandsError
from tasks import records
from tasks.collecting import SUITE
from tasks.runs import Run, list_runs, open_run

ALL = "all"


def unscored(store_url: str, run_id: str, snapshot: int | None) -> list[tuple[str, int | None]]:
    """Return (run, snapshot) of what to score: the one named, or of each unfinished run whose newest has no score.

    None stands for the newest, which may be a later one by the time it is scored: older ones are not kept for long.

    Raises:
        ConfigError: no such run.
    """
    if run_id != ALL:
        return [(run_id, snapshot)]
    found: list[tuple[str, int | None]] = []
    for each in list_runs(store_url):
        try:
            run = open_run(store_url, each)
            if run.store.read(names.FINISHED) is None:
                number = newest_snapshot(run)
                if number is not None and run.store.read(names.evaluation(SUITE, number)) is None:
                    found.append((each, None))
        except IslandsError as exc:
            # One damaged run must not keep the others from their scores.
            get_run_logger().warning("run %s: %s", each, exc)
    return found


def newest_snapshot(run: Run) -> int | None:
    """Return the number of a run's newest snapshot; None before the first."""
    return max(records.numbers_in(run.store, "snapshots"), default=None)


@task(
    name="score",
    task_run_name="score {run_id}",
    cache_policy=NO_CACHE,
    persist_result=False,
)
def score_snapshot(store_url: str, run_id: str, number: int | None) -> str:
    """Score one snapshot (the newest with None), unless it has its score, and return it in words."""
    from tasks.evaluating import evaluate  # torch

    score = evaluate(open_run(store_url, run_id), number)
    words = (
        f"{run_id} snapshot {score.snapshot}: {score.bits_per_byte:.4f} bits/byte "
        f"after {score.merged_tokens:,} merged tokens (byte bigram {score.bigram:.4f})"
    )
    get_run_logger().info(words)
    return words
