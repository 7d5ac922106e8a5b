"""Islands, synchronizer and services as real processes: what a person sees, and what each of their deaths costs."""

from __future__ import annotations

import json
import os
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fleet import Fleet, fleet, is_of, processes, wait_until
from tests.runs import write_text

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def services(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("fleet")
    write_text(folder / "text", num_documents=40)
    with fleet(folder) as running:
        yield running


def test_two_runs_at_once_keep_apart_and_prefect_and_mlflow_tell_them(services: Fleet) -> None:
    deployments = services.post("/deployments/filter", {})
    evaluate = next(d for d in deployments if d["entrypoint"].startswith("flows.evaluate"))
    assert evaluate["schedules"][0]["schedule"]["interval"] == 20
    first = services.begin("one", 400_000)
    second = services.begin("two", 400_000)
    assert services.wait_for(first) == "COMPLETED"
    assert services.wait_for(second) == "COMPLETED"
    for run in ("one", "two"):
        services.verify(run)
        assert services.versions(run) >= 4
        found = services.status(run)
        assert found["is_finished"]
        assert found["trained"] >= 400_000
        assert {f"{name} of {run}" for name in ("west", "east", "asia")} <= {
            flow_run["name"] for flow_run in services.flow_runs("")
        }
        assert services.flow_runs(f"train {run}")
        assert services.flow_runs(f"synchronize {run}")
    merges = services.post("/task_runs/filter", {"limit": 200})
    names = [task["name"] for task in merges]
    assert any(name.startswith("merge f0 v0→v1") and "west" in name for name in names), names
    assert any(name == "west segment 0" for name in names), names
    _demand_parent_and_children(services, "two")


def _demand_parent_and_children(services: Fleet, run: str) -> None:
    experiments = services.ask_mlflow("experiments/search", {"max_results": 10})["experiments"]
    number = next(e["experiment_id"] for e in experiments if e["name"] == "diloco")
    wanted = {"experiment_ids": [number], "max_results": 200}
    found = services.ask_mlflow("runs/search", wanted)["runs"]
    ours = {r["info"]["run_name"]: r for r in found if r["info"]["run_name"].startswith(run)}
    parts = ("west", "east", "asia", "synchronizer")
    assert set(ours) == {run, *(f"{run}/{part}" for part in parts)}
    metrics = {m["key"] for r in ours.values() for m in r["data"]["metrics"]}
    assert {"train/loss", "sync/staleness", "comm/bytes_up", "run/merged_share"} <= metrics
    assert {"sync/quorum", "eval/bits_per_byte", "train/idle_percent"} <= metrics
    assert {r["info"]["status"] for r in ours.values()} == {"FINISHED"}


def test_a_synchronizer_killed_before_its_first_merge_is_called_again_without_new_work(
    services: Fleet,
) -> None:
    train = services.begin("deaf", 1_000_000)
    islands = ("west", "east", "asia")
    wait_until(lambda: services.flow_runs("synchronize deaf", with_scheduled=True), 90)
    called = services.flow_runs("synchronize deaf", with_scheduled=True)[0]["id"]
    wait_until(lambda: services.process_of(called), 30)
    learners = [services.learner("deaf", name)[1] for name in islands]
    for learner in filter(None, learners):
        os.kill(learner, signal.SIGSTOP)  # nothing more will be pushed
    process = services.process_of(called)
    if process is not None:
        os.kill(process, signal.SIGKILL)
    assert services.versions("deaf") == 0, "the process was too quick to be killed in time"
    try:
        wait_until(lambda: services.versions("deaf") > 0, 60)
    finally:
        for learner in filter(None, learners):
            os.kill(learner, signal.SIGCONT)
    assert len(services.flow_runs("synchronize deaf")) >= 2
    assert services.wait_for(train) == "COMPLETED"
    services.verify("deaf")


def test_worker_island_flow_and_synchronizer_may_each_be_killed_and_only_time_is_lost(
    services: Fleet,
) -> None:
    train = services.begin("hurt", 3_000_000)
    wait_until(lambda: services.versions("hurt") >= 4, 90)
    # The worker: its island's flow begins a new incarnation.
    os.kill(services.learner("hurt", "west")[1], signal.SIGKILL)
    wait_until(lambda: services.learner("hurt", "west")[0] == 1, 60)
    # The island's flow, with cluster and all: train starts it again.
    flow_run = services.flow_runs("east of hurt")[-1]["id"]
    process, learner = services.process_of(flow_run), services.learner("hurt", "east")[1]
    assert process is not None
    os.kill(process, signal.SIGKILL)
    wait_until(lambda: not os.path.exists(f"/proc/{learner}"), 20)
    wait_until(lambda: services.learner("hurt", "east")[0] == 1, 60)
    # The synchronizer, in the middle of its work.
    seen = services.versions("hurt")
    running = [r for r in services.flow_runs("synchronize hurt") if r["state_type"] == "RUNNING"]
    process = services.process_of(running[-1]["id"]) if running else None
    if process is not None:
        os.kill(process, signal.SIGKILL)
    wait_until(lambda: services.versions("hurt") > seen + 2 or services.has_finished("hurt"), 60)
    scores = services.scores("hurt")
    assert services.wait_for(train) == "COMPLETED"
    # Scored by the schedule, meanwhile: none is ever scored again.
    assert scores
    assert {
        name: services.scores("hurt").get(name, data) for name, data in scores.items()
    } == scores
    services.verify("hurt")
    found = services.status("hurt")
    assert found["trained"] >= 3_000_000
    assert found["merged_share"] > 0.3


def test_a_train_that_is_killed_comes_back_by_itself_and_a_second_one_relieves_it(
    services: Fleet,
) -> None:
    first = services.begin("led", 1_500_000)
    wait_until(lambda: services.versions("led") >= 2, 90)
    process = services.process_of(first)
    assert process is not None
    os.kill(process, signal.SIGKILL)
    wait_until(lambda: len(_trainers(services, "led")) == 2, 60)
    done = services.diloco("resume", "led", timeout=200)  # beside the one that lives
    assert done.returncode == 0, done.stderr
    killed, relieved, last = _trainers(services, "led")
    assert services.wait_for(relieved, seconds=30) == "COMPLETED"
    assert (services.state(killed), services.state(last)) == ("CRASHED", "COMPLETED")
    assert len(services.flow_runs("west of led")) == 1  # taken over twice, never started twice
    services.verify("led")


def _trainers(services: Fleet, run: str) -> list[str]:
    """Return the flow runs of `train` that have looked after a run, in order."""
    found = sorted((services.folder / "runs" / run / "trainers").glob("*.json"))
    return [str(json.loads(path.read_text())["body"]["flow_run"]) for path in found]


def test_a_cancelled_run_is_saved_within_thirty_seconds_and_goes_on(services: Fleet) -> None:
    train = services.begin("halted", 4_000_000)
    wait_until(lambda: services.versions("halted") >= 4, 90)
    asked = time.monotonic()
    cancelling = {"state": {"type": "CANCELLING", "name": "Cancelling"}, "force": False}
    services.post(f"/flow_runs/{train}/set_state", cancelling)
    assert services.wait_for(train, seconds=60) == "CANCELLED"
    islands = [services.flow_runs(f"{name} of halted")[-1] for name in ("west", "east", "asia")]
    for island in islands:
        services.wait_for(island["id"], seconds=30)
    assert time.monotonic() - asked < 45
    wait_until(lambda: not _synchronizers(services, "halted"), 30)
    services.verify("halted")
    before = services.status("halted")
    assert not before["is_finished"]
    stopped = [
        json.loads(path.read_text())["body"]["record"]["trained"]
        for path in services.folder.glob("runs/halted/checkpoints/*/*.json")
    ]
    assert stopped
    done = services.diloco("resume", "halted", "--set", "total_tokens=1_200_000", timeout=200)
    assert done.returncode == 0, done.stderr
    services.verify("halted")
    assert services.status("halted")["is_finished"]


def test_diloco_stop_ends_a_run_with_its_state_saved(services: Fleet) -> None:
    train = services.begin("quiet", 4_000_000)
    wait_until(lambda: services.versions("quiet") >= 2, 90)
    done = services.diloco("stop", "quiet")
    assert done.returncode == 0, done.stderr
    assert services.wait_for(train, seconds=60) == "CANCELLED"
    services.verify("quiet")
    page = services.folder / "quiet.html"
    assert services.diloco("report", "quiet", "--to", str(page)).returncode == 0
    assert "west" in page.read_text()


def test_a_form_that_breaks_a_rule_is_refused_and_nothing_is_created(services: Fleet) -> None:
    deployments = services.post("/deployments/filter", {})
    train = next(d for d in deployments if d["entrypoint"].startswith("flows.train"))
    config = dict(train["parameters"]["config"])
    body = {"parameters": {"config": {**config, "outer": {"momentum": 2}}, "run": "wrong"}}
    with pytest.raises(urllib.error.HTTPError) as caught:
        services.post(f"/deployments/{train['id']}/create_flow_run", body)
    assert caught.value.code in (409, 422)
    caught.value.close()
    body = {"parameters": {"config": {**config, "sync": {"min_learners": 9}}, "run": "wrong"}}
    flow_run = services.post(f"/deployments/{train['id']}/create_flow_run", body)["id"]
    assert services.wait_for(flow_run) == "FAILED"
    with urllib.request.urlopen(f"{services.api}/flow_runs/{flow_run}", timeout=30) as answer:
        message = json.loads(answer.read())["state"]["message"]
    assert "sync.min_learners must be <= the number of islands (4), got 9" in message
    assert not (services.folder / "runs" / "wrong").exists()


def _synchronizers(services: Fleet, run: str) -> list[str]:
    found = services.flow_runs(f"synchronize {run}")
    return [r["id"] for r in found if r["state_type"] in ("RUNNING", "PENDING")]


def test_what_is_served_comes_back_after_the_process_that_serves_and_prefect_are_killed(
    services: Fleet,
) -> None:
    services.begin("shaken", 400_000_000)
    wait_until(lambda: services.versions("shaken") >= 2, 90)
    _kill(services, b"flows.serving")
    wait_until(lambda: len(_trainers(services, "shaken")) == 2, 120)
    wait_until(lambda: services.learner("shaken", "west")[0] == 1, 60)
    seen = services.versions("shaken")
    wait_until(lambda: services.versions("shaken") > seen, 60)
    _kill(services, b"prefect")
    seen = services.versions("shaken")
    wait_until(lambda: services.versions("shaken") > seen, 60)
    wait_until(lambda: _answers(services), 60)
    assert len(_trainers(services, "shaken")) == 2  # nobody needed it to train on
    assert services.learner("shaken", "west")[0] == 1
    done = services.diloco("stop", "shaken")
    assert done.returncode == 0, done.stderr
    services.verify("shaken")


def _kill(services: Fleet, module: bytes) -> None:
    """Kill a service's own process, not its guard."""
    start = b"\0-m\0" + module + b"\0"
    (process,) = [
        pid
        for pid in processes()
        if is_of(pid, services.folder)
        and start in Path(f"/proc/{pid}/cmdline").read_bytes()
        and b"guard.py" not in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    os.kill(process, signal.SIGKILL)


def _answers(services: Fleet) -> bool:
    try:
        return bool(services.flow_runs(""))
    except OSError:
        return False


def test_services_whose_starter_is_killed_go_with_all_they_started(services: Fleet) -> None:
    """The last test here: nothing is left of the services after it."""
    services.begin("orphan", 400_000_000)
    wait_until(lambda: services.learner("orphan", "west")[0] == 0, 90)
    services.process.kill()
    wait_until(lambda: not [pid for pid in processes() if is_of(pid, services.folder)], 90)
    services.verify("orphan")
