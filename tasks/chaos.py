"""Strikes the faults of a plan on a live run, with real processes of this machine, and records each one. No torch.

Knows when a fault is due, whom it meets and what to write down; must not know how a process is found or held. A fault
whose target is not there waits for it. Once all islands have left, or the run has finished, nothing is struck and
nothing is written but the bytes of what was merged though it is damaged. However this process ends, nobody stays
stopped (`infra/holding.py`); what has not struck by then never does.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from infra import processes
from infra.holding import Hold
from islands import chaos, names
from islands.chaos import Fault, Plan, Strike
from islands.types import ConfigError, DamagedObject, StoreUnavailable, VersionTaken
from tasks import records, spoiling, targets
from tasks.records import new_attempt
from tasks.runs import Run, refreshed, require_unfinished
from tasks.sharing import was_local
from tasks.spoiling import Spoil

_LOOK_SECONDS = 0.2
Say = Callable[[str], None]


@dataclass(slots=True)
class Chaos:
    """A plan under way against a run, from its creation to `close`. One thread.

    Attributes:
        run: the run, under the settings it has now.
        waiting: faults that have not struck.
        say: told of each strike, and of trouble.
        num_struck: faults that have struck.
        is_over: the run is at its end: what waits will never strike.
        missed: faults that will never strike, for their island has left.
    """

    run: Run
    waiting: list[Fault]
    say: Say
    num_struck: int = 0
    is_over: bool = False
    missed: list[Fault] = field(default_factory=list)
    _merged_tokens: int = 0
    _trouble: str = ""
    _begun_at: float = field(default_factory=time.monotonic)
    _holds: list[tuple[Hold, frozenset[int]]] = field(default_factory=list)
    _spoils: list[Spoil] = field(default_factory=list)
    _unwritten: list[Strike] = field(default_factory=list)

    @property
    def is_done(self) -> bool:
        """Whether nothing is left to strike, to write, to put back or to let go."""
        if self.is_over:
            return not self._spoils
        return not (self.waiting or self._holds or self._spoils or self._unwritten)

    def look(self) -> None:
        """Let happen what is due, and end what has lasted long enough."""
        self._let_go()
        try:
            self.run = refreshed(self.run)  # somebody may have joined
            self._settle()
            gone = records.departed(self.run.store)
            self.is_over = self.is_over or _is_over(self.run, gone)
            if self.is_over:
                return
            self._give_up(gone)
            self._write()
            due = self._due()
            self._merged_tokens = _merged_tokens(self.run) if due else self._merged_tokens
            for fault in due:
                if (told := self._strike(fault)) is not None:
                    self.waiting.remove(fault)
                    self.num_struck += 1
                    self.say(told)
            self._trouble = ""
        except (StoreUnavailable, DamagedObject) as exc:
            if self._trouble != str(exc):
                self._trouble = str(exc)
                self.say(f"{exc}; again")

    def close(self) -> None:
        """Let everybody go on, and put back what was merged though it is damaged."""
        while self._holds:
            self._holds.pop()[0].release()
        try:
            self._settle()
        except (StoreUnavailable, DamagedObject) as exc:
            self.say(f"{exc}; {', '.join(spoil.name for spoil in self._spoils)} may stay damaged")

    def _give_up(self, gone: frozenset[str]) -> None:
        """Wait no longer for whom no fault will ever meet again."""
        lost = [one for one in self.waiting if one.target in chaos.OF_AN_ISLAND]
        for fault in [one for one in lost if one.island in gone and one.kind != "corrupt"]:
            self.waiting.remove(fault)
            self.missed.append(fault)
            self.say(f"{fault}: {fault.island} has left")

    def _settle(self) -> None:
        self._spoils = [spoil for spoil in self._spoils if not spoil.is_settled(self.run)]

    def _let_go(self) -> None:
        for hold, held in list(self._holds):
            if hold.is_over:
                hold.release()
                self._holds.remove((hold, held))

    def _due(self) -> list[Fault]:
        steps = _steps(self.run) if any(fault.step is not None for fault in self.waiting) else {}
        elapsed = time.monotonic() - self._begun_at
        return [f for f in self.waiting if chaos.is_due(f, steps=steps, elapsed=elapsed)]

    # --- strikes: each returns what happened in words, None if its target is not there ---

    def _strike(self, fault: Fault) -> str | None:
        if fault.kind == "corrupt":
            return self._corrupt(fault)
        if fault.kind in ("cut", "fill"):
            return self._spoil_link(fault)
        found = targets.processes_of(self.run, fault)
        if fault.kind == "kill":
            killed = [one for one in found if processes.send(one, signal.SIGKILL)]
            return self._note(fault, f"SIGKILL to {_told(killed)}") if killed else None
        return self._hold(fault, found)

    def _hold(self, fault: Fault, found: list[dict[str, Any]]) -> str | None:
        ids = frozenset(one["process"] for one in found)
        if not found or any(ids & held for _, held in self._holds):
            return None  # what is held already must not be woken by another's turn
        assert fault.seconds is not None, "a plan is checked before it is carried out"
        hold = Hold(found, seconds=fault.seconds, factor=fault.factor)
        self._holds.append((hold, ids))
        if not hold.num_held:
            return None
        how = "stands still" if fault.factor is None else f"runs {fault.factor:g} times slower"
        return self._note(fault, f"{_told(found)} {how} for {fault.seconds:g} s")

    def _spoil_link(self, fault: Fault) -> str | None:
        """Write the record: the learner's own link acts on it, within about a second."""
        if targets.is_away(self.run, fault.island or ""):
            return None
        what = "everything" if fault.kind == "cut" else "to create anything, as a full disk does,"
        told = f"its link to the store refuses {what} for {fault.seconds:g} s"
        strike = self._struck(fault, told)
        _record(self.run, strike)
        return strike.told

    def _corrupt(self, fault: Fault) -> str | None:
        spoil = spoiling.find_pending(self.run, fault.island or "")
        if spoil is None:
            return None
        told = f"a byte of {spoil.name} is another one; {spoil.contribution} is damaged"
        strike = self._struck(fault, told, spoil.name)
        _record(self.run, strike)  # first: `verify` must know whose work this is
        spoil.damage(self.run)
        self._spoils.append(spoil)
        return strike.told

    def _note(self, fault: Fault, told: str) -> str:
        strike = self._struck(fault, told)
        self._unwritten.append(strike)
        with contextlib.suppress(
            StoreUnavailable
        ):  # it has happened, whether or not the store answers now
            self._write()
        return strike.told

    def _write(self) -> None:
        while self._unwritten:
            _record(self.run, self._unwritten[0])
            del self._unwritten[0]

    def _struck(self, fault: Fault, told: str, spoiled: str | None = None) -> Strike:
        whose = f"{fault.island}'s " if fault.target in chaos.OF_AN_ISLAND else ""
        return Strike(
            fault=fault,
            told=f"{whose}{fault.target}: {told}",
            at=time.time(),
            mark=new_attempt(),
            merged_tokens=self._merged_tokens,
            spoiled=spoiled,
        )


