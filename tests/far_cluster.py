"""A cluster elsewhere, for the matrix of faults: a scheduler and workers that somebody else has started. Not a test."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from infra import processes
from tests.fleet import ROOT, wait_until


class FarCluster:
    """A scheduler and two workers, each with its nanny, as a region would keep them running."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder = folder
        self._port = "0"
        self._processes: list[subprocess.Popen[bytes]] = []
        self._file = folder / f"{name}.scheduler.json"
        self.start()

    def start(self) -> None:
        """Start all of it, where it was before."""
        self._file.unlink(missing_ok=True)
        host = ["--host", "127.0.0.1"]
        scheduler = ["dask_scheduler", *host, "--port", self._port, "--no-dashboard"]
        self._begin(*scheduler, "--scheduler-file", str(self._file))
        wait_until(self._file.exists, 120)
        self._port = self.address.rpartition(":")[2]
        for _ in range(2):
            self.start_worker()

    def start_worker(self) -> None:
        """Start one more worker, with its nanny."""
        options = ["--nthreads", "1", "--no-dashboard", "--host", "127.0.0.1"]
        self._begin("dask_worker", self.address, *options)

    @property
    def address(self) -> str:
        return str(json.loads(self._file.read_text())["address"])

    def kill(self) -> None:
        """End all of it, without a goodbye."""
        for process in self._processes:
            for pid in (process.pid, *processes.descendants(process.pid)):
                if (where := processes.of(pid)) is not None:
                    processes.send(where, signal.SIGKILL)
            process.wait()
        self._processes.clear()

    def _begin(self, *command: str) -> None:
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "DASK_DISTRIBUTED__SCHEDULER__ALLOWED_FAILURES": "0",
        }
        self._processes.append(
            subprocess.Popen(
                [sys.executable, "-m", f"distributed.cli.{command[0]}", *command[1:]],
                cwd=self._folder,
                env=environment,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        )
