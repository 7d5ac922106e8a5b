"""Tracking against a real MLflow server with SQLite, and runs of the local driver."""

from __future__ import annotations

import http.client
import http.server
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import tomllib
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from mlflow import MlflowClient
from mlflow.entities import Run as Tracked

from infra.plots import Labels, Lane, Line, draw_lines, draw_timeline
from infra.tracking import (
    LONGEST_PARAM,
    NUMBERS_PER_TAG,
    TrackingUnavailable,
    flatten,
    open_tracker,
    recall,
)
from islands import metrics, names, vitals
from islands.chaos import Fault, Strike
from islands.config import parse_config
from islands.limits import HealthConfig
from islands.types import ConfigError
from islands.versions import Commit
from tasks import evaluating, records, scores, tracking
from tasks.adjusting import adjust
from tasks.runs import Run, open_run
from tasks.tracking import CURSOR, SCORED, RunTracker, follow, track
from tests.runs import CALM, TINY, finish, start, tiny_config, train

pytestmark = pytest.mark.slow
# Twelve seconds for a call (two attempts of 5 s and the back-off between), and what a loaded machine adds.
BOUND_SECONDS = 30.0
FAULT = 'local.faults=[{island="west", step=8, return_after_steps=5}]'


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    """An MLflow server that can be killed and started again on its port and database."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self.uri = f"http://127.0.0.1:{self.port}"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [
            sys.executable,
            "-m",
            "mlflow",
            "server",
            "--host",
            "127.0.0.1",
            "--workers",
            "1",
        ]
        command += ["--port", str(self.port)]
        command += ["--backend-store-uri", f"sqlite:///{self.folder}/mlflow.db"]
        command += ["--artifacts-destination", str(self.folder / "files")]
        calm = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
        with (self.folder / "server.log").open("ab") as log:
            self.process = subprocess.Popen(
                command,
                env={**os.environ, **calm},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        until = time.monotonic() + 90
        while not self.is_up():
            assert self.process.poll() is None, (self.folder / "server.log").read_text()
            assert time.monotonic() < until, (self.folder / "server.log").read_text()
            time.sleep(0.2)

    def is_up(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.uri}/health", timeout=2) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def kill(self) -> None:
        if self.process is not None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("mlflow"))
    server.start()
    yield server
    server.kill()


@pytest.fixture
def experiment(tmp_path: Path) -> str:
    return tmp_path.name


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A finished run in which one island died and came back."""
    return train(tiny_config(tmp_path_factory.mktemp("run"), FAULT))


Row = tuple[int, int, float]


def lineage(run: Run, fragment: int) -> list[Commit]:
    head, _ = records.find_head(run.store, fragment)
    versions = range(1, head.version + 1)
    return [records.require_commit(run.store, fragment, version)[0] for version in versions]


def expected(run: Run) -> dict[str, dict[str, Counter[Row]]]:
    """Return part -> key -> (step, milliseconds, value), each once, from all commits, sorted by time."""
    rates = {i.name: float(i.batch_size * run.config.model.context) for i in run.config.islands}
    points: list[metrics.Point] = []
    heads = [records.require_commit(run.store, layout.index, 0)[0] for layout in run.layouts]
    rows: list[list[Commit]] = [[] for _ in heads]
    commits = [commit for p in range(len(heads)) for commit in lineage(run, p)]
    for commit in sorted(commits, key=lambda commit: (commit.at, commit.fragment, commit.version)):
        points += metrics.points_of(commit, heads, rates)
        rows[commit.fragment].append(commit)
        points += vitals.window_points(rows[commit.fragment][-vitals.WINDOW :], heads)
        heads[commit.fragment] = commit
    for score in scores.evaluations(run, ()):
        points += metrics.evaluation_points(score)
    found: dict[str, dict[str, Counter[Row]]] = {}
    for p in set(points):
        told = found.setdefault(p.run, {}).setdefault(p.key, Counter())
        told[p.step, int(p.at * 1000), p.value] += 1
    assert len(points) > 100
    return found


