"""Flow `benchmark`: one named measurement, a table, and its figures as JSON."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from uuid import uuid4

from rich.table import Table

from flows import screen
from islands.config import RunConfig
from islands.sections import InnerConfig, IslandConfig, LocalConfig, SyncConfig
from tasks import answering, measuring, storing

LEARNING_RATES = (2e-3, 4e-3, 8e-3)
# The joined batch is the same for any number of islands: 16 sequences of 64 bytes, 1,024 tokens.
JOINED_BATCH = 16
PHASES = (0.0, 6.0, 12.0, 18.0)
SPEEDS = (1.0, 1.0, 0.85, 0.7)
_NUM_ROUNDS = 41


@dataclass(frozen=True, slots=True)
class Setting:
    """One row of the quality table.

    `limit_percent`: the most its loss may exceed the baseline's. `tuned_as`: the row whose learning rate it takes.
    """

    label: str
    islands: tuple[IslandConfig, ...]
    limit_percent: float
    tuned_as: str


@dataclass(frozen=True, slots=True)
class Job:
    """One training to run in a process: `label` "" is the data-parallel baseline, on the shards of four islands."""

    label: str
    learning_rate: float
    seed: int


def quality_settings() -> dict[str, Setting]:
    """Return the compared settings by label."""
    in_phase = {m: tuple(_island(i, m) for i in range(m)) for m in (2, 4, 8)}
    delayed = tuple(_island(i, 4, start=PHASES[i], delay=2.0) for i in range(4))
    uneven = tuple(_island(i, 4, start=PHASES[i], delay=2.0, speed=SPEEDS[i]) for i in range(4))
    two, four, eight = (f"M={m}, in phase" for m in (2, 4, 8))
    rows = [
        Setting(two, in_phase[2], 0.0, two),
        Setting(four, in_phase[4], 1.0, four),
        Setting("M=4, phases 0/6/12/18, delay 4", delayed, 1.0, four),
        Setting("M=4, the same, speeds 1/1/0.85/0.7", uneven, 2.0, four),
        Setting(eight, in_phase[8], 1.5, eight),
    ]
    return {row.label: row for row in rows}


def run_benchmark(name: str, target: Path | None, *, seeds: int, tokens: int) -> int:
    """Run one benchmark, print its table, write its figures; 0 if every target is met."""
    if name == "quality":
        figures, is_met = _quality(seeds, tokens)
    elif name == "merge":
        figures, is_met = _merge()
    elif name == "store":
        figures, is_met = _store()
    elif name == "latency":
        figures, is_met = _latency()
    else:
        figures, is_met = _start()
    if target is not None:
        target.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    return 0 if is_met else 1


def quality_job(job: Job, tokens: int) -> dict[str, float]:
    """Train one job and return "bits_per_byte" and "merged_share"; runs in a process of its own."""
    from flows import local
    from tasks import building
    from tasks.baseline import train_data_parallel
    from tasks.creating import split_text
    from tasks.reporting import status

    building.use_one_thread()
    islands = (
        quality_settings()[job.label].islands
        if job.label
        else tuple(_island(i, 4) for i in range(4))
    )
    config = RunConfig(
        store=f"memory://quality-{uuid4().hex}",
        total_tokens=tokens,
        seed=job.seed,
        islands=islands,
        inner=InnerConfig(learning_rate=job.learning_rate),
        sync=SyncConfig(codec_down="float32"),
        local=LocalConfig(checkpoint_steps=768),
    )
    if not job.label:
        return {
            "bits_per_byte": train_data_parallel(config, split_text(config)),
            "merged_share": 1.0,
        }
    outcome = local.train(config, "r", watch=lambda beat: None, is_stopped=lambda: False)
    assert outcome.score is not None
    return {
        "bits_per_byte": outcome.score.bits_per_byte,
        "merged_share": status(outcome.run).merged_share,
    }


def _quality(seeds: int, tokens: int) -> tuple[dict[str, Any], bool]:
    """Tune on seed 0 from one grid for both sides, train every seed at the best rate, compare means over seeds."""
    settings = quality_settings()
    tuned = ["", *sorted({setting.tuned_as for setting in settings.values()})]
    tuning = [Job(label, rate, 0) for label in tuned for rate in LEARNING_RATES]
    results = _train_all(tuning, tokens, "tuning on seed 0")
    best = {}
    for label in tuned:
        scores = [(results[Job(label, rate, 0)]["bits_per_byte"], rate) for rate in LEARNING_RATES]
        best[label] = min(scores)[1]
    rates = {"": best[""], **{label: best[setting.tuned_as] for label, setting in settings.items()}}
    jobs = [Job(label, rate, seed) for label, rate in rates.items() for seed in range(seeds)]
    results |= _train_all([job for job in jobs if job not in results], tokens, "all seeds")
    theirs = [results[Job("", rates[""], seed)]["bits_per_byte"] for seed in range(seeds)]
    rows = [
        _quality_row(
            setting,
            rates[label],
            [results[Job(label, rates[label], seed)] for seed in range(seeds)],
            theirs,
        )
        for label, setting in settings.items()
    ]
    _show_quality(rows, rates[""], theirs)
    figures = {
        "tokens": tokens,
        "seeds": seeds,
        "rows": rows,
        "baseline_bits_per_byte": theirs,
        "baseline_learning_rate": rates[""],
        "tuning": [
            [job.label or "data-parallel", job.learning_rate, results[job]["bits_per_byte"]]
            for job in tuning
        ],
    }
    return figures, all(row["is_met"] for row in rows)


def _quality_row(
    setting: Setting, rate: float, ours: list[dict[str, float]], theirs: list[float]
) -> dict[str, Any]:
    gap = 100 * (
        statistics.fmean(row["bits_per_byte"] for row in ours) / statistics.fmean(theirs) - 1
    )
    share = min(row["merged_share"] for row in ours)
    return {
        "setting": setting.label,
        "learning_rate": rate,
        "bits_per_byte": [row["bits_per_byte"] for row in ours],
        "gap_percent": gap,
        "limit_percent": setting.limit_percent,
        "merged_share": share,
        "is_met": gap <= setting.limit_percent and share >= 0.8,
    }


def _show_quality(rows: list[dict[str, Any]], rate: float, theirs: list[float]) -> None:
    table = Table("setting", "rate", "bits/byte", "gap %", "limit %", "merged share")
    table.add_row("data-parallel", f"{rate:g}", f"{statistics.fmean(theirs):.4f}", "", "", "")
    for row in rows:
        loss = statistics.fmean(row["bits_per_byte"])
        gaps = (f"{row['gap_percent']:+.2f}", f"{row['limit_percent']:+.1f}")
        table.add_row(
            row["setting"],
            f"{row['learning_rate']:g}",
            f"{loss:.4f}",
            *gaps,
            f"{row['merged_share']:.3f}",
        )
    screen.OUT.print(table)


def _train_all(jobs: list[Job], tokens: int, title: str) -> dict[Job, dict[str, float]]:
    """Train the jobs, one process per core."""
    results = {}
    with (
        ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn")) as pool,
        screen.progress(title, len(jobs)) as advance,
    ):
        futures = {job: pool.submit(quality_job, job, tokens) for job in jobs}
        for done, (job, future) in enumerate(futures.items(), start=1):
            results[job] = future.result()
            advance(
                done,
                f"{job.label or 'data-parallel'} {job.learning_rate:g}: {results[job]['bits_per_byte']:.4f}",
            )
    return results


def _merge() -> tuple[dict[str, Any], bool]:
    """Measure one merge of a 64 MB fragment: time beside a plain one, peak memory and seconds by number of learners."""
    figures = measuring.measure()
    peaks, seconds = figures["peak_by_learners"], figures["seconds_by_learners"]
    table = Table("learners", "peak over fragment", "seconds")
    for n, peak in peaks.items():
        table.add_row(n, f"{peak:.3f}", f"{seconds[n]:.2f}")
    screen.OUT.print(table)
    screen.OUT.print(
        f"4 learners, no start-up: {figures['seconds']:.2f} s, plainly {figures['plain_seconds']:.2f} s; "
        f"time_ratio {figures['time_ratio']:.2f}"
    )
    is_met = (
        figures["time_ratio"] <= 1.5
        and figures["peak_rss_over_fragment"] <= 1.5
        and abs(peaks["64"] / peaks["4"] - 1) <= 0.05
        and measuring.is_linear(seconds)
    )
    return figures, is_met


def _store() -> tuple[dict[str, Any], bool]:
    """Measure a payload of 256 MB on the disk of TMPDIR beside `torch.save` and `torch.load`, and its size by codec."""
    with tempfile.TemporaryDirectory(prefix="diloco-store-") as folder:
        figures = storing.measure(Path(folder))
    table = Table("work", "ours, s", "torch, s", "ratio")
    for work in storing.WORKS:
        seconds = figures[f"{work}_seconds"]
        ratio = f"{figures[f'{work}_ratio']:.2f}"
        table.add_row(work, f"{seconds['ours']:.3f}", f"{seconds['torch']:.3f}", ratio)
    screen.OUT.print(table)
    for codec, ratio in figures["bytes_ratio"].items():
        screen.OUT.print(f"bytes of {codec} over float32: {ratio:.4f}")
    four_bit = [figures["bytes_ratio"].get(codec, 0.0) for codec in ("int4", "e3m0")]
    ratios = [figures["write_ratio"], figures["read_ratio"]]
    return figures, max(ratios) <= 1.0 and max(four_bit) <= 0.14


def _latency() -> tuple[dict[str, Any], bool]:
    """Measure a synchronizer at work: from the commit that makes a merge of 1 MiB due to the readable new version."""
    with tempfile.TemporaryDirectory(prefix="diloco-latency-") as folder:
        waits = answering.measure(folder, _NUM_ROUNDS)
    figures = {
        "warm_ms_median": 1000 * statistics.median(waits),
        "warm_ms_largest": 1000 * max(waits),
        "num_merges": len(waits),
    }
    for key, value in figures.items():
        screen.OUT.print(f"{key}: {value:.1f}")
    return figures, figures["warm_ms_median"] <= 500.0


def _start() -> tuple[dict[str, Any], bool]:
    """Measure start-up: `diloco --help`, and importing the merge path; medians of five, seconds."""
    script = (
        "import time; t = time.perf_counter(); import tasks.merging; print(time.perf_counter() - t)"
    )
    imports = [float(_output([sys.executable, "-c", script])) for _ in range(5)]
    helps = [_seconds([sys.executable, "-m", "flows", "--help"]) for _ in range(5)]
    figures = {
        "import_merging_seconds": statistics.median(imports),
        "help_seconds": statistics.median(helps),
    }
    for key, value in figures.items():
        screen.OUT.print(f"{key}: {value:.3f}")
    return figures, figures["import_merging_seconds"] < 0.5 and figures["help_seconds"] < 1.0


def _island(
    index: int, num_islands: int, *, start: float = 0.0, delay: float = 0.0, speed: float = 1.0
) -> IslandConfig:
    return IslandConfig(
        name=f"i{index}",
        batch_size=JOINED_BATCH // num_islands,
        start_steps=start,
        push_delay_steps=delay,
        fetch_delay_steps=delay,
        speed=speed,
    )


def _output(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _seconds(command: list[str]) -> float:
    start = time.perf_counter()
    _output(command)
    return time.perf_counter() - start
