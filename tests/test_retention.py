"""Claims about what may be deleted; each rule in both directions."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from islands import names
from islands.retention import (
    Facts,
    collectable,
    is_settled,
    kept_snapshots,
    newest_checkpoints,
)
from islands.types import Position


def facts(
    *,
    heads: Sequence[int] = (10, 10),
    settled: Sequence[Mapping[str, Position]] = ({}, {}),
    kept_versions: frozenset[tuple[int, int]] = frozenset(),
    folders: Mapping[str, str] | None = None,
    snapshots: Sequence[int] = (),
    max_staleness: int = 4,
) -> Facts:
    return Facts(heads, settled, kept_versions, folders or {}, frozenset(snapshots), max_staleness)


def push(
    base: int, step: int, *, incarnation: int = 0, fragment: int = 0, learner: str = "east"
) -> str:
    key = names.ContributionKey(fragment, learner, base, Position(incarnation, step))
    return names.contribution(key)


def saved(step: int, *, incarnation: int = 0, learner: str = "east") -> str:
    return names.checkpoint(learner, Position(incarnation, step))


def payload(header: str, attempt: str = "a-1") -> str:
    return f"{names.payload_folder(header, attempt)}/delta/c/0"


# --- contributions


def test_a_contribution_consumed_two_versions_behind_the_head_goes_with_its_payload() -> None:
    known = facts(settled=({"east": Position(0, 40)}, {}))
    consumed, pending = push(8, 40), push(9, 41)
    present = [payload(consumed), payload(pending), consumed, pending]
    assert collectable(present, known) == [consumed, payload(consumed)]


def test_a_contribution_is_settled_for_its_own_learner_and_fragment_alone() -> None:
    known = facts(settled=({"east": Position(0, 40)}, {}))
    others = [push(8, 40, learner="west"), push(8, 40, fragment=1)]
    assert collectable([*others, *map(payload, others)], known) == []


def test_an_older_incarnation_is_before_a_newer_one_whatever_its_step() -> None:
    known = facts(settled=({"east": Position(1, 5)}, {}))
    assert collectable([push(9, 999), push(9, 6, incarnation=1)], known) == [push(9, 999)]


@pytest.mark.parametrize(("base", "is_old"), [(3, True), (4, False), (10, False)])
def test_a_contribution_too_old_to_ever_count_goes(base: int, is_old: bool) -> None:
    # Head 10, staleness 4, and two versions more so that its refusal can be written down: 10 - 6 = 4.
    name = push(base, 50)
    key = names.parse_contribution(name)
    assert key is not None
    assert is_settled(key, facts()) is is_old
    assert collectable([name, saved(51)], facts()) == ([name] if is_old else [])


def test_a_contribution_that_came_too_old_stays_until_its_refusal_is_written_down() -> None:
    name = push(3, 50)
    unjudged = replace(facts(), unjudged=frozenset({name}))
    assert collectable([name, saved(51)], unjudged) == []
    consumed = replace(unjudged, settled=({"east": Position(0, 50)}, {}))
    assert collectable([name, saved(51)], consumed) == [name]


def test_a_learners_newest_contribution_stays_until_a_checkpoint_follows_it() -> None:
    """Its account is what the learner's next incarnation begins from: forgotten, its work would be merged twice."""
    known = facts(settled=({"east": Position(0, 40)}, {}))
    older, newest = push(6, 30), push(8, 40)
    for before in ([], [saved(39)]):
        assert collectable([*before, older, newest, payload(newest)], known) == [older]
    assert collectable([saved(40), older, newest, payload(newest)], known) == [
        older,
        newest,
        payload(newest),
    ]


@pytest.mark.parametrize(
    "name",
    [
        push(0, 6, fragment=99),
        payload(push(0, 6, fragment=99)),
        "versions/f0099/v00000000.json",
        "payloads/versions/f0099/v00000000/a-1/params/c/0",
        "advisories/f0000/x.json",
        "advisories/f0099/0-0.json",
        "advisories/x.json",
        "snapshots/x.json",
        "checkpoints/east/x.json",
        "driver/x.json",
    ],
)
def test_a_name_that_no_rule_knows_stays(name: str) -> None:
    assert collectable([name], facts()) == []


# --- attempts


