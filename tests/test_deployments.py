"""What Prefect offers of the flows, checked on a real server; nobody serves, so nothing that is started runs."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args
from uuid import uuid4

import httpx
import pytest
from prefect.client.orchestration import PrefectClient, get_client
from prefect.client.schemas.objects import State, StateType
from prefect.client.schemas.responses import DeploymentResponse
from prefect.flows import load_flow_from_entrypoint
from prefect.runner._deployment_registry import DeploymentRegistry
from prefect.runner._scheduled_run_poller import ScheduledRunPoller
from prefect.server.schemas.schedules import CronSchedule, IntervalSchedule
from prefect.settings import PREFECT_API_URL, temporary_settings

from infra import automations, deployments, events
from infra.deployments import RunState
from infra.services import Services
from islands.config import RunConfig
from islands.types import ConfigError, ServiceUnavailable
from tasks.benchmarks import Name

pytest_plugins = ["tests.prefect_server"]
pytestmark = pytest.mark.slow

NOBODY = "http://127.0.0.1:9/api"  # the discard port: nothing listens there
CONFIG: dict[str, Any] = json.loads(RunConfig(store="file:///tmp/runs").model_dump_json())


@pytest.fixture(autouse=True)
def _on_the_server(prefect_api: Services) -> None:
    """Work on the session's server, with all deployments."""


def serve_again(flow: str) -> None:
    """Do to a deployment what a serve process does at its start."""
    deployments._deployment(flow, {}, 300).apply()


def deployment(flow: str) -> DeploymentResponse:
    with get_client(sync_client=True) as client:
        return client.read_deployment_by_name(f"{flow}/{deployments.NAME}")


def request(method: str, path: str, body: object) -> Any:
    with get_client(sync_client=True) as client:
        answer = client._client.request(method, path, json=body)
        answer.raise_for_status()
        return answer.json() if answer.content else None


def changed(section: str, key: str, value: object) -> dict[str, Any]:
    """Return the parameters of `train` with one value of the configuration changed."""
    return {"config": {**CONFIG, section: {**CONFIG[section], key: value}}, "run": "r"}


def end(flow_run: str, kind: StateType, message: str = "") -> None:
    with get_client(sync_client=True) as client:
        client.set_flow_run_state(flow_run, State(type=kind, message=message), force=True)


# --- what is there ---


def test_every_flow_has_its_deployment_with_the_schema_of_its_parameters() -> None:
    assert deployments.are_served()
    schemas = {flow: deployment(flow).parameter_openapi_schema for flow in deployments.FLOWS}
    names = {flow: list((schema or {})["properties"]) for flow, schema in schemas.items()}
    assert names == {
        "train": ["config", "run", "resume", "origin"],
        "island": ["store", "run", "island"],
        "synchronize": ["store", "run", "ring"],
        "evaluate": ["store", "run", "snapshot"],
        "benchmark": ["name", "seeds", "tokens"],
        "chaos": ["store", "run", "faults", "seed", "seconds", "every_seconds", "kinds", "targets"],
    }
    assert all(deployment(flow).enforce_parameter_schema for flow in deployments.FLOWS)


def test_every_flow_is_loaded_by_name_wherever_a_process_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entrypoints = {flow: deployment(flow).entrypoint or "" for flow in deployments.FLOWS}
    monkeypatch.chdir(tmp_path)
    found = {flow: load_flow_from_entrypoint(where).name for flow, where in entrypoints.items()}
    assert found == {flow: flow for flow in deployments.FLOWS}


def test_the_form_of_a_run_knows_bounds_choices_and_descriptions() -> None:
    schema = deployment("train").parameter_openapi_schema or {}
    sections = schema["definitions"]
    assert sections["OuterConfig"]["properties"]["merge"]["enum"] == ["rda", "mean"]
    rate = sections["InnerConfig"]["properties"]["learning_rate"]
    assert (rate["exclusiveMinimum"], rate["maximum"], rate["default"]) == (0, 1, 0.004)
    assert sections["PipelineConfig"]["properties"]["max_restarts"]["maximum"] == 10_000
    assert "pattern" in sections["IslandConfig"]["properties"]["name"]
    assert all(section["additionalProperties"] is False for section in sections.values())
    described = [f for section in sections.values() for f in section["properties"].values()]
    assert all("description" in field for field in described)
    assert all("description" in field for field in schema["properties"].values())


