"""How often a store that does not answer is asked, for how long, and what is said of it: numbers by hand."""

from __future__ import annotations

import pytest

from islands.patience import Patience
from islands.types import StoreLost, StoreUnavailable

PROBLEM = StoreUnavailable("no answer")


def pause(patience: Patience, now: float, *, limit: float = 600.0, draw: float = 0.0) -> float:
    return patience.refused(PROBLEM, now=now, limit_seconds=limit, draw=draw)


def test_pauses_double_up_to_the_longest_and_begin_anew_after_an_answer() -> None:
    patience = Patience(longest_pause_seconds=3.0)
    assert [pause(patience, float(n)) for n in range(5)] == [0.5, 1.0, 2.0, 3.0, 3.0]
    patience.answered(now=6.0)
    assert pause(patience, 7.0) == 0.5


def test_the_lot_takes_up_to_half_of_a_pause() -> None:
    drawn = [pause(Patience(first_pause_seconds=2.0), 0.0, draw=d) for d in (0.0, 0.5, 1.0)]
    assert drawn == [2.0, 1.5, 1.0]


def test_it_ends_with_rule_value_and_remedy_once_nothing_was_answered_for_so_long() -> None:
    patience = Patience()
    pause(patience, 100.0, limit=30.0)
    pause(patience, 129.9, limit=30.0)
    with pytest.raises(StoreLost) as caught:
        pause(patience, 130.0, limit=30.0)
    assert str(caught.value) == (
        "a store must answer within pipeline.store_patience_seconds (30), and has not for 30 s: no answer; "
        "mend it, then `diloco resume` goes on"
    )
    assert caught.value.__cause__ is PROBLEM


def test_an_answer_in_between_begins_the_count_anew() -> None:
    patience = Patience()
    pause(patience, 0.0, limit=30.0)
    patience.answered(now=29.0)
    pause(patience, 40.0, limit=30.0)
    assert pause(patience, 69.0, limit=30.0) == 1.0


def test_an_outage_is_said_once_and_its_end_once() -> None:
    patience, said = Patience(), []
    for now in (10.0, 11.0, 13.0):
        pause(patience, now)
        said.append(patience.complaint(PROBLEM))
    said += [patience.answered(now=22.5), patience.answered(now=23.0)]
    assert said == [
        "the store: no answer; asked until it answers",
        "",
        "",
        "the store answers again, after 12.5 s",
        "",
    ]


def test_without_a_limit_it_is_asked_for_ever() -> None:
    patience = Patience()
    assert [pause(patience, 1e6 * n, limit=float("inf")) for n in range(2000)][-1] == 10.0
