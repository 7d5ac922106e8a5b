"""A run of the real pipeline whose learners are killed by SIGKILL, one after another, and what its records tell then.

Works on the Prefect that this process is pointed at, where the deployments are served. Learners are killed only on
this machine.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from infra import deployments
from infra.deployments import RunState
from islands import names
from islands.chaos import Fault
from islands.config import RunConfig
from islands.goodput import Kill, Span, Trace
from islands.types import IslandsError, ServiceUnavailable
from islands.versions import Commit
from tasks import data_parallel, records, supervising
from tasks.chaos import Chaos
from tasks.checkpoint_costs import checkpoint_seconds
from tasks.evaluating import evaluate
from tasks.goodput import Pipeline
from tasks.kept_work import kept_work
from tasks.kill_plan import Plan
from tasks.replaying import replay_into
from tasks.reporting import status
from tasks.runs import Run, open_run
from tasks.verifying import verify

_LOOKS_PER_SECOND = 2


@dataclass(slots=True)
class Killer:
    """Carries out a plan of faults from when every island has pushed something. One thread.

    Attributes:
        store_url, run_id: the run, which need not exist yet.
        faults: counted from there.
        until_share: nobody is struck any more once an island has trained so much of its share.
    """

    store_url: str
    run_id: str
    faults: Sequence[Fault]
    until_share: float
    _chaos: Chaos | None = None

    def look(self) -> None:
        """Do what is due."""
        if self._chaos is not None:
            if _progress(self._chaos.run) >= self.until_share:
                self._chaos.waiting.clear()
            self._chaos.look()
            return
        run = _found(self.store_url, self.run_id)
        if run is not None and _steps(run).keys() >= {i.name for i in run.config.islands}:
            self._chaos = Chaos(run, [*self.faults], say=lambda told: None)


@dataclass(frozen=True, slots=True)
class Killed:
    """A run that trained to its end under deaths: when all were at work, who was killed, how soon Prefect knew."""

    run: Run
    window: Span
    kills: tuple[Kill, ...]
    detect: tuple[float, ...]


def train_killed(plan: Plan, folder: Path) -> Killed:
    """Train a run to its end while learners are killed.

    Raises:
        IslandsError: the run did not end well.
    """
    config = plan.config(folder)
    killer = Killer(config.store, "killed", plan.faults(), plan.until_share)
    run = _train(config, "killed", killer.look)
    kills = kills_of(run)
    return Killed(run, window_of(run), kills, tuple(seconds_to_detect(run, kills)))


def train_in_peace(plan: Plan, folder: Path) -> Run:
    """Train the same run to its end with nobody killed."""
    return _train(plan.config(folder), "peaceful", lambda: None)


def train_jointly(
    plan: Plan, killed: Killed, folder: Path, *, is_elastic: bool, has_links: bool
) -> Trace:
    """Train a data-parallel job for as long as the run took, under the same deaths, over its links or without a cap."""
    return data_parallel.train(
        killed.run,
        folder,
        [Kill(kill.island, kill.at - killed.window.begin) for kill in killed.kills],
        seconds=killed.window.seconds,
        checkpoint_seconds=0.0 if is_elastic else plan.job_checkpoint_seconds,
        has_links=has_links,
    )


def look_back(plan: Plan, killed: Killed, peaceful: Run) -> Pipeline:
    """Return what the records of both runs show."""
    run, commits = killed.run, commits_of(killed.run)
    kept = [kept_work(run, island.name) for island in run.config.islands]
    trace = Trace(
        works=tuple(work for one in kept for work in one.works),
        kills=killed.kills,
        window=killed.window,
        rolled_back_seconds=sum(one.rolled_back_seconds for one in kept),
    )
    found = verify(run.store_url, run.run_id)
    replay_into(run, found, watch=lambda done: None)
    losses = losses_at_equal_tokens(run, peaceful)
    per_checkpoint = checkpoint_seconds(run.config, "saved")
    return Pipeline(
        trace=trace,
        detect=killed.detect,
        merged_again=seconds_to_merge(run, killed.kills),
        contributing=[len(commit.consumed) for commit in commits],
        quorum=run.config.quorum,
        lost=sum(max(0, row.imbalance) for row in found.rows),
        double_counted=sum(max(0, -row.imbalance) + max(0, -row.passed_over) for row in found.rows),
        problems=[f"{problem.name}: {problem.text}" for problem in found.problems],
        merged_share=status(run).merged_share,
        loss=losses[0],
        loss_in_peace=losses[1],
        checkpoint_percent=100 * per_checkpoint / plan.checkpoint_seconds,
    )


def losses_at_equal_tokens(run: Run, other: Run) -> tuple[float, float]:
    """Return both runs' losses at snapshots that hold about as many merged tokens: the last of whoever holds fewer."""
    snapshots = [[s for s, _ in records.read_snapshots(each.store)] for each in (run, other)]
    tokens = min(kept[-1].merged_tokens for kept in snapshots)
    nearest = [min(kept, key=lambda s: abs(s.merged_tokens - tokens)).number for kept in snapshots]
    return (
        evaluate(run, nearest[0]).bits_per_byte,
        evaluate(other, nearest[1]).bits_per_byte,
    )


