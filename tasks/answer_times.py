"""Benchmark `latency`: from the commit that makes a merge due to the readable new version; a fragment of 1 MiB.

Warm: a synchronizer is at work. Cold: none is, and the quorum's event must start one through Prefect, while nothing
else runs and while two learners train; beside it, how long any flow needs to start there.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tasks import answering
from tasks.arms import Plan, training
from tasks.figures import Measured, Order, Target, lines

NUM_WARM_ROUNDS = 41
NUM_COLD_ROUNDS = 3


def measure(order: Order) -> Measured:
    """Return the waits, warm in milliseconds and cold in seconds."""
    warm = _warm(NUM_WARM_ROUNDS)
    cold: dict[str, list[float]] = {"idle": [], "busy": []}
    empty: dict[str, list[float]] = {"idle": [], "busy": []}

    def look(when: str, folder: Path) -> None:
        from tasks import cold_starts  # Prefect, which reads its address when it is imported

        for _ in range(NUM_COLD_ROUNDS):
            empty[when].append(cold_starts.start_empty_flow())
            cold[when].append(cold_starts.answer_cold(folder / f"{when}-{len(cold[when])}"))
            advance(len(cold["idle"]) + len(cold["busy"]), when)

    with (
        tempfile.TemporaryDirectory(prefix="diloco-latency-") as name,
        order.services(),
        order.progress("cold starts", 2 * NUM_COLD_ROUNDS) as advance,
    ):
        folder = Path(name)
        look("idle", folder)
        with training("busy", Plan(), folder, exchanges=False):
            look("busy", folder)
    return report(warm, cold["idle"], cold["busy"], empty["idle"], empty["busy"])


def report(
    warm: Sequence[float],
    cold_idle: Sequence[float],
    cold_busy: Sequence[float],
    empty_idle: Sequence[float],
    empty_busy: Sequence[float],
) -> Measured:
    """Return the figures of waits in seconds."""
    figures = {
        "warm_ms_median": 1000 * statistics.median(warm),
        "warm_ms_largest": 1000 * max(warm),
        "num_merges": len(warm),
        "cold_idle_s": statistics.median(cold_idle),
        "cold_busy_s": statistics.median(cold_busy),
        "empty_flow_s": statistics.median(empty_idle),
        "empty_flow_busy_s": statistics.median(empty_busy),
    }
    targets = (
        Target("warm_ms_median", figures["warm_ms_median"], "<=", 150.0),
        Target("cold_idle_s", figures["cold_idle_s"], "<=", 12.0),
        Target("cold_busy_s", figures["cold_busy_s"], "<=", 20.0),
    )
    return Measured(figures, targets, lines(figures, {"num_merges": 0}))


def _warm(num_rounds: int) -> list[float]:
    with tempfile.TemporaryDirectory(prefix="diloco-latency-") as folder:
        return answering.measure(folder, num_rounds)
