"""Faults of the matrix: each function strikes once in a scene, says what happened, and returns what recovery is.

Not a test itself. What is killed is killed by SIGKILL, without a chance to say goodbye; what stands still is let go on.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from infra import processes
from tests.far_cluster import FarCluster
from tests.fleet import fleet
from tests.scenes import Claim, Scene

KILL, STOP, GO_ON = signal.SIGKILL, signal.SIGSTOP, signal.SIGCONT


# --- a run's own processes ---


def worker_killed(scene: Scene) -> Claim:
    back = scene.is_back("west")
    process = scene.signal(scene.learner("west")[1], KILL)
    scene.struck(f"SIGKILL to west's worker {process}")
    return back


def worker_paused(scene: Scene) -> Claim:
    where = scene.learner("west")[1]
    scene.signal(where, STOP)
    time.sleep(6)
    further = scene.goes_on("west")
    scene.signal(where, GO_ON)
    scene.struck("west's worker stood still for 6 s, and trained on")
    return further


def island_flow_killed(scene: Scene) -> Claim:
    back, learner = scene.is_back("west"), scene.learner("west")[1]
    process = scene.signal(scene.process_of("west"), KILL)
    scene.struck(f"SIGKILL to west's flow {process}; its worker ended with it")
    scene.until(lambda: processes.find(learner) is None, 20)
    return back


def cluster_killed(scene: Scene) -> Claim:
    back, flow = scene.is_back("west"), scene.process_of("west")
    family = [*processes.descendants(flow), flow]
    for process in family:
        os.kill(process, KILL)
    scene.struck(f"SIGKILL to all {len(family)} processes of west at once")
    return back


def all_islands_killed(scene: Scene) -> Claim:
    claims = [scene.is_back(island) for island in scene.islands]
    flows = [scene.process_of(island) for island in scene.islands]
    family = [process for flow in flows for process in (*processes.descendants(flow), flow)]
    for process in family:
        os.kill(process, KILL)
    scene.struck(f"SIGKILL to all {len(family)} processes of both islands at once")
    return lambda: all(claim() for claim in claims)


def zombie_learner(scene: Scene) -> Claim:
    """Its flow is replaced while it sleeps; it wakes up beside its successor and tries to go on."""
    back, (number, zombie) = scene.is_back("west"), scene.learner("west")
    scene.signal(zombie, STOP)
    scene.signal(scene.process_of("west"), KILL)
    scene.struck("west's learner slept while its successor began, and woke up beside it")
    scene.until(lambda: scene.learner("west")[0] > number)
    scene.signal(zombie, GO_ON)
    return back


def synchronizer_killed_pending(scene: Scene) -> Claim:
    """Nothing is pushed any more: what was there already must bring the next one."""
    process = scene.process_of("synchronize")
    learners = [scene.learner(island)[1] for island in scene.islands]
    for learner in filter(None, learners):
        scene.signal(learner, STOP)
    scene.signal(process, KILL)
    try:
        assert scene.versions() == 0, "the process was too quick to be killed in time"
        scene.struck(f"SIGKILL to the synchronizer's process {process} before its flow ran")
        scene.until(lambda: scene.versions() > 0)
    finally:
        for learner in filter(None, learners):
            scene.signal(learner, GO_ON)
    return lambda: scene.versions() > 0


def synchronizer_killed(scene: Scene) -> Claim:
    process = scene.catch_in_mid_merge()
    again = scene.merges_again()
    scene.signal(process, KILL)
    scene.struck(f"SIGKILL to synchronizer {process} between a version's payload and its commit")
    return again


def synchronizer_paused(scene: Scene) -> Claim:
    """Another one takes over and makes the same version; then the first wakes up and tries to commit its own."""
    process = scene.catch_in_mid_merge()
    again = scene.merges_again()
    scene.struck("a synchronizer slept in mid-merge while another took over, then woke up")
    scene.until(again)
    scene.signal(process, GO_ON)
    return lambda: processes.of(process) is None


def train_killed(scene: Scene) -> Claim:
    number, process = scene.trainer()[0], scene.process_of("train")
    scene.signal(process, KILL)
    scene.struck(f"SIGKILL to train's process {process}; another one looks after the run")
    return lambda: scene.trainer()[0] > number


def trained_by_two(scene: Scene) -> Claim:
    """Somebody resumes a run that is under way."""
    further, first = scene.goes_on("west"), scene.flow_runs("train")[-1]["id"]
    scene.resume()
    scene.struck("a second train for the run; the first one gave way")
    incarnations = [scene.learner(island)[0] for island in scene.islands]

    def is_handed_over() -> bool:
        return scene.services.state(first) == "COMPLETED" and bool(further())

    def have_islands_gone_on() -> bool:
        return incarnations == [scene.learner(island)[0] for island in scene.islands]

    return lambda: is_handed_over() and have_islands_gone_on()


def worker_told_to_end(scene: Scene) -> Claim:
    """A machine that is taken away tells so before."""
    back = scene.is_back("west")
    process = scene.signal(scene.learner("west")[1], signal.SIGTERM)
    scene.struck(f"SIGTERM to west's worker {process}: it saved all and ended")
    return back


# --- a worker's inside: a function sent to it by way of its scheduler ---

_SEND = """
import ctypes, signal, sys
from distributed import Client

