"""Reading and writing the run's sealed records: one place that knows how a record lies in a store.

Knows names and record types; must not know how a record is made or judged. No torch.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from infra.arrays import ArrayReader
from infra.store import Store
from islands import names
from islands.chaos import FOLDER, Strike, strike_from_json
from islands.codecs import Encoded, coded_length, codes_change, decode, wire_codec
from islands.contributions import Contribution, contribution_from_json
from islands.ledger import LearnerRecord
from islands.merging import Vector
from islands.sealing import seal, unseal
from islands.types import DamagedObject, Manifest, VersionTaken
from islands.versions import Commit, Snapshot, commit_from_json, snapshot_from_json

# Seconds since 1970; the local driver writes base steps. For people: nothing is decided by it.
Stamp = Callable[[], float]
NewAttempt = Callable[[], str]
# Arrays of a version's payload: what learners fetch, and the exact values where that is a coded change.
PUBLIC, WHOLE = "public", "whole"


def new_attempt() -> str:
    """Return a name no other writer uses, anywhere."""
    return f"a-{uuid.uuid4().hex}"


def write(store: Store, name: str, body: Mapping[str, Any]) -> str:
    """Create a sealed record and return its digest.

    Raises:
        VersionTaken: the name exists with other content. The same content is ours: a repeated call, or a put whose
            answer was lost.
    """
    data, digest = seal(body)
    try:
        store.create(name, data)
    except VersionTaken:
        if store.read(name) != data:
            raise
    return digest


def read(store: Store, name: str) -> tuple[dict[str, Any], str] | None:
    """Return (body, digest) of a record, or None if there is none.

    Raises:
        DamagedObject: its bytes are not what was sealed, also when read once more: a store may answer half.
    """
    data = store.read(name)
    try:
        return None if data is None else unseal(name, data)
    except DamagedObject:
        data = store.read(name)
    return None if data is None else unseal(name, data)


def require(store: Store, name: str) -> tuple[dict[str, Any], str]:
    """Return (body, digest) of a record that must be there."""
    found = read(store, name)
    if found is None:
        raise DamagedObject(name, "is missing")
    return found


def read_commit(store: Store, fragment: int, version: int) -> tuple[Commit, str] | None:
    """Return (commit, digest) of a version, or None if it is not published."""
    name = names.version(fragment, version)
    found = read(store, name)
    return None if found is None else (parsed(name, commit_from_json, found[0]), found[1])


def require_commit(store: Store, fragment: int, version: int) -> tuple[Commit, str]:
    """Return (commit, digest) of a version that must be there."""
    found = read_commit(store, fragment, version)
    if found is None:
        raise DamagedObject(names.version(fragment, version), "is missing")
    return found


def find_refusal(store: Store, name: str, fragment: int, versions: Iterable[int]) -> int | None:
    """Return the first of these versions of a fragment that has recorded a contribution's refusal, None if none has."""
    for version in versions:
        commit, _ = require_commit(store, fragment, version)
        if any(verdict.name == name for verdict in commit.refused):
            return version
    return None


