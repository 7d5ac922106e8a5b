from __future__ import annotations

import math
from dataclasses import replace

import pytest

from islands.contributions import Consumed, Tally, Telemetry, Verdict
from islands.metrics import (
    MOST_SAMPLES,
    RUN,
    STALENESS_WINDOW,
    SYNCHRONIZER,
    Evaluation,
    Point,
    Sample,
    evaluation_points,
    gather,
    in_order,
    island_part,
    points_of,
    samples_of,
    series,
    stretches,
    thinned,
    trained_at,
)
from islands.types import Manifest, Position
from islands.versions import Commit

NO_PAYLOAD = Manifest("", (), ())
# Two sequences of 16 tokens a step in the east, one in the west.
RATES = {"east": 32.0, "west": 16.0}

EAST = Consumed(
    name="inbox/f0001/east/1-0-20.json",
    digest="a",
    learner="east",
    start=Position(0, 10),
    stop=Position(0, 20),
    num_tokens=320,
    num_steps=10,
    offered_before=256,
    staleness=0,
    weight=30.0,
    norm=2.0,
    step_seconds=0.5,
    telemetry=Telemetry(
        at=1000.5,
        loss=2 * math.log(2),
        idle_share=0.25,
        bytes_up=300,
        bytes_down=200,
        replaced_copies=2,
        replaced_tokens=96,
    ),
)
WEST = Consumed(
    name="inbox/f0001/west/0-1-15.json",
    digest="b",
    learner="west",
    start=Position(1, 10),
    stop=Position(1, 15),
    num_tokens=80,
    num_steps=5,
    offered_before=96,
    staleness=2,
    weight=10.0,
    norm=3.0,
    step_seconds=1.0,
    telemetry=Telemetry(
        at=1001.0, loss=4 * math.log(2), idle_share=0.0, bytes_up=40, bytes_down=20
    ),
)
BEFORE = Commit(
    fragment=1,
    version=1,
    parent_digest="",
    consumed=(),
    refused=(),
    tallies={},
    median_norm=0.0,
    learning_rate=0.7,
    momentum=0.7,
    codec="float32",
    synchronizer=0,
    payload=NO_PAYLOAD,
    at=1000.0,
)
COMMIT = replace(
    BEFORE,
    version=2,
    consumed=(EAST, WEST),
    refused=(
        Verdict("inbox/x", "c", "west", "stale", 16),
        Verdict("inbox/y", "d", "north", "stale", 16),
    ),
    tallies={
        "east": Tally(consumed_to=Position(0, 20), offered=576, merged=480, merges=2),
        "west": Tally(consumed_to=Position(1, 15), offered=176, merged=120, merges=2),
    },
    median_norm=2.5,
    at=1002.5,
)


def values_of(points: list[Point], run: str) -> dict[str, float]:
    return {point.key: point.value for point in points if point.run == run}


# The other fragment, of which 200 tokens are merged; the west has not come that far.
OTHER = replace(
    BEFORE,
    fragment=0,
    tallies={"east": Tally(consumed_to=Position(0, 10), offered=320, merged=200, merges=1)},
)
HEADS = (OTHER, BEFORE)


def points() -> list[Point]:
    return list(points_of(COMMIT, HEADS, RATES))


def test_version_zero_has_no_points() -> None:
    assert list(points_of(replace(BEFORE, version=0), HEADS, RATES)) == []


def test_the_run_is_told_what_was_merged_and_lost() -> None:
    assert values_of(points(), RUN) == pytest.approx(
        {
            # 480 + 120 of this fragment and 200 of the other: their mean.
            "run/merged_tokens": 400,
            # Trained up to what was merged last: 20 steps of 32 tokens and 15 of 16; in the other, 10 of 32.
            "run/merged_share": 800 / (640 + 240 + 320),
            # 320 tokens at 2 bits, 80 at 4.
            "run/train_loss": (320 * 2 + 80 * 4) / 400,
        }
    )


