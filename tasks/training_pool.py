"""Many trainings, one process per core. No torch here: the jobs bring it."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import active_children, get_context
from typing import TypeVar

from tasks.figures import Advance

JobT = TypeVar("JobT")
ResultT = TypeVar("ResultT")
_LOOK_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Trained:
    """What came of a training: held-out loss, and the share of trained tokens that were merged."""

    bits_per_byte: float
    merged_share: float


def train_all(
    jobs: Sequence[JobT],
    work: Callable[[JobT], ResultT],
    advance: Advance,
    *,
    note: Callable[[JobT, ResultT], str],
) -> dict[JobT, ResultT]:
    """Do `work` for every job in a pool of processes; tell `advance` of each.

    Args:
        jobs: hashable; they and the results are pickled.
        work: a module's function, or a partial of one.
        advance: told how many are done, with a note.
        note: what to say of a job done.
    """
    results = {}
    start = partial(_end_with, os.getpid())
    spawn = get_context("spawn")
    with ProcessPoolExecutor(os.cpu_count(), mp_context=spawn, initializer=start) as pool:
        futures = {job: pool.submit(work, job) for job in jobs}
        try:
            for done, (job, future) in enumerate(futures.items(), start=1):
                results[job] = future.result()
                advance(done, note(job, results[job]))
        except BaseException:
            for process in active_children():  # trainings take minutes, and nobody waits for them
                process.terminate()
            raise
    return results


def _end_with(parent: int) -> None:
    """Let this process end when the one that started it has: a pool's process would wait for ever."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_LOOK_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, name="diloco-parent", daemon=True).start()
