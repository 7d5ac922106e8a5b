"""A run from its first island to its end: which islands' flows live, who is restarted, when all is over.

Knows flow runs by id, the bell and the store; must not know what an island does. The store decides everything: this
process may die, and another one goes on from what it finds. Prefect may be away for a while: then nothing is started.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from infra import deployments
from infra.deployments import RunState
from infra.events import unique_key
from islands.patience import Patience
from islands.steering import changes_between
from islands.types import DamagedObject, ServiceUnavailable, StoreLost, StoreUnavailable
from tasks import history, joining, records, stopping, trainers
from tasks.alarm import Alarm
from tasks.collecting import collect
from tasks.health import Doctor
from tasks.merging import Synchronizer
from tasks.records import new_attempt
from tasks.ringing import Bell, Ring
from tasks.runs import Run, refreshed

Log = logging.Logger | logging.LoggerAdapter[Any]
_COLLECT_SECONDS = 30.0
# A flow run whose process died together with what watched it looks alive to Prefect for ever.
_DOUBT_SECONDS = 60.0


@dataclass(slots=True)
class Post:
    """An island as its supervisor sees it: the flow run that trains it, and how often that was replaced.

    `doubted_since`: when a flow run that was found, not started, was taken over, until it shows a sign of life.
    `lost_at`: when it was found to have given up the store, nothing having been trained since.
    """

    flow_run: str
    state: RunState = field(default_factory=RunState)
    num_restarts: int = 0
    seen_trained: int = 0
    doubted_since: float | None = None
    sign: tuple[int, int] = (-1, 0)
    lost_at: float | None = None


@dataclass(slots=True)
class Supervisor:
    """Starts the islands of a run, restarts what crashes, rings when nobody merges, collects what no rule needs.

    `tick` does a little of each and returns at once; whoever owns it decides how often. One thread. `trainer`: by which
    number it looks after the run; one with a higher number relieves it of that. `is_heir`: it goes on for one that
    crashed, so an island that was cancelled stays away.
    """

    run: Run
    log: Log
    trainer: int = 0
    is_heir: bool = False
    posts: dict[str, Post] = field(default_factory=dict)
    collected_at: float = 0.0
    bell: Bell | None = None
    rung: str = ""
    alarm: Alarm | None = None
    settled: tuple[frozenset[str], int] = (frozenset(), 0)
    patience: Patience = field(default_factory=Patience)
    refusal: StoreUnavailable | None = None

    def tick(self) -> None:
        """Look once at everything. What does not answer is looked at again next time.

        Raises:
            StoreLost: the store has not answered for too long, here or to any island.
        """
        now, self.refusal = time.monotonic(), None
        self._try(self._steer)
        self._try(self._watch_islands)
        self._try(partial(self._watch_quorum, now))
        self._try(partial(self._watch_health, now))
        if now - self.collected_at >= _COLLECT_SECONDS:
            self.collected_at = now
            self._try(partial(collect, self.run))
        self._judge_store(now)

    def are_all_away(self) -> bool:
        """Say whether no island's flow run is at work any more.

        Raises:
            ServiceUnavailable: Prefect did not answer.
        """
        for post in self.posts.values():
            if not post.state.is_over:
                post.state = deployments.state_of(post.flow_run)
        states = [post.state for post in self.posts.values()]
        return all(state.is_over and not state.is_silent for state in states)

    def outlook(self) -> str:
        """Return how it stands.

        "superseded": a later `train` looks after the run; "left": every island has left for good; "stopped": somebody
        asked for that; else "goes on".
        """
        try:
            if trainers.count(self.run) > self.trainer + 1:
                return "superseded"
            if self._have_all_left():
                return "left"
            return "stopped" if stopping.is_asked(self.run) else "goes on"
        except StoreUnavailable:
            return "goes on"  # the tick that follows finds it too, and tells
        except DamagedObject as exc:
            self.log.warning("%s", exc)
            return "goes on"

    def _have_all_left(self) -> bool:
        """Say whether every island has left; by then spares have taken the place of those that left early."""
        departed = records.departed(self.run.store)
        if self.settled != (departed, self.run.num_changes):
            self._take_over(joining.settle(self.run))
            self.settled = (departed, self.run.num_changes)
        return {i.name for i in self.run.config.members} <= departed

    # --- the parts of a tick ---

    def _try(self, work: Callable[[], object]) -> None:
        """Do one part; what does not answer must not keep the others from theirs."""
        try:
            work()
        except StoreUnavailable as exc:
            self.refusal = exc
        except (ServiceUnavailable, DamagedObject) as exc:
            # Damage here may be an object that was collected while we read; what stays damaged, `verify` names.
            self.log.warning("%s", exc)

    def _judge_store(self, now: float) -> None:
        """Tell of an outage once, and of its end; give up where it lasts too long."""
        if self.refusal is None:
            if news := self.patience.answered(now=now):
                self.log.info(news)
            return
        limit = self.run.config.pipeline.store_patience_seconds
        self.patience.refused(self.refusal, now=now, limit_seconds=limit, draw=0.0)
        if complaint := self.patience.complaint(self.refusal):
            self.log.warning(complaint)

    def _steer(self) -> None:
        """Take over changed settings."""
        self._take_over(refreshed(self.run))
        if self.bell is not None:
            self.bell.steer(self.run)

    def _take_over(self, run: Run) -> None:
        before, self.run = self.run, run
        if changes := changes_between(before.config, run.config):
            self.log.info("settings changed: %s", ", ".join(map(str, changes)))

    def _watch_islands(self) -> None:
        departed = records.departed(self.run.store)
        for island in self.run.config.members:
            if island.name in departed:
                continue
            post = self.posts.get(island.name)
            if post is None:
                self.posts[island.name] = self._begin(island.name)
                continue
            if not post.state.is_over:
                post.state = deployments.state_of(post.flow_run)
            if post.state.is_silent:  # its heartbeats may have been lost: the store knows better
                self._begin_to_doubt(island.name, post)
            if post.state.is_over:
                self._replace(island.name, post)
            elif post.doubted_since is not None:
                self._doubt(island.name, post, post.doubted_since)

    def _begin(self, island: str) -> Post:
        """Take over this island's flow run, where it lives or was cancelled for good, or start one."""
        newest = deployments.newest_run("island", self._tags(island))
        if self.is_heir and newest is not None and newest[1].kind == "CANCELLED":
            return Post(*newest)
        if newest is None or (newest[1].is_over and not newest[1].is_silent):
            return Post(self._start(island, after=newest and newest[0]))
        post = Post(newest[0])
        self._begin_to_doubt(island, post)
        return post

    def _begin_to_doubt(self, island: str, post: Post) -> None:
        post.state = RunState()
        if post.doubted_since is None:
            post.doubted_since, post.sign = time.monotonic(), self._sign_of_life(island)

    def _doubt(self, island: str, post: Post, since: float) -> None:
        """Start an island's flow again if it shows no sign of life in the store; two of them fence each other."""
        if self._sign_of_life(island) != post.sign:
            post.doubted_since = None
            return
        patience = max(_DOUBT_SECONDS, 3 * self.run.config.pipeline.checkpoint_seconds)
        if time.monotonic() - since > patience:
            self.log.warning("the flow of %s shows no sign of life: started again", island)
            post.flow_run, post.state = self._start(island, after=post.flow_run), RunState()
            post.doubted_since = None

    def _sign_of_life(self, island: str) -> tuple[int, int]:
        return records.newest_incarnation(self.run.store, island), self._trained(island)

    def _start(self, island: str, *, after: str | None) -> str:
        """Start an island's flow, at most once after the one that ended: another `train` may be at it as well."""
        run = self.run
        return deployments.start(
            "island",
            {"store": run.store_url, "run": run.run_id, "island": island},
            tags=self._tags(island),
            key=unique_key(run.store_url, f"{run.run_id}-{island}-after-{after or 'nobody'}"),
            name=f"{island} of {run.run_id}",
            is_child=True,
        )

    def _tags(self, island: str) -> list[str]:
        return [tag_of(self.run), f"island:{island}"]

    def _replace(self, island: str, post: Post) -> None:
        """Start an island's flow again, with a limit.

        A cancelled one stays away while others train. When nobody does, or all would wait for it, the run stops: it can
        go on later, with all. One that was asked to leave does not come back for its farewell.
        """
        trained = self._trained(island)
        if post.state.kind == "CANCELLED" and self.run.own_tokens(island) <= trained:
            self._write_off(island, "was cancelled, and has trained its share")
            return
        if post.state.kind == "CANCELLED":
            others = {i.name for i in self.run.config.members} - {island}
            is_awaited = self.run.config.sync.blocks
            if is_awaited or others <= records.departed(self.run.store) | self._cancelled():
                ask_all_to_stop(self.run, f"{island} was cancelled, and nobody else can go on")
            return
        if trained > post.seen_trained:
            post.num_restarts, post.seen_trained, post.lost_at = 0, trained, None
        if post.state.has_lost_store and self._must_wait(post):
            return
        if post.num_restarts >= self.run.config.pipeline.max_restarts:
            self._write_off(island, f"ended {post.num_restarts + 1} times without progress")
            return
        self.log.warning(
            "the flow of %s ended (%s %s): started again",
            island,
            post.state.kind,
            post.state.message,
        )
        post.flow_run, post.state = self._start(island, after=post.flow_run), RunState()
        post.num_restarts += 1

    def _must_wait(self, post: Post) -> bool:
        """Say whether an island that lost its store stays away for now: the others may be about to lose it too.

        Raises:
            StoreLost: every island that trains has.
        """
        now, gone = time.monotonic(), records.departed(self.run.store)
        post.lost_at = now if post.lost_at is None else post.lost_at
        if all(
            other.lost_at is not None and self._trained(name) <= other.seen_trained
            for name, other in self.posts.items()
            if name not in gone
        ):
            raise StoreLost(f"no island reaches the store: {post.state.message}")
        return now - post.lost_at < _DOUBT_SECONDS

    def _trained(self, island: str) -> int:
        link = history.last_link(self.run, island)
        return 0 if link is None else link.trained

    def _cancelled(self) -> set[str]:
        return {name for name, post in self.posts.items() if post.state.kind == "CANCELLED"}

    def _write_off(self, island: str, why: str) -> None:
        self.log.error("%s %s: it leaves with its last account", island, why)
        # A new life fences off one that still trains.
        history.register(self.run, island, new_attempt, stamp=time.time)
        history.write_off(self.run, island, stamp=time.time)

    def _watch_quorum(self, now: float) -> None:
        """Start a synchronizer directly where the islands' rings have gone unanswered for a whole interval."""
        self.bell = self.bell or Bell(self.run)
        ring = self.bell.look(now=now)
        if ring is None or ring.num_intervals == 0 or ring.key == self.rung:
            return
        self.rung = ring.key
        self.log.warning("a quorum has waited too long: a synchronizer is started (%s)", ring.key)
        start_synchronizer(self.run, ring)

    def _watch_health(self, now: float) -> None:
        self.alarm = self.alarm or Alarm(Doctor(self.run), self.log)
        self.alarm.look(self.run, now=now)