def runs_of(uri: str, experiment: str) -> dict[str, Tracked]:
    """Return part -> its run in MLflow; there must be one each."""
    client = MlflowClient(tracking_uri=uri)
    place = client.get_experiment_by_name(experiment)
    assert place is not None
    found = client.search_runs([place.experiment_id])
    parts = {run.data.tags["diloco.part"]: run for run in found}
    assert len(parts) == len(found)
    return parts


def logged(uri: str, experiment: str) -> dict[str, dict[str, Counter[Row]]]:
    client = MlflowClient(tracking_uri=uri)
    return {
        part: {
            key: Counter((m.step, m.timestamp, m.value) for m in history(client, run, key))
            for key in run.data.metrics
        }
        for part, run in runs_of(uri, experiment).items()
    }


def history(client: MlflowClient, run: Tracked, key: str) -> list:  # type: ignore[type-arg]
    return list(client.get_metric_history(run.info.run_id, key))


def files_of(uri: str, run: Tracked, folder: str | None = None) -> set[str]:
    found = MlflowClient(tracking_uri=uri).list_artifacts(run.info.run_id, folder)
    return {item.path for item in found}


# --- what people find in MLflow --------------------------------------------------------------------


def test_a_finished_run_is_told_whole(server: Server, experiment: str, finished: Run) -> None:
    sent = track(finished, server.uri, experiment=experiment)
    assert logged(server.uri, experiment) == expected(finished)
    assert sent == sum(
        sum(rows.values()) for keys in expected(finished).values() for rows in keys.values()
    )
    parts = runs_of(server.uri, experiment)
    names = {part: run.info.run_name for part, run in parts.items()}
    assert names == {
        "run": "r",
        "synchronizer": "r/synchronizer",
        "island/east": "r/east",
        "island/north": "r/north",
        "island/west": "r/west",
    }
    assert {run.info.status for run in parts.values()} == {"FINISHED"}
    parent = parts["run"]
    above = {part: run.data.tags.get("mlflow.parentRunId") for part, run in parts.items()}
    assert above == {part: None if part == "run" else parent.info.run_id for part in parts}
    assert parent.data.params["sync.period_steps"] == "6"
    assert parent.data.params["islands.north.speed"] == "0.7"
    assert parent.data.tags["diloco.quorum"] == "2"
    assert parent.data.tags["diloco.health"] == ""
    assert "health/cosine" in parts["island/east"].data.metrics
    assert parent.data.tags["diloco.software.torch"] == finished.facts["software"]["torch"]
    assert parts["island/east"].data.tags["diloco.region"] == "local"


def test_what_is_wrong_with_a_run_is_a_tag_that_follows_it(
    server: Server, experiment: str, tmp_path: Path
) -> None:
    run = train(tiny_config(tmp_path, *CALM))
    tracker = RunTracker(run, open_tracker(server.uri), experiment)

    def tag() -> str:
        tracker.pass_once()
        return runs_of(server.uri, experiment)["run"].data.tags["diloco.health"]

    assert tag() == ""
    config = run.config.model_copy(update={"health": HealthConfig(max_share=0.33)})
    sick, found = replace(run, config=config), "dominant east, dominant north, dominant west"
    tracker.run = sick
    assert tag() == found
    tracker = RunTracker(sick, open_tracker(server.uri), experiment)  # which finds it so
    assert tag() == found
    tracker.run = run
    assert tag() == ""
    tracker.run = sick
    assert tag() == found


def test_configuration_and_figures_lie_beside_the_parent(
    server: Server, experiment: str, finished: Run, tmp_path: Path
) -> None:
    track(finished, server.uri, experiment=experiment)
    parent = runs_of(server.uri, experiment)["run"]
    assert files_of(server.uri, parent) == {"config.toml", "layouts.json", "figures"}
    pictures = {f"figures/{name}.png" for name in ("loss", "staleness", "shares", "timeline")}
    assert files_of(server.uri, parent, "figures") == pictures
    client = MlflowClient(tracking_uri=server.uri)
    config = Path(client.download_artifacts(parent.info.run_id, "config.toml", str(tmp_path)))
    assert parse_config(config.read_text(), source="MLflow") == finished.config
    picture = Path(
        client.download_artifacts(parent.info.run_id, sorted(pictures)[0], str(tmp_path))
    )
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_run_without_evaluations_and_merges_is_tracked_too(
    server: Server, experiment: str, tmp_path: Path
) -> None:
    driver = start(tiny_config(tmp_path))
    assert track(driver.run, server.uri, experiment=experiment) == 0
    parts = runs_of(server.uri, experiment)
    assert {run.info.status for run in parts.values()} == {"RUNNING"}
    assert files_of(server.uri, parts["run"], "figures")


