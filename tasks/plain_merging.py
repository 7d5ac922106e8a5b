"""What a merge by the synchronizer costs beyond its arithmetic: side by side with plain files and arrays in memory.

`python -m tasks.plain_merging FOLDER` prints the figures as JSON. Both sides read four contributions of 64 MB and the
parent, fold, step, and write the next version; neither calls fsync, which would add the same to both. The plain side
uses the same functions for the arithmetic, has all its memory beforehand, and knows no checksums, records or verdicts.
No torch.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import sys
import time
from pathlib import Path

import numpy as np

from infra.arrays import ArrayReader
from islands.codecs import STORED_DTYPE, encode
from islands.merging import BLOCK, Vector, fold, nesterov_step, spans
from tasks import records
from tasks.measuring import RUN_ID, prepare
from tasks.merging import Synchronizer
from tasks.runs import Run, open_run

NUM_LEARNERS = 4
NUM_ROUNDS = 21
_NEXT = ("params", "momentum", "public")


def compare(folder: Path, num_rounds: int = NUM_ROUNDS) -> dict[str, float]:
    """Return the median ratio of the times of the two sides, "time_ratio", and both medians in seconds.

    The sides take turns at being first. One more round comes before and is not counted.
    """
    prepare(str(folder / "run"), NUM_LEARNERS)
    plain = PlainMerge(open_run(f"file://{folder}/run", RUN_ID), folder / "plain")
    pairs = []
    for index in range(num_rounds + 1):
        if index % 2:
            ours = _seconds_of_synchronizer(folder)
            pairs.append((ours, plain.seconds()))
        else:
            theirs = plain.seconds()
            pairs.append((_seconds_of_synchronizer(folder), theirs))
    _require_equal_results(open_run(f"file://{folder}/copy", RUN_ID), plain)
    counted = pairs[1:]
    return {
        "time_ratio": statistics.median(ours / theirs for ours, theirs in counted),
        "seconds": statistics.median(ours for ours, _ in counted),
        "plain_seconds": statistics.median(theirs for _, theirs in counted),
    }


class PlainMerge:
    """The same merge on whole arrays and files that hold nothing else."""

    def __init__(self, run: Run, folder: Path) -> None:
        """Write the run's head and one of its equal contributions as plain files, and make the arrays."""
        folder.mkdir()
        self.folder = folder
        self._layout, self._outer = run.layouts[0], run.config.outer
        self._codec, self._chunk = run.config.sync.codec_down, run.chunk_of(self._layout)
        head, _ = records.find_head(run.store, 0)
        found = records.read_contribution(run.store, run.store.list_names("inbox")[0])
        assert found is not None, "prepare wrote contributions"
        self._norms = found[0].norms
        reader = ArrayReader(run.store, head.payload)
        for array in ("params", "momentum"):
            reader.read(array).tofile(folder / array)
        ArrayReader(run.store, found[0].payload).read("delta").tofile(folder / "delta")
        size = self._layout.size
        self._deltas = [np.zeros(size, np.float32) for _ in range(NUM_LEARNERS)]
        self._params, self._momentum = np.zeros(size, np.float32), np.zeros(size, np.float32)
        self._public = np.zeros(size, STORED_DTYPE[self._codec])

    def seconds(self) -> float:
        """Merge once and return how long it took."""
        for array in _NEXT:
            (self.folder / f"next-{array}").unlink(missing_ok=True)
        start = time.perf_counter()
        for delta in self._deltas:
            _read_into(delta, self.folder / "delta")
        _read_into(self._params, self.folder / "params")
        _read_into(self._momentum, self.folder / "momentum")
        folded = fold(
            self._layout,
            lambda i, low, high: self._deltas[i][low:high],
            weights=[1.0] * NUM_LEARNERS,
            norms=[self._norms] * NUM_LEARNERS,
            chunk_elements=self._chunk,
        )
        self._step(folded.delta)
        for array, values in zip(_NEXT, (self._params, self._momentum, self._public), strict=True):
            values.tofile(self.folder / f"next-{array}")
        return time.perf_counter() - start

    def _step(self, delta: Vector) -> None:
        for first, last in spans(self._layout.size, BLOCK):
            block = slice(first, last)
            self._params[block], self._momentum[block] = nesterov_step(
                self._params[block],
                self._momentum[block],
                delta[block],
                learning_rate=self._outer.learning_rate,
                momentum_factor=self._outer.momentum,
            )
            self._public[block] = encode(self._params[block], self._codec).values


def _seconds_of_synchronizer(folder: Path) -> float:
    """Merge a copy of the run, made of links since no object is ever changed, and return how long it took."""
    copy = folder / "copy"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(folder / "run", copy, copy_function=os.link)
    start = time.perf_counter()
    run = open_run(f"file://{copy}", RUN_ID)
    polled = Synchronizer(run, lambda: "a-1", stamp=lambda: 0.0).poll(now=0.0)
    seconds = time.perf_counter() - start
    assert polled.published == ((0, 1),), polled
    return seconds


def _read_into(values: Vector, path: Path) -> None:
    with open(path, "rb", buffering=0) as file:
        assert file.readinto(values.view(np.uint8).data) == values.nbytes


def _require_equal_results(run: Run, plain: PlainMerge) -> None:
    """Both sides must have made the same numbers, or their times say nothing."""
    head, _ = records.find_head(run.store, 0)
    reader = ArrayReader(run.store, head.payload)
    for array in _NEXT:
        assert reader.read(array).tobytes() == (plain.folder / f"next-{array}").read_bytes(), array


if __name__ == "__main__":
    json.dump(compare(Path(sys.argv[1])), sys.stdout)
