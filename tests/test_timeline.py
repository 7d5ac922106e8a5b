"""A run's records lie on one axis of time, whatever their stamps say; nothing kept is missing from the story."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from islands import names
from islands.chaos import Fault, Strike
from islands.sealing import seal, unseal
from islands.timeline import Axis, Stamp, axis_of, track_of
from tasks import records
from tasks.blows import Blow, blows_of
from tasks.local import Driver
from tasks.runs import Run
from tasks.timeline import read_timeline
from tests import runs

NOON = 1_750_000_000.0
DAY = 86_400.0
# North dies in the step after its 7th, at base step 8 / 0.7, and is back 6 base steps later; west never comes back.
FAULTS = (
    'local.faults=[{island="north", step=7, return_after_steps=6}, {island="west", step=40}]',
    "total_tokens=6_000",
)
DEATH = 8 / 0.7


@pytest.fixture(scope="module", params=["bounded", "all"])
def finished(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A finished run with a death, a return and a write-off, under each retention."""
    folder = tmp_path_factory.mktemp("timeline")
    store = f"memory://timeline-{request.param}"
    keeps = f'retention="{request.param}"'
    return runs.train(runs.tiny_config(folder, *FAULTS, keeps, store=store))


def stamps(writer: str, *ats: float | None) -> list[Stamp]:
    return [Stamp(writer, at) for at in ats]


def advance(driver: Driver, num_merges: int) -> None:
    """Advance until so many versions are published, over all fragments."""
    while sum(head.version for head in driver.synchronizer.heads()) < num_merges:
        assert driver.advance()


# --- the axis ---


def test_small_stamps_are_base_steps_from_zero_and_large_ones_seconds_from_the_first() -> None:
    steps = axis_of(stamps("west", 2.0, 7.0, 12.0), {})
    assert (steps.is_steps, steps.origin, steps.length) == (True, 0.0, 12.0)
    assert steps.place(Stamp("west", 7.0)) == 7.0
    seconds = axis_of(stamps("west", NOON + 2, NOON + 7, NOON + 12), {})
    assert (seconds.is_steps, seconds.origin, seconds.length) == (False, NOON + 2, 10.0)
    assert seconds.place(Stamp("west", NOON + 7)) == 5.0


@pytest.mark.parametrize("absurd", [NOON + DAY, NOON - DAY, NOON * 1e9, 1e8])
def test_one_stamp_a_day_off_does_not_stretch_the_axis(absurd: float) -> None:
    axis = axis_of(stamps("west", *(NOON + i for i in range(40)), absurd), {})
    assert (axis.length, axis.num_absurd) == (39.0, 1)
    assert axis.place(Stamp("west", absurd)) is None
    assert axis.place(Stamp("west", NOON)) == 0.0


def test_two_absurd_stamps_on_either_side_of_the_others_do_not_hide_each_other() -> None:
    ats = [NOON + i for i in range(40)]
    axis = axis_of(stamps("west", *ats, NOON + DAY) + stamps("east", NOON - DAY), {})
    assert (axis.length, axis.num_absurd) == (39.0, 2)


def test_a_run_resumed_a_day_later_has_a_gap_and_not_a_broken_clock() -> None:
    before = [Stamp("west", NOON + i) for i in range(40)]
    after = [Stamp("west", NOON + DAY), Stamp("", NOON + DAY + 1)]
    axis = axis_of([*before, *after], {})
    assert (axis.length, axis.num_absurd) == (DAY + 1, 0)


def test_stamps_that_are_missing_or_no_number_are_counted_and_have_no_place() -> None:
    unknown = (None, math.nan, math.inf, 0.0)
    axis = axis_of(stamps("west", NOON, NOON + 1, *unknown), {})
    assert axis.num_unknown == 4
    assert [axis.place(Stamp("west", at)) for at in unknown] == [None] * 4


