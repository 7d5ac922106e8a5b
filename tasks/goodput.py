"""Benchmark `chaos`: one plan of deaths against the pipeline, and against elastic and non-elastic data-parallel jobs.

Four islands on this machine, one of them killed by SIGKILL every 20 s, everybody once in a seeded order before anybody
twice. All arms train the same model on the same text with the same batch over links with the same cap, one after
another, for as long as the pipeline takes. The pipeline and the elastic jobs have warm spares; what is not elastic
starts all its processes anew, as torchrun does. The data-parallel jobs run once more without a cap: as on one machine,
where they do best. The pipeline trains once more per further seed, with deaths and without: one pair of runs tells too
little of a loss. Deaths, tokens and losses are counted over all seeds, the rest on seed 0.

    goodput = seconds in training steps that were not rolled back / (islands * seconds)

In every arm a step is what a learner computes: batch, forward, backward, optimizer (the pipeline's steps include its
adoptions). Waiting in an all-reduce is none. Seconds count from when every island is at work; for the pipeline until
the first island has trained its share. Spares are allocated to nobody. Prefect and MLflow run beside the pipeline
only.
"""

from __future__ import annotations

import math
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from islands.goodput import (
    Trace,
    kept_within,
    mean_at_work,
    seconds_to_resume,
    steps_within,
    uptime,
)
from tasks.figures import Measured, Order, Table, Target, percent, ratio_or_none
from tasks.kill_plan import ISLANDS, Plan

DECOUPLED, ELASTIC, RIGID = "decoupled", "elastic", "data_parallel"
ELASTIC_UNCAPPED, RIGID_UNCAPPED = "elastic_uncapped", "data_parallel_uncapped"


class Job(NamedTuple):
    """How a data-parallel job differs from the others."""

    is_elastic: bool
    has_links: bool


JOBS = MappingProxyType(
    {
        ELASTIC: Job(is_elastic=True, has_links=True),
        RIGID: Job(is_elastic=False, has_links=True),
        ELASTIC_UNCAPPED: Job(is_elastic=True, has_links=False),
        RIGID_UNCAPPED: Job(is_elastic=False, has_links=False),
    }
)
DEFINITIONS = {
    "goodput": "seconds in training steps that were not rolled back / (islands * seconds); "
    "waiting in an all-reduce is no step, spares are allocated to nobody",
    "merged_share": "merged / trained tokens: goodput counts steps too that an adoption overwrote later",
    "kept_tokens_per_second": "tokens of the steps that goodput counts, all islands together",
    "uptime": "share of the time in which at least one island trains",
    "live": "islands that train, mean over the time",
    "contributing": "learners in a merge, mean over the merges",
    "quorum": "learners that a merge needs",
    "detect_s": "SIGKILL to the failure of the Prefect task that watches the learner",
    "resume_s": "SIGKILL to the first step of the island's next life",
    "merged_again_s": "SIGKILL to the first version with work of that life",
    "lost": "tokens without a fate in verify's ledger",
    "double_counted": "tokens with two fates in verify's ledger",
    "checkpoint_percent": "processor seconds of a checkpoint / seconds between two",
    "data_parallel": "not elastic: a death ends the job; new processes begin from the last checkpoint",
    "elastic": "survivors re-form at once with the spare; the step under way is lost",
    "uncapped": "the job's exchange passes at loopback's pace; the pipeline and all other jobs keep to the links' cap",
    "bandwidth_mbit": "cap of an island's link, each way; a job's exchange overlaps with its forward and backward pass",
}


@dataclass(frozen=True, slots=True)
class Pipeline:
    """What the pipeline's arm showed on one seed. Waits in seconds, one per death; losses in bits per byte.

    `contributing`: learners in each merge. `problems`: what `verify` found, its replay included.
    """

    trace: Trace
    detect: Sequence[float]
    merged_again: Sequence[float]
    contributing: Sequence[int]
    quorum: int
    lost: int
    double_counted: int
    problems: Sequence[str]
    merged_share: float
    loss: float
    loss_in_peace: float
    checkpoint_percent: float


def measure(order: Order) -> Measured:
    """Return goodput and recovery of all arms, and what the deaths cost the pipeline's model."""
    plan = Plan() if order.tokens is None else Plan(tokens=order.tokens)
    plans = [replace(plan, seed=seed) for seed in range(order.seeds)]
    with (
        tempfile.TemporaryDirectory(prefix="diloco-chaos-") as name,
        order.progress("arms", 2 * len(plans) + len(JOBS)) as advance,
    ):
        folder = Path(name)
        pairs = []
        with order.services():
            from tasks import killing  # Prefect, which reads its address when it is imported

            for each in plans:
                place = folder / f"seed-{each.seed}"
                killed = killing.train_killed(each, place)
                advance(2 * each.seed + 1, f"{DECOUPLED}, seed {each.seed}")
                pairs.append((each, killed, killing.train_in_peace(each, place)))
                advance(2 * each.seed + 2, f"seed {each.seed} without deaths")
        ours = [killing.look_back(*pair) for pair in pairs]
        traces = {DECOUPLED: ours[0].trace}
        for number, (arm, job) in enumerate(JOBS.items(), start=2 * len(plans) + 1):
            traces[arm] = killing.train_jointly(
                plan,
                pairs[0][1],
                folder / arm,
                is_elastic=job.is_elastic,
                has_links=job.has_links,
            )
            advance(number, arm)
    return report(plan, ours, traces)


