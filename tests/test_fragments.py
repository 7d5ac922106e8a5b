"""Claims about cutting a model into fragments, about when one is due, and about the sign of a pseudo-gradient."""

from __future__ import annotations

import itertools
import os
import random
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest

from islands.fragments import (
    first_push_steps,
    is_due,
    lay_out,
    layout_digest,
    offset_of,
    own_period,
    partition,
    pseudo_gradient,
)
from islands.types import ConfigError, FragmentMismatch

ROOT = Path(__file__).resolve().parent.parent
SIZES = {"a": 9, "b": 8, "c": 7, "d": 6, "e": 5, "f": 4, "g": 3, "h": 2}
ODD_SHAPES = {
    "a.b": (2, 3),
    "a/b": (3, 2),
    "x" * 300: (5,),
    "größe.δ.層": (4,),
    "zarr.json": (),
    "c": (0,),
    "..": (1,),
    "one": (1, 7),
}


def loads(groups: Sequence[Sequence[str]], sizes: Mapping[str, int]) -> list[int]:
    return [sum(sizes[name] for name in group) for group in groups]


def best_possible(sizes: Sequence[int], num_groups: int) -> int:
    """Return the smallest largest load over every assignment there is."""
    assignments = itertools.product(range(num_groups), repeat=len(sizes))
    return min(
        max(
            sum(size for size, group in zip(sizes, groups, strict=True) if group == wanted)
            for wanted in range(num_groups)
        )
        for groups in assignments
    )


# --- partition


def test_the_largest_tensor_next_goes_into_the_emptiest_group() -> None:
    groups = partition(SIZES, 3)
    # 9 | 8 | 7, then 6 on 7, 5 on 8, 4 on 9: all have 13; 3 goes to the first, 2 to the second.
    assert groups == (("a", "f", "g"), ("b", "e", "h"), ("c", "d"))
    assert loads(groups, SIZES) == [16, 15, 13]


def test_equal_sizes_are_ordered_by_name_and_equal_groups_by_index() -> None:
    assert partition({"d": 1, "b": 1, "c": 1, "a": 1}, 2) == (("a", "c"), ("b", "d"))


def test_the_largest_group_is_at_most_four_thirds_of_the_best_possible() -> None:
    generator = random.Random(0)
    for _ in range(60):
        num_groups = generator.randint(2, 3)
        sizes = [generator.randint(1, 30) for _ in range(generator.randint(num_groups, 7))]
        named = {f"t{i}": size for i, size in enumerate(sizes)}
        largest = max(loads(partition(named, num_groups), named))
        assert 3 * largest <= 4 * best_possible(sizes, num_groups), (sizes, num_groups)


def test_the_order_of_the_names_does_not_matter() -> None:
    generator = random.Random(1)
    for _ in range(20):
        names = list(SIZES)
        generator.shuffle(names)
        assert partition({name: SIZES[name] for name in names}, 3) == partition(SIZES, 3)


def test_every_process_cuts_alike_whatever_its_hash_seed() -> None:
    program = (
        "from islands.fragments import lay_out, layout_digest\n"
        "shapes = {name: (len(name), 3) for name in {'b', 'a', 'cc', 'dd', 'eee', 'fff', 'g'}}\n"
        "print([layout_digest(x) for x in lay_out(shapes, embeddings={'a'}, num_fragments=3)])\n"
        "print(lay_out(shapes, embeddings={'a'}, num_fragments=3))\n"
    )
    answers = {
        subprocess.run(
            [sys.executable, "-c", program],
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "1", "2")
    }
    assert len(answers) == 1
    assert "'eee'" in answers.pop()


@pytest.mark.parametrize("num_fragments", [0, -1, 3, 8])
def test_more_fragments_than_tensors_with_values_are_refused(num_fragments: int) -> None:
    with pytest.raises(ConfigError, match=rf"non-empty tensors \(2\), got {num_fragments}; choose"):
        partition({"a": 5, "b": 3, "empty": 0}, num_fragments)


def test_no_fragment_is_without_values() -> None:
    sizes = {"large": 100, "a": 1, "b": 1, "none": 0, "nothing": 0}
    assert all(load > 0 for load in loads(partition(sizes, 3), sizes))


# --- lay_out


def test_each_tensor_lies_in_exactly_one_fragment_whatever_its_name_and_shape() -> None:
    layouts = lay_out(ODD_SHAPES, embeddings=(), num_fragments=3)
    placed = [spec for layout in layouts for spec in layout.tensors]
    assert sorted(spec.name for spec in placed) == sorted(ODD_SHAPES)
    assert {spec.name: spec.shape for spec in placed} == ODD_SHAPES
    assert sum(layout.size for layout in layouts) == 6 + 6 + 5 + 4 + 1 + 0 + 1 + 7


def test_tensors_follow_each_other_without_a_gap() -> None:
    for layout in lay_out(ODD_SHAPES, embeddings=(), num_fragments=2):
        ends = [spec.stop for spec in layout.tensors]
        assert [spec.offset for spec in layout.tensors] == [0, *ends[:-1]]
        assert layout.size == ends[-1]


