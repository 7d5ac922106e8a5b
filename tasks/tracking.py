"""What a run's store says, told to MLflow: once, or all along. No torch.

The store is the spool. Commits of versions are never deleted and carry what there is to show, so a tracker only reads:
it looks for commits after its cursor, turns them into points, sends those, and moves the cursor. The cursor lies in
MLflow, as a tag of the parent run, so another process goes on from there; where it is gone, everything is sent again.

    1. points are sent; the answer is lost, or this process dies here;
    2. the cursor was not moved, so the next pass makes the same points and sends them again;
    3. a point is the same in every bit whoever makes it (see `islands/metrics.py`), and MLflow's database keeps one of
       it: run, key, step, time and value are its primary key.

So every point arrives once, however often a pass is cut off, and an outage of MLflow loses nothing. No training process
waits for this, or knows of it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from infra.plots import Labels, Lane, Line, draw_lines, draw_timeline
from infra.store import Store
from infra.tracking import FINISHED, RUNNING, Found, Tracker, git_commit, open_tracker, recall
from islands import metrics, names
from islands.config import to_toml
from islands.metrics import RUN, SYNCHRONIZER, Evaluation, Point, Sample
from islands.parsing import parse
from islands.types import DamagedObject, IslandsError
from islands.versions import Commit, Snapshot, layouts_to_json, snapshot_from_json
from tasks import records
from tasks.collecting import SUITE
from tasks.runs import Run

EXPERIMENT = "diloco"
PASS_SECONDS = 3.0
LONGEST_BACKOFF_SECONDS = 30.0
LOOK_SECONDS = 0.2
FIGURE_SECONDS = 60.0
# For the last pass of a run, without the call that is under way: what it cannot send by then, `track` sends later.
FINAL_SECONDS = 30.0
# Commits read, turned into points and sent at a time: what a lost pass repeats at most.
COMMITS_PER_ROUND = 200
CURSOR = "diloco.cursor"
SCORED = "diloco.cursor.evaluations"
# Of one island: what figures keep, and moments marked in its lane.
MOST_SAMPLES = 4000
MOST_MARKS = 400
SCORES = ("bits_per_byte", "bigram")
_MERGED = "merged tokens"
LOSS = Labels("Loss", _MERGED, "bits per byte", "islands: running mean of their training loss")
STALENESS = Labels("Staleness of merged contributions", _MERGED, "versions behind")
SHARES = Labels("Whose tokens were merged", _MERGED, "share of all merged tokens")


def follow(
    run: Run,
    *,
    uri: str,
    experiment: str = EXPERIMENT,
    is_over: Callable[[], bool],
    ending: Callable[[], str] = lambda: FINISHED,
    say: Callable[[str], None] = lambda text: None,
) -> None:
    """Keep MLflow up to date until the run is over, then once more; for a thread of its own. Raises nothing of ours.

    Args:
        run: an open run.
        uri, experiment: where to log to.
        is_over: says that no more will come; asked several times a second.
        ending: what the run ended with, asked when it is over: "FINISHED", "FAILED" or "KILLED".
        say: is told once that MLflow is away, and once that it is back.
    """
    try:
        follower = RunTracker(run, open_tracker(uri), experiment, is_live=True)
    except IslandsError as exc:
        say(str(exc))
        return
    failures, drawn_at = 0, time.monotonic()
    while not is_over():
        try:
            follower.pass_once(is_over)
            if time.monotonic() - drawn_at >= FIGURE_SECONDS:
                follower.draw()
                drawn_at = time.monotonic()
        except IslandsError as exc:
            failures += 1
            if failures == 1:
                say(f"{exc}. It is asked again; nothing is lost meanwhile")
        else:
            if failures:
                say("MLflow answers again and has what it missed")
            failures = 0
        _wait(min(PASS_SECONDS * 2**failures, LONGEST_BACKOFF_SECONDS), is_over)
    try:  # the rest, within a bounded time
        follower.finish_by(time.monotonic() + FINAL_SECONDS)
        follower.pass_once()
        follower.draw()
        follower.end(ending())
    except IslandsError as exc:
        say(str(exc))
    if follower.is_behind:
        say(f"`diloco track {run.run_id}` sends to MLflow what it has not got")


def track(run: Run, uri: str, *, experiment: str = EXPERIMENT) -> int:
    """Send everything MLflow lacks, and the figures; return the number of points sent.

    Raises:
        TrackingUnavailable: MLflow did not answer; nothing is lost, repeat it.
        ConfigError: the address or the experiment cannot be used.
    """
    tracker = RunTracker(run, open_tracker(uri), experiment)
    sent = tracker.pass_once()
    tracker.draw()
    if run.store.read(names.FINISHED) is not None:
        tracker.end(FINISHED)
    return sent


class CommitReader:
    """Goes forward over the commits of every fragment, from given versions on. Not safe for several threads."""

    def __init__(self, run: Run, versions: Sequence[int]) -> None:
        self.versions = list(versions)
        self._store = run.store
        self._last: list[Commit | None] = [None] * len(self.versions)

    def read(self, most: int) -> list[tuple[Commit, Commit]]:
        """Return about `most` further commits, each with the one before it; empty if there are none."""
        each = -(-most // len(self.versions))
        return [pair for p in range(len(self.versions)) for pair in self._read(p, each)]

    def _read(self, fragment: int, most: int) -> Iterator[tuple[Commit, Commit]]:
        before = self._last[fragment] or self._at(fragment, self.versions[fragment])
        while before is not None and most > 0:
            self._last[fragment] = before
            commit = self._at(fragment, before.version + 1)
            if commit is None:
                return
            yield commit, before
            self.versions[fragment] = commit.version
            before, most = commit, most - 1
        self._last[fragment] = before

    def _at(self, fragment: int, version: int) -> Commit | None:
        found = records.read_commit(self._store, fragment, version)
        return None if found is None else found[0]


@dataclass(frozen=True, slots=True)
class Session:
    """What it holds between passes. `parts`: part of the run -> its run in MLflow; `scored`: evaluations sent."""

    parts: Mapping[str, Found]
    commits: CommitReader
    scored: list[int]


class RunTracker:
    """Brings one run's MLflow runs up to date. Not safe for several threads; several processes are harmless.

    Args:
        run: an open run.
        tracker: where to.
        experiment: name of the experiment.
        is_live: runs found ended are marked as running again, unless the run has finished.

    Attributes:
        is_behind: the last pass was stopped before everything was sent.
    """

    def __init__(
        self, run: Run, tracker: Tracker, experiment: str = EXPERIMENT, *, is_live: bool = False
    ) -> None:
        self.run = run
        self.is_behind = False
        self._tracker, self._experiment, self._is_live = tracker, experiment, is_live
        self._session: Session | None = None
        self._described = ""
        self._figures = Figures(run)

    def finish_by(self, deadline: float) -> None:
        """Ask nothing more of MLflow after `deadline`, in monotonic seconds: what is left to do then fails."""
        self._tracker.deadline = deadline

    def pass_once(self, is_late: Callable[[], bool] = lambda: False) -> int:
        """Send what the store has and MLflow lacks; return the number of points.

        Args:
            is_late: asked between rounds; True stops here, and the next pass goes on.

        Raises:
            TrackingUnavailable: MLflow did not answer. Call again: what is missing is found from the store.
            StoreUnavailable, DamagedObject: the store did not answer, or a commit in it is damaged.
        """
        sent = 0
        try:
            if self._session is None:
                self._session = self._open()
            session = self._session
            while points := self._next(session):
                self._send(session, points)
                sent += len(points)
                self.is_behind = is_late()
                if self.is_behind:
                    break
            # Last: where files cannot be stored, metrics still arrive.
            if self._described != session.parts[RUN].run_id:
                self._describe(session.parts)
                self._described = session.parts[RUN].run_id
        except IslandsError:
            # What MLflow has is not known any more; perhaps it comes back with another database. Ask it.
            self._session = None
            self.is_behind = True
            raise
        return sent

    def draw(self) -> None:
        """Draw the figures from the store and put them beside the parent run; nothing before the first pass."""
        if self._session is None:
            return
        parent = self._session.parts[RUN].run_id
        for path, png in self._figures.draw().items():
            self._tracker.log_figure(parent, png, path)

    def end(self, status: str) -> None:
        """Mark the runs as ended; the islands that have left have finished, whatever became of the others."""
        if self._session is None:
            return
        gone = {metrics.island_part(name) for name in records.departed(self.run.store)}
        for part, found in self._session.parts.items():
            outcome = FINISHED if part in gone else status
            if found.status != outcome:
                self._tracker.end(found.run_id, outcome)

    def _next(self, session: Session) -> list[Point]:
        """Return further points, and move on in the session; MLflow's cursor moves when they are sent."""
        context = self.run.config.model.context
        rates = {i.name: float(i.batch_size * context) for i in self.run.config.islands}
        points = [
            point
            for commit, before in session.commits.read(COMMITS_PER_ROUND)
            for point in metrics.points_of(commit, before, rates)
        ]
        for score in evaluations(self.run, session.scored):
            session.scored.append(score.number)
            points += metrics.evaluation_points(score)
        return list(
            dict.fromkeys(points)
        )  # two fragments pushed at once say the same of their island

    def _send(self, session: Session, points: list[Point]) -> None:
        grouped: dict[str, list[Point]] = {}
        for point in points:
            grouped.setdefault(point.run, []).append(point)
        for part, group in grouped.items():
            if part in session.parts:  # a refused contribution may bear any name
                self._tracker.log_points(session.parts[part].run_id, group)
        parent = session.parts[RUN].run_id
        self._tracker.remember(parent, CURSOR, session.commits.versions)
        if any(point.key.startswith("eval/") for point in points):
            self._tracker.remember(parent, SCORED, session.scored)

    def _open(self) -> Session:
        """Find or create the runs, and where the cursor stands."""
        parent = self._find(RUN, self.run.run_id, None)
        parts = {RUN: parent, SYNCHRONIZER: self._find(SYNCHRONIZER, "synchronizer", parent.run_id)}
        for island in self.run.config.islands:
            part = metrics.island_part(island.name)
            parts[part] = self._find(part, island.name, parent.run_id)
        if self._is_live and self.run.store.read(names.FINISHED) is None:
            for part, found in parts.items():
                if found.status != RUNNING:
                    self._tracker.reopen(found.run_id)
                    parts[part] = replace(found, status=RUNNING)
        # Of a child that somebody deleted nothing is there: then everything is sent again.
        tags = {} if any(found.is_new for found in parts.values()) else parent.tags
        versions = recall(tags, CURSOR)
        if len(versions) != len(self.run.layouts) or min(versions) < 0:
            versions = [0] * len(self.run.layouts)
        return Session(parts, CommitReader(self.run, versions), recall(tags, SCORED))

    def _find(self, part: str, name: str, parent: str | None) -> Found:
        # The digest: a run that was deleted and made again under its name is another one.
        tags = {
            "diloco.run": self.run.run_id,
            "diloco.store": self.run.store.url,
            "diloco.digest": self.run.digest,
            "diloco.part": part,
        }
        shown = name if parent is None else f"{self.run.run_id}/{name}"
        return self._tracker.find_or_create(self._experiment, shown, tags, parent)

    def _describe(self, parts: Mapping[str, Found]) -> None:
        """Write down once what the run is. Parameters keep their first value; config.toml is what holds now."""
        run, parent = self.run, parts[RUN].run_id
        config = run.config
        self._tracker.log_params(parent, config.model_dump(mode="json"))
        tags = {
            "seed": str(config.seed),
            "codec": config.sync.codec,
            "codec_down": config.sync.codec_down,
            "islands": str(len(config.islands)),
            "quorum": str(config.quorum),
            **{f"software.{key}": str(v) for key, v in run.facts.get("software", {}).items()},
        }
        if (commit := git_commit()) is not None:
            tags["git_sha"] = commit
        for key, value in tags.items():
            if parts[RUN].tags.get(f"diloco.{key}") != value:
                self._tracker.set_tag(parent, f"diloco.{key}", value)
        for island in config.islands:
            found = parts[metrics.island_part(island.name)]
            if found.tags.get("diloco.region") != island.region:
                self._tracker.set_tag(found.run_id, "diloco.region", island.region)
        self._tracker.log_text(parent, to_toml(config), "config.toml")
        self._tracker.log_text(parent, json.dumps(layouts_to_json(run.layouts)), "layouts.json")


