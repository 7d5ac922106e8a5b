"""Benchmark `codecs`: held-out loss with each number format, both ways, beside float32 on the same seeds and tokens.

Also what error feedback, `alpha` and staleness change. Local driver; four islands, a small model, many exchanges.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, get_args

from infra.text import load_documents
from islands.config import RunConfig
from islands.sections import DataConfig, IslandConfig, ModelConfig, SyncConfig
from tasks.figures import Measured, Order, Table, Target, percent
from tasks.training_pool import Trained, train_all

TOKENS = 122_880
LIMIT_PERCENT = 1.0
BASE = "float32"
# Both ways in full, so that a row changes one thing.
PLAIN: Mapping[str, Any] = {"codec": "float32", "codec_down": "float32"}
LIMITED = ("int4", "e3m0")
PHASES = (0.0, 3.0, 6.0, 9.0)
DELAY_STEPS = 3.0
ALPHAS = (0.25, 0.5)


@dataclass(frozen=True, slots=True)
class Job:
    """One training: a row of the table, and a seed."""

    label: str
    seed: int


def settings() -> dict[str, dict[str, Any]]:
    """Return what each row sets in `sync`, by label; rows named for a codec use it for contributions."""
    fields = SyncConfig.model_fields
    up = [str(codec) for codec in get_args(fields["codec"].annotation)]
    down = [str(codec) for codec in get_args(fields["codec_down"].annotation)]
    rows: dict[str, dict[str, Any]] = {codec: {**PLAIN, "codec": codec} for codec in up}
    if "error_feedback" in fields:
        for codec in (codec for codec in LIMITED if codec in up):
            rows[f"{codec} without feedback"] = {
                **PLAIN,
                "codec": codec,
                "error_feedback": False,
            }
    rows |= {f"{codec} down": {**PLAIN, "codec_down": codec} for codec in down if codec != BASE}
    rows["defaults"] = {}
    if "int4" in up and "int4-delta" in down:
        rows["int4 up, int4-delta down"] = {"codec": "int4", "codec_down": "int4-delta"}
    rows |= {f"alpha {alpha:g}": {**PLAIN, "alpha": alpha} for alpha in ALPHAS}
    rows |= {f"late, max_staleness {s}": {**PLAIN, "max_staleness": s} for s in (0, 4)}
    return rows


def measure(order: Order) -> Measured:
    """Return by how many percent each row's loss exceeds that of float32."""
    tokens = order.tokens or TOKENS
    jobs = [Job(label, seed) for label in settings() for seed in range(order.seeds)]

    def note(job: Job, trained: Trained) -> str:
        return f"{job.label}, seed {job.seed}: {trained.bits_per_byte:.4f}"

    with (
        tempfile.TemporaryDirectory(prefix="diloco-codecs-") as folder,
        order.progress("training", len(jobs)) as advance,
    ):
        _write_text(Path(folder))
        results = train_all(jobs, partial(train, tokens, folder), advance, note=note)
    losses: dict[str, list[float]] = {}
    shares: dict[str, float] = {}
    for label in settings():
        trained = [results[Job(label, seed)] for seed in range(order.seeds)]
        losses[label] = [one.bits_per_byte for one in trained]
        shares[label] = statistics.fmean(one.merged_share for one in trained)
    return report(losses, shares, tokens)


def report(
    losses: Mapping[str, Sequence[float]], shares: Mapping[str, float], tokens: int
) -> Measured:
    """Return the figures of rows trained on the same seeds; one of them is float32."""
    base = losses[BASE]
    gaps = {label: percent(ours, base) for label, ours in losses.items()}
    per_seed = {
        label: [100 * (loss / same - 1) for loss, same in zip(ours, base, strict=True)]
        for label, ours in losses.items()
    }
    figures = {
        "tokens": tokens,
        "seeds": len(base),
        "gap_percent": gaps,
        "gap_percent_per_seed": per_seed,
        "bits_per_byte": losses,
        "merged_share": shares,
    }
    targets = tuple(
        Target(f"gap %, {label}", gaps[label], "<=", LIMIT_PERCENT)
        for label in LIMITED
        if label in gaps
    )
    rows = tuple(
        (
            label,
            f"{statistics.fmean(losses[label]):.4f}",
            f"{gap:+.2f}",
            "  ".join(f"{one:+.2f}" for one in per_seed[label]),
            f"{shares[label]:.3f}",
        )
        for label, gap in gaps.items()
    )
    numbers = ("bits/byte", "gap %", "by seed", "merged share")
    return Measured(figures, targets, Table(("setting",), numbers, rows))


def train(tokens: int, text: str, job: Job) -> Trained:
    """Train one job on the text in a folder; runs in a process of its own."""
    from tasks import training

    is_late = job.label.startswith("late")
    islands = tuple(
        IslandConfig(
            name=f"i{index}",
            batch_size=4,
            start_steps=phase if is_late else 0.0,
            push_delay_steps=DELAY_STEPS if is_late else 0.0,
            fetch_delay_steps=DELAY_STEPS if is_late else 0.0,
        )
        for index, phase in enumerate(PHASES)
    )
    config = RunConfig(
        store=training.new_store(),
        total_tokens=tokens,
        seed=job.seed,
        islands=islands,
        data=DataConfig(source=text),
        model=ModelConfig(width=32, num_layers=2, num_heads=2, context=32),
        sync=SyncConfig.model_validate({"period_steps": 12, **settings()[job.label]}),
    )
    return training.train_locally(config)


def _write_text(folder: Path) -> None:
    """Write the default text once: every job would spend seconds on finding it."""
    for number, document in enumerate(load_documents(DataConfig().source).documents):
        (folder / f"{number:05d}.txt").write_bytes(document.text)