def test_a_scalar_takes_one_place_and_an_empty_tensor_none() -> None:
    (layout,) = lay_out({"scalar": (), "empty": (0, 3)}, embeddings=(), num_fragments=1)
    assert [(spec.name, spec.offset, spec.size) for spec in layout.tensors] == [
        ("scalar", 0, 1),
        ("empty", 1, 0),
    ]


def test_embeddings_are_merged_by_mean_and_all_else_by_direction_and_length() -> None:
    (layout,) = lay_out({"table": (4, 2), "head": (2, 4)}, embeddings={"table"}, num_fragments=1)
    assert {spec.name: spec.merge for spec in layout.tensors} == {"table": "mean", "head": "rda"}


def test_the_digest_tells_apart_names_shapes_and_merge_rules() -> None:
    def digest(shapes: dict[str, tuple[int, ...]], embeddings: tuple[str, ...] = ()) -> str:
        return layout_digest(lay_out(shapes, embeddings=embeddings, num_fragments=1)[0])

    reference = digest({"a": (2, 3)})
    assert digest({"a": (2, 3)}) == reference
    others = [digest({"b": (2, 3)}), digest({"a": (3, 2)}), digest({"a": (2, 3)}, ("a",))]
    assert len({reference, *others}) == 4


# --- when


def due_steps(fragment: int, *, period_steps: int, num_fragments: int, until: int) -> list[int]:
    return [
        step
        for step in range(until + 1)
        if is_due(step, fragment, period_steps=period_steps, num_fragments=num_fragments)
    ]


def test_fragments_fall_due_spread_over_the_period_the_last_at_its_end() -> None:
    assert due_steps(0, period_steps=6, num_fragments=2, until=12) == [3, 9]
    assert due_steps(1, period_steps=6, num_fragments=2, until=12) == [6, 12]


@pytest.mark.parametrize(("period", "num_fragments"), [(7, 3), (24, 5), (10, 4), (5, 5), (1, 1)])
def test_every_fragment_is_due_once_in_each_period(period: int, num_fragments: int) -> None:
    for fragment in range(num_fragments):
        steps = due_steps(
            fragment, period_steps=period, num_fragments=num_fragments, until=4 * period
        )
        assert len(steps) == 4
        assert {b - a for a, b in itertools.pairwise(steps)} <= {period}


@pytest.mark.parametrize(("period", "num_fragments"), [(24, 24), (24, 7), (9, 4)])
def test_no_two_fragments_are_due_at_once(period: int, num_fragments: int) -> None:
    offsets = [
        offset_of(p, period_steps=period, num_fragments=num_fragments) for p in range(num_fragments)
    ]
    assert len(set(offsets)) == num_fragments
    assert all(0 <= offset < period for offset in offsets)


def test_the_first_push_comes_after_the_offset_and_a_whole_period_for_the_last() -> None:
    # floor((p + 1) 24 / 5) = 4, 9, 14, 19, 24
    steps = [first_push_steps(p, period_steps=24, num_fragments=5) for p in range(5)]
    assert steps == [4, 9, 14, 19, 24]
    for p in range(5):
        assert due_steps(p, period_steps=24, num_fragments=5, until=24) == [steps[p]]


def test_a_slow_learner_trains_as_long_as_the_fastest_with_fewer_steps() -> None:
    speeds = [1.0, 1.0, 0.85, 0.7]
    seconds = [1 / speed for speed in speeds]
    # 24 * 0.85 = 20.4, 24 * 0.7 = 16.8
    periods = [own_period(24, step_seconds=s, all_step_seconds=seconds) for s in seconds]
    assert periods == [24, 24, 20, 17]


def test_what_is_not_measured_does_not_change_the_period() -> None:
    assert own_period(24, step_seconds=0.0, all_step_seconds=[1.0]) == 24
    assert own_period(24, step_seconds=2.0, all_step_seconds=[]) == 24
    assert own_period(24, step_seconds=2.0, all_step_seconds=[0.0, 1.0, 2.0]) == 12


def test_a_learner_faster_than_all_known_ones_keeps_the_period() -> None:
    assert own_period(24, step_seconds=0.5, all_step_seconds=[1.0]) == 24


def test_the_slowest_learner_still_trains_a_step() -> None:
    assert own_period(24, step_seconds=1000.0, all_step_seconds=[1.0, 1000.0]) == 1


# --- pseudo_gradient


def test_subtracting_the_pseudo_gradient_moves_the_anchor_to_the_local_values() -> None:
    anchor, local = np.float32([1.0, -2.0, 0.5]), np.float32([0.75, 1.0, 0.5])
    delta = pseudo_gradient(anchor, local)
    assert delta.tolist() == [0.25, -3.0, 0.0]
    assert delta.dtype == np.float32
    assert (anchor - delta).tolist() == local.tolist()


def test_a_fragment_of_another_length_is_refused() -> None:
    with pytest.raises(FragmentMismatch, match=r"\(3,\).*\(2,\)"):
        pseudo_gradient(np.zeros(3, np.float32), np.zeros(2, np.float32))
