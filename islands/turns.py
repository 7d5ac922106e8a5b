"""Which fragment a learner copies, adopts, or waits for: by its own beat, or in turn with all others.

Knows a learner's accounts of its fragments; must not know arrays, a store or a clock. Two ways:

    by its own beat (decoupled)   each fragment is copied when the steps since its last adoption or copy say so, and a
                                  newer version is adopted whenever it arrives; nobody ever waits
    in turn (all the others)      one fragment after the other, H/P steps apart, is copied by all learners, tau steps
                                  before it is its turn; at its turn everybody waits for the version made of all copies

In turn, all must agree on whose turn it is, also those that died and came back. Told as a story, with a turn that
follows from a learner's own steps:

    1. a learner dies after its copy of fragment 1, which is merged nevertheless;
    2. it comes back at an earlier step, and its steps say fragment 1 once more, those of the others fragment 2;
    3. each waits for a version that needs the other's copy: forever.

So whose turn it is follows from the versions adopted alone: these are the same everywhere, give or take a version on
its way. `steps_to_push` of the fragment in turn counts the steps.

Source: Streaming DiLoCo, arXiv:2501.18512 (fixed order, overlap tau); the same conclusion as meta-pytorch/torchft PR
233, which takes the manager's step modulo P.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from islands.ledger import FragmentClock

Clocks = Sequence[FragmentClock]


def in_turn(clocks: Clocks) -> int:
    """Return the fragment whose turn it is: the one with the fewest versions, the first of several."""
    return min(range(len(clocks)), key=lambda p: (clocks[p].base_version, p))


def steps_to_copy(*, period_steps: int, num_fragments: int, overlap_steps: int) -> int:
    """Return the steps from one turn to the copy for the next."""
    return period_steps // num_fragments - overlap_steps


def due(clocks: Clocks, *, blocks: bool) -> list[int]:
    """Return the fragments to copy now."""
    ready = [p for p, clock in enumerate(clocks) if clock.steps_to_push <= 0 < clock.open_tokens]
    if not blocks:
        return ready
    turn = in_turn(clocks)
    return [p for p in ready if p == turn and clocks[p].copied_at is None]


def must_wait(clocks: Clocks, *, blocks: bool) -> bool:
    """Say whether a learner stops here: a fragment's turn has come, and its next version is not adopted yet."""
    clock = clocks[in_turn(clocks)]
    return blocks and clock.copied_at is not None and clock.steps_to_push <= 0


def adoptable(clocks: Clocks, versions: Mapping[int, int], *, blocks: bool) -> list[int]:
    """Return the fragments to adopt now, of those at hand (fragment -> version).

    In turn, that is one: at its turn, or at once if it was made without a copy of the present interval. Then this
    learner came back, and the others are a turn ahead.
    """
    newer = [p for p, version in sorted(versions.items()) if version > clocks[p].base_version]
    if not blocks:
        return newer
    turn = in_turn(clocks)
    is_under_way = clocks[turn].copied_at is not None and clocks[turn].steps_to_push > 0
    return [p for p in newer if p == turn and not is_under_way]
