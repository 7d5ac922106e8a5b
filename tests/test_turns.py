"""Whose turn it is, what is due, adopted and waited for: by hand."""

from __future__ import annotations

import pytest

from islands import turns
from islands.ledger import FragmentClock
from islands.types import Position

HERE = Position(0, 7)


def clock(version: int, *, left: int = 3, is_copied: bool = False) -> FragmentClock:
    """A fragment on `version`, `left` steps before its next copy or adoption, 32 tokens open."""
    at = HERE if is_copied else None
    return FragmentClock(version, "", Position(0, 0), left, 32, 2, at, 32 if is_copied else 0)


@pytest.mark.parametrize(
    ("versions", "turn"), [((0, 0, 0), 0), ((1, 0, 0), 1), ((1, 1, 0), 2), ((4, 4, 4), 0)]
)
def test_the_turn_follows_from_the_versions_adopted(versions: tuple[int, ...], turn: int) -> None:
    assert turns.in_turn([clock(version) for version in versions]) == turn


def test_versions_no_order_of_turns_can_make_lead_back_into_the_order() -> None:
    """Their sum, 3, would give the second one, which is ahead already."""
    assert turns.in_turn([clock(1), clock(2)]) == 0


def test_copies_are_made_the_overlap_before_the_turn() -> None:
    assert turns.steps_to_copy(period_steps=24, num_fragments=4, overlap_steps=2) == 4
    assert turns.steps_to_copy(period_steps=1, num_fragments=1, overlap_steps=0) == 1


def test_in_turn_only_the_one_whose_turn_it_is_is_due_and_only_once() -> None:
    late = [clock(1, left=0), clock(0, left=0)]
    assert turns.due(late, blocks=False) == [0, 1]
    assert turns.due(late, blocks=True) == [1]
    assert turns.due([clock(1, left=0), clock(0, left=1)], blocks=True) == []
    assert turns.due([clock(1, left=0), clock(0, left=0, is_copied=True)], blocks=True) == []


def test_a_learner_waits_from_its_turn_on_and_never_by_its_own_beat() -> None:
    under_way = [clock(1), clock(0, left=1, is_copied=True)]
    at_its_turn = [clock(1), clock(0, left=0, is_copied=True)]
    assert not turns.must_wait(under_way, blocks=True)
    assert turns.must_wait(at_its_turn, blocks=True)
    assert not turns.must_wait(at_its_turn, blocks=False)
    assert not turns.must_wait([clock(1), clock(0, left=0)], blocks=True)  # no copy: it trains on


def test_a_version_is_adopted_at_its_turn_and_not_before() -> None:
    arrived = {0: 2, 1: 1}
    under_way = [clock(1), clock(0, left=1, is_copied=True)]
    at_its_turn = [clock(1), clock(0, left=0, is_copied=True)]
    assert turns.adoptable(under_way, arrived, blocks=True) == []
    assert turns.adoptable(at_its_turn, arrived, blocks=True) == [1]
    assert turns.adoptable(at_its_turn, {0: 2}, blocks=True) == []
    assert turns.adoptable(at_its_turn, {1: 0}, blocks=True) == []
    assert turns.adoptable(under_way, arrived, blocks=False) == [0, 1]


def test_one_that_came_back_adopts_at_once_what_was_made_without_a_new_copy_of_its() -> None:
    assert turns.adoptable([clock(1), clock(0, left=3)], {1: 1}, blocks=True) == [1]