def find_head(store: Store, fragment: int, known: int = 0) -> tuple[Commit, str]:
    """Return (commit, digest) of a fragment's newest version, probing upward from a version known to exist.

    In growing strides, then by halves: versions have no gap and are never deleted, so that far ones take few looks.
    """
    head, stride = require_commit(store, fragment, known), 1
    while (later := read_commit(store, fragment, head[0].version + stride)) is not None:
        head, stride = later, 2 * stride
    while (stride := stride // 2) > 0:
        head = read_commit(store, fragment, head[0].version + stride) or head
    return head


def known_versions(store: Store, num_fragments: int) -> list[int]:
    """Return, per fragment, a version that exists for sure: of the newest snapshot, else 0. Heads are no older."""
    for number in sorted(numbers_in(store, "snapshots"), reverse=True):
        name = names.snapshot(number)
        try:
            found = read(store, name)
            if found is not None:
                versions: tuple[int, ...] = parsed(name, snapshot_from_json, found[0]).versions
                return list(versions) if len(versions) == num_fragments else [0] * num_fragments
        except DamagedObject:
            continue
    return [0] * num_fragments


def read_contribution(store: Store, name: str) -> tuple[Contribution, str] | None:
    """Return (contribution, digest), or None if it is gone.

    Raises:
        DamagedObject: its bytes are not a sealed contribution of that name.
    """
    found = read(store, name)
    if found is None:
        return None
    offer = parsed(name, contribution_from_json, found[0])
    if offer.name != name:
        raise DamagedObject(name, f"holds the header of {offer.name}")
    return offer, found[1]


def read_snapshots(store: Store) -> list[tuple[Snapshot, str]]:
    """Return the kept snapshots with their digests, oldest first."""
    found = []
    for number in sorted(numbers_in(store, "snapshots")):
        name = names.snapshot(number)
        body = read(store, name)
        if body is not None:
            found.append((parsed(name, snapshot_from_json, body[0]), body[1]))
    return found


def look_at_learners(store: Store) -> tuple[dict[str, int], frozenset[str]]:
    """Return (learner -> its newest incarnation, the learners that have left for good), of one listing."""
    newest: dict[str, int] = {}
    gone = set()
    for name in store.list_names("learners/"):
        if name.count("/") != 2:
            continue
        _, learner, last = name.split("/")
        number = names.number_of(name)
        if number is not None:
            newest[learner] = max(number, newest.get(learner, -1))
        elif last == "left.json":
            gone.add(learner)
    return newest, frozenset(gone)


def read_strikes(store: Store, known: Collection[int] = ()) -> dict[int, Strike]:
    """Return the faults that struck on purpose and are not known yet, by number; a damaged one is left to `verify`."""
    strikes = {}
    for number in sorted(set(numbers_in(store, FOLDER)) - set(known)):
        name = names.numbered(FOLDER, number)
        with contextlib.suppress(DamagedObject):
            strikes[number] = parsed(name, strike_from_json, require(store, name)[0])
    return strikes


def newest_incarnations(store: Store) -> dict[str, int]:
    """Return learner -> its newest incarnation; a learner without one has not started."""
    return look_at_learners(store)[0]


def newest_incarnation(store: Store, learner: str) -> int:
    """Return a learner's newest incarnation; -1 if it has not started."""
    return max(numbers_in(store, f"learners/{learner}"), default=-1)


def departed(store: Store) -> frozenset[str]:
    """Return the learners that have left for good."""
    return look_at_learners(store)[1]


def numbers_in(store: Store, folder: str) -> list[int]:
    """Return the numbers n of the objects `folder/n.json`; anything else there is none of ours."""
    ours = (name for name in store.list_names(f"{folder}/") if name.rpartition("/")[0] == folder)
    return [number for name in ours if (number := names.number_of(name)) is not None]


def next_number(store: Store, folder: str) -> int:
    """Return the next free number of a folder that counts from 0."""
    return max(numbers_in(store, folder), default=-1) + 1


def read_public(store: Store, commit: Commit) -> Vector:
    """Return the decoded public values of a version, (elements,) float32: what everybody anchors on."""
    return fetch_public(store, commit)


def fetch_public(store: Store, commit: Commit, parent: Vector | None = None) -> Vector:
    """Return the public values of a version.

    `parent`: the public values of the version before, from which one that codes a change is made; without them, or at
    version 0, it is read whole.
    """
    reader = PublicReader(store, commit)
    if parent is None or not reader.has_change:
        return reader.read(0, reader.size)
    return after_change(parent, reader.read_change(0, reader.size))


def fetch_newest(store: Store, news: Sequence[Commit], values: Vector) -> Vector:
    """Return the public values of the last of the versions that follow the one with `values`.

    By the changes that lead there, if all of them are kept and shorter than the whole.

    Raises:
        DamagedObject: the last version is damaged, or collected meanwhile.
    """
    whole = bytes_of(news[-1].payload, WHOLE)
    if sum(bytes_of(commit.payload, PUBLIC) for commit in news) >= whole:
        return fetch_public(store, news[-1])
    try:
        for commit in news:
            values = fetch_public(store, commit, values)
    except DamagedObject:  # collected meanwhile: the newest is there whole
        return fetch_public(store, news[-1])
    return values


def after_change(parent: Vector, change: Vector) -> Vector:
    """Return public values after a coded change: the same bits for whoever adds them."""
    return np.add(parent, change, dtype=np.float32)


class PublicReader:
    """Reads a version's public values piece by piece; a piece starts at a multiple of the codecs' block.

    A version that codes a change has it in the array "public", and the values themselves, exact, in "whole".
    """

    def __init__(self, store: Store, commit: Commit) -> None:
        self._reader = ArrayReader(store, commit.payload)
        self._codec = wire_codec(commit.codec)
        self.has_change = codes_change(commit.codec) and commit.version > 0
        self.array = WHOLE if codes_change(commit.codec) else PUBLIC
        self.size = next(a.length for a in commit.payload.arrays if a.name == "params")

    def read(self, start: int, stop: int) -> Vector:
        """Return the values of the elements [start, stop)."""
        if self.array == WHOLE:
            return self._reader.read(WHOLE, start, stop)
        return read_span(self._reader, PUBLIC, self._codec, start, stop)

    def read_change(self, start: int, stop: int) -> Vector:
        """Return the decoded change since the parent version in [start, stop)."""
        return read_span(self._reader, PUBLIC, self._codec, start, stop)


def read_span(
    reader: ArrayReader, array: str, codec: str, start: int, stop: int, *, copy: bool = True
) -> Vector:
    """Return the decoded elements [start, stop) of a coded array; `start` is a multiple of the codecs' block.

    `copy`: False if the caller will not write to the result.
    """
    low, high = coded_length(codec, start), coded_length(codec, stop)
    values = reader.read(array, low, high, copy=copy)
    return decode(Encoded(codec, values, (stop - start,)))


def bytes_of(payload: Manifest, array: str) -> int:
    """Return the stored bytes of one array of a payload."""
    return sum(item.num_bytes for item in payload.objects if item.name.startswith(f"{array}/"))


def payload_of(name: str, body: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the manifest (as JSON values) of the payload a record commits, or None if it has none."""
    found: Mapping[str, Any] | None = (
        body["data"]["payload"] if name == names.RUN else body.get("payload")
    )
    return found


def parsed(name: str, parse: Callable[[Mapping[str, Any]], Any], body: Mapping[str, Any]) -> Any:
    """Return `parse(body)`; a record that lacks what it must hold is damage, and is named."""
    try:
        return parse(body)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as exc:
        raise DamagedObject(name, f"lacks what such a record holds ({exc!r})") from exc


def progress(record: LearnerRecord) -> tuple[int, ...]:
    """Order links of one chain: by position, then by totals, none of which ever shrinks."""
    sums = ("base_version", "all_offered", "overwritten", "rolled_back", "replaced")
    return (
        *record.position,
        record.trained,
        *(sum(getattr(c, key) for c in record.clocks) for key in sums),
    )
