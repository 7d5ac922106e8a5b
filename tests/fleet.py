"""A real fleet for the tests: `diloco up` as a process, its commands, and Prefect's and MLflow's own interfaces.

Not a test itself. It looks at processes and at HTTP answers, and imports no service: what holds for it holds for users.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infra.processes import command_line, descendants, parent
from infra.processes import with_variable as processes_with

ROOT = Path(__file__).resolve().parent.parent
# Some ten milliseconds a step and some seconds a run: long enough to break something in it.
FLEET = """
total_tokens = {tokens}
[model]
width = 32
num_layers = 1
num_heads = 2
context = 32
[data]
eval_bytes = 2048
[sync]
num_fragments = 2
period_steps = 40
[pipeline]
segment_seconds = 6
checkpoint_seconds = 2
[[islands]]
name = "west"
region = "us-west"
[[islands]]
name = "east"
region = "us-east"
[[islands]]
name = "asia"
region = "ap-south"
"""


@dataclass(frozen=True)
class Fleet:
    """Running services in a folder of their own."""

    folder: Path
    api: str
    mlflow: str
    process: subprocess.Popen[bytes]

    @property
    def store(self) -> str:
        return f"file://{self.folder}/runs"

    def diloco(self, *arguments: str, timeout: float = 100) -> subprocess.CompletedProcess[str]:
        """Run a command to its end."""
        return subprocess.run(
            [sys.executable, "-m", "flows", *arguments],
            cwd=self.folder,
            env=_environment(self.folder),
            capture_output=True,
            text=True,
            timeout=timeout,
        )

    def begin(self, run: str, tokens: int, *settings: str) -> str:
        """Start a run, and return the flow run of `train`."""
        config = self.folder / f"{run}.toml"
        config.write_text(FLEET.format(tokens=tokens))
        source = f'data.source="{self.folder}/text"'
        done = self.diloco(
            "train", str(config), "--run", run, "--detach", "--json", "--set", source, *settings
        )
        assert done.returncode == 0, done.stderr
        return str(json.loads(done.stdout)["flow_run"])

    def start(self, flow: str, parameters: dict[str, Any], name: str) -> str:
        """Start a run of a deployment, as its form does, and return the flow run."""
        found = self.post("/deployments/filter", {})
        deployment = next(d for d in found if d["entrypoint"].startswith(f"flows.{flow}"))
        body = {"parameters": parameters, "name": name, "idempotency_key": uuid.uuid4().hex}
        return str(self.post(f"/deployments/{deployment['id']}/create_flow_run", body)["id"])

    def status(self, run: str) -> dict[str, Any]:
        done = self.diloco("status", run, "--json")
        return dict(json.loads(done.stdout)) if done.returncode == 0 else {}

    def verify(self, run: str) -> None:
        """Demand a balanced ledger."""
        done = self.diloco("verify", run)
        assert done.returncode == 0, done.stdout + done.stderr

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """Ask Prefect's API."""
        request = urllib.request.Request(
            f"{self.api}{path}",
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        return json.loads(_patient(request) or b"null")

    def ask_mlflow(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Ask MLflow's API."""
        request = urllib.request.Request(
            f"{self.mlflow}/api/2.0/mlflow/{path}",
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            return dict(json.loads(answer.read()))

    def scores(self, run: str) -> dict[str, bytes]:
        """Return a run's evaluations by name."""
        folder = self.folder / "runs" / run / "evaluations" / "held-out"
        return {path.name: path.read_bytes() for path in folder.glob("*.json")}

    def flow_runs(
        self, prefix: str, *, with_scheduled: bool = False, having: str = ""
    ) -> list[dict[str, Any]]:
        """Return the flow runs whose name begins so, and has another part too, oldest first."""
        wanted: dict[str, Any] = {"sort": "EXPECTED_START_TIME_ASC", "limit": 200}
        if having or prefix:
            wanted["flow_runs"] = {"name": {"like_": having or prefix}}
        found = self.post("/flow_runs/filter", wanted)
        return [
            run
            for run in found
            if run["name"].startswith(prefix)
            and (with_scheduled or run["state_type"] != "SCHEDULED")
        ]

    def state(self, flow_run: str) -> str:
        return str(json.loads(_patient(f"{self.api}/flow_runs/{flow_run}"))["state_type"])

    def wait_for(self, flow_run: str, *, seconds: float = 200) -> str:
        """Wait for the end of a flow run and return its state."""
        states = ("COMPLETED", "FAILED", "CRASHED", "CANCELLED")
        wait_until(lambda: self.state(flow_run) in states, seconds)
        return self.state(flow_run)

    def process_of(self, flow_run: str) -> int | None:
        """Return the process that executes a flow run."""
        running = processes_with("PREFECT__FLOW_RUN_ID")
        found = [pid for pid, its in running.items() if its == flow_run]
        return next((pid for pid in found if "prefect.engine" in command_line(pid)), None)

    def processes(self) -> list[int]:
        """Return all that was started with this fleet's home, at whatever remove."""
        return [pid for pid in processes() if is_of(pid, self.folder)]

    def service(self, command: str) -> list[int]:
        """Return the process of a service and what descends from it, without its guard; empty while it is away."""
        found = [pid for pid in self.processes() if command in command_line(pid)]
        guards = [pid for pid in found if "guard.py" in command_line(pid)]
        own = next((pid for pid in found if parent(pid) in guards), None)
        return [] if own is None else [own, *descendants(own)]

    def is_well(self, name: str) -> bool:
        """Say whether Prefect or MLflow answers."""
        url = f"{self.api}/health" if name == "Prefect" else f"{self.mlflow}/health"
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
        return False

    def learner(self, run: str, island: str) -> tuple[int, int]:
        """Return (incarnation, process) of an island's newest learner; (-1, 0) before the first."""
        folder = self.folder / "runs" / run / "learners" / island
        numbers = [int(path.stem) for path in folder.glob("[0-9]*.json")]
        if not numbers:
            return -1, 0
        body = json.loads((folder / f"{max(numbers)}.json").read_text())["body"]
        return max(numbers), int(body["where"]["process"])

    def versions(self, run: str) -> int:
        """Return how many merges a run has had."""
        commits = (self.folder / "runs" / run / "versions").glob("*/v*.json")
        return sum(path.name != "v00000000.json" for path in commits)

    def has_finished(self, run: str) -> bool:
        return (self.folder / "runs" / run / "finished.json").exists()


@contextlib.contextmanager
def fleet(folder: Path, *, evaluate_seconds: int = 20) -> Iterator[Fleet]:
    """Start services and stop them; nothing may be left of them."""
    record = folder / "home" / "services.json"
    record.unlink(missing_ok=True)  # of services that were killed
    with (folder / "up.log").open("wb") as log:
        command = [sys.executable, "-m", "flows", "up", "--evaluate-seconds", f"{evaluate_seconds}"]
        process = subprocess.Popen(
            command, cwd=folder, env=_environment(folder), stdout=log, stderr=subprocess.STDOUT
        )
    try:
        wait_until(lambda: record.exists() or process.poll() is not None, 240)
        assert process.poll() is None, (folder / "up.log").read_text()
        addresses = json.loads(record.read_text())
        yield Fleet(folder, addresses["prefect_api_url"], addresses["mlflow_url"], process)
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(timeout=100)
        left = [pid for pid in processes() if is_of(pid, folder)]
        assert left == [], [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in left]


def _patient(request: urllib.request.Request | str) -> bytes:
    """Return the answer of Prefect's API, which is asked again while it is too busy, or away for a moment."""
    ends = time.monotonic() + 90
    while True:
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                return bytes(answer.read())
        except urllib.error.HTTPError as exc:
            if exc.code != 503 or time.monotonic() > ends:
                raise
            exc.close()
        except OSError:
            if time.monotonic() > ends:
                raise
        time.sleep(1)


def processes() -> list[int]:
    return [int(path.name) for path in Path("/proc").glob("[0-9]*")]


def is_of(pid: int, folder: Path) -> bool:
    """Say whether a process was started, at whatever remove, with this fleet's home."""
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False
    return f"DILOCO_HOME={folder}/home".encode() in variables and pid != os.getpid()


def wait_until(claim: Callable[[], object], seconds: float) -> None:
    """Wait for a claim to hold; fail if it does not in time."""
    ends = time.monotonic() + seconds
    while not claim():
        assert time.monotonic() < ends, f"not within {seconds:g} s"
        time.sleep(0.1)


def _environment(folder: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT")}
    for name in ("MLFLOW_TRACKING_URI", "DILOCO_STORE"):
        kept.pop(name, None)
    # Started in a folder of its own: nothing may depend on being in the project's.
    kept["PYTHONPATH"] = str(ROOT)
    return kept | {"DILOCO_HOME": f"{folder}/home", "DILOCO_STORE": f"file://{folder}/runs"}
