"""The scores that evaluations left in a run's store: for the report, and for MLflow. No torch.

Knows the records of evaluations and snapshots; a damaged one is left out, `verify` is there to complain.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from islands import metrics, names
from islands.parsing import parse
from islands.timeline import track_of
from islands.types import DamagedObject
from tasks import records
from tasks.collecting import SUITE
from tasks.runs import Run

# What is no number that can be drawn: NaN is not below it either.
_LARGEST = 1e300


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A score on the held-out text. `merged_tokens` are interpolated unless the snapshot is kept."""

    snapshot: int
    merged_tokens: float
    is_kept: bool
    bits_per_byte: float
    bigram: float


def placed_evaluations(run: Run) -> tuple[Evaluation, ...]:
    """Return every score; where its snapshot is no longer kept, its tokens lie between those of kept ones."""
    try:
        kept = {
            one.number: float(one.merged_tokens) for one, _ in records.read_snapshots(run.store)
        }
    except DamagedObject:
        kept = {}
    track = track_of([(-1, 0.0), *kept.items()])
    found = []
    for number in sorted(records.numbers_in(run.store, f"evaluations/{SUITE}")):
        try:
            body, _ = records.require(run.store, names.evaluation(SUITE, number))
            bits, bigram = (parse(float, body[key]) for key in ("bits_per_byte", "bigram"))
        except (DamagedObject, KeyError, ValueError):
            continue
        if all(abs(value) < _LARGEST for value in (bits, bigram)):
            found.append(Evaluation(number, track.place(number), number in kept, bits, bigram))
    return tuple(found)


def evaluations(run: Run, known: Collection[int]) -> Iterator[metrics.Evaluation]:
    """Yield the scores that are not known yet; a score says what it is of, its snapshot may be gone."""
    for number in sorted(set(records.numbers_in(run.store, f"evaluations/{SUITE}")) - set(known)):
        try:
            body, _ = records.require(run.store, names.evaluation(SUITE, number))
            made = [
                records.require_commit(run.store, p, parse(int, version))[0]
                for p, version in enumerate(body["versions"])
            ]
            merged_tokens = parse(int, body["merged_tokens"])
            bits, bigram = (parse(float, body[key]) for key in ("bits_per_byte", "bigram"))
        except (DamagedObject, KeyError, TypeError, ValueError):
            continue  # `verify` is who says so
        at = max(commit.at for commit in made)
        yield metrics.Evaluation(number, merged_tokens, bits, bigram, at)
