"""Data-parallel training under deaths, for comparison: elastic, and not. The parent's side; its ranks are processes. No
torch.

Both have a process per island, find a death within some ten milliseconds, and take an all-reduce per step over
loopback, or over links as narrow as the islands' are. Nothing else runs beside them.

Elastic: the survivors re-form at once from the state they hold, together with a warm spare, or without one until it is
warm; only the step under way is lost. Not elastic, as torchrun does it: one death ends all processes; new ones begin
from the last checkpoint, which rank 0 copies at a step boundary and a thread of its own writes. A group that breaks
though nobody has died, for one rank stood still, is formed anew.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from islands.goodput import Kill, Span, Trace, Work
from islands.types import LearnerLost
from tasks.runs import Run
from tasks.step_log import Steps, end_of, read_steps

Process = subprocess.Popen[str]
_LOOK_SECONDS = 0.01
_PATIENCE_SECONDS = 120.0
# A group whose ranks have given it up for so long, and nobody has died, will not mend by itself.
_LOST_SECONDS = 1.0
# Ranks that end without a step for so long have not trained as they should.
_MOST_IDLE_SECONDS = 40.0


@dataclass(frozen=True, slots=True)
class Place:
    """A rank's place in a generation of the job."""

    generation: int
    rank: int
    size: int
    island: str

    def line(self) -> str:
        """Return the order to take it."""
        return f"{self.generation} {self.rank} {self.size} {self.island}\n"


def place_from(line: str) -> Place:
    """Return the place that `Place.line` ordered."""
    generation, rank, size, island = line.split()
    return Place(int(generation), int(rank), int(size), island)


@dataclass(slots=True)
class Job:
    """The ranks of one job, by island, and its spares; one thread.

    Attributes:
        run: of which it trains the model; nothing is written to it.
        checkpoint_seconds: between two checkpoints; 0: elastic, and without any.
        has_links: whether its ranks keep to the caps of the islands' links.
        lost_since: when it was first seen that the group has broken, by `time.monotonic`.
    """

    run: Run
    folder: Path
    checkpoint_seconds: float
    has_links: bool
    ranks: dict[str, Process] = field(default_factory=dict)
    spares: list[Process] = field(default_factory=list)
    generation: int = -1
    lost_since: float | None = None

    @property
    def islands(self) -> list[str]:
        """All its islands, those included that nobody holds now."""
        return [island.name for island in self.run.config.islands]

    def begin(self) -> None:
        """Start a process per island and form the first group; with it a spare, where one is of use."""
        if not self.checkpoint_seconds:
            self.spares.append(self._start())
        self._start_anew()
        self._wait_until_warm(self.spares)

    def kill(self, island: str) -> bool:
        """Kill an island's process; say whether there was one."""
        rank = self.ranks.get(island)
        if rank is None or rank.poll() is not None:
            return False
        rank.kill()
        return True

    def mend(self) -> None:
        """Look once for the dead, and for a spare that has got warm; form a group as it must be now."""
        dead = [name for name, rank in self.ranks.items() if rank.poll() is not None]
        if dead and self.checkpoint_seconds:
            self._start_anew()
            return
        for island in dead:
            _end(self.ranks.pop(island))
            self.spares.append(self._start())
        vacant = [island for island in self.islands if island not in self.ranks]
        warm = [spare for spare in self.spares if vacant and self._is_warm(spare)]
        for island, spare in zip(vacant, warm, strict=False):
            self.spares.remove(spare)
            self.ranks[island] = spare
        if dead or warm or self._is_lost():
            self._form()

    def end(self) -> None:
        """End every process."""
        for rank in (*self.ranks.values(), *self.spares):
            _end(rank)

    def _start_anew(self) -> None:
        """End all ranks and start as many new ones; form a group of them once all are warm."""
        for rank in self.ranks.values():
            rank.kill()
        for rank in self.ranks.values():
            _end(rank)
        self.ranks = {island: self._start() for island in self.islands}
        self._wait_until_warm(list(self.ranks.values()))
        self._form()

    def _form(self) -> None:
        """Order everybody into the next group."""
        self.generation += 1
        self.lost_since = None
        for number, (island, rank) in enumerate(self.ranks.items()):
            place = Place(self.generation, number, len(self.ranks), island)
            assert rank.stdin is not None, "it is started with a pipe"
            with contextlib.suppress(BrokenPipeError):  # it has died since: the next look finds it
                rank.stdin.write(place.line())
                rank.stdin.flush()

    def _is_lost(self) -> bool:
        """Say whether its ranks have said for a while that the group has broken."""
        if not lost_mark(self.folder, self.generation).exists():
            return False
        self.lost_since = self.lost_since or time.monotonic()
        return time.monotonic() - self.lost_since >= _LOST_SECONDS

    def _start(self) -> Process:
        checkpoint = str(self.folder / "checkpoint") if self.checkpoint_seconds else ""
        place = (self.run.store_url, self.run.run_id, str(self.folder))
        kept = (checkpoint, str(self.checkpoint_seconds))
        links = "links" if self.has_links else "free"
        with (self.folder / "ranks.log").open("a") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "tasks.data_parallel_arm", *place, *kept, links],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                text=True,
                # As the islands' processes have: on a busy machine the kernel shares processors out by session.
                start_new_session=True,
            )

    def _is_warm(self, rank: Process) -> bool:
        return warm_mark(self.folder, rank.pid).exists()

    def _wait_until_warm(self, ranks: Sequence[Process]) -> None:
        _wait_until(
            lambda: all(self._is_warm(rank) for rank in ranks), "every rank must get warm", self
        )


