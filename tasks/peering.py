"""Benchmark `peer`: what one exchange costs a learner here, and what it costs one under torchft's DiLoCo.

Two islands and two replicas train the same model on the same text: same batch, period and fragments, one thread each.
Four arms take turns: ours with and without exchange, theirs with and without. torchft keeps heartbeats, which a process
that is stopped would miss; so its replicas take steps when told to and wait for the next word in between.
"""

from __future__ import annotations

import contextlib
import importlib.util
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from islands.types import ConfigError, LearnerLost
from tasks.arms import ISLANDS, Arm, Plan, run_alone, training
from tasks.figures import Advance, Measured, Order, Table, Target, ratio_or_none
from tasks.runs import Run
from tasks.slices import (
    Slice,
    Window,
    median_of,
    single_steps,
    slices_by_arm,
    turns,
    visible_ms,
)
from tasks.step_log import Steps, end_of, read_steps

VERSION = "0.2.0"
OURS, THEIRS = ("ours-with", "ours-without"), ("torchft-with", "torchft-without")
# Of the six steps from one exchange to the next: as long as torchft's own example waits.
OVERLAP_STEPS = 2


@dataclass(frozen=True, slots=True)
class Compared:
    """All arms' slices, and the seconds of each of their steps in them."""

    slices: Mapping[str, Sequence[Slice]]
    steps: Mapping[str, Sequence[float]]
    steps_per_exchange: float


def measure(order: Order) -> Measured:
    """Return what an exchange costs here over what it costs there.

    Raises:
        ConfigError: torchft is not installed.
    """
    if importlib.util.find_spec("torchft") is None:
        raise ConfigError(
            f"the benchmark peer needs torchft {VERSION}, found none; pip install 'diloco[peers]'"
        )
    plan = Plan(num_slices=6, slice_seconds=7.0, warm_up_seconds=5.0)
    with order.services(), order.progress("slices", 4 * plan.num_slices) as advance:
        return report(compare(plan, advance))


def compare(plan: Plan, advance: Advance) -> Compared:
    """Run all four arms in turns."""
    with (
        tempfile.TemporaryDirectory(prefix="diloco-peer-") as name,
        contextlib.ExitStack() as stack,
    ):
        folder = Path(name)
        ours = {}
        for arm in OURS:
            exchanges = arm == OURS[0]
            ours[arm] = stack.enter_context(training(arm, plan, folder, exchanges=exchanges))
            ours[arm].pause()
        theirs = stack.enter_context(_replicas(ours[OURS[0]].run, folder))
        windows = _take_turns(ours, theirs, plan, advance)
        learners = {arm: ours[arm].steps() for arm in OURS}
        learners |= {arm: theirs.steps() for arm in THEIRS}
    return Compared(
        slices_by_arm(learners, windows), single_steps(learners, windows), plan.steps_per_exchange
    )


def report(compared: Compared) -> Measured:
    """Return the figures. A slice's step is the mean of its steps: so a burst at an exchange counts in full."""
    per_exchange = compared.steps_per_exchange
    typical = {arm: median_of(ones, "step_seconds") for arm, ones in compared.slices.items()}
    medians = {arm: statistics.median(seconds) for arm, seconds in compared.steps.items()}
    means = {arm: statistics.fmean(seconds) for arm, seconds in compared.steps.items()}
    visible = [visible_ms(typical[a], typical[b], per_exchange) for a, b in (OURS, THEIRS)]
    ratio = ratio_or_none(visible[0], visible[1])
    figures: dict[str, Any] = {
        "visible_ms": visible[0],
        "peer_visible_ms": visible[1],
        "visible_ratio": ratio,
    }
    for what, of in (("median_of_steps", medians), ("mean_of_steps", means)):
        figures[f"visible_ms_{what}"] = visible_ms(of[OURS[0]], of[OURS[1]], per_exchange)
        figures[f"peer_visible_ms_{what}"] = visible_ms(of[THEIRS[0]], of[THEIRS[1]], per_exchange)
    figures["step_ms"] = {arm: 1000 * seconds for arm, seconds in typical.items()}
    figures["slices_step_ms"] = {
        arm: [1000 * one.step_seconds for one in ones] for arm, ones in compared.slices.items()
    }
    figures["peer"] = f"torchft {VERSION}"
    target = Target("visible_ratio", float("nan") if ratio is None else ratio, "<=", 0.3)
    return Measured(figures, (target,), _table(figures))


