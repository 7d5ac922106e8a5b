"""The local driver: determinism, resuming after a kill at any point, deaths, blocking, the ledger's balance."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from islands.types import DamagedObject
from tasks import records
from tasks.clockwork import Beat, Kind
from tasks.local import MOST_BREAKS, Driver
from tasks.reporting import status
from tasks.runs import Run
from tasks.verifying import verify
from tests import runs
from tests.faulty import Dying, Killed

FAULT = 'local.faults=[{island="north", step=13, return_after_steps=8}]'
SMALL = ("total_tokens=1_400", "sync.num_fragments=2", "local.checkpoint_steps=7")
FOREVER = 'local.faults=[{island="north", step=13}]'


def final_state(run: Run) -> dict[str, bytes]:
    """Return all that a run has come to: every object of it, byte for byte."""
    return runs.objects(run)


def require_balance(run: Run) -> None:
    found = verify(run.store_url, run.run_id)
    assert found.problems == []
    assert [row.imbalance for row in found.rows] == [0] * len(run.config.islands)


def test_the_same_seed_gives_the_same_bytes(tmp_path: Path) -> None:
    first = runs.train(runs.tiny_config(tmp_path, FAULT, store="memory://same-1"))
    second = runs.train(runs.tiny_config(tmp_path, FAULT, store="memory://same-2"))
    assert final_state(first).keys() == final_state(second).keys()
    different = {
        name for name, data in final_state(first).items() if final_state(second)[name] != data
    }
    # Only what names the store, and what chains on it, may differ; every array must be equal.
    assert not [name for name in different if name.startswith("payloads/")]


def test_another_seed_gives_another_model(tmp_path: Path) -> None:
    first = runs.train(runs.tiny_config(tmp_path, store="memory://seed-0"))
    other = runs.train(runs.tiny_config(tmp_path, "seed=1", store="memory://seed-1"))
    values = [
        records.read_public(run.store, records.find_head(run.store, 0)[0]) for run in (first, other)
    ]
    assert (values[0] != values[1]).any()


def _uninterrupted(folder: Path, *assignments: str) -> tuple[Run, int]:
    """Return a finished run, and how many steps all its learners took."""
    driver = runs.start(runs.tiny_config(folder, *assignments))
    steps = []
    driver.watch = lambda beat: steps.append(beat) if beat.what == "step" else None
    return runs.finish(driver), len(steps)


def _kill_after_steps(driver: Driver, num_steps: int) -> None:
    """Advance until a learner has ended so many steps, then die in the middle of that event."""
    left = num_steps

    def watch(beat: object) -> None:
        nonlocal left
        if getattr(beat, "what", "") == "step":
            left -= 1
            if left == 0:
                raise Killed

    driver.watch = watch
    with pytest.raises(Killed):
        runs.finish(driver)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "codecs", [(), ("sync.codec=int4", "sync.codec_down=e3m0-delta")], ids=["plain", "four bits"]
)
def test_a_run_killed_at_any_step_resumes_bit_for_bit(
    tmp_path: Path, codecs: tuple[str, ...]
) -> None:
    """Every object of the resumed run, digests included, is what the uninterrupted run wrote.

    What a process killed after its n-th step leaves is what the store holds at that moment: it is copied there.
    """
    config = runs.tiny_config(
        tmp_path, FAULT.replace("13", "7"), *SMALL, *codecs, store=f"memory://killed-{len(codecs)}"
    )
    driver = runs.start(config)
    remains: list[dict[str, bytes]] = []
    driver.watch = lambda beat: (
        remains.append(final_state(driver.run)) if beat.what == "step" else None
    )
    expected = final_state(runs.finish(driver))
    assert len(remains) > 35
    for step, left_behind in enumerate(remains, start=1):
        runs.fill(driver.run.store, left_behind)
        resumed = runs.finish(runs.reopen(driver.run))
        assert final_state(resumed) == expected, f"killed after step {step} of {len(remains)}"


def test_a_run_killed_twice_in_one_place_still_resumes(tmp_path: Path) -> None:
    whole, num_steps = _uninterrupted(tmp_path / "a", FAULT)
    driver = runs.start(runs.tiny_config(tmp_path / "b", FAULT))
    for step in (num_steps // 2, 5, 5, 20):
        _kill_after_steps(driver, step)
        driver = runs.reopen(driver.run)
    again = runs.finish(driver)
    for layout in whole.layouts:
        heads = [records.find_head(run.store, layout.index)[0] for run in (whole, again)]
        assert heads[0].version == heads[1].version
        assert (
            records.read_public(whole.store, heads[0]) == records.read_public(again.store, heads[1])
        ).all()
    require_balance(again)


def test_a_stop_on_request_loses_no_step(tmp_path: Path) -> None:
    whole, _ = _uninterrupted(tmp_path / "a")
    driver = runs.start(runs.tiny_config(tmp_path / "b"))
    for _ in range(150):
        driver.advance()
    before = dict(driver.trained)
    driver.save(reschedule=False)
    resumed = runs.reopen(driver.run)
    assert resumed.trained == before
    again = runs.finish(resumed)
    assert status(again).trained == status(whole).trained
    require_balance(again)


def test_a_killed_learner_comes_back_and_the_ledger_balances(tmp_path: Path) -> None:
    run = runs.train(runs.tiny_config(tmp_path, FAULT))
    require_balance(run)
    seen = {island.name: island for island in status(run).islands}
    assert seen["north"].incarnation == 1
    assert seen["north"].tokens >= run.own_tokens("north")
    assert seen["north"].merged_share > 0.3


def test_where_nobody_waits_a_learner_that_comes_back_keeps_its_own_beat(tmp_path: Path) -> None:
    """As on clusters: a copy that died under way is covered by the next one, and not sent again at once."""
    slow = ("islands.north.push_delay_steps=20", "sync.min_learners=3")
    driver = runs.start(runs.tiny_config(tmp_path, FAULT, *slow))
    sent: list[int] = []

    def watch(beat: Beat) -> None:
        if beat.what.startswith("comes back"):
            sent.append(len(driver.seats["north"].outbox))

    driver.watch = watch
    while not sent:
        assert driver.advance()
    learner = driver.seats["north"].learner
    assert learner is not None
    assert any(clock.copied_at is not None for clock in learner.clocks)
    assert sent == [0]


def test_a_learner_that_never_returns_is_written_off_and_the_run_ends(tmp_path: Path) -> None:
    run = runs.train(runs.tiny_config(tmp_path, FOREVER))
    require_balance(run)
    seen = {island.name: island for island in status(run).islands}
    assert seen["north"].state == "left"
    assert seen["north"].tokens < run.own_tokens("north")


def test_a_learner_that_dies_before_its_first_record_leaves_an_empty_account(
    tmp_path: Path,
) -> None:
    run = runs.train(runs.tiny_config(tmp_path, 'local.faults=[{island="north", step=1}]'))
    require_balance(run)
    found = verify(run.store_url, run.run_id)
    assert {row.learner: row.trained for row in found.rows}["north"] == 0


def test_one_island_alone_trains_and_merges(tmp_path: Path) -> None:
    """A single participant moves the model: nothing waits for peers, nothing is merged with zeros."""
    text = (
        runs.TINY[: runs.TINY.index("[[islands]]")] + '[[islands]]\nname = "solo"\nbatch_size = 2\n'
    )
    run = runs.train(runs.tiny_config(tmp_path, text=text))
    require_balance(run)
    assert records.find_head(run.store, 0)[0].version > 3
    assert status(run).merged_share > 0.9


def test_a_tied_head_is_counted_once_and_still_tied_after_rounds_and_a_resume(
    tmp_path: Path,
) -> None:
    driver = runs.start(runs.tiny_config(tmp_path))
    while records.find_head(driver.run.store, 0)[0].version < 4:
        assert driver.advance()
    _kill_after_steps(driver, 1)
    again = runs.reopen(driver.run)
    for _ in range(60):
        again.advance()
    tensors = [tensor.name for layout in again.run.layouts for tensor in layout.tensors]
    assert len(tensors) == len(set(tensors))
    assert "head" not in tensors
    learners = [seat.learner for seat in again.seats.values() if seat.learner is not None]
    assert learners
    for learner in learners:
        unique = {id(parameter): parameter.numel() for parameter in learner.model.parameters()}
        assert sum(unique.values()) == sum(layout.size for layout in again.run.layouts)
        logits = learner.model(torch.zeros((1, 4), dtype=torch.long))
        learner.model.token_embedding.data.zero_()
        assert not learner.model(torch.zeros((1, 4), dtype=torch.long)).any()
        assert logits.any()


def test_the_last_of_three_islands_goes_on_merging_alone(tmp_path: Path) -> None:
    """A quorum of two, and two islands that die for good: what is needed falls with those that are left."""
    faults = 'local.faults=[{island="north", step=7}, {island="west", step=10}]'
    run = runs.train(runs.tiny_config(tmp_path, faults, "sync.min_learners=2"))
    require_balance(run)
    head, _ = records.find_head(run.store, 0)
    last, _ = records.require_commit(run.store, 0, head.version - 1)
    assert [entry.learner for entry in last.consumed] == ["east"]
    assert head.version > last.tallies["north"].last_version + 3
    before = records.read_public(run.store, last)
    assert (records.read_public(run.store, head) != before).any()
    assert {i.name: i.tokens for i in status(run).islands}["east"] >= run.own_tokens("east")


def test_islands_in_phase_without_delay_lose_nothing(tmp_path: Path) -> None:
    plain = (
        "islands.north.speed=1.0",
        "islands.north.push_delay_steps=0",
        "islands.west.start_steps=0",
    )
    more = (
        "islands.east.push_delay_steps=0",
        "islands.east.fetch_delay_steps=0",
        "islands.west.fetch_delay_steps=0",
    )
    run = runs.train(runs.tiny_config(tmp_path, *plain, *more))
    require_balance(run)
    assert status(run).merged_share == 1.0


def test_a_learner_five_times_slower_contributes_all_the_same(tmp_path: Path) -> None:
    """It holds nobody up, is merged again and again, and always with the tokens it trained."""
    run = runs.train(runs.tiny_config(tmp_path, "islands.north.speed=0.2", "total_tokens=8_000"))
    require_balance(run)
    seen = {island.name: island for island in status(run).islands}
    assert seen["north"].merged_share > 0.3
    assert seen["east"].merged_share > 0.5
    for layout in run.layouts:
        head, _ = records.find_head(run.store, layout.index)
        commits = [
            records.require_commit(run.store, layout.index, v)[0] for v in range(1, head.version)
        ]
        own = [(c.version, e) for c in commits for e in c.consumed if e.learner == "north"]
        assert all(entry.num_tokens == 32 * entry.num_steps for _, entry in own)
        gaps = [later - earlier for (earlier, _), (later, _) in pairwise(own)]
        assert len(own) >= 2
        assert max(gaps) <= 4


def test_a_learner_behind_a_slow_link_is_merged_late_and_discounted(tmp_path: Path) -> None:
    config = runs.tiny_config(
        tmp_path,
        "islands.north.push_delay_steps=5",
        "islands.north.fetch_delay_steps=5",
        'retention="all"',
    )
    run = runs.train(config)
    require_balance(run)
    staleness = set()
    for layout in run.layouts:
        head, _ = records.find_head(run.store, layout.index)
        for version in range(1, head.version + 1):
            commit, _ = records.require_commit(run.store, layout.index, version)
            staleness |= {entry.staleness for entry in commit.consumed if entry.learner == "north"}
    assert max(staleness) >= 1
    assert {island.name: island for island in status(run).islands}["north"].merged_share > 0.2


def test_bounded_retention_keeps_a_bounded_number_of_objects(tmp_path: Path) -> None:
    """Twice the training leaves no more live objects behind, apart from the commits."""
    counts = []
    for n, tokens in enumerate((4_000, 8_000, 16_000)):
        run = runs.train(runs.tiny_config(tmp_path / str(n), f"total_tokens={tokens}"))
        counts.append(sum(not name.startswith("versions/") for name in run.store.list_names("")))
    assert counts[2] <= counts[1] * 1.2


def test_nan_is_refused_by_its_sender_and_never_reaches_a_version(tmp_path: Path) -> None:
    """A learner whose parameters break starts again from its newest checkpoint; others go on."""
    driver = runs.start(runs.tiny_config(tmp_path))
    said, ends = [], []

    def watch(beat: Beat) -> None:
        said.append(beat.what)
        if (beat.island, beat.what) == ("east", "step"):
            ends.append(beat.time)

    driver.watch = watch
    broken = False
    while driver.advance():
        learner = driver.seats["east"].learner
        if not broken and learner is not None and learner.position.step == 12:
            broken = True
            next(iter(learner.model.parameters())).data.fill_(float("nan"))
    assert any("non-finite" in what for what in said)
    assert all(later - earlier >= 1.0 for earlier, later in pairwise(ends))  # one step at a time
    require_balance(driver.run)
    for layout in driver.run.layouts:
        head, _ = records.find_head(driver.run.store, layout.index)
        assert bool((abs(records.read_public(driver.run.store, head)) < 1e6).all())


def test_a_learner_that_breaks_again_and_again_is_given_up(tmp_path: Path) -> None:
    driver = runs.start(runs.tiny_config(tmp_path))
    while driver.advance():
        learner = driver.seats["east"].learner
        if learner is not None and learner.position.step >= 12:
            next(iter(learner.model.parameters())).data.fill_(float("nan"))
    require_balance(driver.run)
    seen = {island.name: island for island in status(driver.run).islands}
    assert (
        len(driver.run.store.list_names("learners/east/")) == 1 + MOST_BREAKS + 1
    )  # lives, and the farewell
    assert seen["east"].tokens < driver.run.own_tokens("east")


def _to_the_first(driver: Driver, kind: Kind, after: float) -> None:
    """Advance until the next event is of a kind, at or after a time."""
    while not (driver.events[0].kind is kind and driver.events[0].time >= after):
        driver.advance()


def _die_at_every_operation(
    tmp_path: Path, kind: Kind, after: float, check: Callable[[Run], None]
) -> int:
    """Kill the process at the n-th store operation of one event, for every n; return how many there were."""
    n = 0
    while True:
        config = runs.tiny_config(tmp_path, *SMALL, store=f"memory://dying-{tmp_path.name}-{n}")
        driver = runs.start(config)
        store = driver.run.store
        dying = Dying(store, -1)  # not yet
        object.__setattr__(driver.run, "store", dying)
        _to_the_first(driver, kind, after)
        dying.left = n
        try:
            driver.advance()
        except Killed:
            object.__setattr__(driver.run, "store", store)
            check(driver.run)
            n += 1
            continue
        return n


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("kind", "after"),
    [(Kind.MERGE, 10.0), (Kind.PUSH_LANDS, 10.0), (Kind.SAVE, 7.0), (Kind.RETURN, 0.0)],
)
def test_a_writer_killed_at_its_nth_operation_leaves_the_old_world_or_the_new(
    tmp_path: Path, kind: Kind, after: float
) -> None:
    """Whatever the operation, the run is sound as it stands and goes on to its end without anybody's help."""
    heads: set[tuple[int, ...]] = set()

    def check(run: Run) -> None:
        found = verify(run.store_url, run.run_id)
        assert found.problems == []
        assert all(row.imbalance == 0 for row in found.rows)
        heads.add(
            tuple(records.find_head(run.store, layout.index)[0].version for layout in run.layouts)
        )
        require_balance(runs.finish(runs.reopen(run)))

    assert _die_at_every_operation(tmp_path, kind, after, check) > 3
    assert len(heads) <= 4


