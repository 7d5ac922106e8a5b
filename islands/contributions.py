"""Contributions: what a header says, whether it counts, and what a commit keeps of it.

Knows headers, positions and the lineage of one fragment; must not know arrays or a store. Every verdict is a pure
function of header and lineage, so the sender, the synchronizer and `verify` come to the same one.

The synchronizer's side of the ledger: a contribution says how many tokens its learner had offered before it
(`offered_before`) and how many it covers. Merging it moves that learner's mark to their sum; what lies between the old
mark and `offered_before` was offered but will never be merged (late, refused, superseded or dropped unsent). So

    offered up to the mark = merged + passed over
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field, replace
from typing import Any

from islands import names
from islands.ledger import LearnerRecord
from islands.merging import token_weight
from islands.parsing import parse
from islands.types import Manifest, Position, Weighting, manifest_from_json

# Counts up to here are exact as floats; a larger one is no count.
LARGEST_COUNT = 2**53
_COUNTS = ("num_tokens", "num_steps", "offered_before")


@dataclass(frozen=True, slots=True)
class Telemetry:
    """What a learner adds for people to look at. It decides nothing.

    Attributes:
        at: seconds since 1970 by the writer's own clock; the local driver writes base steps.
        loss: smoothed training loss at the copy, in nats per token; 0 while unknown.
        idle_share: share of the learner's thread, since its incarnation began, spent in neither steps nor adoptions.
        bytes_up, bytes_down: as the learner's account has them, this contribution included.
        replaced_copies, replaced_tokens: copies dropped unsent, over all fragments, as the account has them.
    """

    at: float = 0.0
    loss: float = 0.0
    idle_share: float = 0.0
    bytes_up: int = 0
    bytes_down: int = 0
    replaced_copies: int = 0
    replaced_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Contribution:
    """A header: one learner's delta of one fragment over one interval of its own steps.

    Attributes:
        base_version, base_digest: the version it is measured from.
        start, stop: it covers (start, stop]: from the adoption of the base to the copy.
        num_tokens, num_steps: trained in the interval.
        offered_before: tokens of this fragment the learner had offered in earlier intervals.
        norms: Euclidean norm of each tensor's delta, as decoded, in layout order.
        step_seconds: this learner's seconds per inner step, 0 while unknown.
        layout: digest of the fragment's layout.
        codec: how the payload's array "delta" is coded.
        payload: where the bytes are.
        record: the learner's account at the time of writing.
        telemetry: for people.
    """

    learner: str
    fragment: int
    base_version: int
    base_digest: str
    start: Position
    stop: Position
    num_tokens: int
    num_steps: int
    offered_before: int
    norms: tuple[float, ...]
    step_seconds: float
    layout: str
    codec: str
    payload: Manifest
    record: LearnerRecord
    telemetry: Telemetry = Telemetry()

    @property
    def name(self) -> str:
        return names.contribution(
            names.ContributionKey(self.fragment, self.learner, self.base_version, self.stop)
        )

    @property
    def norm(self) -> float:
        """Euclidean norm of the whole delta."""
        return math.hypot(*self.norms)

    @property
    def announced_tokens(self) -> int:
        """The tokens it says it covers; 0 where that is no count."""
        return self.num_tokens if _is_count(self.num_tokens) else 0

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "payload": self.payload.to_json()}


def contribution_from_json(value: Mapping[str, Any]) -> Contribution:
    """Return the contribution that `Contribution.to_json` wrote; counts may be any numbers, `judge` refuses those.

    Raises:
        ValueError: it holds something else.
    """
    counts: dict[str, Any] = {key: value.get(key) for key in _COUNTS}
    if strange := [key for key, count in counts.items() if type(count) not in (int, float)]:
        raise ValueError(f"{strange[0]} must be a number")
    offer: Contribution = parse(Contribution, {**value, **dict.fromkeys(_COUNTS, 0)})
    return replace(offer, payload=manifest_from_json(value["payload"]), **counts)


@dataclass(frozen=True, slots=True)
class Tally:
    """What the synchronizer has done with one learner's tokens of one fragment, up to a version.

    `consumed_to`: end of the last merged interval; `norm`: length of that delta. `offered`: the mark, = merged +
    passed_over. `refused` maps a reason to (contributions, tokens); refused tokens are also passed over, or still
    beyond the mark. `bytes_up`, `bytes_down`: what the learner had moved by the last merged one, as it said.
    """

    consumed_to: Position = Position(-1, 0)
    offered: int = 0
    merged: int = 0
    merges: int = 0
    step_seconds: float = 0.0
    norm: float = 0.0
    last_version: int = 0
    refused: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    bytes_up: int = 0
    bytes_down: int = 0

    @property
    def passed_over(self) -> int:
        return self.offered - self.merged


@dataclass(frozen=True, slots=True)
class Consumed:
    """A merged contribution as its version remembers it: enough to check it, and to replay the merge.

    `cosine`: of its delta to the others of this merge, see `islands/merging.py`; None where none is to be had.
    """

    name: str
    digest: str
    learner: str
    start: Position
    stop: Position
    num_tokens: int
    num_steps: int
    offered_before: int
    staleness: int
    weight: float
    norm: float
    step_seconds: float
    telemetry: Telemetry = Telemetry()
    cosine: float | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """A refused contribution as a version remembers it. `num_tokens` as announced."""

    name: str
    digest: str
    learner: str
    reason: str
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Lineage:
    """What a verdict on a contribution to one fragment depends on.

    Attributes:
        head_version: the fragment's newest version.
        digests: version -> digest of its commit, for the head and as many before it as may still be a base.
        tallies: learner -> what was done so far.
        incarnations: learner -> its newest incarnation.
        listed: names of contributions of older incarnations that stay acceptable.
        layout, codec, num_tensors: what a contribution must agree with.
        max_staleness: versions a base may lie behind the head.
        outlier_factor: a delta is refused if it is longer than this multiple of the running median, and of the
            learner's own last merged one: a learner that lags is still at a high rate when the others' have died down.
        median_norm: running median of merged deltas' norms; 0 while too little is known to refuse any.
        is_finished: the run has ended.
        quarantined: learners whose contributions do not count for the time being.
    """

    head_version: int
    digests: Mapping[int, str]
    tallies: Mapping[str, Tally]
    incarnations: Mapping[str, int]
    listed: frozenset[str]
    layout: str
    codec: str
    num_tensors: int
    max_staleness: int
    outlier_factor: float = math.inf
    median_norm: float = 0.0
    is_finished: bool = False
    quarantined: frozenset[str] = frozenset()


# Far beyond any training, and far enough from float32's end (3e38) for every sum an outer step makes.
LARGEST_NORM = 1e18


def judge(offer: Contribution, lineage: Lineage) -> str | None:
    """Return why a contribution may not be merged, or None if it may.

    Reasons, first match wins: "finished", "unknown" (no such learner), "layout", "tokens" (none, negative, not whole,
    or an interval that runs backwards), "non-finite", "fenced" (of an incarnation that has a successor),
    "quarantined" (its island is set apart), "future" (its base is ahead of the head), "stale", "lineage" (its base is
    no version of this run), "overlap" (part of its interval is merged already: a replay, a duplicate, or work that
    would count twice), "outsized".
    """
    head, base = lineage.head_version, offer.base_version
    tally = lineage.tallies.get(offer.learner, Tally())
    newest = lineage.incarnations.get(offer.learner, -1)
    is_fenced = offer.stop.incarnation < newest and offer.name not in lineage.listed
    is_sound = math.isfinite(offer.norm) and math.isfinite(offer.step_seconds)
    agrees = (offer.layout, offer.codec, len(offer.norms)) == (
        lineage.layout,
        lineage.codec,
        lineage.num_tensors,
    )
    broken = {
        "finished": lineage.is_finished,
        "unknown": newest < 0,
        "layout": not agrees,
        "tokens": not has_sound_counts(offer) or offer.start >= offer.stop,
        "non-finite": not is_sound,
        "fenced": is_fenced,
        "quarantined": offer.learner in lineage.quarantined,
        "future": base > head or offer.stop.incarnation > newest,
        "stale": head - base > lineage.max_staleness,
        "lineage": base <= head and lineage.digests.get(base) != offer.base_digest,
        "overlap": offer.start < tally.consumed_to or offer.offered_before < tally.offered,
        "outsized": offer.norm > min(_norm_limit(lineage, tally), LARGEST_NORM),
    }
    return next((reason for reason, is_broken in broken.items() if is_broken), None)


# What a refusal means to the learner that sent the work.
MEANINGS: Mapping[str, str] = {
    "finished": "the run has ended",
    "unknown": "no such learner has registered",
    "layout": "its tensors or their coding are not the run's",
    "tokens": "its counts are not whole and positive, or more than its account has offered",
    "non-finite": "its numbers are NaN or infinite",
    "fenced": "a later incarnation of the learner goes on in its place",
    "quarantined": "the island is in quarantine; `diloco quarantine RUN ISLAND --release` lets it count again",
    "future": "its base is a version that nobody published",
    "stale": "it came too late: its base lies more than sync.max_staleness versions behind",
    "lineage": "its base is no version of this run",
    "overlap": "part of its work is merged already",
    "outsized": "it is longer than sync.outlier_factor times what is usual",
    "damaged": "what lies in the store is not what was sent",
}


def _norm_limit(lineage: Lineage, tally: Tally) -> float:
    if lineage.median_norm <= 0:
        return math.inf
    return lineage.outlier_factor * max(lineage.median_norm, tally.norm)


def has_sound_counts(offer: Contribution) -> bool:
    """Say whether the counts are whole numbers in range, and what the learner's own account says it has offered.

    A header may hold NaN, or a number no float can; a mark set too high would shut the learner out for good.
    """
    return (
        all(_is_count(getattr(offer, key)) for key in _COUNTS)
        and min(offer.num_tokens, offer.num_steps) > 0
        and offer.offered_before + offer.num_tokens <= _all_offered(offer)
    )


def _all_offered(offer: Contribution) -> int:
    clocks = offer.record.clocks
    return clocks[offer.fragment].all_offered if offer.fragment < len(clocks) else -1


def _is_count(value: float) -> bool:
    return type(value) is int and 0 <= value <= LARGEST_COUNT


def consume(
    offer: Contribution, digest: str, head_version: int, weighting: Weighting = "quality"
) -> Consumed:
    """Return what a version made on `head_version` remembers of a contribution whose header has this digest.

    Its cosine is known only when all are folded.
    """
    return Consumed(
        name=offer.name,
        digest=digest,
        learner=offer.learner,
        start=offer.start,
        stop=offer.stop,
        num_tokens=offer.num_tokens,
        num_steps=offer.num_steps,
        offered_before=offer.offered_before,
        staleness=head_version - offer.base_version,
        weight=merge_weight(offer, head_version, weighting),
        norm=offer.norm,
        step_seconds=offer.step_seconds,
        telemetry=offer.telemetry if _is_readable(offer.telemetry) else Telemetry(),
    )


def smoothed(known: float, loss: float) -> float:
    """Return a running mean of training losses, 0 while unknown; one that is no number is passed over."""
    if not math.isfinite(loss):
        return known
    return loss if known == 0 else 0.95 * known + 0.05 * loss


def _is_readable(telemetry: Telemetry) -> bool:
    return all(math.isfinite(value) for value in astuple(telemetry))


def newest_per_learner(offers: Sequence[Contribution]) -> dict[str, Contribution]:
    """Return the acceptable contribution that reaches furthest, per learner, ordered by learner name."""
    best: dict[str, Contribution] = {}
    for offer in sorted(offers, key=lambda o: (o.learner, o.stop, o.base_version)):
        best[offer.learner] = offer
    return best


def merge_weight(offer: Contribution, head_version: int, weighting: Weighting = "quality") -> float:
    """Return the token weight, or the tokens alone, discounted by 1 / (1 + staleness).

    Source of weights by tokens: n_k of FedAvg, McMahan et al., arXiv:1602.05629, algorithm 1.
    """
    staleness = head_version - offer.base_version
    quality = token_weight(offer.num_tokens, offer.num_steps)
    return (quality if weighting == "quality" else offer.num_tokens) / (1 + staleness)


def after_merge(
    tallies: Mapping[str, Tally],
    consumed: Sequence[Consumed],
    refused: Sequence[Verdict],
    *,
    version: int,
) -> dict[str, Tally]:
    """Return the tallies of `version`: its parent's, moved on by what it consumed and refused; ordered by name."""
    result = dict(tallies)
    for entry in consumed:
        old = result.get(entry.learner, Tally())
        result[entry.learner] = replace(
            old,
            consumed_to=entry.stop,
            offered=entry.offered_before + entry.num_tokens,
            merged=old.merged + entry.num_tokens,
            merges=old.merges + 1,
            step_seconds=entry.step_seconds or old.step_seconds,
            norm=entry.norm,
            last_version=version,
            bytes_up=max(old.bytes_up, entry.telemetry.bytes_up),
            bytes_down=max(old.bytes_down, entry.telemetry.bytes_down),
        )
    for verdict in refused:
        old = result.get(verdict.learner, Tally())
        count, tokens = old.refused.get(verdict.reason, (0, 0))
        counted = {**old.refused, verdict.reason: (count + 1, tokens + max(0, verdict.num_tokens))}
        result[verdict.learner] = replace(old, refused=counted)
    return dict(sorted(result.items()))


def running_median(previous: float, norms: Sequence[float]) -> float:
    """Return a running estimate of the median norm: moved half-way to this round's median; 0 means unknown."""
    if not norms:
        return previous
    ordered = sorted(norms)
    middle = len(ordered) // 2
    median = ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2
    return median if previous <= 0 else 0.5 * (previous + median)
