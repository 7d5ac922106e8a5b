"""A run as a story in time: who trained when, what was pushed, merged, adopted, lost and refused. No torch.

Reads records, never the bytes of an array. Times are the writers' own stamps, put on one axis; what has none is put
between the records around it, by its step.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from islands import names
from islands.contributions import Consumed, Contribution, Tally, Telemetry, Verdict
from islands.parsing import parse
from islands.timeline import Axis, Sent, Stamp, Traces, axis_over
from islands.types import DamagedObject, Position
from islands.versions import Commit
from tasks import records
from tasks.blows import Blow, blows_of
from tasks.runs import Run
from tasks.scores import Evaluation, placed_evaluations


@dataclass(frozen=True, slots=True)
class Push:
    """A contribution. `place` on the axis; `loss` smoothed, in bits per token, 0 while unknown.

    `fate`: "merged", "waiting" (may yet be merged), "passed over" (will not be), or "refused: " and the reason.
    """

    learner: str
    fragment: int
    base_version: int
    stop: Position
    num_tokens: int
    place: float
    loss: float
    fate: str


@dataclass(frozen=True, slots=True)
class Entry:
    """A push in the merge that took it. `share` of the merge's weight, 0..1."""

    push: Push
    staleness: int
    share: float


@dataclass(frozen=True, slots=True)
class Merge:
    """A version of one fragment. `merged_tokens` of the run after it, mean over fragments."""

    fragment: int
    version: int
    place: float
    merged_tokens: float
    entries: tuple[Entry, ...]


@dataclass(frozen=True, slots=True)
class Adoption:
    """A learner took over a version, at its own `step`; `place` is interpolated."""

    fragment: int
    version: int
    step: int
    place: float


@dataclass(frozen=True, slots=True)
class Bar:
    """One incarnation, from its registration to its last record.

    `ending`: "left" (its share is trained), "gone" (no farewell: killed or stopped, and another followed), "lost" (no
    farewell of its own, and nobody followed: written off or sent away), "open" (it may go on).
    """

    number: int
    begin: float
    end: float
    ending: str
    where: str = ""


@dataclass(frozen=True, slots=True)
class Lane:
    """What one island did. `pushes` are those no merge took. `left_at`: place of its farewell, None without one."""

    learner: str
    region: str
    bars: tuple[Bar, ...] = ()
    adoptions: tuple[Adoption, ...] = ()
    pushes: tuple[Push, ...] = ()
    left_at: float | None = None


@dataclass(frozen=True, slots=True)
class Refusal:
    """How many contributions of a learner were refused for a reason, and the tokens they announced."""

    learner: str
    reason: str
    count: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Timeline:
    """A run in time; lanes in the configured order, merges, synchronizers (number, place) and scores in time's."""

    axis: Axis
    num_fragments: int
    lanes: tuple[Lane, ...]
    merges: tuple[Merge, ...]
    synchronizers: tuple[tuple[int, float], ...]
    evaluations: tuple[Evaluation, ...]
    refusals: tuple[Refusal, ...]
    blows: tuple[Blow, ...] = ()

    def weight_shares(self) -> dict[str, float]:
        """Return each learner's share of a merge's weight, mean over all merges."""
        shares = {lane.learner: 0.0 for lane in self.lanes}
        for merge in self.merges:
            for entry in merge.entries:
                learner = entry.push.learner
                shares[learner] = shares.get(learner, 0.0) + entry.share / len(self.merges)
        return shares


def read_timeline(run: Run) -> Timeline:
    """Return the run's story as its store tells it now; what vanishes while it is read is left out.

    Raises:
        DamagedObject: a version's commit is missing or damaged. Of other damaged records nothing is shown.
    """
    chains = [_chain(run, layout.index) for layout in run.layouts]
    commits = [commit for chain in chains for commit in chain[1:]]
    late = _late_verdicts(run)
    islands = {island.name: _traces(run, island.name) for island in run.config.members}
    _note_commits(islands, commits, late)
    _read_inbox(run, islands, [chain[-1] for chain in chains])
    begun, strikes = _synchronizers(run), [*records.read_strikes(run.store).values()]
    taken = [(commit.at, [entry.name for entry in commit.consumed]) for commit in commits]
    axis = axis_over(islands, taken, [*(at for _, at in begun), *(one.at for one in strikes)])
    for name, island in islands.items():
        island.lay(axis, name)
    return Timeline(
        axis=axis,
        num_fragments=len(chains),
        lanes=tuple(_lane(run, axis, name, island) for name, island in islands.items()),
        merges=_merges(axis, islands, chains),
        synchronizers=tuple(
            (number, place)
            for number, at in begun
            if (place := axis.place(Stamp("", at))) is not None
        ),
        evaluations=placed_evaluations(run),
        refusals=_refusals([chain[-1] for chain in chains], late),
        blows=tuple(blows_of(axis, strikes)),
    )


