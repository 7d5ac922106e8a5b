"""Error feedback: what is owed after pushes, merges, losses and returns; sums over many rounds; real runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from islands.codecs import decode, encode
from islands.feedback import Feedback, after_merge, after_push, compensated
from islands.types import Position

Vector = np.ndarray
NOTHING = Feedback()


def vector(*values: float) -> Vector:
    return np.array(values, dtype=np.float32)


def pushed(owed: Feedback, step: int, delta: Vector, decoded: Vector) -> Feedback:
    return after_push(owed, Position(0, step), delta, decoded)


def residual(owed: Feedback) -> list[float]:
    assert owed.residual is not None
    return [float(value) for value in owed.residual]


def test_a_merged_pushs_error_is_owed_and_goes_into_the_next_one() -> None:
    owed = pushed(NOTHING, 10, vector(3, -1), vector(2, -2))
    assert owed.residual is None
    owed = after_merge(owed, Position(0, 10))
    assert residual(owed) == [1, 1]
    assert compensated(owed, vector(5, 5)).tolist() == [6, 6]
    # What travels now is 7 and 5 for 6 and 6: of the 6 owed and new, one too much arrived, one is missing.
    owed = after_merge(pushed(owed, 20, vector(5, 5), vector(7, 5)), Position(0, 20))
    assert residual(owed) == [-1, 1]


def test_a_push_that_is_never_merged_leaves_the_residual_as_it_was() -> None:
    owed = after_merge(pushed(NOTHING, 10, vector(3), vector(2)), Position(0, 10))
    lost = pushed(owed, 20, vector(9), vector(4))
    assert residual(lost) == [1]
    assert residual(after_merge(lost, Position(0, 10))) == [
        1
    ]  # a version that merged nothing of it
    later = pushed(lost, 30, vector(2), vector(2))
    assert residual(after_merge(later, Position(0, 30))) == [1]
    assert after_merge(later, Position(0, 30)).outstanding == ()


def test_two_pushes_that_carried_the_same_residual_count_it_once() -> None:
    owed = after_merge(pushed(NOTHING, 10, vector(3), vector(2)), Position(0, 10))
    late = pushed(owed, 20, vector(4), vector(5))  # 4 and 1 owed were coded as 5, exactly
    both = pushed(late, 30, vector(6), vector(7))  # 6 and the same 1 owed
    assert residual(after_merge(both, Position(0, 20))) == [0]
    # 1 was owed and has now arrived twice: one is owed back.
    assert residual(after_merge(after_merge(both, Position(0, 20)), Position(0, 30))) == [-1]


def test_a_merge_of_a_push_that_is_not_remembered_leaves_nothing_owed() -> None:
    owed = after_merge(pushed(NOTHING, 10, vector(3), vector(2)), Position(0, 10))
    restored = after_merge(owed, Position(0, 25))
    assert restored.residual is None
    assert restored.settled == Position(0, 25)
    assert after_merge(restored, Position(0, 10)) == restored  # an older version says nothing new


def test_only_the_two_newest_pushes_are_remembered() -> None:
    owed = NOTHING
    for step in (10, 20, 30):
        owed = pushed(owed, step, vector(step), vector(0))
    assert [one.stop.step for one in owed.outstanding] == [20, 30]
    assert after_merge(owed, Position(0, 10)).residual is None
    assert [one.stop.step for one in after_merge(owed, Position(0, 10)).outstanding] == [20, 30]


def test_the_same_work_written_again_is_one_push() -> None:
    owed = pushed(pushed(NOTHING, 10, vector(3), vector(2)), 10, vector(3), vector(1))
    assert len(owed.outstanding) == 1
    assert residual(after_merge(owed, Position(0, 10))) == [2]


@pytest.mark.parametrize("codec", ["bfloat16", "int8", "int4", "e3m0"])
def test_with_feedback_the_mean_over_rounds_is_unbiased(codec: str) -> None:
    """What has arrived differs from what was to arrive by one residual, however many rounds there were."""
    generator = np.random.default_rng(3)
    bias = (0.01 * generator.standard_normal(300)).astype(np.float32)
    owed, wanted, arrived, plain = NOTHING, np.zeros(300), np.zeros(300), np.zeros(300)
    for step in range(1, 201):
        delta = (bias + 0.1 * generator.standard_normal(300)).astype(np.float32)
        decoded = decode(encode(compensated(owed, delta), codec))
        owed = after_merge(pushed(owed, step, delta, decoded), Position(0, step))
        wanted += delta
        arrived += decoded
        plain += decode(encode(delta, codec))
    assert owed.residual is not None
    assert np.allclose(wanted - arrived, owed.residual, atol=1e-4)
    # One code's error at most, over two hundred rounds; without feedback errors add up.
    assert np.abs(wanted - arrived).max() < 0.2
    assert np.abs(wanted - arrived).max() < 0.5 * np.abs(wanted - plain).max()


# --- real runs, local driver ---

FOUR_BITS = ("sync.codec=int4", "sync.codec_down=int4-delta")
FAULT = 'local.faults=[{island="north", step=13, return_after_steps=8}]'


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., object]:
    pytest.importorskip("torch")
    from tests import runs

    folder = tmp_path_factory.mktemp("feedback")
    return lambda name, *assignments: runs.train(
        runs.tiny_config(folder, *assignments, store=f"memory://feedback-{name}")
    )


@pytest.mark.parametrize(
    ("codec", "down"),
    [("int8", "int8"), ("int4", "int4-delta"), ("e3m0", "e3m0-delta"), ("bfloat16", "int8-delta")],
)
def test_a_coded_run_with_a_death_balances_and_replays(
    train: Callable[..., object], codec: str, down: str
) -> None:
    from tasks.replaying import replay_into
    from tasks.verifying import verify

    run = train(codec, f"sync.codec={codec}", f"sync.codec_down={down}", FAULT, 'retention="all"')
    found = verify(run.store_url, run.run_id)
    replay_into(run, found, watch=lambda done: None)
    assert found.problems == []
    assert [row.imbalance for row in found.rows] == [0, 0, 0]


def test_changes_add_up_to_the_whole_values_bit_for_bit(train: Callable[..., object]) -> None:
    from infra.arrays import ArrayReader
    from tasks import records

    run = train("changes", *FOUR_BITS, 'retention="all"')
    head, _ = records.find_head(run.store, 0)
    first, _ = records.require_commit(run.store, 0, 0)
    values = records.read_public(run.store, first)
    assert np.array_equal(values, ArrayReader(run.store, first.payload).read("params"))
    for version in range(1, head.version + 1):
        commit, _ = records.require_commit(run.store, 0, version)
        before, values = values, records.fetch_public(run.store, commit, values)
        assert np.array_equal(values, records.read_public(run.store, commit))
        # Feedback down is built in: the public values stay one coded step behind the synchronizer's own.
        params = ArrayReader(run.store, commit.payload).read("params")
        assert np.abs(values - params).max() <= np.abs(params - before).max() / 14 * (1 + 1e-5)
    assert head.version >= 4


def test_four_bits_both_ways_move_an_eighth_of_the_bytes(train: Callable[..., object]) -> None:
    from tasks import records

    run = train("bytes", *FOUR_BITS, "model.width=64", "total_tokens=1_000")
    commit, _ = records.find_head(run.store, 0)
    size = run.layouts[0].size
    assert records.bytes_of(commit.payload, "public") <= 0.14 * 4 * size + 1000  # metadata


def test_a_checkpoint_remembers_what_is_owed(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from tasks import exchanging, history
    from tests import runs

    config = runs.tiny_config(tmp_path, *FOUR_BITS, store="memory://feedback-saved")
    driver = runs.start(config)
    while driver.num_saves < 4:
        assert driver.advance()
    seat = driver.seats["east"]
    assert seat.exchange is not None
    saved = exchanging.read_checkpoint(driver.run, history.checkpoints(driver.run, "east")[0])
    assert any(owed.residual is not None for owed in saved.feedback)
    for ours, theirs in zip(seat.exchange.feedback, saved.feedback, strict=True):
        assert ours.settled == theirs.settled
        assert [one.stop for one in ours.outstanding] == [one.stop for one in theirs.outstanding]
        assert (ours.residual is None) == (theirs.residual is None)
        if ours.residual is not None and theirs.residual is not None:
            assert np.array_equal(ours.residual, theirs.residual)


def test_without_feedback_nothing_is_owed(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from tests import runs

    config = runs.tiny_config(
        tmp_path, *FOUR_BITS, "sync.error_feedback=false", store="memory://feedback-off"
    )
    driver = runs.start(config)
    while driver.num_saves < 3:
        assert driver.advance()
    for seat in driver.seats.values():
        assert seat.exchange is not None
        assert all(
            owed.residual is None and not owed.outstanding for owed in seat.exchange.feedback
        )