def _train(config: RunConfig, run_id: str, watch: Callable[[], None]) -> Run:
    """Train a run to its end on Prefect, and return it.

    Args:
        config: of the run.
        run_id: its name, a new one.
        watch: called some times a second.

    Raises:
        IslandsError: the run did not end well.
    """
    parameters = {"config": json.loads(config.model_dump_json()), "run": run_id}
    flow_run = deployments.start("train", parameters, name=f"train {run_id}")
    while not (state := _state(flow_run)).is_over:
        for _ in range(_LOOKS_PER_SECOND):
            watch()
            time.sleep(1 / _LOOKS_PER_SECOND)
    if state.kind != "COMPLETED":
        raise IslandsError(
            f"run {run_id} must complete, got {state.kind}: {state.message}; see its flow run"
        )
    return open_run(config.store, run_id)


def window_of(run: Run) -> Span:
    """Return the time in which every island was at work: from the last one's first push to the first farewell.

    Raises:
        IslandsError: there is none.
    """
    islands = [island.name for island in run.config.islands]
    works = [kept_work(run, island).works for island in islands]
    left = [float(records.require(run.store, names.left(island))[0]["at"]) for island in islands]
    begun = [own[0].span.end for own in works if own]
    if len(begun) < len(islands) or max(begun) >= min(left):
        raise IslandsError(
            f"every island must push before the first one leaves, got {run.config.total_tokens:,} tokens for "
            f"{len(islands)} of them, which were trained too soon; raise --tokens"
        )
    return Span(max(begun), min(left))


def seconds_to_detect(run: Run, kills: Sequence[Kill]) -> list[float]:
    """Return the seconds from each death to the failure of the task run that watches the learner."""
    waits = []
    for kill in kills:
        failures = deployments.failures([supervising.tag_of(run), f"island:{kill.island}"])
        later = [at for at in failures if at > kill.at]
        waits += [min(later) - kill.at] if later else []
    return waits


def seconds_to_merge(run: Run, kills: Sequence[Kill]) -> list[float]:
    """Return the seconds from each death to the first version that holds work of a later incarnation."""
    commits, waits = commits_of(run), []
    for kill in kills:
        later = _incarnations_since(run, kill)
        stamps = [
            commit.at
            for commit in commits
            for entry in commit.consumed
            if entry.learner == kill.island and entry.stop.incarnation in later
        ]
        waits += [min(stamps) - kill.at] if stamps else []
    return waits


def kills_of(run: Run) -> tuple[Kill, ...]:
    """Return whom the strikes that a run's store records have killed, in order."""
    strikes = records.read_strikes(run.store)
    return tuple(
        Kill(strike.fault.island, strike.at)
        for strike in strikes.values()
        if strike.fault.kind == "kill" and strike.fault.island is not None
    )


def commits_of(run: Run) -> list[Commit]:
    """Return every version but the first of every fragment."""
    commits = []
    for layout in run.layouts:
        head, _ = records.find_head(run.store, layout.index)
        commits += [
            records.require_commit(run.store, layout.index, version)[0]
            for version in range(1, head.version + 1)
        ]
    return commits


def _state(flow_run: str) -> RunState:
    try:
        return deployments.state_of(flow_run)
    except ServiceUnavailable:
        return RunState("RUNNING", "Prefect does not answer")


def _found(store_url: str, run_id: str) -> Run | None:
    try:
        return open_run(store_url, run_id)
    except IslandsError:
        return None  # not there yet


def _steps(run: Run) -> dict[str, int]:
    """Return how far each island that has pushed anything has come."""
    steps: dict[str, int] = {}
    for name in run.store.list_names("inbox/"):
        if (key := names.parse_contribution(name)) is not None:
            steps[key.learner] = max(key.stop.step, steps.get(key.learner, 0))
    return steps


def _progress(run: Run) -> float:
    """Return the largest share of its share that an island has trained."""
    tokens_per_step = {i.name: i.batch_size * run.config.model.context for i in run.config.islands}
    return max(
        step * tokens_per_step[name] / run.own_tokens(name) for name, step in _steps(run).items()
    )


def _incarnations_since(run: Run, kill: Kill) -> set[int]:
    """Return the incarnations of a killed learner that registered after its death."""
    numbers = range(records.newest_incarnation(run.store, kill.island) + 1)
    bodies = {n: records.require(run.store, names.incarnation(kill.island, n))[0] for n in numbers}
    return {number for number, body in bodies.items() if float(body["at"]) > kill.at}
