"""Payloads come back exactly, or not at all: every byte of every object is guarded."""

import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import pytest
import zarr
from zarr.storage import LocalStore

from infra.arrays import ArrayReader, ArrayWriter, check_payload, chunk_length, write_arrays
from infra.disk import Data
from infra.store import Store, open_store
from islands.types import (
    DamagedObject,
    Manifest,
    StoredArray,
    StoredObject,
    VersionTaken,
    manifest_from_json,
)
from tests.faulty import Deed, Halving, Passing, Striking

ROOT = Path(__file__).parent.parent
SIZES = [0, 1, 31, 32, 33, 64, 65]
DTYPES = ["float32", "uint16", "uint8", "int8", "int64"]


def sample(dtype: str, length: int) -> np.ndarray:
    generator = np.random.default_rng(length)
    if dtype == "float32":
        return generator.standard_normal(length).astype(dtype)
    limits = np.iinfo(dtype)
    return generator.integers(limits.min, limits.max, length, dtype=dtype, endpoint=True)


@pytest.fixture
def store() -> Store:
    return open_store("memory://")


def small_payload(store: Store) -> Manifest:
    """Three arrays, one of them nothing but zeros, in chunks of 8 elements."""
    arrays = {
        "delta": sample("float32", 20),
        "zeros": np.zeros(16, "float32"),
        "codes": sample("uint8", 33),
    }
    return write_arrays(store, "p/x", arrays, chunk_elements=8)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_an_array_comes_back_exactly(store: Store, dtype: str, size: int) -> None:
    values = sample(dtype, size)
    manifest = write_arrays(store, "p", {"a": values}, chunk_elements=32)
    assert manifest_from_json(manifest.to_json()) == manifest
    found = ArrayReader(store, manifest).read("a")
    assert found.dtype == values.dtype
    assert np.array_equal(found, values)
    assert len(manifest.objects) == 2 + -(-size // 32)
    assert check_payload(store, manifest) == []


def test_special_floats_keep_their_bits(store: Store) -> None:
    bits = np.array([0x7FC00001, 0xFF800000, 0x80000000, 0x00000001], dtype="uint32")
    manifest = write_arrays(store, "p", {"a": bits.view("float32")})
    assert np.array_equal(ArrayReader(store, manifest).read("a").view("uint32"), bits)


def test_every_part_can_be_read_alone(store: Store) -> None:
    values = sample("int64", 33)
    manifest = write_arrays(store, "p", {"a": values}, chunk_elements=10)
    reader = ArrayReader(store, manifest)
    for start in range(34):
        for stop in range(start, 34):
            assert np.array_equal(reader.read("a", start, stop), values[start:stop])
    for start, stop in ((-1, 3), (5, 4), (0, 34)):
        with pytest.raises(ValueError, match="no part"):
            reader.read("a", start, stop)


def test_a_part_needs_only_its_own_chunks(store: Store) -> None:
    values = sample("uint8", 30)
    manifest = write_arrays(store, "p", {"a": values}, chunk_elements=10)
    for index in (0, 2):
        store.delete(f"p/a/c/{index}")
    assert np.array_equal(ArrayReader(store, manifest).read("a", 10, 20), values[10:20])


def test_plain_zarr_reads_a_payload(tmp_path: Path) -> None:
    arrays = {dtype: sample(dtype, 100) for dtype in DTYPES}
    write_arrays(
        open_store(f"file://{tmp_path}"),
        "p/x",
        arrays,
        chunk_elements=64,
        attributes={"uint16": {"dtype": "bfloat16"}},
    )
    group = zarr.open_group(LocalStore(tmp_path / "p/x"), mode="r", zarr_format=3)
    assert sorted(name for name, _ in group.arrays()) == sorted(DTYPES)
    for name, values in arrays.items():
        array = group[name]
        assert isinstance(array, zarr.Array)
        assert np.array_equal(np.asarray(array[:]), values)
        assert [codec["name"] for codec in array.metadata.to_dict()["codecs"]] == [
            "bytes",
            "crc32c",
        ]
    assert dict(group["uint16"].attrs) == {"dtype": "bfloat16"}
    assert dict(group["uint8"].attrs) == {}


@pytest.mark.parametrize("dtype", [*DTYPES, "float16", "float64"])
def test_a_payload_is_byte_for_byte_what_zarr_writes(tmp_path: Path, dtype: str) -> None:
    values = np.arange(100).astype(dtype)  # 64 elements to a chunk: the second one is filled up
    write_arrays(open_store(f"file://{tmp_path}"), "ours", {"a": values[::-1]}, chunk_elements=64)
    theirs = zarr.create_array(
        LocalStore(tmp_path / "theirs/a"),
        shape=(100,),
        chunks=(64,),
        dtype=dtype,
        serializer=zarr.codecs.BytesCodec(endian="little"),
        compressors=[zarr.codecs.Crc32cCodec()],
        fill_value=np.nan if dtype.startswith("float") else 0,
    )
    theirs[:] = values[::-1]
    for name in ("zarr.json", "c/0", "c/1"):
        assert (tmp_path / "ours/a" / name).read_bytes() == (
            tmp_path / "theirs/a" / name
        ).read_bytes()


def test_numbers_in_another_order_of_memory_are_written_as_they_count(store: Store) -> None:
    values = np.arange(64, dtype="float32").reshape(32, 2)[:, 1]
    manifest = write_arrays(store, "p", {"a": values, "b": values[::-1]}, chunk_elements=10)
    reader = ArrayReader(store, manifest)
    assert reader.read("a").tolist() == list(range(1, 64, 2))
    assert reader.read("b").tolist() == list(range(63, 0, -2))


def test_a_result_is_the_callers_own_unless_it_wants_no_copy(store: Store) -> None:
    values = sample("float32", 30)
    reader = ArrayReader(store, write_arrays(store, "p", {"a": values}, chunk_elements=10))
    for start, stop in ((0, 10), (12, 17), (5, 25), (29, 30), (30, 30)):
        own = reader.read("a", start, stop)
        own[:] = 0
        found = reader.read("a", start, stop, copy=False)
        assert np.array_equal(found, values[start:stop])
    with pytest.raises(ValueError, match="read-only"):
        reader.read("a", 0, 10, copy=False)[:] = 0


def test_a_payload_is_metadata_and_chunks_and_nothing_else(store: Store) -> None:
    manifest = small_payload(store)
    chunks = {"codes": 5, "delta": 3, "zeros": 2}  # 33, 20 and 16 elements, 8 to a chunk
    names = [f"{array}/c/{n}" for array, count in chunks.items() for n in range(count)]
    names = sorted([*names, *(f"{array}/zarr.json" for array in chunks), "zarr.json"])
    assert [item.name for item in manifest.objects] == names
    assert store.list_names("") == [f"p/x/{name}" for name in names]


class Recorder(Passing):
    """A store that notes each verb before it passes it on."""

    def __init__(self, store: Store, notes: list[str]) -> None:
        super().__init__(store)
        self.notes = notes

    def act(self, verb: str, name: str, deed: Deed) -> Any:
        self.notes.append(f"{verb} {name}")
        return deed()

    def create(self, name: str, data: Data, *, sync: bool = True) -> None:
        super().create(name, data, sync=sync)
        self.notes[-1] += " synced" if sync else " unsynced"


def test_a_payload_is_written_once_and_made_durable_once_at_its_end(store: Store) -> None:
    notes: list[str] = []
    write_arrays(Recorder(store, notes), "p", {"a": np.zeros(12, "uint8")}, chunk_elements=10)
    names = ["p/zarr.json", "p/a/zarr.json", "p/a/c/0", "p/a/c/1"]
    assert notes == [f"create {name} unsynced" for name in names] + ["sync p"]


def test_a_read_fetches_the_description_once_and_then_only_chunks(store: Store) -> None:
    manifest = write_arrays(store, "p", {"a": np.zeros(30, "uint8")}, chunk_elements=10)
    notes: list[str] = []
    reader = ArrayReader(Recorder(store, notes), manifest)
    reader.read("a", 5, 15)
    reader.read("a", 29)
    assert notes == [f"read p/a/{name}" for name in ("zarr.json", "c/0", "c/1", "c/2")]


class TestDamage:
    """A manifest is written for whole objects; then one object is replaced or removed."""

    def test_every_flipped_byte_is_noticed_and_located(self, store: Store) -> None:
        manifest = small_payload(store)
        for item in manifest.objects:
            name = f"p/x/{item.name}"
            data = store.read(name)
            assert data is not None
            for index in range(len(data)):
                flipped = bytearray(data)
                flipped[index] ^= 1 << (index % 8)
                self.assert_noticed(store, manifest, item.name, bytes(flipped))

    @pytest.mark.parametrize("damage", ["truncated", "longer", "empty", "zeroed", "deleted"])
    def test_every_damaged_object_is_noticed_and_named(self, store: Store, damage: str) -> None:
        manifest = small_payload(store)
        for item in manifest.objects:
            data = store.read(f"p/x/{item.name}")
            assert data is not None
            other = {
                "truncated": data[:-1],
                "longer": data + b"\0",
                "empty": b"",
                "zeroed": bytes(len(data)),
                "deleted": None,
            }[damage]
            self.assert_noticed(store, manifest, item.name, other)

    def assert_noticed(
        self, store: Store, manifest: Manifest, item: str, data: bytes | None
    ) -> None:
        name = f"p/x/{item}"
        good = store.read(name)
        assert good is not None
        store.delete(name)
        if data is not None:
            store.create(name, data)
        with pytest.raises(DamagedObject) as caught:
            check_payload(store, manifest)
        assert caught.value.name == name
        if item != "zarr.json":  # the group's: arrays are read without it
            with pytest.raises(DamagedObject) as caught:
                ArrayReader(store, manifest).read(item.partition("/")[0])
            assert caught.value.name == name
        store.delete(name)
        store.create(name, good)

    def test_a_missing_chunk_of_zeros_is_not_zeros(self, store: Store) -> None:
        manifest = write_arrays(store, "p", {"a": np.zeros(8, "uint8")}, chunk_elements=8)
        store.delete("p/a/c/0")
        with pytest.raises(DamagedObject, match="p/a/c/0: is missing"):
            ArrayReader(store, manifest).read("a")

    def test_a_sound_chunk_of_other_numbers_is_not_the_committed_one(self, store: Store) -> None:
        manifest = write_arrays(store, "p", {"a": np.arange(16, dtype="int8")}, chunk_elements=8)
        chunks = [store.read(f"p/a/c/{index}") for index in (0, 1)]
        for index in (0, 1):
            other = chunks[1 - index]
            assert other is not None
            store.delete(f"p/a/c/{index}")
            store.create(f"p/a/c/{index}", other)
        with pytest.raises(DamagedObject, match="p/a/c/0: has crc32c"):
            check_payload(store, manifest)
        with pytest.raises(DamagedObject, match="p/a/c/1: has crc32c"):
            ArrayReader(store, manifest).read("a", 8)

    def test_a_cut_object_is_told_from_an_altered_one(self, store: Store) -> None:
        manifest = write_arrays(store, "p", {"a": np.zeros(8, "uint8")})
        for data, problem in ((b"short", "has 5 bytes, committed were 12"), (bytes(12), "crc32c")):
            store.delete("p/a/c/0")
            store.create("p/a/c/0", data)
            with pytest.raises(DamagedObject, match=problem):
                ArrayReader(store, manifest).read("a")

    def test_an_object_read_by_half_once_is_read_again(self, store: Store) -> None:
        manifest = small_payload(store)
        num_reads = len([item for item in manifest.objects if item.name.startswith("delta")])
        for n in range(num_reads):
            halving = Halving(store, n, 1)
            found = ArrayReader(halving, manifest).read("delta")
            assert np.array_equal(found, sample("float32", 20))
            assert halving.num_struck == 1
        with pytest.raises(DamagedObject, match="committed were"):
            ArrayReader(Halving(store, 0, 2), manifest).read("delta")

    def test_objects_the_manifest_does_not_name_are_listed(self, store: Store) -> None:
        manifest = small_payload(store)
        store.create("p/x/extra", b"")
        store.create("p/x2/other", b"")
        assert check_payload(store, manifest) == ["p/x/extra"]

    def test_a_repaired_payload_is_whole_again(self, store: Store) -> None:
        manifest = small_payload(store)
        data = store.read("p/x/delta/c/1")
        assert data is not None
        store.delete("p/x/delta/c/1")
        reader = ArrayReader(store, manifest)
        with pytest.raises(DamagedObject):
            reader.read("delta")
        store.create("p/x/delta/c/1", data)
        assert np.array_equal(reader.read("delta"), sample("float32", 20))


class TestLyingManifest:
    """A header from a broken or hostile sender can claim anything: each lie is damage, never a crash."""

    @pytest.mark.parametrize(
        "spec",
        [
            StoredArray("zeros", "float32", 17, 8),
            StoredArray("zeros", "float32", 16, 16),
            StoredArray("zeros", "int32", 16, 8),
            StoredArray("zeros", "float32", 16, 0),
            StoredArray("zeros", "float32", -1, 8),
            StoredArray("zeros", "float32", 16, "8"),  # type: ignore[arg-type]
            StoredArray("zeros", "no dtype", 16, 8),
            StoredArray("zeros", "object", 16, 8),
            StoredArray("zeros", "f4", 16, 8),
            StoredArray("absent", "float32", 16, 8),
        ],
    )
    def test_a_wrong_array_is_damage(self, store: Store, spec: StoredArray) -> None:
        manifest = small_payload(store)
        lie = Manifest(manifest.folder, (spec,), manifest.objects)
        with pytest.raises(DamagedObject):
            ArrayReader(store, lie).read(spec.name)

    def test_an_array_nobody_described_is_damage(self, store: Store) -> None:
        with pytest.raises(DamagedObject, match="nothing"):
            ArrayReader(store, small_payload(store)).read("nothing")

    def test_a_name_outside_the_store_is_damage(self, store: Store) -> None:
        lie = Manifest("../p", (), (StoredObject("zarr.json", 1, 1),))
        with pytest.raises(DamagedObject, match="no object can have this name"):
            check_payload(store, lie)

    @pytest.mark.parametrize("name", ["zeros/zarr.json", "zeros/c/1"])
    def test_garbage_with_a_true_checksum_is_damage(self, store: Store, name: str) -> None:
        manifest = small_payload(store)
        sealed = bytes(20) + google_crc32c.value(bytes(20)).to_bytes(4, "little")
        for garbage in (b"", b"{}", b"[1]", b"\xff" * 7, b"[" * 20_000, bytes(36), sealed):
            forged = write_garbage(store, f"g{len(garbage)}", name, garbage, manifest)
            with pytest.raises(DamagedObject) as caught:
                ArrayReader(store, forged).read("zeros")
            assert caught.value.name == f"{forged.folder}/{name}"


def write_garbage(
    store: Store, folder: str, name: str, garbage: bytes, manifest: Manifest
) -> Manifest:
    """Copy a payload with one object replaced, and a manifest that vouches for the replacement."""
    objects = []
    for item in manifest.objects:
        data = store.read(f"{manifest.folder}/{item.name}")
        assert data is not None
        if item.name == name:
            vouched = garbage if name.endswith("zarr.json") else garbage[:-4]
            data, item = garbage, StoredObject(name, len(garbage), google_crc32c.value(vouched))
        store.create(f"{folder}/{item.name}", data)
        objects.append(item)
    return Manifest(folder, manifest.arrays, tuple(objects))


class Repeating(Striking):
    """Repeats some creates, as a cloud client does whose first answer was lost."""

    def strike(self, name: str, deed: Deed) -> Any:
        deed()
        return deed()


class TestWriter:
    def test_parts_may_come_in_any_order(self, store: Store) -> None:
        values = sample("float32", 25)
        writer = ArrayWriter(store, "p", {"a": ("float32", 25)}, chunk_elements=10)
        assert writer.chunk_length("a") == 10
        writer.write("a", 20, values[20:])
        writer.write("a", 0, values[:20])
        assert np.array_equal(ArrayReader(store, writer.finish()).read("a"), values)

    @pytest.mark.parametrize(
        ("start", "stop"), [(5, 10), (0, 5), (10, 19), (20, 24), (20, 30), (-10, 0), (30, 40)]
    )
    def test_a_part_of_a_chunk_is_refused(self, store: Store, start: int, stop: int) -> None:
        writer = ArrayWriter(store, "p", {"a": ("uint8", 25)}, chunk_elements=10)
        with pytest.raises(ValueError, match="whole chunks of 10 below 25"):
            writer.write("a", start, np.zeros(stop - start, "uint8"))

    def test_another_dtype_or_dimension_is_refused(self, store: Store) -> None:
        writer = ArrayWriter(store, "p", {"a": ("float32", 4)})
        for values in (np.zeros(4), np.zeros((4, 1), "float32"), np.zeros(4, ">f4")):
            with pytest.raises(ValueError, match="wants float32"):
                writer.write("a", 0, values)
        with pytest.raises(ValueError, match="one dimension"):
            write_arrays(store, "q", {"a": np.zeros((2, 2))})
        assert store.list_names("q") == []

    def test_an_unfinished_payload_has_no_manifest(self, store: Store) -> None:
        writer = ArrayWriter(store, "p", {"a": ("uint8", 20), "b": ("uint8", 0)}, chunk_elements=10)
        writer.write("a", 0, np.zeros(10, "uint8"))
        with pytest.raises(ValueError, match="p/a/c/1 has not been written"):
            writer.finish()

    def test_a_used_folder_and_a_used_chunk_are_taken(self, store: Store) -> None:
        writer = ArrayWriter(store, "p", {"a": ("uint8", 1)})
        writer.write("a", 0, np.zeros(1, "uint8"))
        with pytest.raises(VersionTaken):
            writer.write("a", 0, np.ones(1, "uint8"))
        with pytest.raises(VersionTaken):
            ArrayWriter(store, "p", {"a": ("uint8", 2)})

    def test_a_put_whose_answer_was_lost_meets_its_own_object_and_goes_on(
        self, store: Store
    ) -> None:
        values = sample("float32", 25)
        for n in range(5):  # the group's, the array's description, three chunks
            repeating = Repeating(store, n, 1)
            manifest = write_arrays(repeating, f"p{n}", {"a": values}, chunk_elements=10)
            assert repeating.num_struck == 1
            assert np.array_equal(ArrayReader(store, manifest).read("a"), values)

    def test_the_caller_may_reuse_its_buffer(self, store: Store) -> None:
        buffer = np.arange(8, dtype="uint8")
        manifest = write_arrays(store, "p", {"a": buffer})
        buffer[:] = 0
        assert ArrayReader(store, manifest).read("a").tolist() == list(range(8))

    def test_streaming_holds_a_few_chunks_and_not_the_payload(self, tmp_path: Path) -> None:
        chunk, num_chunks = 2**20, 16  # 16 chunks of 4 MiB of float32
        store = open_store(f"file://{tmp_path}", durable=False)
        part = np.ones(chunk, "float32")
        tracemalloc.start()
        try:
            writer = ArrayWriter(
                store, "p", {"a": ("float32", chunk * num_chunks)}, chunk_elements=chunk
            )
            for index in range(num_chunks):
                writer.write("a", index * chunk, part)
            reader = ArrayReader(store, writer.finish())
            for index in range(num_chunks):
                assert reader.read("a", index * chunk, (index + 1) * chunk).sum() == chunk
            _, peak_bytes = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak_bytes < 5 * 4 * chunk


@pytest.mark.parametrize(
    ("length", "limit", "expected"),
    [
        (0, 32, 1),
        (1, 32, 1),
        (32, 32, 32),
        (33, 32, 32),
        (40_000, 2**22, 40_000),
        (1000, 640, 512),  # 2 chunks of 640 fit; halves of 500, rounded up to 512
        (1281, 640, 512),  # 3 chunks of 427, rounded up to 512
        (10, 1, 1),
    ],
)
def test_chunks_come_out_even(length: int, limit: int, expected: int) -> None:
    assert chunk_length(length, limit) == expected


def test_even_chunks_never_exceed_the_limit_nor_add_one() -> None:
    for limit in (1, 31, 32, 64, 100, 640):
        for length in range(3000):
            got = chunk_length(length, limit)
            assert 1 <= got <= limit
            assert -(-length // got) == -(-length // limit)


def test_importing_this_module_leaves_torch_and_zarr_out() -> None:
    script = "import sys, infra.arrays; print('torch' in sys.modules, 'zarr' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["False", "False"]