def test_the_bytes_of_a_merged_token_are_those_of_all_islands_counted_once() -> None:
    """The east had moved 900 and 600 by its last contribution, to this fragment; the west 300 and 200, to the other."""
    tallies = {
        "east": replace(COMMIT.tallies["east"], bytes_up=900, bytes_down=600),
        "west": replace(COMMIT.tallies["west"], bytes_up=100, bytes_down=50),
    }
    earlier = {
        "east": replace(OTHER.tallies["east"], bytes_up=500, bytes_down=400),
        "west": Tally(bytes_up=300, bytes_down=200),
    }
    commit, heads = replace(COMMIT, tallies=tallies), (replace(OTHER, tallies=earlier), BEFORE)
    told = values_of(list(points_of(commit, heads, RATES)), RUN)
    # 400 tokens are merged, see above.
    assert told["comm/bytes_per_merged_token_up"] == 3.0
    assert told["comm/bytes_per_merged_token_down"] == 2.0


def test_the_synchronizer_is_told_of_its_merge() -> None:
    assert values_of(points(), SYNCHRONIZER) == pytest.approx(
        {
            "sync/version_f1": 2,
            "sync/quorum": 2,
            "sync/merged_tokens": 400,
            "sync/refused": 2,
            "sync/staleness_mean": 1.0,
            "sync/median_norm": 2.5,
            "sync/merge_interval_seconds": 2.5,
        }
    )


def test_an_island_is_told_of_its_training_and_its_part_in_the_merge() -> None:
    assert values_of(points(), island_part("east")) == pytest.approx(
        {
            "train/loss": 2.0,
            "train/tokens": 640,
            "train/tokens_per_second": 32 / 0.5,
            "train/idle_percent": 25.0,
            "sync/staleness": 0,
            "sync/merged_share": (480 + 200) / (640 + 320),
            "sync/share_of_merges": 0.75,
            "sync/refused": 0,
            "comm/bytes_up": 300,
            "comm/bytes_down": 200,
            "comm/replaced_copies": 2,
            "comm/replaced_tokens": 96,
        }
    )
    west = values_of(points(), island_part("west"))
    assert west["sync/refused"] == 1
    assert west["sync/share_of_merges"] == 0.25


def test_refusals_are_told_by_reason_over_all_fragments_and_islands() -> None:
    def with_refusals(commit: Commit, **rows: dict[str, tuple[int, int]]) -> Commit:
        tallies = {name: Tally(refused=refused) for name, refused in rows.items()}
        return replace(commit, tallies=tallies)

    commit = with_refusals(COMMIT, east={"stale": (2, 64)}, west={"fenced": (1, 16)})
    other = with_refusals(OTHER, west={"stale": (3, 48)})
    told = values_of(list(points_of(commit, (other, BEFORE), RATES)), SYNCHRONIZER)
    assert {key: value for key, value in told.items() if key.startswith("sync/refused_")} == {
        "sync/refused_fenced": 1,
        "sync/refused_stale": 5,
    }


def test_a_refused_learner_is_told_so_also_where_nothing_of_it_was_merged() -> None:
    assert [p for p in points() if p.run == island_part("north")] == [
        Point(island_part("north"), "sync/refused", 1.0, 0, 1002.5)
    ]


def test_steps_are_merged_tokens_for_the_run_and_own_trained_tokens_for_an_island() -> None:
    steps = {point.run: set[int]() for point in points()}
    for point in points():
        steps[point.run].add(point.step)
    assert steps == {
        RUN: {400},
        SYNCHRONIZER: {400},
        island_part("east"): {640},
        island_part("west"): {240},
        island_part("north"): {0},
    }
    assert trained_at(EAST) == 640


def test_an_islands_point_bears_its_own_time_and_the_commits_where_that_is_no_time() -> None:
    at = {p.run: p.at for p in points() if p.key == "train/tokens"}
    assert at == {island_part("east"): 1000.5, island_part("west"): 1001.0}
    for wrong in (0.0, -5.0, 1e300):
        told = replace(EAST, telemetry=replace(EAST.telemetry, at=wrong))
        odd = points_of(replace(COMMIT, consumed=(told,)), HEADS, RATES)
        assert {p.at for p in odd} == {1002.5}


def test_what_is_unknown_or_no_number_makes_no_point() -> None:
    told = replace(EAST, step_seconds=0.0, telemetry=Telemetry(loss=math.inf))
    keys = {p.key for p in points_of(replace(COMMIT, consumed=(told,)), HEADS, RATES)}
    assert not keys & {"train/loss", "train/tokens_per_second", "run/train_loss"}
    told = replace(EAST, telemetry=Telemetry())
    keys = {p.key for p in points_of(replace(COMMIT, consumed=(told,)), HEADS, RATES)}
    assert not keys & {"train/loss", "run/train_loss"}


