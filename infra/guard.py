"""A small parent that ends a command, and all that descends from it, when whoever started it ends.

    python -m infra.guard [--grace SECONDS] -- COMMAND …

The guard's standard input is the lifeline: the starter keeps the other end of that pipe, and the kernel closes it
however the starter dies. This module knows processes and signals, and nothing but the standard library, so that it
starts in a fraction of a second; it must not know what it guards. On Linux it adopts every orphan below it
(`PR_SET_CHILD_SUBREAPER`), so a new session hides nothing from it; elsewhere it clears the command's process group.

How a stop goes (end of the lifeline, SIGTERM, SIGINT or SIGHUP to the guard, or the command's own end):

1. The command alone gets SIGTERM: a server that has children of its own stops them in its own order.
2. What outlives its own parent becomes a child of the guard, and gets its SIGTERM then.
3. Whatever is left after the grace is killed, generation after generation.

Only children of the guard are ever signalled: their ids cannot pass to a stranger before the guard has reaped them.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import math
import os
import select
import signal
import sys
import time
from collections.abc import Sequence
from types import FrameType

DEFAULT_GRACE_SECONDS = 10.0
# A killed process that the kernel cannot end (stuck in a device) must not keep the guard for ever.
KILL_SECONDS = 10.0
_POLL_SECONDS = 0.05
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_SIGNALS = (*_STOP_SIGNALS, signal.SIGCHLD)
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_USAGE = "usage: python -m infra.guard [--grace SECONDS] -- COMMAND …"


def main(arguments: Sequence[str]) -> int:
    """Guard the command that the arguments name; return its exit status, 2 on bad usage."""
    try:
        grace_seconds, command = _parse(list(arguments))
    except ValueError as exc:
        _log(f"{exc}\n{_USAGE}")
        return 2
    return guard(command, grace_seconds=grace_seconds, adopts=adopt_orphans())


def adopt_orphans() -> bool:
    """Make orphans below this process its children, and say whether the system can do that."""
    return _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def is_alive(pid: int) -> bool:
    """Say whether there is a process of that id, a dead one that nobody has reaped included."""
    try:
        os.kill(pid, 0)
    except OSError as exc:
        return exc.errno == errno.EPERM  # another user's
    return True


def guard(command: list[str], *, grace_seconds: float, adopts: bool) -> int:
    """Run the command until it ends or has to, clear away what it leaves, and return its exit status.

    Takes over this process: its signals, its standard input and the reaping of all its children.

    Args:
        command: a program, looked up on PATH, and its arguments.
        grace_seconds: from the beginning of the stop until what is left is killed.
        adopts: whether this process adopts orphans; otherwise only the command's process group is cleared.

    Returns:
        The status with which the command exited, 128 + n if signal n ended it, 127 if it cannot be run.
    """
    events, wakeup = os.pipe()
    for descriptor in (events, wakeup):
        os.set_blocking(descriptor, False)
    # A signal that comes before its handler would end the guard and spare the command.
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    family = _Family(_spawn(command), adopts)
    signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
    for number in _SIGNALS:
        signal.signal(number, _wake)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    _wait_for_a_reason_to_stop(family, events)
    deadline = time.monotonic() + grace_seconds
    while family.is_alive() and time.monotonic() < deadline:
        family.terminate()
        _wait(events, seconds=_POLL_SECONDS)
    if family.is_alive():
        _log(f"killing what is left after {grace_seconds:g} s: {family.names()}")
    deadline = time.monotonic() + KILL_SECONDS
    while family.is_alive() and time.monotonic() < deadline:
        family.kill()
        _wait(events, seconds=_POLL_SECONDS)
    if family.is_alive():
        _log(f"cannot end: {family.names()}")
    return family.status


class _Family:
    """The command and what descends from it, as far as this system lets them be found."""

    def __init__(self, command: int, adopts: bool) -> None:
        self.command = command  # its process id, and that of its session and group
        self.adopts = adopts
        self.has_command = True
        self.status = 128 + signal.SIGKILL  # of a command that even SIGKILL could not end
        self._has_asked_group = False
        self._terminated: set[int] = set()

    def is_alive(self) -> bool:
        """Reap whoever has ended, and say whether anybody is left."""
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if not pid:
                    return True
                self._terminated.discard(pid)
                if pid == self.command:
                    self.has_command = False
                    code = os.waitstatus_to_exitcode(status)
                    self.status = code if code >= 0 else 128 - code
        # No child at all means, with orphans adopted, no descendant.
        return not self.adopts and self._signal_group(0)

    def terminate(self) -> None:
        """Ask everybody who has not been asked yet and whose parent is not there to ask."""
        for pid in self._children():
            if pid not in self._terminated:
                self._terminated.add(pid)
                _signal(pid, signal.SIGTERM)
        if not (self.adopts or self.has_command or self._has_asked_group):
            self._has_asked_group = True
            self._signal_group(signal.SIGTERM)

    def kill(self) -> None:
        """Kill one generation; the next one becomes ours by that."""
        for pid in self._children():
            _signal(pid, signal.SIGKILL)
        if not self.adopts:
            self._signal_group(signal.SIGKILL)

    def names(self) -> str:
        """Say who is left, for the log."""
        if not self.adopts:
            return f"process group {self.command}"
        return ", ".join(f"{pid} ({_command_line(pid)})" for pid in self._children())

    def _children(self) -> list[int]:
        if self.adopts:
            return _children()
        return [self.command] if self.has_command else []

    def _signal_group(self, number: int) -> bool:
        """Send a signal to the command's group, 0 for none; say whether anybody could have got it."""
        try:
            os.killpg(self.command, number)
        except (ProcessLookupError, PermissionError):  # macOS answers the latter for zombies
            return False
        return True


