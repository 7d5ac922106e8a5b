"""The names of a run's objects, and back: who writes what, where.

Knows strings; must not know a store. Numbers are compared as numbers: a name that outgrows its padding still sorts
right, because order is always taken from the parsed value.

    run.json                                            what the run is
    inbox/f0003/<learner>/<base>-<incarnation>-<step>.json   header of a contribution
    versions/f0003/v00000017.json                       commit of a version
    snapshots/<n>.json                                  one version of every fragment
    learners/<learner>/<incarnation>.json, left.json    who trains since when; who has left
    checkpoints/<learner>/<incarnation>-<step>.json     commit of a checkpoint
    synchronizers/<n>.json                              who merges since when
    trainers/<n>.json                                   which flow run of `train` looks after the run since when
    advisories/f0003/<version>-<n>.json                 a round that could commit nothing, and why
    changes/<n>.json, finished.json                     later settings; the end, with an inventory
    stops/<n>.json                                      somebody asked to stop, or to go on: the newest one counts
    chaos/<n>.json                                      a fault that struck on purpose
    driver/<n>.json                                     the local driver's clock and queue
    payloads/<name of the header>/<attempt>/            zarr groups
"""

from __future__ import annotations

import re
from typing import NamedTuple

from islands.types import Position

RUN = "run.json"
FINISHED = "finished.json"
_CONTRIBUTION = re.compile(r"inbox/f([0-9]+)/([^/]+)/([0-9]+)-([0-9]+)-([0-9]+)\.json")
_VERSION = re.compile(r"versions/f([0-9]+)/v([0-9]+)\.json")
_CHECKPOINT = re.compile(r"checkpoints/([^/]+)/([0-9]+)-([0-9]+)\.json")
_ADVISORY = re.compile(r"advisories/f([0-9]+)/([0-9]+)-([0-9]+)\.json")
_NUMBERED = re.compile(r"(?:.*/)?([0-9]+)\.json")
# How many parts the names of headers with a payload have, by their first one.
_HEADER_PARTS = {"run": 1, "driver": 2, "versions": 3, "checkpoints": 3, "inbox": 4}


class ContributionKey(NamedTuple):
    """What a contribution's name says: whose work, on which base, up to which position."""

    fragment: int
    learner: str
    base_version: int
    stop: Position


def contribution(key: ContributionKey) -> str:
    """Return the header's name."""
    place = f"{key.base_version}-{key.stop.incarnation}-{key.stop.step}"
    return f"inbox/f{key.fragment:04d}/{key.learner}/{place}.json"


def parse_contribution(name: str) -> ContributionKey | None:
    """Return what the name says, or None if it is no contribution's."""
    match = _CONTRIBUTION.fullmatch(name)
    if not match:
        return None
    fragment, learner, base, incarnation, step = match.groups()
    return ContributionKey(int(fragment), learner, int(base), Position(int(incarnation), int(step)))


def version(fragment: int, number: int) -> str:
    """Return the commit's name."""
    return f"versions/f{fragment:04d}/v{number:08d}.json"


def parse_version(name: str) -> tuple[int, int] | None:
    """Return (fragment, version), or None if it is no version's name."""
    match = _VERSION.fullmatch(name)
    return (int(match[1]), int(match[2])) if match else None


def checkpoint(learner: str, position: Position) -> str:
    """Return the checkpoint's name."""
    return f"checkpoints/{learner}/{position.incarnation}-{position.step}.json"


def parse_checkpoint(name: str) -> tuple[str, Position] | None:
    """Return (learner, position), or None if it is no checkpoint's name."""
    match = _CHECKPOINT.fullmatch(name)
    return (match[1], Position(int(match[2]), int(match[3]))) if match else None


def incarnation(learner: str, number: int) -> str:
    """Return the name of an incarnation's record."""
    return f"learners/{learner}/{number}.json"


def left(learner: str) -> str:
    """Return the name of a learner's final record."""
    return f"learners/{learner}/left.json"


def snapshot(number: int) -> str:
    """Return a snapshot's name."""
    return f"snapshots/{number}.json"


def evaluation(suite: str, number: int) -> str:
    """Return the name of the score that a suite gave a snapshot."""
    return f"evaluations/{suite}/{number}.json"


def numbered(folder: str, number: int) -> str:
    """Return the name of the `number`-th object of a folder that counts, such as synchronizers, changes or chaos."""
    return f"{folder}/{number}.json"


def advisory(fragment: int, version: int, number: int) -> str:
    """Return the name of the note on a round that could commit nothing."""
    return f"advisories/f{fragment:04d}/{version}-{number}.json"


def parse_advisory(name: str) -> tuple[int, int, int] | None:
    """Return (fragment, version, number), or None if it is no advisory's name."""
    match = _ADVISORY.fullmatch(name)
    return (int(match[1]), int(match[2]), int(match[3])) if match else None


def number_of(name: str) -> int | None:
    """Return n of `folder/n.json`, or None."""
    match = _NUMBERED.fullmatch(name)
    return int(match[1]) if match else None


def payload_folder(header: str, attempt: str) -> str:
    """Return the folder of one attempt at the payload that `header` commits."""
    return f"payloads/{header.removesuffix('.json')}/{attempt}"


def header_of_payload(name: str) -> tuple[str, str] | None:
    """Return (header name, attempt folder) of an object below payloads/, or None.

    The attempt is the part after the header's, payloads/<header>/<attempt>/<array>/..., and starts with "a-". It is
    found by counting: a learner's name, too, may start with "a-".
    """
    top, *parts = name.split("/")
    num_parts = _HEADER_PARTS.get(parts[0]) if top == "payloads" and parts else None
    if num_parts is None or len(parts) <= num_parts or not parts[num_parts].startswith("a-"):
        return None
    return "/".join(parts[:num_parts]) + ".json", "/".join([top, *parts[: num_parts + 1]])
