"""How a run's time was spent, from the stamps in its records: of use where all clocks agree. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from islands import names
from tasks import records
from tasks.runs import Run


@dataclass(frozen=True, slots=True)
class OwnTime:
    """`cold_seconds`: from the quorum that called the first synchronizer to its first merge, NaN if none merged.

    `idle_share`: largest share of a learner's thread outside training steps and adoptions, as last reported by each.
    """

    cold_seconds: float
    idle_share: float


def own_time(run: Run) -> OwnTime:
    """Return what a run's records say of its times."""
    idle = {}
    first_merges = []
    for layout in run.layouts:
        head, _ = records.find_head(run.store, layout.index)
        for version in range(1, head.version + 1):
            commit, _ = records.require_commit(run.store, layout.index, version)
            if commit.synchronizer == 0:
                first_merges.append(commit.at)
            for entry in commit.consumed:
                idle[entry.learner] = entry.telemetry.idle_share
    cold = float("nan")
    if first_merges:
        body, _ = records.require(run.store, names.numbered("synchronizers", 0))
        cold = min(first_merges) - float(body["called_at"])
    return OwnTime(cold, max(idle.values(), default=0.0))