# --- what the store holds ---


def _chain(run: Run, fragment: int) -> list[Commit]:
    head, _ = records.require_commit(run.store, fragment, 0)
    chain = [head]
    while (later := records.read_commit(run.store, fragment, chain[-1].version + 1)) is not None:
        chain.append(later[0])
    return chain


def _traces(run: Run, learner: str) -> Traces:
    traces = Traces()
    for name in run.store.list_names(f"learners/{learner}/"):
        body, number = _body(run, name), names.number_of(name)
        if number is not None and name == names.incarnation(learner, number):
            where = body.get("where")
            told = where.items() if isinstance(where, Mapping) else ()
            text = ", ".join(f"{key} {value}" for key, value in told)
            traces.births[number] = (_number(body.get("at")), text)
        elif name == names.left(learner):
            record = body.get("record")
            trained = _number(record.get("trained")) if isinstance(record, Mapping) else None
            traces.farewell = (int(trained or 0), _number(body.get("at")))
    for name in run.store.list_names(f"checkpoints/{learner}/"):
        if (saved := names.parse_checkpoint(name)) is not None:
            traces.saved.append((saved[1], _number(_body(run, name).get("at"))))
    return traces


def _read_inbox(run: Run, islands: Mapping[str, Traces], heads: list[Commit]) -> None:
    is_over = run.store.read(names.FINISHED) is not None
    for name in run.store.list_names("inbox/"):
        key = names.parse_contribution(name)
        if key is None or key.learner not in islands or key.fragment >= len(heads):
            continue
        sent, tally = islands[key.learner].sent, heads[key.fragment].tallies.get(key.learner)
        if name in sent and sent[name].fate == "merged":
            continue
        try:
            found = records.read_contribution(run.store, name)
        except DamagedObject:
            continue
        if found is not None:
            is_late = is_over or found[0].start < (tally or Tally()).consumed_to
            fate = sent[name].fate if name in sent else "passed over" if is_late else "waiting"
            sent[name] = _sent(key, found[0], fate)


def _sent(key: names.ContributionKey, told: Consumed | Contribution, fate: str) -> Sent:
    """Return a contribution; of a telemetry that the synchronizer could not read, it kept a blank one."""
    at = None if told.telemetry == Telemetry() else told.telemetry.at
    loss = told.telemetry.loss if math.isfinite(told.telemetry.loss) else 0.0
    tokens = told.announced_tokens if isinstance(told, Contribution) else told.num_tokens
    return Sent(key, told.start, tokens, at, loss, fate)


def _note_commits(
    islands: Mapping[str, Traces], commits: list[Commit], late: list[Verdict]
) -> None:
    for commit in commits:
        for entry in commit.consumed:
            key = names.parse_contribution(entry.name)
            if key is not None and key.learner in islands:
                islands[key.learner].sent[entry.name] = _sent(key, entry, "merged")
    for verdict in [*(verdict for commit in commits for verdict in commit.refused), *late]:
        key = names.parse_contribution(verdict.name)
        if key is not None and key.learner in islands:
            sent = Sent(key, None, verdict.num_tokens, None, 0.0, f"refused: {verdict.reason}")
            islands[key.learner].sent.setdefault(verdict.name, sent)


def _late_verdicts(run: Run) -> list[Verdict]:
    """Return the refusals that no version records: the end of the run does."""
    try:
        return [
            parse(Verdict, verdict) for verdict in _body(run, names.FINISHED).get("verdicts", ())
        ]
    except (ValueError, TypeError):
        return []


def _synchronizers(run: Run) -> list[tuple[int, float | None]]:
    numbers = sorted(records.numbers_in(run.store, "synchronizers"))
    return [(n, _number(_body(run, names.numbered("synchronizers", n)).get("at"))) for n in numbers]


def _body(run: Run, name: str) -> dict[str, Any]:
    """Return what a record says; nothing where it is gone or damaged: `verify` is there to complain."""
    try:
        found = records.read(run.store, name)
    except DamagedObject:
        return {}
    return {} if found is None else found[0]


