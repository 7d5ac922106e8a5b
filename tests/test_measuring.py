"""The benchmarks of store and merge return what they promise; how fast is for them to say, not for a test."""

from __future__ import annotations

from pathlib import Path

import pytest

from tasks import measuring, storing


def test_the_store_is_measured_beside_torch_and_leaves_nothing(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    figures = storing.measure(tmp_path, num_elements=2**12, num_rounds=2)
    for work in ("write", "read", "write_without_fsync"):
        assert figures[f"{work}_ratio"] > 0
        assert set(figures[f"{work}_seconds"]) == {"ours", "torch"}
    assert list(tmp_path.iterdir()) == []


def test_bytes_are_those_of_a_whole_payload() -> None:
    ratios = storing.bytes_ratios(2**10)
    assert ratios["float32"] == 1.0
    # Numbers, the crc32c of the one chunk, and the two zarr.json, of 66 and about 545 bytes.
    expected = (2048 + 4 + 66 + 545) / (4096 + 4 + 66 + 545)
    assert ratios["bfloat16"] == pytest.approx(expected, abs=0.002)


def test_a_merge_is_linear_if_a_learner_costs_no_more_among_many() -> None:
    assert measuring.is_linear({"4": 1.0, "64": 16.0})
    assert not measuring.is_linear({"4": 1.0, "8": 2.0, "64": 16.1})
