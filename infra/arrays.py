"""Payloads: one-dimensional arrays in a zarr v3 group, with a manifest that vouches for every byte.

Knows zarr's layout, chunk grids and checksums. It must not know fragments, codecs, headers or which arrays belong
together. It is the only file that imports zarr, and it must not import torch.

What stays zarr's: every zarr.json is made by zarr, which fixes the layout, the chunk grid, the names and the codecs.
What is ours: the bytes of a chunk. With the codecs "bytes" and "crc32c" a chunk is its numbers in little endian, the
last one filled up with the fill value, then their crc32c. zarr's own way to those bytes copies them three times, on an
event loop that all threads share. Here they go from the caller's array to a `Store` verb uncopied, in the caller's own
thread: a store that stalls blocks its caller and nobody else.

What zarr does not promise, the manifest does: zarr reads a missing chunk as fill values and does not checksum its own
zarr.json. Each object's length and crc32c are therefore compared with the manifest before it is used. Of a chunk the
manifest names the crc32c of its numbers alone: that of a whole chunk, its own crc32c at its end, is the same for all.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any, cast

import google_crc32c
import numpy as np

from infra.store import Store
from islands.types import DamagedObject, Manifest, StoredArray, StoredObject, VersionTaken

# zarr is imported where it is first needed: it takes longer to load than all else, and a program that only reads
# records (status, a synchronizer with nothing to merge) never needs it.
if TYPE_CHECKING:
    from zarr.abc.buffer import Buffer

CHUNK_ELEMENTS = 4 * 2**20  # 16 MiB of float32
_METADATA = "zarr.json"
_DESCRIPTION = ("data_type", "shape", "chunk_grid", "codecs")
_CHECKSUM_BYTES = 4  # at the end of each chunk
_SEALED = 0x48674BC7  # the crc32c of anything followed by its own crc32c

Attributes = Mapping[str, Mapping[str, Any]]


def chunk_length(length: int, chunk_elements: int = CHUNK_ELEMENTS) -> int:
    """Return the elements in a chunk of an array: `chunk_elements`, or fewer where the chunks come out even.

    The same for every dtype, so that arrays of one length are cut at the same places.

    zarr stores the last chunk at full size, so a 17 MiB array in 16 MiB chunks would take 32 MiB. The fewest chunks
    that fit are kept, and made equal to within 128 elements, a block of the codecs.
    """
    limit = max(1, chunk_elements)
    num_chunks = max(1, -(-length // limit))
    even = -(-length // num_chunks)
    return min(limit, max(1, length), -(-even // 128) * 128 or 1)


class ArrayWriter:
    """Writes one payload into a folder nobody has written to, chunk by chunk, holding a few chunks at most.

    A writer serves one thread at a time.
    Nothing is committed by it: a payload counts once somebody publishes the manifest that `finish` returns.
    """

    def __init__(
        self,
        store: Store,
        folder: str,
        arrays: Mapping[str, tuple[str, int]],
        *,
        chunk_elements: int = CHUNK_ELEMENTS,
        chunk_lengths: Mapping[str, int] | None = None,
        attributes: Attributes | None = None,
    ) -> None:
        """Create the group's and the arrays' metadata.

        Args:
            store: where to write.
            folder: the payload's folder, fresh.
            arrays: name -> (numpy dtype name, length in elements). Names hold no "/".
            chunk_elements: the most elements in a chunk.
            chunk_lengths: array name -> its chunks' length, where it must be another than `chunk_elements` leads to.
            attributes: array name -> JSON attributes to keep beside it, e.g. the true dtype of bfloat16.

        Raises:
            VersionTaken: the folder holds something else.
            StoreUnavailable: the store did not answer.
        """
        self._store = store
        self._folder = folder
        self._objects: dict[str, StoredObject] = {}
        self._specs: dict[str, StoredArray] = {}
        self._put(_METADATA, google_crc32c.value(_group_metadata()), _group_metadata())
        for name, (dtype, length) in arrays.items():
            if "/" in name:
                raise ValueError(f"an array's name must hold no '/', got {name!r}")
            chunk = (chunk_lengths or {}).get(name) or chunk_length(length, chunk_elements)
            spec = StoredArray(name, np.dtype(dtype).name, length, chunk)
            kept = json.dumps((attributes or {}).get(name, {}))
            data = _array_metadata(spec.dtype, length, spec.chunk_length, kept)
            self._put(f"{name}/{_METADATA}", google_crc32c.value(data), data)
            self._specs[name] = spec

    def chunk_length(self, name: str) -> int:
        """Return the elements in a chunk of an array: `write` wants multiples of it."""
        return self._specs[name].chunk_length

    def write(self, name: str, start: int, values: np.ndarray[Any, Any]) -> None:
        """Write whole chunks of an array, in any order, each once.

        Args:
            start: the first element, a multiple of the array's chunk length.
            values: one-dimensional, of the array's dtype; whole chunks, or up to the array's end.

        Raises:
            ValueError: `start`, the shape or the dtype breaks the rule above; nothing is written.
            VersionTaken: a chunk has been written before.
            StoreUnavailable: the store did not answer; earlier chunks of `values` may be written.
        """
        spec = self._specs[name]
        stop = start + len(values)
        if values.ndim != 1 or values.dtype != np.dtype(spec.dtype):
            raise ValueError(f"{name}: wants {spec.dtype}[n], got {values.dtype}{values.shape}")
        is_whole = start % spec.chunk_length == 0 and (
            stop % spec.chunk_length == 0 or stop == spec.length
        )
        if start < 0 or stop > spec.length or not is_whole:
            raise ValueError(
                f"{name}: a part must be whole chunks of {spec.chunk_length} below {spec.length}, "
                f"got [{start}, {stop})"
            )
        for low in range(start, stop, spec.chunk_length):
            part = values[low - start : low - start + spec.chunk_length]
            self._put_chunk(f"{name}/c/{low // spec.chunk_length}", _whole(part, spec))

    def finish(self) -> Manifest:
        """Make the payload durable and return its manifest.

        Raises:
            ValueError: a chunk has not been written.
            StoreUnavailable: the store did not answer.
        """
        for spec in self._specs.values():
            for name in _chunk_names(spec, 0, spec.length):
                if name not in self._objects:
                    raise ValueError(f"{self._folder}/{name} has not been written")
        self._store.sync(self._folder)
        objects = sorted(self._objects.values(), key=lambda item: item.name)
        return Manifest(self._folder, tuple(self._specs.values()), tuple(objects))

    def _put_chunk(self, name: str, numbers: np.ndarray[Any, Any]) -> None:
        octets = numbers.view(np.uint8)
        checksum = cast(int, google_crc32c.value(octets))
        self._put(name, checksum, octets.data, checksum.to_bytes(_CHECKSUM_BYTES, "little"))

    def _put(self, item: str, checksum: int, *parts: bytes | memoryview) -> None:
        name = f"{self._folder}/{item}"
        try:
            self._store.create(name, parts, sync=False)
        except VersionTaken:
            # A cloud client repeats a put whose answer was lost, and then meets its own object.
            if item in self._objects or self._store.read(name) != b"".join(parts):
                raise
        self._objects[item] = StoredObject(item, sum(map(len, parts)), checksum)


def write_arrays(
    store: Store,
    folder: str,
    arrays: Mapping[str, np.ndarray[Any, Any]],
    *,
    chunk_elements: int = CHUNK_ELEMENTS,
    chunk_lengths: Mapping[str, int] | None = None,
    attributes: Attributes | None = None,
) -> Manifest:
    """Write whole arrays as one payload, durably; see `ArrayWriter` for arguments and errors.

    Raises:
        ValueError: an array has more or less than one dimension.
    """
    for name, values in arrays.items():
        if values.ndim != 1:
            raise ValueError(f"{name}: an array must have one dimension, got {values.shape}")
    specs = {name: (values.dtype.name, len(values)) for name, values in arrays.items()}
    writer = ArrayWriter(
        store,
        folder,
        specs,
        chunk_elements=chunk_elements,
        chunk_lengths=chunk_lengths,
        attributes=attributes,
    )
    for name, values in arrays.items():
        writer.write(name, 0, values)
    return writer.finish()


class ArrayReader:
    """Reads a payload by its manifest. Every object is compared with the manifest before it is used.

    The manifest may come from a party that errs: its wrong claims raise DamagedObject. Only lengths must be compared by
    the caller with what they ought to be, before memory is spent on them. A reader serves one thread at a time.
    """

    def __init__(self, store: Store, manifest: Manifest) -> None:
        """Remember where the payload lies. Reads nothing yet."""
        self._store = store
        self._folder = manifest.folder
        self._specs = {spec.name: spec for spec in manifest.arrays}
        self._objects = {item.name: item for item in manifest.objects}
        self._described: set[str] = set()

    def chunk_length(self, name: str) -> int:
        """Return the elements in a chunk of an array.

        Raises:
            DamagedObject: the manifest has no such array.
        """
        return self._spec(name).chunk_length

    def read(
        self, name: str, start: int = 0, stop: int | None = None, *, copy: bool = True
    ) -> np.ndarray[Any, Any]:
        """Return the elements [start, stop) of an array; fetches only the chunks they lie in.

        Args:
            start: the first element.
            stop: the first element not to read; None is the array's end.
            copy: False if the caller will not write to the result: elements of one chunk then come as they were read.

        Raises:
            DamagedObject: an object is missing, or is not what the manifest says.
            StoreUnavailable: the store did not answer.
            ValueError: [start, stop) is not a part of the array.
        """
        spec = self._spec(name)
        stop = spec.length if stop is None else stop
        if not 0 <= start <= stop <= spec.length:
            raise ValueError(f"{name}: no part [{start}, {stop}) in {spec.length} elements")
        self._require_description(spec)
        chunks = _chunk_names(spec, start, stop)
        if not copy and len(chunks) == 1:
            first = start - start % spec.chunk_length
            return self._numbers(spec, chunks[0])[start - first : stop - first]
        values = np.empty(stop - start, dtype=spec.dtype)
        for chunk in chunks:
            first = int(chunk.rpartition("/")[2]) * spec.chunk_length
            low, high = max(start, first), min(stop, first + spec.chunk_length)
            part = slice(low - first, high - first)
            # No name for the chunk: it must be gone before the next one is fetched.
            values[low - start : high - start] = self._numbers(spec, chunk)[part]
        return values

    def _numbers(self, spec: StoredArray, chunk: str) -> np.ndarray[Any, Any]:
        data = self._fetch(chunk)
        dtype = np.dtype(spec.dtype).newbyteorder("<")
        if len(data) != spec.chunk_length * dtype.itemsize + _CHECKSUM_BYTES:
            raise DamagedObject(f"{self._folder}/{chunk}", f"is no chunk of {spec}")
        return np.frombuffer(data, dtype, spec.chunk_length)

    def _spec(self, name: str) -> StoredArray:
        spec = self._specs.get(name)
        if spec is None or not _is_sound(spec):
            raise DamagedObject(f"{self._folder}/{name}", f"the manifest describes it as {spec}")
        return spec

    def _require_description(self, spec: StoredArray) -> None:
        """Check once that the array's zarr.json says what the manifest says; another reader goes by that one."""
        if spec.name in self._described:
            return
        metadata = f"{spec.name}/{_METADATA}"
        data = self._fetch(metadata)
        if not _agree(data, _array_metadata(spec.dtype, spec.length, spec.chunk_length, "{}")):
            raise DamagedObject(f"{self._folder}/{metadata}", f"does not describe {spec}")
        self._described.add(spec.name)

    def _fetch(self, name: str) -> bytes:
        item = self._objects.get(name)
        if item is None:
            raise DamagedObject(f"{self._folder}/{name}", "is not in the manifest")
        return _read_checked(self._store, self._folder, item)


