"""What died is called dead, and a `train` that crashed is started again. Nobody serves here."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import State, StateType

from flows.train import _name
from infra import automations, deployments, settings
from infra.deployments import FlowRun, RunState
from infra.services import Services
from islands.types import StoreUnavailable
from tasks import history, reviving, stopping, trainers
from tasks.records import new_attempt
from tasks.reviving import Reviver
from tasks.runs import Run
from tests import runs

pytest_plugins = ["tests.prefect_server"]
pytestmark = pytest.mark.slow


@pytest.fixture
def run(tmp_path: Path, prefect_api: Services) -> Run:
    return runs.start(runs.tiny_config(tmp_path, "pipeline.max_restarts=2")).run


@pytest.fixture
def _own_server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Have the environment say what the process that serves is told where the server is its own."""
    monkeypatch.setenv(settings.HOME, str(tmp_path))
    monkeypatch.setenv(settings.PREFECT_HOME, str(tmp_path / "prefect"))


def train(run: Run, *, enlists: bool = True, kind: str = "CRASHED") -> FlowRun:
    """Start a flow run of `train` as the command line does, let it enlist, and end it."""
    config = run.config.model_copy(update={"store": run.store_url})
    flow_run = reviving.start(config, run.run_id, num_known=trainers.count(run), resume=True)
    if enlists:
        enlist(run, flow_run)
    end(flow_run, kind)
    return look_up(flow_run)


def enlist(run: Run, flow_run: str) -> None:
    trainers.enlist(run, flow_run, new_attempt, stamp=time.time)


def end(flow_run: str, kind: str, message: str = "the test says so") -> None:
    with get_client(sync_client=True) as client:
        client.set_flow_run_state(
            flow_run, State(type=StateType(kind), message=message), force=True
        )


def look_up(flow_run: str) -> FlowRun:
    with get_client(sync_client=True) as client:
        return deployments._flow_run(client.read_flow_run(flow_run))


def revived(dead: FlowRun) -> FlowRun:
    """Revive, and return the flow run that was started."""
    told = reviving.revive(dead)
    assert told.startswith("started again, as flow run "), told
    return look_up(told.rpartition(" ")[2])


def test_a_crashed_train_is_started_again_once_for_the_same_run(run: Run) -> None:
    dead = train(run)
    second = revived(dead)
    assert second.id != dead.id
    assert (second.flow, second.name, second.state.kind) == ("train", "train r", "SCHEDULED")
    assert (second.parameters["run"], second.parameters["resume"]) == ("r", True)
    assert second.parameters["config"]["store"] == run.store_url
    assert revived(dead).id == second.id
    assert (reviving.is_heir(second.tags), reviving.is_heir(dead.tags)) == (True, False)


def test_who_found_a_name_for_its_run_itself_is_started_again_for_that(run: Run) -> None:
    dead = train(run)
    nameless = FlowRun(
        dead.id, "train", "train r", {**dead.parameters, "run": None}, dead.tags, dead.state
    )
    assert revived(nameless).parameters["run"] == "r"


def test_a_stopped_run_and_one_that_another_looks_after_are_left_alone(run: Run) -> None:
    first, second = train(run), train(run)
    assert "a later one looks after the run" in reviving.revive(first)
    stopping.ask(run, is_stop=True, reason="a test", mark="a-1")
    assert "the run was asked to stop; `diloco resume r`" in reviving.revive(second)
    stopping.let_go_on(run, new_attempt)
    assert revived(second).state.kind == "SCHEDULED"


def test_a_finished_run_and_one_that_was_never_created_are_left_alone(
    tmp_path: Path, prefect_api: Services
) -> None:
    run = runs.train(runs.tiny_config(tmp_path, "total_tokens=300"))
    dead = train(run)
    assert "the run has ended" in reviving.revive(dead)
    elsewhere = {**dead.parameters, "run": "nosuchrun"}
    told = reviving.revive(FlowRun(dead.id, "train", dead.name, elsewhere, dead.tags, dead.state))
    assert "run must exist" in told
    unnamed = {**dead.parameters, "run": None}
    told = reviving.revive(FlowRun(dead.id, "train", _name(), unnamed, dead.tags, dead.state))
    assert "a run id must be" in told


