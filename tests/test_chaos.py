"""The matrix of faults: each component of a real fleet, hurt at a moment that matters; only time may be lost.

Every case is a run of its own on one fleet. It strikes, waits until the run has recovered by itself, lets it end, and
demands a balanced ledger and that no process is left. Cases that hurt one run alone go side by side; those that hurt
what all runs share have the fleet for themselves. `pytest -m chaos` runs them all and prints a table.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest

from infra import processes
from tests.fleet import Fleet, fleet
from tests.runs import write_text
from tests.scenes import PATIENCE_SECONDS, TOKENS, TOKENS_PER_STEP, Claim, Scene

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(900)]
# Runs side by side: more of them would wait for the cores instead of for each other's timers.
LANES = 3
# First pushes come seconds after the start: room for a fault before the first merge.
SLOW = {"sync": {"period_steps": 400}}
KEEPS_ALL = {"retention": "all"}
KILL, STOP, GO_ON = signal.SIGKILL, signal.SIGSTOP, signal.SIGCONT


# --- moments ---


def before_the_first_merge(scene: Scene) -> None:
    scene.until(lambda: scene.learner("west")[0] == 0)


def mid_run(scene: Scene) -> None:
    scene.until(lambda: scene.versions() >= 4)


def at_the_end(scene: Scene) -> None:
    """Nine tenths of west's share are merged."""
    steps = TOKENS // TOKENS_PER_STEP // len(scene.islands)
    scene.until(lambda: scene.merged_to("west")[1] >= 0.85 * steps)


# --- faults that hurt one run; each strikes and returns what recovery is ---


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
    back, zombie = scene.is_back("west"), scene.learner("west")[1]
    scene.signal(zombie, STOP)
    scene.signal(scene.process_of("west"), KILL)
    scene.until(lambda: scene.learner("west")[0] == 1)
    scene.signal(zombie, GO_ON)
    scene.struck("west's learner slept while its successor began, and woke up beside it")
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
    return scene.merges_again()


def synchronizer_killed(scene: Scene) -> Claim:
    again, process = scene.merges_again(), scene.catch_in_mid_merge()
    scene.signal(process, KILL)
    scene.struck(f"SIGKILL to synchronizer {process} between a version's payload and its commit")
    return again


def synchronizer_paused(scene: Scene) -> Claim:
    """Another one takes over and makes the same version; then the first wakes up and tries to commit its own."""
    again, process = scene.merges_again(), scene.catch_in_mid_merge()
    scene.struck("a synchronizer slept in mid-merge while another took over, then woke up")
    scene.until(again)
    taken_over = scene.versions()
    scene.signal(process, GO_ON)
    return lambda: processes.of(process) is None and scene.versions() > taken_over


def train_killed(scene: Scene) -> Claim:
    further, process = scene.goes_on("west"), scene.process_of("train")
    scene.signal(process, KILL)
    scene.struck(f"SIGKILL to train's process {process}")
    return further


# --- the matrix ---


@dataclass(frozen=True)
class Case:
    """A fault and when it strikes. `settings` are the run's, by section."""

    fault: str
    strike: Callable[[Scene], Claim]
    moment: Callable[[Scene], None] = mid_run
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Of the run, and of the test."""
        words = f"{self.fault} {self.when}".lower()
        return re.sub(r"[^a-z0-9]+", "-", words)

    @property
    def when(self) -> str:
        whens = {
            before_the_first_merge: "before merge",
            mid_run: "mid-run",
            at_the_end: "at the end",
        }
        return whens[self.moment]


EARLY, LATE = before_the_first_merge, at_the_end
SIDE_BY_SIDE = (
    Case("worker killed", worker_killed, EARLY, SLOW),
    Case("worker killed", worker_killed, settings=KEEPS_ALL),
    Case("worker killed", worker_killed, LATE),
    Case("worker paused", worker_paused),
    Case("island flow killed", island_flow_killed, EARLY, SLOW),
    Case("island flow killed", island_flow_killed),
    Case("island flow killed", island_flow_killed, LATE),
    Case("cluster killed", cluster_killed),
    Case("all islands killed", all_islands_killed, EARLY, SLOW),
    Case("all islands killed", all_islands_killed),
    Case("zombie learner", zombie_learner),
    Case("synchronizer killed pending", synchronizer_killed_pending, EARLY),
    Case("synchronizer killed", synchronizer_killed, EARLY),
    Case("synchronizer killed", synchronizer_killed, settings=KEEPS_ALL),
    Case("synchronizer killed", synchronizer_killed, LATE),
    Case("synchronizer paused", synchronizer_paused, settings=KEEPS_ALL),
)
ALONE: tuple[Case, ...] = ()
CASES = {case.name: case for case in (*SIDE_BY_SIDE, *ALONE)}
Row = tuple[str, str, str, str, str]


def play(services: Fleet, case: Case) -> Row:
    """Play a case to its end and return its row of the table."""
    scene = Scene(services, case.name)
    with scene.ends:
        scene.begin(case.settings)
        case.moment(scene)
        back = case.strike(scene)
        ends = scene.since + PATIENCE_SECONDS
        while not back():
            assert time.monotonic() < ends, f"not back after: {scene.happened}"
            time.sleep(0.2)
        seconds = time.monotonic() - scene.since
        ledger = scene.finish(replays=case.settings == KEEPS_ALL)
    return case.fault, case.when, scene.happened, f"{seconds:.1f}", ledger


class Matrix:
    """The chosen cases at work: side by side from the start, the others when they are asked for."""

    def __init__(self, services: Fleet, pool: ThreadPoolExecutor, chosen: list[Case]) -> None:
        self._services = services
        self._played: dict[str, Future[Row]] = {
            case.name: pool.submit(play, services, case) for case in chosen if case in SIDE_BY_SIDE
        }

    def row(self, case: Case) -> Row:
        """Return a case's row; raise what failed in it."""
        if case in SIDE_BY_SIDE:
            return self._played[case.name].result()
        for played in self._played.values():
            played.exception()  # waits; its own test tells
        return play(self._services, case)


@pytest.fixture(scope="module")
def matrix(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Matrix]:
    folder = tmp_path_factory.mktemp("chaos")
    write_text(folder / "text", num_documents=40)
    names = [getattr(item, "callspec", None) for item in request.session.items]
    chosen = [CASES[name.params["name"]] for name in names if name and "name" in name.params]
    with fleet(folder) as services:
        pool = ThreadPoolExecutor(LANES)
        try:
            yield Matrix(services, pool, chosen)
        finally:
            pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("name", CASES)
def test_a_fault_costs_time_and_nothing_else(
    name: str, matrix: Matrix, chaos_rows: list[Row]
) -> None:
    chaos_rows.append(matrix.row(CASES[name]))
