"""What the last merges say of each island and of their run, as numbers: commits in, vitals out.

Knows commits; must not know a limit, a store or a clock. `islands/health.py` says which numbers are too high or low.

A number is taken over a window: the last `WINDOW` versions of each fragment. Islands are compared with the others of
the same merge, so that whatever all of them go through (warm-up, a falling rate) cancels out. An island is *there* from
the first version of the window in which it counted to the last: who starts late or leaves early is missed by nobody.
"""

from __future__ import annotations

import math
import operator
from bisect import bisect_left
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from statistics import fmean, median, stdev

from islands.contributions import Consumed, Tally
from islands.metrics import RUN, Point, island_part, merged_tokens, points_at, pushed_at, trained_at
from islands.versions import Commit

# Versions of a fragment that are looked back on; the figures' staleness is a mean over as many.
WINDOW = 12
# A learner tells the running mean of its loss over some twenty steps: before a few times that it is of its beginning.
SETTLED_STEPS = 60
# In nats per token; no learner that trains tells more.
LARGEST_LOSS = 1e6
Window = Sequence[Sequence[Commit]]


@dataclass(frozen=True, slots=True)
class Vitals:
    """One island over a window. What has nothing to be compared with, or is unknown, is None.

    Attributes:
        num_merged: contributions merged in the window.
        staleness: mean versions its bases lay behind.
        late_share: share of its contributions that were behind at all, and so weighed half or less.
        missed: versions since it last counted, in the fragment where it did last.
        token_share: its tokens over what its rate lets expect, in the merges it took part in.
        weight_share: its part of the merges' weight, mean over those made while others were there.
        norm_ratio: norm per step over the median of the others', median over its merges.
        norm_drift: `norm_ratio` of the newest third of its merges over that of the rest.
        cosine: mean of its contributions'; `cosine_error`: the standard error of that mean, infinite for a single one.
        loss_gap: its training loss over the median of the others', less 1, in the newer half of the window.
    """

    num_merged: int
    staleness: float
    late_share: float
    missed: int
    norm_ratio: float | None
    norm_drift: float | None
    cosine: float | None
    cosine_error: float
    token_share: float | None = None
    weight_share: float | None = None
    loss_gap: float | None = None


@dataclass(frozen=True, slots=True)
class RunVitals:
    """A run over a window.

    Attributes:
        islands: of each that ever counted.
        participation: mean share of the islands that were there which a merge had.
        lost_share: of the tokens offered in the window, those that were passed over: late, refused or superseded.
        loss_rise: training loss of the newer half over the older half, less 1; the median island's.
    """

    islands: Mapping[str, Vitals]
    participation: float
    lost_share: float
    loss_rise: float | None


@dataclass(frozen=True, slots=True)
class _Merge:
    """A version, with what each of its islands is compared with. `strides`: their norms per step, in order."""

    commit: Commit
    there: frozenset[str]
    weight: float
    strides: tuple[float, ...]
    is_newer: bool


# One island's contributions of one fragment, oldest first.
_Track = list[tuple[_Merge, Consumed]]


def examine(window: Window, rates: Mapping[str, float], starved: Collection[str] = ()) -> RunVitals:
    """Return the vitals of a run.

    Args:
        window: per fragment its newest versions but version 0, oldest first; at least one of some fragment.
        rates: island -> expected tokens beside the others'; those without one are compared in no tokens.
        starved: islands that train all along and count in no version; they are there too.
    """
    rows = [_merges(row) for row in window if row]
    merges = [merge for row in rows for merge in row]
    newest = [row[-1].tallies for row in window if row]
    known = sorted({name for tallies in newest for name, tally in tallies.items() if tally.merges})
    tracks: dict[str, list[_Track]] = {name: [[] for _ in rows] for name in known}
    for track, row in enumerate(rows):
        for merge in row:
            for entry in merge.commit.consumed:
                tracks[entry.learner][track].append((merge, entry))
    losses = {name: _losses(tracks[name]) for name in known}
    rises = [newer / older - 1 for older, newer in losses.values() if older and newer]
    settled = sorted(newer for _, newer in losses.values() if newer)
    shares = _weight_shares(merges)
    tokens = _token_shares(merges, rates)
    vitals = {}
    for name in known:
        missed = min(r[-1].version - _tally(r[-1], name).last_version for r in window if r)
        own = _vitals(tracks[name], missed)
        vitals[name] = replace(
            own,
            weight_share=shares.get(name),
            token_share=tokens.get(name),
            loss_gap=_beside(losses[name][1], settled),
        )
    parts = [len(one.commit.consumed) / len(one.there.union(starved)) for one in merges]
    return RunVitals(vitals, fmean(parts), _lost_share(window), median(rises) if rises else None)


def window_points(row: Sequence[Commit], heads: Sequence[Commit]) -> Iterator[Point]:
    """Yield the points of a fragment's newest version over the window that it closes.

    Args:
        row: that fragment's newest versions but version 0, oldest first.
        heads: as in `metrics.points_of`.
    """
    found, last = examine([row], {}), row[-1]
    for entry in last.consumed:
        own = found.islands[entry.learner]
        values = {
            "health/staleness": own.staleness,
            "health/weight_share": own.weight_share,
            "health/cosine": own.cosine,
            "health/norm_ratio": own.norm_ratio,
        }
        known = {key: value for key, value in values.items() if value is not None}
        part, step = island_part(entry.learner), trained_at(entry)
        yield from points_at(part, known, step, pushed_at(last, entry))
    run = {"health/participation": found.participation, "health/lost_share": found.lost_share}
    yield from points_at(RUN, run, merged_tokens(last, heads), last.at)


