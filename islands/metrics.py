"""What a run's versions say as metrics: commits in, points out.

Knows commits and what they carry of contributions; must not know a store, a tracker or a clock.

A point depends on a commit and on the commits before it, in the order in which they were made: not on which points
were made before. So whoever reads them again makes exactly the same points, and a tracker that recognises a point it
has seen can be sent everything twice.

Steps, the horizontal axis of every chart:

    run, synchronizer   the run's merged tokens: the mean over fragments, as a snapshot's
    an island           tokens it had trained when it made the contribution: its steps times its tokens per step (exact
                        unless its batch size was changed on a resume)

Keys:

    run           run/merged_tokens, run/merged_share (of the tokens trained up to each island's last merged
                  contribution), run/train_loss (bits per token, mean over the merged contributions by tokens; each is a
                  running mean already), comm/bytes_per_merged_token_up, comm/bytes_per_merged_token_down (payload bytes
                  of all islands, merged or not, up to each one's last merged contribution); eval/bits_per_byte,
                  eval/bigram; chaos/faults (that have struck on purpose, so far)
    synchronizer  sync/version_f<p>, sync/quorum (contributions merged), sync/merged_tokens (by this version),
                  sync/refused (contributions refused in it), sync/staleness_mean, sync/median_norm,
                  sync/merge_interval_seconds (since the fragment's version before), sync/refused_<reason> (so far, over
                  all fragments and islands)
    an island     train/loss (bits per token), train/tokens, train/tokens_per_second, train/idle_percent,
                  sync/staleness (versions), sync/merged_share (as the run's),
                  sync/share_of_merges (its weight over all weights of the version), sync/refused (contributions of it
                  refused in this version), comm/bytes_up, comm/bytes_down (over all its incarnations so far),
                  comm/replaced_copies, comm/replaced_tokens (dropped unsent, over all fragments, so far)
    of the last 12 versions of a fragment (`islands/vitals.py`): run health/participation, health/lost_share; an island
                  health/staleness, health/weight_share, health/cosine, health/norm_ratio

What is unknown (a loss of 0, a step time of 0, bytes of 0) makes no point.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from islands.chaos import Strike
from islands.contributions import Consumed, Tally
from islands.traffic import per_merged_token
from islands.versions import Commit

RUN = "run"
SYNCHRONIZER = "synchronizer"
FAULTS = "chaos/faults"
BITS_PER_NAT = 1 / math.log(2)
# A time beyond this (the year 5138) is no time: a learner may write anything.
LATEST_STAMP = 1e11
LARGEST_STEP = 2**63 - 1
# A time before this (the year 2001) counts base steps of the local driver.
FIRST_STAMP = 1e9
# What figures keep of one island at most, and how many contributions a staleness is the mean of.
MOST_SAMPLES = 4000
STALENESS_WINDOW = 12


@dataclass(frozen=True, slots=True)
class Point:
    """One value of one metric.

    Attributes:
        run: `RUN`, `SYNCHRONIZER` or what `island_part` returns.
        step: tokens, see above.
        at: seconds since 1970 by the clock of who wrote the record; the local driver writes base steps.
    """

    run: str
    key: str
    value: float
    step: int
    at: float


@dataclass(frozen=True, slots=True)
class Evaluation:
    """One snapshot's score, in bits per byte; `at`: when its newest version was made."""

    number: int
    merged_tokens: int
    bits_per_byte: float
    bigram: float
    at: float


@dataclass(frozen=True, slots=True)
class Sample:
    """One merged contribution, as the figures show it.

    `merged_tokens`: the run's, after the merge; `loss` in bits per token, 0 while unknown; `share`: the island's part
    of all tokens merged so far; `pushed_at`, `merged_at` as `Point.at`.
    """

    island: str
    merged_tokens: int
    loss: float
    staleness: int
    share: float
    pushed_at: float
    merged_at: float


def island_part(name: str) -> str:
    """Return the part of a run that an island's points belong to; no island's name holds a slash."""
    return f"island/{name}"


def points_of(
    commit: Commit, heads: Sequence[Commit], tokens_per_step: Mapping[str, float]
) -> Iterator[Point]:
    """Yield the points of one version; version 0 has none.

    Args:
        commit: a version of a fragment.
        heads: the newest version of every fragment when it was made, its own fragment's therefore the one before.
        tokens_per_step: learner -> tokens of one inner step.
    """
    if commit.version == 0:
        return
    step, after = merged_tokens(commit, heads), _after(commit, heads)
    yield from _run_points(commit, after, tokens_per_step, step)
    yield from _synchronizer_points(commit, heads[commit.fragment], after, step)
    all_weights = math.fsum(entry.weight for entry in commit.consumed)
    for entry in commit.consumed:
        tallies = [head.tallies.get(entry.learner, Tally()) for head in after]
        share = _ratio(
            sum(tally.merged for tally in tallies),
            _trained(tallies, entry.learner, tokens_per_step),
        )
        yield from _island_points(commit, entry, all_weights, share)
    yield from _refusals(commit, tokens_per_step)


