"""The synchronizer as a process: look, merge, wait a little, until there is nothing left to wait for. No torch.

Knows the loop and its monotonic clock; must not know who started it.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass

from islands.patience import Patience
from islands.types import StoreUnavailable
from tasks import records, stopping
from tasks.merging import Polled, Synchronizer
from tasks.ringing import Bell
from tasks.runs import Run, refreshed

SHORTEST_LINGER_SECONDS = 10.0
# A look at the store costs some milliseconds; between two of them a contribution waits.
_SHORTEST_POLL_SECONDS = 0.03
_LONGEST_POLL_SECONDS = 1.0
_LOOKS_PER_PERIOD = 40
# Merges that come faster than one in so many seconds share a note.
NOTE_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Merged:
    """A version just published: fragment, number, and whose contributions it merged."""

    fragment: int
    version: int
    learners: tuple[str, ...]


def synchronize(
    run: Run,
    synchronizer: Synchronizer,
    *,
    on_merges: Callable[[list[Merged]], None],
    say: Callable[[str], None],
    is_stopped: Callable[[], bool],
) -> str:
    """Merge all that is due while work arrives; return why it ended.

    "settled": all islands have left and everything is merged. "superseded": a later synchronizer goes on. "idle":
    nothing came for the time it lingers. "stopped": somebody asked. Changed settings act between two looks.

    Args:
        run: the open run.
        synchronizer: of this process.
        on_merges: told of versions just published; must not block.
        say: told of an outage of the store, once, and of its end.
        is_stopped: asked between two looks.

    Raises:
        StoreLost: the store has not answered for too long.
    """
    last_work, looked_for_stop, patience = time.monotonic(), 0.0, Patience()
    while not is_stopped():
        now = time.monotonic()
        try:
            if now - looked_for_stop >= 1.0:
                looked_for_stop = now
                if stopping.is_asked(run):
                    return "stopped"
                synchronizer.steer(refreshed(synchronizer.run))
            polled = synchronizer.poll(now=now)
            merged = _merged(run, polled)
        except StoreUnavailable as exc:
            limit = synchronizer.run.config.pipeline.store_patience_seconds
            pause = patience.refused(exc, now=now, limit_seconds=limit, draw=random.random())
            if complaint := patience.complaint(exc):
                say(complaint)
            time.sleep(pause)
            continue
        if news := patience.answered(now=now):
            say(news)
        if merged:
            last_work = now
            on_merges(merged)
        if polled.is_superseded or polled.is_settled:
            return "superseded" if polled.is_superseded else "settled"
        period = synchronizer.period_seconds()
        linger = max(
            SHORTEST_LINGER_SECONDS, synchronizer.run.config.pipeline.linger_periods * period
        )
        if now - last_work > linger and polled.wait_seconds == float("inf"):
            return "idle"
        poll = min(_LONGEST_POLL_SECONDS, max(_SHORTEST_POLL_SECONDS, period / _LOOKS_PER_PERIOD))
        time.sleep(min(poll, max(0.0, polled.wait_seconds)))
    return "stopped"


def _merged(run: Run, polled: Polled) -> list[Merged]:
    found = []
    for fragment, version in polled.published:
        commit, _ = records.require_commit(run.store, fragment, version)
        found.append(Merged(fragment, version, tuple(entry.learner for entry in commit.consumed)))
    return found


def is_needed(bell: Bell, *, now: Callable[[], float], sleep: Callable[[float], None]) -> bool:
    """Say whether a quorum waits that nobody else merges; a living synchronizer is given its time to.

    Heads that move meanwhile tell of one: in a busy run there may always be some quorum that waits.
    """
    if bell.look(now=now()) is not None:
        return True
    num_merges = bell.num_merges
    while bell.is_waiting(now=now()) and bell.num_merges == num_merges:
        sleep(_SHORTEST_POLL_SECONDS)
        if bell.look(now=now()) is not None:
            return True
    return False


class Drain:
    """Gathers merges into notes: one per merge while they are rare, one for ten seconds' worth when they are not.

    Args:
        note: takes a name and the lines of one note; must not block.
    """

    def __init__(self, note: Callable[[str, list[str]], object]) -> None:
        self._note = note
        self._gathered: list[Merged] = []
        self._noted_at = float("-inf")
        self.num_merges = 0

    def add(self, merged: list[Merged]) -> None:
        """Take in merges just made."""
        self._gathered += merged
        self.num_merges += len(merged)
        if time.monotonic() - self._noted_at >= NOTE_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Note what is gathered."""
        if not self._gathered:
            return
        gathered, self._gathered = self._gathered, []
        self._noted_at = time.monotonic()
        self._note(name_of(gathered), [name_of([merged]) for merged in gathered])


def name_of(merged: list[Merged]) -> str:
    """Return a name for a drain, such as "merge f2 v17→v18 (east, west)"."""
    spans: dict[int, tuple[int, int]] = {}
    for one in merged:
        first, last = spans.get(one.fragment, (one.version - 1, one.version))
        spans[one.fragment] = (min(first, one.version - 1), max(last, one.version))
    moves = ", ".join(f"f{p} v{first}→v{last}" for p, (first, last) in sorted(spans.items()))
    learners = sorted({name for one in merged for name in one.learners})
    return f"merge {moves} ({', '.join(learners)})"
