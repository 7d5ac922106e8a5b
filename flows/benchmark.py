"""Flow `benchmark`: one named measurement, a table, and its figures as JSON."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from rich.table import Table

from flows import screen
from islands.config import IslandConfig, LocalConfig, RunConfig

LEARNING_RATES = (3e-3, 6e-3, 1.2e-2)
# The joined batch is the same for any number of islands: 32 sequences of 64 bytes.
JOINED_BATCH = 32
PHASES = (0.0, 6.0, 12.0, 18.0)
SPEEDS = (1.0, 1.0, 0.85, 0.7)


@dataclass(frozen=True, slots=True)
class Setting:
    """One row of the quality table: `limit_percent` is the most its loss may exceed the baseline's."""

    label: str
    islands: tuple[IslandConfig, ...]
    limit_percent: float


@dataclass(frozen=True, slots=True)
class Job:
    """One training to run in a process: `label` "" is the data-parallel baseline."""

    label: str
    num_islands: int
    learning_rate: float
    seed: int


def quality_settings() -> dict[str, Setting]:
    """Return the compared settings by label."""
    in_phase = {m: tuple(_island(i, m) for i in range(m)) for m in (2, 4, 8)}
    delayed = tuple(_island(i, 4, start=PHASES[i], delay=2.0) for i in range(4))
    uneven = tuple(_island(i, 4, start=PHASES[i], delay=2.0, speed=SPEEDS[i]) for i in range(4))
    rows = [
        Setting("M=2, in phase", in_phase[2], 0.0),
        Setting("M=4, in phase", in_phase[4], 1.0),
        Setting("M=4, phases 0/6/12/18, delay 4", delayed, 1.0),
        Setting("M=4, the same, speeds 1/1/0.85/0.7", uneven, 2.0),
        Setting("M=8, in phase", in_phase[8], 1.5),
    ]
    return {row.label: row for row in rows}


def run_benchmark(name: str, target: Path | None, *, seeds: int, tokens: int) -> int:
    """Run one benchmark, print its table, write its figures; 0 if every target is met."""
    if name == "quality":
        figures, is_met = _quality(seeds, tokens)
    elif name == "merge":
        figures, is_met = _merge()
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
    islands = quality_settings()[job.label].islands if job.label else tuple(_island(i, job.num_islands) for i in range(job.num_islands))
    config = RunConfig(
        store=f"memory://quality-{job.seed}-{job.num_islands}-{os.getpid()}",
        total_tokens=tokens,
        seed=job.seed,
        islands=islands,
        local=LocalConfig(checkpoint_steps=384),
    )
    config = config.model_copy(update={"inner": config.inner.model_copy(update={"learning_rate": job.learning_rate})})
    if not job.label:
        return {"bits_per_byte": train_data_parallel(config, split_text(config)), "merged_share": 1.0}
    run_id = f"r{abs(hash((job.label, job.learning_rate)))}"
    outcome = local.train(config, run_id, watch=lambda beat: None, is_stopped=lambda: False)
    assert outcome.score is not None
    return {"bits_per_byte": outcome.score.bits_per_byte, "merged_share": status(outcome.run).merged_share}