def merged_tokens(commit: Commit, heads: Sequence[Commit]) -> int:
    """Return the run's merged tokens once a commit was made: as a snapshot counts them."""
    return sum(head.merged_tokens for head in _after(commit, heads)) // len(heads)


def evaluation_points(evaluation: Evaluation) -> Iterator[Point]:
    """Yield the points of one evaluation."""
    for key, value in (
        ("eval/bits_per_byte", evaluation.bits_per_byte),
        ("eval/bigram", evaluation.bigram),
    ):
        yield Point(RUN, key, value, evaluation.merged_tokens, evaluation.at)


def strike_point(number: int, strike: Strike) -> Point:
    """Return the point of the strike with a number, counted from 0."""
    return Point(RUN, FAULTS, number + 1.0, strike.merged_tokens, strike.at)


def samples_of(commit: Commit, heads: Sequence[Commit]) -> Iterator[Sample]:
    """Yield what the figures show of one version, one sample per merged contribution; `heads` as in `points_of`."""
    after = _after(commit, heads)
    for entry in commit.consumed:
        own = sum(head.tallies.get(entry.learner, Tally()).merged for head in after)
        yield Sample(
            island=entry.learner,
            merged_tokens=merged_tokens(commit, heads),
            loss=_bits(entry),
            staleness=entry.staleness,
            share=_ratio(own, sum(head.merged_tokens for head in after)),
            pushed_at=pushed_at(commit, entry),
            merged_at=commit.at,
        )


