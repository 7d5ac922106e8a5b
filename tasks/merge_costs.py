"""Benchmark `merge`: one merge of a 64 MB fragment, its time beside a plain one, its memory by number of learners."""

from __future__ import annotations

from tasks import measuring
from tasks.figures import Measured, Order, Table, Target


def measure(order: Order) -> Measured:
    """Return time over a plain merge's, and the peaks in fragments."""
    figures = measuring.measure()
    peaks, seconds = figures["peak_by_learners"], figures["seconds_by_learners"]
    rows = [(f"{n} learners", f"{peak:.3f}", f"{seconds[n]:.2f}") for n, peak in peaks.items()]
    rows += [
        ("4 learners, no start-up", "", f"{figures['seconds']:.2f}"),
        ("4 learners, plainly", "", f"{figures['plain_seconds']:.2f}"),
    ]
    targets = (
        Target("time_ratio", figures["time_ratio"], "<=", 1.5),
        Target("peak_rss_over_fragment", figures["peak_rss_over_fragment"], "<=", 1.5),
        Target("change from 4 to 64 learners", abs(peaks["64"] / peaks["4"] - 1), "<=", 0.05),
        Target("time is linear in learners (1: yes)", float(measuring.is_linear(seconds)), ">=", 1),
    )
    table = Table(("merge",), ("peak over fragment", "seconds"), tuple(rows))
    return Measured(figures, targets, table)
