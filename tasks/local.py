"""The local driver: real learners, synchronizer and store in one process, on a virtual clock. Same seed, same bits.

Knows events, delays, phases and scripted deaths; must not know how anything is computed. One unit of the clock is one
base step: an inner step of an island with speed 1. Within one instant the order is fixed (see `Kind`): steps end, then
pushes land, merges run, versions arrive, learners return, steps begin, last pushes land, learners leave, and at the end
the state is saved. So
islands in phase with no delay exchange without losing a step, as a synchronous algorithm would.

A death is told as a story, since the order matters:

    1. the learner is gone in the middle of its next step, with every copy it had not committed;
    2. what it had committed stays in the store, and is merged like anything else;
    3. later a new incarnation registers, which lists those commits and fences off everything else of the old one;
    4. it goes on from its newest checkpoint, at the data cursor of its newest committed link.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from islands.contributions import Telemetry, smoothed
from islands.data import batch_at
from islands.fragments import own_period
from islands.learner import Learner
from islands.types import EmptyQuorum, Refused, VersionTaken
from tasks import exchanging, history, pacing, returning
from tasks.clockwork import Beat, Event, Kind, Seat, Watch
from tasks.collecting import collect, finish
from tasks.exchanging import Exchange
from tasks.local_state import write_state
from tasks.merging import Synchronizer
from tasks.runs import Run, read_shard

# Restarts of a learner whose numbers break, without one successful push between them.
MOST_BREAKS = 3


class Driver:
    """One run on the virtual clock. `advance` until it returns False.

    Args:
        run: an open run with version 0 of every fragment.
        build: island name -> a fresh learner with the initial model.
        watch: told of every beat.
        evaluate: scores the run's newest snapshot; called once, when all is merged and before the run is closed.
    """

    def __init__(
        self,
        run: Run,
        build: Callable[[str], Learner],
        watch: Watch,
        evaluate: Callable[[Run], object],
    ) -> None:
        self.run = run
        self.now = 0.0
        self.clock = lambda: self.now
        self.events: list[Event] = []
        self.num_attempts = 0
        self.num_events = 0
        self.num_saves = 0
        self.is_finished = False
        self.watch = watch
        self.evaluate = evaluate
        self.trained: dict[str, int] = {island.name: 0 for island in run.config.members}
        self.seats = {
            island.name: Seat(island, partial(build, island.name), read_shard(run, island.name))
            for island in run.config.members
        }
        self.reopen_synchronizer()

    def new_attempt(self) -> str:
        """Return the next attempt's name: counted, so that a resumed run writes the very same names."""
        self.num_attempts += 1
        return f"a-{self.num_attempts:08x}"

    def reopen_synchronizer(self) -> None:
        """Read the lineage anew: the store was brought back to an earlier state."""
        self.synchronizer = Synchronizer(self.run, self.new_attempt, stamp=self.clock)

    def start(self) -> None:
        """Fill the queue for a run that has not begun."""
        for island in self.run.config.members:
            self.schedule(island.start_steps, Kind.RETURN, island.name)
        self.schedule(float(self.run.config.local.checkpoint_steps), Kind.SAVE)

    def schedule(self, time: float, kind: Kind, island: str = "", *numbers: int) -> None:
        """Put an event into the queue."""
        self.num_events += 1
        heapq.heappush(self.events, Event(time, kind, self.num_events, island, numbers))

    def advance(self) -> bool:
        """Let the next event happen; False once the run has ended."""
        if self.is_finished:
            return False
        if all(event.kind is Kind.SAVE for event in self.events):
            raise EmptyQuorum(
                f"run {self.run.run_id} stands still at step {self.now:g}: nobody is left to act"
            )
        event = heapq.heappop(self.events)
        self.now = event.time
        seat = self.seats.get(event.island)
        if seat is None:
            (self._merge if event.kind is Kind.MERGE else self.save)()
        else:
            _HANDLERS[event.kind](self, seat, event)
        return not self.is_finished

    # --- training ---

    def _step_ends(self, seat: Seat, event: Event) -> None:
        if seat.learner is None:
            return
        if self._strikes(seat):
            return
        learner, island, config = seat.learner, seat.island, self.run.config
        batch = batch_at(
            seat.shard,
            cursor=learner.cursor,
            batch_size=island.batch_size,
            context=config.model.context,
            seed=config.seed,
            learner=island.name,
        )
        num_tokens = island.batch_size * config.model.context
        loss = learner.step(batch, num_tokens=num_tokens, num_samples=island.batch_size)
        self.trained[island.name] = learner.trained
        seat.loss = smoothed(seat.loss, loss)
        self._tell(seat, "step", loss)
        for fragment in pacing.due(learner, config.sync):
            self._send(seat, learner, fragment)
        self.schedule(self.now, Kind.STEP_BEGINS, island.name)

    def _send(
        self, seat: Seat, learner: Learner, fragment: int, kind: Kind = Kind.PUSH_LANDS
    ) -> None:
        """Copy a fragment and put it on its way; it takes the place of an older copy that has not left yet."""
        own_period = self._own_period(seat, fragment)
        copy = pacing.copy(learner, self.run.config.sync, fragment, own_period=own_period)
        unsent = seat.outbox.get(fragment)
        if unsent is not None and unsent.start != copy.start:
            learner.count_replaced(fragment, unsent.num_tokens)
        seat.outbox[fragment] = copy
        lands_at = self.now + seat.island.push_delay_steps
        self.schedule(lands_at, kind, seat.island.name, fragment, copy.stop.step)

    def _own_period(self, seat: Seat, fragment: int) -> int:
        tallies = self.synchronizer.heads()[fragment].tallies
        return own_period(
            self.run.config.sync.period_steps,
            step_seconds=seat.step_time,
            all_step_seconds=[tally.step_seconds for tally in tallies.values()],
        )

    def _step_begins(self, seat: Seat, event: Event) -> None:
        learner = seat.learner
        if learner is None or seat.status != "training":
            return
        self._adopt(seat, learner)
        seat.is_blocked = pacing.must_wait(learner, self.run.config.sync)
        if seat.is_blocked:
            return
        if learner.trained >= self.run.own_tokens(seat.island.name):
            self._prepare_to_leave(seat, learner)
            return
        self.schedule(self.now + seat.step_time, Kind.STEP_ENDS, seat.island.name)

    def _adopt(self, seat: Seat, learner: Learner) -> None:
        sync = self.run.config.sync
        while ready := pacing.adoptable(learner, sync, seat.arrived):
            for fragment in ready:
                assert seat.exchange is not None  # it comes and goes with the learner
                known, version = learner.clock(fragment).base_version, seat.arrived[fragment]
                seat.exchange.catch_up(fragment, known, version)
                at_hand = (known, learner.anchor(fragment))
                base = exchanging.fetch(seat.exchange.run, fragment, version, at_hand)
                own_period = self._own_period(seat, fragment)
                pacing.adopt(learner, sync, fragment, base, own_period=own_period)

    # --- exchange ---

    def _push_lands(self, seat: Seat, event: Event) -> None:
        fragment, step = event.numbers
        copy = seat.outbox.get(fragment)
        if seat.learner is None or seat.exchange is None or copy is None or copy.stop.step != step:
            return
        del seat.outbox[fragment]
        try:
            seat.exchange.push(
                copy,
                seat.learner.record(""),
                step_seconds=seat.step_time,
                telemetry=Telemetry(loss=seat.loss),
            )
        except Refused as exc:
            # The rule that stops it is the one the synchronizer would apply. A learner whose numbers are broken starts
            # again from its newest checkpoint, which is healthy by rule; so does one that all the others wait for.
            self._tell(seat, f"push refused ({exc.reason})")
            if exc.reason == "non-finite" or self.run.config.sync.blocks:
                self._break(seat)
            return
        seat.num_breaks = 0
        self.schedule(self.now, Kind.MERGE)

    def _merge(self) -> None:
        if any(event.time == self.now and event.kind is Kind.MERGE for event in self.events[:1]):
            return  # the same instant holds another one: once is enough
        polled = self.synchronizer.poll(now=self.now)
        if polled.is_superseded:
            raise VersionTaken(
                f"another process merges run {self.run.run_id}: this one ends, that one goes on"
            )
        for fragment, version in polled.published:
            self._tell(None, f"merge f{fragment} v{version - 1}→v{version}")
            for seat in self.seats.values():
                arrives_at = self.now + seat.island.fetch_delay_steps
                self.schedule(arrives_at, Kind.VERSION_ARRIVES, seat.island.name, fragment, version)
        if math.isfinite(polled.wait_seconds):
            self.schedule(self.now + polled.wait_seconds, Kind.MERGE)
        if polled.is_settled:
            self.evaluate(self.run)
            finish(self.run, self.synchronizer.verdicts())
            self.is_finished = True

    def _version_arrives(self, seat: Seat, event: Event) -> None:
        if seat.learner is None:
            return
        fragment, version = event.numbers
        seat.arrived[fragment] = max(version, seat.arrived.get(fragment, 0))
        if seat.is_blocked:
            seat.is_blocked = False
            self.schedule(self.now, Kind.STEP_BEGINS, seat.island.name)

    # --- coming and going ---

    def _strikes(self, seat: Seat) -> bool:
        """Kill the learner if the script says so: it dies in the step after the one named."""
        learner = seat.learner
        for index, fault in enumerate(self.run.config.local.faults):
            is_here = (
                fault.island == seat.island.name
                and learner is not None
                and fault.step == learner.position.step
            )
            if is_here and index not in seat.struck:
                seat.struck.add(index)
                self._die(seat, fault.return_after_steps)
                return True
        return False

    def _break(self, seat: Seat) -> None:
        """Start a learner again whose numbers broke; one that breaks again and again is given up."""
        seat.num_breaks += 1
        self._die(seat, 0.0 if seat.num_breaks <= MOST_BREAKS else None)

    def _die(self, seat: Seat, return_after: float | None) -> None:
        seat.learner, seat.exchange, seat.status, seat.is_blocked = None, None, "waiting", False
        seat.outbox.clear()
        seat.arrived.clear()
        # What it had begun dies with it: a step under way must not end in its successor's life.
        self.events = [event for event in self.events if event.island != seat.island.name]
        heapq.heapify(self.events)
        self._tell(seat, "dies")
        if return_after is None:
            history.write_off(self.run, seat.island.name, stamp=self.clock)
            seat.status = "left"
            self.schedule(self.now, Kind.MERGE)
        else:
            self.schedule(self.now + return_after, Kind.RETURN, seat.island.name)

    def _return(self, seat: Seat, event: Event) -> None:
        name = seat.island.name
        past = history.register(self.run, name, self.new_attempt, stamp=self.clock)
        link = exchanging.link_of(self.run, name, past.last)
        heads = exchanging.fetch_heads(replace(self.run, store=link))
        learner = seat.build()
        owed = returning.take_up(self.run, learner, past, heads)
        seat.learner, seat.status = learner, "training"
        seat.exchange = Exchange(
            self.run,
            name,
            past.incarnation,
            past.last_digest,
            self.new_attempt,
            stamp=self.clock,
            link=link,
            feedback=owed,
        )
        pacing.begin(learner, self.run.config.sync)
        self.trained[name] = learner.trained
        for fragment in pacing.lost_copies(self.run, learner):
            self._send(seat, learner, fragment)
        self._tell(
            seat,
            "starts" if past.incarnation == 0 else f"comes back as incarnation {past.incarnation}",
        )
        self.schedule(self.now, Kind.STEP_BEGINS, name)

    def _prepare_to_leave(self, seat: Seat, learner: Learner) -> None:
        seat.status = "leaving"
        for fragment in range(len(self.run.layouts)):
            clock = learner.clock(fragment)
            if clock.open_tokens > clock.copied_tokens:
                self._send(seat, learner, fragment, Kind.LAST_PUSH_LANDS)
        self.schedule(self.now + seat.island.push_delay_steps, Kind.LEAVE, seat.island.name)

    def _leave(self, seat: Seat, event: Event) -> None:
        if seat.learner is None or seat.exchange is None:
            return
        history.leave(self.run, seat.exchange.linked(seat.learner.record("")), stamp=self.clock)
        seat.learner, seat.exchange, seat.status = None, None, "left"
        self._tell(seat, "leaves")
        self.schedule(self.now, Kind.MERGE)

    # --- saving ---

    def save(self, *, reschedule: bool = True) -> None:
        """Write every learner's checkpoint and the driver's own state, then collect what no rule needs.

        Where a learner's state has no free name nothing is saved this time, and the state before stays the one to
        resume from.
        """
        if reschedule:
            self.schedule(self.now + self.run.config.local.checkpoint_steps, Kind.SAVE)
        if not all(seat.exchange.can_save(seat.learner.record("")) for seat in self._present()):
            return
        for seat in self._present():
            if seat.exchange.is_saved(seat.learner.record("")):
                continue
            try:
                seat.exchange.save(seat.learner.state(""))
            except Refused as exc:
                self._tell(seat, f"checkpoint refused ({exc.reason})")
                self._break(seat)
        write_state(self)
        collect(self.run)

    def _present(self) -> list[Any]:
        return [s for s in self.seats.values() if s.learner is not None and s.exchange is not None]

    def _tell(self, seat: Seat | None, what: str, loss: float | None = None) -> None:
        name = "" if seat is None else seat.island.name
        self.watch(Beat(self.now, name, what, sum(self.trained.values()), loss))


_HANDLERS: Mapping[Kind, Callable[[Driver, Seat, Event], None]] = {
    Kind.STEP_ENDS: Driver._step_ends,
    Kind.PUSH_LANDS: Driver._push_lands,
    Kind.LAST_PUSH_LANDS: Driver._push_lands,
    Kind.LEAVE: Driver._leave,
    Kind.VERSION_ARRIVES: Driver._version_arrives,
    Kind.RETURN: Driver._return,
    Kind.STEP_BEGINS: Driver._step_begins,
}
