"""Whom Prefect calls dead by itself, on a real server: who has fallen silent, and nobody else."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import pytest
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.objects import State, StateType
from prefect.events import emit_event

from infra import automations, deployments
from infra.services import Services

pytest_plugins = ["tests.prefect_server"]
pytestmark = pytest.mark.slow


@pytest.fixture
def client(prefect_api: Services) -> Iterator[SyncPrefectClient]:
    """Give a client of the session's server, and leave no automation of this test there."""
    with get_client(sync_client=True) as client:
        yield client
        for found in ours(client):
            client.delete_automation(found.id)


def ours(client: SyncPrefectClient) -> list[Any]:
    return client.read_automations_by_name(automations._SILENCE_NAME)


def running(client: SyncPrefectClient) -> str:
    flow_run = deployments.start("synchronize", {"store": "file:///tmp/runs", "run": "r"})
    set_state(client, flow_run, StateType.RUNNING)
    return flow_run


def set_state(client: SyncPrefectClient, flow_run: str, kind: StateType) -> None:
    client.set_flow_run_state(flow_run, State(type=kind), force=True)


def beat(flow_run: str, tag: str = automations.TAG) -> None:
    emit_event(
        "prefect.flow-run.heartbeat",
        resource={"prefect.resource.id": f"prefect.flow-run.{flow_run}"},
        related=[
            {"prefect.resource.id": f"prefect.tag.{tag}", "prefect.resource.role": "tag"},
        ],
    )


def test_there_is_one_such_automation_however_often_flows_are_served(
    client: SyncPrefectClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    automations.watch_heartbeats(client)
    (first,) = ours(client)
    automations.watch_heartbeats(client)
    (again,) = ours(client)
    assert again.id == first.id
    client.create_automation(automations._silence())  # two that serve at the same moment
    automations.watch_heartbeats(client)
    assert len(ours(client)) == 1
    monkeypatch.setattr(automations, "SILENCE_SECONDS", 120)  # another release
    automations.watch_heartbeats(client)
    (changed,) = ours(client)
    assert changed.trigger.within.total_seconds() == 120


def test_a_flow_run_that_falls_silent_crashes_and_one_that_ended_or_is_not_ours_does_not(
    client: SyncPrefectClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(automations, "SILENCE_SECONDS", 10)  # the least there is
    automations.watch_heartbeats(client)
    silent, ended, foreign, lively = (running(client) for _ in range(4))
    for flow_run in (silent, ended, lively):
        beat(flow_run)
    beat(foreign, tag=uuid4().hex)
    time.sleep(1)
    set_state(client, ended, StateType.COMPLETED)
    limit = time.monotonic() + 90
    while not deployments.state_of(silent).is_over:
        assert time.monotonic() < limit, "nobody has missed it"
        beat(lively)
        time.sleep(2)
    assert deployments.state_of(silent).is_silent
    kinds = [deployments.state_of(x).kind for x in (ended, foreign, lively)]
    assert kinds == ["COMPLETED", "RUNNING", "RUNNING"]
