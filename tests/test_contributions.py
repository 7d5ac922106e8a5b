"""Claims about verdicts on contributions, about what a commit keeps of them, and about their JSON forms."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from islands.contributions import (
    LARGEST_COUNT,
    MEANINGS,
    Consumed,
    Contribution,
    Lineage,
    Tally,
    Telemetry,
    Verdict,
    after_merge,
    consume,
    contribution_from_json,
    judge,
    merge_weight,
    newest_per_learner,
    running_median,
)
from islands.ledger import FragmentClock, LearnerRecord
from islands.sealing import seal, unseal
from islands.types import FragmentLayout, Manifest, Position, StoredArray, StoredObject, TensorSpec
from islands.versions import (
    Commit,
    Snapshot,
    commit_from_json,
    layouts_from_json,
    layouts_to_json,
    snapshot_from_json,
)

PAYLOAD = Manifest(
    folder="payloads/x/a-1",
    arrays=(StoredArray("delta", "float32", 7, 4),),
    objects=(StoredObject("delta/c/0", 16, 12345), StoredObject("delta/c/1", 12, 2**32 - 1)),
)
CLOCK = FragmentClock(7, "d7", Position(1, 30), 4, 500, 5, Position(1, 35), 400, 4, 100, 20, 3, 1)
OFFER = Contribution(
    learner="east",
    fragment=2,
    base_version=7,
    base_digest="d7",
    start=Position(1, 30),
    stop=Position(1, 40),
    num_tokens=1000,
    num_steps=10,
    offered_before=2000,
    norms=(3.0, 4.0),
    step_seconds=0.5,
    layout="layout",
    codec="bfloat16",
    payload=PAYLOAD,
    record=LearnerRecord(
        "east", Position(1, 40), 623, 80, (replace(CLOCK, offered=2**60),) * 4, "before"
    ),
)
LINEAGE = Lineage(
    head_version=8,
    digests={5: "d5", 6: "d6", 7: "d7", 8: "d8"},
    tallies={"east": Tally(consumed_to=Position(1, 30), offered=2000, merged=1500)},
    incarnations={"east": 1, "west": 0},
    listed=frozenset(),
    layout="layout",
    codec="bfloat16",
    num_tensors=2,
    max_staleness=2,
    outlier_factor=5.0,
    median_norm=10.0,
)


def written_and_read(value: Mapping[str, Any]) -> dict[str, Any]:
    return unseal("record", seal(value)[0])[0]


# --- judge


def test_a_sound_contribution_may_be_merged() -> None:
    assert judge(OFFER, LINEAGE) is None
    # The first of a learner: nothing is consumed yet.
    first = replace(
        OFFER, learner="west", start=Position(0, 0), stop=Position(0, 6), offered_before=0
    )
    assert judge(first, LINEAGE) is None


REFUSED: dict[str, list[tuple[Contribution, Lineage]]] = {
    "finished": [(OFFER, replace(LINEAGE, is_finished=True))],
    "unknown": [(replace(OFFER, learner=name), LINEAGE) for name in ("East", "asia", "")],
    "layout": [
        (replace(OFFER, layout="other"), LINEAGE),
        (replace(OFFER, codec="float32"), LINEAGE),
        (replace(OFFER, norms=(3.0,)), LINEAGE),
        (replace(OFFER, norms=(3.0, 4.0, 0.0)), LINEAGE),
    ],
    "tokens": [
        *(
            (replace(OFFER, **{name: value}), LINEAGE)
            for name in ("num_tokens", "num_steps")
            for value in (0, -1, math.nan, math.inf, 1.5, LARGEST_COUNT + 1, 10**400)
        ),
        *(
            (replace(OFFER, offered_before=value), LINEAGE)
            for value in (-1, math.nan, math.inf, 10**400)
        ),
        (replace(OFFER, start=OFFER.stop), LINEAGE),
        (replace(OFFER, start=Position(2, 0)), LINEAGE),
    ],
    "non-finite": [
        *(
            (replace(OFFER, norms=(3.0, value)), LINEAGE)
            for value in (math.nan, math.inf, -math.inf)
        ),
        # Each square is finite, their sum is not.
        (replace(OFFER, norms=(1.7e308, 1.7e308)), replace(LINEAGE, median_norm=0.0)),
        (replace(OFFER, step_seconds=math.nan), LINEAGE),
    ],
    "fenced": [(OFFER, replace(LINEAGE, incarnations={"east": 2}))],
    "quarantined": [(OFFER, replace(LINEAGE, quarantined=frozenset({"east", "west"})))],
    "future": [
        (replace(OFFER, base_version=9, base_digest="d9"), LINEAGE),
        (replace(OFFER, stop=Position(2, 3)), LINEAGE),
    ],
    "stale": [(replace(OFFER, base_version=5, base_digest="d5"), LINEAGE)],
    "lineage": [
        (replace(OFFER, base_digest="d8"), LINEAGE),
        (replace(OFFER, base_digest=""), LINEAGE),
    ],
    "overlap": [
        (replace(OFFER, start=Position(1, 29)), LINEAGE),
        (replace(OFFER, start=Position(0, 99)), LINEAGE),
        (replace(OFFER, offered_before=1999), LINEAGE),
    ],
    "outsized": [(replace(OFFER, norms=(40.0, 30.1)), LINEAGE)],
}


@pytest.mark.parametrize("reason", REFUSED)
def test_each_broken_rule_has_its_own_reason(reason: str) -> None:
    for offer, lineage in REFUSED[reason]:
        assert judge(offer, lineage) == reason, (offer, lineage)


def test_what_a_refusal_means_is_said_for_every_reason() -> None:
    assert set(MEANINGS) == {*REFUSED, "damaged"}


def test_the_quarantine_of_another_is_none_of_ours() -> None:
    assert judge(OFFER, replace(LINEAGE, quarantined=frozenset({"west"}))) is None


def test_at_the_limits_a_contribution_may_still_be_merged() -> None:
    assert judge(replace(OFFER, base_version=6, base_digest="d6"), LINEAGE) is None
    assert judge(replace(OFFER, base_version=8, base_digest="d8"), LINEAGE) is None
    assert judge(replace(OFFER, norms=(40.0, 30.0)), LINEAGE) is None  # exactly 50 long
    assert judge(replace(OFFER, num_tokens=LARGEST_COUNT), LINEAGE) is None
    assert judge(replace(OFFER, norms=(0.0, 0.0)), LINEAGE) is None


def test_without_a_known_norm_only_what_would_overflow_is_outsized() -> None:
    lineage = replace(LINEAGE, median_norm=0.0)
    assert judge(replace(OFFER, norms=(1e17, 1e17)), lineage) is None
    assert judge(replace(OFFER, norms=(1e154, 1e154)), lineage) == "outsized"


def test_a_learner_that_lags_is_measured_by_its_own_last_delta_too() -> None:
    """The others' rates have died down and the median with them; its own is as high as it was."""
    lineage = replace(LINEAGE, median_norm=0.5)
    assert judge(OFFER, lineage) == "outsized"  # 5 long, 5 * 0.5 allowed
    tally = replace(LINEAGE.tallies["east"], norm=1.0)
    assert judge(OFFER, replace(lineage, tallies={"east": tally})) is None
    assert judge(OFFER, replace(lineage, tallies={"west": tally})) == "outsized"


