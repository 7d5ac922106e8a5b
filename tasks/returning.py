"""What a learner's incarnation begins from: its own past, the heads, a peer's checkpoint.

Knows records and checkpoints; must not know when a learner begins, nor what it does then.
"""

from __future__ import annotations

from collections.abc import Sequence

from islands.feedback import Feedback, after_merge
from islands.learner import Base, Learner
from islands.ledger import LearnerRecord
from islands.types import DamagedObject
from tasks import exchanging, history, records
from tasks.exchanging import Saved
from tasks.history import Past
from tasks.runs import Run


def take_up(run: Run, learner: Learner, past: Past, heads: Sequence[Base]) -> tuple[Feedback, ...]:
    """Begin a fresh learner's incarnation, from the heads and what its predecessors left; return what coding owes.

    One that joins a run under way takes the moments of a peer: with none, its first steps would all be of full size.
    """
    if past.last is None:
        has_joined = run.island(learner.name).joined_at > 0
        peer = peer_checkpoint(run, learner.name) if has_joined else None
        if peer is not None:
            learner.load(peer.state)
        learner.begin(heads, incarnation=past.incarnation)
        return (Feedback(),) * len(run.layouts)
    saved = newest_checkpoint(run, learner.name, past.last)
    state = None if saved is None else saved.state
    learner.come_back(state, past.last, heads, incarnation=past.incarnation)
    return _owed_at_return(run, learner.name, saved, heads)


def _owed_at_return(
    run: Run, learner: str, saved: Saved | None, heads: Sequence[Base]
) -> tuple[Feedback, ...]:
    """Return what a checkpoint says is owed, after what was merged since."""
    if saved is None:
        return (Feedback(),) * len(run.layouts)
    owed = list(saved.feedback)
    for p, head in enumerate(heads):
        base = saved.state.record.clocks[p].base_version
        for mark in exchanging.merged_marks(run, learner, p, after=base, upto=head.version):
            owed[p] = after_merge(owed[p], mark)
    return tuple(owed)


def newest_checkpoint(run: Run, learner: str, last: LearnerRecord) -> Saved | None:
    """Return the newest whole checkpoint up to a learner's last link; damaged ones are passed over.

    A predecessor that does not know yet that it is superseded may write a later one: that is no part of the past.
    """
    for name in history.checkpoints(run, learner):
        try:
            saved = exchanging.read_checkpoint(run, name)
        except DamagedObject:
            continue
        if records.progress(saved.state.record) <= records.progress(last):
            return saved
    return None


def peer_checkpoint(run: Run, learner: str) -> Saved | None:
    """Return the whole checkpoint of the peer that has trained most by it; None if no peer has one."""
    found: list[tuple[int, str]] = []
    for peer in run.config.members:
        if peer.name != learner:
            found += ((trained, name) for name, trained in history.saved_tokens(run, peer.name))
    for _, name in sorted(found, reverse=True):
        try:
            return exchanging.read_checkpoint(run, name)
        except DamagedObject:
            continue
    return None
