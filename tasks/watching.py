"""The Prefect task that trains one segment: it sends the order to the island's cluster, and watches.

Knows the order, the cluster and the bell; must not know what training is. What happens in the worker comes as messages
and goes into this task's log; a worker's death, or an exception there, becomes this task's honest failure.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping
from typing import Any

from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE
from prefect.exceptions import TerminationSignal

from infra.clusters import Call, Cluster
from infra.events import emit_quorum
from islands.patience import Patience
from islands.types import DamagedObject, IslandsError, StoreUnavailable
from tasks import segments, stopping
from tasks.records import new_attempt
from tasks.ringing import Bell
from tasks.runs import Run, refreshed
from tasks.segments import Segment, Stretch

_LOOK_SECONDS = 1.0
# Prefect kills a cancelled flow after 30 s.
_STOP_SECONDS = 25.0
Log = logging.Logger | logging.LoggerAdapter[Any]


class Doorman:
    """Rings for a synchronizer when one is missing, once per key. One thread.

    Attributes:
        run: under the settings that hold now.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self._bell = Bell(run)
        self._rung = ""
        self._patience = Patience()

    def look(self, log: Log) -> None:
        """Ring if a call is due; a store that does not answer is looked at again next time."""
        try:
            self.run = refreshed(self.run)
            self._bell.steer(self.run)
            ring = self._bell.look(now=time.monotonic())
        except StoreUnavailable as exc:
            self._patience.refused(exc, now=time.monotonic(), limit_seconds=math.inf, draw=0.0)
            if complaint := self._patience.complaint(exc):
                log.warning("looking for a quorum: %s", complaint)
            return
        except DamagedObject as exc:
            log.warning("looking for a quorum: %s", exc)
            return
        self._patience.answered(now=time.monotonic())
        if ring is not None and ring.key != self._rung:
            self._rung = ring.key
            log.info("a quorum waits, and nobody merges it: %s", ring.key)
            emit_quorum(self.run.store_url, self.run.run_id, ring.key)


@task(
    name="train a segment",
    task_run_name="{segment.island} segment {number}",
    cache_policy=NO_CACHE,
    persist_result=False,
)
def watch_segment(
    run: Run, cluster: Cluster, segment: Segment, number: int, doorman: Doorman
) -> Stretch:
    """Train one segment on the island's cluster and return how it went.

    Raises:
        LearnerLost: the worker died. Other errors are those of the learner, with their traceback.
    """
    log = get_run_logger()
    call: Call[Stretch] = cluster.call(segments.train_segment, segment)
    try:
        while not call.is_done(_LOOK_SECONDS):
            _relay(cluster, log)
            doorman.look(log)
    except TerminationSignal:
        log.warning("asked to stop: %s saves its state", segment.island)
        _stop(run, call, segment.island, log)
        raise
    finally:
        _relay(cluster, log)
    stretch = call.result()
    log.info(
        "%s: %s; step %d, %d steps in %.1f s, loss %.3f, %.1f %% idle",
        segment.island,
        stretch.outcome,
        stretch.step,
        stretch.num_steps,
        stretch.seconds,
        stretch.loss,
        100 * stretch.idle_share,
    )
    return stretch


def _stop(run: Run, call: Call[Stretch], island: str, log: Log) -> None:
    try:
        stopping.ask(
            run,
            is_stop=True,
            reason="the flow run was cancelled",
            mark=new_attempt(),
            island=island,
        )
    except IslandsError as exc:
        log.error("could not ask %s to stop: %s", island, exc)
        return
    if not call.is_done(_STOP_SECONDS):
        log.error("%s did not stop in %g s", island, _STOP_SECONDS)


def _relay(cluster: Cluster, log: Log) -> None:
    for message in cluster.messages():
        _log(message, log)


def _log(message: Mapping[str, Any], log: Log) -> None:
    kind = message.get("kind")
    if kind == "log":
        log.log(logging.getLevelName(str(message["level"]).upper()), "%s", message["text"])
    elif kind == "pushed":
        log.debug("pushed fragment %(fragment)s on version %(base)s at step %(step)s", message)
    elif kind == "saved":
        log.debug("saved %(name)s", message)
