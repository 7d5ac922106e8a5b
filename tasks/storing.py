"""Speed and size of a payload: ours on local disk against `torch.save` and `torch.load`, side by side.

Each round writes and reads the same numbers both ways, one right after the other and taking turns at being first, so
that what else the machine does falls on both alike. Reads come from the page cache on both sides. Ours ends in a sealed
commit, and its reading compares every byte with that; theirs is one file. torch is imported by `measure` alone.
"""

from __future__ import annotations

import os
import shutil
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from infra.arrays import ArrayReader, write_arrays
from infra.store import open_store
from islands.codecs import STORED_DTYPE, encode
from islands.merging import Vector
from islands.types import manifest_from_json
from tasks import records

NUM_ELEMENTS = 2**26  # 256 MiB of float32
NUM_ROUNDS = 9
WORKS = WRITE, READ, WRITE_WITHOUT_FSYNC = "write", "read", "write_without_fsync"
# Enough that the metadata weighs nothing, few enough for the slowest codec.
_CODED_ELEMENTS = 2**22
_COMMIT = "commit.json"


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to keep a vector: `write(folder, durable)` into a fresh folder, `read(folder)` it back."""

    write: Callable[[Path, bool], None]
    read: Callable[[Path], Vector]


def measure(
    folder: Path, *, num_elements: int = NUM_ELEMENTS, num_rounds: int = NUM_ROUNDS
) -> dict[str, Any]:
    """Return the median ratio of ours over theirs in time, per kind of work, median seconds, and bytes by codec.

    Args:
        folder: an existing folder on the disk to measure; emptied again.
        num_elements: of the float32 vector.
        num_rounds: measured; one more comes first and is not counted.
    """
    values = 0.02 * np.random.default_rng(0).standard_normal(num_elements, dtype=np.float32)
    arms = {"ours": _our_arm(values), "torch": _torch_arm(values)}
    rounds = [_round(folder, arms, values, index) for index in range(num_rounds + 1)][1:]
    figures: dict[str, Any] = {}
    for key in WORKS:
        figures[f"{key}_ratio"] = statistics.median(
            row[key]["ours"] / row[key]["torch"] for row in rounds
        )
        figures[f"{key}_seconds"] = {
            name: statistics.median(row[key][name] for row in rounds) for name in arms
        }
    return figures | {"bytes_ratio": bytes_ratios(_CODED_ELEMENTS)}


def bytes_ratios(num_elements: int) -> dict[str, float]:
    """Return the stored bytes of a payload, metadata and all, by codec, over those of float32."""
    values = 0.02 * np.random.default_rng(0).standard_normal(num_elements, dtype=np.float32)
    store = open_store("memory://")
    stored = {
        codec: write_arrays(store, codec, {"values": encode(values, codec).values}).num_bytes
        for codec in STORED_DTYPE
    }
    return {codec: num_bytes / stored["float32"] for codec, num_bytes in stored.items()}


def _our_arm(values: Vector) -> Arm:
    def write(folder: Path, durable: bool) -> None:
        store = open_store(f"file://{folder}", durable=durable)
        manifest = write_arrays(store, "payload", {"values": values})
        records.write(store, _COMMIT, manifest.to_json())

    def read(folder: Path) -> Vector:
        store = open_store(f"file://{folder}")
        found = records.read(store, _COMMIT)
        assert found is not None, "the commit was written a moment ago"
        return ArrayReader(store, manifest_from_json(found[0])).read("values")

    return Arm(write, read)


def _torch_arm(values: Vector) -> Arm:
    import torch

    tensor = torch.from_numpy(values)

    def write(folder: Path, durable: bool) -> None:
        torch.save({"values": tensor}, folder / "values.pt")
        if durable:
            _fsync(folder / "values.pt")
            _fsync(folder)

    def read(folder: Path) -> Vector:
        found: Vector = torch.load(folder / "values.pt")["values"].numpy()
        return found

    return Arm(write, read)


def _round(
    folder: Path, arms: Mapping[str, Arm], values: Vector, index: int
) -> dict[str, dict[str, float]]:
    """Return seconds by kind of work and arm; the last write is what is read."""
    order = list(arms) if index % 2 else list(arms)[::-1]
    seconds: dict[str, dict[str, float]] = {WRITE: {}, WRITE_WITHOUT_FSYNC: {}, READ: {}}
    for key in (WRITE_WITHOUT_FSYNC, WRITE):
        for name in order:
            place = _emptied(folder / name)
            _touch_memory(values.size)
            start = time.perf_counter()
            arms[name].write(place, key == WRITE)
            seconds[key][name] = time.perf_counter() - start
    for name in order:
        _touch_memory(values.size)
        start = time.perf_counter()
        found = arms[name].read(folder / name)
        seconds[READ][name] = time.perf_counter() - start
        assert np.array_equal(found, values), name
        del found
    for name in arms:
        shutil.rmtree(folder / name)
    return seconds


def _emptied(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return folder


def _touch_memory(num_elements: int) -> None:
    """Use as much memory as a measurement will, and give it back.

    A virtual machine may have handed free memory to its host: who asks first waits for it, up to 1 s for 256 MB, and
    that would be a matter of luck between the arms.
    """
    np.ones(num_elements, np.float32)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
