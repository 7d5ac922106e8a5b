"""What a merge by the synchronizer costs beyond its arithmetic: side by side with plain files and arrays in memory.

`python -m tasks.plain_merging FOLDER` prints the figures as JSON. Both sides read four contributions of 64 MB and the
parent, fold, step, and write the next version; neither calls fsync, which would add the same to both. The plain side
uses the same functions for the arithmetic, and knows no checksums, records or verdicts. No torch.
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
from islands.codecs import encode
from islands.merging import BLOCK, Vector, fold, nesterov_step, spans
from tasks import records
from tasks.measuring import RUN_ID, prepare
from tasks.merging import Synchronizer
from tasks.runs import Run, open_run

NUM_LEARNERS = 4
NUM_ROUNDS = 9


def compare(folder: Path, num_rounds: int = NUM_ROUNDS) -> dict[str, float]:
    """Return the median ratio of the times of the two sides, "time_ratio", and both medians in seconds.

    The sides take turns at being first. One more round comes before and is not counted.
    """
    prepare(str(folder / "run"), NUM_LEARNERS)
    run = open_run(f"file://{folder}/run", RUN_ID)
    plain = folder / "plain"
    norms = _write_plainly(run, plain)
    pairs = []
    for index in range(num_rounds + 1):
        seconds: dict[str, float] = {}
        for side in ("ours", "plain") if index % 2 else ("plain", "ours"):
            if side == "plain":
                seconds[side] = _seconds_plainly(run, plain, norms)
            else:
                seconds[side] = _seconds_of_synchronizer(folder)
        pairs.append((seconds["ours"], seconds["plain"]))
    _require_equal_results(folder, plain)
    counted = pairs[1:]
    return {
        "time_ratio": statistics.median(ours / plain for ours, plain in counted),
        "seconds": statistics.median(ours for ours, _ in counted),
        "plain_seconds": statistics.median(plain for _, plain in counted),
    }


def _seconds_of_synchronizer(folder: Path) -> float:
    """Merge a copy of the run, made of links: its objects are never changed."""
    copy = folder / "copy"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(folder / "run", copy, copy_function=os.link)
    start = time.perf_counter()
    run = open_run(f"file://{copy}", RUN_ID)
    polled = Synchronizer(run, lambda: "a-1", stamp=lambda: 0.0).poll(now=0.0)
    seconds = time.perf_counter() - start
    assert polled.published == ((0, 1),), polled
    return seconds


def _seconds_plainly(run: Run, plain: Path, norms: tuple[float, ...]) -> float:
    (plain / "next").mkdir(exist_ok=True)
    for path in (plain / "next").iterdir():
        path.unlink()
    start = time.perf_counter()
    deltas = [np.fromfile(plain / "delta", np.float32) for _ in range(NUM_LEARNERS)]
    layout, outer = run.layouts[0], run.config.outer
    folded = fold(
        layout,
        lambda i, low, high: deltas[i][low:high],
        weights=[1.0] * NUM_LEARNERS,
        norms=[norms] * NUM_LEARNERS,
        chunk_elements=layout.size,
    )
    params = np.fromfile(plain / "params", np.float32)
    momentum = np.fromfile(plain / "momentum", np.float32)
    public = np.empty(layout.size, np.uint16)
    for first, last in spans(layout.size, BLOCK):
        block = slice(first, last)
        params[block], momentum[block] = nesterov_step(
            params[block],
            momentum[block],
            folded.delta[block],
            learning_rate=outer.learning_rate,
            momentum_factor=outer.momentum,
        )
        public[block] = encode(params[block], run.config.sync.codec_down).values
    for name, values in (("params", params), ("momentum", momentum), ("public", public)):
        values.tofile(plain / "next" / name)
    return time.perf_counter() - start


def _write_plainly(run: Run, plain: Path) -> tuple[float, ...]:
    """Write the head and one contribution as plain files, and return that one's norms."""
    plain.mkdir()
    head, _ = records.find_head(run.store, 0)
    (name, *_) = run.store.list_names("inbox")
    found = records.read_contribution(run.store, name)
    assert found is not None, name
    parts = (
        (head.payload, "params"),
        (head.payload, "momentum"),
        (found[0].payload, "delta"),
    )
    for payload, array in parts:
        ArrayReader(run.store, payload).read(array).tofile(plain / array)
    return found[0].norms


def _require_equal_results(folder: Path, plain: Path) -> None:
    """Both sides must have made the same numbers, or their times say nothing."""
    run = open_run(f"file://{folder}/copy", RUN_ID)
    head, _ = records.find_head(run.store, 0)
    reader = ArrayReader(run.store, head.payload)
    for array in ("params", "momentum", "public"):
        ours: Vector = reader.read(array)
        assert ours.tobytes() == (plain / "next" / array).read_bytes(), array


if __name__ == "__main__":
    json.dump(compare(Path(sys.argv[1])), sys.stdout)
