"""A learner's exchange as its algorithm paces it: what both drivers do at a step boundary.

Knows the learner and `sync`; must not know where versions come from or where copies go. Which algorithm does what:

    decoupled      each learner by its own beat, a quorum merges. Decoupled DiLoCo, arXiv:2604.21428
    streaming      all learners, one fragment after the other, with overlap and mixing. Streaming DiLoCo,
                   arXiv:2501.18512; the schedule of meta-pytorch/torchft
    diloco         all learners, the whole model every `period_steps`. DiLoCo, arXiv:2311.08105. With `outer.merge`
                   mean, learning rate 1, momentum 0 and weights by tokens: FedAvg, arXiv:1602.05629 (local SGD,
                   arXiv:1805.09767, with equal batches), over our inner optimizer
    data-parallel  all learners send gradients, every step. What one AdamW on the joined batch computes; AdamW:
                   arXiv:1711.05101
"""

from __future__ import annotations

from collections.abc import Mapping

from infra.arrays import check_payload
from islands import names, turns
from islands.learner import Base, Copy, Learner
from islands.sections import SyncConfig
from islands.types import DamagedObject
from tasks import records
from tasks.runs import Run


def begin(learner: Learner, sync: SyncConfig) -> None:
    """Time the first copy of a learner that has just begun or come back; what a checkpoint kept goes on."""
    clock = learner.clocks[turns.in_turn(learner.clocks)]
    if clock.open_steps == 0 and clock.copied_at is None:
        _time_next(learner, sync)


def due(learner: Learner, sync: SyncConfig) -> list[int]:
    """Return the fragments to copy now."""
    return turns.due(learner.clocks, blocks=sync.blocks)


def copy(learner: Learner, sync: SyncConfig, fragment: int, *, own_period: int) -> Copy:
    """Return a copy of a fragment for pushing, the next one timed."""
    steps = sync.overlap_steps if sync.blocks else own_period
    return learner.copy(fragment, next_push_steps=steps)


def adoptable(learner: Learner, sync: SyncConfig, versions: Mapping[int, int]) -> list[int]:
    """Return the fragments to adopt now, of those at hand (fragment -> version)."""
    return turns.adoptable(learner.clocks, versions, blocks=sync.blocks)


def adopt(
    learner: Learner, sync: SyncConfig, fragment: int, base: Base, *, own_period: int
) -> None:
    """Take over a version, and time the next copy."""
    steps = sync.period_steps - sync.overlap_steps if sync.blocks else own_period
    learner.adopt(fragment, base, alpha=sync.alpha, next_push_steps=steps)
    _time_next(learner, sync)


def must_wait(learner: Learner, sync: SyncConfig) -> bool:
    """Say whether the learner stops here until a version arrives."""
    return turns.must_wait(learner.clocks, blocks=sync.blocks)


def lost_copies(run: Run, learner: Learner) -> list[int]:
    """Return the fragments whose newest copy, a predecessor's, will never be merged: where all wait, all wait for it.

    It died with the predecessor, is damaged, or was written after this incarnation had looked back, and so is fenced.
    None where nobody waits: the next copy, by the learner's own beat, covers it.
    """
    if not run.config.sync.blocks:
        return []
    own = names.incarnation(learner.name, learner.position.incarnation)
    listed = records.require(run.store, own)[0]["listed"]
    lost = []
    for fragment, clock in enumerate(learner.clocks):
        if clock.copied_at is None:
            continue
        key = names.ContributionKey(fragment, learner.name, clock.base_version, clock.copied_at)
        name = names.contribution(key)
        if name not in listed or not _is_whole(run, name):
            lost.append(fragment)
    return lost


def _is_whole(run: Run, name: str) -> bool:
    try:
        found = records.read_contribution(run.store, name)
        if found is not None:
            check_payload(run.store, found[0].payload)
    except DamagedObject:
        return False
    return found is not None


def _time_next(learner: Learner, sync: SyncConfig) -> None:
    if sync.blocks:
        steps = turns.steps_to_copy(
            period_steps=sync.period_steps,
            num_fragments=sync.num_fragments,
            overlap_steps=sync.overlap_steps,
        )
        learner.time_push(turns.in_turn(learner.clocks), steps)