def check_payload(store: Store, manifest: Manifest) -> list[str]:
    """Compare every object of a payload with its manifest, holding one at a time.

    Returns:
        The full names of objects in the payload's folder that the manifest does not name, sorted.

    Raises:
        DamagedObject: the first object that is missing or altered.
        StoreUnavailable: the store did not answer.
    """
    for item in manifest.objects:
        _read_checked(store, manifest.folder, item)
    known = {f"{manifest.folder}/{item.name}" for item in manifest.objects}
    return [name for name in store.list_names(manifest.folder) if name not in known]


@lru_cache(maxsize=1)
def _group_metadata() -> bytes:
    import zarr
    from zarr.storage import MemoryStore

    staged: dict[str, Buffer] = {}
    zarr.create_group(MemoryStore(staged), zarr_format=3)
    return staged[_METADATA].to_bytes()


@lru_cache(maxsize=1024)
def _array_metadata(dtype: str, length: int, chunk_length: int, attributes: str) -> bytes:
    """Return an array's zarr.json. Kept, since a run's payloads are alike in every round."""
    import zarr
    from zarr.codecs import BytesCodec, Crc32cCodec
    from zarr.storage import MemoryStore

    staged: dict[str, Buffer] = {}
    zarr.create_array(
        MemoryStore(staged),
        shape=(length,),
        chunks=(chunk_length,),
        dtype=dtype,
        filters=None,
        compressors=[Crc32cCodec()],
        serializer=BytesCodec(endian="little"),
        fill_value=_fill_value(dtype),
        attributes=json.loads(attributes),
        zarr_format=3,
    )
    return staged[_METADATA].to_bytes()


