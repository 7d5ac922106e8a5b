"""The thread that carries a learner's copies and checkpoints to the store. One writer, so its records form one chain.

Knows `Exchange` and an outbox; must not know when anything is due. The learner's thread only hands things over: no call
of `Sender` waits for the store, save for `drain`, at the end.

Why one thread writes both pushes and checkpoints: every record links to the one before, and links only move forward.

    1. the learner's thread takes the state for a checkpoint, at step 100;
    2. were a push written first, it would carry the account of step 120;
    3. the checkpoint would then link a past to its future.

So a waiting checkpoint goes before any push. If its store does not answer (checkpoints may lie elsewhere), one push may
pass; a state older than what was written meanwhile is given up.
"""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from islands import names
from islands.contributions import Telemetry
from islands.learner import Copy, LearnerState
from islands.ledger import LearnerRecord
from islands.patience import Patience
from islands.types import (
    IslandsError,
    LearnerLost,
    Position,
    Refused,
    StoreUnavailable,
    VersionTaken,
)
from tasks import records
from tasks.exchanging import Exchange

Tell = Callable[[Mapping[str, Any]], None]
# The patience with a place, and a piece of work that goes there; it returns whether anything was asked of the store.
Task = tuple[Patience, Callable[[], bool]]


@dataclass(frozen=True, slots=True)
class Standing:
    """The learner at a step boundary, as its thread last published it: account, pace, and what people look at."""

    account: LearnerRecord
    step_seconds: float
    telemetry: Telemetry


