"""The matrix of faults: each component of a real fleet, hurt at a moment that matters; only time may be lost.

Every case is a run of its own on one fleet. It strikes, waits until the run has recovered by itself, lets it end, and
demands a balanced ledger and that no process is left. Cases that hurt one run alone go side by side; those that hurt
what all runs share have the fleet for themselves. `pytest -m chaos` runs them all and prints a table.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests import strikes
from tests.fleet import Fleet, fleet
from tests.runs import write_text
from tests.scenes import ENDLESS, TOKENS, TOKENS_PER_STEP, Claim, Scene

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(900)]
# Runs side by side: more of them would wait for the cores instead of for each other's timers.
LANES = 4
# First pushes come seconds after the start: room for a fault before the first merge.
SLOW = {"sync": {"period_steps": 400}}
KEEPS_ALL = {"retention": "all"}


# --- moments ---


def before_the_first_merge(scene: Scene) -> None:
    scene.until(lambda: scene.learner("west")[0] == 0)


def mid_run(scene: Scene) -> None:
    scene.until(lambda: scene.versions() >= 2)


def at_the_end(scene: Scene) -> None:
    """Of west's share 85 % are merged."""
    steps = scene.tokens // TOKENS_PER_STEP // len(scene.islands)
    scene.until(lambda: scene.merged_to("west")[1] >= 0.85 * steps)


# --- the matrix ---

Settings = dict[str, Any]


def of_west(**cluster: int) -> Settings:
    return {"islands": {"west": {"cluster": cluster}}}


@dataclass(frozen=True)
class Case:
    """A fault and when it strikes. `settings` are the run's, by section."""

    fault: str
    strike: Callable[[Scene], Claim]
    moment: Callable[[Scene], None] = mid_run
    settings: Settings | Callable[[Scene], Settings] = field(default_factory=dict)

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
    Case("worker killed", strikes.worker_killed, EARLY, SLOW),
    Case("worker killed", strikes.worker_killed, settings=KEEPS_ALL),
    Case("worker killed", strikes.worker_killed, LATE),
    Case("worker killed, one to spare", strikes.worker_killed, settings=of_west(spares=1)),
    Case("worker told to end", strikes.worker_told_to_end),
    Case("worker paused", strikes.worker_paused),
    Case("worker holds its interpreter", strikes.interpreter_held),
    Case("worker exceeds its memory", strikes.memory_exceeded, settings=of_west(memory_mb=800)),
    Case("nanny killed", strikes.nanny_killed, settings=strikes.at_a_far_cluster),
    Case("far cluster killed", strikes.far_cluster_killed, settings=strikes.at_a_far_cluster),
    Case("cluster and flow killed", strikes.cluster_killed),
    Case("island flow killed", strikes.island_flow_killed, EARLY, SLOW),
    Case("island flow killed", strikes.island_flow_killed),
    Case("island flow killed", strikes.island_flow_killed, LATE),
    Case("all islands killed", strikes.all_islands_killed, EARLY, SLOW),
    Case("all islands killed", strikes.all_islands_killed, settings=KEEPS_ALL),
    Case("zombie learner", strikes.zombie_learner),
    Case("synchronizer killed pending", strikes.synchronizer_killed_pending, EARLY),
    Case("synchronizer killed", strikes.synchronizer_killed, EARLY),
    Case("synchronizer killed", strikes.synchronizer_killed, settings=KEEPS_ALL),
    Case("synchronizer killed", strikes.synchronizer_killed, LATE),
    Case("synchronizer paused", strikes.synchronizer_paused, settings=KEEPS_ALL),
    Case("train killed", strikes.train_killed),
    Case("train killed", strikes.train_killed, LATE),
    Case("two trains", strikes.trained_by_two),
    Case("disk full", strikes.disk_full),
    Case("store out of reach", strikes.link_cut),
)
ALONE = (
    Case("MLflow killed", strikes.mlflow_killed),
    Case("MLflow silent", strikes.mlflow_silent),
    Case("Prefect killed", strikes.prefect_killed),
    Case("Prefect silent", strikes.prefect_silent),
    Case("serving killed", strikes.serving_killed),
    # The last one: the fleet ends with it.
    Case("everything killed", strikes.everything_killed),
)
CASES = {case.name: case for case in (*SIDE_BY_SIDE, *ALONE)}
Row = tuple[str, str, str, str, str]


def play(services: Fleet, case: Case) -> Row:
    """Play a case to its end and return its row of the table."""
    tokens = TOKENS if case.moment is at_the_end else ENDLESS
    scene = Scene(services, case.name, tokens=tokens)
    with scene.ends:
        scene.ends.callback(scene.abandon)
        settings = case.settings(scene) if callable(case.settings) else case.settings
        scene.begin(settings)
        case.moment(scene)
        back = case.strike(scene)
        scene.wait(back)
        seconds = time.monotonic() - scene.since
        scene.wind_up()
        ledger = scene.finish(replays=settings == KEEPS_ALL)
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
    with fleet(folder, evaluate_seconds=600) as services:
        pool = ThreadPoolExecutor(LANES)
        try:
            yield Matrix(services, pool, chosen)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)  # what still plays ends with the fleet


@pytest.mark.parametrize("name", CASES)
def test_a_fault_costs_time_and_nothing_else(
    name: str, matrix: Matrix, chaos_rows: list[Row]
) -> None:
    chaos_rows.append(matrix.row(CASES[name]))
