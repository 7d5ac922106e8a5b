"""How a model is cut into fragments, when a fragment is due, and which way a pseudo-gradient points.

Knows names, shapes and step counts; must not know arrays of a model, a store or a clock.

What belongs to a fragment: every trainable parameter, once, under the first name the model gives it (a tied weight has
two names and one place). Buffers, integer counters and frozen parameters belong to none: frozen parameters never
change, buffers stay with their learner and its checkpoints. A trainable parameter that no loss reaches is in a
fragment like any other; its delta is zero, so it stays where it is.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from islands.types import ConfigError, FragmentLayout, FragmentMismatch, TensorSpec

Vector = npt.NDArray[np.float32]


def partition(sizes: Mapping[str, int], num_fragments: int) -> tuple[tuple[str, ...], ...]:
    """Return `num_fragments` groups of names, balanced greedily: the largest next, into the emptiest group.

    The same in every process: ties between names go by name, ties between groups by index. The largest group is at
    most 4/3 of the best possible (Graham's bound for this rule).

    Args:
        sizes: name -> elements, >= 0.
        num_fragments: how many groups, 1 to the number of non-empty tensors.

    Raises:
        ConfigError: more fragments than non-empty tensors, or fewer than one.

    Source: Decoupled DiLoCo, arXiv:2604.21428, "balanced tensor" fragmentation, as retold by its readers.
    """
    num_filled = sum(size > 0 for size in sizes.values())
    if not 1 <= num_fragments <= num_filled:
        raise ConfigError(
            f"sync.num_fragments must be between 1 and the number of non-empty tensors ({num_filled}), "
            f"got {num_fragments}; choose fewer fragments or a larger model"
        )
    groups: list[list[str]] = [[] for _ in range(num_fragments)]
    loads = [0] * num_fragments
    for name, size in sorted(sizes.items(), key=lambda item: (-item[1], item[0])):
        emptiest = loads.index(min(loads))
        groups[emptiest].append(name)
        loads[emptiest] += size
    return tuple(tuple(group) for group in groups)


def lay_out(
    shapes: Mapping[str, tuple[int, ...]], *, embeddings: Collection[str], num_fragments: int
) -> tuple[FragmentLayout, ...]:
    """Return the fragments of a model whose trainable tensors are `shapes` (name -> shape; `()` is a scalar).

    `embeddings` names the tensors merged by weighted mean; all others are merged by direction and length.
    """
    sizes = {name: int(np.prod(shape, dtype=np.int64)) for name, shape in shapes.items()}
    layouts = []
    for index, names in enumerate(partition(sizes, num_fragments)):
        specs, offset = [], 0
        for name in names:
            merge = "mean" if name in embeddings else "rda"
            specs.append(TensorSpec(name, tuple(shapes[name]), offset, merge))
            offset += sizes[name]
        layouts.append(FragmentLayout(index, tuple(specs)))
    return tuple(layouts)


def layout_digest(layout: FragmentLayout) -> str:
    """Return a short digest of names, shapes, order and merge rules: equal iff two parties agree on all of them."""
    text = repr([(t.name, t.shape, t.offset, t.merge) for t in layout.tensors])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def list_mismatches(
    wanted: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]]
) -> list[str]:
    """Return in words how the tensors found (name -> shape) differ from those wanted, in the order of their names."""
    problems = []
    for name in sorted({*wanted, *found}):
        if name not in found:
            problems.append(f"{name} {wanted[name]} is missing")
        elif name not in wanted:
            problems.append(f"{name} {found[name]} has no place in the model")
        elif wanted[name] != found[name]:
            problems.append(f"{name} is {found[name]} instead of {wanted[name]}")
    return problems


def offset_of(fragment: int, *, period_steps: int, num_fragments: int) -> int:
    """Return the step within a period at which a fragment falls due, in 0..period_steps-1."""
    return (fragment + 1) * period_steps // num_fragments % period_steps


def is_due(local_step: int, fragment: int, *, period_steps: int, num_fragments: int) -> bool:
    """Say whether a fragment is due after `local_step` inner steps by the fixed schedule (H, P).

    Fragment 0 comes first, after H/P steps; the last one after H. Nothing is due before the first step.
    """
    if local_step < 1:
        return False
    offset = offset_of(fragment, period_steps=period_steps, num_fragments=num_fragments)
    return local_step % period_steps == offset


def first_push_steps(fragment: int, *, period_steps: int, num_fragments: int) -> int:
    """Return how many steps an incarnation trains before its first push of a fragment, 1..period_steps."""
    offset = offset_of(fragment, period_steps=period_steps, num_fragments=num_fragments)
    return offset or period_steps


def period_of_fastest(period_steps: int, step_seconds: Iterable[float]) -> float:
    """Return the seconds in which the fastest of some learners trains a period; 0 while none is measured."""
    return period_steps * min((seconds for seconds in step_seconds if seconds > 0), default=0.0)


def own_period(period_steps: int, *, step_seconds: float, all_step_seconds: Sequence[float]) -> int:
    """Return H_m: the steps this learner trains in the time the fastest one trains `period_steps`.

    Args:
        period_steps: H, of the fastest learner.
        step_seconds: this learner's seconds per step; 0 when not yet measured.
        all_step_seconds: of every learner the head knows, zeros for the unmeasured; may be empty.
    """
    known = [seconds for seconds in all_step_seconds if seconds > 0]
    if not known or step_seconds <= 0:
        return period_steps
    return max(1, round(period_steps * min(1.0, min(known) / step_seconds)))


def pseudo_gradient(anchor: Vector, local: Vector) -> Vector:
    """Return anchor minus local, so that subtracting it moves the anchor towards the local value.

    Args:
        anchor: (elements,) the published values the learner adopted, as decoded.
        local: (elements,) its own values now.

    Raises:
        FragmentMismatch: the two have different lengths.
    """
    if anchor.shape != local.shape:
        raise FragmentMismatch(f"anchor has shape {anchor.shape}, local values {local.shape}")
    return np.subtract(anchor, local, dtype=np.float32)
