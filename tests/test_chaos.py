"""The matrix of faults: each component of a real fleet, hurt at a moment that matters; only time may be lost.

On one fleet, several runs. Each is struck, recovers by itself, is struck by its next fault, and at last ends: then its
ledger must balance, and no process may be left. Runs that are hurt alone go side by side; faults of what all runs share
come after them. `pytest -m chaos` plays every case and prints a table.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from tests import strikes
from tests.fleet import Fleet, fleet
from tests.runs import write_text
from tests.scenes import TOKENS_PER_STEP, Claim, Scene

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(900)]
# Runs side by side: more of them would wait for the cores instead of for each other's timers.
LANES = 4
# First pushes come seconds after the start: room for a fault before the first merge.
SLOW = {"sync": {"period_steps": 400}}
KEEPS_ALL = {"retention": "all"}


# --- moments ---


def before_the_first_merge(scene: Scene) -> None:
    scene.until(lambda: scene.learner("west")[0] == 0)
    assert scene.versions() == 0


def mid_run(scene: Scene) -> None:
    scene.until(lambda: scene.versions() >= 2)


def at_the_end(scene: Scene) -> None:
    """The run is told to end soon, and all but the last steps of west's share are merged."""
    scene.wind_up(further_steps=1_500)
    steps = scene.tokens // TOKENS_PER_STEP // len(scene.islands)
    scene.until(lambda: scene.merged_to("west")[1] >= steps - 400)


# --- the matrix ---

Settings = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """A fault and when it strikes."""

    fault: str
    strike: Callable[[Scene], Claim]
    moment: Callable[[Scene], None] = mid_run

    @property
    def name(self) -> str:
        """Of the test."""
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


@dataclass(frozen=True)
class Chain:
    """Faults that strike one run, each once it has recovered from the one before. `settings` are the run's."""

    cases: tuple[Case, ...]
    settings: Settings | Callable[[Scene], Settings] = field(default_factory=dict)


EARLY, LATE = before_the_first_merge, at_the_end
WEST_IS_CAREFUL = {"islands": {"west": {"cluster": {"spares": 1, "memory_mb": 800}}}}
SIDE_BY_SIDE = (
    Chain(
        (
            Case("worker killed", strikes.worker_killed),
            Case("all islands killed", strikes.all_islands_killed),
            Case("synchronizer killed", strikes.synchronizer_killed),
            Case("synchronizer paused", strikes.synchronizer_paused),
        ),
        KEEPS_ALL,
    ),
    Chain(
        (
            Case("nanny killed", strikes.nanny_killed),
            Case("far cluster killed", strikes.far_cluster_killed),
        ),
        strikes.at_a_far_cluster,
    ),
    Chain(
        (
            Case("worker holds its interpreter", strikes.interpreter_held),
            Case("worker paused", strikes.worker_paused),
            Case("worker told to end", strikes.worker_told_to_end),
            Case("island flow killed", strikes.island_flow_killed),
        )
    ),
    Chain(
        (
            Case("cluster and flow killed", strikes.cluster_killed),
            Case("zombie learner", strikes.zombie_learner),
            Case("disk full", strikes.disk_full),
            Case("store out of reach", strikes.link_cut),
        )
    ),
    Chain(
        (
            Case("synchronizer killed", strikes.synchronizer_killed, EARLY),
            Case("train killed", strikes.train_killed),
            Case("two trains", strikes.trained_by_two),
        )
    ),
    Chain(
        (
            Case("worker killed, one to spare", strikes.worker_killed),
            Case("worker exceeds its memory", strikes.memory_exceeded),
        ),
        WEST_IS_CAREFUL,
    ),
    Chain(
        (
            Case("synchronizer killed pending", strikes.synchronizer_killed_pending, EARLY),
            Case("synchronizer killed", strikes.synchronizer_killed, LATE),
        )
    ),
    Chain(
        (
            Case("worker killed", strikes.worker_killed, EARLY),
            Case("worker killed", strikes.worker_killed, LATE),
        ),
        SLOW,
    ),
    Chain(
        (
            Case("island flow killed", strikes.island_flow_killed, EARLY),
            Case("island flow killed", strikes.island_flow_killed, LATE),
        ),
        SLOW,
    ),
    Chain(
        (
            Case("all islands killed", strikes.all_islands_killed, EARLY),
            Case("train killed", strikes.train_killed, LATE),
        ),
        SLOW,
    ),
)
ALONE = Chain(
    (
        Case("MLflow killed", strikes.mlflow_killed),
        Case("MLflow silent", strikes.mlflow_silent),
        Case("Prefect killed", strikes.prefect_killed),
        Case("Prefect silent", strikes.prefect_silent),
        Case("serving killed", strikes.serving_killed),
        # The last one: the fleet ends with it.
        Case("everything killed", strikes.everything_killed),
    )
)
CASES = {case.name: case for chain in (*SIDE_BY_SIDE, ALONE) for case in chain.cases}
Row = tuple[str, str, str, str, str]


def play(services: Fleet, chain: Chain) -> dict[str, Row]:
    """Play a chain's cases on one run, and return their rows of the table."""
    scene, told = Scene(services, chain.cases[0].name), []
    with scene.ends:
        scene.ends.callback(scene.abandon)
        settings = chain.settings(scene) if callable(chain.settings) else chain.settings
        scene.begin(settings)
        for case in chain.cases:
            case.moment(scene)
            back = case.strike(scene)
            scene.wait(back)
            told.append((scene.happened, f"{time.monotonic() - scene.since:.1f}"))
            if settings == SLOW and case.moment is EARLY:
                scene.adjust("sync.period_steps=40")
        scene.wind_up()
        ledger = scene.finish(replays=settings == KEEPS_ALL)
    return {
        case.name: (case.fault, case.when, *what, ledger)
        for case, what in zip(chain.cases, told, strict=True)
    }


class Matrix:
    """The chosen cases at work: side by side from the start, those that hurt everybody after them."""

    def __init__(self, services: Fleet, pool: ThreadPoolExecutor, chosen: set[str]) -> None:
        self._played: dict[str, Future[dict[str, Row]]] = {}
        for chain in SIDE_BY_SIDE:
            if cases := _among(chain, chosen):
                played = pool.submit(play, services, replace(chain, cases=cases))
                self._played |= {case.name: played for case in cases}
        self._beside = set(self._played.values())
        if cases := _among(ALONE, chosen):
            played = pool.submit(self._play_alone, services, replace(ALONE, cases=cases))
            self._played |= {case.name: played for case in cases}

    def row(self, name: str) -> Row:
        """Return a case's row; raise what failed in its run."""
        return self._played[name].result()[name]

    def _play_alone(self, services: Fleet, chain: Chain) -> dict[str, Row]:
        for played in self._beside:
            played.exception()  # waits; its own tests tell
        return play(services, chain)


def _among(chain: Chain, chosen: set[str]) -> tuple[Case, ...]:
    return tuple(case for case in chain.cases if case.name in chosen)


@pytest.fixture(scope="module")
def matrix(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Matrix]:
    folder = tmp_path_factory.mktemp("chaos")
    write_text(folder / "text", num_documents=40)
    names = [getattr(item, "callspec", None) for item in request.session.items]
    chosen = {str(name.params["name"]) for name in names if name and "name" in name.params}
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
    chaos_rows.append(matrix.row(name))
