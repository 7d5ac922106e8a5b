"""Claims about the outer step: weights, the two merge rules, the chunked fold beside its slow twin, momentum."""

from __future__ import annotations

import math
import tracemalloc
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from islands.merging import (
    MOST_SAMPLED,
    Folded,
    Sample,
    cosines,
    fold,
    nesterov_step,
    radial_directional_mean,
    shares,
    spans,
    sum_of_squares,
    tensor_norms,
    token_weight,
    weighted_mean,
)
from islands.types import EmptyQuorum, FragmentLayout, FragmentMismatch, Refused, TensorSpec

Vector = np.ndarray
RULES = {"mean": weighted_mean, "rda": radial_directional_mean}


def vector(*values: float) -> Vector:
    return np.float32(values)


def layout_of(*tensors: tuple[int, str]) -> FragmentLayout:
    """Return a fragment of flat tensors, given as (size, rule); a size of -1 is a scalar."""
    specs, offset = [], 0
    for t, (size, rule) in enumerate(tensors):
        spec = TensorSpec(f"t{t}", () if size < 0 else (size,), offset, rule)
        specs.append(spec)
        offset = spec.stop
    return FragmentLayout(0, tuple(specs))


def random_deltas(layout: FragmentLayout, num_learners: int, seed: int = 0) -> list[Vector]:
    generator = np.random.default_rng(seed)
    return [
        generator.normal(size=layout.size).astype(np.float32) * np.float32(10.0**-i)
        for i in range(num_learners)
    ]


def folded(
    layout: FragmentLayout, deltas: Sequence[Vector], weights: Sequence[float], chunk: int
) -> Folded:
    return fold(
        layout,
        lambda i, start, stop: deltas[i][start:stop],
        weights=weights,
        norms=[tensor_norms(delta, layout) for delta in deltas],
        chunk_elements=chunk,
    )


def merged_tensor_by_tensor(
    layout: FragmentLayout, deltas: Sequence[Vector], weights: Sequence[float]
) -> Vector:
    """The slow, obvious twin of `fold`: everything in memory, one tensor after the other."""
    pieces = [
        RULES[spec.merge]([delta[spec.offset : spec.stop] for delta in deltas], weights)
        for spec in layout.tensors
    ]
    return np.concatenate([piece.reshape(-1) for piece in pieces])


# --- weights


def test_a_weight_is_tokens_times_mean_tokens_per_step() -> None:
    # 24 steps of 8,192 tokens: 196,608 * 8,192
    assert token_weight(24 * 8192, 24) == 1_610_612_736
    assert token_weight(12 * 8192, 12) == 805_306_368
    assert token_weight(24 * 4096, 24) == 402_653_184


def test_no_steps_weigh_nothing() -> None:
    assert token_weight(0, 0) == 0.0
    assert token_weight(0, 5) == 0.0


@pytest.mark.parametrize(("tokens", "steps"), [(-1, 1), (1, -1), (math.nan, 1), (1, math.nan)])
@pytest.mark.parametrize("swap", [math.inf, -math.inf, None])
def test_negative_and_non_finite_counts_are_refused(
    tokens: float, steps: float, swap: float | None
) -> None:
    if swap is not None and math.isnan(tokens + steps):
        tokens, steps = (swap if math.isnan(n) else n for n in (tokens, steps))
    with pytest.raises(Refused, match="counts must be finite and >= 0") as caught:
        token_weight(tokens, steps)  # type: ignore[arg-type]
    assert caught.value.reason == "tokens"


def test_shares_are_weights_over_their_sum() -> None:
    assert shares([1.0, 3.0]) == (0.25, 0.75)
    assert shares([0.0, 2.0]) == (0.0, 1.0)


@pytest.mark.parametrize("bad", [-1.0, math.nan, math.inf])
def test_a_negative_or_non_finite_weight_is_refused(bad: float) -> None:
    with pytest.raises(Refused, match="weights must be finite and >= 0"):
        shares([1.0, bad])
    for merge in RULES.values():
        with pytest.raises(Refused):
            merge([vector(1), vector(2)], [1.0, bad])
    layout = layout_of((1, "rda"))
    with pytest.raises(Refused):
        folded(layout, [vector(1), vector(2)], [bad, 1.0], 1)


# --- the plain rules


