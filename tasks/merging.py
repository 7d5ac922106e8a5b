"""The synchronizer: look at the inbox, judge, decide, fold, publish. One `poll` is one look. No torch.

Knows the store's records through `View`; must not know a learner, a scheduler or a wall clock: `now` is an argument.
Everything it knows besides its estimates can be read again from the store, so it may die at any point, and there may be
two of it: a version is one create-only commit.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from itertools import count
from typing import Any

from infra import processes
from islands import names
from islands.contributions import (
    Consumed,
    Contribution,
    Verdict,
    after_merge,
    consume,
    judge,
    running_median,
)
from islands.fragments import period_of_fastest
from islands.merging import Vector
from islands.quorum import Wait, decide
from islands.types import DamagedObject, VersionTaken
from islands.versions import Commit, Snapshot
from tasks import records
from tasks.inbox import Members, Roster, View, open_views
from tasks.publishing import fold_contributions, write_version
from tasks.records import NewAttempt, Stamp
from tasks.runs import Run
from tasks.stepping import next_chunks, next_step


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


class Synchronizer:
    """Merges a run's fragments. Not safe for several threads; several processes are harmless.

    Args:
        run: an open run with version 0 of every fragment.
        new_attempt: returns a name no other writer uses.
        stamp: the time to write beside records, for people.
    """

    def __init__(self, run: Run, new_attempt: NewAttempt, *, stamp: Stamp) -> None:
        self.run = run
        self.number: int | None = None
        self._new_attempt = new_attempt
        self._stamp = stamp
        self._views = open_views(run)
        self._roster = Roster(run)
        self._named = (0,) * len(run.layouts)  # by the newest snapshot it knows of

    def steer(self, run: Run) -> None:
        """Go on under the settings of this run, the same one opened later.

        Raises:
            StoreUnavailable: the store did not answer; call again.
        """
        if run is self.run:
            return
        for view in self._views:
            view.steer(run)
        self._roster.steer(run)
        self.run = run

    def poll(self, *, now: float) -> Polled:
        """Merge all that is due and return what was done and when to look again.

        Raises:
            DamagedObject: the lineage itself is damaged (never for a contribution: that is a verdict).
            StoreUnavailable: the store did not answer; nothing half-done is visible.
        """
        # Read before the inboxes: whoever has left by now has written all its contributions before that.
        has_all_left = all(
            self.run.store.read(names.left(island.name)) is not None
            for island in self.run.config.members
        )
        published: list[tuple[int, int]] = []
        waits = [math.inf]
        for view in self._views:
            if not has_all_left and (early := view.seconds_until_paced(now)) > 0:
                waits.append(early)
                continue
            while True:
                members = self._look(view, now)
                if members is None:
                    break
                chosen = view.acceptable(members)
                opened = [other.opened_at for other in self._views if other is not view]
                choice = decide(view.round(members, chosen, opened), now=now)
                if isinstance(choice, Wait):
                    waits.append(choice.seconds)
                    break
                if self._is_superseded(view):
                    return Polled(tuple(published), math.inf, is_superseded=True)
                if self._merge(view, [chosen[name] for name in choice.learners], members, now):
                    published.append((view.layout.index, view.head.version))
        if published:
            self._snapshot(is_last=False)
        is_settled = math.isinf(min(waits)) and has_all_left
        if is_settled:
            self._snapshot(is_last=True)
        return Polled(tuple(published), min(waits), is_settled=is_settled)

    def heads(self) -> list[Commit]:
        """Return the newest version it knows of each fragment."""
        return [view.head for view in self._views]

    def period_seconds(self) -> float:
        """Return the seconds in which the fastest learner trains a period, as the heads know it; 0 while unknown."""
        known = [t.step_seconds for head in self.heads() for t in head.tallies.values()]
        return period_of_fastest(self.run.config.sync.period_steps, known)

    def verdicts(self) -> list[Verdict]:
        """Return the refusals no commit has recorded yet, ordered by name."""
        members = self._roster.members()
        found = []
        for view in self._views:
            view.observe(math.inf)
            found += view.refusals(view.lineage(members))
        return sorted(found, key=lambda verdict: verdict.name)

    def estimates(self) -> list[dict[str, Any]]:
        """Return what the store does not hold, per fragment, as plain JSON values."""
        return [view.estimates() for view in self._views]

    def restore_estimates(self, estimates: list[dict[str, Any]], *, number: int | None) -> None:
        """Go on with the estimates that `estimates` returned, as synchronizer `number`."""
        self.number = number
        for view, known in zip(self._views, estimates, strict=True):
            view.restore_estimates(known)

    def _look(self, view: View, now: float) -> Members | None:
        """Bring a view up to date and return who takes part; None if nothing is there to judge."""
        view.refresh()
        view.observe(now)
        if not view.offers:  # most looks: one more listing would be the dearest part of them
            return None
        members = self._roster.members()
        if any(
            judge(offer, view.lineage(members)) == "future" for offer, _ in view.offers.values()
        ):
            # Perhaps the world has moved while we looked: look once more before judging.
            view.refresh()
            members = self._roster.members()
        return members

    def _is_superseded(self, view: View) -> bool:
        newest = records.next_number(self.run.store, "synchronizers") - 1
        if self.number is None:
            self._enlist(newest + 1, view.quorum_stamp())
            return False
        return newest > self.number

    def _enlist(self, number: int, called_at: float) -> None:
        """Announce itself before its first merge; `called_at`: when its quorum was complete, by learners' clocks."""
        while True:
            # The mark makes the record ours: two synchronizers never write the same one.
            body = {
                "number": number,
                "mark": self._new_attempt(),
                "at": self._stamp(),
                "called_at": called_at,
                "where": processes.here(),
            }
            try:
                records.write(self.run.store, names.numbered("synchronizers", number), body)
            except VersionTaken:
                number += 1
                continue
            self.number = number
            return

    def _merge(self, view: View, offers: list[Contribution], members: Members, now: float) -> bool:
        """Publish the next version from these offers; False if the world turned out different."""
        lineage = view.lineage(members)
        consumed = [
            consume(
                offer,
                view.offers[offer.name][1],
                view.head.version,
                self.run.config.outer.weighting,
            )
            for offer in offers
        ]
        weights, chunk = [entry.weight for entry in consumed], self.run.chunk_of(view.layout)
        try:
            folded = fold_contributions(self.run.store, view.layout, offers, weights, chunk)
        except DamagedObject as exc:
            # The round starts again without it: perhaps there is no quorum any more.
            view.note_damage(exc.name)
            if len(offers) == 1:
                self._advise(view, view.refusals(lineage))
            return False
        pairs = zip(consumed, folded.cosines, strict=True)
        compared = [replace(entry, cosine=cosine) for entry, cosine in pairs]
        commit = self._commit(view, compared, view.refusals(lineage), folded.delta)
        try:
            digest = records.write(
                self.run.store, names.version(commit.fragment, commit.version), commit.to_json()
            )
        except VersionTaken:
            return False  # somebody else made this version; the next look finds it
        view.note_merge(commit, digest, members, now=now)
        return True

    def _commit(
        self, view: View, consumed: list[Consumed], refused: list[Verdict], delta: Vector
    ) -> Commit:
        config, head = self.run.config, view.head
        version = head.version + 1
        step = next_step(config, head)
        pieces = next_chunks(
            self.run, view.layout, head, delta, step=step, codec=config.sync.codec_down
        )
        payload = write_version(self.run, view.layout, version, pieces, self._new_attempt)
        return Commit(
            fragment=view.layout.index,
            version=version,
            parent_digest=view.digest,
            consumed=tuple(consumed),
            refused=tuple(refused),
            tallies=after_merge(head.tallies, consumed, refused, version=version),
            median_norm=running_median(head.median_norm, [entry.norm for entry in consumed]),
            learning_rate=step.learning_rate,
            momentum=step.momentum,
            codec=config.sync.codec_down,
            synchronizer=-1 if self.number is None else self.number,
            payload=payload,
            at=self._stamp(),
            adamw=step.adamw,
        )

    def _advise(self, view: View, refused: list[Verdict]) -> None:
        """Leave a note on a round that could commit nothing, once. Whether it is written changes nothing."""
        body = {"refused": [asdict(verdict) for verdict in refused]}
        for number in count():
            try:
                records.write(
                    self.run.store,
                    names.advisory(view.layout.index, view.head.version, number),
                    body,
                )
            except VersionTaken:
                continue  # another note on this round
            return

    def _snapshot(self, *, is_last: bool) -> None:
        """Write the version vector once every fragment has advanced; at the end, once anything has."""
        versions = tuple(view.head.version for view in self._views)
        has_moved = any if is_last else all
        if not has_moved(new > old for new, old in zip(versions, self._named, strict=True)):
            return  # nor since a later one that somebody else may have written
        kept = records.read_snapshots(self.run.store)
        self._named = kept[-1][0].versions if kept else self._named
        if not has_moved(new > old for new, old in zip(versions, self._named, strict=True)):
            return
        snapshot = Snapshot(
            number=kept[-1][0].number + 1 if kept else 0,
            versions=versions,
            digests=tuple(view.digest for view in self._views),
            merged_tokens=sum(view.head.merged_tokens for view in self._views) // len(self._views),
            previous=kept[-1][1] if kept else "",
        )
        try:
            records.write(self.run.store, names.snapshot(snapshot.number), snapshot.to_json())
        except VersionTaken:
            # Another synchronizer named the same moment, or the one before: the last moment must be named.
            if is_last:
                self._snapshot(is_last=True)
