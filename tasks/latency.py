"""How a run's time was spent, from the stamps in its records: of use where all clocks agree. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from tasks import records
from tasks.runs import Run


@dataclass(frozen=True, slots=True)
class OwnTime:
    """`first_merge_seconds`: from the first complete quorum to the first merge of that fragment, NaN if none was.

    `idle_share`: largest share of a learner's thread outside training steps and adoptions, as last reported by each.
    """

    first_merge_seconds: float
    idle_share: float


def own_time(run: Run) -> OwnTime:
    """Return what a run's commits say of its times."""
    waits, idle = [], {}
    for layout in run.layouts:
        head, _ = records.find_head(run.store, layout.index)
        for version in range(1, head.version + 1):
            commit, _ = records.require_commit(run.store, layout.index, version)
            stamps = sorted(entry.telemetry.at for entry in commit.consumed)
            if version == 1 and len(stamps) >= run.config.quorum:
                waits.append((commit.at, commit.at - stamps[run.config.quorum - 1]))
            for entry in commit.consumed:
                idle[entry.learner] = entry.telemetry.idle_share
    return OwnTime(
        first_merge_seconds=min(waits)[1] if waits else float("nan"),
        idle_share=max(idle.values(), default=0.0),
    )
