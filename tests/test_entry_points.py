"""How a process may be started: from `python -c`, a file, standard input, anywhere on the disk.

A worker of a cluster is a spawned process that imports its parent's main module. A script without a main guard must
not start clusters without end, nor hang: it ends with one line that says what to do.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import runs

ROOT = Path(__file__).resolve().parent.parent
UNGUARDED = """
print("begins", flush=True)
from infra.clusters import ClusterSpec, open_cluster
with open_cluster(ClusterSpec("east"), "topic") as cluster:
    print("got", cluster.call(abs, -3).result(), flush=True)
"""
GUARDED = UNGUARDED.replace("with open", 'if __name__ == "__main__":\n  with open').replace(
    "    print", "      print"
)


def python(folder: Path, *arguments: str, text: str = "") -> subprocess.CompletedProcess[str]:
    """Run Python somewhere else on the disk, and demand that it ends."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        input=text,
        capture_output=True,
        text=True,
        timeout=110,
    )


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [("-c", UNGUARDED), ("script.py",)])
def test_a_cluster_starts_from_a_line_and_from_a_guarded_script(
    tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    (tmp_path / "script.py").write_text(GUARDED)
    done = python(tmp_path, *arguments)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "got 3"


@pytest.mark.slow
@pytest.mark.parametrize(("name", "num_begun"), [("script.py", 2), ("-", 1)])
def test_a_script_that_workers_cannot_import_ends_with_one_line_that_says_so(
    tmp_path: Path, name: str, num_begun: int
) -> None:
    """Without a main guard it begins in its one worker too, and in no third process; standard input is no file."""
    (tmp_path / "script.py").write_text(UNGUARDED)
    done = python(tmp_path, name, text=UNGUARDED)
    assert done.returncode == 1
    assert done.stdout == "begins\n" * num_begun
    last = done.stderr.splitlines()[-1]
    assert "island east: a cluster of its own must start" in last
    assert 'must be a file, and do so below `if __name__ == "__main__":`' in last


@pytest.mark.slow
@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
def test_a_run_is_trained_from_a_script_elsewhere_whatever_the_start_method(
    tmp_path: Path, method: str
) -> None:
    """The local driver starts no process of its own, so an unguarded script may train."""
    config = tmp_path / "run.toml"
    config.write_text(runs.TINY.replace("4_000", "600"))
    runs.write_text(tmp_path / "text")
    (tmp_path / "script.py").write_text(
        f"""
import multiprocessing, sys
multiprocessing.set_start_method("{method}")
from flows.cli import main
sys.argv = ["diloco", "train", "run.toml", "--driver", "local", "--run", "r", "--set", 'data.source="text"']
main()
"""
    )
    done = python(tmp_path, "script.py")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "runs" / "r" / "finished.json").exists()
