"""Records out of JSON values: what fits is made, anything else is named as a ValueError and nothing else."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

import pytest

from islands.parsing import parse
from islands.types import Position


@dataclass(frozen=True, slots=True)
class Sample:
    name: str
    count: int
    ratio: float
    place: Position
    other: Position | None
    rows: tuple[tuple[int, int], ...]
    totals: Mapping[str, tuple[int, int]]
    kind: Literal["kill", "stop"]


SAMPLE = Sample("east", 3, 0.5, Position(0, 7), None, ((1, 2), (3, 4)), {"late": (1, 20)}, "stop")
PLAIN: dict[str, Any] = {
    "name": "east",
    "count": 3,
    "ratio": 0.5,
    "place": [0, 7],
    "other": None,
    "rows": [[1, 2], [3, 4]],
    "totals": {"late": [1, 20]},
    "kind": "stop",
}


def test_plain_values_become_the_record() -> None:
    assert parse(Sample, PLAIN) == SAMPLE
    assert parse(Sample, list(PLAIN.values())) == SAMPLE
    assert parse(Sample, asdict(SAMPLE)) == SAMPLE
    assert type(parse(Sample, PLAIN).place) is Position
    assert parse(Sample, {**PLAIN, "other": [1, 2]}).other == Position(1, 2)


def test_a_float_may_be_written_without_a_fraction_and_need_not_be_finite() -> None:
    found = parse(Sample, {**PLAIN, "ratio": 1}).ratio
    assert (found, type(found)) == (1.0, float)
    assert math.isnan(parse(Sample, {**PLAIN, "ratio": math.nan}).ratio)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("name", 5),
        ("name", None),
        ("count", "3"),
        ("count", 3.0),
        ("count", True),
        ("count", 2**63),
        ("ratio", "x"),
        ("ratio", True),
        ("ratio", 10**400),
        ("place", [1]),
        ("place", [1, 2, 3]),
        ("place", ["a", "b"]),
        ("place", "ab"),
        ("other", 7),
        ("rows", 7),
        ("rows", [[1, []]]),
        ("totals", [["late", [1, 20]]]),
        ("totals", {"late": [1]}),
        ("kind", "slow"),
        ("kind", ["stop"]),
    ],
)
def test_a_value_of_another_type_is_refused(field: str, value: object) -> None:
    with pytest.raises(ValueError, match="must be"):
        parse(Sample, {**PLAIN, field: value})


@pytest.mark.parametrize("value", [None, 3, "x", [], {}, {**PLAIN, "more": 1}, {"name": "east"}])
def test_a_record_has_exactly_its_fields(value: object) -> None:
    with pytest.raises(ValueError, match="must be"):
        parse(Sample, value)
