"""The first acts of `train`: the configuration through its strict door, the run created or reopened, MLflow told."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from prefect import get_run_logger
from prefect.runtime import flow_run

from infra import deployments, settings
from infra.store import open_store
from islands.config import RunConfig, config_from_json
from islands.types import ConfigError, ServiceUnavailable
from tasks import reviving, stopping, tracking, trainers
from tasks.records import new_attempt
from tasks.runs import Run, next_run_id, open_run, require_unfinished
from tasks.sharing import require_shareable


def settled(config: RunConfig | Mapping[str, Any]) -> RunConfig:
    """Return a configuration as the form gave it, checked as every other door checks it.

    Raises:
        ConfigError: rules are broken; one line each.
    """
    plain = config.model_dump(mode="json") if isinstance(config, RunConfig) else config
    text = json.dumps(plain, default=_plain)
    return require_shareable(config_from_json(text, source="the form"))


def open_or_create(
    config: RunConfig | Mapping[str, Any],
    run_id: str | None,
    *,
    resume: bool,
    origin: str | None = None,
    is_heir: bool = False,
) -> Run:
    """Return the run to train: a new one with version 0 of every fragment, or an interrupted one taken up again.

    `is_heir`: it is taken up in the place of a `train` that crashed, so a request to stop, even one made since, holds.

    Raises:
        ConfigError: something is wrong; nothing was created.
    """
    from tasks import creating, origins  # torch

    checked = settled(config)
    # Other processes, in other folders, must come to the same place, and to the same names for it.
    checked = checked.model_copy(update={"store": open_store(checked.store).url})
    if resume:
        if origin:
            raise ConfigError(
                f"origin must be empty with resume, got {origin}; a run goes on from its own state"
            )
        if run_id is None:
            raise ConfigError(
                "run is required with resume, got nothing; name the run to go on with"
            )
        opened = require_unfinished(open_run(checked.store, run_id))
        require_shareable(opened.config)
        creating.complete_run(opened)
        if not is_heir:
            stopping.let_go_on(opened, new_attempt)
        return opened
    source = origins.open_origin(origin, checked.store) if origin else None
    name = run_id or next_run_id(checked.store, "run")
    prepared = creating.prepare_run(checked, name, origin=source)
    return creating.create_run(prepared, creating.attempts_of(prepared))


def is_heir() -> bool:
    """Say whether this flow run takes the place of one that crashed."""
    return reviving.is_heir(flow_run.tags)


def enlist(run: Run) -> int:
    """Announce this flow run as the one that looks after the run from now on, and return its number."""
    return trainers.enlist(run, str(flow_run.id), new_attempt, stamp=time.time)


def name_flow_run(name: str) -> None:
    """Give this flow run a name that says which run it trains; Prefect may be too busy for that."""
    try:
        deployments.rename(str(flow_run.id), name)
    except ServiceUnavailable as exc:
        get_run_logger().warning("%s", exc)


@dataclass(slots=True)
class Ending:
    """How the run ended, as MLflow calls it: "FINISHED", "FAILED" or "KILLED"; empty where it goes on elsewhere."""

    status: str = "FAILED"


@contextmanager
def tracked(run: Run) -> Iterator[Ending]:
    """Keep MLflow up to date from a thread of its own while the block runs; without an address, nothing is done."""
    ending, over = Ending(), threading.Event()
    uri, log = settings.mlflow_tracking_uri(), get_run_logger()
    if uri is None:
        log.info("MLFLOW_TRACKING_URI is not set: nothing is logged there")
        yield ending
        return
    follow = partial(
        tracking.follow,
        run,
        uri=uri,
        is_over=over.is_set,
        ending=lambda: ending.status,
        say=log.warning,
    )
    thread = threading.Thread(target=follow, name="diloco-tracking", daemon=True)
    thread.start()
    try:
        yield ending
    finally:
        over.set()
        thread.join()


def _plain(value: Any) -> Any:
    """Turn what a nested model of the form may hold into plain JSON values."""
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json")
    raise ConfigError(f"a value must be plain, got {type(value).__name__}; write text or a number")
