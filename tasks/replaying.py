"""`verify --replay`: make every version again from what it consumed, and compare bit by bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from infra.arrays import ArrayReader
from islands import names
from islands.codecs import coded_length, wire_codec
from islands.types import ConfigError, DamagedObject, FragmentLayout
from islands.versions import Commit
from tasks import creating, records
from tasks.evidence import Verification
from tasks.publishing import Stepped, first_chunks, fold_contributions
from tasks.runs import Run, as_most_forgiving
from tasks.stepping import next_chunks, step_taken


def replay_into(run: Run, found: Verification, *, watch: Callable[[int], None]) -> None:
    """Add to `found` every version whose bytes do not follow from its parent and its contributions.

    Args:
        run: a run with everything kept.
        found: what `verify` found; its problems grow.
        watch: told the number of versions done so far.

    Raises:
        ConfigError: the run did not keep everything.
    """
    run = as_most_forgiving(run)
    if run.config.retention != "all":
        raise ConfigError(
            f'a replay needs retention = "all", got "{run.config.retention}"; train with --set retention=all to replay'
        )
    done = 0
    first = _first_values(run)
    for layout in run.layouts:
        head, _ = records.find_head(run.store, layout.index)
        for version in range(head.version + 1):
            commit, _ = records.require_commit(run.store, layout.index, version)
            try:
                _compare(run, layout, commit, _again(run, layout, commit, first))
            except DamagedObject as exc:
                found.note(exc.name, exc.problem)
            done += 1
            watch(done)


def _first_values(run: Run) -> creating.First | None:
    """Return what version 0 must hold; None where the run's origin is gone: then that version is taken as it is."""
    try:
        return creating.first_values(run)
    except ConfigError:
        return None


def _again(
    run: Run, layout: FragmentLayout, commit: Commit, first: creating.First | None
) -> Iterator[Stepped]:
    if commit.version == 0:
        if first is not None:
            yield from first_chunks(run, layout, *first(layout))
        return
    parent, _ = records.require_commit(run.store, layout.index, commit.version - 1)
    offers = []
    for entry in commit.consumed:
        offer = records.read_contribution(run.store, entry.name)
        if offer is None:
            raise DamagedObject(entry.name, "is missing")
        offers.append(offer[0])
    weights = [entry.weight for entry in commit.consumed]
    folded = fold_contributions(run.store, layout, offers, weights, run.chunk_of(layout))
    for entry, cosine in zip(commit.consumed, folded.cosines, strict=True):
        if entry.cosine != cosine:
            raise DamagedObject(
                names.version(layout.index, commit.version),
                f"says that {entry.learner}'s cosine is {entry.cosine}, it is {cosine}",
            )
    step = step_taken(commit)
    yield from next_chunks(run, layout, parent, folded.delta, step=step, codec=commit.codec)


def _compare(run: Run, layout: FragmentLayout, commit: Commit, pieces: Iterator[Stepped]) -> None:
    reader = ArrayReader(run.store, commit.payload)
    name = names.version(layout.index, commit.version)
    for piece in pieces:
        for array, values in piece.arrays().items():
            codec = wire_codec(commit.codec) if array == records.PUBLIC else "float32"
            start = coded_length(codec, piece.start)
            stored = reader.read(array, start, start + values.size)
            if not np.array_equal(stored.view(np.uint8), values.view(np.uint8)):
                raise DamagedObject(
                    name, f"its {array} do not follow from its parent and contributions"
                )
