"""Runs of real learners by the local driver, healthy and sick: what is found, and where it is shown."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from flows import screen
from flows.report import write_report
from islands.config import RunConfig
from islands.health import Finding
from islands.learner import Learner
from islands.limits import HealthConfig
from islands.vitals import WINDOW
from tasks import building, creating
from tasks.health import Doctor, WindowPoints
from tasks.local import Driver
from tasks.reporting import status
from tasks.runs import Run
from tests import runs

BODY = (
    """
total_tokens = 10_500
durable = false
[model]
width = 16
num_layers = 1
num_heads = 2
context = 16
[data]
eval_bytes = 512
[sync]
num_fragments = 2
period_steps = 4
"""
    + "".join(f'[[islands]]\nname = "{name}"\nbatch_size = 2\n' for name in ("east", "north", "west"))
)  # fmt: skip
Bend = Callable[[Run, Learner], None]


def driver_of(folder: Path, *sets: str, bend: Bend | None = None) -> Driver:
    """Return a started driver; `bend` makes west's learner another one."""
    config = runs.tiny_config(folder, *sets, store=f"memory://health-{folder.name}", text=BODY)
    prepared = creating.prepare_run(config, "r")
    run = creating.create_run(prepared, creating.attempts_of(prepared))

    def build(name: str) -> Learner:
        learner = building.build_learner(run, name)
        if name == "west" and bend is not None:
            bend(run, learner)
        return learner

    return runs.driver_of(run, build)


def watched(driver: Driver) -> dict[str, Finding]:
    """Train to the end, looking every eight base steps, and return all that was found; the last of each kind."""
    driver.start()
    doctor, every, due = Doctor(driver.run), dict[str, Finding](), 0.0
    while driver.advance():
        if driver.now >= due:
            due = driver.now + 8
            every |= {finding.key: finding for finding in doctor.look(driver.run)}
    return every | {finding.key: finding for finding in doctor.look(driver.run)}