def test_the_mean_of_two_deltas_by_hand() -> None:
    deltas = [vector(3, 4), vector(4, -3)]
    assert weighted_mean(deltas, [1, 1]).tolist() == [3.5, 0.5]
    # (3 * 3 + 4) / 4, (3 * 4 - 3) / 4
    assert weighted_mean(deltas, [3, 1]).tolist() == [3.25, 2.25]


def test_the_radial_directional_mean_of_two_deltas_by_hand() -> None:
    deltas = [vector(3, 4), vector(4, -3)]
    # Both are 5 long; the directions (.6, .8) and (.8, -.6) have the mean (.7, .1), 0.707107 long.
    equal = radial_directional_mean(deltas, [1, 1])
    assert equal == pytest.approx([5 * 0.7 / math.sqrt(0.5), 5 * 0.1 / math.sqrt(0.5)])
    assert equal == pytest.approx([4.94975, 0.70711], abs=5e-6)
    assert radial_directional_mean(deltas, [3, 1]) == pytest.approx([4.110961, 2.846050], abs=1e-6)


def test_the_length_is_the_mean_of_lengths_not_of_the_longest() -> None:
    # Mean length 2, direction (1, 1) / sqrt(2).
    result = radial_directional_mean([vector(1, 0), vector(0, 3)], [1, 1])
    assert result == pytest.approx([math.sqrt(2), math.sqrt(2)])


@pytest.mark.parametrize("num_learners", [1, 2, 4, 8, 16])
def test_orthogonal_deltas_shrink_under_the_mean_and_keep_their_length_under_rda(
    num_learners: int,
) -> None:
    deltas = list(np.eye(num_learners, 20, dtype=np.float32))
    weights = [1.0] * num_learners
    mean, radial = weighted_mean(deltas, weights), radial_directional_mean(deltas, weights)
    assert np.linalg.norm(mean) == pytest.approx(1 / math.sqrt(num_learners))
    assert np.linalg.norm(radial) == pytest.approx(1.0)


@pytest.mark.parametrize("merge", RULES.values())
def test_one_learner_alone_is_merged_unchanged(merge: Callable[..., Vector]) -> None:
    delta = random_deltas(layout_of((100, "rda")), 1)[0]
    np.testing.assert_allclose(merge([delta], [7.0]), delta, rtol=2e-7)


@pytest.mark.parametrize("merge", RULES.values())
def test_the_scale_of_the_weights_does_not_matter(merge: Callable[..., Vector]) -> None:
    deltas = random_deltas(layout_of((50, "rda")), 3)
    small, large = (merge(deltas, [w * scale for w in (1, 2, 5)]) for scale in (1e-9, 1e12))
    np.testing.assert_allclose(small, large, rtol=1e-6)


@pytest.mark.parametrize("merge", RULES.values())
def test_a_member_without_weight_changes_nothing(merge: Callable[..., Vector]) -> None:
    first, second, third = random_deltas(layout_of((50, "rda")), 3)
    with_it = merge([first, second, third], [1.0, 0.0, 3.0])
    assert np.array_equal(with_it, merge([first, third], [1.0, 3.0]))


def test_a_delta_of_zero_shortens_the_result_and_does_not_turn_it() -> None:
    # Lengths 5 and 0 have the mean 2.5; the direction is that of (3, 4).
    assert radial_directional_mean([vector(3, 4), vector(0, 0)], [1, 1]) == pytest.approx([1.5, 2])


def test_directions_that_cancel_give_the_mean() -> None:
    # (1, 0) and (-1, 0) point nowhere together; the mean of (3, 0) and (-1, 0) is (1, 0).
    deltas = [vector(3, 0), vector(-1, 0)]
    assert radial_directional_mean(deltas, [1, 1]).tolist() == [1.0, 0.0]
    assert radial_directional_mean([vector(0, 0)] * 2, [1, 1]).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("merge", RULES.values())
def test_nobody_and_no_weight_are_no_zero(merge: Callable[..., Vector]) -> None:
    with pytest.raises(EmptyQuorum):
        merge([], [])
    with pytest.raises(EmptyQuorum, match=r"positive weight, got \[0, 0\]"):
        merge([vector(1), vector(2)], [0, 0])


