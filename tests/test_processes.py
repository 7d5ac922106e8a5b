"""Who runs where: found by what no other process shares, signalled only if it is the one that was recorded."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from infra import processes

COMMAND = [sys.executable, "-S", "-c", "import time; print('up', flush=True); time.sleep(600)"]


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    environment = {**os.environ, "DILOCO_TEST_MARK": "a b=c"}
    with subprocess.Popen(COMMAND, stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
        process.kill()


def test_a_process_finds_itself_by_what_it_records() -> None:
    assert processes.find(processes.here()) == os.getpid()


def test_a_process_id_that_passed_to_another_process_is_neither_found_nor_signalled(
    child: subprocess.Popen[bytes],
) -> None:
    where = processes.of(child.pid)
    assert where is not None
    recycled = {**where, "started": where["started"] - 1}  # its former owner started a tick earlier
    assert processes.find(recycled) is None
    assert not processes.send(recycled, signal.SIGKILL)
    assert processes.find(where) == child.pid
    assert processes.send(where, signal.SIGKILL)
    assert child.wait(10) == -signal.SIGKILL


def test_a_process_of_another_host_and_a_record_without_a_start_are_not_found(
    child: subprocess.Popen[bytes],
) -> None:
    where = processes.of(child.pid)
    assert where is not None
    elsewhere = {**where, "host": "elsewhere"}
    old = {"host": where["host"], "process": child.pid}
    for unknown in (elsewhere, old, {}, {**where, "process": "1"}):
        assert processes.find(unknown) is None
        assert not processes.send(unknown, signal.SIGKILL)
    assert child.poll() is None


def test_a_dead_process_that_nobody_has_reaped_is_not_found(
    child: subprocess.Popen[bytes],
) -> None:
    where = processes.of(child.pid)
    assert where is not None
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # a zombie from here on
    assert processes.find(where) is None
    assert processes.of(child.pid) is None
    assert not processes.send(where, signal.SIGCONT)


def test_parents_children_and_descendants_are_told() -> None:
    inner = f"import subprocess; subprocess.run({COMMAND!r})"
    with subprocess.Popen([sys.executable, "-S", "-c", inner], stdout=subprocess.PIPE) as middle:
        assert middle.stdout is not None
        middle.stdout.readline()  # the grandchild's
        (grandchild,) = processes.children(middle.pid)
        assert processes.parent(grandchild) == middle.pid
        assert processes.parent(middle.pid) == os.getpid()
        ours = processes.descendants(os.getpid())
        assert ours.index(middle.pid) < ours.index(grandchild)
        assert os.getpid() not in ours
        os.kill(grandchild, signal.SIGKILL)
        middle.kill()


def test_a_process_is_told_by_its_command_and_by_its_variables(
    child: subprocess.Popen[bytes],
) -> None:
    assert "time.sleep(600)" in processes.command_line(child.pid)
    assert processes.with_variable("DILOCO_TEST_MARK") == {child.pid: "a b=c"}
    assert processes.with_variable("DILOCO_TEST_MAR") == {}
