"""Benchmark `merge`: peak memory of one merge of a 64 MiB fragment, in a fresh process per number of learners."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from typing import Any

from tasks.figures import Measured, Order, Table, Target

NUMBERS_OF_LEARNERS = (4, 8, 64)


def measure(order: Order) -> Measured:
    """Return the peaks, in fragments."""
    figures: dict[str, Any] = {}
    for num_learners in NUMBERS_OF_LEARNERS:
        with tempfile.TemporaryDirectory(prefix="diloco-merge-") as folder:
            command = [sys.executable, "-m", "tasks.measuring"]
            _output([*command, "prepare", folder, str(num_learners)])
            figures[str(num_learners)] = json.loads(_output([*command, "merge", folder]))
    peaks = {n: row["peak_over_fragment"] for n, row in figures.items()}
    rows = tuple((n, f"{peaks[n]:.3f}", f"{row['seconds']:.2f}") for n, row in figures.items())
    targets = (
        Target("peak over fragment, 8 learners", peaks["8"], "<=", 1.5),
        Target("change from 4 to 64 learners", abs(peaks["64"] / peaks["4"] - 1), "<=", 0.05),
    )
    return Measured(
        figures, targets, Table((), ("learners", "peak over fragment", "seconds"), rows)
    )


def _output(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
