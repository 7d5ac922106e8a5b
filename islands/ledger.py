"""The learner's side of the ledger: what became of every token it trained, per fragment.

Knows counts and positions; must not know arrays or a store. A token of one fragment is in exactly one place:

    trained = offered + overwritten + rolled_back + open

    offered       covered by a copy made for pushing (the greatest copy of its interval). The synchronizer's side says
                  what became of these: merged, or not (see contributions.py); `replaced` counts those of them whose
                  copy was dropped before it was sent
    overwritten   trained after the copy, and lost when a version was adopted over them
    rolled_back   lost because the learner died and came back from an older checkpoint
    open          in the present interval, not copied yet

An interval opens when a version is adopted and closes when the next one is. With a mix (alpha > 0) what was trained
after the copy lives on, so the next interval opens where the copy was made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from islands.parsing import parse
from islands.types import Position

# What only grows, from zero.
TOTALS = ("base_version", "offered", "overwritten", "rolled_back", "replaced", "replaced_copies")


@dataclass(frozen=True, slots=True)
class FragmentClock:
    """One learner's account of one fragment. Counts are in tokens unless the name says steps.

    Attributes:
        base_version, base_digest: the version it anchors on.
        start: where the open interval begins.
        open_tokens, open_steps: trained in the open interval, copied or not.
        copied_at: position of the interval's greatest copy, None before the first.
        copied_tokens, copied_steps: what that copy covers.
        steps_to_push: steps to train before the next push.
        offered, overwritten, rolled_back, replaced: running totals of closed intervals.
        replaced_copies: how many copies `replaced` is the sum of.
    """

    base_version: int
    base_digest: str
    start: Position
    steps_to_push: int
    open_tokens: int = 0
    open_steps: int = 0
    copied_at: Position | None = None
    copied_tokens: int = 0
    copied_steps: int = 0
    offered: int = 0
    overwritten: int = 0
    rolled_back: int = 0
    replaced: int = 0
    replaced_copies: int = 0

    @property
    def trained(self) -> int:
        """Tokens accounted for: must equal what the learner has trained."""
        return self.offered + self.overwritten + self.rolled_back + self.open_tokens

    @property
    def all_offered(self) -> int:
        """Tokens ever covered by a copy, the open interval's included."""
        return self.offered + self.copied_tokens


@dataclass(frozen=True, slots=True)
class LearnerRecord:
    """A link of a learner's chain, written into every contribution, checkpoint and farewell.

    `trained`: tokens so far, over all incarnations. `cursor`: samples taken from the learner's shard. `previous`:
    digest of the learner's last written link, "" for the first. `bytes_up`, `bytes_down`: payload bytes of
    contributions it has pushed, merged or not, this link's included, and of versions it has fetched, over all
    incarnations; for people. What a killed learner moved after its last link is in no account.
    """

    learner: str
    position: Position
    trained: int
    cursor: int
    clocks: tuple[FragmentClock, ...]
    previous: str = ""
    bytes_up: int = 0
    bytes_down: int = 0

    @property
    def replaced_copies(self) -> int:
        """Copies dropped unsent for a later interval's, over all fragments."""
        return sum(clock.replaced_copies for clock in self.clocks)

    @property
    def replaced_tokens(self) -> int:
        """The tokens of those copies: each counts once per fragment."""
        return sum(clock.replaced for clock in self.clocks)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def record_from_json(value: Mapping[str, Any]) -> LearnerRecord:
    """Return the record that `LearnerRecord.to_json` wrote.

    Raises:
        ValueError: it holds something else.
    """
    record: LearnerRecord = parse(LearnerRecord, value)
    return record


def after_step(clock: FragmentClock, num_tokens: int) -> FragmentClock:
    """Return the clock one inner step later."""
    return replace(
        clock,
        open_tokens=clock.open_tokens + num_tokens,
        open_steps=clock.open_steps + 1,
        steps_to_push=clock.steps_to_push - 1,
    )


def after_copy(clock: FragmentClock, position: Position, *, next_push_steps: int) -> FragmentClock:
    """Return the clock after a copy for pushing: it covers the whole open interval."""
    return replace(
        clock,
        copied_at=position,
        copied_tokens=clock.open_tokens,
        copied_steps=clock.open_steps,
        steps_to_push=next_push_steps,
    )


