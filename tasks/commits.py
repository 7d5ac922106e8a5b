"""A run's commits in the order in which they were made, for whoever tells of them. No torch."""

from __future__ import annotations

import math
from collections.abc import Sequence

from islands import metrics, names
from islands.versions import Commit
from tasks import records
from tasks.runs import Run


class CommitReader:
    """Goes over a run's commits in the order in which they were made, from given versions on. For one thread.

    One synchronizer at a time makes them, with one clock: a commit is there before the next one is made. So whatever
    was made before a commit that we see is found by looking once more.
    """

    def __init__(self, run: Run, versions: Sequence[int]) -> None:
        self.versions = list(versions)
        self._store = run.store
        self._heads: list[Commit] = []
        self._ahead: list[list[tuple[float, Commit]]] = [[] for _ in self.versions]

    def read(self, most: int) -> list[tuple[Commit, tuple[Commit, ...]]]:
        """Return about `most` further commits, each with the heads it was made on; empty if there are none."""
        is_finished = self._store.read(names.FINISHED) is not None
        if not self._heads:
            found = [records.read_commit(self._store, *pair) for pair in enumerate(self.versions)]
            if None in found:
                return []  # the run is being created
            self._heads = [pair[0] for pair in found if pair is not None]
        each = max(2, -(-most // len(self.versions)))
        self._look(each)
        newest = max((row[-1][0] for row in self._ahead if row), default=-math.inf)
        self._look(each)
        ends = [row[-1][0] for row in self._ahead if len(row) >= each]
        until = min([newest, *ends])
        is_open = until < metrics.FIRST_STAMP and not is_finished  # base steps: several at once
        taken = metrics.in_order(self._ahead, until=until, is_open=is_open)
        if ends and not taken:  # all that was read is of one moment
            taken = metrics.in_order(self._ahead, until=until, is_open=False)
        return [(commit, self._step(commit)) for commit in taken]

    def _look(self, most: int) -> None:
        """Read on in every fragment until `most` commits lie ahead."""
        for fragment, row in enumerate(self._ahead):
            while len(row) < most:
                at, last = row[-1] if row else (-math.inf, self._heads[fragment])
                found = records.read_commit(self._store, fragment, last.version + 1)
                if found is None:
                    break
                row.append((max(at, last.at, found[0].at), found[0]))

    def _step(self, commit: Commit) -> tuple[Commit, ...]:
        heads = tuple(self._heads)
        self._heads[commit.fragment] = commit
        self.versions[commit.fragment] = commit.version
        del self._ahead[commit.fragment][0]
        return heads