def hold_the_interpreter(seconds):
    ctypes.PyDLL(None).usleep(int(seconds * 1e6))

def fill_memory(megabytes):
    import distributed, time
    kept = bytearray(megabytes * 2**20)
    kept[::4096] = b"x" * len(kept[::4096])
    distributed.get_worker().kept = kept

signal.alarm(20)  # the end of this process where the port is a nanny's, or no Dask's, which never answers
client = Client(f"tcp://127.0.0.1:{sys.argv[3]}", timeout=10)
signal.alarm(0)
print("sent", flush=True)
client.run(globals()[sys.argv[1]], int(sys.argv[2]))
"""


def interpreter_held(scene: Scene) -> Claim:
    """A step that never lets another thread run: no heartbeat for so long, and no death."""
    number = scene.learner("west")[0]
    _send(scene.process_of("west"), "hold_the_interpreter", "15")
    further = scene.goes_on("west")
    scene.struck("west's worker held its interpreter for 15 s, heartbeats and all")

    def has_lived() -> bool:
        assert scene.learner("west")[0] == number, "it was taken for dead"
        return bool(further())

    return has_lived


def memory_exceeded(scene: Scene) -> Claim:
    back = scene.is_back("west")
    _send(scene.process_of("west"), "fill_memory", "800")
    scene.struck("west's worker took 800 MB more of the 800 it may, and was ended")
    return back


def _send(flow: int, function: str, argument: str) -> None:
    """Have a function run in the worker of the cluster that a flow's process holds."""
    for port in _ports(flow):
        command = [sys.executable, "-c", _SEND, function, argument, str(port)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=240)
        if done.stdout == "sent\n":
            return
    raise AssertionError(
        f"no scheduler among the ports of process {flow}; the last said: {done.stderr}"
    )


def _ports(process: int) -> list[int]:
    """Return the ports on which a process listens."""
    sockets = {
        os.readlink(path)
        for path in Path(f"/proc/{process}/fd").iterdir()
        if path.is_symlink() and os.readlink(path).startswith("socket:")
    }
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return [
        int(row[1].partition(":")[2], 16)
        for row in rows
        if row[3] == "0A" and f"socket:[{row[9]}]" in sockets
    ]


# --- a cluster elsewhere ---


def at_a_far_cluster(scene: Scene) -> dict[str, Any]:
    """Start one for west, and return the settings that name it."""
    scene.far = FarCluster(scene.services.folder, scene.run)
    scene.ends.callback(scene.far.kill)
    cluster = {"kind": "address", "address": scene.far.address}
    return {"islands": {"west": {"cluster": cluster}}}


