"""Benchmark `quality`: held-out loss of islands against data-parallel training on as many tokens. Takes long."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from islands.config import RunConfig
from islands.sections import InnerConfig, IslandConfig, LocalConfig, SyncConfig
from tasks.figures import Measured, Order, Table, Target, percent
from tasks.training_pool import Trained, train_all

TOKENS = 3_072_000
LEARNING_RATES = (2e-3, 4e-3, 8e-3)
# The joined batch is the same for any number of islands: 16 sequences of 64 bytes, 1,024 tokens.
JOINED_BATCH = 16
PHASES = (0.0, 6.0, 12.0, 18.0)
SPEEDS = (1.0, 1.0, 0.85, 0.7)
LEAST_MERGED_SHARE = 0.8


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


def settings() -> dict[str, Setting]:
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


def measure(order: Order) -> Measured:
    """Tune on seed 0 from one grid for both sides, train every seed at the best rate, compare means over seeds."""
    tokens = order.tokens or TOKENS
    rows = settings()
    tuned = ["", *sorted({setting.tuned_as for setting in rows.values()})]
    tuning = [Job(label, rate, 0) for label in tuned for rate in LEARNING_RATES]
    results = _train(tuning, tokens, "tuning on seed 0", order)
    best = {}
    for label in tuned:
        scores = [(results[Job(label, rate, 0)].bits_per_byte, rate) for rate in LEARNING_RATES]
        best[label] = min(scores)[1]
    rates = {"": best[""], **{label: best[setting.tuned_as] for label, setting in rows.items()}}
    jobs = [Job(label, rate, seed) for label, rate in rates.items() for seed in range(order.seeds)]
    results |= _train([job for job in jobs if job not in results], tokens, "all seeds", order)
    theirs = [results[Job("", rates[""], seed)].bits_per_byte for seed in range(order.seeds)]
    found = [
        _row(
            setting,
            rates[label],
            [results[Job(label, rates[label], seed)] for seed in range(order.seeds)],
            theirs,
        )
        for label, setting in rows.items()
    ]
    figures = {
        "tokens": tokens,
        "seeds": order.seeds,
        "rows": found,
        "baseline_bits_per_byte": theirs,
        "baseline_learning_rate": rates[""],
        "tuning": [
            [job.label or "data-parallel", job.learning_rate, results[job].bits_per_byte]
            for job in tuning
        ],
    }
    return Measured(figures, _targets(found), _table(found, rates[""], theirs))


def train(tokens: int, job: Job) -> Trained:
    """Train one job; runs in a process of its own."""
    from tasks import training

    islands = settings()[job.label].islands if job.label else tuple(_island(i, 4) for i in range(4))
    config = RunConfig(
        store=training.new_store(),
        total_tokens=tokens,
        seed=job.seed,
        islands=islands,
        inner=InnerConfig(learning_rate=job.learning_rate),
        sync=SyncConfig(codec_down="float32"),
        local=LocalConfig(checkpoint_steps=768),
    )
    return training.train_locally(config) if job.label else training.train_joined(config)


def _train(jobs: Sequence[Job], tokens: int, title: str, order: Order) -> dict[Job, Trained]:
    def note(job: Job, result: Trained) -> str:
        return f"{job.label or 'data-parallel'} {job.learning_rate:g}: {result.bits_per_byte:.4f}"

    with order.progress(title, len(jobs)) as advance:
        return train_all(jobs, partial(train, tokens), advance, note=note)


def _row(
    setting: Setting, rate: float, ours: Sequence[Trained], theirs: Sequence[float]
) -> dict[str, Any]:
    losses = [trained.bits_per_byte for trained in ours]
    gap = percent(losses, theirs)
    share = min(trained.merged_share for trained in ours)
    return {
        "setting": setting.label,
        "learning_rate": rate,
        "bits_per_byte": losses,
        "gap_percent": gap,
        "limit_percent": setting.limit_percent,
        "merged_share": share,
        "is_met": gap <= setting.limit_percent and share >= LEAST_MERGED_SHARE,
    }


def _targets(rows: Sequence[Mapping[str, Any]]) -> tuple[Target, ...]:
    gaps = [
        Target(f"gap %, {row['setting']}", row["gap_percent"], "<=", row["limit_percent"])
        for row in rows
    ]
    shares = [
        Target(f"merged share, {row['setting']}", row["merged_share"], ">=", LEAST_MERGED_SHARE)
        for row in rows
    ]
    return (*gaps, *shares)


def _table(rows: Sequence[Mapping[str, Any]], rate: float, theirs: Sequence[float]) -> Table:
    shown = [("data-parallel", f"{rate:g}", f"{statistics.fmean(theirs):.4f}", "", "", "")]
    for row in rows:
        shown.append(
            (
                row["setting"],
                f"{row['learning_rate']:g}",
                f"{statistics.fmean(row['bits_per_byte']):.4f}",
                f"{row['gap_percent']:+.2f}",
                f"{row['limit_percent']:+.1f}",
                f"{row['merged_share']:.3f}",
            )
        )
    numbers = ("rate", "bits/byte", "gap %", "limit %", "merged share")
    return Table(("setting",), numbers, tuple(shown))


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
