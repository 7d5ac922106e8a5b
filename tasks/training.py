"""One whole training in this process, on one thread: by the local driver, or data-parallel."""

from __future__ import annotations

from functools import partial
from uuid import uuid4

from islands.config import RunConfig
from tasks import building, creating, evaluating
from tasks.baseline import train_data_parallel
from tasks.local import Driver
from tasks.reporting import status
from tasks.training_pool import Trained


def new_store() -> str:
    """Return the URL of a store in memory that nobody else has."""
    return f"memory://training-{uuid4().hex}"


def train_locally(config: RunConfig) -> Trained:
    """Train a new run to its end by the local driver."""
    building.use_one_thread()
    prepared = creating.prepare_run(config, "r")
    run = creating.create_run(prepared, creating.attempts_of(prepared))
    driver = Driver(
        run,
        partial(building.build_learner, run),
        lambda beat: None,
        partial(evaluating.evaluate, closes=True),
    )
    driver.start()
    while driver.advance():
        pass
    return Trained(evaluating.evaluate(run).bits_per_byte, status(run).merged_share)


def train_joined(config: RunConfig) -> Trained:
    """Train one model on the joined batch of all islands."""
    building.use_one_thread()
    return Trained(train_data_parallel(config, creating.split_text(config)), 1.0)
