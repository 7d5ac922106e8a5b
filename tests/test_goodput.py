"""Goodput: by hand from spans of work; from a run's records; and of data-parallel jobs whose processes are killed."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import islice, pairwise
from pathlib import Path

import pytest

from infra import processes
from islands import names
from islands.chaos import Fault
from islands.contributions import Contribution
from islands.goodput import (
    Kill,
    Span,
    Trace,
    Work,
    kept_within,
    mean_at_work,
    seconds_to_resume,
    steps_within,
    uptime,
    victims,
)
from islands.types import IslandsError
from tasks import (
    benchmarks,
    checkpoint_costs,
    goodput,
    history,
    killing,
    records,
)
from tasks.data_parallel import Place, place_from, works_in
from tasks.goodput import (
    DECOUPLED,
    ELASTIC,
    ELASTIC_UNCAPPED,
    JOBS,
    RIGID,
    RIGID_UNCAPPED,
    Pipeline,
)
from tasks.kept_work import kept_work
from tasks.kill_plan import ISLANDS, Plan
from tasks.local import Driver
from tasks.records import new_attempt
from tasks.runs import Run
from tasks.step_log import StepLog
from tests.runs import start, tiny_config, train

# Two islands in a window of ten seconds: one works for 4 s and, after 3 s, for 3 s; the other one for the last 5 s.
WINDOW = Span(10.0, 20.0)
WORKS = (
    Work("east", Span(9.0, 14.0), 4.0, 5),
    Work("east", Span(17.0, 20.0), 3.0, 3),
    Work("west", Span(15.0, 25.0), 8.0, 4),
)


# --- by hand ---


def test_a_span_counts_with_the_part_that_lies_in_the_window() -> None:
    # 4/5 of the first, all of the second, half of the third.
    assert kept_within(WORKS, WINDOW) == pytest.approx(3.2 + 3.0 + 4.0)
    assert steps_within(WORKS, WINDOW) == pytest.approx(4.0 + 3.0 + 2.0)


def test_islands_at_work_are_counted_in_time_and_up_is_whoever_works() -> None:
    assert mean_at_work(WORKS, WINDOW) == pytest.approx((4 + 3 + 5) / 10)
    assert uptime(WORKS, WINDOW) == pytest.approx(0.9)  # from 14 to 15 nobody


def test_a_killed_island_resumes_with_its_next_work_and_a_kill_that_nothing_follows_has_no_wait() -> (
    None
):
    kills = [Kill("east", 14.5), Kill("west", 16.0), Kill("east", 9.5)]
    assert seconds_to_resume(WORKS, kills) == [2.5, 7.5]


def test_everybody_is_killed_once_before_anybody_twice_and_a_seed_always_gives_one_order() -> None:
    first = list(islice(victims(ISLANDS, 0), 8))
    assert first == list(islice(victims(ISLANDS, 0), 8))
    assert sorted(first[:4]) == sorted(first[4:]) == sorted(ISLANDS)
    assert len({tuple(islice(victims(ISLANDS, seed), 4)) for seed in range(8)}) > 1


def test_steps_from_which_a_later_group_went_back_are_not_kept(tmp_path: Path) -> None:
    """Group 0 takes steps 0 to 4; group 1 begins after step 3, group 2 after 4: step 4 of group 0 is thrown away."""
    for name, num_steps in (("000-a-b-0", 5), ("001-a-b-3", 2), ("002-a-b-4", 1)):
        log = StepLog(tmp_path / f"{name}.steps")
        for step in range(num_steps):
            log.add(step, step + 1.0, 0.75, 8)
    works = works_in(tmp_path)
    assert {work.island for work in works} == {"a-b"}
    assert [work.num_kept for work in works] == [1, 1, 1, 0, 0, 1, 0, 1]
    assert [work.kept_seconds for work in works] == [0.75 * work.num_kept for work in works]


def test_an_order_is_read_as_it_was_given() -> None:
    place = Place(3, 1, 4, "us-west")
    assert place_from(place.line()) == place


# --- the report ---


def trace(kept_seconds: float, *, rolled_back: float = 0.0) -> Trace:
    """Return four islands that work through 100 s but for the 10 s after a death."""
    works = [Work(name, Span(0.0, 100.0), kept_seconds, 500) for name in ISLANDS[1:]]
    works += [Work(ISLANDS[0], Span(0.0, 40.0), kept_seconds * 0.4, 200)]
    works += [Work(ISLANDS[0], Span(50.0, 100.0), kept_seconds * 0.5, 250)]
    return Trace(tuple(works), (Kill(ISLANDS[0], 40.0),), Span(0.0, 100.0), rolled_back)


def pipeline(ours: Trace, *, lost: int = 0, loss: float = 2.01) -> Pipeline:
    return Pipeline(
        trace=ours,
        detect=(0.2, 0.4),
        merged_again=(9.0, 12.0, 20.0),
        contributing=(4, 3, 2),
        quorum=2,
        lost=lost,
        double_counted=0,
        problems=(),
        merged_share=0.8,
        loss=loss,
        loss_in_peace=2.0,
        checkpoint_percent=0.5,
    )


def test_what_was_rolled_back_is_no_goodput_and_every_arm_is_measured_alike() -> None:
    ours = trace(100.0, rolled_back=5.0)
    traces = dict.fromkeys(JOBS, trace(90.0))
    traces |= {DECOUPLED: ours, ELASTIC: trace(60.0), RIGID: trace(20.0)}
    measured = goodput.report(Plan(), [pipeline(ours), pipeline(ours, loss=1.97)], traces)
    figures = measured.figures
    # 390 s at work of 400, 5 of them thrown away.
    assert figures["goodput"] == pytest.approx(385 / 400)
    assert figures["goodput_elastic"] == pytest.approx(0.6 * 390 / 400)
    assert figures["goodput_data_parallel"] == pytest.approx(0.2 * 390 / 400)
    assert figures["goodput_over_elastic"] == pytest.approx(385 / 234)
    assert figures[f"goodput_over_{ELASTIC_UNCAPPED}"] == pytest.approx(385 / 351)
    assert (figures["uptime"], figures["resume_s"]) == (1.0, 10.0)
    assert (figures["detect_s"], figures["merged_again_s"]) == (pytest.approx(0.3), 12.0)
    assert figures["loss_gap_percent"] == pytest.approx(-0.5)  # a gap of means over seeds
    assert figures["loss_gaps_percent"] == [pytest.approx(0.5), pytest.approx(-1.5)]
    assert (figures["seeds"], figures["deaths"]) == (2, 2)
    assert figures["participation"] == {"live": 3.9, "contributing": 3.0, "quorum": 2}
    # 1,950 steps in 390 s, 24 of them a period: 20 s until merged again is 15.2 s beyond that.
    assert figures["period_s"] == pytest.approx(4.8)
    for missed in (
        f"goodput_over_{ELASTIC_UNCAPPED} must be >= 1.4, got 1.097",
        f"goodput_over_{RIGID_UNCAPPED} must be >= 3, got 1.097",
        "merged_again_s_max - period_s must be <= 15, got 15.2",
    ):
        assert missed in measured.missed()
    assert not any(f"{met} must" in measured.missed() for met in ("over_elastic", "data_parallel"))
    rate = 1950 * 8 * 128 / 100
    assert figures["kept_tokens_per_second_by_arm"][DECOUPLED] == pytest.approx(rate * 385 / 390)


def test_every_promised_key_is_in_the_json_even_where_nobody_was_killed() -> None:
    ours = Trace(trace(100.0).works, (), Span(0.0, 100.0))
    quiet = Pipeline(
        **{  # type: ignore[arg-type]
            **{name: getattr(pipeline(ours), name) for name in Pipeline.__slots__},
            "detect": (),
            "merged_again": (),
        }
    )
    measured = goodput.report(Plan(), [quiet], dict.fromkeys((DECOUPLED, *JOBS), ours))
    text = benchmarks.as_json(measured)
    for key in (
        *("goodput", "goodput_elastic", "goodput_data_parallel", "uptime", "detect_s", "resume_s"),
        *("merged_again_s", "lost", "double_counted", "loss_gap_percent", "merged_share"),
    ):
        assert f'"{key}": ' in text
    assert measured.figures["resume_s"] is None
    assert "merged_again_s_max" in measured.missed()


def test_a_job_that_took_no_step_is_told_with_the_others() -> None:
    ours, idle = trace(100.0), Trace((), (), Span(0.0, 100.0))
    figures = goodput.report(
        Plan(), [pipeline(ours)], {**dict.fromkeys((DECOUPLED, *JOBS), ours), RIGID: idle}
    ).figures
    assert (figures["goodput_data_parallel"], figures["step_s_by_arm"][RIGID]) == (0.0, None)
    assert figures["goodput_over_data_parallel"] is None


def test_a_token_without_a_fate_misses_its_target() -> None:
    ours = trace(100.0)
    measured = goodput.report(
        Plan(), [pipeline(ours), pipeline(ours, lost=1)], dict.fromkeys((DECOUPLED, *JOBS), ours)
    )
    assert "lost must be <= 0, got 1" in measured.missed()


# --- a run's records ---


@pytest.fixture(scope="module")
def killed_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """East is killed at its step 20 and returns three base steps later; nobody else is."""
    faults = 'local.faults=[{island="east", step=20, return_after_steps=3}]'
    return train(tiny_config(tmp_path_factory.mktemp("killed"), 'retention="all"', faults))


def test_kept_steps_are_those_of_the_records_and_lives_do_not_overlap(killed_run: Run) -> None:
    last = history.last_link(killed_run, "east")
    assert last is not None
    kept = kept_work(killed_run, "east")
    assert sum(work.num_kept for work in kept.works) == last.position.step
    assert last.position.incarnation == 1
    spans = [work.span for work in kept.works]
    assert all(one.end <= other.begin for one, other in pairwise(spans))
    pauses = [other.begin - one.end for one, other in pairwise(spans)]
    assert sum(pause > 2.0 for pause in pauses) == 1  # the death, and nothing else


def test_a_run_that_is_over_before_all_have_pushed_has_no_window(tmp_path: Path) -> None:
    brief = train(tiny_config(tmp_path, 'retention="all"', "total_tokens=96"))
    with pytest.raises(IslandsError, match="raise --tokens"):
        killing.window_of(brief)


def test_what_a_return_threw_away_is_a_share_of_the_kept_seconds(killed_run: Run) -> None:
    last = history.last_link(killed_run, "east")
    assert last is not None
    tokens = sum(clock.rolled_back for clock in last.clocks) / 3  # fragments
    assert tokens > 0
    kept = kept_work(killed_run, "east")
    seconds = sum(work.kept_seconds for work in kept.works)
    assert kept.rolled_back_seconds == pytest.approx(seconds * tokens / last.trained)
    assert kept_work(killed_run, "west").rolled_back_seconds == 0.0


def test_the_first_version_with_work_of_the_next_life_ends_the_wait(killed_run: Run) -> None:
    commits = killing.commits_of(killed_run)
    later = [c.at for c in commits for e in c.consumed if "-1-" in e.name and e.learner == "east"]
    kills = [Kill("east", 20.0), Kill("west", 20.0)]
    assert killing.seconds_to_merge(killed_run, kills) == [min(later) - 20.0]


def test_losses_are_compared_at_about_as_many_merged_tokens(
    killed_run: Run, tmp_path: Path
) -> None:
    longer = train(tiny_config(tmp_path, 'retention="all"', "total_tokens=8_000"))
    here, there = killing.losses_at_equal_tokens(killed_run, longer)
    assert killing.losses_at_equal_tokens(longer, killed_run) == (there, here)
    final = killing.losses_at_equal_tokens(longer, longer)
    assert final[0] == final[1] != there


def test_looking_back_on_a_killed_run_finds_a_sound_ledger_and_what_the_death_cost(
    killed_run: Run,
) -> None:
    killed = killing.Killed(killed_run, killing.window_of(killed_run), (Kill("east", 20.0),), ())
    plan = Plan(batch_size=2, model=killed_run.config.model)
    ours = killing.look_back(plan, killed, killed_run)
    assert (ours.lost, ours.double_counted, list(ours.problems)) == (0, 0, [])
    assert ours.loss == ours.loss_in_peace > 0
    left = [
        records.require(killed_run.store, f"learners/{name}/left.json")[0]["at"]
        for name in ("east", "north", "west")
    ]
    firsts = [
        min(offer.telemetry.at for offer in offers_of(killed_run, name))
        for name in ("east", "north", "west")
    ]
    assert ours.trace.window == Span(max(firsts), min(left))
    assert len(ours.trace.kills) == len(ours.merged_again) == 1
    figures = goodput.report(plan, [ours], dict.fromkeys((DECOUPLED, *JOBS), ours.trace))
    assert 0.0 < figures.figures["goodput"] < 1.0
    assert ours.trace.rolled_back_seconds > 0


def offers_of(run: Run, learner: str) -> Iterator[Contribution]:
    for name in run.store.list_names("inbox/"):
        found = records.read_contribution(run.store, name) if f"/{learner}/" in name else None
        if found is not None and names.parse_contribution(name):
            yield found[0]


def test_a_checkpoint_takes_some_processor_time(tmp_path: Path) -> None:
    assert 0.0 < checkpoint_costs.checkpoint_seconds(tiny_config(tmp_path), "saved") < 1.0


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield process
    process.kill()
    process.wait()


def test_the_plan_begins_once_all_have_pushed_and_strikes_who_is_registered(
    tmp_path: Path, sleeper: subprocess.Popen[bytes]
) -> None:
    config = tiny_config(tmp_path)
    fault = Fault("kill", island="east", after_seconds=0.0)
    killer = killing.Killer(config.store, "r", [fault], until_share=0.5)
    killer.look()
    driver = start(config)
    killer.look()
    register(driver.run, "east", sleeper)
    killer.look()
    assert sleeper.poll() is None
    advance_until_all_have_pushed(driver)
    register(driver.run, "east", sleeper)  # a learner of the local driver has registered since
    killer.look()
    killer.look()
    assert sleeper.wait(20) == -signal.SIGKILL
    killer.look()  # writes it down, if the look before could not
    (kill,) = killing.kills_of(driver.run)
    assert kill.island == "east"


def test_nobody_is_struck_once_an_island_is_near_its_end(
    tmp_path: Path, sleeper: subprocess.Popen[bytes]
) -> None:
    config = tiny_config(tmp_path)
    fault = Fault("kill", island="east", after_seconds=0.0)
    killer = killing.Killer(config.store, "r", [fault], until_share=0.01)
    driver = start(config)
    advance_until_all_have_pushed(driver)
    register(driver.run, "east", sleeper)
    for _ in range(3):
        killer.look()
    assert sleeper.poll() is None


def advance_until_all_have_pushed(driver: Driver) -> None:
    while len({name.split("/")[2] for name in driver.run.store.list_names("inbox/")}) < 3:
        driver.advance()


def register(run: Run, island: str, process: subprocess.Popen[bytes]) -> None:
    where = processes.of(process.pid)
    assert where is not None
    history.register(run, island, new_attempt, stamp=time.time, where=where)


def test_the_plan_kills_every_20_seconds_and_everybody_in_turn() -> None:
    faults = Plan().faults()
    assert [fault.after_seconds for fault in faults[:3]] == [20.0, 40.0, 60.0]
    assert {fault.island for fault in faults[:4]} == set(ISLANDS)
    assert {fault.kind for fault in faults} == {"kill"}
