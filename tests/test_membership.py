"""Islands that come and go: shares, learning rates, text, moments; what `join`, `leave` and spares record."""

from __future__ import annotations

import pytest

from islands import membership
from islands.config import RunConfig, parse_config
from islands.membership import Progress
from islands.types import ConfigError
from tests.test_living import mergings

merging = pytest.fixture(mergings)

THREE = """
total_tokens = 1200
[[islands]]
name = "a"
[[islands]]
name = "b"
[[islands]]
name = "c"
batch_size = 16
"""
WITH_SPARE = THREE + '[[islands]]\nname = "d"\nspare = true\n'


def config_of(text: str, *assignments: str) -> RunConfig:
    return parse_config(text, assignments=assignments, source="x")


def shares(config: RunConfig) -> dict[str, int]:
    return {island.name: config.share_of(island.name) for island in config.members}


def with_island(config: RunConfig, name: str) -> RunConfig:
    fresh = config.islands[0].model_copy(update={"name": name})
    return config.model_copy(update={"islands": (*config.islands, fresh)})


def progress(departed: str = "", **trained: int) -> Progress:
    return Progress(trained, frozenset(departed))


# --- shares ---


def test_founders_share_by_speed_and_batch_what_those_with_a_number_leave() -> None:
    assert shares(config_of(THREE)) == {"a": 300, "b": 300, "c": 600}
    assert shares(config_of(THREE, "islands.a.tokens=600")) == {"a": 600, "b": 200, "c": 400}
    assert shares(config_of(THREE, "islands.a.tokens=1201")) == {"a": 1201, "b": 0, "c": 0}


def test_a_spare_counts_in_no_share_and_no_quorum() -> None:
    config = config_of(WITH_SPARE)
    assert shares(config) == {"a": 300, "b": 300, "c": 600}
    assert (config.quorum, [i.name for i in config.members]) == (2, ["a", "b", "c"])


def test_who_leaves_has_its_share_and_the_others_train_the_rest() -> None:
    left = membership.departing(config_of(THREE), "a", progress(a=100, b=110, c=190))
    # 1,200 - 100 = 1,100, a third and two thirds.
    assert shares(left) == {"a": 100, "b": 367, "c": 734}


def test_who_joins_gets_its_part_of_what_is_left_and_everybody_ends_together() -> None:
    """Half is trained. Of 600 tokens a newcomer as fast as a takes a fifth."""
    half = progress(a=150, b=150, c=300)
    joined = membership.joined(with_island(config_of(THREE), "d"), "d", half)
    assert shares(joined) == {"a": 270, "b": 270, "c": 540, "d": 120}
    assert joined.islands[3].joined_at == 0.5
    left = {name: share - half.tokens_of(name) for name, share in shares(joined).items()}
    assert left == {"a": 120, "b": 120, "c": 240, "d": 120}, "twice the batch, twice the tokens"


def test_a_second_newcomer_and_a_departure_are_dealt_to_the_first_newcomer_too() -> None:
    joined = membership.joined(
        with_island(config_of(THREE), "d"), "d", progress(a=150, b=150, c=300)
    )
    # Of 1,200, 900 are trained: 300 are left for rates 1, 1, 2, 1 and the new 1.
    late = progress(a=220, b=220, c=400, d=60)
    twice = membership.joined(with_island(joined, "e"), "e", late)
    assert (shares(twice)["d"], shares(twice)["e"]) == (110, 50)
    assert shares(twice)["a"] == 260
    # c leaves: the same 300 for a, b, d and e.
    fewer = membership.departing(twice, "c", late)
    assert shares(fewer) == {"a": 295, "b": 295, "c": 400, "d": 135, "e": 75}
    # And once more: who is about to leave is given nothing, though it has not left yet.
    again = membership.departing(fewer, "d", late)
    assert shares(again) == {"a": 320, "b": 320, "c": 400, "d": 60, "e": 100}


def test_an_island_that_joins_before_anything_is_trained_is_like_a_founder() -> None:
    joined = membership.joined(with_island(config_of(THREE), "d"), "d", progress())
    assert shares(joined) == {"a": 240, "b": 240, "c": 480, "d": 240}
    assert (joined.islands[3].tokens, joined.islands[3].joined_at) == (None, 0.0)