def _fill_value(dtype: str) -> float:
    """Return what a reader other than ours finds where a chunk is missing: it must not look like zeros."""
    return np.nan if dtype.startswith("float") else 0


def _whole(part: np.ndarray[Any, Any], spec: StoredArray) -> np.ndarray[Any, Any]:
    """Return the numbers of one chunk as they are stored: all of them, side by side, in little endian."""
    dtype = np.dtype(spec.dtype).newbyteorder("<")
    if len(part) == spec.chunk_length:
        return np.ascontiguousarray(part, dtype)
    whole = np.full(spec.chunk_length, _fill_value(spec.dtype), dtype)
    whole[: len(part)] = part
    return whole


def _is_sound(spec: StoredArray) -> bool:
    try:
        dtype = np.dtype(spec.dtype)
        is_plain = dtype.name == spec.dtype and dtype.kind in "iuf"
        return is_plain and spec.length >= 0 and spec.chunk_length >= 1
    except TypeError:  # no dtype, or no numbers
        return False


def _agree(found: bytes, wanted: bytes) -> bool:
    """Say whether two zarr.json describe the same values on the same grid."""
    try:
        one, other = json.loads(found), json.loads(wanted)
        return all(one[key] == other[key] for key in _DESCRIPTION)
    except (ValueError, TypeError, KeyError, RecursionError):
        return False