@pytest.mark.parametrize("merge", RULES.values())
def test_different_shapes_or_counts_are_refused(merge: Callable[..., Vector]) -> None:
    with pytest.raises(FragmentMismatch, match="different shapes"):
        merge([vector(1), vector(1, 2)], [1, 1])
    with pytest.raises(FragmentMismatch, match="2 deltas but 1 weights"):
        merge([vector(1), vector(2)], [1])


# --- norms


def test_a_sum_of_squares_is_exact_where_float32_would_overflow() -> None:
    assert sum_of_squares(vector(3, 4)) == 25.0
    assert sum_of_squares(vector(1e30, 1e30)) == pytest.approx(2e60)
    assert sum_of_squares(np.ones(200_001, np.float32)) == 200_001
    assert sum_of_squares(np.zeros((0,), np.float32)) == 0.0


def test_each_tensor_has_its_own_norm() -> None:
    layout = layout_of((2, "rda"), (0, "rda"), (-1, "mean"))
    assert tensor_norms(vector(3, 4, -2), layout) == (5.0, 0.0, 2.0)


# --- the fold


LAYOUTS = {
    "one tensor": layout_of((17, "rda")),
    "one mean": layout_of((17, "mean")),
    "mixed": layout_of((5, "rda"), (9, "mean"), (4, "rda"), (3, "mean")),
    "scalars and nothing": layout_of(
        (-1, "rda"), (0, "rda"), (-1, "mean"), (7, "rda"), (0, "mean")
    ),
    "a large one between small ones": layout_of((1, "rda"), (40, "rda"), (2, "rda"), (1, "mean")),
}


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("chunk", [1, 3, 7, 16, 1000])
@pytest.mark.parametrize("num_learners", [1, 2, 5])
def test_the_fold_equals_its_slow_twin(name: str, chunk: int, num_learners: int) -> None:
    layout = LAYOUTS[name]
    deltas = random_deltas(layout, num_learners)
    weights = [1.0, 4.0, 0.0, 2.5, 100.0][:num_learners]
    result = folded(layout, deltas, weights, chunk)
    expected = merged_tensor_by_tensor(layout, deltas, weights)
    np.testing.assert_allclose(result.delta, expected, rtol=1e-6, atol=1e-9)
    assert result.delta.dtype == np.float32
    for delta, norms in zip(deltas, result.norms, strict=True):
        assert norms == pytest.approx(tensor_norms(delta, layout), rel=1e-12)


