"""The benchmarks by name, and what MLflow is told of one.

Each is a module with `measure(order) -> Measured`, loaded when it is asked for: some need torch, some must not have it.
"""

from __future__ import annotations

import importlib
import json
import re
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from infra.tracking import FINISHED, git_commit, open_tracker
from tasks.figures import Measured, Order, scalars

EXPERIMENT = "benchmarks"
Name = Literal[
    "quality", "codecs", "overhead", "peer", "store", "merge", "latency", "start", "chaos"
]
MODULES: Mapping[Name, str] = {
    "quality": "tasks.quality",
    "codecs": "tasks.codec_gaps",
    "overhead": "tasks.overhead",
    "peer": "tasks.peering",
    "store": "tasks.payload_costs",
    "merge": "tasks.merge_costs",
    "latency": "tasks.answer_times",
    "start": "tasks.start_times",
    "chaos": "tasks.goodput",
}
assert set(MODULES) == set(get_args(Name)), "a name without a module, or the other way round"


@dataclass(frozen=True, slots=True)
class Point:
    """One figure as MLflow takes it."""

    key: str
    value: float
    step: int
    at: float


def measure(name: Name, order: Order) -> Measured:
    """Run one benchmark.

    Raises:
        ConfigError: something it needs is not installed.
    """
    measured = importlib.import_module(MODULES[name]).measure(order)
    assert isinstance(measured, Measured)
    return measured


def log(name: Name, order: Order, measured: Measured, uri: str) -> str:
    """Leave one run in MLflow's experiment "benchmarks", and return its id.

    Raises:
        TrackingUnavailable: MLflow did not answer.
    """
    tracker, now = open_tracker(uri), time.time()
    mark = {"diloco.benchmark": name, "diloco.attempt": uuid.uuid4().hex}
    found = tracker.find_or_create(EXPERIMENT, name, mark, None)
    asked = {"benchmark": name, "seeds": order.seeds, "tokens": order.tokens}
    tracker.log_params(found.run_id, asked)
    points = [Point(_metric(key), value, 0, now) for key, value in scalars(measured.figures)]
    tracker.log_points(found.run_id, points)
    tags = {"diloco.targets": measured.missed() or "met", "diloco.git_sha": git_commit()}
    tracker.set_tags(found, {key: value for key, value in tags.items() if value is not None})
    tracker.log_text(found.run_id, as_json(measured), "figures.json")
    tracker.end(found.run_id, FINISHED)
    return found.run_id


def as_json(measured: Measured) -> str:
    """Return the figures as a JSON document."""
    return json.dumps(measured.figures, indent=2, allow_nan=False) + "\n"


def _metric(key: str) -> str:
    """Return a name that MLflow allows."""
    return re.sub(r"[^\w\-. /]", "", key)