def _chunk_names(spec: StoredArray, start: int, stop: int) -> list[str]:
    """Return the objects, relative to the payload's folder, that hold the elements [start, stop)."""
    if start == stop:
        return []
    first, last = start // spec.chunk_length, (stop - 1) // spec.chunk_length
    return [f"{spec.name}/c/{index}" for index in range(first, last + 1)]


def _read_checked(store: Store, folder: str, item: StoredObject) -> bytes:
    """Return an object's bytes, compared with the manifest; a store may answer half, so they are read twice at most."""
    try:
        return _read_once(store, folder, item)
    except DamagedObject:
        return _read_once(store, folder, item)


def _read_once(store: Store, folder: str, item: StoredObject) -> bytes:
    name = f"{folder}/{item.name}"
    try:
        data = store.read(name)
    except ValueError as exc:
        raise DamagedObject(name, f"no object can have this name: {exc}") from exc
    if data is None:
        raise DamagedObject(name, "is missing")
    if len(data) != item.num_bytes:
        raise DamagedObject(name, f"has {len(data)} bytes, committed were {item.num_bytes}")
    checksum = cast(int, google_crc32c.value(data))
    if not item.name.endswith(_METADATA):
        if checksum != _SEALED:
            raise DamagedObject(name, "does not end in the crc32c of its numbers")
        checksum = int.from_bytes(data[-_CHECKSUM_BYTES:], "little")
    if checksum != item.crc32c:
        raise DamagedObject(name, f"has crc32c {checksum:08x}, committed was {item.crc32c:08x}")
    return data
