"""A service that dies is started again with what it was started with, with a limit, and people are told."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from infra import keeping
from infra.keeping import Service, Started, keep

PYTHON = (sys.executable, "-I", "-S", "-c")
# Notes its process id, then works.
WORK = "import os, time; print(os.getpid(), flush=True); time.sleep(100)"
DIE = "import os; print(os.getpid(), flush=True)"


def service(folder: Path, source: str, may_start: Callable[[], bool] = lambda: True) -> Service:
    return Service(
        name="the example",
        command=(*PYTHON, source),
        variables={},
        log=folder / "example.log",
        where="http://127.0.0.1:1",
        is_ready=lambda: True,
        grace_seconds=2.0,
        may_start=may_start,
    )


@contextmanager
def kept(example: Service, said: list[str]) -> Iterator[Started]:
    started, is_over = Started(example), threading.Event()
    keeper = threading.Thread(
        target=keep, args=([started],), kwargs={"is_over": is_over, "say": said.append}
    )
    keeper.start()
    try:
        yield started
    finally:
        is_over.set()
        keeper.join()
        started.stop(said.append)


def processes(example: Service) -> list[int]:
    """Return every process that the service has had, oldest first."""
    return [int(line) for line in example.log.read_text().splitlines() if line.isdecimal()]


def until(claim: Callable[[], object]) -> None:
    limit = time.monotonic() + 40
    while not claim():
        assert time.monotonic() < limit, "it did not come to that"
        time.sleep(0.05)


def test_a_service_that_is_killed_is_started_again_and_stopped_at_the_end(tmp_path: Path) -> None:
    example, said = service(tmp_path, WORK), list[str]()
    with kept(example, said):
        until(lambda: len(processes(example)) == 1)
        os.kill(processes(example)[0], signal.SIGKILL)
        until(lambda: len(processes(example)) == 2)
        assert said == [
            "the example ended with status 137: it is started again on http://127.0.0.1:1"
        ]
    assert not any(os.path.exists(f"/proc/{process}") for process in processes(example))


def test_it_waits_for_what_it_needs(tmp_path: Path) -> None:
    is_there, said = threading.Event(), list[str]()
    example = service(tmp_path, WORK, is_there.is_set)
    with kept(example, said):
        until(lambda: len(processes(example)) == 1)
        os.kill(processes(example)[0], signal.SIGKILL)
        until(lambda: said)
        time.sleep(0.5)
        assert len(processes(example)) == 1
        is_there.set()
        until(lambda: len(processes(example)) == 2)


def test_one_that_dies_again_and_again_is_given_up_and_its_log_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeping, "MOST_RESTARTS", 1)
    example, said = service(tmp_path, DIE), list[str]()
    with kept(example, said):
        until(lambda: len(said) == 2)
        time.sleep(0.5)
        assert len(processes(example)) == 2
    assert f"it is not started again; mend what its log names, {example.log}" in said[1]


def test_a_steady_life_forgives_earlier_deaths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeping, "MOST_RESTARTS", 1)
    monkeypatch.setattr(keeping, "STEADY_SECONDS", 0.0)
    example, said = service(tmp_path, DIE), list[str]()
    with kept(example, said):
        until(lambda: len(processes(example)) >= 4)
    assert not any("not started again" in text for text in said)
