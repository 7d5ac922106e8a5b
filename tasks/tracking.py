"""What a run's store says, told to MLflow: once, or all along. No torch.

The store is the spool. Commits of versions are never deleted and carry what there is to show, so a tracker only reads:
it looks for commits after its cursor, turns them into points, sends those, and moves the cursor. The cursor lies in
MLflow, as a tag of the parent run, so another process goes on from there; where it is gone, everything is sent again.

    1. points are sent; the answer is lost, or this process dies here;
    2. the cursor was not moved, so the next pass makes the same points and sends them again;
    3. a point is the same in every bit whoever makes it (see `islands/metrics.py`), and MLflow's database keeps one of
       it: run, key, step, time and value are its primary key.

So every point arrives once, however often a pass is cut off, and an outage loses nothing. No training waits for this.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from infra.plots import Labels, Lane, Line, draw_lines, draw_timeline
from infra.store import Store
from infra.tracking import FINISHED, Found, Tracker, git_commit, open_tracker, recall
from islands import metrics, names
from islands.config import to_toml
from islands.metrics import RUN, SYNCHRONIZER, Point, Sample
from islands.parsing import parse
from islands.types import DamagedObject, IslandsError
from islands.versions import layouts_to_json
from tasks import records
from tasks.commits import CommitReader
from tasks.health import Doctor, WindowPoints
from tasks.runs import Run, refreshed
from tasks.scores import evaluations

EXPERIMENT = "diloco"
PASS_SECONDS = 3.0
LONGEST_BACKOFF_SECONDS = 30.0
LOOK_SECONDS = 0.2
FIGURE_SECONDS = 60.0
# For the last pass of a run: no call begins later, and `track` sends what is left.
FINAL_SECONDS = 30.0
# Commits read, turned into points and sent at a time: what a lost pass repeats at most.
COMMITS_PER_ROUND = 200
CURSOR = "diloco.cursor"
SCORED = "diloco.cursor.evaluations"
STRUCK = "diloco.chaos"  # what struck, in words
HEALTH = "diloco.health"
MOST_MARKS = 400  # in one lane of the timeline
_MERGED = "merged tokens"
LOSS = Labels("Loss", _MERGED, "bits per byte", "islands: running mean of their training loss")
STALENESS = Labels(
    "Staleness of merged contributions",
    _MERGED,
    "versions behind",
    "mean over each island's last 12",
)
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
        ending: what it ended with, asked when it is over: "FINISHED", "FAILED", "KILLED"; "" if it goes on elsewhere.
        say: is told once that MLflow is away, and once that it is back.
    """
    try:
        tracker = open_tracker(uri)
    except IslandsError as exc:
        say(str(exc))
        return
    follower = RunTracker(run, tracker, experiment, is_live=True)
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
        pause = min(PASS_SECONDS * 2 ** min(failures, 8), LONGEST_BACKOFF_SECONDS)
        until = time.monotonic() + pause
        while not is_over() and time.monotonic() < until:
            time.sleep(LOOK_SECONDS)
    try:  # the rest, within a bounded time
        tracker.deadline = time.monotonic() + FINAL_SECONDS
        follower.pass_once()
        follower.draw()
        if status := ending():
            follower.end(status)
    except IslandsError as exc:
        say(str(exc))
    if follower.is_behind:
        say(f"`diloco track {run.run_id}` sends to MLflow what it has not got")


def track(run: Run, uri: str, *, experiment: str = EXPERIMENT) -> int:
    """Send everything MLflow lacks, and the figures; return the number of points sent.

    Raises:
        TrackingUnavailable: MLflow did not answer; nothing is lost, repeat it.
    """
    tracker = RunTracker(run, open_tracker(uri), experiment)
    sent = tracker.pass_once()
    tracker.draw()
    if run.store.read(names.FINISHED) is not None:
        tracker.end(FINISHED)
    return sent


@dataclass(frozen=True, slots=True)
class Session:
    """What it holds between passes. `parts`: part of the run -> its run in MLflow; `scored`: evaluations sent.

    `struck`: what has struck on purpose, by number, in words, as far as MLflow was told since the session began.
    """

    parts: Mapping[str, Found]
    commits: CommitReader
    scored: list[int]
    struck: dict[int, str] = field(default_factory=dict)