@pytest.mark.parametrize("chunk", [1, 3, 1000])
def test_the_fold_of_cancelling_deltas_is_the_mean_in_that_tensor_alone(chunk: int) -> None:
    layout = layout_of((2, "rda"), (2, "rda"), (2, "rda"))
    deltas = [vector(3, 4, 3, 0, 1, 0), vector(4, -3, -1, 0, -1, 0)]
    result = folded(layout, deltas, [1, 1], chunk)
    assert result.delta == pytest.approx([4.94975, 0.70711, 1, 0, 0, 0], abs=5e-6)
    expected = merged_tensor_by_tensor(layout, deltas, [1, 1])
    np.testing.assert_allclose(result.delta, expected, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("chunk", [2, 1000])
def test_the_fold_of_zeros_is_zero(chunk: int) -> None:
    layout = layout_of((3, "rda"), (2, "mean"))
    deltas = [np.zeros(5, np.float32), vector(0, 0, 0, 2, 4)]
    assert folded(layout, deltas, [1, 1], chunk).delta.tolist() == [0, 0, 0, 1, 2]


def test_the_fold_of_tensors_longer_than_a_block_equals_its_slow_twin() -> None:
    layout = layout_of((70_001, "rda"), (150_000, "mean"), (11, "rda"))
    deltas = random_deltas(layout, 2)
    expected = merged_tensor_by_tensor(layout, deltas, [1, 3])
    for chunk in (99_999, 300_000):
        result = folded(layout, deltas, [1, 3], chunk)
        np.testing.assert_allclose(result.delta, expected, rtol=1e-6, atol=1e-9)


def test_the_order_of_arrival_does_not_matter_once_sorted_by_name() -> None:
    layout = LAYOUTS["mixed"]
    offers = dict(
        zip("abcd", zip(random_deltas(layout, 4), [1, 2, 3, 4], strict=True), strict=True)
    )
    results = set()
    for arrival in ("abcd", "dcba", "cadb"):
        ordered = [{name: offers[name] for name in arrival}[name] for name in sorted(arrival)]
        deltas, weights = zip(*ordered, strict=True)
        results.add(folded(layout, deltas, weights, 7).delta.tobytes())
    assert len(results) == 1


def test_folding_twice_gives_the_same_bits() -> None:
    layout = LAYOUTS["mixed"]
    deltas = random_deltas(layout, 3)
    first, again = (folded(layout, deltas, [1, 2, 3], 4).delta.tobytes() for _ in range(2))
    assert first == again


def test_the_fold_reads_every_element_of_every_learner_in_order() -> None:
    layout, seen = layout_of((5, "mean"), (5, "mean")), []

    def read(i: int, start: int, stop: int) -> Vector:
        seen.append((i, start, stop))
        return np.ones(stop - start, np.float32)

    fold(layout, read, weights=[1, 1], norms=[[1, 1]] * 2, chunk_elements=4)
    assert seen == [(0, 0, 4), (1, 0, 4), (0, 4, 8), (1, 4, 8), (0, 8, 10), (1, 8, 10)]


def test_the_fold_reports_the_norms_it_saw_not_the_announced_ones() -> None:
    layout = layout_of((2, "rda"))
    result = fold(
        layout,
        lambda i, start, stop: vector(3, 4)[start:stop],
        weights=[1],
        norms=[[9]],
        chunk_elements=1,
    )
    assert result.norms == ((5.0,),)


def test_the_fold_of_nobody_or_of_no_weight_is_refused() -> None:
    layout = layout_of((2, "rda"))
    with pytest.raises(EmptyQuorum):
        folded(layout, [], [], 1)
    with pytest.raises(EmptyQuorum):
        folded(layout, [vector(1, 2)] * 2, [0, 0], 1)


def test_a_norm_too_small_for_any_float32_vector_is_no_division_by_nothing() -> None:
    layout = FragmentLayout(0, (TensorSpec("t", (4,), 0, "rda"),))
    folded = fold(
        layout,
        lambda i, start, stop: np.zeros(stop - start, np.float32),
        weights=[1.0],
        norms=[[1e-310]],
        chunk_elements=4,
    )
    assert (folded.delta == 0).all()


def test_another_number_of_norms_than_tensors_is_refused() -> None:
    layout = layout_of((1, "rda"), (1, "rda"))
    for norms in ([[1.0]], [[1.0, 1.0]] * 2):
        with pytest.raises(FragmentMismatch, match="expected 2 norms of each of 1 learners"):
            fold(layout, lambda *_: vector(1), weights=[1], norms=norms, chunk_elements=1)


@pytest.mark.parametrize("num_learners", [4, 16])
def test_the_fold_needs_one_fragment_of_memory_however_many_learners(num_learners: int) -> None:
    num_elements, chunk = 2**20, 2**16
    layout = layout_of(
        (num_elements // 2, "rda"), (num_elements // 4, "mean"), (num_elements // 4, "rda")
    )
    norms = [[math.sqrt(spec.size) for spec in layout.tensors]] * num_learners
    tracemalloc.start()
    try:
        fold(
            layout,
            lambda i, start, stop: np.full(stop - start, 1.0, np.float32),
            weights=[1.0] * num_learners,
            norms=norms,
            chunk_elements=chunk,
        )
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes <= 1.4 * 4 * num_elements


# --- who points where


def test_a_cosine_is_to_the_weighted_mean_direction_of_the_others() -> None:
    # West (4, 0) points along x, east (0, 3) along y, north (-5, 0) against x; shares 1/2, 1/4, 1/4.
    rows = np.stack([vector(4, 0), vector(0, 3), vector(-5, 0)])
    # The others of west: (0, 1/4) + (-1/4, 0). Of east: (1/2, 0) - (1/4, 0). Of north: (1/2, 0) + (0, 1/4).
    west, east, north = cosines(rows, [0.5, 0.25, 0.25])
    assert west == pytest.approx(-1 / math.sqrt(2))
    assert east == pytest.approx(0.0)
    assert north == pytest.approx(-2 / math.sqrt(5))


def test_there_is_no_cosine_where_there_is_nothing_to_compare() -> None:
    assert cosines(np.stack([vector(1, 2)]), [1.0]) == (None,)
    nothing, something = cosines(np.stack([vector(0, 0), vector(1, 2)]), [0.5, 0.5])
    assert (nothing, something) == (None, None)
    # The others of the third cancel; what is not finite is left out and spoils nobody's.
    rows = np.stack([vector(1, 0), vector(-1, 0), vector(0, 1), vector(math.inf, 0)])
    assert cosines(rows, [0.25] * 4)[2:] == (None, None)


def test_the_fold_samples_the_same_elements_however_it_is_cut_into_chunks() -> None:
    size = 3 * MOST_SAMPLED  # so every third element
    layout = layout_of((size // 2, "rda"), (size // 2, "mean"))
    deltas = [delta + np.float32(0.3) for delta in random_deltas(layout, 3)]
    whole = folded(layout, deltas, [1, 2, 3], size).cosines
    assert whole == folded(layout, deltas, [1, 2, 3], 1000).cosines
    assert whole == cosines(np.stack([delta[::3] for delta in deltas]), shares([1, 2, 3]))
    assert Sample(1, 2 * MOST_SAMPLED).rows.shape == (1, 2731)  # every third: an odd stride
    assert Sample(1, 100).rows.shape == (1, 100)


@pytest.mark.parametrize(("size", "chunk"), [(0, 3), (1, 3), (3, 3), (7, 3)])
def test_spans_cover_everything_once(size: int, chunk: int) -> None:
    covered = [i for start, stop in spans(size, chunk) for i in range(start, stop)]
    assert covered == list(range(size))
    assert all(stop - start <= chunk for start, stop in spans(size, chunk))


# --- the outer optimizer


def test_three_rounds_of_nesterov_by_hand() -> None:
    params, momentum = vector(1.0), vector(0.0)
    # buf .1: 1 - .7 (.1 + .09); buf .19: - .7 (.1 + .171); buf .271: - .7 (.1 + .2439)
    for buffer, value in ((0.1, 0.867), (0.19, 0.6773), (0.271, 0.43657)):
        params, momentum = nesterov_step(
            params, momentum, vector(0.1), learning_rate=0.7, momentum_factor=0.9
        )
        assert momentum[0] == pytest.approx(buffer)
        assert params[0] == pytest.approx(value)
    assert params.dtype == momentum.dtype == np.float32


def test_nesterov_equals_a_loop_over_scalars() -> None:
    rng = np.random.default_rng(0)
    params, momentum = rng.normal(size=(2, 20)).astype(np.float32)
    slow = [[float(p), float(m)] for p, m in zip(params, momentum, strict=True)]
    for _ in range(3):
        delta = rng.normal(size=20).astype(np.float32)
        params, momentum = nesterov_step(
            params, momentum, delta, learning_rate=0.7, momentum_factor=0.9
        )
        for state, value in zip(slow, delta, strict=True):
            state[1] = 0.9 * state[1] + float(value)
            state[0] -= 0.7 * (float(value) + 0.9 * state[1])
    np.testing.assert_allclose(params, [p for p, _ in slow], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(momentum, [m for _, m in slow], rtol=1e-5, atol=1e-6)


def test_nesterov_piece_by_piece_is_nesterov_of_the_whole() -> None:
    params, momentum, delta = np.random.default_rng(1).normal(size=(3, 100)).astype(np.float32)

    def step(part: slice) -> tuple[Vector, Vector]:
        return nesterov_step(
            params[part], momentum[part], delta[part], learning_rate=0.7, momentum_factor=0.9
        )

    whole = step(slice(None))
    pieces = [step(slice(start, stop)) for start, stop in spans(100, 33)]
    for i in range(2):
        assert np.concatenate([piece[i] for piece in pieces]).tobytes() == whole[i].tobytes()


def test_a_rate_of_one_without_momentum_lands_on_the_local_values() -> None:
    anchor, local = vector(1.0, -2.0), vector(0.25, 3.0)
    params, _ = nesterov_step(
        anchor, vector(0, 0), anchor - local, learning_rate=1.0, momentum_factor=0.0
    )
    assert params.tolist() == local.tolist()


def test_the_outer_step_leaves_its_inputs_alone() -> None:
    params, momentum, delta = vector(1.0), vector(2.0), vector(3.0)
    nesterov_step(params, momentum, delta, learning_rate=0.7, momentum_factor=0.9)
    assert (params[0], momentum[0], delta[0]) == (1.0, 2.0, 3.0)
