"""What an island's cluster runs: one stretch of training, the learner kept warm in the process in between.

Knows lives by island; must not know Prefect, nor anything of the cluster but a way to tell it what happens. Whoever
sends an order imports this module too, so torch is loaded where the order is carried out.
"""

from __future__ import annotations

import random
import threading
import time
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from infra.clusters import is_told_to_end, teller
from islands.patience import Patience
from islands.types import StoreUnavailable
from tasks.records import new_attempt
from tasks.runs import open_run

if TYPE_CHECKING:
    from tasks.living import Life

Key = tuple[str, str, str]
_lives: dict[Key, Life] = {}
_turns: defaultdict[Key, threading.Lock] = defaultdict(threading.Lock)
_warming = threading.Lock()
# What a worker does before the first order comes: it takes seconds.
PRELOAD = "tasks.segments.warm_up"


@dataclass(frozen=True, slots=True)
class Segment:
    """An order to train: which island of which run, for how long, and how long to wait for a store that is away."""

    store_url: str
    run_id: str
    island: str
    seconds: float
    patience_seconds: float

    @property
    def topic(self) -> str:
        """Under which the learner tells what happens; the same for every segment of an island."""
        return f"diloco/{self.run_id}/{self.island}"


@dataclass(frozen=True, slots=True)
class Stretch:
    """What one stretch of training did.

    `outcome`: "goes on", "left" (for good: its share is trained and pushed, or it was written off), "stopped",
    "drained" (its process was told to end: saved, another one goes on), "superseded" or "finished". `idle_share`: of
    its thread's seconds since the incarnation began, those in neither training steps nor adoptions.
    """

    outcome: str
    incarnation: int
    step: int
    trained: int
    num_steps: int
    seconds: float
    loss: float
    idle_share: float


def warm_up() -> None:
    """Load into this process what a learner needs before its first step; who comes second waits for the first.

    torch, that is, and some 800 modules more when the first optimizer is made.
    """
    with _warming:
        from tasks import building, living  # noqa: F401  the rest of what a learner is made of

        building.load_optimizer()


def train_segment(segment: Segment) -> Stretch:
    """Train an island's learner for one segment in this process, going on where the segment before ended.

    Without one in this process, or if a later incarnation has registered elsewhere, a new incarnation begins. A second
    call for the same island waits for the end of the first.

    Raises:
        IslandsError: this incarnation is over; the next call begins another from the newest healthy checkpoint.
    """
    key = (segment.store_url, segment.run_id, segment.island)
    with _turns[key]:
        life = _lives.pop(key, None)
        goes_on = False
        try:
            if life is not None and life.is_superseded:
                life.close()
                life = None
            if life is None:
                begun = _begin(segment)
                if isinstance(begun, Stretch):
                    return begun
                life = begun
            stretch = life.train(segment.seconds, is_told_to_end=is_told_to_end)
            goes_on = stretch.outcome == "goes on"
            return stretch
        finally:
            if life is not None and goes_on:
                _lives[key] = life
            elif life is not None:
                life.close()


def _begin(segment: Segment) -> Life | Stretch:
    """Return a new incarnation, or the end that leaves nothing to train; a store that is away is waited for.

    A disk that is full lets nobody register: without waiting, an island would use up its restarts within a minute.
    """
    warm_up()
    from tasks.living import Life, ended

    tell, patience = teller(segment.topic), Patience()
    while True:
        try:
            run = open_run(segment.store_url, segment.run_id)
            stretch = ended(run, segment.island)
            return stretch or Life(run, segment.island, new_attempt, stamp=time.time, tell=tell)
        except StoreUnavailable as exc:
            if is_told_to_end():
                raise
            limit, draw = segment.patience_seconds, random.random()
            pause = patience.refused(exc, now=time.monotonic(), limit_seconds=limit, draw=draw)
            if complaint := patience.complaint(exc):
                tell({"kind": "log", "level": "warning", "text": complaint})
            time.sleep(pause)