def test_faults_on_purpose_are_counted_over_merged_tokens_and_told_in_a_tag(
    server: Server, experiment: str, tmp_path: Path
) -> None:
    run = start(tiny_config(tmp_path)).run
    for number, told in enumerate(("west's learner: gone", "train: gone")):
        fault = Fault("kill", "train", after_seconds=1.0)
        strike = Strike(fault, told, 1.75e9 + number, f"m{number}", 1_000 * number)
        records.write(run.store, names.numbered("chaos", number), strike.to_json())
    assert track(run, server.uri, experiment=experiment) == 2
    track(run, server.uri, experiment=experiment)
    assert logged(server.uri, experiment)["run"] == {
        "chaos/faults": Counter(
            {(0, 1_750_000_000_000, 1.0): 1, (1_000, 1_750_000_001_000, 2.0): 1}
        )
    }
    tags = runs_of(server.uri, experiment)["run"].data.tags
    assert tags["diloco.chaos"] == "west's learner: gone; train: gone"


# --- once each ------------------------------------------------------------------------------------


def test_repeated_interrupted_and_second_trackers_double_nothing(
    server: Server, experiment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracking, "COMMITS_PER_ROUND", 4)
    driver = start(tiny_config(tmp_path, FAULT, "total_tokens=3_000"))
    run = driver.run
    first = RunTracker(run, open_tracker(server.uri), experiment)
    while driver.advance() and sum(head.version for head in driver.synchronizer.heads()) < 9:
        pass
    assert first.pass_once(lambda: True) > 0
    assert first.is_behind
    finish(driver)
    # The second one begins where the first one's interrupted pass stood, and both send all the rest.
    second = RunTracker(open_run(run.store_url, run.run_id), open_tracker(server.uri), experiment)
    assert second.pass_once(lambda: True) > 0
    assert first.pass_once() > 0
    assert second.pass_once() > 0
    assert logged(server.uri, experiment) == expected(run)
    assert first.pass_once() == second.pass_once() == 0
    # One whose cursor was lost sends everything again.
    client, parts = MlflowClient(tracking_uri=server.uri), runs_of(server.uri, experiment)
    client.delete_tag(parts["run"].info.run_id, CURSOR)
    client.set_tag(parts["run"].info.run_id, SCORED, "of somebody else")
    assert RunTracker(run, open_tracker(server.uri), experiment).pass_once() > 100
    assert logged(server.uri, experiment) == expected(run)
    assert track(run, server.uri, experiment=experiment) == 0


def test_a_parameter_that_a_resume_changed_keeps_its_first_value_and_the_file_has_the_new_one(
    server: Server, experiment: str, tmp_path: Path
) -> None:
    """MLflow refuses another value for a parameter; that must not keep a run from being told."""
    run = start(tiny_config(tmp_path, "outer.learning_rate=0.70")).run
    track(run, server.uri, experiment=experiment)
    adjust(run, ["outer.learning_rate=0.6", "sync.period_steps=7"])
    track(open_run(run.store_url, run.run_id), server.uri, experiment=experiment)
    parent = runs_of(server.uri, experiment)["run"]
    known = [parent.data.params[key] for key in ("outer.learning_rate", "sync.period_steps")]
    assert known == ["0.7", "6"]
    client = MlflowClient(tracking_uri=server.uri)
    told = Path(client.download_artifacts(parent.info.run_id, "config.toml", str(tmp_path)))
    now = parse_config(told.read_text(), source="MLflow")
    assert (now.outer.learning_rate, now.sync.period_steps) == (0.6, 7)