def test_the_form_of_a_benchmark_offers_the_names_and_the_bounds() -> None:
    schema = deployment("benchmark").parameter_openapi_schema or {}
    assert schema["properties"]["name"]["enum"] == [*get_args(Name)]
    assert schema["required"] == ["name"]
    assert schema["properties"]["seeds"]["minimum"] == 1
    with pytest.raises(ConfigError, match="is not one of"):
        deployments.start("benchmark", {"name": "nope"})


def test_a_quorum_starts_a_synchronizer_once_per_key() -> None:
    owned = [found for found in request("POST", "/automations/filter", {}) if found["enabled"]]
    assert len(owned) == 1
    trigger, (action,) = owned[0]["trigger"], owned[0]["actions"]
    assert trigger["expect"] == [events.QUORUM]
    assert trigger["match"] == {"prefect.resource.id": f"{events.RESOURCE}.*"}
    assert trigger["for_each"] == [events.KEY_LABEL]
    assert (trigger["posture"], trigger["threshold"]) == ("Reactive", 1)
    assert action["deployment_id"] == str(deployment("synchronize").id)
    # Templates fill exactly what the flow takes.
    schema = deployment("synchronize").parameter_openapi_schema or {}
    assert set(action["parameters"]) == set(schema["properties"])


def test_an_event_starts_a_synchronizer_and_the_same_key_no_second_one() -> None:
    key = f"r-{uuid4().hex}"
    for _ in range(2):
        events.emit_quorum("file:///tmp/runs", "r", key)
    events.emit_quorum("file:///tmp/runs", "r", f"{key}-next")

    def rings() -> list[str]:
        body = {"flows": {"name": {"any_": ["synchronize"]}}}
        found = request("POST", "/flow_runs/filter", body)
        told = [run["parameters"] for run in found if key in run["parameters"].get("ring", "")]
        assert all(p["store"] == "file:///tmp/runs" and p["run"] == "r" for p in told)
        return sorted(parameters["ring"] for parameters in told)

    expected = [events.unique_key("file:///tmp/runs", k) for k in (key, f"{key}-next")]
    until(lambda: len(rings()) >= 2)
    assert rings() == sorted(expected)


def until(claim: Callable[[], bool], *, seconds: float = 30) -> None:
    limit = time.monotonic() + seconds
    while not claim():
        assert time.monotonic() < limit, "it did not come to that"
        time.sleep(0.2)


def test_evaluate_runs_on_a_schedule_and_nothing_else_does() -> None:
    serve_again("evaluate")
    scheduled = {flow: deployment(flow).schedules for flow in deployments.FLOWS}
    assert [flow for flow, schedules in scheduled.items() if schedules] == ["evaluate"]
    (schedule,) = scheduled["evaluate"]
    assert schedule.active
    assert schedule.schedule.model_dump()["interval"] == timedelta(seconds=300)


@pytest.mark.parametrize(
    "day", [datetime(2026, 3, 28, tzinfo=UTC), datetime(2026, 10, 24, tzinfo=UTC)]
)
def test_a_schedule_has_one_run_per_slot_on_the_days_on_which_summer_time_begins_and_ends(
    day: datetime,
) -> None:
    """The interval it is made with, and a daily 02:30 in Berlin, as a person may set on the page."""
    (ours,) = deployments._deployment("evaluate", {}, 300).schedules
    assert ours.schedule is not None
    interval = IntervalSchedule(**ours.schedule.model_dump())
    slots = asyncio.run(interval.get_dates(600, day))
    seconds = {(later - earlier).total_seconds() for earlier, later in pairwise(slots)}
    assert seconds == {300}
    nightly = CronSchedule(cron="30 2 * * *", timezone="Europe/Berlin")
    nights = asyncio.run(nightly.get_dates(4, day))
    assert [night.day - day.day for night in nights] == [0, 1, 2, 3]


# --- starting ---


@pytest.mark.parametrize(
    ("parameters", "parts"),
    [
        (changed("outer", "merge", "sum"), ("config.outer.merge", "'sum' is not one of")),
        (changed("inner", "learning_rate", 5), ("learning_rate", "5 is greater than the maximum")),
        (changed("sync", "period_steps", 0), ("config.sync.period_steps", "0 is less than")),
        (changed("sync", "perod_steps", 8), ("config.sync", "'perod_steps' was unexpected")),
        (changed("model", "width", "wide"), ("config.model.width", "'wide' is not of type")),
    ],
    ids=["choice", "maximum", "minimum", "unknown", "type"],
)
def test_parameters_that_break_the_schema_are_refused_with_place_and_rule(
    parameters: Mapping[str, Any], parts: tuple[str, str]
) -> None:
    with pytest.raises((ConfigError, ServiceUnavailable)) as caught:
        deployments.start("train", parameters)
    assert all(part in str(caught.value) for part in parts)