def _merges(row: Sequence[Commit]) -> list[_Merge]:
    """Return the versions of a fragment, each with the islands that counted in it or before, and in it or later."""
    counted = [frozenset(entry.learner for entry in commit.consumed) for commit in row]
    so_far = [*accumulate(counted, operator.or_)]
    to_come = [*accumulate(reversed(counted), operator.or_)][::-1]
    return [
        _Merge(
            commit,
            before & after,
            math.fsum(entry.weight for entry in commit.consumed),
            tuple(sorted(map(_stride, commit.consumed))),
            is_newer=n >= len(row) // 2,
        )
        for n, (commit, before, after) in enumerate(zip(row, so_far, to_come, strict=True))
    ]


def _vitals(tracks: Sequence[_Track], missed: int) -> Vitals:
    """Return what an island's own contributions say, most of all beside those of the same merge."""
    own = [pair for track in tracks for pair in track]
    older, newer = [], []
    for track in tracks:
        ratios = [_norm_ratio(merge, entry) for merge, entry in track]
        turn = len(ratios) - len(ratios) // 3
        older += [ratio for ratio in ratios[:turn] if ratio is not None]
        newer += [ratio for ratio in ratios[turn:] if ratio is not None]
    before = median(older) if older else 0.0
    cosines = [entry.cosine for _, entry in own if entry.cosine is not None]
    return Vitals(
        num_merged=len(own),
        staleness=fmean(entry.staleness for _, entry in own) if own else 0.0,
        late_share=fmean(entry.staleness > 0 for _, entry in own) if own else 0.0,
        missed=missed,
        norm_ratio=median(older + newer) if older or newer else None,
        norm_drift=median(newer) / before if newer and before else None,
        cosine=fmean(cosines) if cosines else None,
        cosine_error=stdev(cosines) / math.sqrt(len(cosines)) if len(cosines) > 1 else math.inf,
    )


def _tally(commit: Commit, name: str) -> Tally:
    return commit.tallies.get(name, Tally())


def _stride(entry: Consumed) -> float:
    return entry.norm / entry.num_steps


def _norm_ratio(merge: _Merge, entry: Consumed) -> float | None:
    """Return an island's norm per step beside the others': a step moves the parameters about as far on all of them."""
    gap = _beside(_stride(entry), merge.strides)
    return None if gap is None else gap + 1


def _beside(value: float, ordered: Sequence[float]) -> float | None:
    """Return a value over the median of the others, less 1; None where there are none, or they say nothing.

    Args:
        value: one of `ordered`; else it is unknown.
        ordered: all of them, from the least.
    """
    place = bisect_left(ordered, value)
    if len(ordered) < 2 or place == len(ordered) or ordered[place] != value:
        return None
    others = len(ordered) - 1
    low, high = (at if at < place else at + 1 for at in ((others - 1) // 2, others // 2))
    middle = (ordered[low] + ordered[high]) / 2
    return value / middle - 1 if middle > 0 else None


def _weight_shares(merges: Sequence[_Merge]) -> dict[str, float]:
    """Return each island's mean share of the weight, over the merges in which it and another one were there."""
    found: dict[str, list[float]] = {}
    for merge in merges:
        weights = {entry.learner: entry.weight for entry in merge.commit.consumed}
        for name in merge.there if len(merge.there) > 1 else ():
            found.setdefault(name, []).append(weights.get(name, 0.0) / merge.weight)
    return {name: fmean(shares) for name, shares in found.items()}


def _token_shares(merges: Sequence[_Merge], rates: Mapping[str, float]) -> dict[str, float]:
    """Return each island's mean share of the tokens over its share of the rates, in the merges it took part in."""
    found: dict[str, list[float]] = {}
    for merge in merges:
        there = [entry for entry in merge.commit.consumed if entry.learner in rates]
        all_tokens = sum(entry.num_tokens for entry in there)
        all_rates = math.fsum(rates[entry.learner] for entry in there)
        for entry in there if len(there) > 1 else ():
            expected = rates[entry.learner] / all_rates
            found.setdefault(entry.learner, []).append(entry.num_tokens / all_tokens / expected)
    return {name: fmean(shares) for name, shares in found.items()}


def _losses(tracks: Sequence[_Track]) -> tuple[float, float]:
    """Return an island's mean training loss in the older and in the newer half of the window; 0 while unknown."""
    known = [
        (merge.is_newer, entry.telemetry.loss)
        for track in tracks
        for merge, entry in track
        # A learner may write anything: one NaN would leave nobody's losses in order, and two of 1e308 have no mean.
        if 0 < entry.telemetry.loss < LARGEST_LOSS and entry.stop.step >= SETTLED_STEPS
    ]
    older = [loss for is_newer, loss in known if not is_newer]
    newer = [loss for is_newer, loss in known if is_newer]
    return (fmean(older) if older else 0.0, fmean(newer) if newer else 0.0)


def _lost_share(window: Window) -> float:
    offered = lost = 0
    for row in filter(None, window):
        for name, tally in row[-1].tallies.items():
            before = _tally(row[0], name)
            offered += tally.offered - before.offered
            lost += tally.passed_over - before.passed_over
    return lost / offered if offered else 0.0
