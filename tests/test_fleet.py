"""Islands, synchronizer and services as real processes: what a person sees. What their deaths cost: `test_chaos.py`."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator

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
    # Scored by the schedule, meanwhile: none is ever scored again.
    wait_until(lambda: services.scores("halted"), 60)
    scores = services.scores("halted")
    done = services.diloco("resume", "halted", "--set", "total_tokens=1_200_000", timeout=200)
    assert done.returncode == 0, done.stderr
    services.verify("halted")
    assert services.status("halted")["is_finished"]
    assert {name: services.scores("halted").get(name) for name in scores} == scores


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


def test_services_whose_starter_is_killed_go_with_all_they_started(services: Fleet) -> None:
    """The last test here: nothing is left of the services after it."""
    services.begin("orphan", 400_000_000)
    wait_until(lambda: services.learner("orphan", "west")[0] == 0, 90)
    services.process.kill()
    wait_until(lambda: not [pid for pid in processes() if is_of(pid, services.folder)], 90)
    services.verify("orphan")