def test_a_mark_beyond_what_the_learner_says_it_offered_is_no_count() -> None:
    """Merged, it would shut the learner out: every later interval would begin before the mark."""
    said = OFFER.offered_before + OFFER.num_tokens
    honest = replace(CLOCK, offered=said - CLOCK.copied_tokens)
    for clock, verdict in ((honest, None), (replace(honest, offered=honest.offered - 1), "tokens")):
        record = replace(OFFER.record, clocks=(clock,) * 4)
        assert judge(replace(OFFER, record=record), LINEAGE) == verdict


def test_a_listed_contribution_of_a_predecessor_is_not_fenced() -> None:
    lineage = replace(LINEAGE, incarnations={"east": 2}, listed=frozenset({OFFER.name}))
    assert judge(OFFER, lineage) is None
    other = replace(OFFER, stop=Position(1, 41))
    assert judge(other, lineage) == "fenced"


def test_the_first_broken_rule_of_the_documented_order_is_named() -> None:
    breaks: list[tuple[str, Callable[[Contribution, Lineage], tuple[Contribution, Lineage]]]] = [
        ("outsized", lambda o, g: (o, replace(g, median_norm=0.2))),
        ("overlap", lambda o, g: (replace(o, offered_before=0), g)),
        ("lineage", lambda o, g: (replace(o, base_digest="no"), g)),
        ("stale", lambda o, g: (replace(o, base_version=0), g)),
        ("future", lambda o, g: (replace(o, base_version=99), g)),
        ("quarantined", lambda o, g: (o, replace(g, quarantined=frozenset({"east"})))),
        ("fenced", lambda o, g: (o, replace(g, incarnations={"east": 5}))),
        ("non-finite", lambda o, g: (replace(o, step_seconds=math.inf), g)),
        ("tokens", lambda o, g: (replace(o, num_steps=0), g)),
        ("layout", lambda o, g: (replace(o, layout="no"), g)),
        ("unknown", lambda o, g: (o, replace(g, incarnations={}))),
        ("finished", lambda o, g: (o, replace(g, is_finished=True))),
    ]
    offer, lineage = OFFER, LINEAGE
    for reason, broken in breaks:
        offer, lineage = broken(offer, lineage)
        assert judge(offer, lineage) == reason