def test_a_value_that_is_too_long_is_cut_where_everybody_sees_it(
    server: Server, experiment: str
) -> None:
    tracker = open_tracker(server.uri)
    found = tracker.find_or_create(experiment, "x", {"diloco.run": "long"}, None)
    tracker.log_params(found.run_id, {"fits": "a" * LONGEST_PARAM, "long": "b" * 20_000})
    tracker.set_tag(found.run_id, "long", "c" * 20_000)
    params = MlflowClient(tracking_uri=server.uri).get_run(found.run_id).data.params
    assert params == {"fits": "a" * 6000, "long": "b" * 5999 + "…"}
    assert tracker.get_tags(found.run_id)["long"] == "c" * 7999 + "…"


def test_a_child_that_somebody_deleted_is_made_and_filled_again(
    server: Server, experiment: str, finished: Run
) -> None:
    track(finished, server.uri, experiment=experiment)
    lost = runs_of(server.uri, experiment)["island/east"].info.run_id
    MlflowClient(tracking_uri=server.uri).delete_run(lost)
    track(finished, server.uri, experiment=experiment)
    assert runs_of(server.uri, experiment)["island/east"].info.run_id != lost
    assert logged(server.uri, experiment) == expected(finished)


class LossyProxy(http.server.ThreadingHTTPServer):
    """Hands requests on to MLflow; while `is_lossy`, a batch is logged, but its answer never comes back."""

    def __init__(self, port: int) -> None:
        super().__init__(("127.0.0.1", 0), Handing)
        self.target = port
        self.is_lossy = True
        self.num_lost = 0


