"""Arms of a comparison, from outside: processes that are started, made to pause and go on, and ended. No torch.

Each process hangs on a guard: nothing outlives this one. An arm that pauses is stopped by the system (SIGSTOP), all its
processes at once, so that it costs nothing while another one is measured.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from infra.keeping import Service, Started
from islands.config import RunConfig
from islands.sections import IslandConfig, ModelConfig, PipelineConfig, SyncConfig
from tasks.arm import NO_EXCHANGE_STEPS
from tasks.figures import Advance
from tasks.runs import Run
from tasks.slices import Window, turns
from tasks.step_log import Steps, process_of, read_steps

_GRACE_SECONDS = 2.0
ISLANDS = ("west", "east")
# Some 90 ms a step on one thread.
MODEL = ModelConfig(width=128, num_layers=4, num_heads=4, context=128)


@dataclass(frozen=True, slots=True)
class Plan:
    """What is trained, and for how long.

    For `whole_seconds` the arm that exchanges runs without a pause. Then `num_slices` per arm of `slice_seconds`, of
    which the first `dropped_seconds` do not count; before them each arm runs for `warm_up_seconds`.
    """

    model: ModelConfig = MODEL
    batch_size: int = 8
    period_steps: int = 24
    num_fragments: int = 4
    whole_seconds: float = 30.0
    num_slices: int = 6
    slice_seconds: float = 10.0
    dropped_seconds: float = 2.0
    warm_up_seconds: float = 8.0
    source: str = "stdlib"

    @property
    def steps_per_exchange(self) -> float:
        """Inner steps from one fragment's exchange to the next fragment's."""
        return self.period_steps / self.num_fragments

    def config(self, folder: Path, *, exchanges: bool) -> RunConfig:
        """Return the configuration of an arm's run."""
        period = self.period_steps if exchanges else NO_EXCHANGE_STEPS
        return RunConfig.model_validate(
            {
                "store": f"file://{folder}/runs",
                "total_tokens": 10**12,
                "model": self.model,
                "data": {"source": self.source},
                "sync": SyncConfig(num_fragments=self.num_fragments, period_steps=period),
                # Its clock runs on while the arm pauses, about half of the time.
                "pipeline": PipelineConfig(checkpoint_seconds=40.0, linger_periods=100_000.0),
                "islands": tuple(IslandConfig(name=n, batch_size=self.batch_size) for n in ISLANDS),
            }
        )


class Arm:
    """A run in training: a process per island, one for the synchronizer if it exchanges."""

    def __init__(
        self, name: str, run: Run, started: Sequence[Started], logs: Sequence[Path]
    ) -> None:
        self.name = name
        self.run = run
        self._started = started
        self._logs = logs

    def steps(self) -> list[Steps]:
        """Return what each island has done so far."""
        return [read_steps(path) for path in self._logs[: len(ISLANDS)]]

    def pause(self) -> None:
        """Stop all its processes where they are."""
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Let them run."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        for started, log in zip(self._started, self._logs, strict=True):
            process = process_of(log)
            # One that has ended says so in its log; its id may belong to somebody else by now.
            if process is not None and started.process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, number)


@contextlib.contextmanager
def training(name: str, plan: Plan, folder: Path, *, exchanges: bool) -> Iterator[Arm]:
    """Create a run and train it while the block runs; gives the arm once every learner has taken a step."""
    run = _create(plan.config(folder / name, exchanges=exchanges), name)
    places = [*ISLANDS, "synchronizer"] if exchanges else [*ISLANDS]
    logs = [folder / f"{name}-{place}.steps" for place in places]
    with contextlib.ExitStack() as stack:
        started = []
        for place, log in zip(places, logs, strict=True):
            role = ("island", place) if place in ISLANDS else ("synchronizer",)
            service = _service(run, role, log)
            started.append(Started(service))
            stack.callback(started[-1].stop, _say_nothing)
        arm = Arm(name, run, started, logs)
        stack.callback(arm.go_on)  # before they are told to end
        for each in started:
            each.wait_until_ready(_say_nothing)
        yield arm


def take_turns(arms: Sequence[Arm], plan: Plan, advance: Advance) -> list[Window]:
    """Let arms that pause run one after another, slice by slice; return the windows in which to look at them."""
    by_name = {arm.name: arm for arm in arms}
    windows = []
    for arm in arms:
        run_alone(arm, plan.warm_up_seconds, 0.0)
    for number, name in enumerate(turns([*by_name], plan.num_slices), start=1):
        windows.append(run_alone(by_name[name], plan.slice_seconds, plan.dropped_seconds))
        advance(number, name)
    return windows


def run_alone(arm: Arm, seconds: float, dropped_seconds: float) -> Window:
    """Let an arm that pauses run for a while, and return the window in which to look at it."""
    arm.go_on()
    try:
        start = time.perf_counter() + dropped_seconds
        time.sleep(seconds)
        return Window(arm.name, start, time.perf_counter())
    finally:
        arm.pause()


def _create(config: RunConfig, name: str) -> Run:
    from tasks import creating  # torch

    prepared = creating.prepare_run(config, name)
    return creating.create_run(prepared, creating.attempts_of(prepared))


def _service(run: Run, role: tuple[str, ...], log: Path) -> Service:
    what, *rest = role
    command = (sys.executable, "-m", "tasks.arm", what, run.store_url, run.run_id, str(log), *rest)
    return Service(
        name=f"the process of {' '.join(role)}",
        command=command,
        variables={},
        log=log.with_suffix(".log"),
        where=run.store_url,
        is_ready=lambda: (
            process_of(log) is not None and (what != "island" or len(read_steps(log)) > 0)
        ),
        grace_seconds=_GRACE_SECONDS,
    )


def _say_nothing(text: str) -> None:
    """Drop what is awaited: the progress shows it."""
