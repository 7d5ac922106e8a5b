"""The thread that fetches what a learner should know: newer versions, and reasons to stop.

Knows heads, stops, settings and incarnations; must not know the learner. Headers of all fragments come before any
payload. Of several new versions only the newest is fetched, or the changes that lead to it where those are fewer bytes.
"""

from __future__ import annotations

import contextlib
import math
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from islands import names
from islands.contributions import MEANINGS, Tally
from islands.learner import Base
from islands.patience import Patience
from islands.types import (
    DamagedObject,
    IslandsError,
    LearnerLost,
    Position,
    StoreLost,
    StoreUnavailable,
)
from islands.versions import Commit
from tasks import records, stopping
from tasks.runs import Run, refreshed
from tasks.sending import Tell

# How often it looks for versions while the learner waits for one.
_HURRIED_SECONDS = 0.02
# How often it looks for a reason to stop, and for changed settings.
_CARE_SECONDS = 1.0
_FIRST_PAUSE_SECONDS = 0.5
# Short: a stop must be seen soon after the store is back.
_LONGEST_PAUSE_SECONDS = 4.0


@dataclass(frozen=True, slots=True)
class Arrived:
    """A version at hand: what is adopted, and the step times its commit records."""

    base: Base
    step_seconds: tuple[float, ...]


