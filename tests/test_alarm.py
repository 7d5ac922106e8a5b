"""The alarm on a real Prefect server: what is wrong is said once, and once that it has ended."""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prefect.client.orchestration import get_client

from infra import events
from infra.services import Services
from islands.limits import HealthConfig
from tasks.alarm import CALM_LOOKS, LOOK_SECONDS, Alarm
from tasks.health import Doctor
from tasks.runs import Run
from tests import runs

pytest_plugins = ["tests.prefect_server"]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
LOG = logging.getLogger("tests.alarm")


def told(run: Run) -> list[tuple[str, str, str, str]]:
    """Return (event, kind, island, message) of all that Prefect was told of the run, oldest first."""
    body = {"filter": {"event": {"prefix": ["diloco.alarm"]}, "order": "ASC"}, "limit": 50}
    with get_client(sync_client=True) as client:
        answer = client._client.request("POST", "/events/filter", json=body)
        answer.raise_for_status()
        found: list[dict[str, Any]] = answer.json()["events"]
    rows = []
    for event in found:
        labels = event["resource"]
        if labels[events.STORE_LABEL] != run.store_url:
            continue
        assert labels["prefect.resource.id"] == f"{events.RESOURCE}.{run.run_id}"
        kind, island = labels[events.KIND_LABEL], labels[events.ISLAND_LABEL]
        rows.append((event["event"], kind, island, event["payload"]["message"]))
    return rows


def test_what_is_wrong_is_said_once_and_so_is_its_end(
    tmp_path: Path, prefect_api: Services, caplog: pytest.LogCaptureFixture
) -> None:
    run = runs.train(runs.tiny_config(tmp_path, *runs.CALM))
    strict = HealthConfig(max_share=0.33)
    sick = replace(run, config=run.config.model_copy(update={"health": strict}))
    alarm = Alarm(Doctor(run), LOG)
    caplog.set_level(logging.INFO, logger=LOG.name)

    alarm.look(run, now=0.0)
    assert caplog.messages == []
    alarm.look(sick, now=LOOK_SECONDS / 2)  # too early to look again
    assert caplog.messages == []
    alarm.look(sick, now=LOOK_SECONDS)
    alarm.look(sick, now=2 * LOOK_SECONDS)
    begun = [*caplog.messages]
    heavy = sorted(text.split()[1].rstrip(":") for text in begun)
    assert heavy
    assert all(text.startswith("dominant ") and "`diloco adjust r --set" in text for text in begun)

    # A number that falls below its limit and rises again is still the same finding.
    for n in range(CALM_LOOKS - 1):
        alarm.look(run, now=(3 + n) * LOOK_SECONDS)
    alarm.look(sick, now=10 * LOOK_SECONDS)
    assert caplog.messages == begun
    for n in range(CALM_LOOKS):
        alarm.look(run, now=(11 + n) * LOOK_SECONDS)
    over = [f"dominant {name}: no longer" for name in heavy]
    assert sorted(caplog.messages[len(begun) :]) == over
    assert alarm.open == {}

    until = time.monotonic() + 30
    while len(seen := told(run)) < 2 * len(heavy):
        assert time.monotonic() < until, seen
        time.sleep(0.2)
    starts = [(events.ALARM, "dominant", text.split()[1].rstrip(":"), text) for text in begun]
    ends = [(events.ALARM_OVER, "dominant", name, f"dominant {name}: no longer") for name in heavy]
    assert sorted(seen) == sorted([*starts, *ends])
