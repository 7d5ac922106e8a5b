"""The health of a run, read from its store: the last commits of each fragment, once each. No torch, no Prefect."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence

from infra.store import Store
from islands import health, vitals
from islands.contributions import Tally
from islands.health import Finding, Limits, Member, Setting
from islands.metrics import Point
from islands.versions import Commit
from islands.vitals import Window
from tasks import history, records
from tasks.runs import Run


class Trail:
    """The newest versions of each fragment but version 0, at most `vitals.WINDOW` of them. For one thread."""

    def __init__(self, store: Store, num_fragments: int) -> None:
        self.rows = [deque[Commit](maxlen=vitals.WINDOW) for _ in range(num_fragments)]
        self._store = store

    def take(self, commit: Commit) -> None:
        """Go on, or back, to a version; those before it that are missing here are read.

        Raises:
            DamagedObject: one of those is damaged.
        """
        row = self.rows[commit.fragment]
        if row and row[-1].version > commit.version:
            row.clear()  # what was told after it is told again
        known = row[-1].version if row else 0
        for version in range(max(1, known + 1, commit.version - vitals.WINDOW + 1), commit.version):
            row.append(records.require_commit(self._store, commit.fragment, version)[0])
        if commit.version > known:
            row.append(commit)

    def newest(self) -> list[Commit]:
        """Return the newest version of every fragment, as the store has it now."""
        known = [row[-1].version if row else 0 for row in self.rows]
        if not any(known):
            known = records.known_versions(self._store, len(self.rows))
        return [
            records.find_head(self._store, fragment, version)[0]
            for fragment, version in enumerate(known)
        ]


class Doctor:
    """Looks at a run again and again, and reads what is new."""

    def __init__(self, run: Run) -> None:
        self._trail = Trail(run.store, len(run.layouts))

    def look(self, run: Run, heads: Iterable[Commit] = ()) -> tuple[Finding, ...]:
        """Return what is wrong with the run, under the settings it has now.

        Args:
            run: the same one, perhaps opened later.
            heads: the newest version of every fragment; they are looked for unless given.

        Raises:
            StoreUnavailable, DamagedObject: the store did not answer, or a commit in it is damaged.
        """
        for head in heads or self._trail.newest():
            self._trail.take(head)
        limits = Limits(**run.config.health.model_dump())
        rows = [[*row] for row in self._trail.rows]
        return health.find(rows, limits, setting_of(run, rows))


class WindowPoints:
    """Makes the points of the windows that versions close: the same ones whoever makes them, and wherever it begins."""

    def __init__(self, run: Run) -> None:
        self._trail = Trail(run.store, len(run.layouts))

    def of(self, commit: Commit, heads: Sequence[Commit]) -> Iterator[Point]:
        """Yield the points of a version; `heads` as in `metrics.points_of`."""
        if commit.version == 0:
            return
        self._trail.take(commit)
        yield from vitals.window_points(self._trail.rows[commit.fragment], heads)


def setting_of(run: Run, window: Window) -> Setting:
    """Return who may count, and what remedies depend on; of a run that all have left, those who counted to the end.

    Args:
        run: under the settings it has now.
        window: its newest versions, as in `vitals.examine`.
    """
    config, gone = run.config, records.departed(run.store)
    names = {island.name for island in config.members} - set(config.quarantine)
    counting = names - gone or names
    rate_key = "inner" if config.sync.sends_gradients else "outer"
    return Setting(
        run_id=run.run_id,
        members={
            island.name: Member(
                config.rates[island.name],
                island.speed,
                island.batch_size,
                0 if names <= gone else _num_periods(run, island.name, window),
            )
            for island in config.members
            if island.name in counting
        },
        quorum=config.quorum,
        least=config.sync.min_learners or 1,
        blocks=config.sync.blocks,
        period_steps=config.sync.period_steps,
        grace_fraction=config.sync.grace_fraction,
        rate_key=f"{rate_key}.learning_rate",
        learning_rate=getattr(config, rate_key).learning_rate,
        is_over=names <= gone,
    )


def _num_periods(run: Run, name: str, window: Window) -> int:
    """Return how many periods an island has trained since it last counted; 0 if it counted in the window.

    Of the fastest island's periods, which are the longest in steps.
    """
    if any(entry.learner == name for row in window for commit in row for entry in commit.consumed):
        return 0
    link = history.last_link(run, name)
    if link is None:
        return 0
    tallies = [row[-1].tallies.get(name, Tally()) for row in window if row]
    counted_to = max((tally.consumed_to.step for tally in tallies), default=0)
    return (link.position.step - counted_to) // run.config.sync.period_steps