def nanny_killed(scene: Scene) -> Claim:
    """Its worker ends with it; another worker of that cluster takes over."""
    back, learner = scene.is_back("west"), scene.learner("west")[1]
    nanny = processes.parent(int(learner["process"]))
    assert nanny is not None
    assert "dask_worker" in processes.command_line(nanny)
    scene.signal(nanny, KILL)
    scene.struck(f"SIGKILL to the nanny {nanny} of west's worker; another worker took over")
    return back


def far_cluster_killed(scene: Scene) -> Claim:
    """Its keeper starts it again at the same address, as a region would."""
    back = scene.is_back("west")
    scene.far.kill()
    scene.struck("SIGKILL to scheduler and workers of west's cluster; started again where it was")
    scene.far.start()
    return back


# --- the store ---


def disk_full(scene: Scene) -> Claim:
    return _by_plan(scene, "fill", "west found its disk full for 8 s")


def link_cut(scene: Scene) -> Claim:
    return _by_plan(scene, "cut", "west did not reach the store for 8 s")


def _by_plan(scene: Scene, kind: str, told: str) -> Claim:
    """Let `diloco chaos` do it; it returns when the fault is over."""
    plan = Path(f"{scene.services.folder}/{scene.run}.plan.toml")
    plan.write_text(
        f'[[faults]]\nkind = "{kind}"\nisland = "west"\nafter_seconds = 0\nseconds = 8\n'
    )
    done = scene.services.diloco("chaos", scene.run, "--plan", str(plan), timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    further = scene.goes_on("west")
    time.sleep(8)
    scene.struck(told)
    return further


# --- services, which all runs share ---


def prefect_killed(scene: Scene) -> Claim:
    return _service_killed(scene, "prefect server start", "Prefect")


def mlflow_killed(scene: Scene) -> Claim:
    return _service_killed(scene, "mlflow server", "MLflow")


def _service_killed(scene: Scene, command: str, name: str) -> Claim:
    before = scene.services.service(command)
    versions = scene.versions()
    scene.signal(before[0], KILL)
    scene.struck(f"SIGKILL to {name}; merges went on, and it was started again on its port")

    def is_back() -> bool:
        found = scene.services.service(command)
        return (
            found[:1] != before[:1]
            and scene.services.is_well(name)
            and bool(scene.versions() > versions)
        )

    return is_back


def prefect_silent(scene: Scene) -> Claim:
    return _service_silent(scene, "prefect server start", "Prefect")


def mlflow_silent(scene: Scene) -> Claim:
    return _service_silent(scene, "mlflow server", "MLflow")


def _service_silent(scene: Scene, command: str, name: str) -> Claim:
    """It takes connections and never answers, as a black hole does."""
    versions, family = scene.versions(), scene.services.service(command)
    for process in family:
        scene.signal(process, STOP)
    try:
        time.sleep(20)
        assert scene.versions() > versions, "merges waited for it"
    finally:
        for process in family:
            scene.signal(process, GO_ON)
    scene.struck(f"{name} took calls and answered none for 20 s; merges went on")
    return lambda: scene.services.is_well(name)


def serving_killed(scene: Scene) -> Claim:
    """All flows end with it, islands and all; the next one brings the run back."""
    claims = [scene.is_back(island) for island in scene.islands]
    process = scene.signal(scene.services.service("flows.serving")[0], KILL)
    scene.struck(f"SIGKILL to the process {process} that serves all flows; they ended with it")
    return lambda: all(claim() for claim in claims)


def everything_killed(scene: Scene) -> Claim:
    """The one case with a hand in it: `diloco up` and `diloco resume`."""
    claims = [scene.is_back(island) for island in scene.islands]
    family = scene.services.processes()
    scene.struck(f"SIGKILL to all {len(family)} processes; `diloco up`, `diloco resume`")
    while family:
        for where in filter(None, map(processes.of, family)):
            processes.send(where, KILL)
        family = scene.services.processes()  # one of them may have just started another
    scene.services.process.wait()
    scene.services = scene.ends.enter_context(fleet(scene.services.folder, evaluate_seconds=600))
    done = scene.services.diloco("resume", scene.run, "--detach", timeout=300)
    assert done.returncode == 0, done.stderr
    return lambda: all(claim() for claim in claims)