def test_a_deployment_that_is_not_there_is_named() -> None:
    with pytest.raises(ServiceUnavailable, match="nosuch/diloco"):
        deployments.start("nosuch", {})


def test_a_key_starts_one_run_however_often_it_is_used() -> None:
    key, parameters = uuid4().hex, {"store": "file:///tmp/runs", "run": "r"}
    first = deployments.start("synchronize", parameters, key=key)
    assert deployments.start("synchronize", parameters, key=key) == first
    assert deployments.start("synchronize", parameters, key=f"{key}-2") != first
    assert deployments.start("synchronize", parameters) != first


# --- looking ---


def test_a_run_is_found_by_flow_and_all_its_tags_while_it_lives() -> None:
    mark = uuid4().hex
    tags = [f"run:{mark}", "island:east"]
    parameters = {"store": "file:///tmp/runs", "run": "r", "island": "east"}
    assert deployments.living_run("island", tags) is None
    first = deployments.start("island", parameters, tags=tags, name="east of r")
    assert deployments.living_run("island", tags) == first
    assert deployments.living_run("island", tags[:1]) == first
    assert deployments.living_run("island", [*tags, "other"]) is None
    assert deployments.living_run("island", [f"run:{mark}", "island:west"]) is None
    assert deployments.living_run("train", tags) is None
    second = deployments.start("island", parameters, tags=tags)
    assert deployments.living_run("island", tags) == second
    end(second, StateType.RUNNING)
    end(second, StateType.CANCELLING)  # it will not go on
    assert deployments.living_run("island", tags) == first
    end(first, StateType.CRASHED)
    assert deployments.living_run("island", tags) is None


def test_a_runs_state_tells_its_kind_its_message_and_whether_it_is_over() -> None:
    flow_run = deployments.start("synchronize", {"store": "file:///tmp/runs", "run": "r"})
    assert deployments.state_of(flow_run).kind == "SCHEDULED"
    for kind in (StateType.PENDING, StateType.RUNNING, StateType.CANCELLING):
        end(flow_run, kind)
        assert not deployments.state_of(flow_run).is_over
    for kind in (StateType.COMPLETED, StateType.FAILED, StateType.CRASHED, StateType.CANCELLED):
        end(flow_run, kind, "as it went")
        assert deployments.state_of(flow_run) == RunState(kind.value, "as it went")
        assert deployments.state_of(flow_run).is_over


def test_failures_are_those_of_tasks_in_flow_runs_with_all_the_tags() -> None:
    tags = [f"run:{uuid4().hex}", "island:east"]
    parameters = {"store": "file:///tmp/runs", "run": "r", "island": "east"}
    flow_run = deployments.start("island", parameters, tags=tags)
    assert deployments.failures(tags) == []
    begun = time.time()
    for number, kind in enumerate(("COMPLETED", "FAILED", "CRASHED")):
        task_run = {"task_key": "watch", "dynamic_key": str(number), "flow_run_id": flow_run}
        request("POST", "/task_runs/", {**task_run, "state": {"type": kind}})
    failed, crashed = deployments.failures(tags)
    assert begun - 1 < failed <= crashed < time.time() + 1
    assert deployments.failures([*tags, "other"]) == []


def test_a_run_gets_another_name() -> None:
    flow_run = deployments.start("synchronize", {"store": "file:///tmp/runs", "run": "r"})
    deployments.rename(flow_run, "another name")
    assert request("GET", f"/flow_runs/{flow_run}", None)["name"] == "another name"


def test_a_run_that_does_not_exist_any_more_is_over() -> None:
    assert deployments.state_of(str(uuid4())).kind == "DELETED"
    assert deployments.state_of(str(uuid4())).is_over


VERBS: dict[str, Callable[[], object]] = {
    "start": lambda: deployments.start("train", {}),
    "state_of": lambda: deployments.state_of(str(uuid4())),
    "living_run": lambda: deployments.living_run("island", ["a"]),
    "failures": lambda: deployments.failures(["a"]),
    "rename": lambda: deployments.rename(str(uuid4()), "x"),
    "newest_run": lambda: deployments.newest_run("island", ["a"]),
    "unfinished_runs": deployments.unfinished_runs,
    "crashed_runs": deployments.crashed_runs,
    "set_state": lambda: deployments.set_state(str(uuid4()), RunState("CRASHED")),
}