def test_a_replay_a_duplicate_and_a_longer_copy_of_merged_work_overlap() -> None:
    tallies = after_merge(LINEAGE.tallies, [consume(OFFER, "digest", 8)], [], version=9)
    lineage = replace(LINEAGE, head_version=9, tallies=tallies)
    assert judge(OFFER, lineage) == "overlap"
    longer = replace(OFFER, stop=Position(1, 45), num_tokens=1500, num_steps=15)
    assert judge(longer, lineage) == "overlap"
    following = replace(
        OFFER, start=OFFER.stop, stop=Position(1, 45), offered_before=3000, num_tokens=500
    )
    assert judge(following, lineage) is None


def test_a_verdict_depends_on_nothing_but_header_and_lineage() -> None:
    again = contribution_from_json(written_and_read(OFFER.to_json()))
    for reason, cases in REFUSED.items():
        for _, lineage in cases:
            assert judge(again, lineage) == judge(OFFER, lineage), reason


# --- choosing and weighing


def test_of_several_contributions_of_a_learner_the_one_that_reaches_furthest_counts() -> None:
    early = replace(OFFER, stop=Position(1, 35))
    late = replace(OFFER, stop=Position(1, 44))
    reborn = replace(OFFER, stop=Position(2, 1))
    west = replace(OFFER, learner="west")
    for offers in ([late, west, early], [west, early, late], [early, late, west]):
        assert newest_per_learner(offers) == {"east": late, "west": west}
        assert list(newest_per_learner(offers)) == ["east", "west"]
    assert newest_per_learner([reborn, late])["east"] is reborn
    assert newest_per_learner([]) == {}


def test_a_stale_contribution_weighs_less_by_its_versions_behind() -> None:
    # 1,000 tokens * 100 per step
    assert merge_weight(OFFER, 7) == 100_000
    assert merge_weight(OFFER, 8) == 50_000
    assert merge_weight(OFFER, 11) == 20_000
    # By tokens alone: 1,000, half of it one version later.
    assert merge_weight(OFFER, 7, "tokens") == 1_000
    assert consume(OFFER, "", 8, "tokens").weight == 500


def test_a_commit_remembers_what_it_needs_of_a_contribution() -> None:
    entry = consume(OFFER, "digest", 8)
    assert entry == Consumed(
        name="inbox/f0002/east/7-1-40.json",
        digest="digest",
        learner="east",
        start=Position(1, 30),
        stop=Position(1, 40),
        num_tokens=1000,
        num_steps=10,
        offered_before=2000,
        staleness=1,
        weight=50_000.0,
        norm=5.0,
        step_seconds=0.5,
    )


def test_a_merge_moves_the_mark_and_counts_what_it_passes_over() -> None:
    # Merged up to 2,000 offered tokens of which 500 were passed over; 300 more are skipped now.
    offer = replace(OFFER, offered_before=2300)
    verdict = Verdict("name", "digest", "west", "stale", 70)
    tallies = after_merge(LINEAGE.tallies, [consume(offer, "", 8)], [verdict, verdict], version=9)
    east = tallies["east"]
    assert (east.consumed_to, east.offered, east.merged, east.passed_over) == (
        OFFER.stop,
        3300,
        2500,
        800,
    )
    assert (east.merges, east.step_seconds, east.last_version) == (1, 0.5, 9)
    assert tallies["west"] == Tally(refused={"stale": (2, 140)})
    assert list(tallies) == ["east", "west"]
    assert LINEAGE.tallies["east"].merged == 1500  # the parent's stay as they were