def gather(kept: dict[str, list[Sample]], samples: Iterable[Sample]) -> None:
    """Add samples to those kept of their islands, in place; of each island's at most `MOST_SAMPLES` stay."""
    for sample in samples:
        rows = kept.setdefault(sample.island, [])
        rows.append(sample)
        if len(rows) > MOST_SAMPLES:
            rows[:] = thinned(rows, MOST_SAMPLES // 2)


def thinned(samples: Sequence[Sample], most: int) -> list[Sample]:
    """Return at most `most` of the samples, evenly taken, in their order; the last one is always among them."""
    stride = -(-len(samples) // most) if samples else 1
    return list(samples[::-1][::stride][::-1])


def moved_bytes(heads: Iterable[Commit]) -> tuple[int, int]:
    """Return the payload bytes up and down that the learners, all together, told of with what is merged so far."""
    moved: dict[str, tuple[int, int]] = {}
    for head in heads:
        for name, tally in head.tallies.items():
            up, down = moved.get(name, (0, 0))
            moved[name] = (max(up, tally.bytes_up), max(down, tally.bytes_down))
    return sum(up for up, _ in moved.values()), sum(down for _, down in moved.values())


def refused_so_far(heads: Iterable[Commit]) -> dict[str, int]:
    """Return reason -> contributions refused for it, over all fragments and islands, ordered by reason."""
    counts: dict[str, int] = {}
    for head in heads:
        for tally in head.tallies.values():
            for reason, (count, _) in tally.refused.items():
                counts[reason] = counts.get(reason, 0) + count
    return dict(sorted(counts.items()))


def trained_at(entry: Consumed) -> int:
    """Return the tokens a learner had trained at the end of a contribution: its steps times its tokens per step."""
    return entry.stop.step * entry.num_tokens // entry.num_steps


def _after(commit: Commit, heads: Sequence[Commit]) -> list[Commit]:
    return [commit if head.fragment == commit.fragment else head for head in heads]


def _trained(tallies: Iterable[Tally], learner: str, tokens_per_step: Mapping[str, float]) -> float:
    """Return the tokens a learner had trained at the ends of its last merged contributions, summed over fragments."""
    return sum(tally.consumed_to.step for tally in tallies) * tokens_per_step.get(learner, 0.0)


def _run_points(
    commit: Commit, after: Sequence[Commit], tokens_per_step: Mapping[str, float], step: int
) -> Iterator[Point]:
    trained = math.fsum(
        _trained([tally], name, tokens_per_step)
        for head in after
        for name, tally in head.tallies.items()
    )
    values = {
        "run/merged_tokens": float(step),
        "run/merged_share": _ratio(sum(head.merged_tokens for head in after), trained),
    }
    for way, num_bytes in zip(("up", "down"), moved_bytes(after), strict=True):
        cost = per_merged_token(num_bytes, step)
        if cost is not None and num_bytes:
            values[f"comm/bytes_per_merged_token_{way}"] = cost
    known = [(entry.num_tokens, _bits(entry)) for entry in commit.consumed if _bits(entry)]
    if known:
        total = math.fsum(num_tokens * loss for num_tokens, loss in known)
        values["run/train_loss"] = total / sum(num_tokens for num_tokens, _ in known)
    yield from points_at(RUN, values, step, commit.at)


def _synchronizer_points(
    commit: Commit, before: Commit, after: Sequence[Commit], step: int
) -> Iterator[Point]:
    consumed = commit.consumed
    values = {
        f"sync/version_f{commit.fragment}": float(commit.version),
        "sync/quorum": float(len(consumed)),
        "sync/merged_tokens": float(sum(entry.num_tokens for entry in consumed)),
        "sync/refused": float(len(commit.refused)),
        "sync/staleness_mean": _ratio(sum(entry.staleness for entry in consumed), len(consumed)),
        "sync/median_norm": commit.median_norm,
    }
    for reason, count in refused_so_far(after).items():
        values[f"sync/refused_{reason}"] = float(count)
    if before.version > 0:  # version 0 was made with the run, not by a merge
        values["sync/merge_interval_seconds"] = commit.at - before.at
    yield from points_at(SYNCHRONIZER, values, step, commit.at)


def _island_points(
    commit: Commit, entry: Consumed, all_weights: float, merged_share: float
) -> Iterator[Point]:
    told, trained = entry.telemetry, trained_at(entry)
    values = {
        "train/tokens": float(trained),
        "train/idle_percent": told.idle_share * 100,
        "sync/staleness": float(entry.staleness),
        "sync/merged_share": merged_share,
        "sync/share_of_merges": _ratio(entry.weight, all_weights),
        "comm/bytes_up": float(told.bytes_up),
        "comm/bytes_down": float(told.bytes_down),
        "comm/replaced_copies": float(told.replaced_copies),
        "comm/replaced_tokens": float(told.replaced_tokens),
    }
    if loss := _bits(entry):
        values["train/loss"] = loss
    if entry.step_seconds > 0:
        values["train/tokens_per_second"] = entry.num_tokens / entry.num_steps / entry.step_seconds
    yield from points_at(island_part(entry.learner), values, trained, pushed_at(commit, entry))


def _refusals(commit: Commit, tokens_per_step: Mapping[str, float]) -> Iterator[Point]:
    """Yield how many contributions of each learner that took part were refused, 0 included, so that a chart falls."""
    counts = dict.fromkeys((entry.learner for entry in commit.consumed), 0)
    for verdict in commit.refused:
        counts[verdict.learner] = counts.get(verdict.learner, 0) + 1
    for learner, count in counts.items():
        reached = commit.tallies.get(learner, Tally()).consumed_to.step
        step = int(reached * tokens_per_step.get(learner, 0.0))
        yield from points_at(island_part(learner), {"sync/refused": float(count)}, step, commit.at)


def points_at(run: str, values: Mapping[str, float], step: int, at: float) -> Iterator[Point]:
    """Yield a point for each value that is a number: one that is none says nothing, and would stop a tracker.

    A step or a time that is none is brought into range: a learner may write anything.
    """
    where = max(0, min(step, LARGEST_STEP)), _time(at, 0.0)
    return (Point(run, key, value, *where) for key, value in values.items() if math.isfinite(value))


def _bits(entry: Consumed) -> float:
    """Return the loss in bits per token, 0 while unknown."""
    return entry.telemetry.loss * BITS_PER_NAT


def pushed_at(commit: Commit, entry: Consumed) -> float:
    """Return when a contribution was made; where that is no time, when it was merged."""
    return _time(entry.telemetry.at, _time(commit.at, 0.0))


def _time(at: float, otherwise: float) -> float:
    return at if 0 < at < LATEST_STAMP else otherwise


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0


def stretches(
    starts: Sequence[float], pushes: Sequence[float], left_at: float | None
) -> list[tuple[float, float]]:
    """Return when an island trained: per incarnation, from its start to its last known push.

    Args:
        starts: of its incarnations, in their order.
        pushes: when it made the contributions that were merged.
        left_at: when it left, which ends the last stretch; None if it has not.
    """
    found = []
    for number, start in enumerate(starts):
        is_last = number + 1 == len(starts)
        until = math.inf if is_last else starts[number + 1]
        end = max((at for at in pushes if start <= at < until), default=start)
        found.append((start, left_at if is_last and left_at is not None else end))
    return [(start, max(start, end)) for start, end in found]


def series(samples: Sequence[Sample], value: str) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return one value of the samples over merged tokens, as (xs, ys).

    Args:
        samples: of one island, in the order of their merges.
        value: "loss" (unknown ones are left out), "share", or "staleness" (mean over `STALENESS_WINDOW` of them).
    """
    known = [sample for sample in samples if sample.loss or value != "loss"]
    ys = [float(getattr(sample, value)) for sample in known]
    if value == "staleness":
        starts = [max(0, n + 1 - STALENESS_WINDOW) for n in range(len(ys))]
        ys = [sum(ys[start : n + 1]) / (n + 1 - start) for n, start in enumerate(starts)]
    return tuple(float(sample.merged_tokens) for sample in known), tuple(ys)


def in_order(
    ahead: Sequence[Sequence[tuple[float, Commit]]], *, until: float, is_open: bool
) -> list[Commit]:
    """Return the commits up to a time in the order in which they were made; a fragment's own order always holds.

    Args:
        ahead: per fragment, (time, commit) in the order of its versions, the times never falling.
        until: the last time.
        is_open: more may come that were made at that very time, so those wait.
    """
    rows = [
        (at, commit.fragment, commit.version, commit)
        for row in ahead
        for at, commit in row
        if at < until or (at == until and not is_open)
    ]
    return [commit for *_, commit in sorted(rows, key=lambda row: row[:3])]
