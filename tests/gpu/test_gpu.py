"""The check on a GPU, as a test: see `check.py` beside this file."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

CHECK = Path(__file__).with_name("check.py")


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_everything_is_exact_and_two_islands_exchange(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    command = [sys.executable, str(CHECK), "--json", str(figures), "--folder", str(tmp_path)]
    subprocess.run(command, check=False, timeout=580)
    checks = json.loads(figures.read_text())["checks"]
    assert [claim for claim, holds in checks.items() if not holds] == []
