"""The GPU's check, run tiny on the CPU: without a GPU at hand the script must not rot."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu import check


@pytest.mark.slow
def test_the_check_for_gpus_holds_on_the_cpu_and_measures_everything(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    command = [sys.executable, check.__file__, "--json", str(figures), "--folder", str(tmp_path)]
    subprocess.run([*command, "--device", "cpu", "--small"], check=True, timeout=110)
    found = json.loads(figures.read_text())["figures"]
    assert found["east"]["pushes"] > 0
    assert found["synchronizer"]["merges"] > 0
    assert found["tokens_per_second_alone"] > 0
    assert 0 <= found["learner_stall_fraction_alone"] < 1
    assert list(tmp_path.iterdir()) == [figures]


def test_one_rounds_overhead_is_the_share_of_tokens_that_exchanging_costs() -> None:
    rows = [
        check.Row("east", "shared", 0, tokens=900, seconds=10.0, stall_share=0.01, loss=2.0),
        check.Row("west", "shared", 0, tokens=700, seconds=10.0, stall_share=0.03, loss=2.0),
        check.Row("east", "alone", 0, tokens=1_000, seconds=10.0, stall_share=0.0, loss=2.0),
        check.Row("west", "alone", 0, tokens=1_000, seconds=10.0, stall_share=0.0, loss=2.0),
    ]
    found = check.overhead(rows)
    assert found["tokens_per_second_shared"] == 160
    assert found["overhead"] == pytest.approx(0.2)  # 160 of 200 tokens per second
    assert found["learner_stall_fraction_shared"] == 0.03