def test_nothing_to_place_is_an_axis_all_the_same() -> None:
    axis = axis_of([], {})
    assert (axis.is_steps, axis.length) == (True, 1.0)


def test_a_clock_a_day_off_is_moved_onto_the_synchronizers() -> None:
    merges = stamps("", *(NOON + 10 * i for i in range(8)))
    # Each push is written two seconds before its merge, by a clock a day ahead.
    pushes = stamps("east", *(NOON + 10 * i - 2 + DAY for i in range(8)))
    lags = {"east": [DAY - 2] * 8, "west": [-2.0] * 8}
    axis = axis_of([*merges, *pushes, *stamps("west", NOON - 4)], lags)
    assert axis.shifts == {"east": DAY - 2}
    assert (axis.origin, axis.length, axis.num_absurd) == (NOON - 4, 74.0, 0)
    assert axis.place(Stamp("east", NOON - 2 + DAY)) == 4.0


def test_a_push_that_waits_long_for_its_merge_is_no_broken_clock() -> None:
    merges = stamps("", *(NOON + 100 * i for i in range(10)))
    assert axis_of(merges, {"west": [-90.0] * 5}).shifts == {}


def test_a_strike_lies_where_its_stamp_does_and_lasts_no_longer_than_the_axis() -> None:
    axis = Axis(1.75e9, 100.0, False, {}, 0, 0)
    faults = (
        Fault("stop", island="west", after_seconds=1.0, seconds=7.0),
        Fault("stop", "train", after_seconds=1.0, seconds=90.0),
        Fault("kill", "train", step=3, island="west"),
    )
    strikes = [
        Strike(fault, "told", 1.75e9 + at, "m", 0)
        for fault, at in zip(faults, (40.0, 40.0, 100.5), strict=True)
    ]
    assert list(blows_of(axis, strikes)) == [
        Blow("west", "told", 40.0, 7.0),
        Blow("", "told", 40.0, 60.0),
    ]


def test_a_step_between_two_records_lies_between_them_in_proportion() -> None:
    track = track_of([(20, 110.0), (10, 100.0), (30, 90.0)])
    assert [track.place(step) for step in (5, 10, 12, 20, 25, 30, 99)] == [
        100.0, 100.0, 102.0, 110.0, 110.0, 110.0, 110.0,
    ]  # fmt: skip


# --- a run ---


def test_every_version_is_a_merge_and_every_merge_names_what_it_took(finished: Run) -> None:
    timeline = read_timeline(finished)
    made = {(merge.fragment, merge.version): merge for merge in timeline.merges}
    assert len(made) == len(timeline.merges)
    for layout in finished.layouts:
        head, _ = records.find_head(finished.store, layout.index)
        assert {v for p, v in made if p == layout.index} == set(range(1, head.version + 1))
        for version in range(1, head.version + 1):
            commit, _ = records.require_commit(finished.store, layout.index, version)
            merge = made[layout.index, version]
            assert merge.place == commit.at
            taken = [(entry.push.learner, entry.push.place) for entry in merge.entries]
            assert taken == [(one.learner, one.telemetry.at) for one in commit.consumed]
            assert sum(entry.share for entry in merge.entries) == pytest.approx(1)
    assert sum(timeline.weight_shares().values()) == pytest.approx(1)
    assert [merge.place for merge in timeline.merges] == sorted(m.place for m in timeline.merges)


def test_a_death_a_return_and_a_write_off_stand_where_they_happened(finished: Run) -> None:
    east, north, west = read_timeline(finished).lanes
    assert [bar.ending for bar in east.bars] == ["left"]
    assert [bar.ending for bar in north.bars] == ["gone", "left"]
    assert [bar.ending for bar in west.bars] == ["lost"]
    gone, back = north.bars
    assert gone.end <= DEATH
    assert back.begin == pytest.approx(DEATH + 6)
    assert back.end == north.left_at
    # West starts at base step 3, and dies in its 41st step.
    assert (west.bars[0].begin, west.left_at) == (3.0, 44.0)
    assert west.bars[0].end <= 44.0


