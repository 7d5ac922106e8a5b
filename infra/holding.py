"""Processes held still, or slowed down, for a time; they go on however whoever asked for it ends.

    python -m infra.holding '[SECONDS, FACTOR or null, [WHERE, …]]'

Knows processes and two signals; must not know what they are held for. A small process of its own does the holding. Its
standard input is a lifeline, as a guard's (`infra/guard.py`): the kernel closes it however the asker ends, by SIGKILL
too, and everybody goes on at once. If the holding process itself is killed, the asker lets them go on; only if both are
killed within the same moment does somebody stay stopped.
"""

from __future__ import annotations

import json
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from types import FrameType

from infra import processes
from infra.processes import Where

# One stop and one go of a process that is slowed down.
_CYCLE_SECONDS = 0.1
# How often a long hold looks whether anybody is left to be held, and still stands.
_LOOK_SECONDS = 0.5


class Hold:
    """Processes that stand still, or run slower, until `seconds` have passed or `release` is called.

    Args:
        wheres: whom, as `processes.of` tells it; those that are gone already are left out.
        seconds: for how long.
        factor: how many times slower; None: not at all.
    """

    def __init__(
        self, wheres: Sequence[Where], *, seconds: float, factor: float | None = None
    ) -> None:
        self._wheres = list(wheres)
        order = json.dumps([seconds, factor, [dict(where) for where in wheres]])
        self._process = subprocess.Popen(
            [sys.executable, "-m", "infra.holding", order],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # Ctrl-C is for the asker alone, who lets everybody go on.
            start_new_session=True,
        )
        assert self._process.stdout is not None, "it is started with a pipe"
        told = self._process.stdout.readline().split()
        # How many were stopped at its beginning.
        self.num_held = int(told[0]) if told else 0

    @property
    def is_over(self) -> bool:
        """Whether it has ended by itself."""
        return self._process.poll() is not None

    def release(self) -> None:
        """Let everybody go on, if the time has not done so, and return when they do."""
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None, "it is started with pipes"
            pipe.close()
        if self._process.wait() != 0:
            _let_go(self._wheres)


def main(order: str) -> int:
    """Hold processes as ordered; return the exit status."""
    seconds, factor, wheres = json.loads(order)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, _end)
    try:
        held = [where for where in wheres if processes.send(where, signal.SIGSTOP)]
        print(len(held), flush=True)
        _hold(held, time.monotonic() + seconds, factor)
    finally:
        _let_go(wheres)
    return 0


def _hold(held: list[Where], ends: float, factor: float | None) -> None:
    """Return when the time is over, the lifeline is cut or everybody is gone."""
    run_seconds = 0.0 if factor is None else _CYCLE_SECONDS / factor
    stop_seconds = _LOOK_SECONDS if factor is None else _CYCLE_SECONDS - run_seconds
    while held and (now := time.monotonic()) < ends:
        if _is_cut(min(stop_seconds, ends - now)):
            return
        if factor is None:
            # Again: another hold of the same process may have ended meanwhile, and let it go on.
            held = [where for where in held if processes.send(where, signal.SIGSTOP)]
            continue
        _let_go(held)
        if _is_cut(run_seconds):
            return
        held = [where for where in held if processes.send(where, signal.SIGSTOP)]


def _is_cut(seconds: float) -> bool:
    """Wait so long and say whether the lifeline has been cut."""
    readable, _, _ = select.select([sys.stdin], [], [], max(0.0, seconds))
    return bool(readable)


def _let_go(wheres: Sequence[Where]) -> None:
    for where in reversed(wheres):
        processes.send(where, signal.SIGCONT)


def _end(number: int, frame: FrameType | None) -> None:
    """Leave by way of every `finally`."""
    sys.exit(128 + number)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
