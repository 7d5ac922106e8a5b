"""Claims about the names of objects, and about sealed records, which know their own digest."""

from __future__ import annotations

import json
import math

import pytest

from islands import names
from islands.sealing import seal, unseal
from islands.types import FORMAT_VERSION, DamagedObject, Position, is_plain_name

NUMBERS = (0, 9, 10, 9999, 99_999_999, 100_000_000)

# --- names


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("learner", ["east", "a-1", "0", "x" * 64])
def test_a_contribution_says_whose_it_is_and_what_it_covers(learner: str, number: int) -> None:
    key = names.ContributionKey(3, learner, number, Position(2, number))
    name = names.contribution(key)
    assert name == f"inbox/f0003/{learner}/{number}-2-{number}.json"
    assert names.parse_contribution(name) == key


@pytest.mark.parametrize("number", NUMBERS)
def test_versions_and_checkpoints_say_their_place(number: int) -> None:
    assert names.parse_version(names.version(12_345, number)) == (12_345, number)
    position = Position(number, number)
    assert names.parse_checkpoint(names.checkpoint("east", position)) == ("east", position)


def test_names_are_as_documented() -> None:
    assert names.version(3, 17) == "versions/f0003/v00000017.json"
    assert names.checkpoint("east", Position(1, 40)) == "checkpoints/east/1-40.json"
    assert names.incarnation("east", 2) == "learners/east/2.json"
    assert names.left("east") == "learners/east/left.json"
    assert names.snapshot(4) == "snapshots/4.json"
    assert names.numbered("stops", 0) == "stops/0.json"
    assert names.advisory(3, 7, 1) == "advisories/f0003/7-1.json"


def test_numbers_are_compared_as_numbers() -> None:
    found = [names.snapshot(n) for n in (100_000, 9, 1_000_000, 10, 99_999)]
    ordered = sorted(found, key=lambda name: names.number_of(name) or 0)
    assert [names.number_of(name) for name in ordered] == [9, 10, 99_999, 100_000, 1_000_000]
    outgrown = [names.version(0, n) for n in (100_000_000, 99_999_999)]
    assert sorted(outgrown, key=names.parse_version) == outgrown[::-1]


@pytest.mark.parametrize(
    "name",
    [
        "",
        "run.json",
        "inbox/f0003/east/7-1.json",
        "inbox/f0003/a/b/7-1-40.json",
        "inbox/f0003/east/7-1-40.json.tmp",
        "inbox/f0003/east/-7-1-40.json",
        "payloads/inbox/f0003/east/7-1-40/a-1/delta/c/0",
        "versions/f0003/17.json",
        "payloads/versions/f0003/v00000017.json",
        "checkpoints/east/left.json",
        "x/checkpoints/east/1-40.json",
    ],
)
def test_any_other_name_is_nobody(name: str) -> None:
    assert names.parse_contribution(name) is None
    assert names.parse_version(name) is None
    assert names.parse_checkpoint(name) is None


def test_only_numbered_objects_have_a_number() -> None:
    assert names.number_of("stops/12.json") == 12
    assert names.number_of("12.json") == 12
    assert names.number_of("learners/east/left.json") is None
    assert names.number_of("stops/12.json.tmp") is None


HEADERS = (
    names.RUN,
    names.version(0, 17),
    names.checkpoint("a-1", Position(0, 5)),
    names.numbered("driver", 3),
    names.contribution(names.ContributionKey(0, "a-1", 7, Position(0, 5))),
    names.contribution(names.ContributionKey(0, "east", 7, Position(0, 5))),
)


@pytest.mark.parametrize("header", HEADERS)
@pytest.mark.parametrize("rest", ["delta/c/0", "zarr.json", "a-1/c/0", "a-2"])
def test_a_payload_names_its_header_and_attempt_even_where_others_look_like_one(
    header: str, rest: str
) -> None:
    folder = names.payload_folder(header, "a-0007")
    assert names.header_of_payload(f"{folder}/{rest}") == (header, folder)
    assert names.header_of_payload(folder) == (header, folder)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "payloads",
        "payloads/",
        "payloads/run",
        "payloads/run/b-1/x",
        "payloads/nothing/a-1/x",
        "payloads/inbox/f0000/a-1/7-0-5",
        "inbox/f0000/east/a-1/x",
    ],
)
def test_what_is_no_attempt_belongs_to_no_header(name: str) -> None:
    assert names.header_of_payload(name) is None