HEALTHY = {
    "equal": (),
    "speeds": ("islands.north.speed=0.85", "islands.west.speed=0.7", "sync.period_steps=8",
               "total_tokens=18_000"),
    "phases": ("islands.north.start_steps=1.3", "islands.west.start_steps=2.6"),
    "delays": ("sync.period_steps=6", "total_tokens=14_000",
               *(f"islands.{name}.push_delay_steps=1" for name in ("east", "north", "west"))),
    "diloco": ("sync.algorithm=diloco", "sync.num_fragments=1"),
    "coded": ("sync.codec=int4", "sync.codec_down=int4-delta"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("name", sorted(HEALTHY))
def test_nothing_is_said_of_a_healthy_run(tmp_path: Path, name: str) -> None:
    driver = driver_of(tmp_path, *HEALTHY[name])
    assert watched(driver) == {}
    assert min(f.version for f in status(driver.run).fragments) > WINDOW


def backwards(run: Run, learner: Learner) -> None:
    """Climb instead of descend."""
    for group in learner.optimizer.param_groups:
        group["maximize"] = True


def timid(run: Run, learner: Learner) -> None:
    """Train at a hundredth of the rate."""
    inner = run.config.inner
    small = inner.model_copy(update={"learning_rate": inner.learning_rate / 100})
    building.retune(learner, replace(run, config=run.config.model_copy(update={"inner": small})))


FAR = ("islands.west.fetch_delay_steps=10", "sync.max_staleness=8")
NEVER = ("sync.min_learners=1", "sync.grace_fraction=0.0", "total_tokens=12_000",
         "islands.east.push_delay_steps=6", "islands.west.push_delay_steps=6")  # fmt: skip
SICK: dict[str, tuple[Sequence[str], Bend | None, set[str]]] = {
    "far away": (FAR, None, {"stale west", "late west"}),
    "deltas scaled down": ((), timid, {"weak west"}),
    "deltas that point elsewhere": ((), backwards, {"opposed west"}),
    "a quorum of one": (NEVER, None, {"permissive", "starved east", "starved west"}),
    "five times as fast": (("islands.west.speed=5",), None, {"dominant west"}),
    "outer steps too large": (
        ("outer.learning_rate=10.0", "outer.momentum=0.95"),
        None,
        {"rising"},
    ),
    "gone": (
        ('local.faults=[{island="west", step=40, return_after_steps=500}]',),
        None,
        {"silent west"},
    ),
}


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("name", sorted(SICK))
def test_each_disease_of_a_real_run_is_found(tmp_path: Path, name: str) -> None:
    sets, bend, expected = SICK[name]
    every = watched(driver_of(tmp_path, *sets, bend=bend))
    # What nobody took by the end of a run whose islands never counted was in vain.
    assert expected <= set(every) <= {*expected, "wasteful"}


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_an_island_on_another_text_is_apart(tmp_path: Path) -> None:
    driver = driver_of(tmp_path)
    seat = driver.seats["west"]
    noise = np.random.default_rng(0).integers(0, 256, len(seat.shard))
    seat.shard = noise.astype(np.uint8)
    every = watched(driver)
    assert "apart west" in every
    assert set(every) <= {"apart west", "opposed west"}


# --- what reads the store


def test_a_limit_acts_at_once_and_a_status_says_the_three_numbers(tmp_path: Path) -> None:
    driver = driver_of(tmp_path)
    driver.start()
    while driver.advance() and driver.now < 60:
        pass
    seen = status(driver.run)
    assert (seen.live, seen.contributing, seen.quorum, seen.findings) == (3, 3, 2, ())
    strict = config_with(driver.run.config, max_share=0.3)
    found = status(replace(driver.run, config=strict)).findings
    assert [f.key for f in found] == ["dominant east", "dominant north", "dominant west"]
    apart = strict.model_copy(update={"quarantine": ("west",)})
    found = status(replace(driver.run, config=apart)).findings
    assert [f.key for f in found] == ["dominant east", "dominant north"]


def config_with(config: RunConfig, **limits: float) -> RunConfig:
    return config.model_copy(update={"health": HealthConfig(**limits)})  # type: ignore[arg-type]


def test_a_window_is_the_same_wherever_its_reader_begins(tmp_path: Path) -> None:
    from tasks import records

    driver = driver_of(tmp_path)
    driver.start()
    while driver.advance() and driver.now < 80:
        pass
    run = driver.run
    heads = [records.require_commit(run.store, p, 1)[0] for p in range(2)]
    early, made = WindowPoints(run), []
    newest = records.find_head(run.store, 0)[0].version
    assert newest > WINDOW
    for version in range(newest + 1):
        commit, _ = records.require_commit(run.store, 0, version)
        made = list(early.of(commit, heads))
        if version == 0:
            assert made == []
    assert made == list(WindowPoints(run).of(commit, heads))
    assert len(made) == 2 + 3 * 4
    # A tracker whose last batch was lost goes back, and must make the same points again.
    before, _ = records.require_commit(run.store, 0, newest - 2)
    assert list(early.of(before, heads)) == list(WindowPoints(run).of(before, heads))
    assert list(early.of(commit, heads)) == made


def test_status_and_report_show_each_finding_with_its_remedy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    driver = driver_of(tmp_path)
    driver.start()
    while driver.advance() and driver.now < 60:
        pass
    healthy = driver.run
    sick = replace(healthy, config=config_with(healthy.config, max_share=0.3))
    remedy = "make its steps smaller: `diloco adjust r --set islands.east.batch_size=1`"
    screen.show_status(status(sick))
    shown = capsys.readouterr().out
    assert "islands: 3 live, 3 contributing, 2 needed for a merge\n" in shown
    assert "warning: dominant east: 0.333 of the merges' weight is its own (limit 0.3); " in shown
    assert shown.count("warning: ") == 3
    assert remedy in shown
    screen.show_status(status(healthy))
    assert "warning" not in capsys.readouterr().out

    write_report(sick, tmp_path / "sick.html")
    write_report(healthy, tmp_path / "healthy.html")
    page = (tmp_path / "sick.html").read_text()
    assert (
        f"<td>dominant</td><td>east</td><td>0.333 of the merges&#x27; weight is its own</td><td>{remedy}</td>"
        in page
    )
    assert "3 live, 3 contributing, 2 needed for a merge" in page
    assert "nothing found" in (tmp_path / "healthy.html").read_text()


def test_who_has_written_nothing_for_long_is_not_alive(tmp_path: Path) -> None:
    fault = 'local.faults=[{island="west", step=12, return_after_steps=500}]'
    driver = driver_of(tmp_path, fault)
    driver.start()
    while driver.advance() and driver.now < 60:
        pass
    seen = status(driver.run)
    # Three periods of 4 steps are long: west wrote last at step 12.
    assert (seen.live, seen.contributing, seen.quorum) == (2, 2, 2)
    assert [island.state for island in seen.islands] == ["training", "training", "silent"]
