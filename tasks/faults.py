"""Scripted deaths of real processes: a learner gets its SIGKILL when it reaches a step.

Knows the script, and where a learner says it runs; kills only on this machine.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from typing import Any

from infra import processes
from islands import names
from islands.sections import FaultConfig
from tasks import records
from tasks.reporting import Status
from tasks.runs import Run, open_run


class Script:
    """Faults still to happen.

    Args:
        faults: each strikes once, when its island has reached its step.
    """

    def __init__(self, faults: Sequence[FaultConfig]) -> None:
        self._waiting = list(faults)

    @property
    def has_struck_all(self) -> bool:
        """Whether every fault has happened."""
        return not self._waiting

    def strike(self, store_url: str, seen: Status) -> list[str]:
        """Let happen what is due, and return what happened, in words."""
        steps = {island.name: island.step for island in seen.islands}
        due = [fault for fault in self._waiting if steps[fault.island] >= fault.step]
        told = []
        for fault in due:
            process = kill_learner(open_run(store_url, seen.run_id), fault.island)
            if process is not None:
                self._waiting.remove(fault)
                at = f"after step {steps[fault.island]:,}"
                told.append(f"{fault.island}: SIGKILL to its process {process}, {at}")
        return told


def kill_learner(run: Run, island: str) -> int | None:
    """Kill the process in which an island's learner trains; return its number, None if it is not on this machine."""
    number = records.newest_incarnation(run.store, island)
    if number < 0:
        return None
    body, _ = records.require(run.store, names.incarnation(island, number))
    where: dict[str, Any] = body.get("where", {})
    # None: dead already, and its successor has not registered yet.
    return int(where["process"]) if processes.send(where, signal.SIGKILL) else None