class Figures:
    """The pictures of a run, drawn from all its commits: each is read once, and samples are thinned out."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._commits = CommitReader(run, [0] * len(run.layouts))
        self._samples: dict[str, list[Sample]] = {island.name: [] for island in run.config.islands}

    def draw(self) -> dict[str, bytes]:
        """Return file name -> PNG image, as the store stands now."""
        while pairs := self._commits.read(COMMITS_PER_ROUND):
            for sample in (sample for commit, _ in pairs for sample in metrics.samples_of(commit)):
                kept = self._samples.setdefault(sample.island, [])
                kept.append(sample)
                if len(kept) > MOST_SAMPLES:
                    kept[:] = metrics.thinned(kept, MOST_SAMPLES // 2)
        is_virtual = bool(self._run.store.list_names("driver/"))
        return {
            "figures/loss.png": draw_lines(self._loss(), LOSS),
            "figures/staleness.png": draw_lines(self._lines("staleness"), STALENESS),
            "figures/shares.png": draw_lines(self._lines("share"), SHARES),
            "figures/timeline.png": draw_timeline(self._lanes(), "Timeline", is_virtual=is_virtual),
        }

    def _lines(self, value: str) -> list[Line]:
        return [Line(name, *metrics.series(rows, value)) for name, rows in self._samples.items()]

    def _loss(self) -> list[Line]:
        scores = sorted(evaluations(self._run, ()), key=lambda score: score.merged_tokens)
        xs = tuple(float(score.merged_tokens) for score in scores)
        held_out = Line("held-out text", xs, tuple(s.bits_per_byte for s in scores), "points")
        bigram = Line("byte bigram", xs, tuple(s.bigram for s in scores), "level")
        return [*self._lines("loss"), held_out, bigram]

    def _lanes(self) -> list[Lane]:
        store, lanes, merges = self._run.store, [], set[float]()
        for name, samples in self._samples.items():
            numbers = sorted(records.numbers_in(store, f"learners/{name}"))
            starts = [_stamp_of(store, names.incarnation(name, number)) for number in numbers]
            spans = metrics.stretches(
                [at for at in starts if at is not None],
                [sample.pushed_at for sample in samples],
                _stamp_of(store, names.left(name)),
            )
            shown = metrics.thinned(samples, MOST_MARKS)
            lanes.append(Lane(name, tuple(spans), tuple(sample.pushed_at for sample in shown)))
            merges |= {sample.merged_at for sample in shown}
        return [*lanes, Lane("merges", (), tuple(sorted(merges)))]


def evaluations(run: Run, known: Collection[int]) -> Iterator[Evaluation]:
    """Yield the scores that are not known yet, as far as their snapshots are kept."""
    for number in sorted(set(records.numbers_in(run.store, f"evaluations/{SUITE}")) - set(known)):
        name, of = f"evaluations/{SUITE}/{number}.json", names.snapshot(number)
        try:
            score, snapshot = records.read(run.store, name), records.read(run.store, of)
            if score is None or snapshot is None:
                continue
            about: Snapshot = records.parsed(of, snapshot_from_json, snapshot[0])
            commits = [
                records.require_commit(run.store, *pair) for pair in enumerate(about.versions)
            ]
            at = max(commit.at for commit, _ in commits)
            bits, bigram = parse(tuple[float, float], [score[0][key] for key in SCORES])
        except (DamagedObject, KeyError, ValueError):
            continue  # `verify` is who says so
        yield Evaluation(number, about.merged_tokens, bits, bigram, at)


def _stamp_of(store: Store, name: str) -> float | None:
    """Return when a record says it was written; None if it is not there, or does not say."""
    try:
        found = records.read(store, name)
        return None if found is None else float(parse(float, found[0].get("at")))
    except (DamagedObject, ValueError):
        return None


def _wait(seconds: float, is_over: Callable[[], bool]) -> None:
    until = time.monotonic() + seconds
    while not is_over() and (left := until - time.monotonic()) > 0:
        time.sleep(min(LOOK_SECONDS, left))