def tag_of(run: Run) -> str:
    """Return the tag of every flow run that trains one of the run's islands."""
    return f"run:{unique_key(run.store_url, run.run_id)}"


def start_synchronizer(run: Run, ring: Ring) -> None:
    """Start the deployment `synchronize` for a ring, at most once per key."""
    key = unique_key(run.store_url, ring.key)
    parameters = {"store": run.store_url, "run": run.run_id, "ring": ring.key}
    deployments.start("synchronize", parameters, key=key)


def settle(run: Run, *, sleep: Callable[[float], None]) -> Synchronizer:
    """Merge what is pending once all islands have left, and return the synchronizer that saw it settled.

    Raises:
        StoreLost: the store has not answered for too long.
    """
    synchronizer, patience = Synchronizer(run, new_attempt, stamp=time.time), Patience()
    while True:
        try:
            polled = synchronizer.poll(now=time.monotonic())
        except StoreUnavailable as exc:
            limit, draw = run.config.pipeline.store_patience_seconds, random.random()
            sleep(patience.refused(exc, now=time.monotonic(), limit_seconds=limit, draw=draw))
            continue
        patience.answered(now=time.monotonic())
        if polled.is_settled:
            return synchronizer
        if polled.is_superseded:  # another one is at it: look again from what it has made
            synchronizer = Synchronizer(run, new_attempt, stamp=time.time)
        sleep(0.2)


def wait_until_away(supervisor: Supervisor, seconds: float) -> bool:
    """Wait until no island trains any more; False if some still do after so long."""
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        try:
            if supervisor.are_all_away():
                return True
        except ServiceUnavailable as exc:
            supervisor.log.warning("%s", exc)
        time.sleep(0.5)
    return False


def ask_all_to_stop(run: Run, reason: str) -> None:
    """Ask every island and the synchronizer to stop with their state saved."""
    stopping.ask(run, is_stop=True, reason=reason, mark=new_attempt())
