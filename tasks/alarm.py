"""The alarm: says once when something begins to be wrong with a run, and once when it has ended."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, field
from typing import Any

from infra import events
from islands.health import Finding
from tasks.health import Doctor
from tasks.runs import Run

LOOK_SECONDS = 10.0
# A number that wavers about its limit is one finding, not one at each look.
CALM_LOOKS = 3


@dataclass(slots=True)
class Alarm:
    """Looks at a run's health every `LOOK_SECONDS`, logs what begins and ends, and tells Prefect. For one thread.

    `open`: key -> finding, and in how many looks it has been absent since.
    """

    doctor: Doctor
    log: logging.Logger | logging.LoggerAdapter[Any]
    open: dict[str, tuple[Finding, int]] = field(default_factory=dict)
    looked_at: float = -math.inf

    def look(self, run: Run, *, now: float) -> None:
        """Look, if it is time to.

        Raises:
            StoreUnavailable, DamagedObject: the store did not answer, or a commit in it is damaged.
        """
        if now - self.looked_at < LOOK_SECONDS:
            return
        self.looked_at = now
        found = {finding.key: finding for finding in self.doctor.look(run)}
        for key, finding in found.items():
            if key not in self.open:
                self.log.warning("%s", finding.text)
                self._tell(run, finding, finding.text)
            self.open[key] = (finding, 0)
        for key, (finding, absent) in [*self.open.items()]:
            if key in found:
                continue
            self.open[key] = (finding, absent + 1)
            if absent + 1 >= CALM_LOOKS:
                del self.open[key]
                self.log.info("%s: no longer", key)
                self._tell(run, finding, f"{key}: no longer", is_over=True)

    def _tell(self, run: Run, finding: Finding, message: str, *, is_over: bool = False) -> None:
        events.emit_alarm(
            run.store_url,
            run.run_id,
            finding.kind,
            island=finding.island or "",
            message=message,
            is_over=is_over,
        )