def report(plan: Plan, ours: Sequence[Pipeline], traces: Mapping[str, Trace]) -> Measured:
    """Return the figures and targets of all arms.

    Args:
        plan: of all, but for the seed.
        ours: what the pipeline showed, by seed from 0.
        traces: by arm, on seed 0; the pipeline's is among them.
    """
    losses = [one.loss for one in ours]
    in_peace = [one.loss_in_peace for one in ours]
    figures: dict[str, Any] = {}
    arms = {arm: _arm_figures(trace, plan) for arm, trace in traces.items()}
    for key in ("goodput", "uptime", "resume_s", "resume_s_max"):
        figures[key] = arms[DECOUPLED][key]
        figures |= {f"{key}_{arm}": arms[arm][key] for arm in JOBS}
    for arm in JOBS:
        figures[f"goodput_over_{arm}"] = ratio_or_none(figures["goodput"], arms[arm]["goodput"])
    for key, waits in (
        ("detect_s", [wait for one in ours for wait in one.detect]),
        ("merged_again_s", [wait for one in ours for wait in one.merged_again]),
    ):
        figures |= {key: _median(waits), f"{key}_max": max(waits, default=None)}
    figures |= {
        "bandwidth_mbit": plan.bandwidth_mbit,
        "period_s": plan.period_steps * step_s if (step_s := arms[DECOUPLED]["step_s"]) else None,
        "seeds": len(ours),
        "deaths": sum(len(one.trace.kills) for one in ours),
        "lost": sum(one.lost for one in ours),
        "double_counted": sum(one.double_counted for one in ours),
        "problems": [problem for one in ours for problem in one.problems],
        "num_problems": sum(len(one.problems) for one in ours),
        "merged_share": statistics.fmean(one.merged_share for one in ours),
        "loss": statistics.fmean(losses),
        "loss_without_deaths": statistics.fmean(in_peace),
        "loss_gap_percent": percent(losses, in_peace),
        "loss_gaps_percent": [
            percent([one], [other]) for one, other in zip(losses, in_peace, strict=True)
        ],
        "checkpoint_percent": ours[0].checkpoint_percent,
        "participation": {
            "live": arms[DECOUPLED]["live"],
            "contributing": statistics.fmean(ours[0].contributing),
            "quorum": ours[0].quorum,
        },
    }
    for key in ("live", "step_s", "kept_tokens_per_second", "kills"):
        figures[f"{key}_by_arm"] = {arm: found[key] for arm, found in arms.items()}
    figures |= {"seconds": ours[0].trace.window.seconds, "definitions": DEFINITIONS}
    return Measured(figures, _targets(figures), _table(figures, arms))


def _arm_figures(trace: Trace, plan: Plan) -> dict[str, Any]:
    """Return what is told of every arm."""
    window, works = trace.window, trace.works
    kept = kept_within(works, window)
    num_steps = steps_within(works, window)
    lasting = max(0.0, kept - trace.rolled_back_seconds)
    waits = seconds_to_resume(works, trace.kills)
    rate = num_steps * plan.batch_size * plan.model.context / window.seconds
    return {
        "goodput": lasting / (len(ISLANDS) * window.seconds),
        "uptime": uptime(works, window),
        "live": mean_at_work(works, window),
        "resume_s": _median(waits),
        "resume_s_max": max(waits, default=None),
        "step_s": ratio_or_none(kept, num_steps),
        "kept_tokens_per_second": rate * lasting / kept if kept > 0 else 0.0,
        "kills": len(trace.kills),
    }


def _targets(figures: Mapping[str, Any]) -> tuple[Target, ...]:
    after_a_period = _number(figures["merged_again_s_max"]) - _number(figures["period_s"])
    ratios = {f"goodput_over_{arm}": 1.4 if job.is_elastic else 3.0 for arm, job in JOBS.items()}
    return (
        Target("goodput", figures["goodput"], ">=", 0.88),
        *(Target(key, _number(figures[key]), ">=", least) for key, least in ratios.items()),
        Target("loss_gap_percent", figures["loss_gap_percent"], "<=", 1.0),
        Target("merged_again_s_max - period_s", after_a_period, "<=", 15.0),
        Target("lost", figures["lost"], "<=", 0),
        Target("double_counted", figures["double_counted"], "<=", 0),
        Target("num_problems", figures["num_problems"], "<=", 0),
        Target("checkpoint_percent", figures["checkpoint_percent"], "<=", 2.0),
    )


def _table(figures: Mapping[str, Any], arms: Mapping[str, Mapping[str, Any]]) -> Table:
    nothing = ("",) * len(JOBS)
    rows = [
        (key, *(_shown(arms[arm][key]) for arm in (DECOUPLED, *JOBS))) for key in arms[DECOUPLED]
    ]
    rows += [
        (key, _shown(figures[key]), *nothing)
        for key in (
            *("bandwidth_mbit", "seeds", "deaths"),
            *("detect_s", "detect_s_max", "merged_again_s", "merged_again_s_max", "period_s"),
            *("lost", "double_counted", "num_problems", "merged_share"),
            *("loss", "loss_without_deaths", "loss_gap_percent", "checkpoint_percent"),
        )
    ]
    told = figures["participation"]
    rows += [(key, _shown(told[key]), *nothing) for key in ("contributing", "quorum")]
    return Table(("figure",), (DECOUPLED, *JOBS), tuple(rows))


def _shown(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if isinstance(value, int) or value >= 100 else f"{value:.3f}"


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def _number(value: float | None) -> float:
    return math.nan if value is None else value
