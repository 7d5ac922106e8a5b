"""Flow `synchronize`: started when a quorum waits; merges what is due, lingers, ends."""

from __future__ import annotations

import time

from prefect import flow, get_run_logger, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.exceptions import TerminationSignal
from prefect.states import Completed

from tasks.merging import Synchronizer
from tasks.records import new_attempt
from tasks.ringing import Bell
from tasks.runs import open_run
from tasks.synchronizing import Drain, is_needed
from tasks.synchronizing import synchronize as merge_all


@flow(name="synchronize", flow_run_name="synchronize {run}")
def synchronize(store: str, run: str, ring: str = "by hand") -> State[str]:
    """Merge what the islands of a run have pushed, while work arrives.

    Args:
        store: URL of the store.
        run: name of the run.
        ring: which call this answers, for people.
    """
    log = get_run_logger()
    opened = open_run(store, run)
    if not is_needed(Bell(opened), now=time.monotonic, sleep=time.sleep):
        return Completed(message="nothing waits, or another synchronizer is at work", data="idle")
    drain = Drain(lambda name, lines: note_merges.with_options(task_run_name=name).submit(lines))
    try:
        ending = merge_all(
            opened,
            Synchronizer(opened, new_attempt, stamp=time.time),
            on_merges=drain.add,
            say=log.warning,
            is_stopped=lambda: False,
        )
    except TerminationSignal:
        # A version is one create-only commit: there is nothing to clear away.
        drain.flush()
        raise
    drain.flush()
    return Completed(message=f"{ending}, after {drain.num_merges} merges", data=ending)


@task(name="merge", cache_policy=NO_CACHE, persist_result=False)
def note_merges(lines: list[str]) -> None:
    """Show merges that have been made."""
    log = get_run_logger()
    for line in lines:
        log.info(line)
