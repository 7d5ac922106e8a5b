"""The flow `island`, on a real cluster: what fails again and again is given up, and says why."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from flows.island import island
from infra.services import Services
from islands.types import DamagedObject
from tasks import history, records
from tests import runs

pytest_plugins = ["tests.prefect_server"]
pytestmark = pytest.mark.slow


def test_a_learner_that_fails_at_every_start_is_given_up_after_the_allowed_restarts(
    tmp_path: Path, prefect_api: Services
) -> None:
    run = runs.start(runs.tiny_config(tmp_path, "pipeline.max_restarts=2")).run
    head, _ = records.find_head(run.store, 0)
    run.store.delete(f"{head.payload.folder}/public/c/0")  # whoever begins needs it
    # A flow that never gave up would find that its island has left, and end well.
    rescue = threading.Timer(60.0, lambda: history.write_off(run, "east", stamp=time.time))
    rescue.start()
    try:
        with pytest.raises(DamagedObject, match="is missing"):
            island(run.store_url, run.run_id, "east")
    finally:
        rescue.cancel()
    assert records.newest_incarnations(run.store) == {"east": 2}, "one start and two restarts"
    assert records.departed(run.store) == frozenset()
