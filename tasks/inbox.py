"""One fragment as the synchronizer sees it: its head, its inbox, its estimates. No torch.

Reads and judges; must not fold or publish anything. Times are the synchronizer's own monotonic seconds, given as
arguments; everything else can be read again from the store.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from islands import names
from islands.contributions import Contribution, Lineage, Tally, Verdict, judge, newest_per_learner
from islands.fragments import layout_digest, own_period, period_of_fastest
from islands.quorum import Arrival, Expectation, Round, first_merge_at
from islands.retention import is_too_old
from islands.types import DamagedObject, FragmentLayout
from islands.versions import Commit
from tasks import records
from tasks.runs import Run, refreshed

# While the rate warms up, deltas grow tenfold within a few versions; a median means something after these.
VERSIONS_WITHOUT_NORM_LIMIT = 8
# Rounds in a row a learner may miss and still be waited for.
MISSES_UNTIL_SILENT = 2
# A learner is expected after the median of so many responses: one round in which a machine stood still must not decide.
RESPONSES_KEPT = 3


@dataclass(frozen=True, slots=True)
class Members:
    """Which of the run's islands take part, as the store says.

    `incarnations`: learner -> its newest one. `listed`: contributions those keep acceptable. `departed`: who has left.
    """

    incarnations: Mapping[str, int]
    listed: frozenset[str]
    departed: frozenset[str]


class Roster:
    """Reads who takes part; what an incarnation lists is read once, it never changes."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._listed: dict[tuple[str, int], frozenset[str]] = {}

    def steer(self, run: Run) -> None:
        """Go on with the islands of this run, the same one opened later."""
        self._run = run

    def members(self) -> Members:
        """Return the run's islands as the store has them now."""
        store = self._run.store
        newest, departed = records.look_at_learners(store)
        if newest.keys() - self._islands():  # perhaps it joined, and the settings at hand are older
            self._run = refreshed(self._run)
        islands = self._islands()
        incarnations = {name: n for name, n in newest.items() if name in islands}
        listed: set[str] = set()
        for learner, number in incarnations.items():
            if (learner, number) not in self._listed:
                name = names.incarnation(learner, number)
                body, _ = records.require(store, name)
                self._listed[learner, number] = records.parsed(
                    name, lambda body: frozenset(body["listed"]), body
                )
            listed |= self._listed[learner, number]
        return Members(incarnations, frozenset(listed), departed)

    def _islands(self) -> set[str]:
        return {island.name for island in self._run.config.members}


def open_views(run: Run) -> list[View]:
    """Return a view of every fragment; heads are looked for from the newest snapshot on."""
    known = records.known_versions(run.store, len(run.layouts))
    return [View(run, layout, version) for layout, version in zip(run.layouts, known, strict=True)]


