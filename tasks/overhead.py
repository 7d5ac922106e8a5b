"""Benchmark `overhead`: what pushing, merging and adopting cost two islands on two cores.

Two arms take turns: one exchanges, the other one only trains and looks for a stop once a second. Prefect, MLflow and
the deployments run beside both.

The merged share is that of a stretch without pauses, at first: to a synchronizer a pause of the whole arm is a clock
that jumps, and the round it strikes is merged without whoever was under way.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tasks import records
from tasks.arms import Plan, take_turns, training
from tasks.figures import Advance, Measured, Order, Target, lines, scalars
from tasks.runs import Run
from tasks.slices import Slice, median_of, slices_by_arm

WITH, WITHOUT = "with", "without"


def measure(order: Order) -> Measured:
    """Return throughput with exchange over without, the learners' stall, and the merged share."""
    plan = Plan()
    with order.services(), order.progress("slices", 2 * plan.num_slices) as advance:
        slices, merged_share = compare(plan, advance)
    return report(slices, merged_share)


def compare(plan: Plan, advance: Advance) -> tuple[dict[str, list[Slice]], float]:
    """Run both arms in turns; return their slices, and the merged share of the one that exchanges."""
    with tempfile.TemporaryDirectory(prefix="diloco-overhead-") as name:
        folder = Path(name)
        with training(WITH, plan, folder, exchanges=True) as ours:
            time.sleep(plan.whole_seconds)
            merged_share = share_between_merges(ours.run)
            ours.pause()
            with training(WITHOUT, plan, folder, exchanges=False) as theirs:
                theirs.pause()
                windows = take_turns((ours, theirs), plan, advance)
                learners = {arm.name: arm.steps() for arm in (ours, theirs)}
                return slices_by_arm(learners, windows), merged_share


def share_between_merges(run: Run) -> float:
    """Return the merged share of all steps between each learner's first and last merged copy of a fragment so far."""
    steps: dict[tuple[int, str], list[tuple[int, int]]] = {}
    for layout in run.layouts:
        head, _ = records.find_head(run.store, layout.index)
        for version in range(1, head.version + 1):
            commit, _ = records.require_commit(run.store, layout.index, version)
            for entry in commit.consumed:
                row = steps.setdefault((layout.index, entry.learner), [])
                row.append((entry.stop.step, entry.num_steps))
    merged = sum(num_steps for row in steps.values() for _, num_steps in row[1:])
    return merged / sum(row[-1][0] - row[0][0] for row in steps.values())


def report(slices: Mapping[str, Sequence[Slice]], merged_share: float) -> Measured:
    """Return the figures of both arms' slices."""
    rates = {arm: median_of(slices[arm], "tokens_per_second") for arm in (WITH, WITHOUT)}
    pairs = zip(slices[WITH], slices[WITHOUT], strict=True)
    paired = [one.tokens_per_second / other.tokens_per_second for one, other in pairs]
    figures: dict[str, Any] = {
        "throughput_ratio": rates[WITH] / rates[WITHOUT],
        "learner_stall_fraction": median_of(slices[WITH], "stall_fraction"),
        "merged_share": merged_share,
        "throughput_ratio_paired": statistics.median(paired),
        "tokens_per_second_with": rates[WITH],
        "tokens_per_second_without": rates[WITHOUT],
        "step_ms_without": 1000 * median_of(slices[WITHOUT], "step_seconds"),
        "slices_with": [one.tokens_per_second for one in slices[WITH]],
        "slices_without": [one.tokens_per_second for one in slices[WITHOUT]],
    }
    targets = (
        Target("throughput_ratio", figures["throughput_ratio"], ">=", 0.95),
        Target("learner_stall_fraction", figures["learner_stall_fraction"], "<=", 0.01),
        Target("merged_share", merged_share, ">=", 0.8),
    )
    digits = {"learner_stall_fraction": 5, "tokens_per_second_with": 0}
    return Measured(figures, targets, lines(dict(scalars(figures)), digits))
