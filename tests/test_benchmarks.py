"""The benchmarks: what their figures are made of, by hand; small real runs; what MLflow and the screen are told."""

from __future__ import annotations

import importlib
import importlib.util
import json
import math
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from multiprocessing import active_children
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from prefect.logging import disable_run_logger

from flows.cli import run_command
from infra import settings
from islands.sections import ModelConfig, SyncConfig
from tasks import benchmarks, codec_gaps, overhead, peering
from tasks.answer_times import report as report_waits
from tasks.arms import Plan
from tasks.bench_command import run_command as run_as_a_process
from tasks.figures import Measured, Order, Table, Target, percent, ratio_or_none, scalars
from tasks.peering import OURS, THEIRS, Compared
from tasks.slices import (
    Slice,
    Window,
    median_of,
    single_steps,
    slice_of,
    slices_by_arm,
    turns,
    visible_ms,
    within,
)
from tasks.step_log import StepLog, process_of, read_steps
from tasks.training_pool import train_all
from tests.runs import write_text

# Columns: begun, ended, useful seconds, tokens. Steps of 2 s that are useful for 1.5 s, then a pause.
STEADY = np.array([[0, 2, 1.5, 10], [2, 4, 1.5, 10], [4, 6, 1.5, 10], [10, 12, 2, 10]], float)
NOTHING = Table((), (), ())


def silent(title: str, total: int) -> AbstractContextManager[Callable[[int, str], None]]:
    return nullcontext(lambda done, note: None)


ORDER = Order(2, 1000, silent, nullcontext)  # type: ignore[arg-type]


# --- targets and figures ---


@pytest.mark.parametrize(
    ("value", "relation", "limit", "is_met"),
    [
        (0.3, "<=", 0.3, True),
        (0.31, "<=", 0.3, False),
        (0.95, ">=", 0.95, True),
        (0.94, ">=", 0.95, False),
        (1.0, "<", 1.0, False),
        (math.nan, "<=", 0.3, False),
        (math.nan, ">=", 0.3, False),
    ],
)
def test_a_target_is_met_at_its_limit_and_never_by_nan(
    value: float, relation: Any, limit: float, is_met: bool
) -> None:
    assert Target("x", value, relation, limit).is_met is is_met


def test_what_is_missed_is_named_with_limit_and_value() -> None:
    measured = Measured({}, (Target("a", 2, "<=", 1), Target("b", 1, "<=", 1)), NOTHING)
    assert not measured.is_met
    assert measured.missed() == "a must be <= 1, got 2"


def test_numbers_of_a_mapping_are_found_one_level_deep_and_nothing_else() -> None:
    figures = {"a": 1, "b": {"x": 0.5, "y": None}, "c": [1, 2], "d": "text", "e": math.nan}
    assert dict(scalars(figures)) == {"a": 1.0, "b/x": 0.5}


def test_a_gap_compares_means_and_a_ratio_needs_something_to_compare_with() -> None:
    assert percent([2.0, 4.0], [1.0, 4.0]) == pytest.approx(20.0)  # 3.0 against 2.5
    assert ratio_or_none(1.0, 4.0) == 0.25
    assert ratio_or_none(1.0, 0.0) is None


# --- slices ---


def test_arms_take_turns_and_every_other_round_goes_backwards() -> None:
    assert "".join(turns("ab", 3)) == "abbaab"


def test_a_window_holds_the_steps_that_lie_wholly_in_it() -> None:
    assert within(STEADY, Window("a", 1.0, 11.9)).tolist() == STEADY[1:3].tolist()
    assert within(STEADY, Window("a", 2.0, 4.0)).tolist() == STEADY[1:2].tolist()


def test_a_slice_adds_up_rates_and_counts_what_is_not_useful_as_stall() -> None:
    # 30 tokens in 6 s, and 10 in 2 s, three useful seconds in four: 5 + 5 tokens a second.
    found = slice_of([STEADY, STEADY[:1]], Window("a", 0.0, 7.0))
    assert found == Slice(tokens_per_second=10.0, step_seconds=2.0, stall_fraction=0.25)


def test_a_gap_between_two_steps_is_stall_too() -> None:
    found = slice_of([STEADY], Window("a", 3.0, 12.0))  # one step from 4, one from 10: 3.5 s of 8
    assert found.stall_fraction == pytest.approx(1 - 3.5 / 8)


def test_a_slice_without_a_step_is_refused() -> None:
    with pytest.raises(ValueError, match="lengthen it"):
        slice_of([STEADY, STEADY[3:]], Window("a", 0.0, 7.0))