class View:
    """What is known of one fragment; `known` is a version that exists.

    Attributes:
        layout: the fragment.
        head: its newest version.
        offers: name -> (contribution, digest) of what is in the inbox and not settled.
        damaged: name -> verdict of what cannot be read or folded.
        opened_at: when this synchronizer published the head; None for a head that was found.
    """

    def __init__(self, run: Run, layout: FragmentLayout, known: int = 0) -> None:
        self.layout = layout
        self.offers: dict[str, tuple[Contribution, str]] = {}
        self.damaged: dict[str, Verdict] = {}
        self._run = run
        self.opened_at: float | None = None
        self._first_seen: dict[str, float] = {}
        # Seconds from opening a head to a learner's contribution, of its last rounds.
        self._responses: dict[str, list[float]] = {}
        self._missed: dict[str, int] = {}
        # Once settled, always so: not looked at again while it is there.
        self._settled: set[str] = set()
        # Name of what came too old -> first version not searched for its refusal.
        self._looked_from: dict[str, int] = {}
        self.head, digest = records.find_head(run.store, layout.index, known)
        self._digests = {self.head.version: digest}
        self._refused = {self.head.version: {verdict.name for verdict in self.head.refused}}
        self.steer(run)

    def steer(self, run: Run) -> None:
        """Go on under changed settings; with a larger `max_staleness` verdicts depend on older versions too."""
        oldest = max(0, self.head.version - run.config.sync.max_staleness - 2)
        for version in set(range(oldest, self.head.version)) - self._digests.keys():
            commit, digest = records.require_commit(run.store, self.layout.index, version)
            self._digests[version] = digest
            self._refused[version] = {verdict.name for verdict in commit.refused}
        self._run = run
        self._settled.clear()

    @property
    def digest(self) -> str:
        """Digest of the head's commit."""
        return self._digests[self.head.version]

    def estimates(self) -> dict[str, Any]:
        """Return what the store does not hold, as plain JSON values."""
        return {
            "opened_at": self.opened_at,
            "first_seen": self._first_seen,
            "responses": self._responses,
            "missed": self._missed,
        }

    def restore_estimates(self, known: Mapping[str, Any]) -> None:
        """Go on with what `estimates` returned."""
        self.opened_at = known["opened_at"]
        self._first_seen = dict(known["first_seen"])
        self._responses = {name: list(row) for name, row in known["responses"].items()}
        self._missed = dict(known["missed"])

    # --- looking ---

    def refresh(self) -> None:
        """Catch up with versions somebody else published."""
        while (
            later := records.read_commit(self._run.store, self.layout.index, self.head.version + 1)
        ) is not None:
            self._advance(*later, opened_at=None)

    def note_merge(self, commit: Commit, digest: str, members: Members, *, now: float) -> None:
        """Take in a version this synchronizer has just published."""
        self._advance(commit, digest, opened_at=now)
        present = {entry.learner for entry in commit.consumed}
        for learner in members.incarnations:
            self._missed[learner] = 0 if learner in present else self._missed.get(learner, 0) + 1

    def observe(self, now: float) -> None:
        """Bring offers, first-seen times and damage up to date with one listing of the inbox."""
        present = set()
        listed = self._run.store.list_names(f"inbox/f{self.layout.index:04d}/")
        self._settled.intersection_update(listed)
        for name in listed:
            if name in self._settled:
                continue
            key = names.parse_contribution(name)
            if key is None or self._is_settled(name, key):
                self._settled.add(name)
                continue
            present.add(name)
            if name not in self.offers and name not in self.damaged:
                self._receive(name, key)
            is_new = name not in self._first_seen
            self._first_seen.setdefault(name, now)
            if is_new and name in self.offers:
                self._note_response(key, now)
        self.offers = {name: offer for name, offer in self.offers.items() if name in present}
        self.damaged = {name: verdict for name, verdict in self.damaged.items() if name in present}
        self._first_seen = {
            name: seen for name, seen in self._first_seen.items() if name in present
        }
        self._looked_from = {
            name: version for name, version in self._looked_from.items() if name in present
        }

    def note_damage(self, name: str) -> None:
        """Take an offer out of the round: its payload is not what its header says."""
        offer, digest = self.offers[name]
        self.damaged[name] = Verdict(name, digest, offer.learner, "damaged", offer.announced_tokens)

    # --- judging ---

    def lineage(self, members: Members) -> Lineage:
        """Return what verdicts depend on."""
        sync, head = self._run.config.sync, self.head
        is_known = head.median_norm > 0 and head.version >= VERSIONS_WITHOUT_NORM_LIMIT
        return Lineage(
            head_version=head.version,
            digests=self._digests,
            tallies=head.tallies,
            incarnations=members.incarnations,
            listed=members.listed,
            layout=layout_digest(self.layout),
            codec=sync.codec,
            num_tensors=len(self.layout.tensors),
            # Where all wait for each other, a refusal would stop them all, and work of a turn before counts no more.
            max_staleness=0 if sync.blocks else sync.max_staleness,
            outlier_factor=math.inf if sync.blocks else sync.outlier_factor,
            median_norm=head.median_norm if is_known else 0.0,
            quarantined=frozenset(self._run.config.quarantine),
        )

    def acceptable(self, members: Members) -> dict[str, Contribution]:
        """Return the contribution of each learner that may be merged now, ordered by learner."""
        lineage, is_final = self.lineage(members), not self._counting(members)
        offers = [
            offer
            for name, (offer, _) in self.offers.items()
            if name not in self.damaged
            and not self._is_recorded(name)
            and judge(offer, lineage) is None
        ]
        return newest_per_learner(
            [offer for offer in offers if is_final or self._counts_when_cold(offer)]
        )

    def quorum_stamp(self) -> float:
        """Return when enough learners had something here, by their own stamps; NaN while there are too few."""
        first: dict[str, float] = {}
        for offer, _ in self.offers.values():
            at = offer.telemetry.at
            first[offer.learner] = min(at, first.get(offer.learner, at))
        quorum = self._run.config.quorum
        return sorted(first.values())[quorum - 1] if len(first) >= quorum else math.nan

    def refusals(self, lineage: Lineage) -> list[Verdict]:
        """Return what is refused and no commit has recorded yet, ordered by name."""
        found = [verdict for name, verdict in self.damaged.items() if not self._is_recorded(name)]
        for name, (offer, digest) in self.offers.items():
            reason = judge(offer, lineage)
            if reason is not None and not self._is_recorded(name) and name not in self.damaged:
                found.append(Verdict(name, digest, offer.learner, reason, offer.announced_tokens))
        return sorted(found, key=lambda verdict: verdict.name)

    def round(
        self,
        members: Members,
        chosen: Mapping[str, Contribution],
        opened_elsewhere: Iterable[float | None] = (),
    ) -> Round:
        """Return what the next outer step's timing depends on; `opened_elsewhere`: `opened_at` of other fragments."""
        config = self._run.config
        counting = self._counting(members)
        period = self._period_seconds([offer.step_seconds for offer in chosen.values()])
        blocks = config.sync.blocks
        # Where all wait for each other, what one that left had sent stands for nobody who stays.
        num_needed = len({*counting, *chosen}) if blocks else min(config.quorum, len(counting))
        awaited = [
            name for name in counting if name in members.incarnations and not self._is_silent(name)
        ]
        return Round(
            arrivals=tuple(
                Arrival(name, self._first_seen[offer.name]) for name, offer in chosen.items()
            ),
            expected=tuple(Expectation(name, self._arrives_at(name)) for name in awaited),
            min_learners=max(1, num_needed),
            opened_at=self.opened_at,
            period_seconds=0.0 if blocks else period,
            grace_seconds=0.0 if blocks else config.sync.grace_fraction * period,
            not_before=-math.inf if blocks else self._not_before(opened_elsewhere, period),
            is_final=not counting,
        )

    def seconds_until_paced(self, now: float) -> float:
        """Return how long pace forbids a merge, as the head knows the learners' speeds; 0 where it owes none.

        Nobody need look before that: what came meanwhile is first seen when its merge may be due, which for every
        decision is as early as it could matter. (One that has become faster since is given its new pace a merge later.)
        """
        if self.opened_at is None or self._run.config.sync.blocks:
            return 0.0
        return max(0.0, self.opened_at + self._period_seconds() - now)

    # --- the details ---

    def _period_seconds(self, more: Iterable[float] = ()) -> float:
        """Return a period of the fastest learner by the head's step times and `more` of them."""
        known = [tally.step_seconds for tally in self.head.tallies.values()]
        return period_of_fastest(self._run.config.sync.period_steps, [*known, *more])

    def _not_before(self, opened_elsewhere: Iterable[float | None], period: float) -> float:
        if self.opened_at is not None:
            return -math.inf
        return first_merge_at(
            opened_elsewhere,
            period_steps=self._run.config.sync.period_steps,
            num_fragments=len(self._run.layouts),
            period_seconds=period,
        )

    def _counting(self, members: Members) -> list[str]:
        """Return the islands whose contributions may still come and count.

        Where none is left, what those that have left had pending is merged at once, though one in quarantine may still
        train: it ends with its own share, and the run with it.
        """
        away = members.departed | set(self._run.config.quarantine)
        return [island.name for island in self._run.config.members if island.name not in away]

    def _advance(self, commit: Commit, digest: str, *, opened_at: float | None) -> None:
        self.head, self.opened_at = commit, opened_at
        self._digests[commit.version] = digest
        self._refused[commit.version] = {verdict.name for verdict in commit.refused}
        # Forget as much as a synchronizer that starts now would not read: both must come to the same verdicts.
        oldest = commit.version - self._run.config.sync.max_staleness - 2
        self._digests = {
            version: digest for version, digest in self._digests.items() if version >= oldest
        }
        self._refused = {
            version: refused for version, refused in self._refused.items() if version >= oldest
        }

    def _is_recorded(self, name: str) -> bool:
        return any(name in refused for refused in self._refused.values())

    def _is_settled(self, name: str, key: names.ContributionKey) -> bool:
        """Say whether a contribution's fate is decided: merged, passed over, or recorded as too old long ago."""
        if key.stop <= self.head.tallies.get(key.learner, Tally()).consumed_to:
            return True
        is_old = is_too_old(key, self.head.version, self._run.config.sync.max_staleness)
        return is_old and self._was_refused(name, key)

    def _was_refused(self, name: str, key: names.ContributionKey) -> bool:
        """Say whether any version has recorded a refusal: those at hand do not reach back far enough."""
        start = self._looked_from.get(name, key.base_version + 1)
        store, head = self._run.store, self.head
        if records.find_refusal(store, name, head.fragment, range(start, head.version + 1)) is None:
            self._looked_from[name] = head.version + 1
            return False
        return True

    def _receive(self, name: str, key: names.ContributionKey) -> None:
        try:
            found = records.read_contribution(self._run.store, name)
        except DamagedObject:
            self.damaged[name] = Verdict(name, "", key.learner, "damaged", 0)
            return
        if found is not None:
            self.offers[name] = found

    def _note_response(self, key: names.ContributionKey, now: float) -> None:
        self._missed[key.learner] = 0
        if self.opened_at is None or key.base_version != self.head.version:
            return
        took = now - self.opened_at
        row = [*self._responses.get(key.learner, []), took]
        self._responses[key.learner] = row[-RESPONSES_KEPT:]

    def _counts_when_cold(self, offer: Contribution) -> bool:
        """A found head owes no pace; so that it is not stepped on a sliver, half a period is asked for instead."""
        sync = self._run.config.sync
        if self.opened_at is not None or self.head.version == 0 or sync.blocks:
            return True
        steps = own_period(
            sync.period_steps,
            step_seconds=offer.step_seconds,
            all_step_seconds=[tally.step_seconds for tally in self.head.tallies.values()],
        )
        return 2 * offer.num_steps >= steps

    def _is_silent(self, learner: str) -> bool:
        return self._missed.get(learner, 0) >= MISSES_UNTIL_SILENT

    def _arrives_at(self, learner: str) -> float | None:
        row = self._responses.get(learner)
        return None if not row or self.opened_at is None else self.opened_at + median(row)