def test_the_first_merge_of_a_fragment_has_no_interval() -> None:
    first = points_of(replace(COMMIT, version=1), (OTHER, replace(BEFORE, version=0)), RATES)
    assert "sync/merge_interval_seconds" not in {point.key for point in first}


def test_an_evaluation_stands_at_its_snapshots_merged_tokens() -> None:
    assert list(evaluation_points(Evaluation(3, 900, 1.5, 3.25, 12.0))) == [
        Point(RUN, "eval/bits_per_byte", 1.5, 900, 12.0),
        Point(RUN, "eval/bigram", 3.25, 900, 12.0),
    ]


def test_a_sample_shows_a_merged_contribution() -> None:
    first, second = samples_of(COMMIT, HEADS)
    # 480 + 200 of 800 tokens are the east's.
    assert first == Sample("east", 400, pytest.approx(2.0), 0, 0.85, 1000.5, 1002.5)
    assert (second.island, second.share, second.staleness) == ("west", 0.15, 2)


def sample(**changes: float) -> Sample:
    plain = Sample("east", 400, 2.0, 0, 0.5, 1.0, 2.0)
    return replace(plain, **changes)  # type: ignore[arg-type]


def test_a_series_leaves_out_an_unknown_loss() -> None:
    rows = [sample(merged_tokens=10), sample(merged_tokens=20, loss=0.0), sample(merged_tokens=30)]
    assert series(rows, "loss") == ((10.0, 30.0), (2.0, 2.0))
    assert series(rows, "share") == ((10.0, 20.0, 30.0), (0.5, 0.5, 0.5))


def test_staleness_is_shown_as_the_mean_of_the_last_contributions() -> None:
    rows = [sample(staleness=12)] + [sample(staleness=0) for _ in range(STALENESS_WINDOW)]
    assert series(rows, "staleness")[1][:3] == (12.0, 6.0, 4.0)
    assert series(rows, "staleness")[1][-2:] == (1.0, 0.0)


def test_what_figures_keep_of_an_island_is_bounded() -> None:
    kept: dict[str, list[Sample]] = {}
    gather(kept, (sample(merged_tokens=n) for n in range(3 * MOST_SAMPLES)))
    tokens = [row.merged_tokens for row in kept["east"]]
    assert len(tokens) <= MOST_SAMPLES
    assert (tokens[-1], tokens == sorted(tokens)) == (3 * MOST_SAMPLES - 1, True)


def test_commits_are_ordered_by_time_and_within_a_fragment_by_version() -> None:
    def made(fragment: int, version: int) -> Commit:
        return replace(BEFORE, fragment=fragment, version=version)

    ahead = [
        [(5.0, made(0, 1)), (7.0, made(0, 2))],
        [(6.0, made(1, 4)), (7.0, made(1, 5)), (7.0, made(1, 6)), (9.0, made(1, 7))],
    ]

    def names(until: float, *, is_open: bool) -> list[tuple[int, int]]:
        return [(c.fragment, c.version) for c in in_order(ahead, until=until, is_open=is_open)]

    assert names(7.0, is_open=False) == [(0, 1), (1, 4), (0, 2), (1, 5), (1, 6)]
    assert names(7.0, is_open=True) == [(0, 1), (1, 4)]


@pytest.mark.parametrize("count", [0, 1, 5, 10, 11, 99])
def test_thinning_keeps_the_last_and_no_more_than_asked_for(count: int) -> None:
    samples = [sample(merged_tokens=n) for n in range(count)]
    kept = [row.merged_tokens for row in thinned(samples, 10)]
    assert len(kept) == {0: 0, 1: 1, 5: 5, 10: 10, 11: 6, 99: 10}[count]
    assert kept == sorted(kept)
    assert kept[-1:] == ([count - 1] if count else [])


def test_an_incarnation_lasts_until_its_last_push_and_the_last_one_until_it_left() -> None:
    # It started at 0, pushed at 4 and 9, died, came back at 20 and pushed at 25.
    pushes = [4.0, 9.0, 25.0]
    assert stretches([0.0, 20.0], pushes, None) == [(0.0, 9.0), (20.0, 25.0)]
    assert stretches([0.0, 20.0], pushes, 30.0) == [(0.0, 9.0), (20.0, 30.0)]
    assert stretches([0.0, 1.0], [], None) == [(0.0, 0.0), (1.0, 1.0)]
    assert stretches([], pushes, 30.0) == []
