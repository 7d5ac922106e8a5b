"""Benchmark `store`: a payload of 256 MB in TMPDIR beside `torch.save` and `torch.load`, and its size by codec."""

from __future__ import annotations

import tempfile
from pathlib import Path

from tasks import storing
from tasks.figures import Measured, Order, Table, Target

LIMITED = ("int4", "e3m0")


def measure(order: Order) -> Measured:
    """Return our time over torch's by kind of work, and stored bytes over those of float32 by codec."""
    with tempfile.TemporaryDirectory(prefix="diloco-store-") as folder:
        figures = storing.measure(Path(folder))
    rows = []
    for work in storing.WORKS:
        seconds = figures[f"{work}_seconds"]
        numbers = (seconds["ours"], seconds["torch"], figures[f"{work}_ratio"])
        rows.append((work, *(f"{number:.3f}" for number in numbers)))
    sizes = figures["bytes_ratio"]
    rows += [(f"bytes of {codec}", "", "", f"{ratio:.4f}") for codec, ratio in sizes.items()]
    targets = [
        Target(f"{work}_ratio", figures[f"{work}_ratio"], "<=", 1.0)
        for work in (storing.WRITE, storing.READ)
    ]
    targets += [
        Target(f"bytes of {codec} over float32", sizes[codec], "<=", 0.14)
        for codec in LIMITED
        if codec in sizes
    ]
    table = Table(("work",), ("ours, s", "torch, s", "ratio"), tuple(rows))
    return Measured(figures, tuple(targets), table)
