"""The words of the system as records, and its one family of errors.

This module knows shapes, positions and names; it must not know a model, a store, a clock or a configuration.

    IslandsError
     ├── ConfigError          a rule of the configuration is broken (exit status 2)
     ├── EmptyQuorum          a merge was asked for with no weight at all
     ├── FragmentMismatch     two parties disagree on names, shapes or order
     ├── DamagedObject        an object is absent where it must be, or its bytes are not what was committed
     ├── VersionTaken         a create-only name exists already
     ├── Refused              a contribution breaks a rule; `reason` says which
     ├── StoreUnavailable     the store did not answer
     │    └── StoreUnreachable    nor when it was opened, so it may be a wrong setting: a ConfigError, too
     ├── StoreLost            it has not for as long as anybody waits for it
     ├── ServiceUnavailable   Prefect, MLflow or another service did not start or did not answer
     ├── ClusterUnavailable   an island's Dask cluster cannot be opened, or did not answer
     └── LearnerLost          the process that trained an island is gone
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

from islands.parsing import parse

FORMAT_VERSION = 4
# Lower case only: two ids that differ by case alone are one folder on some disks. Both ends alphanumeric keeps out
# hidden files and options.
PLAIN_NAME_PATTERN = r"[a-z0-9]([a-z0-9_-]{0,62}[a-z0-9])?"
PLAIN_NAME = re.compile(PLAIN_NAME_PATTERN)
# What a contribution weighs in a merge: tokens times tokens per step, or tokens alone.
Weighting = Literal["quality", "tokens"]
_STORED_DTYPE = re.compile(r"(u?int|float)(8|16|32|64)")


class IslandsError(Exception):
    """The root of every error this project raises on purpose."""


class ConfigError(IslandsError):
    """A configuration rule is broken; the message holds rule, value and remedy."""


class EmptyQuorum(IslandsError):
    """A merge has nobody, or nobody with a positive weight."""


class FragmentMismatch(IslandsError):
    """Names, shapes or order of tensors differ between two parties."""


class VersionTaken(IslandsError):
    """A create-only object exists already; somebody else was first."""


class StoreUnavailable(IslandsError):
    """The store cannot be opened, or did not answer."""


class StoreUnreachable(StoreUnavailable, ConfigError):
    """A store did not answer when it was opened: to whoever had it before an outage, to all others a wrong setting."""


class StoreLost(IslandsError):
    """The store has not answered for as long as anybody waits for it."""


class ServiceUnavailable(IslandsError):
    """A service that a command needs did not start, or did not answer."""


class ClusterUnavailable(IslandsError):
    """A cluster cannot be opened, or did not answer."""


class LearnerLost(IslandsError):
    """The process in which a learner trained is gone."""


class DamagedObject(IslandsError):
    """An object is missing where it must be, or holds other bytes than were committed."""

    remedy: ClassVar = "put that object back from a copy of the store"

    def __init__(self, name: str, problem: str) -> None:
        super().__init__(f"{name}: {problem}")
        self.name = name
        self.problem = problem

    def __reduce__(self) -> tuple[type[DamagedObject], tuple[str, str]]:
        return type(self), (self.name, self.problem)


class OtherFormat(DamagedObject):
    """A record was written by a version of this program that keeps another store format."""

    remedy: ClassVar = "use the version of diloco that wrote it, or begin a new run"


class Refused(IslandsError):
    """A contribution breaks the rule named by `reason`."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail

    def __reduce__(self) -> tuple[type[Refused], tuple[str, str]]:
        return type(self), (self.reason, self.detail)


def is_plain_name(name: str) -> bool:
    """Say whether `name` can be a run id or an island name: 1 to 64 of a-z 0-9 - _, alphanumeric at both ends."""
    return PLAIN_NAME.fullmatch(name) is not None


class Position(NamedTuple):
    """Where a learner stands: its incarnation, then its own inner step. Ordered as a pair."""

    incarnation: int
    step: int


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One trainable tensor's place in its fragment's flat vector.

    `offset` and `size` are in elements. `merge` is "mean" (embeddings) or "rda" (all else).
    """

    name: str
    shape: tuple[int, ...]
    offset: int
    merge: str

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def stop(self) -> int:
        return self.offset + self.size


@dataclass(frozen=True, slots=True)
class FragmentLayout:
    """A fragment: its tensors, in the order in which they follow each other in one float32 vector."""

    index: int
    tensors: tuple[TensorSpec, ...]

    @property
    def size(self) -> int:
        """Elements in the flat vector."""
        return self.tensors[-1].stop if self.tensors else 0


@dataclass(frozen=True, slots=True)
class StoredObject:
    """One immutable object of a payload: name relative to the payload's folder, length, crc32c of its bytes.

    `crc32c` leaves out the last four bytes of a chunk, which hold it too.
    """

    name: str
    num_bytes: int
    crc32c: int


@dataclass(frozen=True, slots=True)
class StoredArray:
    """A one-dimensional array in a payload. `dtype` is numpy's name; `chunk_length` is in elements."""

    name: str
    dtype: str
    length: int
    chunk_length: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a payload consists of: where it lies, its arrays, and every object with length and checksum."""

    folder: str
    arrays: tuple[StoredArray, ...]
    objects: tuple[StoredObject, ...]

    @property
    def num_bytes(self) -> int:
        return sum(item.num_bytes for item in self.objects)

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values; `manifest_from_json` is the inverse."""
        return {
            "folder": self.folder,
            "arrays": [[a.name, a.dtype, a.length, a.chunk_length] for a in self.arrays],
            "objects": [[o.name, o.num_bytes, o.crc32c] for o in self.objects],
        }


def manifest_from_json(value: Mapping[str, Any]) -> Manifest:
    """Return the manifest that `Manifest.to_json` wrote.

    Raises:
        ValueError: it holds something else.
    """
    manifest: Manifest = parse(Manifest, value)
    if strange := [
        array.dtype for array in manifest.arrays if not _STORED_DTYPE.fullmatch(array.dtype)
    ]:
        raise ValueError(f"an array's dtype must be a plain number's, got {strange[0]!r}")
    return manifest