def test_each_arm_is_looked_at_in_its_own_windows() -> None:
    windows = [Window("a", 0, 4), Window("b", 4, 6), Window("a", 9, 12)]
    learners = {"a": [STEADY], "b": [STEADY]}
    found = slices_by_arm(learners, windows)
    assert [one.stall_fraction for one in found["a"]] == [0.25, 0.0]
    assert [one.stall_fraction for one in found["b"]] == [0.25]
    assert single_steps(learners, windows) == {"a": [2, 2, 2], "b": [2]}
    assert median_of([Slice(1, 1, 0), Slice(9, 9, 0), Slice(2, 2, 0)], "step_seconds") == 2


def test_what_an_exchange_costs_is_shared_by_the_steps_up_to_the_next_one() -> None:
    assert visible_ms(0.052, 0.050, 6) == pytest.approx(12.0)


def test_steps_are_read_while_they_are_written(tmp_path: Path) -> None:
    path = tmp_path / "a.steps"
    assert (process_of(path), len(read_steps(path))) == (None, 0)
    log = StepLog(path)
    assert process_of(path) is not None
    log.add(1.0, 2.0, 0.5, 8)
    first = read_steps(path)
    log.add(2.0, 3.0, 1.0, 8)
    assert first.tolist() == [[1, 2, 0.5, 8]]
    assert read_steps(path).tolist() == [[1, 2, 0.5, 8], [2, 3, 1, 8]]


# --- reports ---


def test_the_overhead_is_the_ratio_of_median_slices() -> None:
    slices = {
        overhead.WITH: [Slice(90, 0.1, 0.001), Slice(96, 0.1, 0.002), Slice(99, 0.1, 0.02)],
        overhead.WITHOUT: [Slice(100, 0.1, 0), Slice(100, 0.1, 0), Slice(10, 0.1, 0)],
    }
    measured = overhead.report(slices, 0.85)
    figures = measured.figures
    assert figures["throughput_ratio"] == pytest.approx(0.96)
    assert figures["throughput_ratio_paired"] == pytest.approx(0.96)  # of 0.9, 0.96 and 9.9
    assert (figures["learner_stall_fraction"], figures["merged_share"]) == (0.002, 0.85)
    assert measured.is_met
    assert "merged_share must be >= 0.8, got 0.79" in overhead.report(slices, 0.79).missed()


def compared(ours: float, theirs: float) -> Compared:
    """Return arms whose slices have steps of 50 ms without an exchange, and so many with."""
    seconds = dict(zip((*OURS, *THEIRS), (ours, 0.050, theirs, 0.050), strict=True))
    slices = {arm: [Slice(1, value, 0)] for arm, value in seconds.items()}
    # Most single steps see nothing of an exchange; one in six bears it all.
    steps = {arm: [0.050] * 5 + [0.050 + 6 * (value - 0.050)] for arm, value in seconds.items()}
    return Compared(slices, steps, 6.0)


def test_the_peers_figures_are_per_exchange_and_a_burst_counts_in_full() -> None:
    figures = peering.report(compared(0.051, 0.055)).figures
    assert figures["visible_ms"] == pytest.approx(6.0)
    assert figures["peer_visible_ms"] == pytest.approx(30.0)
    assert figures["visible_ratio"] == pytest.approx(0.2)
    assert figures["peer_visible_ms_mean_of_steps"] == pytest.approx(30.0)
    assert figures["peer_visible_ms_median_of_steps"] == pytest.approx(0.0)
    assert peering.report(compared(0.051, 0.055)).is_met
    assert not peering.report(compared(0.053, 0.055)).is_met


def test_a_peer_that_costs_nothing_leaves_no_ratio_and_a_missed_target() -> None:
    measured = peering.report(compared(0.051, 0.050))
    assert json.loads(benchmarks.as_json(measured))["visible_ratio"] is None
    assert not measured.is_met


def test_waits_are_medians_against_their_limits() -> None:
    measured = report_waits([0.1, 0.14, 0.9], [4.0, 5.0, 6.0], [21.0], [2.0], [3.0])
    assert measured.figures["warm_ms_median"] == pytest.approx(140)
    assert (measured.figures["cold_idle_s"], measured.figures["empty_flow_s"]) == (5.0, 2.0)
    assert measured.missed() == "cold_busy_s must be <= 20, got 21"


def test_a_codecs_gap_is_paired_by_seed_and_only_four_bit_formats_have_a_limit() -> None:
    losses = {"float32": [4.0, 2.0], "int4": [4.1, 2.0], "bfloat16": [6.0, 2.0]}
    measured = codec_gaps.report(losses, dict.fromkeys(losses, 1.0), 1000)
    assert measured.figures["gap_percent"]["int4"] == pytest.approx(100 * 0.05 / 3)
    assert measured.figures["gap_percent_per_seed"]["int4"] == pytest.approx([2.5, 0.0])
    assert [target.name for target in measured.targets] == ["gap %, int4"]
    assert not measured.is_met