def _spawn(command: list[str]) -> int:
    """Start the command in a session of its own, with no input and no signal blocked; return its process id."""
    guard_pid = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    try:
        os.setsid()
        _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)  # the guard itself may be killed
        if os.getppid() != guard_pid:
            os._exit(127)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))  # what the guard was handed is for the guard
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores it, and exec keeps that
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        os.execvp(command[0], command)
    except OSError as exc:
        _log(f"a command must be a program that runs, got {command[0]!r}: {exc.strerror}")
    finally:
        os._exit(127)


def _wait_for_a_reason_to_stop(family: _Family, events: int) -> None:
    """Return when a signal asks for it, the lifeline ends, or the command has ended by itself."""
    while family.is_alive() and family.has_command:
        readable, _, _ = select.select([events, 0], [], [])
        if set(_read(events)).intersection(_STOP_SIGNALS):
            return
        if 0 in readable and not _read(0):
            return


def _wait(events: int, *, seconds: float) -> None:
    """Wait for a signal, at most that long."""
    select.select([events], [], [], seconds)
    _read(events)


def _read(descriptor: int) -> bytes:
    """Return what is there to read; nothing also where reading fails, as on a terminal that is gone."""
    try:
        return os.read(descriptor, 4096)
    except OSError:
        return b""


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(PermissionError):  # it has become another user's
        os.kill(pid, number)


def _children() -> list[int]:
    """Return the ids of this process's children, as Linux tells them."""
    own_pid = os.getpid()
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{entry}/stat", "rb") as file:
                # The second field, the name, may hold blanks and brackets; the parent is the second one after it.
                if int(file.read().rpartition(b")")[2].split()[1]) == own_pid:
                    found.append(int(entry))
    return found


def _command_line(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read(100).replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return "gone"


def _prctl(option: int, value: int) -> bool:
    if sys.platform != "linux":
        return False
    zero = ctypes.c_ulong(0)
    done: int = ctypes.CDLL(None).prctl(option, ctypes.c_ulong(value), zero, zero, zero)
    return done == 0


def _wake(number: int, frame: FrameType | None) -> None:
    """Do nothing: that a signal came, and which one, is read from the wakeup pipe."""


def _log(message: str) -> None:
    print(f"guard: {message}", file=sys.stderr, flush=True)


def _parse(arguments: list[str]) -> tuple[float, list[str]]:
    """Return the grace in seconds, and the command."""
    place = arguments.index("--") if "--" in arguments else len(arguments)
    options, command = arguments[:place], arguments[place + 1 :]
    if not command:
        raise ValueError("a command must follow `--`, got none")
    if not options:
        return DEFAULT_GRACE_SECONDS, command
    if len(options) != 2 or options[0] != "--grace":
        raise ValueError(f"the only option must be --grace SECONDS, got {' '.join(options)!r}")
    with contextlib.suppress(ValueError):
        if 0 <= float(options[1]) < math.inf:
            return float(options[1]), command
    raise ValueError(f"--grace must be a number of seconds >= 0, got {options[1]!r}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