class Sender:
    """Writes what the learner hands over, in the background.

    Args:
        exchange: of this incarnation; only this thread uses it from now on.
        num_fragments: of the run.
        tell: told of each commit and of trouble; must not block.

    Attributes:
        patience_seconds: how long pushes are tried without an answer before this thread gives up. Checkpoints are tried
            for ever: that none can be written stops no training.
    """

    def __init__(self, exchange: Exchange, num_fragments: int, tell: Tell) -> None:
        self._exchange = exchange
        self._tell = tell
        self._changed = threading.Condition()
        self._outbox: dict[int, Copy] = {}
        self._state: LearnerState | None = None
        self._saves = True
        self._gives_way = False  # the store refused the waiting state: one push goes first
        self._newest: LearnerRecord | None = None  # the account of its newest link
        self._standing: Standing | None = None
        self._dropped: list[tuple[int, int]] = []
        self._marks: list[tuple[int, Position]] = []
        self._sent_at = [0] * num_fragments  # in commits: whose last one is oldest goes first
        self.patience_seconds = exchange.run.config.pipeline.store_patience_seconds
        self._pushing, self._saving = Patience(), Patience()
        self._is_busy = False
        self._is_saving = False
        self._is_closed = False
        self._failure: IslandsError | None = None
        self.num_commits = 0
        self._thread = threading.Thread(target=self._work, name="diloco-sender", daemon=True)
        self._thread.start()

    # --- the learner's side ---

    def offer(self, copies: Sequence[Copy], standing: Standing) -> None:
        """Hand over copies; each takes the place of an older one of its fragment that is still unsent."""
        with self._changed:
            self._standing = standing
            for copy in copies:
                unsent = self._outbox.get(copy.fragment)
                if unsent is not None:
                    self._drop(unsent, copy)
                self._outbox[copy.fragment] = copy
            self._changed.notify_all()

    def save(self, state: LearnerState) -> None:
        """Hand over a checkpoint's state; it takes the place of one that still waits."""
        with self._changed:
            self._state = state
            self._saves = self._is_saving = True
            self._changed.notify_all()

    def end_saving(self) -> None:
        """Write no checkpoint any more: what waits to be written is the last that counts."""
        with self._changed:
            self._saves, self._state = False, None
            self._changed.notify_all()

    @property
    def is_saving(self) -> bool:
        """Whether a checkpoint waits or is being written: another copy of the state would be in vain."""
        return self._is_saving

    def take_dropped(self) -> list[tuple[int, int]]:
        """Return (fragment, tokens) of copies of earlier intervals that were dropped unsent, since the last call."""
        if not self._dropped:  # looked at every step: without the lock
            return []
        with self._changed:
            dropped, self._dropped = self._dropped, []
        return dropped

    def note_merge(self, fragment: int, consumed_to: Position) -> None:
        """Take in up to where a version has merged this learner's work; versions in the order of their numbers."""
        with self._changed:
            self._marks.append((fragment, consumed_to))

    @property
    def failure(self) -> IslandsError | None:
        """What ended this thread, if anything did."""
        return self._failure

    def drain(self, seconds: float) -> bool:
        """Wait until everything handed over is written; False if it took longer or the thread has failed."""
        with self._changed:
            self._changed.wait_for(lambda: self._failure is not None or self._is_idle(), seconds)
            return self._failure is None and self._is_idle()

    def close(self) -> None:
        """End the thread after what it is writing."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join()

    # --- the thread ---

    def _is_idle(self) -> bool:
        return not (self._outbox or self._state or self._is_busy)

    def _drop(self, unsent: Copy, newer: Copy) -> None:
        """A newer copy of the same interval covers the older; one of a later interval leaves it unsent for good."""
        if unsent.start != newer.start:
            self._dropped.append((unsent.fragment, unsent.num_tokens))

    def _work(self) -> None:
        try:
            self._write_all()
        except BaseException as exc:
            # Our bug, or the machine's: the learner must not train on with nobody to carry its work.
            with self._changed:
                self._failure = LearnerLost(
                    f"{self._exchange.learner}: what it trains is not sent any more ({exc!r}); "
                    "see the traceback in its process"
                )
                self._changed.notify_all()
            raise

    def _write_all(self) -> None:
        while (task := self._next()) is not None:
            try:
                self._try(task)
            except IslandsError as exc:
                with self._changed:
                    self._failure = exc
            finally:
                with self._changed:
                    self._is_busy = False
                    self._is_saving = self._state is not None
                    self._changed.notify_all()

    def _try(self, task: Task) -> None:
        """Do one piece of work; where the store does not answer, rest before the next one.

        Raises:
            StoreLost: it has not for too long.
        """
        patience, work = task
        try:
            has_asked = work()
        except StoreUnavailable as exc:
            limit = self.patience_seconds if patience is self._pushing else math.inf
            pause = patience.refused(
                exc, now=time.monotonic(), limit_seconds=limit, draw=random.random()
            )
            self._say("warning", patience.complaint(exc))
            self._rest(pause)
            return
        if has_asked:
            self._say("info", patience.answered(now=time.monotonic()))

    def _say(self, level: str, text: str) -> None:
        if text:
            self._tell({"kind": "log", "level": level, "text": text})

    def _next(self) -> Task | None:
        with self._changed:
            self._changed.wait_for(
                lambda: self._is_closed or (self._failure is None and not self._is_idle())
            )
            if self._is_closed or self._failure is not None:
                return None
            self._is_busy = True
            for fragment, consumed_to in self._marks:
                self._exchange.settle(fragment, consumed_to)
            self._marks.clear()
            if self._state is not None and not (self._gives_way and self._outbox):
                state, self._state = self._state, None
                return self._saving, partial(self._save, state)
            fragment = min(self._outbox, key=lambda p: (self._sent_at[p], p))
            copy, standing = self._outbox.pop(fragment), self._standing
        assert standing is not None
        return self._pushing, partial(self._push, copy, standing)

    def _rest(self, seconds: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed, seconds)

    def _save(self, state: LearnerState) -> bool:
        self._gives_way = False
        record, newest = state.record, self._newest
        if newest is not None and records.progress(record) < records.progress(newest):
            text = f"the checkpoint of {record.position} waited too long: newer work was sent meanwhile"
            if self._saving.num_failures == 0:  # else it is known why
                self._say("warning", text)
            return False
        try:
            if not self._exchange.can_save(record) or self._exchange.is_saved(record):
                return False
            name = self._write_checkpoint(state)
        except StoreUnavailable:
            with self._changed:
                if self._saves:
                    self._gives_way, self._state = True, self._state or state
            raise
        self._newest = record
        self._tell({"kind": "saved", "name": name})
        return True

    def _push(self, copy: Copy, standing: Standing) -> bool:
        self._gives_way = False
        try:
            self._write_push(copy, standing)
        except Refused as exc:
            if exc.reason in ("non-finite", "finished") or self._exchange.run.config.sync.blocks:
                raise  # this incarnation is over: in vain, or all the others would wait for this push
            self._say("warning", f"push refused: {exc}")
            return True
        except StoreUnavailable:
            with self._changed:
                newer = self._outbox.get(copy.fragment)
                if newer is None:
                    self._outbox[copy.fragment] = copy
                else:
                    self._drop(copy, newer)
            raise
        self._newest = standing.account
        self.num_commits += 1
        self._sent_at[copy.fragment] = self.num_commits
        self._tell(
            {
                "kind": "pushed",
                "fragment": copy.fragment,
                "base": copy.base_version,
                "step": copy.stop.step,
                "tokens": standing.account.trained,
                "loss": standing.telemetry.loss,
            }
        )
        return True

    def _write_checkpoint(self, state: LearnerState) -> str:
        name = names.checkpoint(self._exchange.learner, state.record.position)
        try:
            return self._exchange.save(state)
        except VersionTaken:
            self._link_on(name)
            return name

    def _write_push(self, copy: Copy, standing: Standing) -> None:
        learner = self._exchange.learner
        key = names.ContributionKey(copy.fragment, learner, copy.base_version, copy.stop)
        before = self._exchange.feedback[copy.fragment]
        try:
            self._exchange.push(
                copy,
                standing.account,
                step_seconds=standing.step_seconds,
                telemetry=standing.telemetry,
            )
        except VersionTaken:
            # What counts was coded by an earlier try, under what was owed then, and is remembered from then.
            self._exchange.feedback[copy.fragment] = before
            self._link_on(names.contribution(key))

    def _link_on(self, name: str) -> None:
        """Go on from a record that was written though the store did not say so.

        Its name holds this incarnation, so nobody else can have written it: the first attempt's answer was lost.
        """
        found = records.read(self._exchange.run.store, name)
        if found is not None:  # else it is consumed and collected already
            self._exchange.previous = found[1]