class Handing(http.server.BaseHTTPRequestHandler):
    server: LossyProxy

    def do_GET(self) -> None:
        self._hand_on()

    def do_POST(self) -> None:
        self._hand_on()

    def do_PUT(self) -> None:
        self._hand_on()

    def _hand_on(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        link = http.client.HTTPConnection("127.0.0.1", self.server.target, timeout=20)
        link.request(self.command, self.path, body, {"Content-Type": "application/json"})
        answer = link.getresponse()
        data = answer.read()
        link.close()
        if self.server.is_lossy and self.path.endswith("/log-batch") and b'"metrics"' in body:
            self.server.num_lost += 1
            self.close_connection = True
            return
        self.send_response(answer.status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        pass


def test_a_batch_whose_answer_was_lost_is_not_doubled(
    server: Server, experiment: str, finished: Run
) -> None:
    with LossyProxy(server.port) as proxy:
        threading.Thread(target=proxy.serve_forever, daemon=True).start()
        uri = f"http://127.0.0.1:{proxy.server_port}"
        tracker = RunTracker(finished, open_tracker(uri), experiment)
        with pytest.raises(TrackingUnavailable, match="logging metrics failed"):
            tracker.pass_once()
        assert proxy.num_lost == 2  # and its one repetition
        assert any(logged(server.uri, experiment).values())
        proxy.is_lossy = False
        assert tracker.pass_once() > 0
        proxy.shutdown()
    known, wanted = logged(server.uri, experiment), expected(finished)
    assert known == wanted


def test_points_from_an_outage_arrive_after_it(
    server: Server, experiment: str, tmp_path: Path
) -> None:
    driver = start(tiny_config(tmp_path))
    tracker = RunTracker(driver.run, open_tracker(server.uri), experiment)
    while driver.advance() and sum(head.version for head in driver.synchronizer.heads()) < 6:
        pass
    assert tracker.pass_once() > 0
    server.kill()
    try:
        run = finish(driver)
        evaluating.evaluate(run)
        began = time.monotonic()
        with pytest.raises(TrackingUnavailable, match=r"127\.0\.0\.1"):
            tracker.pass_once()
        with pytest.raises(TrackingUnavailable):
            track(run, server.uri, experiment=experiment)
        assert time.monotonic() - began < 2 * BOUND_SECONDS
    finally:
        server.start()
    assert tracker.pass_once() > 0
    assert logged(server.uri, experiment) == expected(run)


# --- following ------------------------------------------------------------------------------------


@contextmanager
def following(
    run: Run, uri: str, experiment: str, ending: str = "FINISHED"
) -> Iterator[tuple[threading.Event, list[str]]]:
    """Follow in a thread; yields what ends it and what it says. It has ended when the block is left."""
    over, said, failed = threading.Event(), list[str](), list[BaseException]()

    def work() -> None:
        try:
            follow(
                run,
                uri=uri,
                experiment=experiment,
                is_over=over.is_set,
                ending=lambda: ending,
                say=said.append,
            )
        except BaseException as exc:
            failed.append(exc)
            raise

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield over, said
    finally:
        over.set()
        thread.join()
    assert failed == []


def test_a_followed_run_is_complete_when_it_is_over(
    server: Server, experiment: str, tmp_path: Path
) -> None:
    driver = start(tiny_config(tmp_path))
    with following(driver.run, server.uri, experiment) as (_, said):
        run = finish(driver)
    assert said == []
    assert logged(server.uri, experiment) == expected(run)
    parts = runs_of(server.uri, experiment)
    assert {part.info.status for part in parts.values()} == {"FINISHED"}
    assert files_of(server.uri, parts["run"], "figures")


def test_a_stopped_run_is_marked_killed_and_running_again_when_it_is_resumed(
    server: Server, experiment: str, tmp_path: Path
) -> None:
    driver = start(tiny_config(tmp_path))
    with following(driver.run, server.uri, experiment, "KILLED"):
        for _ in range(30):
            driver.advance()
    assert {r.info.status for r in runs_of(server.uri, experiment).values()} == {"KILLED"}
    tracker = RunTracker(driver.run, open_tracker(server.uri), experiment, is_live=True)
    tracker.pass_once()
    assert {r.info.status for r in runs_of(server.uri, experiment).values()} == {"RUNNING"}


def test_a_server_that_takes_calls_and_never_answers_costs_a_bounded_time(
    finished: Run, experiment: str
) -> None:
    with socket.socket() as hole:
        hole.bind(("127.0.0.1", 0))
        hole.listen(64)
        uri = f"http://127.0.0.1:{hole.getsockname()[1]}"
        began = time.monotonic()
        with pytest.raises(TrackingUnavailable, match="Training does not depend on it"):
            track(finished, uri, experiment=experiment)
        assert time.monotonic() - began < BOUND_SECONDS
        with following(finished, uri, experiment) as (over, said):
            while not said:
                time.sleep(0.1)
            began = time.monotonic()
            over.set()
        assert time.monotonic() - began < BOUND_SECONDS
    assert len(said) == 3  # it is away; it still was at the end; what to do then
    assert "diloco track r" in said[-1]


def test_an_outage_is_said_once_and_so_is_its_end(
    server: Server, experiment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracking, "LONGEST_BACKOFF_SECONDS", 0.5)
    driver = start(tiny_config(tmp_path))
    server.kill()
    try:
        with following(driver.run, server.uri, experiment) as (_, said):
            run = finish(driver)
            time.sleep(1.0)  # several attempts
            server.start()
            until = time.monotonic() + BOUND_SECONDS
            while len(said) < 2 and time.monotonic() < until:
                time.sleep(0.1)
    finally:
        if not server.is_up():
            server.start()
    assert len(said) == 2
    assert "nothing is lost" in said[0]
    assert "answers again" in said[1]
    assert logged(server.uri, experiment) == expected(run)


# --- small parts ----------------------------------------------------------------------------------


def test_an_islands_steps_are_what_its_own_account_says_it_trained(tmp_path: Path) -> None:
    run = train(tiny_config(tmp_path, FAULT, 'retention="all"'))
    num_seen = 0
    for layout in run.layouts:
        for commit in lineage(run, layout.index):
            for entry in commit.consumed:
                found = records.read_contribution(run.store, entry.name)
                assert found is not None
                copied = found[0].record.trained
                # The account is of the moment of the push, a few steps after the copy.
                steps_between = found[0].record.position.step - entry.stop.step
                tokens_per_step = entry.num_tokens // entry.num_steps
                assert metrics.trained_at(entry) == copied - steps_between * tokens_per_step
                num_seen += 1
    assert num_seen > 10


def test_a_strange_address_is_refused_and_no_call_is_made_past_the_deadline() -> None:
    with pytest.raises(ConfigError, match="must be one that MLflow opens"):
        open_tracker("gopher://127.0.0.1")
    tracker = open_tracker(f"http://127.0.0.1:{free_port()}")
    tracker.deadline = time.monotonic() - 1
    with pytest.raises(TrackingUnavailable, match="none left"):
        tracker.get_tags("x")


def test_an_address_is_shown_without_its_password(finished: Run, experiment: str) -> None:
    uri = f"http://me:secret@127.0.0.1:{free_port()}"
    with pytest.raises(TrackingUnavailable) as caught:
        track(finished, uri, experiment=experiment)
    assert "secret" not in str(caught.value)


def test_a_deleted_experiment_is_refused_with_a_remedy(
    server: Server, experiment: str, finished: Run
) -> None:
    client = MlflowClient(tracking_uri=server.uri)
    client.delete_experiment(client.create_experiment(experiment))
    with pytest.raises(ConfigError, match="restore it or choose another name"):
        track(finished, server.uri, experiment=experiment)


def test_numbers_are_remembered_over_as_many_tags_as_they_need(
    server: Server, experiment: str
) -> None:
    tracker = open_tracker(server.uri)
    run_id = tracker.find_or_create(experiment, "x", {"diloco.run": "x"}, None).run_id
    for numbers in ([], [7], list(range(NUMBERS_PER_TAG)), list(range(10**12, 10**12 + 1300))):
        tracker.remember(run_id, "k", numbers)
        assert recall(tracker.get_tags(run_id), "k") == numbers
    assert tracker.find_or_create(experiment, "x", {"diloco.run": "x"}, None).run_id == run_id


@pytest.mark.parametrize("text", ["", "7", "[1.5]", '["a"]', "[1, true]", "{}"])
def test_what_is_no_list_of_numbers_is_remembered_as_none(text: str) -> None:
    assert recall({"k": text}, "k") == []
    assert recall({}, "k") == []


def test_a_tree_is_flattened_by_names_that_are_unique_and_by_index_otherwise() -> None:
    tree = {
        "a": {"b": 1, "none": None},
        "islands": [{"name": "east", "speed": 1.0}, {"name": "west", "speed": 0.5}],
        "faults": [{"step": 3}, {"step": 4}],
        "twins": [{"name": "x"}, {"name": "x"}],
        "plain": [1, 2],
    }
    assert dict(flatten(tree)) == {
        "a.b": "1",
        "islands.east.name": "east",
        "islands.east.speed": "1.0",
        "islands.west.name": "west",
        "islands.west.speed": "0.5",
        "faults.0.step": "3",
        "faults.1.step": "4",
        "twins.0.name": "x",
        "twins.1.name": "x",
        "plain.0": "1",
        "plain.1": "2",
    }
    config = dict(flatten(parse_config(TINY, source="tiny").model_dump(mode="json")))
    assert config["islands.west.start_steps"] == "3.0"
    assert tomllib.loads(TINY)["total_tokens"] == int(config["total_tokens"])
    assert all(json.dumps(value) for value in config.values())


@pytest.mark.parametrize("num_islands", [0, 1, 4, 40])
def test_figures_are_drawn_of_any_number_of_lines(num_islands: int) -> None:
    lines = [Line(f"island-{n}", (0.0, 1e6), (1.0, n + 1.0)) for n in range(num_islands)]
    lines += [Line("scored", (5e5,), (2.0,), "points"), Line("level", (5e5,), (3.0,), "level")]
    lanes = [Lane(f"island-{n}", ((0.0, 50.0),), (1.0, 2.0)) for n in range(num_islands)]
    labels = Labels("Title", "merged tokens", "bits", "note")
    for png in (
        draw_lines(lines, labels),
        draw_lines([], labels),
        draw_timeline(lanes, "Timeline"),
    ):
        assert png.startswith(b"\x89PNG")
