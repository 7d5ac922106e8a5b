"""How long a synchronizer takes that the quorum must first call into being, and any flow beside it.

Works on the Prefect that this process is pointed at, where the deployments are served, the empty flow's too.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

from infra import deployments
from islands.types import ServiceUnavailable
from tasks import answering, stopping
from tasks.measuring import write_run
from tasks.records import new_attempt
from tasks.watching import Doorman

EMPTY = "empty"
# An island looks for a quorum once a second: the commit comes half a second before a look, on average.
_RING_SECONDS = 1.0
_FIRST_LOOK_SECONDS = 0.5
_POLL_SECONDS = 0.02
_PATIENCE_SECONDS = 120.0


def answer_cold(folder: Path) -> float:
    """Return the seconds from the commit that completes a run's first quorum to its readable first version.

    The run is made in `folder`; its synchronizer is gone again when this returns.
    """
    run, digest = write_run(str(folder), answering.NUM_LEARNERS, answering.TENSOR_ELEMENTS)
    doorman, log = Doorman(run), logging.getLogger(__name__)
    answering.contribute(run, 0, digest)
    begun = time.perf_counter()
    look_at = begun + _FIRST_LOOK_SECONDS

    def is_there() -> bool:
        nonlocal look_at
        if time.perf_counter() >= look_at:
            look_at += _RING_SECONDS
            doorman.look(log)
        return answering.read_version(run, 1) is not None

    waited = _wait_until(is_there, begun, "a called synchronizer must merge")
    stopping.ask(run, is_stop=True, reason="measured", mark=new_attempt())
    _wait_until(
        lambda: deployments.living_run("synchronize", ()) is None,
        time.perf_counter(),
        "a synchronizer that is asked to stop must end",
    )
    return waited


def start_empty_flow() -> float:
    """Return the seconds from the order of a flow run that does nothing to its running."""
    begun = time.perf_counter()
    flow_run = deployments.start(EMPTY, {})
    waited = _wait_until(
        lambda: deployments.state_of(flow_run).kind not in ("SCHEDULED", "PENDING"),
        begun,
        "an empty flow must start",
    )
    _wait_until(
        lambda: deployments.state_of(flow_run).is_over,
        time.perf_counter(),
        "an empty flow must end",
    )
    return waited


def _wait_until(is_so: Callable[[], bool], begun: float, rule: str) -> float:
    """Return the seconds from `begun` until it is so."""
    while not is_so():
        if time.perf_counter() - begun > _PATIENCE_SECONDS:
            raise ServiceUnavailable(
                f"{rule} within {_PATIENCE_SECONDS:g} s, and did not; see the flow runs in Prefect"
            )
        time.sleep(_POLL_SECONDS)
    return time.perf_counter() - begun