def _quality(seeds: int, tokens: int) -> tuple[dict[str, Any], bool]:
    """Tune each setting's rate on seed 0 from the same grid, train the other seeds at it, compare medians per seed."""
    settings = quality_settings()
    sizes = sorted({len(setting.islands) for setting in settings.values()})
    contenders = [(label, len(setting.islands)) for label, setting in settings.items()] + [("", m) for m in sizes]
    tuning = [Job(label, m, rate, 0) for label, m in contenders for rate in LEARNING_RATES]
    results = _train_all(tuning, tokens, "tuning on seed 0")
    best = {}
    for label, m in contenders:
        best[label, m] = min((results[job]["bits_per_byte"], job.learning_rate) for job in tuning if (job.label, job.num_islands) == (label, m))[1]
    rest = [Job(label, m, best[label, m], seed) for label, m in contenders for seed in range(1, seeds)]
    results |= _train_all(rest, tokens, "other seeds")
    table = Table("setting", "rate", "bits/byte", "data-parallel", "its rate", "gap %", "limit %", "merged share")
    rows, is_met = [], True
    for label, setting in settings.items():
        m = len(setting.islands)
        ours = [results[Job(label, m, best[label, m], seed)] for seed in range(seeds)]
        theirs = [results[Job("", m, best["", m], seed)]["bits_per_byte"] for seed in range(seeds)]
        gap = 100 * (_mean(row["bits_per_byte"] for row in ours) / _mean(theirs) - 1)
        share = min(row["merged_share"] for row in ours)
        row = {
            "setting": label,
            "learning_rate": best[label, m],
            "bits_per_byte": [row["bits_per_byte"] for row in ours],
            "baseline_learning_rate": best["", m],
            "baseline_bits_per_byte": theirs,
            "gap_percent": gap,
            "limit_percent": setting.limit_percent,
            "merged_share": share,
        }
        rows.append(row)
        is_met = is_met and gap <= setting.limit_percent and share >= 0.8
        table.add_row(
            label, f"{best[label, m]:g}", f"{_mean(r['bits_per_byte'] for r in ours):.4f}", f"{_mean(theirs):.4f}",
            f"{best['', m]:g}", f"{gap:+.2f}", f"{setting.limit_percent:+.1f}", f"{share:.3f}",
        )  # fmt: skip
    screen.OUT.print(table)
    tuned = [[job.label or "data-parallel", job.num_islands, job.learning_rate, results[job]["bits_per_byte"]] for job in tuning]
    return {"tokens": tokens, "seeds": seeds, "rows": rows, "tuning": tuned}, is_met


def _train_all(jobs: list[Job], tokens: int, title: str) -> dict[Job, dict[str, float]]:
    """Train the jobs, one process per core."""
    results = {}
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn")) as pool, screen.progress(title, len(jobs)) as advance:
        futures = {job: pool.submit(quality_job, job, tokens) for job in jobs}
        for done, (job, future) in enumerate(futures.items(), start=1):
            results[job] = future.result()
            advance(done, f"{job.label or 'data-parallel'} {job.learning_rate:g}: {results[job]['bits_per_byte']:.4f}")
    return results


def _merge() -> tuple[dict[str, Any], bool]:
    """Measure the peak memory of one merge of a 64 MB fragment, in a fresh process per number of learners."""
    figures: dict[str, Any] = {}
    for num_learners in (4, 8, 64):
        with tempfile.TemporaryDirectory(prefix="diloco-merge-") as folder:
            measure = [sys.executable, "-m", "tasks.measuring"]
            _output([*measure, "prepare", folder, str(num_learners)])
            figures[str(num_learners)] = json.loads(_output([*measure, "merge", folder]))
    peaks = {n: row["peak_over_fragment"] for n, row in figures.items()}
    table = Table("learners", "peak over fragment", "seconds")
    for n, row in figures.items():
        table.add_row(n, f"{row['peak_over_fragment']:.3f}", f"{row['seconds']:.2f}")
    screen.OUT.print(table)
    is_met = peaks["8"] <= 1.5 and abs(peaks["64"] / peaks["4"] - 1) <= 0.05
    return figures, is_met


def _start() -> tuple[dict[str, Any], bool]:
    """Measure start-up: `diloco --help`, and importing the merge path; medians of five, seconds."""
    script = "import time; t = time.perf_counter(); import tasks.merging; print(time.perf_counter() - t)"
    imports = [float(_output([sys.executable, "-c", script])) for _ in range(5)]
    helps = [_seconds([sys.executable, "-m", "flows", "--help"]) for _ in range(5)]
    figures = {"import_merging_seconds": statistics.median(imports), "help_seconds": statistics.median(helps)}
    for key, value in figures.items():
        screen.OUT.print(f"{key}: {value:.3f}")
    return figures, figures["import_merging_seconds"] < 0.5 and figures["help_seconds"] < 1.0


def _island(index: int, num_islands: int, *, start: float = 0.0, delay: float = 0.0, speed: float = 1.0) -> IslandConfig:
    return IslandConfig(
        name=f"i{index}",
        batch_size=JOINED_BATCH // num_islands,
        start_steps=start,
        push_delay_steps=delay,
        fetch_delay_steps=delay,
        speed=speed,
    )


def _mean(values: Iterable[float]) -> float:
    return statistics.fmean(values)


def _output(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _seconds(command: list[str]) -> float:
    start = time.perf_counter()
    _output(command)
    return time.perf_counter() - start
