"""Memory and time of one merge by the real synchronizer, in a process of its own. No torch.

`python -m tasks.measuring prepare FOLDER LEARNERS` writes a run with one 64 MB fragment and that many contributions;
`python -m tasks.measuring merge FOLDER` merges them and prints the figures as JSON. `measure` runs both for several
numbers of learners, and `tasks.plain_merging` for the time beside a plain merge.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
import time
from typing import Any

import numpy as np

from infra.arrays import write_arrays
from infra.store import open_store
from islands import names
from islands.config import RunConfig
from islands.contributions import Contribution
from islands.fragments import lay_out, layout_digest
from islands.ledger import FragmentClock, LearnerRecord
from islands.merging import tensor_norms
from islands.sections import IslandConfig, SyncConfig
from islands.types import Manifest, Position
from islands.versions import layouts_to_json
from tasks import records
from tasks.merging import Synchronizer
from tasks.publishing import publish_first
from tasks.runs import Run, open_run

NUM_TENSORS, TENSOR_ELEMENTS = 16, 2**20  # 64 MiB of float32
NUM_LEARNERS = (4, 8, 64)
RUN_ID = "merge"


def measure() -> dict[str, Any]:
    """Return a merge's time over a plain one's, its peak memory over the fragment, and seconds by number of learners.

    Memory and seconds come from a fresh process per number of learners, and count all that it does beyond importing
    the synchronizer.
    """
    rows = {}
    for num_learners in NUM_LEARNERS:
        with tempfile.TemporaryDirectory(prefix="diloco-merge-") as folder:
            _module("tasks.measuring", "prepare", folder, str(num_learners))
            rows[str(num_learners)] = json.loads(_module("tasks.measuring", "merge", folder))
    with tempfile.TemporaryDirectory(prefix="diloco-merge-") as folder:
        beside: dict[str, Any] = json.loads(_module("tasks.plain_merging", folder))
    peaks = {n: row["peak_over_fragment"] for n, row in rows.items()}
    return beside | {
        "peak_rss_over_fragment": max(peaks.values()),
        "peak_by_learners": peaks,
        "seconds_by_learners": {n: row["seconds"] for n, row in rows.items()},
    }


def is_linear(seconds_by_learners: dict[str, float]) -> bool:
    """Say whether the most learners take no longer, per learner, than the fewest."""
    shares = {int(n): seconds / int(n) for n, seconds in seconds_by_learners.items()}
    return shares[max(shares)] <= shares[min(shares)]


def write_run(folder: str, num_learners: int, tensor_elements: int) -> tuple[Run, str]:
    """Write a run of one fragment of 16 tensors and as many islands; return it with the digest of version 0."""
    islands = tuple(IslandConfig(name=f"i{i:03d}") for i in range(num_learners))
    sync = SyncConfig(
        num_fragments=1, chunk_bytes=4 * 2**20, min_learners=num_learners, grace_fraction=0.0
    )
    config = RunConfig(store=f"file://{folder}", durable=False, islands=islands, sync=sync)
    shapes = {f"t{t:02d}": (tensor_elements,) for t in range(NUM_TENSORS)}
    store = open_store(config.store, durable=False).within(RUN_ID)
    nothing = write_arrays(
        store, names.payload_folder(names.RUN, "a-0"), {"held_out": np.zeros(1, np.uint8)}
    )
    body = {
        "config": config.model_dump(mode="json"),
        "layouts": layouts_to_json(lay_out(shapes, embeddings=(), num_fragments=1)),
        "data": {"payload": nothing.to_json()},
    }
    records.write(store, names.RUN, body)
    run = open_run(config.store, RUN_ID)
    layout = run.layouts[0]
    values = np.random.default_rng(0).standard_normal(layout.size, dtype=np.float32)
    digest = publish_first(run, layout, values, lambda: "a-0")
    for island in islands:
        records.write(run.store, names.incarnation(island.name, 0), {"listed": []})
    return run, digest


def prepare(folder: str, num_learners: int) -> None:
    """Write the run. Its contributions share one payload on disk: a merge reads it once per learner all the same."""
    run, base_digest = write_run(folder, num_learners, TENSOR_ELEMENTS)
    layout, generator = run.layouts[0], np.random.default_rng(1)
    delta = 0.01 * generator.standard_normal(layout.size, dtype=np.float32)
    payload = write_arrays(
        run.store,
        "payloads/inbox/f0000/shared/a-0",
        {"delta": delta},
        chunk_elements=run.chunk_elements,
    )
    norms = tensor_norms(delta, layout)
    for island in run.config.islands:
        offer = offer_of(
            run, island.name, 0, base_digest, payload=payload, norms=norms, step_seconds=1.0
        )
        records.write(run.store, offer.name, offer.to_json())


def offer_of(
    run: Run,
    learner: str,
    base: int,
    base_digest: str,
    *,
    payload: Manifest,
    norms: tuple[float, ...],
    step_seconds: float,
) -> Contribution:
    """Return a contribution on version `base` by a learner that trains 24 tokens in 24 steps per version."""
    layout, start, stop = run.layouts[0], Position(0, 24 * base), Position(0, 24 * (base + 1))
    clock = FragmentClock(base, base_digest, start, 0, 24, 24, stop, 24, 24, offered=24 * base)
    return Contribution(
        learner=learner,
        fragment=0,
        base_version=base,
        base_digest=base_digest,
        start=start,
        stop=stop,
        num_tokens=24,
        num_steps=24,
        offered_before=24 * base,
        norms=norms,
        step_seconds=step_seconds,
        layout=layout_digest(layout),
        codec="float32",
        payload=payload,
        record=LearnerRecord(learner, stop, stop.step, stop.step, (clock,)),
    )


def merge(folder: str) -> dict[str, float]:
    """Merge what `prepare` wrote; return peak memory beyond the start in fragments, and seconds."""
    before = _peak_bytes()
    start = time.perf_counter()
    run: Run = open_run(f"file://{folder}", RUN_ID)
    polled = Synchronizer(run, lambda: "a-1", stamp=lambda: 0.0).poll(now=0.0)
    seconds = time.perf_counter() - start
    assert polled.published == ((0, 1),), polled
    return {
        "peak_over_fragment": (_peak_bytes() - before) / (4 * run.layouts[0].size),
        "seconds": seconds,
    }


def _module(*arguments: str) -> str:
    command = [sys.executable, "-m", *arguments]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout


def _peak_bytes() -> int:
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


if __name__ == "__main__":
    if sys.argv[1] == "prepare":
        prepare(sys.argv[2], int(sys.argv[3]))
    else:
        json.dump(merge(sys.argv[2]), sys.stdout)