def test_bytes_told_late_by_another_fragment_do_not_take_back_what_was_told() -> None:
    tallies: Mapping[str, Tally] = {}
    for version, (up, down) in enumerate([(300, 40), (200, 90)], start=1):
        told = replace(OFFER, telemetry=Telemetry(bytes_up=up, bytes_down=down))
        tallies = after_merge(tallies, [consume(told, "digest", 8)], [], version=version)
    assert (tallies["east"].bytes_up, tallies["east"].bytes_down) == (300, 90)


def test_an_unmeasured_step_time_does_not_erase_the_known_one() -> None:
    tallies = after_merge({"east": Tally(step_seconds=0.25)}, [], [], version=1)
    entry = consume(replace(OFFER, step_seconds=0.0), "", 8)
    assert after_merge(tallies, [entry], [], version=2)["east"].step_seconds == 0.25


def test_the_tokens_of_a_garbage_header_do_not_enter_the_sums() -> None:
    tallies = after_merge({}, [], [Verdict("n", "d", "east", "tokens", -50)], version=1)
    assert tallies["east"].refused == {"tokens": (1, 0)}


@pytest.mark.parametrize(
    ("previous", "norms", "expected"),
    [
        (0.0, [5.0], 5.0),  # the first known value is taken whole
        (0.0, [9.0, 1.0, 4.0], 4.0),
        (0.0, [1.0, 3.0], 2.0),
        (2.0, [9.0, 1.0, 4.0], 3.0),  # half-way from 2 to 4
        (2.0, [], 2.0),
        (8.0, [2.0, 4.0, 100.0, 0.0], 5.5),  # half-way from 8 to 3
    ],
)
def test_the_running_median_moves_half_way(
    previous: float, norms: list[float], expected: float
) -> None:
    assert running_median(previous, norms) == expected


def test_the_norm_of_a_delta_is_that_of_its_tensors_together() -> None:
    assert OFFER.norm == 5.0
    assert replace(OFFER, norms=()).norm == 0.0


# --- JSON


def test_a_contribution_survives_being_written_down() -> None:
    assert contribution_from_json(written_and_read(OFFER.to_json())) == OFFER


def test_a_contribution_that_is_not_finite_can_still_be_read_to_be_refused() -> None:
    bad = replace(OFFER, norms=(math.inf, math.nan), num_tokens=math.nan)  # type: ignore[arg-type]
    again = contribution_from_json(written_and_read(bad.to_json()))
    assert again.norms[0] == math.inf
    assert math.isnan(again.norms[1])
    assert judge(again, LINEAGE) == "tokens"


def a_commit() -> Commit:
    verdicts = (Verdict("n", "d", "west", "stale", 7),)
    consumed = (consume(OFFER, "digest", 8),)
    tallies = after_merge(LINEAGE.tallies, consumed, verdicts, version=9)
    return Commit(2, 9, "d8", consumed, verdicts, tallies, 0.1, 0.7, 0.9, "bfloat16", 3, PAYLOAD)


def test_a_commit_survives_being_written_down() -> None:
    commit = a_commit()
    assert commit_from_json(written_and_read(commit.to_json())) == commit
    assert commit.merged_tokens == 2500


def test_a_snapshot_survives_being_written_down() -> None:
    snapshot = Snapshot(3, (1, 2, 3), ("a", "b", "c"), 12345, "before")
    assert snapshot_from_json(written_and_read(snapshot.to_json())) == snapshot


def test_layouts_survive_being_written_down() -> None:
    layouts = (
        FragmentLayout(0, (TensorSpec("ä/b", (2, 3), 0, "rda"), TensorSpec("s", (), 6, "mean"))),
        FragmentLayout(1, (TensorSpec("zarr.json", (0,), 0, "rda"),)),
    )
    assert layouts_from_json(written_and_read({"x": layouts_to_json(layouts)})["x"]) == layouts