def test_creating_a_run_can_die_at_any_operation_and_is_repeated(tmp_path: Path) -> None:
    """Before `run.json` the name is still free; after it, resuming completes the creation."""
    from tasks import creating
    from tasks.runs import list_runs

    n = 0
    while True:
        config = runs.tiny_config(tmp_path, store=f"memory://creating-{n}")
        prepared = creating.prepare_run(config, "r")
        attempts = creating.attempts_of(prepared)
        object.__setattr__(prepared, "store", Dying(prepared.store, n))
        try:
            creating.create_run(prepared, attempts)
        except Killed:
            n += 1
            assert list_runs(config.store) == []
            require_balance(runs.train(config))
            continue
        assert n > 3
        return


def test_streaming_learners_that_wait_for_each_other_go_on(tmp_path: Path) -> None:
    """One that died between two turns comes back while a slow one lags and then leaves."""
    fault = 'local.faults=[{island="west", step=11, return_after_steps=2}]'
    slow = (
        "islands.north.speed=0.3",
        "islands.north.push_delay_steps=0",
        "islands.west.start_steps=0",
    )
    config = runs.tiny_config(
        tmp_path, fault, *slow, "total_tokens=9_000", 'sync.algorithm="streaming"'
    )
    run = runs.train(config)
    require_balance(run)
    assert status(run).is_finished