def require_strikable(run: Run) -> Run:
    """Return a run under way whose learners are processes of their own.

    Raises:
        ConfigError: it has finished, or the local driver trains it: nobody would ever be struck.
    """
    if was_local(require_unfinished(run)):
        raise ConfigError(
            f"a run to strike must be one that Prefect trains, got {run.run_id!r}, which the local driver trains; "
            "`local.faults` scripts deaths there"
        )
    return run


def unleash(
    run: Run,
    plan: Plan,
    *,
    say: Say,
    is_stopped: Callable[[], bool] = lambda: False,
    watch: Callable[[int, list[Fault]], None] = lambda num_struck, waiting: None,
) -> list[Fault]:
    """Carry out a plan until all of it has struck and is over, or the run is; return what has not struck.

    Args:
        run: an open run that has not finished.
        plan: a checked plan.
        say: told of each strike.
        is_stopped: says that it should end now.
        watch: told how many have struck, and what waits.
    """
    under_way = Chaos(run, list(plan.faults), say)
    try:
        while not (under_way.is_done or is_stopped()):
            under_way.look()
            watch(under_way.num_struck, under_way.waiting)
            time.sleep(_LOOK_SECONDS)
    finally:
        under_way.close()
    return [*under_way.missed, *under_way.waiting]


def _record(run: Run, strike: Strike) -> None:
    """Write a strike's record under the next free number."""
    for number in count(records.next_number(run.store, chaos.FOLDER)):
        try:
            records.write(run.store, names.numbered(chaos.FOLDER, number), strike.to_json())
        except VersionTaken:
            continue  # another plan has struck at the same moment
        return


def _is_over(run: Run, gone: frozenset[str]) -> bool:
    """Say whether the end has come or is about to, and may be listing what there is."""
    islands = {island.name for island in run.config.members}
    return run.store.read(names.FINISHED) is not None or islands <= gone


def strikable_islands(run: Run) -> list[str]:
    """Return the islands that have not left."""
    gone = records.departed(run.store)
    return [island.name for island in run.config.members if island.name not in gone]


def _merged_tokens(run: Run) -> int:
    """Return the run's merged tokens, mean over fragments, as every chart's axis counts them."""
    known = records.known_versions(run.store, len(run.layouts))
    heads = [records.find_head(run.store, p, version)[0] for p, version in enumerate(known)]
    return sum(head.merged_tokens for head in heads) // len(heads)


def _steps(run: Run) -> Mapping[str, int]:
    """Return how far each island has come, by the names of what it has written."""
    steps: dict[str, int] = {}
    for name in [*run.store.list_names("inbox/"), *run.store.list_names("checkpoints/")]:
        if (key := names.parse_contribution(name)) is not None:
            learner, stop = key.learner, key.stop
        elif (saved := names.parse_checkpoint(name)) is not None:
            learner, stop = saved
        else:
            continue
        steps[learner] = max(stop.step, steps.get(learner, 0))
    return steps


def _told(found: list[dict[str, Any]]) -> str:
    first = found[0]["process"]
    return f"process {first}" if len(found) == 1 else f"{len(found)} processes, {first} first,"