def _number(value: Any) -> float | None:
    return float(value) if type(value) in (int, float) and abs(value) < 1e300 else None


# --- where it lies in time ---


def _merges(
    axis: Axis, islands: Mapping[str, Traces], chains: list[list[Commit]]
) -> tuple[Merge, ...]:
    placed: list[tuple[float, Commit, tuple[Entry, ...]]] = []
    for chain in chains:
        place = 0.0
        for commit in chain[1:]:
            entries = tuple(_entries(axis, islands, commit))
            latest = max([place, *(entry.push.place for entry in entries)])
            known = axis.place(Stamp("", commit.at))
            place = latest if known is None else known
            placed.append((place, commit, entries))
    placed.sort(key=lambda one: (one[0], one[1].fragment, one[1].version))
    merged, merges = [0] * len(chains), []
    for place, commit, entries in placed:
        merged[commit.fragment] = max(merged[commit.fragment], commit.merged_tokens)
        tokens = sum(merged) / len(merged)
        merges.append(Merge(commit.fragment, commit.version, place, tokens, entries))
    return tuple(merges)


def _entries(axis: Axis, islands: Mapping[str, Traces], commit: Commit) -> Iterator[Entry]:
    total = sum(entry.weight for entry in commit.consumed) or 1.0
    for one in commit.consumed:
        key = names.parse_contribution(one.name)
        if key is not None and key.learner in islands:
            push = _push(axis, islands[key.learner], islands[key.learner].sent[one.name])
            yield Entry(push, one.staleness, one.weight / total)


def _push(axis: Axis, traces: Traces, sent: Sent) -> Push:
    return Push(
        learner=sent.key.learner,
        fragment=sent.key.fragment,
        base_version=sent.key.base_version,
        stop=sent.key.stop,
        num_tokens=sent.num_tokens,
        place=traces.place(axis, sent),
        loss=sent.loss / math.log(2),
        fate=sent.fate,
    )


def _lane(run: Run, axis: Axis, name: str, traces: Traces) -> Lane:
    bars = [_bar(axis, name, traces, number) for number in sorted(traces.births)]
    left_at = None
    if traces.farewell is not None:
        trained, at = traces.farewell
        ending = "lost" if trained < run.own_tokens(name) else "left"
        left_at = axis.place(Stamp(name, at))
    if bars and traces.farewell is None:
        bars[-1] = replace(bars[-1], ending="open")
    elif bars:
        end = bars[-1].end if left_at is None or ending == "lost" else max(left_at, bars[-1].begin)
        left_at = end if left_at is None else left_at
        bars[-1] = replace(bars[-1], end=end, ending=ending)
    pushes = [_push(axis, traces, sent) for sent in traces.sent.values() if sent.fate != "merged"]
    return Lane(
        learner=name,
        region=run.island(name).region,
        bars=tuple(bars),
        adoptions=_adoptions(traces),
        pushes=tuple(sorted(pushes, key=lambda push: (push.place, push.fragment))),
        left_at=left_at,
    )


def _bar(axis: Axis, name: str, traces: Traces, number: int) -> Bar:
    (at, where), track = traces.births[number], traces.tracks[number]
    birth = axis.place(Stamp(name, at))
    begin = track.places[0] if birth is None else birth
    return Bar(number, begin, max(begin, track.places[-1]), "gone", where)


def _adoptions(traces: Traces) -> tuple[Adoption, ...]:
    found = {
        (sent.key.fragment, sent.start): sent.key.base_version
        for sent in traces.sent.values()
        if sent.start is not None and sent.start.incarnation in traces.tracks
    }
    adoptions = [
        Adoption(fragment, version, start.step, traces.tracks[start.incarnation].place(start.step))
        for (fragment, start), version in found.items()
    ]
    return tuple(sorted(adoptions, key=lambda one: (one.place, one.fragment)))


# --- refusals ---


def _refusals(heads: list[Commit], late: list[Verdict]) -> tuple[Refusal, ...]:
    sums: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0])
    counted = [
        (learner, reason, count, tokens)
        for head in heads
        for learner, tally in head.tallies.items()
        for reason, (count, tokens) in tally.refused.items()
    ]
    counted += [(v.learner, v.reason, 1, max(0, v.num_tokens)) for v in late]
    for learner, reason, count, tokens in counted:
        sums[learner, reason][0] += count
        sums[learner, reason][1] += tokens
    return tuple(Refusal(*key, *counts) for key, counts in sorted(sums.items()))
