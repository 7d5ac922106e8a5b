"""Claims about a learner's account of its own tokens, told as stories whose sums are done by hand."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import pytest

from islands.contributions import Consumed, Tally, after_merge
from islands.ledger import (
    FragmentClock,
    LearnerRecord,
    after_adoption,
    after_copy,
    after_replacement,
    after_return,
    after_step,
    can_keep_progress,
    check_link,
    record_from_json,
)
from islands.sealing import seal, unseal
from islands.types import Position

STEP_TOKENS = 10
PERIOD = 6


def opened(version: int = 0, start: Position = Position(0, 0)) -> FragmentClock:
    return FragmentClock(version, f"digest-{version}", start, steps_to_push=PERIOD)


def stepped(clock: FragmentClock, num_steps: int) -> FragmentClock:
    for _ in range(num_steps):
        clock = after_step(clock, STEP_TOKENS)
    return clock


def copied(clock: FragmentClock, step: int) -> FragmentClock:
    return after_copy(clock, Position(0, step), next_push_steps=PERIOD)


def adopted(
    clock: FragmentClock, step: int, *, version: int = 1, keeps_local: bool = False
) -> FragmentClock:
    return after_adoption(
        clock,
        Position(0, step),
        version=version,
        digest=f"digest-{version}",
        keeps_local=keeps_local,
        next_push_steps=PERIOD,
    )


def fates(clock: FragmentClock) -> tuple[int, int, int, int]:
    """Return (offered, overwritten, rolled back, open)."""
    return clock.offered, clock.overwritten, clock.rolled_back, clock.open_tokens


# --- stories


def test_a_step_opens_tokens_and_brings_the_next_push_nearer() -> None:
    clock = stepped(opened(), 2)
    assert (clock.open_tokens, clock.open_steps, clock.steps_to_push) == (20, 2, PERIOD - 2)
    assert fates(clock) == (0, 0, 0, 20)


def test_a_copy_covers_the_whole_open_interval() -> None:
    clock = copied(stepped(opened(), 3), 3)
    assert (clock.copied_at, clock.copied_tokens, clock.copied_steps) == (Position(0, 3), 30, 3)
    assert clock.steps_to_push == PERIOD
    assert fates(clock) == (0, 0, 0, 30)
    assert clock.all_offered == 30


def test_what_is_trained_after_the_copy_is_overwritten_at_adoption() -> None:
    # 3 steps, copy, 2 more steps while it travels, adoption.
    clock = adopted(stepped(copied(stepped(opened(), 3), 3), 2), 5)
    assert fates(clock) == (30, 20, 0, 0)
    assert clock.trained == 50
    assert (clock.start, clock.base_version, clock.base_digest) == (Position(0, 5), 1, "digest-1")
    assert (clock.copied_at, clock.copied_tokens, clock.open_steps) == (None, 0, 0)


def test_with_a_mix_what_is_trained_after_the_copy_lives_on() -> None:
    clock = adopted(stepped(copied(stepped(opened(), 3), 3), 2), 5, keeps_local=True)
    assert fates(clock) == (30, 0, 0, 20)
    assert (clock.start, clock.open_steps) == (Position(0, 3), 2)
    # Two steps more, and the next copy covers (3, 7]: four steps.
    clock = copied(stepped(clock, 2), 7)
    assert (clock.copied_tokens, clock.copied_steps) == (40, 4)
    assert clock.all_offered == 70 == clock.trained


def test_adoption_before_any_copy_overwrites_all_or_nothing() -> None:
    clock = stepped(opened(), 4)
    assert fates(adopted(clock, 4)) == (0, 40, 0, 0)
    mixed = adopted(clock, 4, keeps_local=True)
    assert fates(mixed) == (0, 0, 0, 40)
    assert mixed.start == Position(0, 0)


def test_two_copies_of_one_interval_count_once() -> None:
    # The second copy covers what the first did, and two steps more.
    clock = copied(stepped(copied(stepped(opened(), 3), 3), 2), 5)
    assert (clock.copied_tokens, clock.all_offered) == (50, 50)
    assert fates(adopted(stepped(clock, 1), 6)) == (50, 10, 0, 0)


def test_a_copy_dropped_unsent_stays_offered_and_is_counted_apart() -> None:
    clock = adopted(copied(stepped(opened(), 3), 3), 3)
    dropped = after_replacement(clock, 30)
    assert dropped.replaced == 30
    assert fates(dropped) == fates(clock) == (30, 0, 0, 0)


def test_a_learner_that_returns_keeps_the_progress_of_its_checkpoint() -> None:
    # Checkpoint at step 2; the last link is from step 5; nothing happened to the fragment between.
    saved = stepped(opened(), 2)
    last = stepped(saved, 3)
    assert can_keep_progress(saved, last, head_version=0)
    clock = after_return(saved, last, Position(1, 5), keeps=True)
    assert fates(clock) == (0, 0, 30, 20)
    assert clock.trained == last.trained == 50
    assert clock.start == Position(0, 0)
    assert clock.steps_to_push == saved.steps_to_push == PERIOD - 2


def test_a_copy_that_the_checkpoint_knows_does_not_stand_in_the_way() -> None:
    saved = copied(stepped(opened(), 2), 2)
    last = stepped(saved, 3)
    assert can_keep_progress(saved, last, head_version=0)
    clock = after_return(saved, last, Position(1, 5), keeps=True)
    assert fates(clock) == (0, 0, 30, 20)
    assert (clock.copied_at, clock.copied_tokens) == (Position(0, 2), 20)


def test_a_learner_that_returns_without_its_progress_has_nothing_open() -> None:
    # 2 steps, checkpoint, 2 steps, copy, 1 step, death: the copy may yet be merged.
    saved = stepped(opened(), 2)
    last = stepped(copied(stepped(saved, 2), 4), 1)
    assert not can_keep_progress(saved, last, head_version=0)
    clock = after_return(saved, last, Position(1, 5), keeps=False)
    assert fates(clock) == (40, 0, 10, 0)
    assert clock.trained == 50
    assert (clock.start, clock.copied_at) == (Position(1, 5), None)
    # What follows at once: the head is adopted. Nothing is lost twice.
    assert fates(adopted(clock, 5, version=0)) == (40, 0, 10, 0)


@pytest.mark.parametrize(
    ("change", "head_version"),
    [
        (lambda c: c, 1),  # the head has moved
        (lambda c: adopted(c, 3), 1),  # a version was adopted
        (lambda c: adopted(c, 3), 0),
        (lambda c: copied(c, 3), 0),  # a copy was made
        (lambda c: replace(c, start=Position(0, 1)), 0),  # a new interval was opened
    ],
)
def test_progress_is_kept_only_where_nothing_has_happened_since(
    change: Callable[[FragmentClock], FragmentClock], head_version: int
) -> None:
    saved = stepped(opened(), 2)
    assert not can_keep_progress(saved, change(stepped(saved, 1)), head_version)


# --- the two ends together


@dataclass
class Push:
    """A copy on its way: what a contribution says of itself."""

    start: Position
    stop: Position
    num_tokens: int
    num_steps: int
    offered_before: int

    def consumed(self, version: int) -> Consumed:
        return Consumed(
            name="",
            digest="",
            learner="east",
            start=self.start,
            stop=self.stop,
            num_tokens=self.num_tokens,
            num_steps=self.num_steps,
            offered_before=self.offered_before,
            staleness=0,
            weight=1.0,
            norm=1.0,
            step_seconds=1.0,
        )


@dataclass
class World:
    """One learner and a synchronizer that merges whatever acceptable copy chance picks."""

    generator: random.Random
    clock: FragmentClock = field(default_factory=opened)
    position: Position = Position(0, 0)
    trained: int = 0
    head: int = 0
    pushes: list[Push] = field(default_factory=list)
    tallies: dict[str, Tally] = field(default_factory=dict)
    merged: list[Push] = field(default_factory=list)
    saved: FragmentClock = field(default_factory=opened)

    def step(self) -> None:
        num_tokens = self.generator.randint(1, 9)
        self.position = Position(self.position.incarnation, self.position.step + 1)
        self.trained += num_tokens
        self.clock = after_step(self.clock, num_tokens)

    def copy(self) -> None:
        if self.clock.open_tokens > self.clock.copied_tokens:
            clock = self.clock
            self.pushes.append(
                Push(clock.start, self.position, clock.open_tokens, clock.open_steps, clock.offered)
            )
            self.clock = after_copy(clock, self.position, next_push_steps=PERIOD)

    def lose(self) -> None:
        if self.pushes:
            self.pushes.pop(self.generator.randrange(len(self.pushes)))

    def merge(self) -> None:
        tally = self.tallies.get("east", Tally())
        good = [
            push
            for push in self.pushes
            if push.start >= tally.consumed_to and push.offered_before >= tally.offered
        ]
        if good:
            chosen = self.generator.choice(good)
            self.head += 1
            self.merged.append(chosen)
            entry = chosen.consumed(self.head)
            self.tallies = after_merge(self.tallies, [entry], [], version=self.head)

    def others_merge(self) -> None:
        self.head += 1

    def adopt(self) -> None:
        if self.head > self.clock.base_version:
            self.clock = after_adoption(
                self.clock,
                self.position,
                version=self.head,
                digest="",
                keeps_local=self.generator.random() < 0.5,
                next_push_steps=PERIOD,
            )

    def save(self) -> None:
        self.saved = self.clock

    def die_and_return(self) -> None:
        """The last link is the present clock: what was trained after a last link is not in any account."""
        self.position = Position(self.position.incarnation + 1, self.position.step)
        keeps = can_keep_progress(self.saved, self.clock, self.head)
        self.clock = after_return(self.saved, self.clock, self.position, keeps=keeps)
        if not keeps:
            self.clock = after_adoption(
                self.clock,
                self.position,
                version=self.head,
                digest="",
                keeps_local=False,
                next_push_steps=PERIOD,
            )
        self.saved = self.clock

    def check(self) -> None:
        clock, tally = self.clock, self.tallies.get("east", Tally())
        assert sum(fates(clock)) == clock.trained == self.trained
        assert min(fates(clock)) >= 0
        assert 0 <= clock.copied_tokens <= clock.open_tokens
        assert 0 <= clock.copied_steps <= clock.open_steps
        assert tally.merged == sum(push.num_tokens for push in self.merged)
        # At the mark both ends agree: what was offered so far was merged or passed over.
        assert 0 <= tally.merged <= tally.offered <= clock.all_offered
        assert tally.merged + tally.passed_over == tally.offered
        for earlier, later in zip(self.merged, self.merged[1:], strict=False):
            assert earlier.stop <= later.start
            assert earlier.offered_before + earlier.num_tokens <= later.offered_before


@pytest.mark.parametrize("seed", range(40))
def test_every_token_has_one_fate_and_none_is_merged_twice(seed: int) -> None:
    generator = random.Random(seed)
    world = World(generator)
    operations = {
        World.step: 8,
        World.copy: 3,
        World.merge: 3,
        World.others_merge: 1,
        World.adopt: 3,
        World.lose: 1,
        World.save: 1,
        World.die_and_return: 1,
    }
    record: LearnerRecord | None = None
    for operation in generator.choices(list(operations), list(operations.values()), k=300):
        operation(world)
        world.check()
        link = LearnerRecord("east", world.position, world.trained, 0, (world.clock,))
        assert check_link(link, record) is None
        record = link
    assert len(world.merged) > 5
    assert world.clock.rolled_back > 0


# --- links


def a_link(**changes: Any) -> LearnerRecord:
    """Return a link at step 6: of 60 tokens 30 are offered, 10 overwritten, 20 open, 10 of these copied."""
    clock = adopted(stepped(copied(stepped(opened(), 3), 3), 1), 4)
    clock = stepped(copied(stepped(clock, 1), 5), 1)
    assert fates(clock) == (30, 10, 0, 20)
    assert clock.copied_tokens == 10
    clock = replace(clock, **{key: value for key, value in changes.items() if hasattr(clock, key)})
    rest = {key: value for key, value in changes.items() if not hasattr(clock, key)}
    return replace(LearnerRecord("east", Position(0, 6), 60, 12, (clock,), "before"), **rest)


def next_link() -> LearnerRecord:
    link = a_link()
    clock = replace(stepped(link.clocks[0], 1), replaced=5)
    return replace(link, position=Position(0, 7), trained=70, cursor=14, clocks=(clock,))


def test_a_sound_link_and_its_sound_successor_pass() -> None:
    assert check_link(a_link(), None) is None
    assert check_link(next_link(), a_link()) is None
    assert check_link(a_link(), a_link()) is None


@pytest.mark.parametrize("name", ["offered", "overwritten", "rolled_back", "open_tokens"])
@pytest.mark.parametrize("change", [1, -1])
def test_a_tampered_fate_does_not_add_up(name: str, change: int) -> None:
    value = getattr(a_link().clocks[0], name) + change
    assert check_link(a_link(**{name: value}), None) is not None


def test_a_tampered_total_does_not_add_up() -> None:
    found = check_link(replace(a_link(), trained=61), None)
    assert found == "fragment 0: 60 tokens have a fate, 61 were trained"


@pytest.mark.parametrize("copied_tokens", [-1, 21])
def test_a_copy_of_more_than_its_interval_is_found(copied_tokens: int) -> None:
    found = check_link(a_link(copied_tokens=copied_tokens), None)
    assert found == f"fragment 0: a copy of {copied_tokens} tokens in an interval of 20"


@pytest.mark.parametrize("name", ["offered", "overwritten", "rolled_back"])
def test_a_negative_total_is_found_although_the_sum_is_right(name: str) -> None:
    clock = a_link().clocks[0]
    value = getattr(clock, name)
    changed = {name: -1, "open_tokens": clock.open_tokens + value + 1}
    assert check_link(a_link(**changed), None) == f"fragment 0: {name} is -1"


@pytest.mark.parametrize("name", ["offered", "overwritten", "rolled_back"])
def test_a_total_that_shrank_is_found_although_the_sum_is_right(name: str) -> None:
    earlier, clock = a_link(), a_link().clocks[0]
    earlier = a_link(rolled_back=5, open_tokens=15)
    clock = earlier.clocks[0]
    moved = {name: getattr(clock, name) - 1, "open_tokens": clock.open_tokens + 1}
    found = check_link(replace(earlier, clocks=(replace(clock, **moved),)), earlier)
    assert found is not None
    assert f"{name} shrank" in found


@pytest.mark.parametrize("name", ["base_version", "replaced"])
def test_a_count_that_shrank_is_found(name: str) -> None:
    earlier = a_link(replaced=7)
    smaller = {name: getattr(earlier.clocks[0], name) - 1}
    later = replace(earlier, clocks=(replace(earlier.clocks[0], **smaller),))
    found = check_link(later, earlier)
    assert found is not None
    assert f"{name} shrank" in found


@pytest.mark.parametrize(
    "changes", [{"position": Position(0, 5)}, {"cursor": 11}, {"position": Position(-1, 99)}]
)
def test_a_learner_that_runs_backwards_is_found(changes: dict[str, Any]) -> None:
    assert check_link(replace(a_link(), **changes), a_link()) is not None
    shorter = stepped(opened(), 5)
    assert (
        check_link(LearnerRecord("east", Position(0, 9), 50, 99, (shorter,)), a_link()) is not None
    )


def test_another_number_of_fragments_is_found() -> None:
    link = a_link()
    assert check_link(replace(link, clocks=link.clocks * 2), link) is not None
    assert check_link(replace(link, clocks=()), link) is not None


def test_a_record_survives_being_written_down() -> None:
    link = replace(a_link(), clocks=(a_link().clocks[0], opened(3, Position(2, 7))))
    body, _ = unseal("x", seal(link.to_json())[0])
    assert record_from_json(body) == link
    assert record_from_json(asdict(link)) == link