def test_an_attempt_beside_the_committed_one_goes() -> None:
    header = push(9, 41)
    known = facts(folders={header: names.payload_folder(header, "a-2")})
    present = [header, payload(header, "a-1"), payload(header, "a-2"), payload(header, "a-3")]
    assert collectable(present, known) == [payload(header, "a-1"), payload(header, "a-3")]


def test_the_only_attempt_of_a_commit_stays() -> None:
    header = push(9, 41)
    assert collectable([header, payload(header)], facts()) == []


def test_an_uncommitted_attempt_goes_only_once_its_learner_has_pushed_that_fragment_again() -> None:
    header = push(9, 41)
    lost = payload(header)
    assert collectable([lost], facts()) == []
    for other in (push(9, 47, learner="west"), push(9, 47, fragment=1), push(9, 40)):
        assert collectable([other, lost], facts()) == []
    newer = push(9, 47)
    assert collectable([newer, lost, payload(newer)], facts()) == [lost]


def test_a_learner_may_be_called_like_an_attempt() -> None:
    header = push(8, 40, learner="a-1")
    known = facts(settled=({"a-1": Position(0, 40)}, {}))
    assert collectable([payload(header, "a-7")], known) == [payload(header, "a-7")]
    assert collectable([payload(header, "a-7")], facts()) == []


# --- versions


def test_the_bytes_of_a_version_nobody_needs_go_and_its_commit_stays() -> None:
    known = facts(kept_versions=frozenset({(0, 10), (0, 9), (0, 3), (1, 4)}))
    commits = [names.version(0, number) for number in (3, 4, 9, 10)]
    present = [*commits, *map(payload, commits)]
    assert collectable(present, known) == [payload(names.version(0, 4))]


def test_an_attempt_at_the_next_version_stays() -> None:
    assert collectable([payload(names.version(0, 11))], facts()) == []


def test_the_loser_of_a_race_for_a_version_goes_although_commits_are_not_listed() -> None:
    header = names.version(0, 10)
    known = facts(
        kept_versions=frozenset({(0, 10)}), folders={header: names.payload_folder(header, "a-2")}
    )
    present = [payload(header, "a-1"), payload(header, "a-2")]
    assert collectable(present, known) == [payload(header, "a-1")]


# --- snapshots, checkpoints, notes


def test_the_newest_three_snapshots_and_the_best_stay() -> None:
    assert kept_snapshots([9, 10, 99_999, 100_000, 1_000_000], best=[9]) == {
        9,
        99_999,
        100_000,
        1_000_000,
    }
    assert kept_snapshots([2, 1], best=[]) == {1, 2}
    present = [names.snapshot(number) for number in (3, 10, 9, 11, 12)]
    assert collectable(present, facts(snapshots=(3, 10, 11, 12))) == [names.snapshot(9)]


def test_the_newest_two_checkpoints_of_each_learner_stay_by_number_not_by_text() -> None:
    steps = (9, 10, 99_999, 100_000, 1_000_000)
    present = [saved(step) for step in steps] + [saved(7, learner="west")]
    random.Random(0).shuffle(present)
    present += [payload(name) for name in present]
    doomed = collectable(present, facts())
    gone = {saved(9), saved(10), saved(99_999)}
    assert set(doomed) == gone | {payload(name) for name in gone}
    assert newest_checkpoints(present)["east"][:2] == [saved(1_000_000), saved(100_000)]


def test_a_checkpoint_of_a_newer_incarnation_is_newer_although_its_step_is_lower() -> None:
    present = [saved(500), saved(400), saved(3, incarnation=1)]
    assert collectable(present, facts()) == [saved(400)]


@pytest.mark.parametrize("num_checkpoints", [1, 2, 3, 10])
def test_the_newest_checkpoint_never_goes(num_checkpoints: int) -> None:
    present = [saved(step) for step in range(num_checkpoints)]
    present += [payload(name) for name in present]
    doomed = collectable(present, facts())
    newest = saved(num_checkpoints - 1)
    assert newest not in doomed
    assert payload(newest) not in doomed


def test_the_bytes_of_a_dead_checkpoint_go_although_its_header_is_gone_or_never_came() -> None:
    # 1. The collector deletes a header. 2. It dies before the payload. 3. The next one must find the rest.
    older, kept = saved(5), [saved(10), saved(20)]
    assert collectable([*kept, payload(older)], facts()) == [payload(older)]
    # Between the kept two and after them a writer may still be at work.
    for step in (15, 25):
        assert collectable([*kept, payload(saved(step))], facts()) == []
    assert collectable([saved(10), payload(older)], facts()) == []


