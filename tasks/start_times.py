"""Benchmark `start`: importing the synchronizer's path, and `diloco --help`; medians of five, in seconds."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

from tasks.figures import Measured, Order, Target, lines

NUM_TRIES = 5
_SCRIPT = (
    "import time; t = time.perf_counter(); import tasks.merging; print(time.perf_counter() - t)"
)


def measure(order: Order) -> Measured:
    """Return both medians."""
    imports = [float(_output([sys.executable, "-c", _SCRIPT])) for _ in range(NUM_TRIES)]
    helps = [_seconds([sys.executable, "-m", "flows", "--help"]) for _ in range(NUM_TRIES)]
    figures = {
        "import_merging_seconds": statistics.median(imports),
        "help_seconds": statistics.median(helps),
    }
    targets = (
        Target("import_merging_seconds", figures["import_merging_seconds"], "<", 0.5),
        Target("help_seconds", figures["help_seconds"], "<", 1.0),
    )
    return Measured(figures, targets, lines(figures, {}))


def _output(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _seconds(command: list[str]) -> float:
    start = time.perf_counter()
    _output(command)
    return time.perf_counter() - start