class Receiver:
    """Polls the store for one incarnation of one learner, in the background.

    Args:
        run: the open run.
        learner, incarnation: for whom.
        bases: the versions the learner starts from.
        tell: told of trouble; must not block.
        note_merge: told, for every version in turn, of a fragment up to where this learner's work is merged.
    """

    def __init__(
        self,
        run: Run,
        learner: str,
        incarnation: int,
        bases: Sequence[Arrived],
        tell: Tell,
        *,
        note_merge: Callable[[int, Position], None],
    ) -> None:
        self._run = run
        self._learner = learner
        self._incarnation = incarnation
        self._tell = tell
        self._note_merge = note_merge
        self._bases = [arrived.base for arrived in bases]
        self._arrived: dict[int, Arrived] = {}
        self._lock = threading.Lock()
        self._wakes = threading.Event()
        self._has_news = threading.Event()
        self._is_closed = False
        self._num_pardons = 0
        self._num_troubles = 0
        self._warned = ""
        self._patience = Patience(_LONGEST_PAUSE_SECONDS, _FIRST_PAUSE_SECONDS)
        self.poll_seconds = 0.2
        # What else is looked after as often as a reason to end.
        self.also: Callable[[], None] | None = None
        # "stopped", "superseded", "finished" or "left": why the learner must end, once it must.
        self.reason: str | None = None
        # What ended this thread, if anything did.
        self.failure: IslandsError | None = None
        self._thread = threading.Thread(target=self._work, name="diloco-receiver", daemon=True)
        self._thread.start()

    def take(self) -> dict[int, Arrived]:
        """Return the versions that have arrived since the last call, by fragment."""
        if not self._arrived:  # looked at every step: without the lock
            return {}
        with self._lock:
            arrived, self._arrived = self._arrived, {}
        return arrived

    @property
    def run(self) -> Run:
        """The run under the settings that hold now, as of the last look."""
        return self._run

    def hurry(self) -> None:
        """Look at once, and often until the pace is set anew: the learner waits for a version."""
        self.poll_seconds = _HURRIED_SECONDS
        self._wakes.set()

    def wait(self, seconds: float) -> None:
        """Wait until something has arrived or the learner must end, at most so long."""
        self._has_news.wait(seconds)
        self._has_news.clear()

    def forget_stop(self) -> None:
        """Forget that a stop was asked for, and look anew at once: it may have been taken back since."""
        with self._lock:
            self._num_pardons += 1
            if self.reason == "stopped":
                self.reason = None
        self._wakes.set()

    def care(self) -> None:
        """Look for a reason to end; for its own thread, while a slow fetch keeps that from its round."""
        with contextlib.suppress(StoreUnavailable):  # its own round asks again, and tells
            self._care(self._num_pardons)

    def close(self) -> None:
        """End the thread."""
        self._is_closed = True
        self._wakes.set()
        self._thread.join()

    def _work(self) -> None:
        try:
            self._watch()
        except StoreLost as exc:
            self.failure = exc
            self._has_news.set()
        except BaseException as exc:
            # Our bug, or the machine's: the learner must not train on, alone and out of reach.
            self.failure = LearnerLost(
                f"{self._learner}: nothing is fetched any more ({exc!r}); see the traceback in its process"
            )
            raise

    def _watch(self) -> None:
        pause, care_at, num_pardons = _FIRST_PAUSE_SECONDS, -math.inf, 0
        while True:
            self._wakes.clear()
            if self._is_closed:
                return
            num_pardons, before = self._num_pardons, num_pardons
            num_troubles = self._num_troubles
            try:
                if time.monotonic() >= care_at or num_pardons != before:
                    self._care(num_pardons)
                    care_at = time.monotonic() + _CARE_SECONDS
                self._fetch_all(self._look_for_versions())
                if self._num_troubles == num_troubles:
                    pause, rest = _FIRST_PAUSE_SECONDS, self.poll_seconds
                else:
                    rest, pause = pause, min(2 * pause, _LONGEST_PAUSE_SECONDS)
                self._say("info", self._patience.answered(now=time.monotonic()))
            except StoreUnavailable as exc:
                rest = self._bear(exc)
            if self.reason in ("superseded", "finished", "left"):
                return  # for good: nothing more will be adopted
            self._wakes.wait(rest)

    def _bear(self, exc: StoreUnavailable) -> float:
        """Return how long to wait before the store is asked again.

        Raises:
            StoreLost: it has not answered for too long.
        """
        limit = self._run.config.pipeline.store_patience_seconds
        pause = self._patience.refused(
            exc, now=time.monotonic(), limit_seconds=limit, draw=random.random()
        )
        self._say("warning", self._patience.complaint(exc))
        return pause

    def _care(self, num_pardons: int) -> None:
        self._run = refreshed(self._run)
        if self.also is not None:
            self.also()
        reason = self._look_for_reason()
        with self._lock:
            is_stale = reason == "stopped" and num_pardons != self._num_pardons
            if self.reason is None and not is_stale:
                self.reason = reason
        if reason is not None:
            self._has_news.set()

    def _look_for_reason(self) -> str | None:
        store = self._run.store
        newest = records.newest_incarnation(store, self._learner)
        if newest > self._incarnation:
            return "superseded"
        if store.read(names.FINISHED) is not None:
            return "finished"
        if store.read(names.left(self._learner)) is not None:
            return "left"
        return "stopped" if stopping.is_asked(self._run, self._learner) else None

    def _look_for_versions(self) -> list[list[tuple[Commit, str]]]:
        """Return, for each fragment that has moved, its new commits in order."""
        found = []
        for fragment, base in enumerate(self._bases):
            try:
                if news := self._look_beyond(fragment, base.version):
                    found.append(news)
            except DamagedObject as exc:
                self._warn(exc)
        return found

    def _look_beyond(self, fragment: int, known: int) -> list[tuple[Commit, str]]:
        news: list[tuple[Commit, str]] = []
        while (
            later := records.read_commit(self._run.store, fragment, known + len(news) + 1)
        ) is not None:
            news.append(later)
        return news

    def _tell_refusals(self, commit: Commit) -> None:
        """Tell what of this learner's work a version refuses."""
        for verdict in commit.refused:
            key = names.parse_contribution(verdict.name)
            if verdict.learner == self._learner and key is not None:
                meaning = MEANINGS.get(verdict.reason, verdict.reason)
                text = (
                    f"{self._learner}: its work on fragment {key.fragment} up to step {key.stop.step} was refused as "
                    f"{verdict.reason}: {meaning}"
                )
                self._tell({"kind": "log", "level": "warning", "text": text})

    def _fetch_all(self, found: Sequence[list[tuple[Commit, str]]]) -> None:
        for news in found:
            fragment = news[0][0].fragment
            try:
                values = records.fetch_newest(
                    self._run.store, [commit for commit, _ in news], self._bases[fragment].values
                )
            except DamagedObject as exc:
                # Perhaps it was collected while we read: the next look finds its successor.
                self._warn(exc)
                continue
            for commit, _ in news:
                tally = commit.tallies.get(self._learner, Tally())
                self._note_merge(fragment, tally.consumed_to)
                self._tell_refusals(commit)
            head, digest = news[-1]
            base = Base(head.version, digest, values)
            with self._lock:
                self._arrived[fragment] = Arrived(base, step_seconds_of(head))
            self._bases[fragment] = base
            self._has_news.set()

    def _warn(self, exc: DamagedObject) -> None:
        self._num_troubles += 1
        text = f"fetching: {exc}; again"
        if text != self._warned:  # what stays damaged is said once
            self._warned = text
            self._say("warning", text)

    def _say(self, level: str, text: str) -> None:
        if text:
            self._tell({"kind": "log", "level": level, "text": text})


def newest_version(run: Run, fragment: int, known: int = 0) -> Arrived:
    """Return the newest version of a fragment, probing upward from one known to exist.

    Raises:
        DamagedObject: the head is damaged.
    """
    while True:
        head, digest = records.find_head(run.store, fragment, known)
        try:
            return arrived_from(run, head, digest)
        except DamagedObject:
            if records.read_commit(run.store, fragment, head.version + 1) is None:
                raise
            known = head.version  # collected while we read: there are newer ones


def arrived_from(run: Run, commit: Commit, digest: str) -> Arrived:
    """Return a version with its decoded public values."""
    base = Base(commit.version, digest, records.read_public(run.store, commit))
    return Arrived(base, step_seconds_of(commit))


def step_seconds_of(commit: Commit) -> tuple[float, ...]:
    """Return the seconds per step of every learner, as a commit records them."""
    return tuple(tally.step_seconds for tally in commit.tallies.values())