def test_a_note_two_versions_behind_the_head_goes() -> None:
    present = [names.advisory(1, version, 0) for version in (7, 8, 9, 10)]
    assert collectable(present, facts(heads=(99, 10))) == present[:2]


def test_only_the_newest_state_of_the_driver_stays() -> None:
    present = [names.numbered("driver", number) for number in (9, 10, 2)]
    present += [payload(name) for name in present]
    dead = {names.numbered("driver", number) for number in (2, 9)}
    assert set(collectable(present, facts())) == dead | {payload(name) for name in dead}


def test_what_no_rule_names_stays() -> None:
    present = [
        names.RUN,
        names.FINISHED,
        payload(names.RUN),
        names.incarnation("east", 0),
        names.left("east"),
        names.numbered("synchronizers", 0),
        names.numbered("changes", 0),
        names.numbered("stops", 0),
        names.version(0, 0),
        "evaluations/held-out/3.json",
        "snapshots/readme.txt",
        "driver/note.json",
        "driver/9.json",
        "payloads/elsewhere/a-1/x",
        "payloads/inbox/f0000/east/stray",
    ]
    assert collectable(present, facts(heads=(50, 50))) == []


# --- all together


def a_store(seed: int) -> tuple[list[str], Facts]:
    """Return the names of a store in the middle of things, and the facts about it."""
    generator = random.Random(seed)
    headers = [
        push(
            generator.randint(0, 10),
            generator.randint(0, 60),
            incarnation=generator.randint(0, 1),
            fragment=generator.randint(0, 1),
            learner=generator.choice(["east", "west", "a-1"]),
        )
        for _ in range(30)
    ]
    headers += [names.version(f, v) for f in (0, 1) for v in range(12)]
    headers += [
        saved(generator.randint(0, 60), learner=n) for n in ("east", "west") for _ in range(4)
    ]
    headers += [names.numbered("driver", n) for n in range(3)]
    headers += [names.snapshot(n) for n in range(7)]
    headers = sorted(set(headers))
    bytes_of = [payload(h, f"a-{n}") for h in headers for n in range(2) if generator.random() < 0.7]
    present = [h for h in headers if generator.random() < 0.8] + bytes_of
    generator.shuffle(present)
    known = facts(
        settled=({"east": Position(0, 30)}, {"west": Position(1, 20), "a-1": Position(0, 50)}),
        kept_versions=frozenset({(0, 9), (0, 10), (1, 9), (1, 10), (0, 3)}),
        folders={h: names.payload_folder(h, "a-1") for h in headers if generator.random() < 0.5},
        snapshots=(2, 4, 5, 6),
    )
    return present, known


@pytest.mark.parametrize("seed", range(10))
def test_collecting_twice_finds_nothing_more(seed: int) -> None:
    present, known = a_store(seed)
    doomed = collectable(present, known)
    assert doomed
    assert len(set(doomed)) == len(doomed)
    assert collectable([name for name in present if name not in set(doomed)], known) == []


@pytest.mark.parametrize("seed", range(10))
def test_a_collector_that_died_half_way_is_continued_by_the_next(seed: int) -> None:
    present, known = a_store(seed)
    doomed = collectable(present, known)
    for num_done in range(0, len(doomed), 7):
        done = set(doomed[:num_done])
        rest = collectable([name for name in present if name not in done], known)
        still_there = set(doomed) - done
        assert set(rest) <= still_there
        # An uncommitted attempt may outlive the push that would have named it, until the next push comes.
        for name in still_there - set(rest):
            found = names.header_of_payload(name)
            assert found is not None
            assert found[0].startswith("inbox/")
            assert found[0] not in present


@pytest.mark.parametrize("seed", range(10))
def test_headers_go_before_payloads(seed: int) -> None:
    present, known = a_store(seed)
    kinds = [name.startswith("payloads/") for name in collectable(present, known)]
    assert kinds == sorted(kinds)


@pytest.mark.parametrize("seed", range(5))
def test_the_order_of_the_listing_changes_nothing_but_the_order(seed: int) -> None:
    present, known = a_store(seed)
    assert set(collectable(sorted(present), known)) == set(collectable(present, known))
