"""Faults that strike real processes and real records: who is met, who is spared, and that everybody goes on."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from infra import guard, processes, services, settings
from infra.link import Link
from islands import chaos, names
from islands.chaos import Fault, Plan
from islands.types import ConfigError, StoreUnavailable
from tasks import history, joining, records, targets
from tasks.chaos import Chaos, require_strikable, strikable_islands, unleash
from tasks.enduring import Endured
from tasks.local import Driver
from tasks.records import new_attempt
from tasks.runs import Run
from tasks.verifying import verify
from tests import runs
from tests.fleet import wait_until

ROOT = Path(__file__).resolve().parent.parent
COUNT = """
import sys, time
file = open(sys.argv[1], "wb", buffering=0)
while True:
    file.write(b".")
    time.sleep(0.005)
"""


class Counter:
    """A process that counts: its file grows while it runs."""

    def __init__(self, folder: Path, name: str = "count") -> None:
        self.path = folder / name
        self.process = subprocess.Popen([sys.executable, "-S", "-c", COUNT, str(self.path)])
        wait_until(lambda: self.path.exists() and self.count() > 0, 30)
        where = processes.of(self.process.pid)
        assert where is not None
        self.where = where

    def count(self) -> int:
        return self.path.stat().st_size

    def counts_on(self) -> bool:
        """Say whether it counts within the next seconds."""
        before = self.count()
        with contextlib.suppress(AssertionError):
            wait_until(lambda: self.count() > before, 5)
        return self.count() > before

    def stands_still(self) -> bool:
        time.sleep(0.05)  # what it was just writing
        before = self.count()
        time.sleep(0.3)
        return self.count() == before


@pytest.fixture
def counter(tmp_path: Path) -> Iterator[Counter]:
    counting = Counter(tmp_path)
    yield counting
    counting.process.kill()
    counting.process.wait()


@pytest.fixture
def driver(tmp_path: Path) -> Driver:
    return runs.start(
        runs.tiny_config(tmp_path, store=f"memory://strikes-{tmp_path.name}-{id(tmp_path)}")
    )


@pytest.fixture
def run(driver: Driver) -> Run:
    return driver.run


def begin(run: Run, *faults: Fault) -> tuple[Chaos, list[str]]:
    told: list[str] = []
    return Chaos(run, list(faults), told.append), told


def register(run: Run, where: dict[str, object]) -> None:
    history.register(run, "east", new_attempt, stamp=time.time, where=where)


# --- kill ---


def test_a_kill_meets_the_process_that_trains_and_is_recorded(run: Run, counter: Counter) -> None:
    register(run, counter.where)
    under_way, told = begin(run, Fault("kill", island="east", after_seconds=0.0))
    under_way.look()
    assert counter.process.wait(10) == -signal.SIGKILL
    assert told == [f"east's learner: SIGKILL to process {counter.process.pid}"]
    under_way.look()
    assert under_way.is_done
    (strike,) = records.read_strikes(run.store).values()
    assert (strike.told, strike.fault.island) == (told[0], "east")
    assert not [p for p in verify(run.store_url, run.run_id).problems if "chaos" in p.name]


def test_a_recycled_process_id_is_not_touched_and_the_fault_waits(
    run: Run, counter: Counter
) -> None:
    register(run, {**counter.where, "started": counter.where["started"] - 1})
    under_way, told = begin(run, Fault("kill", island="east", after_seconds=0.0))
    under_way.look()
    assert counter.counts_on()
    assert not told
    assert len(under_way.waiting) == 1
    register(run, counter.where)  # its successor, and the fault has waited for it
    under_way.look()
    assert counter.process.wait(10) == -signal.SIGKILL
    assert not under_way.waiting


def test_a_fault_strikes_when_its_islands_records_have_reached_its_step(
    driver: Driver, counter: Counter
) -> None:
    under_way, told = begin(driver.run, Fault("kill", island="east", step=12))
    while records.newest_incarnation(driver.run.store, "east") < 0:
        assert driver.advance()
    register(driver.run, counter.where)
    furthest = 0
    while furthest < 12:
        under_way.look()
        assert not told
        assert driver.advance()
        keys = map(names.parse_contribution, driver.run.store.list_names("inbox/"))
        steps = [key.stop.step for key in keys if key is not None and key.learner == "east"]
        furthest = max([furthest, *steps])
    under_way.look()
    assert told == [f"east's learner: SIGKILL to process {counter.process.pid}"]


def test_what_never_struck_is_told_after_the_end_and_nothing_is_written_then(
    driver: Driver,
) -> None:
    run = runs.finish(driver)
    before = run.store.list_names("")
    fault = Fault("kill", island="east", after_seconds=0.0)
    assert unleash(run, Plan((fault,)), say=print) == [fault]
    assert run.store.list_names("") == before
    assert verify(run.store_url, run.run_id).problems == []


def test_who_has_left_is_not_waited_for(run: Run, counter: Counter) -> None:
    register(run, counter.where)
    history.write_off(run, "west", stamp=time.time)
    assert strikable_islands(run) == ["east", "north"]
    never = Fault("kill", island="west", after_seconds=600.0)
    later = Fault("kill", island="east", after_seconds=600.0)
    under_way, told = begin(run, never, later)
    under_way.look()
    assert told == ["kill west's learner, after 600 s: west has left"]
    assert (under_way.missed, under_way.waiting) == ([never], [later])
    assert unleash(run, Plan((never,)), say=print) == [never]


def test_an_island_that_has_left_may_still_say_when_somebody_else_is_struck(
    run: Run, counter: Counter
) -> None:
    """What waits of its work can still be damaged, too."""
    history.write_off(run, "west", stamp=time.time)
    waiting = [
        Fault("kill", target="synchronizer", island="west", step=50),
        Fault("corrupt", island="west", after_seconds=600.0),
    ]
    under_way, told = begin(run, *waiting)
    under_way.look()
    assert (told, under_way.waiting) == ([], waiting)


def test_a_plan_goes_on_while_an_island_trains_that_has_joined_since(run: Run) -> None:
    under_way, _ = begin(run, Fault("kill", island="east", after_seconds=600.0))
    joining.join(run, "south", [])
    for island in ("east", "north", "west"):
        history.write_off(run, island, stamp=time.time)
    under_way.look()
    assert not under_way.is_over
    history.write_off(run, "south", stamp=time.time)
    under_way.look()
    assert under_way.is_over


# --- stop and slow ---


def test_a_stopped_process_stands_still_and_goes_on_when_the_time_is_over(
    run: Run, counter: Counter
) -> None:
    register(run, counter.where)
    under_way, told = begin(run, Fault("stop", island="east", after_seconds=0.0, seconds=1.5))
    under_way.look()
    assert counter.stands_still()
    assert told == [f"east's learner: process {counter.process.pid} stands still for 1.5 s"]
    assert counter.counts_on()
    wait_until(lambda: under_way.look() or under_way.is_done, 30)


def test_a_stopped_process_goes_on_when_the_plan_is_ended_before(
    run: Run, counter: Counter
) -> None:
    register(run, counter.where)
    under_way, _ = begin(run, Fault("stop", island="east", after_seconds=0.0, seconds=600.0))
    under_way.look()
    assert counter.stands_still()
    under_way.close()
    assert counter.counts_on()


def test_a_slowed_process_does_a_part_of_what_another_does(run: Run, tmp_path: Path) -> None:
    slowed, other = Counter(tmp_path, "slowed"), Counter(tmp_path, "other")
    try:
        register(run, slowed.where)
        fault = Fault("slow", island="east", after_seconds=0.0, seconds=600.0, factor=10.0)
        under_way, _ = begin(run, fault)
        under_way.look()
        before = slowed.count(), other.count()
        time.sleep(2.0)
        after = slowed.count(), other.count()
        under_way.close()
        assert 0 < after[0] - before[0] < 0.6 * (after[1] - before[1])
        assert slowed.counts_on()
    finally:
        for counting in (slowed, other):
            counting.process.kill()
            counting.process.wait()


def test_what_is_held_is_not_woken_by_another_fault(run: Run, counter: Counter) -> None:
    register(run, counter.where)
    stop = Fault("stop", island="east", after_seconds=0.0, seconds=600.0)
    slow = Fault("slow", island="east", after_seconds=0.0, seconds=1.0, factor=2.0)
    under_way, _ = begin(run, stop, slow)
    under_way.look()
    assert under_way.waiting == [slow]
    assert counter.stands_still()
    under_way.close()


# --- targets ---


def test_an_islands_flow_and_its_whole_cluster_are_found_from_its_learner(run: Run) -> None:
    """As on a cluster of its own: the learner is a child of the flow, and so is another process."""
    nap = "import time; print('up', flush=True); time.sleep(600)"
    flow = (
        "import subprocess, sys, time\n"
        f"command = [sys.executable, '-S', '-c', {nap!r}]\n"
        "children = [subprocess.Popen(command) for _ in range(2)]\n"
        "time.sleep(600)\n"
    )
    command = [sys.executable, "-S", "-c", flow, "prefect.engine"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        for _ in range(2):
            process.stdout.readline()
        learner, other = processes.children(process.pid)
        where = processes.of(learner)
        assert where is not None
        register(run, where)

        def found(target: chaos.Target) -> list[int]:
            fault = Fault("kill", target, "east", after_seconds=0.0)
            return [one["process"] for one in targets.processes_of(run, fault)]

        assert found("learner") == [learner]
        assert found("nanny") == found("island") == [process.pid]
        assert found("cluster") == [process.pid, learner, other]
        under_way, told = begin(run, Fault("kill", "cluster", "east", after_seconds=0.0))
        under_way.look()
        assert process.wait(10) == -signal.SIGKILL
        wait_until(lambda: not any(map(processes.of, (learner, other))), 10)
        assert told == [f"east's cluster: SIGKILL to 3 processes, {process.pid} first,"]


def test_the_newest_synchronizer_is_the_one_that_is_met(run: Run, counter: Counter) -> None:
    for number, where in enumerate(({"host": "elsewhere", "process": 1}, counter.where)):
        body = {"number": number, "mark": new_attempt(), "at": 1.0, "where": where}
        records.write(run.store, names.numbered("synchronizers", number), body)
    found = targets.processes_of(run, Fault("kill", "synchronizer", after_seconds=0.0))
    assert found == [counter.where]


def test_a_service_is_met_without_its_guard_and_serve_without_its_flows(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(settings.HOME, str(tmp_path))
    assert targets.processes_of(run, Fault("kill", "mlflow", after_seconds=0.0)) == []
    addresses = {"prefect_api_url": "", "prefect_url": "", "mlflow_url": "", "pid": os.getpid()}
    (tmp_path / services.RECORD).write_text(json.dumps(addresses))
    parent = (
        "import subprocess, sys, time\n"
        "subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(600)'])\n"
        "time.sleep(600)\n"
    )
    guards = {
        target: subprocess.Popen(
            [sys.executable, "-S", guard.__file__, "--grace", "0", "--", sys.executable, "-S", "-c", parent, *words],
            stdin=subprocess.PIPE,
        )
        for target, words in (("mlflow", ("mlflow server",)), ("serve", ("flows.serving",)))
    }  # fmt: skip
    try:
        for guarded in guards.values():
            wait_until(lambda one=guarded.pid: len(processes.descendants(one)) == 2, 30)
        below = {target: processes.descendants(one.pid) for target, one in guards.items()}

        def found(target: chaos.Target) -> list[int]:
            fault = Fault("stop", target, after_seconds=0.0, seconds=1.0)
            return [one["process"] for one in targets.processes_of(run, fault)]

        assert found("mlflow") == below["mlflow"]
        assert found("serve") == below["serve"][:1]
        # This process may have started a Prefect for other tests.
        assert not {*found("prefect")} & {*below["mlflow"], *below["serve"]}
    finally:
        for guarded in guards.values():
            assert guarded.stdin is not None
            guarded.stdin.close()
            guarded.wait(30)


# --- links ---


def test_a_cut_and_a_full_disk_reach_the_islands_own_link_by_way_of_the_store(
    run: Run, counter: Counter
) -> None:
    register(run, counter.where)
    for kind in ("cut", "fill"):
        under_way, _ = begin(run, Fault(kind, island="east", after_seconds=0.0, seconds=0.5))
        links = {name: Link(run.store, counted=()) for name in ("east", "west")}
        seen = {name: Endured(run, name, link) for name, link in links.items()}
        under_way.look()
        assert under_way.is_done
        for endured in seen.values():
            endured.look()
        with pytest.raises(StoreUnavailable, match="on purpose for another 0"):
            links["east"].create(f"payloads/{kind}", b"x")
        links["west"].create(f"payloads/{kind}", b"x")  # another island's
        time.sleep(0.6)
        links["east"].create(f"payloads/{kind}-later", b"x")


def test_an_older_strike_does_not_meet_a_successor(run: Run, counter: Counter) -> None:
    register(run, counter.where)
    under_way, _ = begin(run, Fault("cut", island="east", after_seconds=0.0, seconds=600.0))
    under_way.look()
    link = Link(run.store, counted=())
    Endured(run, "east", link).look()
    assert link.read(names.RUN) is not None


def test_a_cut_waits_until_somebody_trains(run: Run, counter: Counter) -> None:
    counter.process.kill()
    counter.process.wait()
    register(run, counter.where)
    under_way, told = begin(run, Fault("cut", island="east", after_seconds=0.0, seconds=1.0))
    under_way.look()
    assert under_way.waiting
    assert not told


def test_what_the_local_driver_trains_is_not_struck(driver: Driver) -> None:
    for _ in range(20):
        driver.advance()
    with pytest.raises(ConfigError, match="must be one that Prefect trains, got 'r'"):
        require_strikable(driver.run)