def test_a_run_without_its_saved_state_is_not_destroyed_by_resuming(tmp_path: Path) -> None:
    driver = runs.start(runs.tiny_config(tmp_path, "local.checkpoint_steps=5"))
    while records.find_head(driver.run.store, 0)[0].version < 6:
        driver.advance()
    run = driver.run
    for name in run.store.list_names("driver/"):
        run.store.delete(name)
    before = final_state(run)
    with pytest.raises(DamagedObject):
        runs.reopen(run)
    assert final_state(run) == before


def test_verify_misses_what_the_saved_state_goes_on_from(tmp_path: Path) -> None:
    driver = runs.start(runs.tiny_config(tmp_path))
    while not driver.run.store.list_names("driver/"):
        driver.advance()
    name = driver.run.store.list_names("checkpoints/east/")[0]
    driver.run.store.delete(name)
    assert name in {problem.name for problem in verify(driver.run.store_url, "r").problems}


@pytest.mark.parametrize("step", [7, 10, 13])
def test_a_copy_lost_on_its_way_does_not_block_a_streaming_run(tmp_path: Path, step: int) -> None:
    """A replica dies between copy and landing, with a checkpoint that says the copy was made."""
    from tests.test_torchft import run_scalars, streaming

    fault = f'faults = [{{ island = "replica-1", step = {step}, return_after_steps = 4 }}]'
    text = streaming(15 * 16 * 2, 2, 0.0, fault).replace(
        "batch_size = 1", "batch_size = 1\npush_delay_steps = 1.5"
    )
    driver, _ = run_scalars(tmp_path, text)
    assert verify(driver.run.store_url, driver.run.run_id).problems == []
    assert records.find_head(driver.run.store, 0)[0].version >= 2


