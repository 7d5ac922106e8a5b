"""When a synchronizer must be called: a quorum is complete, and nobody merges it. No torch.

Knows the inboxes, the heads, and the looker's own monotonic seconds; must not know how a call is made. Nobody asks
whether a synchronizer lives: a head that does not move although it could is what counts.

The key of a call must change while nobody answers. Told as a story:

    1. a quorum is complete: an island calls, with a key made of the run and the merges so far;
    2. the flow that answers is killed before its first merge;
    3. everybody calls again, with the same key; it was answered once, so nothing starts.

So the number of synchronizers that have enlisted so far, and of intervals waited, are part of the key. Each interval
is twice as long as the one before: where a start takes a minute the machine is busy, and calls make it busier. Which
fragment waits is not: a synchronizer merges them all, and two islands may see two of them wait.
"""

from __future__ import annotations

from dataclasses import dataclass

from tasks import records
from tasks.inbox import Roster, open_views
from tasks.runs import Run

# How long a call may go unanswered before the second one.
RING_SECONDS = 10.0
# A living synchronizer merges within pace and grace; twice that, and at least so long, says it is not there. To start
# another one takes about as long: to doubt sooner gains little, and calls for help that makes a busy machine busier.
SHORTEST_DOUBT_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Ring:
    """A call for a synchronizer.

    `num_merges`: outer steps so far. `num_synchronizers`: enlisted so far. `num_intervals`: waited, each twice as
    long as the one before.
    """

    run_id: str
    num_merges: int
    num_synchronizers: int
    num_intervals: int

    @property
    def key(self) -> str:
        """The same for everybody who calls for the same reason at about the same time."""
        return f"{self.run_id}-m{self.num_merges}-n{self.num_synchronizers}-k{self.num_intervals}"


class Bell:
    """Watches a run's inboxes and says when to ring. One thread.

    Args:
        run: an open run with version 0 of every fragment.

    Attributes:
        num_merges: outer steps so far, as of the last look; -1 before the first.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._roster = Roster(run)
        self._views = open_views(run)
        self.num_merges = -1
        self._since: float | None = None  # a quorum is complete, and no head has moved

    def steer(self, run: Run) -> None:
        """Go on under the settings of this run, the same one opened later."""
        if run is self._run:
            return
        for view in self._views:
            view.steer(run)
        self._roster.steer(run)
        self._run = run

    def look(self, *, now: float) -> Ring | None:
        """Return the call that is due, None if there is none.

        Raises:
            StoreUnavailable: the store did not answer.
        """
        doubt = self._doubt_seconds(now)
        if doubt is None or self._since is None or now - self._since < doubt:
            return None
        return Ring(
            run_id=self._run.run_id,
            num_merges=self.num_merges,
            num_synchronizers=records.next_number(self._run.store, "synchronizers"),
            num_intervals=_num_intervals(now - self._since),
        )

    def is_waiting(self, *, now: float) -> bool:
        """Say whether a quorum is complete, overdue or not yet."""
        return self._doubt_seconds(now) is not None

    def _doubt_seconds(self, now: float) -> float | None:
        """Return how long a complete quorum may wait before somebody rings; None while no quorum is complete."""
        members = self._roster.members()
        doubts = []
        for view in self._views:
            view.refresh()
            view.observe(now)
            chosen = view.acceptable(members)
            state = view.round(members, chosen)
            if len(chosen) >= (1 if state.is_final else state.min_learners):
                least = 2 * (state.period_seconds + state.grace_seconds)
                doubts.append(max(least, SHORTEST_DOUBT_SECONDS))
        num_merges = sum(view.head.version for view in self._views)
        if num_merges != self.num_merges or not doubts:
            self._since = None
        self.num_merges = num_merges
        if not doubts:
            return None
        self._since = now if self._since is None else self._since
        # Before the first merge there is no synchronizer to give time to.
        return 0.0 if num_merges == 0 else min(doubts)


def _num_intervals(waited: float) -> int:
    """Return how many intervals are over: one after 10 s, two after 30 s, three after 70 s."""
    return int(waited // RING_SECONDS + 1).bit_length() - 1