class RunTracker:
    """Brings one run's MLflow runs up to date. Not safe for several threads; several processes are harmless.

    `is_live`: what MLflow holds for ended is marked as running again, unless the run has finished. `is_behind`: the
    last pass was stopped before everything was sent.
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
        self._windows, self._doctor = WindowPoints(run), Doctor(run)
        self._findings: str | None = None

    def pass_once(self, is_late: Callable[[], bool] = lambda: False) -> int:
        """Send what the store has and MLflow lacks; return the number of points. `is_late` stops it between rounds.

        Raises:
            TrackingUnavailable: MLflow did not answer. Call again: what is missing is found from the store.
            StoreUnavailable, DamagedObject: the store did not answer, or a commit in it is damaged.
        """
        sent = 0
        try:
            before, self.run = self.run, refreshed(self.run)
            if self.run is not before:  # other settings; who joined has no run of its own yet
                self._described, self._session = "", None
            session = self._session = self._session or self._open()
            while points := self._next(session):
                self._send(session, points)
                sent += len(points)
                if is_late():
                    self.is_behind = True
                    return sent
            self._tell_health(session.parts[RUN].run_id)
            # Last: where files cannot be stored, metrics still arrive.
            if self._described != session.parts[RUN].run_id:
                self._describe(session.parts)
                self._described = session.parts[RUN].run_id
            self.is_behind = False
        except IslandsError:
            # What MLflow has is not known any more; perhaps it comes back with another database. Ask it.
            self._session, self._findings, self.is_behind = None, None, True
            raise
        return sent

    def _tell_health(self, parent: str) -> None:
        """Keep a tag with what is wrong with the run, by kind and island; empty for nothing."""
        keys = ", ".join(finding.key for finding in self._doctor.look(self.run))
        if keys != self._findings:
            self._tracker.set_tag(parent, HEALTH, keys)
            self._findings = keys

    def draw(self) -> None:
        """Draw the figures from the store and put them beside the parent run; nothing before the first pass."""
        if self._session is not None:
            for path, png in self._figures.draw().items():
                self._tracker.log_figure(self._session.parts[RUN].run_id, png, path)

    def end(self, status: str) -> None:
        """Mark the runs as ended; the islands that have left have finished, whatever became of the others."""
        parts = {} if self._session is None else self._session.parts
        gone = {metrics.island_part(name) for name in records.departed(self.run.store)}
        for part, found in parts.items():
            outcome = FINISHED if part in gone else status
            if found.status != outcome:
                self._tracker.end(found.run_id, outcome)

    def _next(self, session: Session) -> list[Point]:
        """Return further points, and move on in the session; MLflow's cursor moves when they are sent."""
        context = self.run.config.model.context
        rates = {i.name: float(i.batch_size * context) for i in self.run.config.islands}
        points = [
            point
            for commit, heads in session.commits.read(COMMITS_PER_ROUND)
            for point in (
                *metrics.points_of(commit, heads, rates),
                *self._windows.of(commit, heads),
            )
        ]
        for score in evaluations(self.run, session.scored):
            session.scored.append(score.number)
            points += metrics.evaluation_points(score)
        for number, strike in records.read_strikes(self.run.store, session.struck).items():
            session.struck[number] = strike.told
            points.append(metrics.strike_point(number, strike))
        # Two fragments pushed at once say the same of their island.
        return list(dict.fromkeys(points))

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
        if any(point.key == metrics.FAULTS for point in points):
            self._tracker.set_tag(parent, STRUCK, "; ".join(session.struck.values()))

    def _open(self) -> Session:
        """Find or create the runs, and where the cursor stands."""
        parent = self._find(RUN, self.run.run_id, None)
        parts = {RUN: parent, SYNCHRONIZER: self._find(SYNCHRONIZER, "synchronizer", parent.run_id)}
        for island in self.run.config.members:
            part = metrics.island_part(island.name)
            parts[part] = self._find(part, island.name, parent.run_id)
        if self._is_live and self.run.store.read(names.FINISHED) is None:
            parts = {part: self._tracker.reopen(found) for part, found in parts.items()}
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
        config, parent = self.run.config, parts[RUN].run_id
        software = self.run.facts.get("software", {})
        self._tracker.log_params(parent, config.model_dump(mode="json"))
        facts = {
            "seed": config.seed,
            "codec": config.sync.codec,
            "codec_down": config.sync.codec_down,
            "islands": len(config.members),
            "quorum": config.quorum,
            "git_sha": git_commit(),
            "origin": self.run.facts.get("origin", {}).get("spec"),
            **{f"software.{key}": value for key, value in software.items()},
        }
        tags = {f"diloco.{key}": str(fact) for key, fact in facts.items() if fact is not None}
        self._tracker.set_tags(parts[RUN], tags)
        for island in config.members:
            child = parts[metrics.island_part(island.name)]
            self._tracker.set_tags(child, {"diloco.region": island.region})
        self._tracker.log_text(parent, to_toml(config), "config.toml")
        self._tracker.log_text(
            parent, json.dumps(layouts_to_json(self.run.layouts)), "layouts.json"
        )


class Figures:
    """The pictures of a run, drawn from all its commits: each is read once, and samples are thinned out."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._commits = CommitReader(run, [0] * len(run.layouts))
        self._samples: dict[str, list[Sample]] = {island.name: [] for island in run.config.members}

    def draw(self) -> dict[str, bytes]:
        """Return file name -> PNG image, as the store stands now."""
        while pairs := self._commits.read(COMMITS_PER_ROUND):
            for commit, heads in pairs:
                metrics.gather(self._samples, metrics.samples_of(commit, heads))
        return {
            "figures/loss.png": draw_lines(self._loss(), LOSS),
            "figures/staleness.png": draw_lines(self._lines("staleness"), STALENESS),
            "figures/shares.png": draw_lines(self._lines("share"), SHARES),
            "figures/timeline.png": self._timeline(),
        }

    def _lines(self, value: str) -> list[Line]:
        return [Line(name, *metrics.series(rows, value)) for name, rows in self._samples.items()]

    def _loss(self) -> list[Line]:
        scores = sorted(evaluations(self._run, ()), key=lambda score: score.merged_tokens)
        xs = tuple(float(score.merged_tokens) for score in scores)
        held_out = Line("held-out text", xs, tuple(s.bits_per_byte for s in scores), "points")
        bigram = Line("byte bigram", xs, tuple(s.bigram for s in scores), "level")
        return [*self._lines("loss"), held_out, bigram]

    def _timeline(self) -> bytes:
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
        lanes.append(Lane("merges", (), tuple(sorted(merges))))
        is_real = max(merges, default=metrics.FIRST_STAMP) >= metrics.FIRST_STAMP
        return draw_timeline(lanes, "Timeline", "seconds" if is_real else "base steps")


def _stamp_of(store: Store, name: str) -> float | None:
    """Return when a record says it was written; None if it is not there, or does not say."""
    try:
        found = records.read(store, name)
        return None if found is None else float(parse(float, found[0].get("at")))
    except (DamagedObject, ValueError):
        return None
