"""How long a synchronizer at work takes to answer: from the commit that makes a merge due to the new version.

`python -m tasks.answering FOLDER` is the synchronizer's process; `measure` is the other side: it writes contributions
to a fragment of 1 MiB, and reads until the version made from them is there. No torch.
"""

from __future__ import annotations

import subprocess
import sys
import time

import numpy as np

from infra.arrays import write_arrays
from islands import names
from islands.merging import tensor_norms
from tasks import records
from tasks.arm import merge
from tasks.measuring import NUM_TENSORS, RUN_ID, offer_of, write_run
from tasks.records import new_attempt
from tasks.runs import Run, open_run

TENSOR_ELEMENTS = 2**18 // NUM_TENSORS
NUM_LEARNERS = 4
# A period of 24 such steps is over before the next round begins: what is measured is never the pace.
STEP_SECONDS = 0.01
_LONGEST_SECONDS = 60.0


def measure(folder: str, num_rounds: int) -> list[float]:
    """Return, for each round, the seconds from the last contribution's commit to the readable new version."""
    run, digest = write_run(folder, NUM_LEARNERS, TENSOR_ELEMENTS)
    process = subprocess.Popen([sys.executable, "-m", "tasks.answering", folder])
    try:
        waits = []
        for version in range(num_rounds):
            contribute(run, version, digest)
            begun = time.perf_counter()
            digest = _await(run, version + 1, begun)
            waits.append(time.perf_counter() - begun)
            time.sleep(30 * STEP_SECONDS)
    finally:
        process.terminate()
        process.wait()
    return waits[1:]  # the first one includes the start of the process


def contribute(run: Run, base: int, digest: str) -> None:
    """Write a contribution of every learner to version `base`; the last commit makes its merge due."""
    layout = run.layouts[0]
    for number, island in enumerate(run.config.islands):
        generator = np.random.default_rng((base, number))
        delta = 0.01 * generator.standard_normal(layout.size, dtype=np.float32)
        folder = f"payloads/inbox/f0000/{island.name}/{base}-0-{24 * (base + 1)}/{new_attempt()}"
        payload = write_arrays(
            run.store, folder, {"delta": delta}, chunk_elements=run.chunk_elements
        )
        norms = tensor_norms(delta, layout)
        offer = offer_of(
            run,
            island.name,
            base,
            digest,
            payload=payload,
            norms=norms,
            step_seconds=STEP_SECONDS,
        )
        records.write(run.store, offer.name, offer.to_json())


def _await(run: Run, version: int, begun: float) -> str:
    """Return the digest of a version once its public values have been read."""
    while time.perf_counter() - begun < _LONGEST_SECONDS:
        if (digest := read_version(run, version)) is not None:
            return digest
        time.sleep(0.002)
    raise TimeoutError(f"{names.version(0, version)} did not come within {_LONGEST_SECONDS:g} s")


def read_version(run: Run, version: int) -> str | None:
    """Read a version's public values as a learner does, and return its digest; None if it is not there yet."""
    found = records.read_commit(run.store, 0, version)
    if found is None:
        return None
    records.read_public(run.store, found[0])
    return found[1]


def main(folder: str) -> None:
    """Merge until terminated."""
    merge(open_run(f"file://{folder}", RUN_ID))


if __name__ == "__main__":
    main(sys.argv[1])
