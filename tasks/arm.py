"""The processes of one arm of a comparison: `python -m tasks.arm island|synchronizer …`.

An island's process trains a real learner, as an island's worker does, and logs its steps; a synchronizer's merges.
"""

from __future__ import annotations

import math
import sys
import time
from pathlib import Path

from tasks.merging import Synchronizer
from tasks.records import new_attempt
from tasks.runs import Run, open_run
from tasks.step_log import StepLog
from tasks.synchronizing import synchronize

# A period that no learner reaches: nothing is pushed, so nothing is adopted.
NO_EXCHANGE_STEPS = 1_000_000


def train(run: Run, name: str, log: StepLog) -> None:
    """Train an island's learner until this process is ended."""
    from tasks.living import Life  # torch, which the synchronizer's process must not load

    class LoggedLife(Life):
        """A learner that logs its steps. Without an exchange it looks at the store once a second, for a stop."""

        def _one_step(self, begun: float) -> float:
            before, now = self._useful, super()._one_step(begun)
            num_tokens = self.island.batch_size * run.config.model.context
            log.add(begun, now, self._useful - before, num_tokens)
            if run.config.sync.period_steps == NO_EXCHANGE_STEPS:
                self._receiver.poll_seconds = 1.0
            return now

    life = LoggedLife(run, name, new_attempt, stamp=time.time, tell=lambda message: None)
    life.train(math.inf)


def merge(run: Run) -> None:
    """Merge until this process is ended."""
    synchronizer = Synchronizer(run, new_attempt, stamp=time.time)
    ending = "idle"
    while ending == "idle":  # before the first contribution it lingers for seconds only
        ending = synchronize(
            run,
            synchronizer,
            on_merges=lambda merged: None,
            say=lambda text: None,
            is_stopped=lambda: False,
        )


if __name__ == "__main__":
    role, store, run_id, log_path, *rest = sys.argv[1:]
    step_log = StepLog(Path(log_path))
    if role == "island":
        train(open_run(store, run_id), rest[0], step_log)
    else:
        merge(open_run(store, run_id))