def ring_seconds(num_bytes: int, num_ranks: int, bytes_per_second: float | None) -> float:
    """Return the seconds for which a ring all-reduce keeps a rank's link busy; 0 without a cap.

    A rank sends and receives 2 (n - 1) / n of the bytes, both ways at once (Patarasuk and Yuan 2009).
    """
    if bytes_per_second is None:
        return 0.0
    return 2 * (num_ranks - 1) / num_ranks * num_bytes / bytes_per_second


def warm_mark(folder: Path, process: int) -> Path:
    """Return the file by which a rank's process says that it is ready to join a group."""
    return folder / f"{process}.warm"


def lost_mark(folder: Path, generation: int) -> Path:
    """Return the file by which ranks say that their group has broken, and that no order for another was there."""
    return folder / f"{generation:03d}.lost"


def train(
    run: Run,
    folder: Path,
    kills: Sequence[Kill],
    *,
    seconds: float,
    checkpoint_seconds: float = 0.0,
    has_links: bool,
) -> Trace:
    """Train for so long, under deaths; an elastic job unless there is a checkpoint to fall back on.

    Args:
        run: whose model, text, batch and islands it takes.
        folder: a new one.
        kills: at seconds after the first step of all ranks.
        seconds: counted from there.
        checkpoint_seconds: between two checkpoints.
        has_links: whether its ranks keep to the caps of the islands' links.

    Raises:
        LearnerLost: its ranks stopped training for no reason that is known here.
    """
    with open_job(run, folder, checkpoint_seconds, has_links=has_links) as job:
        job.begin()
        num_islands = len(job.islands)
        _wait_until(
            lambda: _num_begun(folder) == num_islands, "every rank must take a first step", job
        )
        begun = time.perf_counter()
        killed: list[Kill] = []
        waiting = sorted(kills, key=lambda kill: kill.at)
        while (now := time.perf_counter()) < begun + seconds:
            if waiting and now >= begun + waiting[0].at and job.kill(waiting[0].island):
                killed.append(Kill(waiting.pop(0).island, time.perf_counter()))
            job.mend()
            time.sleep(_LOOK_SECONDS)
        works = works_in(folder)
        if begun + seconds - max(work.span.end for work in works) > _MOST_IDLE_SECONDS:
            raise LearnerLost(
                f"ranks must train to the end, got none at work in its last {_MOST_IDLE_SECONDS:g} s; "
                + end_of(folder / "ranks.log")
            )
    return Trace(works, tuple(killed), Span(begun, begun + seconds))


def works_in(folder: Path) -> tuple[Work, ...]:
    """Return what the logs of all groups tell: a work per step, its kept seconds 0 if a later group began before it."""
    logs = [(_key(path), read_steps(path)) for path in sorted(folder.glob("*.steps"))]
    begins = {generation: first for (generation, _, first), _ in logs}
    works: list[Work] = []
    for (generation, island, first), steps in logs:
        later = [step for other, step in begins.items() if other > generation]
        num_kept = max(0, min(later, default=first + len(steps)) - first)
        works += _works_of(island, steps, num_kept)
    return tuple(works)


def _works_of(island: str, steps: Steps, num_kept: int) -> Iterator[Work]:
    for number, (begun, ended, useful, _) in enumerate(steps):
        is_kept = number < num_kept
        yield Work(island, Span(float(begun), float(ended)), is_kept * float(useful), int(is_kept))


def _key(path: Path) -> tuple[int, str, int]:
    generation, rest = path.stem.split("-", 1)
    island, _, first = rest.rpartition("-")
    return int(generation), island, int(first)


def _num_begun(folder: Path) -> int:
    return sum(len(read_steps(path)) > 0 for path in folder.glob("000-*.steps"))


@contextlib.contextmanager
def open_job(
    run: Run, folder: Path, checkpoint_seconds: float, *, has_links: bool
) -> Iterator[Job]:
    """Give a job that has not begun; its processes end with the block."""
    folder.mkdir(parents=True)
    job = Job(run, folder, checkpoint_seconds, has_links)
    try:
        yield job
    finally:
        job.end()


def _wait_until(is_so: Callable[[], bool], rule: str, job: Job) -> None:
    ends = time.monotonic() + _PATIENCE_SECONDS
    while not is_so():
        if time.monotonic() > ends:
            raise LearnerLost(
                f"{rule} within {_PATIENCE_SECONDS:g} s, and has not; {end_of(job.folder / 'ranks.log')}"
            )
        time.sleep(_LOOK_SECONDS)


def _end(rank: Process) -> None:
    rank.kill()
    rank.wait()
    assert rank.stdin is not None, "it is started with a pipe"
    with contextlib.suppress(BrokenPipeError):
        rank.stdin.close()