def test_a_number_that_a_person_gave_stays() -> None:
    config = config_of(THREE, "islands.a.tokens=400")
    joined = membership.joined(with_island(config, "d"), "d", progress(a=100, b=150, c=250))
    # 700 are left, 300 of them a's: 400 for rates 1, 2 and the new 1.
    assert shares(joined) == {"a": 400, "b": 234, "c": 467, "d": 100}


def test_a_spare_takes_the_place_of_one_that_left_early_and_of_nobody_else() -> None:
    config = config_of(WITH_SPARE)
    late = progress(a=100, b=200, c=300, departed="a")
    settled = membership.settled(config, late)
    assert [island.spare for island in settled.islands] == [False] * 4
    # 600 are left, for rates 1, 2 and the spare's 1.
    assert shares(settled) == {"a": 100, "b": 317, "c": 634, "d": 150}
    assert settled.islands[3].joined_at == 0.5
    assert membership.settled(settled, late) is settled
    whole = progress(a=300, b=200, c=300, departed="a")
    assert membership.settled(config, whole) is config


def test_without_a_spare_the_others_take_over_and_nothing_is_started_for_nothing() -> None:
    settled = membership.settled(config_of(THREE), progress(a=100, b=200, c=300, departed="a"))
    assert shares(settled) == {"a": 100, "b": 367, "c": 734}
    done = progress(a=299, b=301, c=600, departed="a")
    assert membership.settled(config_of(WITH_SPARE), done).islands[3].spare


def test_a_run_made_shorter_is_dealt_anew_to_newcomers_once() -> None:
    """A newcomer was dealt a fifth of 1,200,000 tokens; then the run is made to end after 1,000."""
    long = config_of(THREE, "total_tokens=1_200_000")
    begun = progress(a=150, b=150, c=300)
    joined = membership.joined(with_island(long, "d"), "d", begun)
    short = joined.model_copy(update={"total_tokens": 1000})
    # 400 are left, for rates 1, 1, 2 and the newcomer's 1.
    settled = membership.settled(short, begun)
    assert shares(settled)["d"] == 80
    assert sum(shares(settled).values()) == pytest.approx(1000, abs=4)
    assert membership.settled(settled, progress(a=200, b=200, c=350, d=30)) is settled
    over = membership.settled(short, progress(a=500, b=500, c=900, d=50))
    assert shares(over)["d"] == 50, "nothing is left to train"
    assert membership.settled(over, progress(a=510, b=520, c=930, d=60)) is over


def test_a_run_begun_from_one_with_newcomers_has_founders_alone() -> None:
    joined = membership.joined(
        with_island(config_of(THREE), "d"), "d", progress(a=150, b=150, c=300)
    )
    assert shares(joined.as_founded()) == {"a": 240, "b": 240, "c": 480, "d": 240}
    assert joined.as_founded().islands[3].joined_at == 0.0


def test_two_requests_that_one_island_leave_start_one_spare() -> None:
    config = config_of(WITH_SPARE + '[[islands]]\nname = "e"\nspare = true\n')
    late = progress(a=100, b=200, c=300)
    once = membership.departing(config, "a", late)
    assert [island.name for island in once.islands if island.spare] == ["e"]
    assert membership.departing(once, "a", late) == once


RULES = {
    'islands.a.spare=true local.faults=[{island="a",step=3}]': r"must name an island \(b, c\), got",
    "islands.a.spare=true islands.b.spare=true islands.c.spare=true": "must have one that is no spare",
    "islands.a.spare=true sync.min_learners=3": r"must be <= the number of islands \(2\), got 3",
    "islands.a.spare=true sync.algorithm=streaming": r"islands\.a\.spare must be false where learners",
    'islands.a.spare=true quarantine=["a"]': r"quarantine must name islands \(b, c\)",
}


@pytest.mark.parametrize("assignments", RULES)
def test_what_spares_must_leave_is_a_rule(assignments: str) -> None:
    with pytest.raises(ConfigError, match=RULES[assignments]):
        config_of(THREE, *assignments.split())