def after_adoption(
    clock: FragmentClock,
    position: Position,
    *,
    version: int,
    digest: str,
    keeps_local: bool,
    next_push_steps: int,
) -> FragmentClock:
    """Return the clock after a newer version was adopted.

    `keeps_local` (alpha > 0): what was trained after the copy stays in the open interval; otherwise it is overwritten.
    """
    uncopied, steps = clock.open_tokens - clock.copied_tokens, clock.open_steps - clock.copied_steps
    based = replace(
        clock,
        base_version=version,
        base_digest=digest,
        offered=clock.offered + clock.copied_tokens,
        copied_at=None,
        copied_tokens=0,
        copied_steps=0,
        steps_to_push=next_push_steps,
    )
    if keeps_local:
        return replace(
            based, start=clock.copied_at or clock.start, open_tokens=uncopied, open_steps=steps
        )
    return replace(
        based, start=position, open_tokens=0, open_steps=0, overwritten=clock.overwritten + uncopied
    )


def after_new_period(clock: FragmentClock, *, old_steps: int, new_steps: int) -> FragmentClock:
    """Return the clock under another period: what is left until the next push keeps its share of it."""
    left = max(0, clock.steps_to_push)
    return replace(clock, steps_to_push=-(-left * new_steps // old_steps))


def after_replacement(clock: FragmentClock, num_tokens: int) -> FragmentClock:
    """Return the clock after a copy of an earlier interval, `num_tokens` long, was dropped unsent."""
    return replace(
        clock, replaced=clock.replaced + num_tokens, replaced_copies=clock.replaced_copies + 1
    )


def can_keep_progress(saved: FragmentClock, last: FragmentClock, head_version: int) -> bool:
    """Say whether a returning learner may go on from its checkpoint's values of a fragment.

    Only if nothing has happened to it since: the same base, still the head, and no copy made after the checkpoint.
    Otherwise that copy may yet be merged, and going on from the checkpoint would count its work twice.
    """
    return (
        saved.base_version == last.base_version == head_version
        and saved.start == last.start
        and saved.copied_at == last.copied_at
    )


def after_return(
    saved: FragmentClock, last: FragmentClock, position: Position, *, keeps: bool
) -> FragmentClock:
    """Return the clock of a learner's next incarnation.

    Args:
        saved: the clock in the checkpoint it starts from.
        last: the clock in the newest link its predecessors wrote; its totals are the truth.
        position: (new incarnation, last link's step).
        keeps: whether the checkpoint's progress in the fragment is kept; if not, the caller adopts the head at once
            and calls `after_adoption`, for which this clock has nothing left open.
    """
    if keeps:
        lost = last.open_tokens - saved.open_tokens
        return replace(
            last,
            open_tokens=saved.open_tokens,
            open_steps=saved.open_steps,
            steps_to_push=saved.steps_to_push,
            rolled_back=last.rolled_back + lost,
        )
    uncopied = last.open_tokens - last.copied_tokens
    return replace(
        last,
        start=position,
        open_tokens=0,
        open_steps=0,
        copied_at=None,
        copied_tokens=0,
        copied_steps=0,
        offered=last.offered + last.copied_tokens,
        rolled_back=last.rolled_back + uncopied,
    )


def check_link(record: LearnerRecord, earlier: LearnerRecord | None) -> str | None:
    """Return what is wrong with a link, alone or as a successor of `earlier`; None if nothing is.

    Totals must add up, and none of them may ever shrink.
    """
    for p, clock in enumerate(record.clocks):
        if negative := [field for field in TOTALS if getattr(clock, field) < 0]:
            return f"fragment {p}: {negative[0]} is {getattr(clock, negative[0])}"
        if clock.trained != record.trained:
            return (
                f"fragment {p}: {clock.trained} tokens have a fate, {record.trained} were trained"
            )
        if not 0 <= clock.copied_tokens <= clock.open_tokens:
            return f"fragment {p}: a copy of {clock.copied_tokens} tokens in an interval of {clock.open_tokens}"
    if earlier is None:
        return None
    if record.position < earlier.position or record.trained < earlier.trained:
        return f"{record.position} with {record.trained} tokens follows {earlier.position} with {earlier.trained}"
    if record.cursor < earlier.cursor:
        return f"{record.cursor} samples were taken, {earlier.cursor} before"
    if len(record.clocks) != len(earlier.clocks):
        return f"has {len(record.clocks)} fragments, had {len(earlier.clocks)} before"
    return _first_shrunk(record.clocks, earlier.clocks)


def _first_shrunk(now: Sequence[FragmentClock], before: Sequence[FragmentClock]) -> str | None:
    for p, (new, old) in enumerate(zip(now, before, strict=True)):
        for field in TOTALS:
            if getattr(new, field) < getattr(old, field):
                return f"fragment {p}: {field} shrank from {getattr(old, field)} to {getattr(new, field)}"
    return None
