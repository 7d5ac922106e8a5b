"""The local driver's records: what can happen, when, and where each island stands.

Knows times in base steps and learners as opaque seats; must not know what an event does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from islands.sections import IslandConfig

if TYPE_CHECKING:  # both need torch
    from islands.learner import Copy, Learner
    from tasks.exchanging import Exchange


class Kind(IntEnum):
    """What happens, in the order in which things happen within one instant."""

    STEP_ENDS = 0
    PUSH_LANDS = 1
    MERGE = 2
    VERSION_ARRIVES = 3
    RETURN = 4
    STEP_BEGINS = 5
    LAST_PUSH_LANDS = 6
    LEAVE = 7
    SAVE = 8


@dataclass(frozen=True, slots=True, order=True)
class Event:
    """Something that happens at `time`. `order` breaks ties; `numbers` are (fragment, version) or (fragment, step)."""

    time: float
    kind: Kind
    order: int
    island: str = ""
    numbers: tuple[int, ...] = ()


@dataclass(slots=True)
class Seat:
    """An island's place in the driver; the learner may be away.

    `status`: "waiting" (not started, or dead and coming back), "training", "leaving", "left". `outbox`: fragment ->
    copy under way. `arrived`: fragment -> newest version at hand. `struck`: scripted faults that have happened.
    `num_breaks`: how often in a row its numbers broke before a push succeeded. `loss`: smoothed, for people.
    """

    island: IslandConfig
    build: Callable[[], Learner]
    shard: npt.NDArray[np.uint8]
    status: str = "waiting"
    learner: Learner | None = None
    exchange: Exchange | None = None
    outbox: dict[int, Copy] = field(default_factory=dict)
    arrived: dict[int, int] = field(default_factory=dict)
    struck: set[int] = field(default_factory=set)
    is_blocked: bool = False
    num_breaks: int = 0
    loss: float = 0.0

    @property
    def step_time(self) -> float:
        return 1.0 / self.island.speed


@dataclass(frozen=True, slots=True)
class Beat:
    """What a watcher is told after each event that trained, merged or changed somebody's status.

    `trained`: tokens so far over all islands. `loss` in nats per byte, of a step that just ended.
    """

    time: float
    island: str
    what: str
    trained: int
    loss: float | None = None


Watch = Callable[[Beat], None]
