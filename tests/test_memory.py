"""Freed memory is kept for the next step, also where a nanny's environment has it given back at once."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from tests.runs import start, tiny_config

ROOT = Path(__file__).resolve().parent.parent
pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="what mallopt is of")

# How many pages a round of taking and freeing 8 MiB fetches from the kernel; 2,048 are all of them.
COUNT_FAULTS = """
import ctypes, resource
libc = ctypes.CDLL(None)
libc.prctl(41, 1, 0, 0, 0)  # PR_SET_THP_DISABLE: a huge page would be one fault
libc.malloc.restype = ctypes.c_void_p
libc.free.argtypes = [ctypes.c_void_p]
def use():
    place = libc.malloc(8 * 2**20)
    ctypes.memset(place, 1, 8 * 2**20)
    libc.free(place)
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
use()
before = faults()
for _ in range(20):
    use()
print((faults() - before) // 20)
"""
KEEP = "from infra.memory import keep_freed_memory\nkeep_freed_memory()\n"
LIVE = """
import sys, time
from tasks import records
from tasks.living import Life
from tasks.runs import open_run
run = open_run(sys.argv[1], "r")
life = Life(run, run.config.islands[0].name, records.new_attempt, stamp=time.time, tell=print)
life.close()
"""


def faults_after(code: str, *arguments: str) -> int:
    done = subprocess.run(
        [sys.executable, "-c", code + COUNT_FAULTS, *arguments],
        env={**os.environ, "MALLOC_TRIM_THRESHOLD_": "65536", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    return int(done.stdout.splitlines()[-1])


def test_freed_memory_is_used_again_without_the_kernel() -> None:
    assert faults_after("") > 1_500
    assert faults_after(KEEP) < 100


def test_where_memory_is_limited_a_quarter_of_it_is_kept() -> None:
    assert faults_after(KEEP.replace("()", "(64)")) < 100
    assert faults_after(KEEP.replace("()", "(16)")) > 1_500


@pytest.mark.slow
def test_a_learner_keeps_what_its_steps_free(tmp_path: Path) -> None:
    config = tiny_config(tmp_path)
    start(config)
    assert faults_after(LIVE, config.store) < 100
