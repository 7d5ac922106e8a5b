"""The thread that fetches what a learner should know: newer versions, and reasons to stop.

Knows heads, stops and incarnations; must not know the learner. Headers of all fragments come before any payload; of
several new versions only the newest is fetched.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

from islands import names
from islands.learner import Base
from islands.types import DamagedObject, StoreUnavailable
from islands.versions import Commit
from tasks import records, stopping
from tasks.runs import Run
from tasks.sending import LONGEST_PAUSE_SECONDS, Tell

# How often it looks for a reason to stop.
_CARE_SECONDS = 1.0


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
    """

    def __init__(
        self, run: Run, learner: str, incarnation: int, bases: Sequence[Arrived], tell: Tell
    ) -> None:
        self._run = run
        self._learner = learner
        self._incarnation = incarnation
        self._tell = tell
        self._known = [arrived.base.version for arrived in bases]
        self._arrived: dict[int, Arrived] = {}
        self._lock = threading.Lock()
        self._is_closed = threading.Event()
        self.poll_seconds = 0.2
        self.bytes_down = 0
        # "stopped", "superseded" or "finished": why the learner must end, once it must.
        self.reason: str | None = None
        self._thread = threading.Thread(target=self._work, name="diloco-receiver", daemon=True)
        self._thread.start()

    def take(self) -> dict[int, Arrived]:
        """Return the versions that have arrived since the last call, by fragment."""
        if not self._arrived:  # looked at every step: without the lock
            return {}
        with self._lock:
            arrived, self._arrived = self._arrived, {}
        return arrived

    def close(self) -> None:
        """End the thread."""
        self._is_closed.set()
        self._thread.join()

    def _work(self) -> None:
        pause, since_care = 0.5, _CARE_SECONDS
        while not self._is_closed.is_set():
            try:
                if since_care >= _CARE_SECONDS:
                    since_care = 0.0
                    self.reason = self.reason or self._look_for_reason()
                self._fetch_all(self._look_for_versions())
                pause, rest = 0.5, self.poll_seconds
            except (StoreUnavailable, DamagedObject) as exc:
                # Damage may be an object that was collected while we read: the next look finds its successor.
                self._tell({"kind": "log", "level": "warning", "text": f"fetching: {exc}; again"})
                rest, pause = pause, min(2 * pause, LONGEST_PAUSE_SECONDS)
            since_care += rest
            self._is_closed.wait(rest)

    def _look_for_reason(self) -> str | None:
        store = self._run.store
        newest = records.newest_incarnation(store, self._learner)
        if newest > self._incarnation:
            return "superseded"
        if store.read(names.FINISHED) is not None:
            return "finished"
        return "stopped" if stopping.is_asked(self._run, self._learner) else None

    def _look_for_versions(self) -> list[tuple[Commit, str]]:
        found = []
        for fragment, known in enumerate(self._known):
            newest = None
            while True:
                version = known + 1 if newest is None else newest[0].version + 1
                later = records.read_commit(self._run.store, fragment, version)
                if later is None:
                    break
                newest = later
            if newest is not None:
                found.append(newest)
        return found

    def _fetch_all(self, found: Sequence[tuple[Commit, str]]) -> None:
        for commit, digest in found:
            arrived = arrived_from(self._run, commit, digest)
            self.bytes_down += sum(
                item.num_bytes for item in commit.payload.objects if item.name.startswith("public/")
            )
            with self._lock:
                self._arrived[commit.fragment] = arrived
            self._known[commit.fragment] = commit.version


def arrived_from(run: Run, commit: Commit, digest: str) -> Arrived:
    """Return a version with its decoded public values."""
    base = Base(commit.version, digest, records.read_public(run.store, commit))
    return Arrived(base, tuple(tally.step_seconds for tally in commit.tallies.values()))
