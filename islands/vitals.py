"""What the last merges say of each island and of their run, as numbers: commits in, vitals out.

Knows commits; must not know a limit, a store or a clock. `islands/health.py` says which numbers are too high or low.

A number is taken over a window: the last `WINDOW` versions of each fragment. Islands are compared with the others of
the same merge, so that whatever all of them go through (warm-up, a falling rate) cancels out. An island is *there* from
the first version of the window in which it counted to the last: who starts late or leaves early is missed by nobody.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import fmean, median, stdev

from islands.contributions import Consumed, Tally
from islands.metrics import RUN, Point, island_part, merged_tokens, points_at, pushed_at, trained_at
from islands.versions import Commit

# Versions of a fragment that are looked back on; the figures' staleness is a mean over as many.
WINDOW = 12
# A learner tells the running mean of its loss over some twenty steps: before a few times that it is of its beginning.
SETTLED_STEPS = 60
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
    token_share: float | None
    weight_share: float | None
    norm_ratio: float | None
    norm_drift: float | None
    cosine: float | None
    cosine_error: float
    loss_gap: float | None


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


def examine(window: Window, rates: Mapping[str, float], starved: Collection[str] = ()) -> RunVitals:
    """Return the vitals of a run.

    Args:
        window: per fragment its newest versions but version 0, oldest first; at least one of some fragment.
        rates: island -> expected tokens beside the others'; those without one are compared in no tokens.
        starved: islands that train all along and count in no version; they are there too.
    """
    known = sorted({name for row in window for name, t in row[-1].tallies.items() if t.merges})
    parts = [
        len(commit.consumed) / len(there.union(starved))
        for row in window
        for commit, there in zip(row, _there(row), strict=True)
    ]
    losses = {name: _losses(window, name) for name in known}
    rises = [newer / older - 1 for older, newer in losses.values() if older and newer]
    newest = {name: newer for name, (_, newer) in losses.items() if newer}
    return RunVitals(
        islands={name: _vitals(window, name, rates, newest) for name in known},
        participation=fmean(parts),
        lost_share=_lost_share(window),
        loss_rise=median(rises) if rises else None,
    )


def _vitals(
    window: Window, name: str, rates: Mapping[str, float], losses: Mapping[str, float]
) -> Vitals:
    own = [(commit, entry) for row in window for commit, entry in _own(row, name)]
    entries = [entry for _, entry in own]
    older, newer = [], []
    for row in window:
        ratios = [_norm_ratio(commit, entry) for commit, entry in _own(row, name)]
        turn = len(ratios) - len(ratios) // 3
        older += [ratio for ratio in ratios[:turn] if ratio]
        newer += [ratio for ratio in ratios[turn:] if ratio]
    every = [ratio for c, e in own if (ratio := _norm_ratio(c, e)) is not None]
    tokens = [share for c, e in own if (share := _token_share(c, e, rates)) is not None]
    cosines = [entry.cosine for entry in entries if entry.cosine is not None]
    weights = [
        _weight_share(commit, name)
        for row in window
        for commit, there in zip(row, _there(row), strict=True)
        if name in there and len(there) > 1
    ]
    others = [loss for other, loss in losses.items() if other != name]
    return Vitals(
        num_merged=len(own),
        staleness=fmean(entry.staleness for entry in entries) if own else 0.0,
        late_share=fmean(entry.staleness > 0 for entry in entries) if own else 0.0,
        missed=min(row[-1].version - _tally(row[-1], name).last_version for row in window),
        token_share=fmean(tokens) if tokens else None,
        weight_share=fmean(weights) if weights else None,
        norm_ratio=median(every) if every else None,
        norm_drift=median(newer) / median(older) if older and newer else None,
        cosine=fmean(cosines) if cosines else None,
        cosine_error=stdev(cosines) / math.sqrt(len(cosines)) if len(cosines) > 1 else math.inf,
        loss_gap=losses[name] / median(others) - 1 if others and name in losses else None,
    )


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


def _own(row: Sequence[Commit], name: str) -> list[tuple[Commit, Consumed]]:
    return [(c, entry) for c in row for entry in c.consumed if entry.learner == name]


def _tally(commit: Commit, name: str) -> Tally:
    return commit.tallies.get(name, Tally())


def _there(row: Sequence[Commit]) -> list[set[str]]:
    """Return, per version, the islands that counted both in it or before, and in it or later."""
    counted = [{entry.learner for entry in commit.consumed} for commit in row]
    so_far = [*accumulate(counted, operator.or_)]
    to_come = [*accumulate(reversed(counted), operator.or_)]
    return [before & after for before, after in zip(so_far, reversed(to_come), strict=True)]


def _weight_share(commit: Commit, name: str) -> float:
    own = math.fsum(one.weight for one in commit.consumed if one.learner == name)
    return own / math.fsum(one.weight for one in commit.consumed)


def _norm_ratio(commit: Commit, entry: Consumed) -> float | None:
    """Return an island's norm per step beside the others': a step moves the parameters about as far on all of them."""
    others = [one.norm / one.num_steps for one in commit.consumed if one is not entry]
    middle = median(others) if others else 0.0
    return entry.norm / entry.num_steps / middle if middle > 0 else None


def _token_share(commit: Commit, entry: Consumed, rates: Mapping[str, float]) -> float | None:
    there = [one for one in commit.consumed if one.learner in rates]
    if entry not in there or len(there) == 1:
        return None
    expected = rates[entry.learner] / math.fsum(rates[one.learner] for one in there)
    return entry.num_tokens / sum(one.num_tokens for one in there) / expected


def _losses(window: Window, name: str) -> tuple[float, float]:
    """Return an island's mean training loss in the older and in the newer half of the window; 0 while unknown."""
    older: list[float] = []
    newer: list[float] = []
    for row in window:
        middle = row[0].version + len(row) // 2
        for commit, entry in _own(row, name):
            loss = entry.telemetry.loss
            if loss and entry.stop.step >= SETTLED_STEPS:
                (newer if commit.version >= middle else older).append(loss)
    return (fmean(older) if older else 0.0, fmean(newer) if newer else 0.0)


def _lost_share(window: Window) -> float:
    offered = lost = 0
    for row in window:
        for name, tally in row[-1].tallies.items():
            before = _tally(row[0], name)
            offered += tally.offered - before.offered
            lost += tally.passed_over - before.passed_over
    return lost / offered if offered else 0.0