def _table(figures: Mapping[str, Any]) -> Table:
    rows = [
        (what, f"{figures[f'visible_ms{key}']:.2f}", f"{figures[f'peer_visible_ms{key}']:.2f}")
        for what, key in (
            ("visible ms per exchange, median of slices", ""),
            ("the same, mean of all steps", "_mean_of_steps"),
            ("the same, median of all steps", "_median_of_steps"),
        )
    ]
    for what, number in (("with", 0), ("without", 1)):
        steps = [f"{figures['step_ms'][arms[number]]:.2f}" for arms in (OURS, THEIRS)]
        rows.append((f"ms per step, {what} exchange", steps[0], steps[1]))
    return Table(("figure",), ("diloco", str(figures["peer"])), tuple(rows))


@dataclass(slots=True)
class Replicas:
    """torchft's replicas, waiting for a word. `complaints`: the standard error of all."""

    complaints: Path
    processes: list[subprocess.Popen[str]] = field(default_factory=list)
    step_logs: list[Path] = field(default_factory=list)

    def steps(self) -> list[Steps]:
        """Return what each has done so far."""
        return [read_steps(path) for path in self.step_logs]

    def train(self, arm: str, num_steps: int, dropped_seconds: float) -> Window:
        """Let all take so many steps; return the window in which to look at them.

        Raises:
            LearnerLost: one has ended.
        """
        start = time.perf_counter()
        for process in self.processes:
            _input(process).write(f"{arm.removeprefix('torchft-')} {num_steps}\n")
            _input(process).flush()
        for process in self.processes:
            _expect(process, "done", self.complaints)
        return Window(arm, start + dropped_seconds, time.perf_counter())


@contextlib.contextmanager
def _replicas(run: Run, folder: Path) -> Iterator[Replicas]:
    """Start torchft's lighthouse and replicas; each ends when its standard input does, or is killed."""
    complaints = folder / "torchft.log"
    with complaints.open("w") as log, contextlib.ExitStack() as stack:

        def start(*arguments: str) -> subprocess.Popen[str]:
            process = subprocess.Popen(
                [sys.executable, "-m", "tasks.peer_arm", *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                # As ours have: on a busy machine the kernel shares processors out by session.
                start_new_session=True,
            )
            stack.callback(_end, process)
            return process

        if not (address := _answer(start("lighthouse", str(len(ISLANDS))))):
            raise LearnerLost(f"torchft's lighthouse must say its address; {end_of(complaints)}")
        replicas = Replicas(complaints)
        for island in ISLANDS:
            path = folder / f"torchft-{island}.steps"
            place = (run.store_url, run.run_id, island, str(path), address, str(OVERLAP_STEPS))
            replicas.processes.append(start("replica", *place))
            replicas.step_logs.append(path)
        for process in replicas.processes:
            _expect(process, "ready", complaints)
        yield replicas


def _take_turns(
    ours: Mapping[str, Arm], theirs: Replicas, plan: Plan, advance: Advance
) -> list[Window]:
    """Run the arms slice by slice, all about equally long."""
    for each in ours.values():
        run_alone(each, plan.warm_up_seconds, 0.0)
    for arm in THEIRS:  # their first meeting takes longer than any other
        begun = time.perf_counter()
        theirs.train(arm, plan.period_steps, 0.0)
        step_seconds = (time.perf_counter() - begun) / plan.period_steps
    num_steps = plan.period_steps * max(
        1, round(plan.slice_seconds / step_seconds / plan.period_steps)
    )
    windows = []
    for number, arm in enumerate(turns([*OURS, *THEIRS], plan.num_slices), start=1):
        if arm in ours:
            windows.append(run_alone(ours[arm], plan.slice_seconds, plan.dropped_seconds))
        else:
            windows.append(theirs.train(arm, num_steps, plan.dropped_seconds))
        advance(number, arm)
    return windows


def _expect(process: subprocess.Popen[str], word: str, complaints: Path) -> None:
    if (answer := _answer(process)) != word:
        raise LearnerLost(
            f"torchft's process must say {word!r}, got {answer!r}; {end_of(complaints)}"
        )


def _answer(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None, "it is started with pipes"
    return process.stdout.readline().strip()


def _input(process: subprocess.Popen[str]) -> IO[str]:
    assert process.stdin is not None, "it is started with pipes"
    return process.stdin


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout):
        assert stream is not None, "it is started with pipes"
        with contextlib.suppress(BrokenPipeError):
            stream.close()