@pytest.mark.parametrize("name", ["a", "0", "east-1", "a_b", "x" * 64])
def test_plain_names_are_accepted(name: str) -> None:
    assert is_plain_name(name)


@pytest.mark.parametrize(
    "name",
    [
        *(
            "",
            ".",
            "..",
            "a/b",
            "a//b",
            "/abs",
            "a\\b",
            "%2e%2e",
            " a ",
            "a b",
            "a.b",
            "a\n",
            "a\nb",
        ),
        *("-rf", "a-", "_a", "A", "Ünï", "\u0663", "x" * 65),
    ],
)
def test_names_that_could_be_a_path_an_option_or_another_name_are_not_plain(name: str) -> None:
    assert not is_plain_name(name)


# --- sealing

BODY = {
    "text": 'quote " slash / ümlaut \u2028 🌍',
    "numbers": [0, -1, 2**60, 0.1, 1e-300, -0.0, 1e22],
    "nested": {"b": None, "a": [True, False, {}], "": []},
}


def test_a_sealed_record_opens_to_its_body_and_digest() -> None:
    body, digest = unseal("x", seal(BODY)[0])
    assert body == BODY
    assert digest == seal(BODY)[1]
    assert len(digest) == 64


def test_floats_survive_to_the_last_bit() -> None:
    values = [0.1, 1 / 3, 5e-324, 1.7976931348623157e308, -0.0, math.pi]
    found = unseal("x", seal({"v": values})[0])[0]["v"]
    assert [value.hex() for value in found] == [value.hex() for value in values]


def test_what_is_not_finite_survives() -> None:
    found = unseal("x", seal({"v": [math.nan, math.inf, -math.inf]})[0])[0]["v"]
    assert math.isnan(found[0])
    assert found[1:] == [math.inf, -math.inf]


def test_the_order_of_keys_does_not_matter() -> None:
    turned = {key: BODY[key] for key in reversed(BODY)}
    turned["nested"] = {"": [], "a": [True, False, {}], "b": None}
    assert seal(turned) == seal(BODY)


def test_tuples_and_lists_are_the_same_record() -> None:
    assert seal({"p": Position(1, 2)}) == seal({"p": [1, 2]})


@pytest.mark.parametrize("mask", [0x01, 0x20, 0x80, 0xFF])
def test_any_changed_byte_is_found_and_the_object_is_named(mask: int) -> None:
    data, _ = seal(BODY)
    for place in range(len(data)):
        changed = bytearray(data)
        changed[place] ^= mask
        with pytest.raises(DamagedObject) as caught:
            unseal("stops/0.json", bytes(changed))
        assert caught.value.name == "stops/0.json"


def test_a_record_that_is_cut_or_grown_is_found() -> None:
    data, _ = seal(BODY)
    for changed in (
        *(data[:n] for n in range(len(data))),
        data + b" ",
        data + b"\n",
        b" " + data,
        data * 2,
    ):
        with pytest.raises(DamagedObject):
            unseal("x", changed)


def test_the_same_values_written_otherwise_are_found() -> None:
    record = json.loads(seal(BODY)[0])
    for changed in (
        json.dumps(record),
        json.dumps(record, sort_keys=True, separators=(",", ":"), ensure_ascii=False),
        seal(BODY)[0].decode().replace("1e-300", "1E-300"),
    ):
        with pytest.raises(DamagedObject):
            unseal("x", changed.encode())


@pytest.mark.parametrize(
    "data",
    [
        *(
            b"",
            b"null",
            b"[]",
            b"3",
            b"{}",
            b'"text"',
            b'{"body":1,"digest":"","format":1}',
            b"\xff\xfe",
        ),
        *(b"[" * 200_000, b"9" * 5000),
    ],
)
def test_garbage_is_damage_and_nothing_else(data: bytes) -> None:
    with pytest.raises(DamagedObject):
        unseal("x", data)


def test_a_record_of_another_format_is_refused_with_both_numbers() -> None:
    record = json.loads(seal({"a": 1})[0])
    record["format"] = FORMAT_VERSION + 1
    data = json.dumps(record, sort_keys=True, separators=(",", ":")).encode()
    with pytest.raises(DamagedObject, match=f"has format {FORMAT_VERSION + 1}, this program reads"):
        unseal("x", data)


def test_another_body_has_another_digest() -> None:
    digests = {
        seal(body)[1] for body in ({}, {"a": 1}, {"a": 1.0}, {"a": "1"}, {"b": 1}, {"a": None})
    }
    assert len(digests) == 6
