"""One learner's steps in a file that another process reads while they are taken. No torch.

The file is a table of float64, mapped into memory by both sides: a row per step, written before the count that makes it
visible. Times are those of `time.perf_counter`, which all processes of a machine share on Linux.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import numpy.typing as npt

COLUMNS = ("begun", "ended", "useful_seconds", "num_tokens")
MOST_STEPS = 200_000
Steps = npt.NDArray[np.float64]  # (steps, columns)


class StepLog:
    """The writer's side. Makes the file; notes this process's id in it."""

    def __init__(self, path: Path) -> None:
        shape = (1 + MOST_STEPS, len(COLUMNS))
        self._table = np.memmap(path, np.float64, mode="w+", shape=shape)
        self._num_steps = 0
        self._table[0, 1] = os.getpid()

    def add(self, begun: float, ended: float, useful_seconds: float, num_tokens: int) -> None:
        """Add one step."""
        self._num_steps += 1
        self._table[self._num_steps] = (begun, ended, useful_seconds, num_tokens)
        self._table[0, 0] = self._num_steps


def read_steps(path: Path) -> Steps:
    """Return a copy of the steps so far; none if there is no file yet."""
    table = _open(path)
    return (
        np.empty((0, len(COLUMNS))) if table is None else np.array(table[1 : 1 + int(table[0, 0])])
    )


def process_of(path: Path) -> int | None:
    """Return the id of the process that writes; None if it has not begun."""
    table = _open(path)
    return None if table is None else int(table[0, 1]) or None


def end_of(complaints: Path) -> str:
    """Say what the file ends with to which the process complained, the standard error of one that writes such logs."""
    text = complaints.read_text(encoding="utf-8", errors="replace")
    return f"what its log ends with says why:\n{text[-2000:]}"


def _open(path: Path) -> npt.NDArray[np.float64] | None:
    size = (1 + MOST_STEPS) * len(COLUMNS) * np.dtype(np.float64).itemsize
    if not path.exists() or path.stat().st_size < size:
        return None
    return np.memmap(path, np.float64, mode="r", shape=(1 + MOST_STEPS, len(COLUMNS)))
