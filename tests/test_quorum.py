"""Claims about when to merge and with whom. Seconds are the synchronizer's own; no cluster, no clock."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from islands.quorum import Arrival, Expectation, Merge, Round, Wait, decide, first_merge_at


def a_round(
    arrivals: dict[str, float],
    *,
    expected: dict[str, float | None] | None = None,
    min_learners: int = 2,
    opened_at: float | None = 0.0,
    period_seconds: float = 10.0,
    grace_seconds: float = 4.0,
    is_final: bool = False,
) -> Round:
    """Return a round whose head was published at 0: pace ends at 10, grace at latest at 14."""
    return Round(
        arrivals=tuple(Arrival(name, stamp) for name, stamp in arrivals.items()),
        expected=tuple(Expectation(name, stamp) for name, stamp in (expected or {}).items()),
        min_learners=min_learners,
        opened_at=opened_at,
        period_seconds=period_seconds,
        grace_seconds=grace_seconds,
        is_final=is_final,
    )


# --- quorum


def test_below_the_quorum_only_an_arrival_can_change_anything() -> None:
    for now in (0.0, 14.0, 1e9):
        assert decide(a_round({}), now=now) == Wait(math.inf)
        assert decide(a_round({"east": 1.0}), now=now) == Wait(math.inf)


def test_a_quorum_after_the_pace_merges_at_once() -> None:
    assert decide(a_round({"east": 11.0, "west": 12.0}), now=12.0) == Merge(("east", "west"))


def test_two_contributions_of_one_learner_are_one_learner() -> None:
    round = replace(
        a_round({}), arrivals=(Arrival("east", 11.0), Arrival("east", 12.0)), min_learners=2
    )
    assert decide(round, now=100.0) == Wait(math.inf)
    assert decide(replace(round, min_learners=1), now=100.0) == Merge(("east",))


def test_a_quorum_of_one_merges_alone_once_the_pace_allows() -> None:
    round = a_round({"east": 3.0}, min_learners=1)
    assert decide(round, now=3.0) == Wait(7.0)
    assert decide(round, now=10.0) == Merge(("east",))


def test_everybody_who_has_arrived_is_merged_not_the_quorum_alone() -> None:
    round = a_round({"c": 1.0, "a": 11.0, "b": 2.0}, min_learners=1)
    assert decide(round, now=11.0) == Merge(("a", "b", "c"))


# --- pace


def test_an_early_quorum_waits_for_one_period_since_the_head() -> None:
    round = a_round({"east": 1.0, "west": 2.0})
    assert decide(round, now=4.0) == Wait(6.0)
    assert decide(round, now=9.5) == Wait(0.5)
    assert decide(round, now=10.0) == Merge(("east", "west"))


def test_no_pace_is_owed_for_a_head_that_was_found() -> None:
    round = a_round({"east": 1.0, "west": 2.0}, opened_at=None)
    assert decide(round, now=2.0) == Merge(("east", "west"))


# --- grace


def test_a_late_learner_is_left_out_after_the_grace_window() -> None:
    round = a_round({"east": 1.0, "west": 2.0}, expected={"asia": 13.0})
    assert decide(round, now=10.0) == Wait(4.0)
    assert decide(round, now=13.9) == Wait(pytest.approx(0.1))
    assert decide(round, now=14.0) == Merge(("east", "west"))


def test_grace_ends_with_the_last_expected_arrival() -> None:
    expected = {"east": 9.0, "west": 9.0, "asia": 13.0}
    waiting = a_round({"east": 1.0, "west": 2.0}, expected=expected)
    assert decide(waiting, now=11.0) == Wait(3.0)
    complete = a_round({"east": 1.0, "west": 2.0, "asia": 11.5}, expected=expected)
    assert decide(complete, now=11.5) == Merge(("asia", "east", "west"))


def test_grace_runs_from_the_quorum_where_that_came_after_the_pace() -> None:
    round = a_round({"east": 1.0, "west": 20.0}, expected={"asia": 23.0})
    assert decide(round, now=20.0) == Wait(4.0)
    assert decide(round, now=24.0) == Merge(("east", "west"))


def test_an_arrival_beyond_the_quorum_does_not_prolong_the_grace() -> None:
    round = a_round({"east": 11.0, "west": 12.0, "asia": 15.0}, expected={"late": None})
    assert decide(round, now=15.0) == Wait(1.0)


def test_who_is_expected_outside_the_window_is_not_awaited() -> None:
    round = a_round({"east": 1.0, "west": 2.0}, expected={"asia": 14.1})
    assert decide(round, now=10.0) == Merge(("east", "west"))


def test_who_should_have_been_here_already_is_awaited_to_the_end_of_the_window() -> None:
    round = a_round({"east": 1.0, "west": 2.0}, expected={"asia": 3.0})
    assert decide(round, now=10.0) == Wait(4.0)


def test_a_learner_of_unknown_pace_is_awaited() -> None:
    round = a_round({"east": 1.0, "west": 2.0}, expected={"asia": None})
    assert decide(round, now=10.0) == Wait(4.0)


def test_a_silent_learner_is_in_no_expectation_and_costs_nothing() -> None:
    round = a_round({"east": 1.0, "west": 2.0}, expected={"east": None, "west": None})
    assert decide(round, now=10.0) == Merge(("east", "west"))


def test_without_grace_nobody_is_awaited_past_the_pace() -> None:
    round = a_round({"east": 1.0, "west": 2.0}, expected={"asia": None}, grace_seconds=0.0)
    assert decide(round, now=10.0) == Merge(("east", "west"))


# --- spacing


def test_a_found_head_waits_for_its_place_with_its_quorum_complete_and_everybody_here() -> None:
    round = replace(a_round({"east": 1.0, "west": 2.0}, opened_at=None), not_before=7.5)
    assert decide(round, now=2.0) == Wait(5.5)
    assert decide(round, now=7.5) == Merge(("east", "west"))


def test_the_place_and_the_grace_run_side_by_side() -> None:
    """Quorum at 2, asia awaited to 6: the later of 6 and the place counts, not their sum."""
    round = a_round({"east": 1.0, "west": 2.0}, expected={"asia": None}, opened_at=None)
    assert decide(replace(round, not_before=5.0), now=2.0) == Wait(4.0)
    assert decide(replace(round, not_before=7.0), now=2.0) == Wait(5.0)


def test_at_the_end_no_head_waits_for_its_place() -> None:
    round = replace(a_round({"east": 1.0}, opened_at=None, is_final=True), not_before=1e6)
    assert decide(round, now=1.0) == Merge(("east",))


def test_first_merges_keep_a_quarter_of_the_period_of_four_fragments_apart() -> None:
    """24 steps of half a second, 4 fragments: 6 steps, 3 seconds after the newest merge of the others."""
    opened = (100.0, None, 103.0)
    assert first_merge_at(opened, period_steps=24, num_fragments=4, period_seconds=12.0) == 106.0
    # The offsets of the first pushes are whole steps: of 7 steps and 3 fragments, 2, 4 and 7.
    assert first_merge_at([0.0], period_steps=7, num_fragments=3, period_seconds=7.0) == 2.0


def test_the_first_of_all_merges_and_one_of_unknown_pace_wait_for_no_place() -> None:
    alone = first_merge_at((None, None), period_steps=24, num_fragments=3, period_seconds=12.0)
    assert alone == -math.inf
    assert first_merge_at((5.0,), period_steps=24, num_fragments=2, period_seconds=0.0) == 5.0


# --- the end


def test_the_last_merge_takes_what_is_there_and_waits_for_nobody() -> None:
    round = a_round({"east": 1.0}, expected={"asia": None}, min_learners=3, is_final=True)
    assert decide(round, now=1.0) == Merge(("east",))


def test_at_the_end_nothing_is_merged_from_nothing() -> None:
    assert decide(a_round({}, is_final=True), now=1e6) == Wait(math.inf)


# --- time and order


def test_a_jump_of_the_clock_can_only_lead_to_a_merge_of_who_is_there() -> None:
    round = a_round({"east": 1.0, "west": 2.0}, expected={"asia": 13.0})
    assert decide(round, now=1e12) == Merge(("east", "west"))
    assert decide(a_round({"east": 1.0}), now=1e12) == Wait(math.inf)


def test_the_wait_that_is_left_after_rounding_is_no_wait() -> None:
    # 0.1 + 0.2 is 0.30000000000000004: a clock that shows 0.3 is there.
    round = a_round({"east": 0.0, "west": 0.0}, opened_at=0.1, period_seconds=0.2)
    assert decide(round, now=0.3) == Merge(("east", "west"))


def test_a_wait_that_began_half_a_year_ago_ends_at_its_goal() -> None:
    # Seconds of this size are 4e-9 apart: now + (goal - now) falls one such gap short of the goal.
    now, goal = 629191.7311792318, 17748075.93102203
    round = a_round({"east": 0.0, "west": 0.0}, period_seconds=goal)
    choice = decide(round, now=now)
    assert isinstance(choice, Wait)
    assert now + choice.seconds < goal
    assert decide(round, now=now + choice.seconds) == Merge(("east", "west"))


seconds = st.floats(min_value=0, max_value=1e12)
rounds = st.builds(
    Round,
    arrivals=st.lists(st.builds(Arrival, st.sampled_from("abcde"), seconds), max_size=6).map(tuple),
    expected=st.lists(
        st.builds(Expectation, st.sampled_from("abcdefg"), st.none() | seconds), max_size=5
    ).map(tuple),
    min_learners=st.integers(1, 5),
    opened_at=st.none() | seconds,
    period_seconds=seconds,
    grace_seconds=seconds,
    not_before=st.just(-math.inf) | seconds,
    is_final=st.booleans(),
)


@settings(max_examples=400, deadline=None)
@given(rounds, seconds)
def test_waiting_as_long_as_told_always_leads_to_a_merge(round: Round, now: float) -> None:
    choice = decide(round, now=now)
    if isinstance(choice, Wait) and math.isfinite(choice.seconds):
        assert choice.seconds > 0
        assert isinstance(decide(round, now=now + choice.seconds), Merge)


@settings(max_examples=200, deadline=None)
@given(rounds, seconds, st.randoms(use_true_random=False))
def test_the_order_in_which_things_are_listed_does_not_matter(
    round: Round, now: float, generator: random.Random
) -> None:
    shuffled = replace(
        round,
        arrivals=tuple(generator.sample(round.arrivals, len(round.arrivals))),
        expected=tuple(generator.sample(round.expected, len(round.expected))),
    )
    assert decide(shuffled, now=now) == decide(round, now=now)


@settings(max_examples=200, deadline=None)
@given(rounds, seconds, seconds)
def test_what_may_be_merged_now_may_be_merged_later(round: Round, now: float, pause: float) -> None:
    if isinstance(choice := decide(round, now=now), Merge):
        assert decide(round, now=now + pause) == choice