def test_a_run_whose_store_cannot_be_opened_for_now_is_judged_later(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead = train(run)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    elsewhere = {**dead.parameters, "config": {"store": "s3://bucket/runs"}}
    with pytest.raises(StoreUnavailable, match="must answer when it is opened"):
        reviving.revive(FlowRun(dead.id, "train", dead.name, elsewhere, dead.tags, dead.state))


def test_restarts_without_a_merge_are_limited_whether_one_enlists_or_not(run: Run) -> None:
    dead = train(run)  # max_restarts = 2
    second = revived(dead)
    end(second.id, "CRASHED")  # before it could enlist
    third = revived(look_up(second.id))
    assert third.id not in (dead.id, second.id)
    enlist(run, third.id)  # two in a row enlisted at as many merges
    fourth = revived(third)
    end(fourth.id, "CRASHED")
    told = reviving.revive(look_up(fourth.id))
    assert "pipeline.max_restarts allows 2 restarts in a row" in told


def test_a_crash_is_judged_once_and_again_where_the_answer_is_lost(run: Run) -> None:
    said: list[str] = []
    reviver = Reviver(said.append)
    dead = train(run)
    reviver.look(now=0.0)
    ours = [text for text in said if text.startswith("train r crashed: started again")]
    assert len(ours) >= 1
    num_said = len(said)
    reviver.look(now=1.0)
    assert len(said) == num_said
    assert dead.id in reviver.judged


@contextmanager
def process_of(flow_run: str) -> Iterator[None]:
    """Run a process that looks like the one that executes a flow run."""
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", "import time; time.sleep(100)", "prefect.engine"],
        env={**os.environ, "PREFECT__FLOW_RUN_ID": flow_run},
    )
    try:
        yield
    finally:
        process.kill()
        process.wait()


def island(run: Run, name: str, kind: str, message: str = "") -> str:
    parameters = {"store": run.store_url, "run": run.run_id, "island": name}
    flow_run = deployments.start("island", parameters)
    end(flow_run, kind, message)
    return flow_run


@pytest.mark.usefixtures("_own_server")
def test_flow_runs_without_a_process_are_called_what_has_become_of_them(run: Run) -> None:
    history.write_off(run, "west", stamp=time.time)
    lost, done = island(run, "east", "RUNNING"), island(run, "west", "RUNNING")
    cancelled, alive = island(run, "north", "CANCELLING"), island(run, "north", "RUNNING")
    with process_of(alive):
        reviver = Reviver(lambda text: None)
        reviver.look(now=0.0, patience_seconds=10.0)
        assert deployments.state_of(lost).kind == "RUNNING"
        reviver.look(now=10.0, patience_seconds=10.0)
    kinds = [deployments.state_of(x).kind for x in (lost, done, cancelled, alive)]
    assert kinds == ["CRASHED", "COMPLETED", "CANCELLED", "RUNNING"]
    assert "its process is gone" in deployments.state_of(lost).message


@pytest.mark.usefixtures("_own_server")
def test_one_that_only_lost_its_heartbeats_runs_again_and_is_not_replaced(run: Run) -> None:
    dead = train(run, kind="RUNNING")
    end(dead.id, "CRASHED", automations.SILENT)
    said: list[str] = []
    with process_of(dead.id):
        Reviver(said.append).look(now=0.0)
    assert deployments.state_of(dead.id).kind == "RUNNING"
    assert said[0] == "train r lives: only its heartbeats had been lost"
    assert not any("train r crashed: started again" in text and dead.id in text for text in said)
    assert trainers.count(run) == 1


def test_where_the_server_is_not_our_own_nobody_is_called_dead(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(settings.PREFECT_HOME, raising=False)
    flow_run = island(run, "east", "RUNNING")
    Reviver(lambda text: None).look(now=0.0, patience_seconds=0.0)
    assert deployments.state_of(flow_run).kind == "RUNNING"
    end(flow_run, "COMPLETED")


def test_a_server_that_does_not_answer_is_asked_again(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    from prefect.settings import PREFECT_API_URL, temporary_settings

    said: list[str] = []
    with temporary_settings({PREFECT_API_URL: "http://127.0.0.1:9/api"}):
        Reviver(said.append).look(now=0.0)
    assert len(said) == 1
    assert "looking for what died: Prefect must answer" in said[0]


def test_only_a_crash_by_silence_is_doubted() -> None:
    assert RunState("CRASHED", automations.SILENT).is_silent
    assert not RunState("CRASHED", "Process exited with status code: -9").is_silent
    assert not RunState("FAILED", automations.SILENT).is_silent


def test_whether_a_successor_is_awaited_follows_the_same_rules(run: Run) -> None:
    dead = train(run)
    assert reviving.is_awaited(run, dead.id, 0)
    stopping.ask(run, is_stop=True, reason="a test", mark="a-1")
    assert not reviving.is_awaited(run, dead.id, 0)