# East and west fill the inbox for 40 steps; then the third, which the quorum waits for, dies in its second step.
PENT_UP = (
    """
total_tokens = 30_000
durable = false
"""
    + runs.MODEL
    + """[sync]
num_fragments = 4
period_steps = 24
min_learners = 3
[local]
checkpoint_steps = 40
faults = [{island = "late", step = 1}]
[[islands]]
name = "east"
batch_size = 2
[[islands]]
name = "west"
batch_size = 2
[[islands]]
name = "late"
batch_size = 2
start_steps = 40.0
"""
)


def _merges(driver: Driver) -> list[tuple[float, str]]:
    """Advance to the end and return (base step, "f<p>") of every merge."""
    found: list[tuple[float, str]] = []
    driver.watch = lambda beat: (
        found.append((beat.time, beat.what.split()[1])) if beat.what.startswith("merge") else None
    )
    runs.finish(driver)
    return found


def test_fragments_found_pending_together_merge_in_turn_and_stay_apart(tmp_path: Path) -> None:
    """24 steps, 4 fragments: all are complete at step 42, and merge at 42, 48, 54, 60 and a period after each."""
    merges = _merges(runs.start(runs.tiny_config(tmp_path, text=PENT_UP, store="memory://turns")))
    assert merges[:8] == [(42.0 + 6 * n, f"f{n % 4}") for n in range(8)]
    times = [time for time, _ in merges]
    before_the_end = [time for time in times if time < max(times)]
    assert all(later - earlier >= 6 for earlier, later in pairwise(before_the_end))