def test_every_codec_of_either_way_has_a_row_that_is_a_valid_setting() -> None:
    rows = codec_gaps.settings()
    fields = SyncConfig.model_fields
    assert set(get_args(fields["codec"].annotation)) <= set(rows)
    down = {codec for codec in get_args(fields["codec_down"].annotation) if codec != "float32"}
    assert {f"{codec} down" for codec in down} <= set(rows)
    assert {"alpha 0.25", "alpha 0.5", "late, max_staleness 0", "late, max_staleness 4"} <= {*rows}
    for row in rows.values():
        SyncConfig.model_validate(row)


# --- small real runs ---


def test_a_codecs_training_is_the_same_each_time(tmp_path: Path) -> None:
    text = str(write_text(tmp_path, 40))
    job = codec_gaps.Job("bfloat16", 1)
    first, second = (codec_gaps.train(8_192, text, job) for _ in range(2))
    assert first == second
    assert 0 < first.bits_per_byte < 8
    assert first.merged_share > 0.9


@pytest.mark.timeout(60)
def test_trainings_that_nobody_waits_for_any_more_are_ended() -> None:
    """One has ended when its caller is stopped; the other one would take two minutes."""

    def stop(done: int, note: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_all((0.0, 120.0), time.sleep, stop, note=lambda job, result: "")
    assert active_children() == []


@pytest.mark.slow
def test_two_arms_take_turns_and_only_one_of_them_merges(tmp_path: Path) -> None:
    plan = Plan(
        model=ModelConfig(width=16, num_layers=1, num_heads=2, context=16),
        batch_size=2,
        period_steps=240,
        whole_seconds=6.0,
        num_slices=2,
        slice_seconds=0.8,
        dropped_seconds=0.2,
        warm_up_seconds=1.0,
        source=str(write_text(tmp_path, 40)),
    )
    slices, merged_share = overhead.compare(plan, lambda done, note: None)
    assert [len(ones) for ones in slices.values()] == [2, 2]
    assert merged_share > 0.2
    rate = statistics.median(one.tokens_per_second for one in slices[overhead.WITHOUT])
    assert rate > 100
    assert all(0 <= one.stall_fraction < 1 for ones in slices.values() for one in ones)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy")  # within MLflow
def test_a_benchmark_leaves_one_run_in_mlflow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow import MlflowClient

    monkeypatch.chdir(tmp_path)  # files of a run lie beside the database
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    figures = {"ratio": 0.5, "gap_percent": {"int4 up, int4-delta down": 1.5}}
    measured = Measured(figures, (Target("ratio", 0.5, "<=", 0.3),), NOTHING)
    made = {benchmarks.log("codecs", ORDER, measured, uri) for _ in range(2)}
    client = MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("benchmarks")
    assert experiment is not None
    runs = client.search_runs([experiment.experiment_id])
    assert {run.info.run_id for run in runs} == made
    assert len(made) == 2
    run = runs[0]
    assert (run.info.run_name, run.info.status) == ("codecs", "FINISHED")
    assert run.data.metrics == {"ratio": 0.5, "gap_percent/int4 up int4-delta down": 1.5}
    assert run.data.params == {"benchmark": "codecs", "seeds": "2", "tokens": "1000"}
    assert run.data.tags["diloco.targets"] == "ratio must be <= 0.3, got 0.5"
    assert [item.path for item in client.list_artifacts(run.info.run_id)] == ["figures.json"]


# --- the command and the flow ---


def test_every_name_is_a_module_that_measures() -> None:
    for name in get_args(benchmarks.Name):
        assert callable(importlib.import_module(benchmarks.MODULES[name]).measure)


@pytest.mark.skipif(
    importlib.util.find_spec("torchft") is not None, reason="torchft is installed here"
)
def test_without_torchft_the_peer_benchmark_says_how_to_get_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run_command(["bench", "peer"]) == 2
    assert "pip install 'diloco[peers]'" in capsys.readouterr().err


@pytest.mark.slow
def test_a_benchmark_prints_a_table_writes_its_figures_and_says_that_nothing_was_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in (settings.PREFECT_API_URL, settings.MLFLOW_TRACKING_URI):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(settings.HOME, str(tmp_path / "home"))
    status = run_command(["bench", "start", "--json", str(tmp_path / "start.json")])
    figures = json.loads((tmp_path / "start.json").read_text())
    assert set(figures) == {"import_merging_seconds", "help_seconds"}
    is_met = figures["import_merging_seconds"] < 0.5 and figures["help_seconds"] < 1.0
    assert status == (0 if is_met else 1)
    said = capsys.readouterr().out
    assert "help_seconds" in said
    assert "nothing was logged" in said


def test_a_flows_benchmark_is_a_process_whose_status_comes_back() -> None:
    with disable_run_logger():
        assert run_as_a_process("nope", 3, None) == 2
        assert run_as_a_process("codecs", 0, 5) == 2
