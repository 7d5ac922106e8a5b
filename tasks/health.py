"""The health of a run, read from its store: the last commits of each fragment, once each. No torch, no Prefect."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

from infra.store import Store
from islands import health, vitals
from islands.health import Finding, Limits, Member, Setting
from islands.metrics import Point
from islands.versions import Commit
from tasks import records
from tasks.runs import Run


class Trail:
    """The newest versions of each fragment but version 0, at most `vitals.WINDOW` of them. For one thread."""

    def __init__(self, store: Store, num_fragments: int) -> None:
        self.rows = [deque[Commit](maxlen=vitals.WINDOW) for _ in range(num_fragments)]
        self._store = store

    def take(self, commit: Commit) -> None:
        """Go on to a version; those before it that are missing here are read.

        Raises:
            DamagedObject: one of those is damaged.
        """
        row = self.rows[commit.fragment]
        known = row[-1].version if row else 0
        for version in range(max(1, known + 1, commit.version - vitals.WINDOW + 1), commit.version):
            row.append(records.require_commit(self._store, commit.fragment, version)[0])
        if commit.version > known:
            row.append(commit)

    def refresh(self) -> None:
        """Go on to the newest versions."""
        known = [row[-1].version if row else 0 for row in self.rows]
        if not any(known):
            known = records.known_versions(self._store, len(self.rows))
        for fragment, version in enumerate(known):
            self.take(records.find_head(self._store, fragment, version)[0])


class Doctor:
    """Looks at a run again and again, and reads what is new."""

    def __init__(self, run: Run) -> None:
        self._trail = Trail(run.store, len(run.layouts))

    def look(self, run: Run) -> tuple[Finding, ...]:
        """Return what is wrong with the run, under the settings it has now.

        Raises:
            StoreUnavailable, DamagedObject: the store did not answer, or a commit in it is damaged.
        """
        self._trail.refresh()
        limits = Limits(**run.config.health.model_dump())
        return health.find(self._trail.rows, limits, setting_of(run))


class Points:
    """Makes the points of the windows that versions close: the same ones whoever makes them, and wherever it begins."""

    def __init__(self, run: Run) -> None:
        self._trail = Trail(run.store, len(run.layouts))

    def of(self, commit: Commit, heads: Sequence[Commit]) -> Iterator[Point]:
        """Yield the points of a version; `heads` as in `metrics.points_of`."""
        if commit.version == 0:
            return
        self._trail.take(commit)
        yield from vitals.window_points(self._trail.rows[commit.fragment], heads)


def setting_of(run: Run) -> Setting:
    """Return what remedies depend on. Of a run that all have left, the islands that would count in it."""
    config = run.config
    apart, gone = set(config.quarantine), records.departed(run.store)
    names = {island.name for island in config.islands} - apart
    counting = names - gone or names
    rate_key = "inner" if config.sync.sends_gradients else "outer"
    return Setting(
        run_id=run.run_id,
        members={
            island.name: Member(config.rates[island.name], island.speed, island.batch_size)
            for island in config.islands
            if island.name in counting
        },
        quorum=config.quorum,
        least=config.sync.min_learners or 1,
        blocks=config.sync.blocks,
        period_steps=config.sync.period_steps,
        grace_fraction=config.sync.grace_fraction,
        rate_key=f"{rate_key}.learning_rate",
        learning_rate=getattr(config, rate_key).learning_rate,
    )
