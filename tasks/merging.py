"""The synchronizer: look at the inbox, judge, decide, fold, publish. One `poll` is one look. No torch.

Knows the store's records and its own first-seen times; must not know a learner, a scheduler or a wall clock: `now` is
an argument. Everything it knows besides its estimates can be read again from the store, so it may die at any point,
and there may be two of it: a version is one create-only commit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from islands import names
from islands.contributions import (
    Consumed,
    Contribution,
    Lineage,
    Tally,
    Verdict,
    after_merge,
    consume,
    judge,
    newest_per_learner,
    running_median,
)
from islands.fragments import layout_digest, own_period
from islands.merging import Vector
from islands.quorum import Arrival, Expectation, Merge, Round, Wait, decide
from islands.types import DamagedObject, FragmentLayout, VersionTaken
from islands.versions import Commit, Snapshot
from tasks import records
from tasks.publishing import fold_contributions, step_chunks, write_version
from tasks.records import NewAttempt
from tasks.runs import Run

# While the rate warms up, deltas grow tenfold within a few versions; a median means something after these.
VERSIONS_WITHOUT_NORM_LIMIT = 8
# Rounds in a row a learner may miss and still be waited for.
MISSES_UNTIL_SILENT = 2


@dataclass(frozen=True, slots=True)
class Polled:
    """What one look did: versions published as (fragment, version), and how long nothing can happen by itself.

    `is_settled`: every learner has left and nothing mergeable is pending. `is_superseded`: a later synchronizer
    exists, this one must end.
    """

    published: tuple[tuple[int, int], ...]
    wait_seconds: float
    is_settled: bool = False
    is_superseded: bool = False


@dataclass(frozen=True, slots=True)
class Members:
    """Who takes part, as the store says: newest incarnations, contributions listed by them, who has left."""

    incarnations: Mapping[str, int]
    listed: frozenset[str]
    departed: frozenset[str]


@dataclass(slots=True)
class View:
    """What the synchronizer knows of one fragment. Times are its own monotonic seconds.

    `opened_at` is None for a head it found rather than made. `responses`: seconds from opening a head to a learner's
    contribution on it, running mean. `missed`: rounds a learner was absent from in a row.
    """

    layout: FragmentLayout
    head: Commit
    digests: dict[int, str]
    recorded: set[str]
    opened_at: float | None = None
    offers: dict[str, tuple[Contribution, str]] = field(default_factory=dict)
    first_seen: dict[str, float] = field(default_factory=dict)
    damaged: dict[str, Verdict] = field(default_factory=dict)
    responses: dict[str, float] = field(default_factory=dict)
    missed: dict[str, int] = field(default_factory=dict)


class Synchronizer:
    """Merges a run's fragments. Not safe for several threads; several processes are harmless.

    Args:
        run: an open run with version 0 of every fragment.
        new_attempt: returns a name no other writer uses.
    """

    def __init__(self, run: Run, new_attempt: NewAttempt) -> None:
        self.run = run
        self.number: int | None = None
        self._new_attempt = new_attempt
        self._views = [self._open_view(layout) for layout in run.layouts]
        self._listed: dict[tuple[str, int], frozenset[str]] = {}

    def poll(self, *, now: float) -> Polled:
        """Merge all that is due and return what was done and when to look again.

        Raises:
            DamagedObject: the lineage itself is damaged (never for a contribution: that is a verdict).
            StoreUnavailable: the store did not answer; nothing half-done is visible.
        """
        members = self._members()
        published: list[tuple[int, int]] = []
        waits = [math.inf]
        is_idle = True
        for view in self._views:
            while True:
                choice = self._decide(view, members, now)
                if not isinstance(choice, Merge):
                    waits.append(choice.seconds)
                    is_idle = is_idle and math.isinf(choice.seconds)
                    break
                if self._is_superseded():
                    return Polled(tuple(published), math.inf, is_superseded=True)
                if self._merge(view, choice, members, now):
                    published.append((view.layout.index, view.head.version))
        if published:
            self._snapshot(is_last=False)
        is_over = is_idle and len(members.departed) == len(self.run.config.islands)
        if is_over:
            self._snapshot(is_last=True)
        return Polled(tuple(published), min(waits), is_settled=is_over)

    def heads(self) -> list[Commit]:
        """Return the newest version it knows of each fragment."""
        return [view.head for view in self._views]

    def verdicts(self) -> list[Verdict]:
        """Return the refusals no commit has recorded yet, ordered by name."""
        members = self._members()
        found = []
        for view in self._views:
            self._observe(view, math.inf)
            found += self._refusals(view, self._lineage(view, members))
        return sorted(found, key=lambda verdict: verdict.name)

    def estimates(self) -> list[dict[str, Any]]:
        """Return what the store does not hold, per fragment, as plain JSON values."""
        keys = ("opened_at", "first_seen", "responses", "missed")
        return [{key: getattr(view, key) for key in keys} for view in self._views]

    def restore_estimates(self, estimates: list[dict[str, Any]], *, number: int | None) -> None:
        """Go on with the estimates that `estimates` returned, as synchronizer `number`."""
        self.number = number
        for view, known in zip(self._views, estimates, strict=True):
            view.opened_at = known["opened_at"]
            view.first_seen = dict(known["first_seen"])
            view.responses = dict(known["responses"])
            view.missed = dict(known["missed"])

    # --- looking ---

    def _open_view(self, layout: FragmentLayout) -> View:
        head, digest = records.find_head(self.run.store, layout.index)
        view = View(layout, head, {head.version: digest}, {verdict.name for verdict in head.refused})
        for version in range(max(0, head.version - self.run.config.sync.max_staleness - 2), head.version):
            commit, digest = records.require_commit(self.run.store, layout.index, version)
            view.digests[version] = digest
            view.recorded |= {verdict.name for verdict in commit.refused}
        return view

    def _members(self) -> Members:
        store = self.run.store
        incarnations = records.newest_incarnations(store)
        listed: set[str] = set()
        for learner, number in incarnations.items():
            if (learner, number) not in self._listed:
                body, _ = records.require(store, names.incarnation(learner, number))
                self._listed[learner, number] = frozenset(body["listed"])
            listed |= self._listed[learner, number]
        return Members(incarnations, frozenset(listed), records.departed(store))

    def _refresh(self, view: View) -> None:
        """Catch up with versions somebody else published."""
        while (later := records.read_commit(self.run.store, view.layout.index, view.head.version + 1)) is not None:
            self._advance(view, *later, opened_at=None)

    def _advance(self, view: View, commit: Commit, digest: str, *, opened_at: float | None) -> None:
        view.head, view.opened_at = commit, opened_at
        view.digests[commit.version] = digest
        view.recorded |= {verdict.name for verdict in commit.refused}
        for version in [v for v in view.digests if v < commit.version - self.run.config.sync.max_staleness - 2]:
            del view.digests[version]

    def _observe(self, view: View, now: float) -> None:
        """Bring offers, first-seen times and damage up to date with one listing of the inbox."""
        present = set()
        for name in self.run.store.list_names(f"inbox/f{view.layout.index:04d}/"):
            key = names.parse_contribution(name)
            if key is None or self._is_settled(view, key):
                continue
            present.add(name)
            if name not in view.offers and name not in view.damaged:
                self._receive(view, name, key)
            is_new = name not in view.first_seen
            view.first_seen.setdefault(name, now)
            if is_new and name in view.offers:
                self._note_response(view, key, now)
        for known in (view.offers, view.first_seen, view.damaged):
            for name in [name for name in known if name not in present]:
                del known[name]  # type: ignore[attr-defined]

    def _is_settled(self, view: View, key: names.ContributionKey) -> bool:
        """Say whether a contribution's fate is decided: merged, passed over, or recorded as too old long ago."""
        tally = view.head.tallies.get(key.learner, Tally())
        return (
            key.stop <= tally.consumed_to
            or key.base_version + self.run.config.sync.max_staleness + 2 < view.head.version
        )

    def _receive(self, view: View, name: str, key: names.ContributionKey) -> None:
        for attempt in (1, 2):
            try:
                found = records.read_contribution(self.run.store, name)
            except DamagedObject:
                # Read again once: a store may answer half. Then it is damage.
                if attempt == 2:
                    view.damaged[name] = Verdict(name, "", key.learner, "damaged", 0)
                continue
            if found is not None:
                view.offers[name] = found
            return

    def _note_response(self, view: View, key: names.ContributionKey, now: float) -> None:
        view.missed[key.learner] = 0
        if view.opened_at is None or key.base_version != view.head.version:
            return
        took = now - view.opened_at
        view.responses[key.learner] = 0.5 * (view.responses.get(key.learner, took) + took)

    # --- deciding ---

    def _decide(self, view: View, members: Members, now: float) -> Wait | Merge:
        self._refresh(view)
        self._observe(view, now)
        lineage = self._lineage(view, members)
        if any(judge(offer, lineage) == "future" for offer, _ in view.offers.values()):
            self._refresh(view)
            lineage = self._lineage(view, self._members())
        chosen = self._acceptable(view, lineage)
        return decide(self._round(view, members, chosen), now=now)

    def _lineage(self, view: View, members: Members) -> Lineage:
        config, head = self.run.config, view.head
        is_known = head.median_norm > 0 and head.version >= VERSIONS_WITHOUT_NORM_LIMIT
        return Lineage(
            head_version=head.version,
            digests=view.digests,
            tallies=head.tallies,
            incarnations=members.incarnations,
            listed=members.listed,
            layout=layout_digest(view.layout),
            codec=config.sync.codec,
            num_tensors=len(view.layout.tensors),
            max_staleness=config.sync.max_staleness,
            norm_limit=config.sync.outlier_factor * head.median_norm if is_known else math.inf,
        )

    def _acceptable(self, view: View, lineage: Lineage) -> dict[str, Contribution]:
        offers = [
            offer
            for name, (offer, _) in view.offers.items()
            if name not in view.damaged and name not in view.recorded and judge(offer, lineage) is None
        ]
        return newest_per_learner([offer for offer in offers if self._counts_when_cold(view, offer)])

    def _counts_when_cold(self, view: View, offer: Contribution) -> bool:
        """A found head owes no pace; so that it is not stepped on a sliver, half a period is asked for instead."""
        if view.opened_at is not None or view.head.version == 0 or self.run.config.sync.algorithm == "streaming":
            return True
        steps = own_period(
            self.run.config.sync.period_steps,
            step_seconds=offer.step_seconds,
            all_step_seconds=[tally.step_seconds for tally in view.head.tallies.values()],
        )
        return 2 * offer.num_steps >= steps

    def _refusals(self, view: View, lineage: Lineage) -> list[Verdict]:
        found = [verdict for name, verdict in view.damaged.items() if name not in view.recorded]
        for name, (offer, digest) in view.offers.items():
            reason = judge(offer, lineage)
            if reason is not None and name not in view.recorded and name not in view.damaged:
                found.append(Verdict(name, digest, offer.learner, reason, offer.num_tokens))
        return sorted(found, key=lambda verdict: verdict.name)

    def _round(self, view: View, members: Members, chosen: Mapping[str, Contribution]) -> Round:
        config = self.run.config
        staying = [island.name for island in config.islands if island.name not in members.departed]
        seconds = [tally.step_seconds for tally in view.head.tallies.values()]
        known = [s for s in [*seconds, *(offer.step_seconds for offer in chosen.values())] if s > 0]
        period = config.sync.period_steps * min(known, default=0.0)
        blocks = config.sync.algorithm == "streaming"
        return Round(
            arrivals=tuple(Arrival(name, view.first_seen[offer.name]) for name, offer in chosen.items()),
            expected=tuple(self._expectation(view, name) for name in staying if self._is_awaited(view, members, name)),
            min_learners=max(1, min(config.quorum, len(staying))),
            opened_at=view.opened_at,
            period_seconds=0.0 if blocks else period,
            grace_seconds=0.0 if blocks else config.sync.grace_fraction * period,
            is_final=not staying,
        )

    def _is_awaited(self, view: View, members: Members, learner: str) -> bool:
        return learner in members.incarnations and view.missed.get(learner, 0) < MISSES_UNTIL_SILENT

    def _expectation(self, view: View, learner: str) -> Expectation:
        response = view.responses.get(learner)
        if response is None or view.opened_at is None:
            return Expectation(learner, None)
        return Expectation(learner, view.opened_at + response)

    # --- merging ---

    def _is_superseded(self) -> bool:
        newest = records.next_number(self.run.store, "synchronizers") - 1
        if self.number is None:
            self._enlist(newest + 1)
            return False
        return newest > self.number

    def _enlist(self, number: int) -> None:
        while True:
            try:
                # The attempt name makes the record ours: two synchronizers never write the same one.
                records.write(
                    self.run.store, names.numbered("synchronizers", number), {"number": number, "mark": self._new_attempt()}
                )
            except VersionTaken:
                number += 1
                continue
            self.number = number
            return

    def _merge(self, view: View, choice: Merge, members: Members, now: float) -> bool:
        """Publish the next version from the chosen learners; False if the world turned out different."""
        lineage = self._lineage(view, members)
        chosen = self._acceptable(view, lineage)
        offers = [chosen[name] for name in choice.learners]
        consumed = [consume(offer, view.offers[offer.name][1], view.head.version) for offer in offers]
        try:
            delta = self._fold(view, offers, [entry.weight for entry in consumed])
        except DamagedObject as exc:
            # The round starts again without it: perhaps there is no quorum any more.
            offer, digest = view.offers[exc.name]
            view.damaged[exc.name] = Verdict(exc.name, digest, offer.learner, "damaged", offer.num_tokens)
            if len(offers) == 1:
                self._advise(view, self._refusals(view, lineage))
            return False
        commit = self._commit(view, consumed, self._refusals(view, lineage), delta)
        name = names.version(view.layout.index, commit.version)
        try:
            digest = records.write(self.run.store, name, commit.to_json())
        except VersionTaken:
            return False
        self._advance(view, commit, digest, opened_at=now)
        for learner in members.incarnations:
            view.missed[learner] = 0 if learner in choice.learners else view.missed.get(learner, 0) + 1
        return True

    def _fold(self, view: View, offers: list[Contribution], weights: list[float]) -> Vector:
        chunk = self.run.chunk_of(view.layout)
        try:
            return fold_contributions(self.run.store, view.layout, offers, weights, chunk)
        except DamagedObject:
            return fold_contributions(self.run.store, view.layout, offers, weights, chunk)

    def _commit(self, view: View, consumed: list[Consumed], refused: list[Verdict], delta: Vector) -> Commit:
        config, head = self.run.config, view.head
        version = head.version + 1
        pieces = step_chunks(
            self.run.store,
            head,
            delta,
            codec=config.sync.codec_down,
            learning_rate=config.outer.learning_rate,
            momentum=config.outer.momentum,
            chunk_elements=self.run.chunk_of(view.layout),
        )
        payload = write_version(self.run, view.layout, version, pieces, self._new_attempt)
        return Commit(
            fragment=view.layout.index,
            version=version,
            parent_digest=view.digests[head.version],
            consumed=tuple(consumed),
            refused=tuple(refused),
            tallies=after_merge(head.tallies, consumed, refused, version=version),
            median_norm=running_median(head.median_norm, [entry.norm for entry in consumed]),
            learning_rate=config.outer.learning_rate,
            momentum=config.outer.momentum,
            codec=config.sync.codec_down,
            synchronizer=-1 if self.number is None else self.number,
            payload=payload,
        )

    def _advise(self, view: View, refused: list[Verdict]) -> None:
        """Leave a note on a round that could commit nothing. Whether it is written changes nothing."""
        prefix = f"advisories/f{view.layout.index:04d}/{view.head.version}-"
        number = sum(name.startswith(prefix) for name in self.run.store.list_names(f"advisories/f{view.layout.index:04d}/"))
        name = names.advisory(view.layout.index, view.head.version, number)
        try:
            records.write(self.run.store, name, {"refused": [asdict(verdict) for verdict in refused]})
        except VersionTaken:
            return

    def _snapshot(self, *, is_last: bool) -> None:
        """Write the version vector once every fragment has advanced; at the end, once anything has."""
        kept = records.read_snapshots(self.run.store)
        versions = tuple(view.head.version for view in self._views)
        before = kept[-1][0].versions if kept else (0,) * len(versions)
        has_moved = any if is_last else all
        if not has_moved(new > old for new, old in zip(versions, before, strict=True)):
            return
        snapshot = Snapshot(
            number=kept[-1][0].number + 1 if kept else 0,
            versions=versions,
            digests=tuple(view.digests[view.head.version] for view in self._views),
            merged_tokens=sum(view.head.merged_tokens for view in self._views) // len(self._views),
            previous=kept[-1][1] if kept else "",
        )
        try:
            records.write(self.run.store, names.snapshot(snapshot.number), snapshot.to_json())
        except VersionTaken:
            return  # another synchronizer named the same moment

