"""Flow of a run on the local driver: create or reopen, advance to the end, evaluate."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from islands.config import RunConfig
from islands.types import VersionTaken
from tasks import building, creating, evaluating
from tasks.clockwork import Beat
from tasks.local import Driver
from tasks.local_state import restore_state
from tasks.origins import Origin
from tasks.runs import Run

Watch = Callable[[Beat], None]


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended: finished, or stopped on request and resumable.

    `score` is None if it was stopped, or if nothing was ever merged.
    """

    run: Run
    is_finished: bool
    score: evaluating.Score | None


def train(
    config: RunConfig,
    run_id: str,
    *,
    watch: Watch,
    is_stopped: Callable[[], bool],
    origin: Origin | None = None,
) -> Outcome:
    """Create a run, from an origin if there is one, and train it to its end.

    Raises:
        ConfigError: something is wrong; nothing was created.
    """
    prepared = creating.prepare_run(config, run_id, origin=origin)
    driver = _driver(creating.create_run(prepared, creating.attempts_of(prepared)), watch)
    driver.start()
    return _advance(driver, is_stopped)


def resume(run: Run, *, watch: Watch, is_stopped: Callable[[], bool]) -> Outcome:
    """Go on with an interrupted run, bit for bit as if it had never stopped."""
    building.require_devices(run.config)
    creating.complete_run(run)
    driver = _driver(run, watch)
    if not restore_state(driver):
        driver.start()
    return _advance(driver, is_stopped)


def _driver(run: Run, watch: Watch) -> Driver:
    building.use_one_thread()
    return Driver(
        run,
        lambda name: building.build_learner(run, name),
        watch,
        partial(evaluating.evaluate_if_merged, closes=True),
    )


def _advance(driver: Driver, is_stopped: Callable[[], bool]) -> Outcome:
    try:
        while driver.advance():
            if is_stopped():
                driver.save(reschedule=False)
                return Outcome(driver.run, False, None)
    except VersionTaken as exc:
        run_id = driver.run.run_id
        raise VersionTaken(
            f"a run must have one writer, but another process seems to be writing {run_id} ({exc}); "
            f"let it finish or stop it, then `diloco resume {run_id}`"
        ) from exc
    return Outcome(driver.run, True, evaluating.evaluate_if_merged(driver.run))
