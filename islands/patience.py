"""How often a store that does not answer is asked again, for how long, and what people are told of it.

Knows monotonic seconds and failures; must not know a store, a clock or a source of randomness. Whoever asks keeps one
of these, so an outage is said once, and its end once, however often it asks.
"""

from __future__ import annotations

from dataclasses import dataclass

from islands.types import StoreLost, StoreUnavailable


@dataclass(slots=True)
class Patience:
    """One asker's patience with one store; of its own thread.

    Attributes:
        longest_pause_seconds: between two tries.
        num_failures: since the last answer.
        since: when the first of them was.
    """

    longest_pause_seconds: float = 10.0
    first_pause_seconds: float = 0.5
    num_failures: int = 0
    since: float = 0.0

    def refused(
        self, problem: StoreUnavailable, *, now: float, limit_seconds: float, draw: float
    ) -> float:
        """Note that the store did not answer and return how long to wait before it is asked again.

        Twice as long each time, less up to a half by lot, so that those who were refused together do not return so.

        Args:
            problem: what it said instead.
            now: monotonic seconds.
            limit_seconds: for how long it is asked without an answer.
            draw: by lot, from 0 to 1.

        Raises:
            StoreLost: it has not answered for so long.
        """
        if self.num_failures == 0:
            self.since = now
        seconds = now - self.since
        if seconds >= limit_seconds:
            raise StoreLost(
                f"a store must answer within pipeline.store_patience_seconds ({limit_seconds:g}), and has not for "
                f"{seconds:.0f} s: {problem}; mend it, then `diloco resume` goes on"
            ) from problem
        doublings = min(self.num_failures, 32)
        self.num_failures += 1
        pause = min(self.first_pause_seconds * 2.0**doublings, self.longest_pause_seconds)
        return pause * (1.0 - draw / 2)

    def answered(self, *, now: float) -> str:
        """Note that the store answered and return what to say: something if it had not before, else nothing."""
        if self.num_failures == 0:
            return ""
        self.num_failures = 0
        return f"the store answers again, after {now - self.since:.1f} s"

    def complaint(self, problem: StoreUnavailable) -> str:
        """Return what to say of a failure just noted: something if it is the first, else nothing."""
        return f"the store: {problem}; asked until it answers" if self.num_failures == 1 else ""
