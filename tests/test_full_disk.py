"""A disk that is really full: said in one line, nothing half-written; training goes on, and with room the run too."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from infra.disk import PARTIAL
from infra.store import open_store
from tasks import creating, records, stopping
from tasks.living import Life
from tests import runs
from tests.test_living import LONG, NAME, SOLO, Merging
from tests.test_sending import require_sound, wait_for

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Return a folder on a disk of its own, of 8 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(folder)]
    if subprocess.run(command, capture_output=True, check=False).returncode != 0:
        pytest.skip("only root may mount a disk")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def _fill(folder: Path) -> Path:
    """Leave no room on a disk; return the file that takes it."""
    filler = folder / "filler"
    with filler.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            return filler


def test_training_goes_on_beside_a_full_disk_and_everything_arrives_once_there_is_room(
    tmp_path: Path, small_disk: Path
) -> None:
    config = runs.tiny_config(tmp_path, LONG, store=f"file://{small_disk}/runs", text=SOLO)
    prepared = creating.prepare_run(config, "r")
    run = creating.create_run(prepared, creating.attempts_of(prepared))
    told: list[Mapping[str, Any]] = []
    life = Life(run, NAME, records.new_attempt, stamp=time.time, tell=told.append)
    try:
        before = life.train(0.5)
        filler = _fill(small_disk)
        wait_for(lambda: life.train(0.2) and any("No space" in m.get("text", "") for m in told))
        assert life.train(1.0).num_steps > before.num_steps / 4
        complaints = [m["text"] for m in told if "No space" in m.get("text", "")]
        assert 1 <= len(complaints) <= 2  # of pushes and of checkpoints, each once
        assert all("\n" not in text for text in complaints)
        require_sound(run)
        filler.unlink()
        num_pushed = sum(m["kind"] == "pushed" for m in told)
        merging = Merging(run)
        wait_for(lambda: life.train(0.2) and _num_pushed(told) > num_pushed + 2, 30)
        merging.close()
        stopping.ask(run, is_stop=True, reason="test", mark="m")
        assert life.train(30.0).outcome == "stopped"
    finally:
        life.close()
    require_sound(run)


def _num_pushed(told: list[Mapping[str, Any]]) -> int:
    return sum(message["kind"] == "pushed" for message in told)


LIMITED = """
import resource, sys
from infra.store import open_store
from islands.types import StoreUnavailable

store = open_store(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
store.create("small", bytes(1000))
try:
    store.create("large", bytes(1001))
except StoreUnavailable as exc:
    print(exc)
store.create("after", b"x")
"""


def test_a_file_that_does_not_fit_is_refused_whole_and_leaves_nothing(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/runs"
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, url],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.strip().startswith(f"cannot create {url}/large: [Errno 27] File too large")
    store = open_store(url)
    assert store.list_names("") == ["after", "small"]
    assert store.read("small") == bytes(1000)
    assert list((tmp_path / "runs" / PARTIAL).iterdir()) == []
