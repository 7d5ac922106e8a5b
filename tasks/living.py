"""One incarnation of a learner in this process: its thread trains, two others exchange.

Knows the learner, its sender and its receiver; must not know who called or what a cluster is. The learner's own thread
does training steps and adoptions; all else it does (copies, handing over, looking for arrivals) is measured as idle.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable
from dataclasses import replace

import torch

from infra import memory, processes
from islands import names
from islands.contributions import Telemetry, smoothed
from islands.data import batch_at
from islands.fragments import own_period
from islands.learner import Base
from islands.ledger import LearnerRecord
from islands.patience import Patience
from islands.steering import changes_between
from islands.types import Refused, StoreUnavailable
from tasks import building, exchanging, history, pacing, records, returning
from tasks.enduring import Endured
from tasks.exchanging import Exchange
from tasks.receiving import Arrived, Receiver, newest_version
from tasks.records import NewAttempt, Stamp
from tasks.runs import Run, read_shard
from tasks.segments import Stretch
from tasks.sending import Sender, Standing, Tell

# How long the last pushes and checkpoint may take when asked to stop; a stop must be over in 30 s.
DRAIN_SECONDS = 20.0
_LOOK_SECONDS = 1.0
# Ends at which everything is saved, for another incarnation to go on from.
_SAVED_ENDS = ("stopped", "drained")


class Life:
    """A learner from its registration to its end. Call `train` from one thread.

    Args:
        run: an open run with version 0 of every fragment.
        name: of the island.
        new_attempt: returns a name no other writer uses.
        stamp: the time to write beside records.
        tell: told of what happens; must not block.
    """

    def __init__(
        self, run: Run, name: str, new_attempt: NewAttempt, *, stamp: Stamp, tell: Tell
    ) -> None:
        self.run = run
        self.island = run.island(name)
        self._stamp = stamp
        self._tell = tell
        torch.set_num_threads(self.island.cluster.threads)
        memory.keep_freed_memory(self.island.cluster.memory_mb)
        self._shard = read_shard(run, name)
        self._learner = building.build_learner(run, name)
        past = history.register(run, name, new_attempt, stamp=stamp, where=processes.here())
        link = exchanging.link_of(run, name, past.last)
        known = [0] * len(run.layouts)
        if past.last is not None:
            known = [clock.base_version for clock in past.last.clocks]
        near = replace(run, store=link)
        heads = [newest_version(near, p, version) for p, version in enumerate(known)]
        owed = returning.take_up(run, self._learner, past, [head.base for head in heads])
        self.incarnation = past.incarnation
        self._share = run.own_tokens(name)
        pacing.begin(self._learner, run.config.sync)
        self._arrived: dict[int, Base] = {}  # waiting for their turn
        self._peers = [head.step_seconds for head in heads]
        self._step_seconds = 0.0
        self._num_timed = 0
        self._is_told_to_end: Callable[[], bool] = lambda: False
        self._loss = 0.0
        self._useful = 0.0
        self._begun_at: float | None = None  # on its thread's clock: when it first trained
        self._saved_at = time.monotonic()
        since = "starts" if past.last is None else "comes back"
        text = f"{name} {since} as incarnation {past.incarnation} at step {self._learner.position.step}"
        tell({"kind": "log", "level": "info", "text": text})
        self._exchange = Exchange(
            run,
            name,
            past.incarnation,
            past.last_digest,
            new_attempt,
            stamp=stamp,
            link=link,
            feedback=owed,
        )
        self.run = self._exchange.run  # by way of its link
        # From here on: until now nothing trained that could wait for it.
        link.bytes_per_second = self.island.bytes_per_second
        self._begin_exchange(heads, pacing.lost_copies(run, self._learner))

    def _begin_exchange(self, heads: list[Arrived], lost: list[int]) -> None:
        """Begin to push, what a predecessor lost first, and to fetch; where that fails no thread is left."""
        exchange = self._exchange
        with contextlib.ExitStack() as stack:
            self._sender = Sender(exchange, len(self.run.layouts), self._tell)
            stack.callback(self._sender.close)
            self._receiver = Receiver(
                exchange.run,
                self.island.name,
                self.incarnation,
                heads,
                self._tell,
                note_merge=self._sender.note_merge,
            )
            exchange.link.meanwhile = self._receiver.care
            self._receiver.also = Endured(exchange.run, self.island.name, exchange.link).look
            stack.callback(self._receiver.close)
            if lost:
                self._hand_over(lost)
            stack.pop_all()

    @property
    def is_superseded(self) -> bool:
        """Whether a later incarnation of this learner is known to have registered; asks nobody, so it never waits."""
        return self._receiver.reason == "superseded"

    def train(
        self, seconds: float, *, is_told_to_end: Callable[[], bool] = lambda: False
    ) -> Stretch:
        """Train for so long, or until the share is trained or somebody asks to stop; return how it went.

        `is_told_to_end`: says that this process must end soon; asked at every step.

        Raises:
            Refused: the learner's numbers are broken; a new incarnation must go on from a healthy checkpoint.
            LearnerLost, StoreLost: nothing can be exchanged any more.
        """
        learner, begun = self._learner, time.perf_counter()
        self._begun_at = begun if self._begun_at is None else self._begun_at
        first_step, now = learner.position.step, begun
        self._receiver.forget_stop()
        self._is_told_to_end = is_told_to_end
        while (reason := self._why_end()) is None and now < begun + seconds:
            self._steer()
            if self._is_blocked():
                now = self._wait(begun + seconds)
                continue
            if learner.trained >= self._share:
                reason = self._leave()
                break
            now = self._one_step(now)
        if reason in _SAVED_ENDS:
            self._stop()
        outcome = reason or "goes on"
        return Stretch(
            outcome=outcome,
            incarnation=self.incarnation,
            step=learner.position.step,
            trained=learner.trained,
            num_steps=learner.position.step - first_step,
            seconds=time.perf_counter() - begun,
            loss=self._loss,
            idle_share=self._idle_share(),
        )

    def close(self) -> None:
        """End the exchange; nothing more of this incarnation is written."""
        self._exchange.link.close()
        self._receiver.close()
        self._sender.close()

    def _why_end(self) -> str | None:
        """Return why this incarnation must end, None if it need not.

        Raises:
            IslandsError: what ended its sender or its receiver.
        """
        failure = self._sender.failure or self._receiver.failure
        if isinstance(failure, Refused) and failure.reason == "finished":
            return "finished"
        if failure is not None:
            raise failure
        if self._receiver.reason is None and self._is_told_to_end():
            return "drained"
        return self._receiver.reason

    def _steer(self) -> None:
        """Go on under changed settings. Batch size and device stay those this incarnation began with."""
        run = self._receiver.run
        if run is self.run:
            return
        building.retune(self._learner, run)
        changes = ", ".join(map(str, changes_between(self.run.config, run.config)))
        self.run, self._share = run, run.own_tokens(self.island.name)
        self._exchange.link.bytes_per_second = run.island(self.island.name).bytes_per_second
        self._sender.patience_seconds = run.config.pipeline.store_patience_seconds
        text = (
            f"{self.island.name} at step {self._learner.position.step}: settings changed: {changes}"
        )
        self._tell({"kind": "log", "level": "info", "text": text})

    # --- one step ---

    def _one_step(self, begun: float) -> float:
        """Adopt, train one step, hand over what is due; return the time at its end."""
        learner, config = self._learner, self.run.config
        self._adopt_arrived()
        batch = batch_at(
            self._shard,
            cursor=learner.cursor,
            batch_size=self.island.batch_size,
            context=config.model.context,
            seed=config.seed,
            learner=self.island.name,
        )
        num_tokens = self.island.batch_size * config.model.context
        loss = learner.step(batch, num_tokens=num_tokens, num_samples=self.island.batch_size)
        trained = time.perf_counter()
        self._loss = smoothed(self._loss, loss)
        self._pace(trained - begun)
        self._count_dropped()
        if due := pacing.due(learner, config.sync):
            self._hand_over(due)
        is_old = time.monotonic() - self._saved_at >= config.pipeline.checkpoint_seconds
        if is_old and not self._sender.is_saving:
            self._save()
        now = time.perf_counter()
        self._useful += trained - begun
        return now

    def _adopt_arrived(self) -> None:
        """Adopt what its algorithm adopts now, of all versions that have arrived; keep what must wait for its turn."""
        learner, sync = self._learner, self.run.config.sync
        for fragment, arrived in self._receiver.take().items():
            self._peers[fragment] = arrived.step_seconds
            if arrived.base.version > learner.clock(fragment).base_version:
                self._arrived[fragment] = arrived.base
        while self._arrived:
            versions = {p: base.version for p, base in self._arrived.items()}
            ready = pacing.adoptable(learner, sync, versions)
            for fragment in ready:
                base, period = self._arrived.pop(fragment), self._own_period(fragment)
                pacing.adopt(learner, sync, fragment, base, own_period=period)
            if not ready:
                return

    def _is_blocked(self) -> bool:
        """Adopt what is awaited, if it has arrived, and say whether the learner still waits."""
        if not pacing.must_wait(self._learner, self.run.config.sync):
            return False
        self._adopt_arrived()
        return pacing.must_wait(self._learner, self.run.config.sync)

    def _wait(self, ends: float) -> float:
        """Wait for news, at most until then; return the time after it."""
        self._receiver.hurry()
        self._receiver.wait(min(_LOOK_SECONDS, max(0.0, ends - time.perf_counter())))
        return time.perf_counter()

    def _pace(self, seconds: float) -> None:
        """Take a step's time into the running estimate; a single hiccup must not move it far."""
        self._num_timed += 1
        if self._num_timed == 1:
            return  # it loads kernels too, and touches memory for the first time: on a GPU that takes seconds
        known = self._step_seconds or seconds
        # A mean of all steps at first, of about the last hundred later: shared cores are uneven for seconds.
        share = max(1 / (self._num_timed - 1), 0.01)
        self._step_seconds = known + share * (min(seconds, 4 * known) - known)
        self._receiver.poll_seconds = min(1.0, max(0.02, self._step_seconds))

    def _own_period(self, fragment: int) -> int:
        return own_period(
            self.run.config.sync.period_steps,
            step_seconds=self._step_seconds,
            all_step_seconds=self._peers[fragment],
        )

    def _hand_over(self, fragments: list[int]) -> None:
        learner = self._learner
        sync = self.run.config.sync
        copies = [pacing.copy(learner, sync, p, own_period=self._own_period(p)) for p in fragments]
        self._sender.offer(copies, self._standing())

    def _count_dropped(self) -> None:
        for fragment, tokens in self._sender.take_dropped():
            self._learner.count_replaced(fragment, tokens)

    def _standing(self) -> Standing:
        telemetry = Telemetry(loss=self._loss, idle_share=self._idle_share())
        return Standing(self._learner.record(""), self._step_seconds, telemetry)

    def _idle_share(self) -> float:
        """Return what share of the seconds since it first trained, between segments too, went elsewhere."""
        if self._begun_at is None:
            return 0.0
        return 1.0 - self._useful / max(self._useful, time.perf_counter() - self._begun_at)

    # --- saving and ending ---

    def _save(self) -> None:
        self._sender.save(self._learner.state(""))
        self._saved_at = time.monotonic()

    def _stop(self) -> None:
        """Write what is handed over, then a checkpoint; what is not copied stays open, and lives in the checkpoint."""
        if not self._sender.drain(DRAIN_SECONDS / 2):
            self._exchange.link.lift()  # the checkpoint must not wait for a link too narrow for what is handed over
        self._count_dropped()
        self._save()
        if not self._sender.drain(DRAIN_SECONDS / 2):
            text = "the last checkpoint was not written in time: the one before counts"
            self._tell({"kind": "log", "level": "warning", "text": text})

    def _leave(self) -> str:
        """Push what is left, and say farewell; return how it ended."""
        learner = self._learner
        rest = [
            p
            for p in range(len(self.run.layouts))
            if learner.clock(p).open_tokens > learner.clock(p).copied_tokens
        ]
        self._hand_over(rest)
        self._sender.end_saving()
        while not self._sender.drain(_LOOK_SECONDS):
            if (reason := self._why_end()) is not None:
                return reason
            self._steer()
        self._count_dropped()
        self._sender.close()
        return self._say_farewell(self._exchange.linked(learner.record("")))

    def _say_farewell(self, record: LearnerRecord) -> str:
        """Leave, unless somebody else goes on in this name; return how it ended."""
        patience = Patience(_LOOK_SECONDS)
        while True:
            reason = self._why_end()
            if reason is not None and reason not in _SAVED_ENDS:  # these have nothing left to save
                return reason
            try:
                if records.newest_incarnation(self.run.store, self.island.name) > self.incarnation:
                    return "superseded"
                history.leave(self.run, record, stamp=self._stamp)
                return "left"
            except StoreUnavailable as exc:
                limit = self.run.config.pipeline.store_patience_seconds
                now, draw = time.monotonic(), random.random()
                pause = patience.refused(exc, now=now, limit_seconds=limit, draw=draw)
                if text := patience.complaint(exc):
                    text = f"the farewell: {text}"
                    self._tell({"kind": "log", "level": "warning", "text": text})
                time.sleep(pause)


def ended(run: Run, name: str) -> Stretch | None:
    """Return a stretch without a step if nothing is left to train: the run has finished, or the island has left.

    A learner that registered then would be one more than the end knows of.
    """
    if run.store.read(names.FINISHED) is not None:
        outcome = "finished"
    elif run.store.read(names.left(name)) is not None:
        outcome = "left"
    else:
        return None
    last = history.last_link(run, name)
    return Stretch(
        outcome=outcome,
        incarnation=records.newest_incarnation(run.store, name),
        step=0 if last is None else last.position.step,
        trained=0 if last is None else last.trained,
        num_steps=0,
        seconds=0.0,
        loss=0.0,
        idle_share=0.0,
    )
