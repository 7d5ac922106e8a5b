"""What may be deleted, by rule: a pure function of names and a few facts. `verify` demands exactly the rest.

Knows names and positions; must not know a store. Nothing is deleted unless a rule names it:

    contribution   consumed at least two versions behind the head, or refused as too old to ever count; but a learner's
                   newest of a fragment stays until a checkpoint follows it: from its account the learner's return
                   begins
    attempts       beside a commit; or of a learner, older than its newer committed push of that fragment
    version        the bytes of one behind head - 1 that no kept snapshot and no newest checkpoint names (commits stay)
    snapshot       beyond the newest three and the best of each suite
    checkpoint     older than its learner's newest two; its bytes also where the header is gone or never came
    advisory       on a version at least two behind the head
    driver         older than the newest

A name that no rule knows is nobody's, and stays; so does one that names a fragment the run does not have.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from islands import names
from islands.types import Position

KEPT_SNAPSHOTS = 3
KEPT_CHECKPOINTS = 2
NEVER = Position(-1, 0)


@dataclass(frozen=True, slots=True)
class Facts:
    """What the rules depend on.

    Attributes:
        heads: newest version of each fragment.
        settled: per fragment, learner -> end of the last interval consumed two versions behind the head.
        kept_versions: (fragment, version) whose bytes somebody may still read.
        folders: header -> folder of the attempt it committed, where there is more than one attempt.
        kept_snapshots: numbers of the snapshots to keep.
        max_staleness: versions a contribution's base may lie behind the head.
        unjudged: contributions too old to count whose refusal no version has recorded yet.
    """

    heads: Sequence[int]
    settled: Sequence[Mapping[str, Position]]
    kept_versions: frozenset[tuple[int, int]]
    folders: Mapping[str, str]
    kept_snapshots: frozenset[int]
    max_staleness: int
    unjudged: frozenset[str] = frozenset()


def collectable(all_names: Iterable[str], facts: Facts) -> list[str]:
    """Return the names that may be deleted, in the order in which to delete: headers before their payloads."""
    present = list(all_names)
    headers = {name for name in present if not name.startswith("payloads/")}
    newest = _newest_pushes(present)
    last_saved = dict(_positions(rows[0] for rows in newest_checkpoints(present).values()))
    oldest_kept = _oldest_kept_checkpoints(present)
    newest_driver = max(
        (names.number_of(n) or 0 for n in present if n.startswith("driver/")), default=0
    )

    def is_dead(header: str) -> bool:
        if (contribution := names.parse_contribution(header)) is not None:
            is_last = contribution.stop >= newest.get(
                (contribution.fragment, contribution.learner), contribution.stop
            )
            is_link = (
                header in headers
                and is_last
                and contribution.stop > last_saved.get(contribution.learner, NEVER)
            )
            return is_settled(contribution, facts) and not is_link
        if (saved := names.parse_checkpoint(header)) is not None:
            return saved[1] < oldest_kept.get(saved[0], NEVER)
        number = names.number_of(header)
        if header.startswith("snapshots/"):
            return number is not None and number not in facts.kept_snapshots
        if header.startswith("driver/"):
            return number is not None and number < newest_driver
        if (advised := names.parse_advisory(header)) is not None:
            return advised[0] < len(facts.heads) and advised[1] <= facts.heads[advised[0]] - 2
        return False

    def is_dead_payload(name: str) -> bool:
        found = names.header_of_payload(name)
        if found is None:
            return False
        header, folder = found
        if is_dead(header):
            return True
        version = names.parse_version(header)
        if (
            version is not None
            and version[0] < len(facts.heads)
            and version[1] <= facts.heads[version[0]]
        ):
            return version not in facts.kept_versions or facts.folders.get(header, folder) != folder
        if header in headers:
            return facts.folders.get(header, folder) != folder
        key = names.parse_contribution(header)
        return key is not None and key.stop < newest.get((key.fragment, key.learner), NEVER)

    doomed = [name for name in present if name in headers and is_dead(name)]
    return doomed + [
        name for name in present if name.startswith("payloads/") and is_dead_payload(name)
    ]


def is_settled(key: names.ContributionKey, facts: Facts) -> bool:
    """Say whether a contribution's fate is decided for good."""
    if key.fragment >= len(facts.heads):
        return False
    if key.stop <= facts.settled[key.fragment].get(key.learner, NEVER):
        return True
    is_old = is_too_old(key, facts.heads[key.fragment], facts.max_staleness)
    return is_old and names.contribution(key) not in facts.unjudged


def is_too_old(key: names.ContributionKey, head_version: int, max_staleness: int) -> bool:
    """Say whether a contribution is too old to count, with two versions' time to write that down."""
    return key.base_version + max_staleness + 2 < head_version


def kept_snapshots(numbers: Iterable[int], best: Iterable[int]) -> frozenset[int]:
    """Return which snapshots stay: the newest three, and the best of each suite."""
    return frozenset(sorted(numbers)[-KEPT_SNAPSHOTS:]) | frozenset(best)


def newest_checkpoints(all_names: Iterable[str]) -> dict[str, list[str]]:
    """Return learner -> its checkpoints, newest first."""
    found: dict[str, list[tuple[Position, str]]] = {}
    for name in all_names:
        if (parsed := names.parse_checkpoint(name)) is not None:
            found.setdefault(parsed[0], []).append((parsed[1], name))
    return {
        learner: [name for _, name in sorted(rows, reverse=True)] for learner, rows in found.items()
    }


def _oldest_kept_checkpoints(present: Iterable[str]) -> dict[str, Position]:
    """Return learner -> position before which a checkpoint is dead: even one whose header is gone or never came."""
    found = newest_checkpoints(present)
    return dict(
        _positions(
            rows[KEPT_CHECKPOINTS - 1] for rows in found.values() if len(rows) >= KEPT_CHECKPOINTS
        )
    )


def _positions(checkpoints: Iterable[str]) -> Iterator[tuple[str, Position]]:
    """Yield (learner, position) of each."""
    return (parsed for name in checkpoints if (parsed := names.parse_checkpoint(name)) is not None)


def _newest_pushes(present: Iterable[str]) -> dict[tuple[int, str], Position]:
    newest: dict[tuple[int, str], Position] = {}
    for name in present:
        if (key := names.parse_contribution(name)) is not None:
            place = (key.fragment, key.learner)
            newest[place] = max(key.stop, newest.get(place, key.stop))
    return newest
