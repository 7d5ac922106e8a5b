"""Which settings of a run that is under way may change, and when a change acts.

Knows keys and the moments at which their readers look again; must not know a store or who reads. What a run is
(`IDENTITY_KEYS`) never changes; all else does, by a record that whoever trains, merges or supervises looks for once a
second.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from islands.config import RunConfig
from islands.overrides import shown

AT_ONCE = "at once"
NEXT_INCARNATION = "with the learner's next incarnation"
ON_RESUME = "when the run is stopped and resumed"

# The first pattern that fits a key counts. "At once" is within some seconds: a synchronizer between two looks, a
# learner at a step boundary, `train` at its next tick, an island's flow with its next segment.
ACTS: Mapping[str, str] = {
    "retention": AT_ONCE,
    "durable": ON_RESUME,  # a store is opened once
    "total_tokens": AT_ONCE,  # each island's share and its learning-rate clock with it
    "quarantine": AT_ONCE,
    "data.eval_bytes": AT_ONCE,
    "inner.precision": NEXT_INCARNATION,
    "inner.*": AT_ONCE,
    "outer.learning_rate": AT_ONCE,
    "outer.momentum": AT_ONCE,
    "sync.period_steps": AT_ONCE,
    "sync.min_learners": AT_ONCE,
    "sync.grace_fraction": AT_ONCE,
    "sync.alpha": AT_ONCE,
    "sync.max_staleness": AT_ONCE,
    "sync.outlier_factor": AT_ONCE,
    "sync.overlap_steps": ON_RESUME,
    "sync.error_feedback": NEXT_INCARNATION,
    "sync.chunk_bytes": NEXT_INCARNATION,  # of pushes; of versions at once
    "health.*": AT_ONCE,
    "pipeline.*": AT_ONCE,
    "local.*": ON_RESUME,
    "islands.*.region": AT_ONCE,
    "islands.*.speed": AT_ONCE,  # the shares; what it means to the local driver, on resume
    "islands.*.bandwidth_mbit": AT_ONCE,
    "islands.*.batch_size": NEXT_INCARNATION,  # its part in the shares at once
    "islands.*.tokens": AT_ONCE,
    "islands.*.joined_at": AT_ONCE,
    "islands.*.spare": AT_ONCE,
    "islands.*.device": NEXT_INCARNATION,
    "islands.*": ON_RESUME,  # clusters and stores are opened once; delays are the local driver's
}

# Learners that wait for one another must fall due at the same steps: no two of them take over a change at once.
LOCKSTEP_KEYS = ("sync.period_steps", "sync.overlap_steps")


@dataclass(frozen=True, slots=True)
class Change:
    """One setting that differs: its key, an island addressed by its name, both values as JSON, and when it acts."""

    key: str
    before: Any
    after: Any
    acts: str

    def __str__(self) -> str:
        return f"{self.key} {shown(self.before)} → {shown(self.after)}"


def changes_between(old: RunConfig, new: RunConfig) -> tuple[Change, ...]:
    """Return what differs between two configurations of one run, in the order of its settings."""
    known = {island.name for island in old.islands}
    fresh = {f"islands.{island.name}": island for island in new.islands if island.name not in known}
    shared = tuple(island for island in new.islands if island.name in known)
    before = dict(_flat(_tree(old)))
    after = dict(_flat(_tree(new.model_copy(update={"islands": shared}))))
    joined = [
        Change(key, None, island.model_dump(mode="json", exclude_defaults=True), AT_ONCE)
        for key, island in fresh.items()
    ]
    return tuple(
        Change(key, before.get(key), after.get(key), when_it_acts(key))
        for key in {**before, **after}
        if before.get(key) != after.get(key)
    ) + tuple(joined)


def when_it_acts(key: str) -> str:
    """Return when a change of a key acts on a run that is under way; of one that no pattern names, on resume."""
    return next((when for pattern, when in ACTS.items() if fnmatchcase(key, pattern)), ON_RESUME)


def _tree(config: RunConfig) -> dict[str, Any]:
    tree = config.model_dump(mode="json")
    tree["islands"] = {island.pop("name"): island for island in tree["islands"]}
    return tree


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