@pytest.mark.parametrize("verb", VERBS)
def test_a_server_that_is_not_there_is_an_error_within_seconds(verb: str) -> None:
    begun = time.monotonic()
    with (
        temporary_settings({PREFECT_API_URL: NOBODY}),
        pytest.raises(ServiceUnavailable, match="PREFECT_API_URL"),
    ):
        VERBS[verb]()
    assert time.monotonic() - begun < 15


def test_a_server_that_is_not_there_serves_nothing() -> None:
    with temporary_settings({PREFECT_API_URL: NOBODY}):
        assert not deployments.are_served()


# --- serving again ---


def test_a_schedule_that_a_person_changed_stays_when_the_flows_are_served_again() -> None:
    serve_again("evaluate")
    before = deployment("evaluate")
    path = f"/deployments/{before.id}/schedules/{before.schedules[0].id}"
    request("PATCH", path, {"active": False, "schedule": {"interval": 120}})
    serve_again("evaluate")
    (schedule,) = deployment("evaluate").schedules
    assert schedule.schedule.model_dump()["interval"] == timedelta(seconds=120)
    assert not schedule.active


def test_serving_again_leaves_one_trigger() -> None:
    serve_again("synchronize")
    assert len(request("POST", "/automations/filter", {})) == 1


def test_a_serve_process_outlives_an_outage_of_prefects(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three looks in a row without an answer would end it, and every flow that trains with it."""
    look = ScheduledRunPoller._get_and_submit_flow_runs
    monkeypatch.setattr(ScheduledRunPoller, "_get_and_submit_flow_runs", look)  # as it was, later

    async def nobody() -> None:
        async with PrefectClient(NOBODY) as client:
            rest = "limit_manager resolve_starter runs_task_group storage_objs process_manager state_proposer"
            rest += " hook_runner cancellation_manager get_attempt_conclusion"
            parts: dict[str, Any] = dict.fromkeys(rest.split())  # not reached without an answer
            parts |= {"client": client, "deployment_registry": DeploymentRegistry()}
            poller = ScheduledRunPoller(query_seconds=1, prefetch_seconds=0, **parts)
            await poller._get_and_submit_flow_runs()

    with pytest.raises(httpx.ConnectError):
        asyncio.run(nobody())
    deployments._outlive_outages()
    asyncio.run(nobody())


# --- what has become of them ---


def test_what_works_and_what_crashed_is_told_with_its_flow_and_what_it_was_given() -> None:
    parameters = {"store": "file:///tmp/runs", "run": "r", "island": "east"}
    flow_run = deployments.start("island", parameters, tags=["mark:1"], name="east of r")
    assert flow_run not in {run.id for run in deployments.unfinished_runs()}  # nobody began it
    deployments.set_state(flow_run, RunState("RUNNING", "by hand"))
    found = next(run for run in deployments.unfinished_runs() if run.id == flow_run)
    assert (found.flow, found.name, found.parameters) == ("island", "east of r", parameters)
    assert {"mark:1", automations.TAG} <= set(found.tags)
    assert found.state == RunState("RUNNING", "by hand")
    deployments.set_state(flow_run, RunState("CRASHED", "by hand"))
    assert flow_run in {run.id for run in deployments.crashed_runs("island")}
    assert flow_run not in {run.id for run in deployments.crashed_runs("train")}
    deployments.set_state(flow_run, RunState("RUNNING", "it lives"))  # whatever it was before
    assert deployments.state_of(flow_run) == RunState("RUNNING", "it lives")
    end(flow_run, StateType.COMPLETED)


def test_the_newest_run_is_found_living_or_dead() -> None:
    tags, parameters = [f"run:{uuid4().hex}"], {"store": "file:///tmp/runs", "run": "r"}
    assert deployments.newest_run("synchronize", tags) is None
    first = deployments.start("synchronize", parameters, tags=tags)
    end(first, StateType.CRASHED, "as it went")
    assert deployments.newest_run("synchronize", tags) == (first, RunState("CRASHED", "as it went"))
    second = deployments.start("synchronize", parameters, tags=tags)
    newest = deployments.newest_run("synchronize", tags)
    assert newest is not None
    assert (newest[0], newest[1].kind) == (second, "SCHEDULED")
