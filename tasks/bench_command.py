"""The command `diloco bench` as a process of its own, its lines in the flow run's log.

A process of its own: a benchmark starts a Prefect of its own, and this one already belongs to another.
"""

from __future__ import annotations

import subprocess
import sys

from prefect import get_run_logger

# Prefect kills a cancelled flow after 30 s.
_STOP_SECONDS = 20.0


def run_command(name: str, seeds: int, tokens: int | None) -> int:
    """Run one benchmark and return its exit status; it ends with whoever called."""
    options = [f"--seeds={seeds}"] + ([] if tokens is None else [f"--tokens={tokens}"])
    log = get_run_logger()
    process = subprocess.Popen(
        [sys.executable, "-m", "flows", "bench", name, *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None, "it is started with a pipe"
    try:
        for line in process.stdout:
            if line.strip():
                log.info("%s", line.rstrip())
        return process.wait()
    finally:
        process.terminate()
        try:
            process.communicate(
                timeout=_STOP_SECONDS
            )  # it still says what it ends, and must be heard
        except subprocess.TimeoutExpired:
            process.kill()  # what it started hangs on guards
            process.wait()
            process.stdout.close()