def test_under_a_blocking_algorithm_fragments_merge_when_they_are_complete(tmp_path: Path) -> None:
    """Of period 6 and 3 fragments one is due every second step; a learner that waited longer would lose its turn."""
    phases = [
        f"islands.{name}.{key}_delay_steps=0.0"
        for name in ("east", "north", "west")
        for key in ("push", "fetch")
    ]
    blocking = (
        "sync.algorithm=streaming",
        "islands.west.start_steps=0.0",
        "islands.north.speed=1.0",
    )
    config = runs.tiny_config(tmp_path, *phases, *blocking, store="memory://in-turn")
    merges = _merges(runs.start(config))
    assert merges[:4] == [(2.0, "f0"), (4.0, "f1"), (6.0, "f2"), (8.0, "f0")]


@pytest.mark.parametrize(("period", "fragments"), [(6, 3), (7, 3), (5, 2)])
def test_islands_in_phase_lose_nothing_to_the_spacing_of_first_merges(
    tmp_path: Path, period: int, fragments: int
) -> None:
    phases = [
        f"islands.{name}.{key}_delay_steps=0.0"
        for name in ("east", "north", "west")
        for key in ("push", "fetch")
    ]
    even = ("islands.west.start_steps=0.0", "islands.north.speed=1.0")
    sync = (f"sync.period_steps={period}", f"sync.num_fragments={fragments}")
    config = runs.tiny_config(tmp_path, *phases, *even, *sync, store=f"memory://phase-{period}")
    driver = runs.start(config)
    merges = _merges(driver)
    first = [(float((p + 1) * period // fragments), f"f{p}") for p in range(fragments)]
    assert merges[:fragments] == first
    assert status(driver.run).merged_share == 1.0