def test_adoptions_lie_inside_their_incarnation_in_the_order_of_versions(finished: Run) -> None:
    timeline = read_timeline(finished)
    for lane in timeline.lanes:
        assert lane.adoptions
        for p in range(timeline.num_fragments):
            mine = [one for one in lane.adoptions if one.fragment == p]
            assert [one.version for one in mine] == sorted(one.version for one in mine)
        for one in lane.adoptions:
            assert any(bar.begin <= one.place <= bar.end for bar in lane.bars)


def test_everything_kept_in_the_inbox_is_shown_once(finished: Run) -> None:
    timeline = read_timeline(finished)
    taken = [entry.push for merge in timeline.merges for entry in merge.entries]
    shown = [*taken, *(push for lane in timeline.lanes for push in lane.pushes)]
    found = {
        names.contribution(
            names.ContributionKey(push.fragment, push.learner, push.base_version, push.stop)
        )
        for push in shown
    }
    assert len(found) == len(shown)
    assert set(finished.store.list_names("inbox/")) <= found
    assert {push.fate for push in taken} == {"merged"}


def test_losses_are_in_bits_and_scores_in_the_order_of_snapshots(finished: Run) -> None:
    timeline = read_timeline(finished)
    entry = timeline.merges[-1].entries[0]
    commit, _ = records.require_commit(
        finished.store, timeline.merges[-1].fragment, timeline.merges[-1].version
    )
    assert entry.push.loss == pytest.approx(commit.consumed[0].telemetry.loss / math.log(2))
    kept = records.read_snapshots(finished.store)
    (score,) = timeline.evaluations
    assert (score.snapshot, score.is_kept) == (kept[-1][0].number, True)
    assert score.merged_tokens == kept[-1][0].merged_tokens


def rewrite(run: Run, name: str, changes: dict[str, object]) -> None:
    """Seal a record anew with other values, as if its writer had written them."""
    data = run.store.read(name)
    assert data is not None
    body, _ = unseal(name, data)
    run.store.delete(name)
    run.store.create(name, seal({**body, **changes})[0])


def test_a_live_run_shows_what_waits_and_who_has_not_left(tmp_path: Path) -> None:
    driver = runs.start(runs.tiny_config(tmp_path, store="memory://timeline-live"))
    nothing = read_timeline(driver.run)
    assert nothing.merges == ()
    assert [lane.bars for lane in nothing.lanes] == [(), (), ()]
    advance(driver, 5)
    timeline = read_timeline(driver.run)
    assert len(timeline.merges) >= 5
    assert [lane.bars[-1].ending for lane in timeline.lanes] == ["open"] * 3
    assert [lane.left_at for lane in timeline.lanes] == [None] * 3
    assert {push.fate for lane in timeline.lanes for push in lane.pushes} <= {
        "waiting",
        "passed over",
    }


def test_absurd_and_missing_stamps_of_a_run_leave_a_story(tmp_path: Path) -> None:
    driver = runs.start(runs.tiny_config(tmp_path, FAULTS[0], store="memory://timeline-seconds"))
    driver.clock = lambda: NOON + driver.now / 2  # half a second to a base step
    driver.reopen_synchronizer()
    run = runs.finish(driver)
    rewrite(run, names.incarnation("east", 0), {"at": NOON + DAY})
    rewrite(run, names.incarnation("north", 1), {"at": "yesterday"})
    timeline = read_timeline(run)
    axis = timeline.axis
    assert (axis.is_steps, axis.num_absurd) == (False, 1)
    assert axis.num_unknown >= 1
    assert axis.length < 200
    for lane in timeline.lanes:
        assert all(0 <= bar.begin <= bar.end <= axis.length for bar in lane.bars)
    assert [bar.ending for bar in timeline.lanes[1].bars] == ["gone", "left"]
