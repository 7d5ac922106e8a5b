"""Who runs where: processes by what no other process shares, and signals that reach only those.

Knows Linux's /proc and nothing but the standard library; must not know what a process does. A process id alone is no
name: the kernel gives it again. Together with the host and the tick at which the process started it is one. Where there
is no /proc nobody is ever found, so nobody is signalled.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

# As kept in records: {"host": …, "process": …, "started": …}.
Where = Mapping[str, Any]
_ENDED = "ZXx"  # a zombie waits for its parent and runs no more


@dataclass(frozen=True, slots=True)
class _Stat:
    parent: int
    started: int


def here() -> dict[str, Any]:
    """Return who this process is, for a record: `find` finds it, and nothing else, by that."""
    return of(os.getpid()) or {"host": socket.gethostname(), "process": os.getpid(), "started": 0}


def of(process: int) -> dict[str, Any] | None:
    """Return who a process of this machine is; None if it has ended."""
    stat = _stat(process)
    if stat is None:
        return None
    return {"host": socket.gethostname(), "process": process, "started": stat.started}


def find(where: Where) -> int | None:
    """Return the process's id if it lives on this machine and is the one that was recorded, else None."""
    process = where.get("process")
    if where.get("host") != socket.gethostname() or not isinstance(process, int):
        return None
    stat = _stat(process)
    return process if stat is not None and stat.started == where.get("started") else None


def send(where: Where, number: signal.Signals) -> bool:
    """Send a signal to exactly this process; False if it is not here any more, or another user's."""
    process = where.get("process")
    if not isinstance(process, int) or process <= 0:
        return False
    try:
        held = os.pidfd_open(process)  # from here on the id means this process, whoever that is
    except OSError:
        return False
    try:
        if find(where) is None:
            return False
        signal.pidfd_send_signal(held, number)
    except (ProcessLookupError, PermissionError):
        return False
    finally:
        os.close(held)
    return True


def parent(process: int) -> int | None:
    """Return the id of a living process's parent."""
    stat = _stat(process)
    return None if stat is None else stat.parent


def children(process: int) -> list[int]:
    """Return the ids of a process's living children, in order."""
    return [one for one, stat in _all() if stat.parent == process]


def descendants(process: int) -> list[int]:
    """Return the ids of all that descends from a process and lives, parents before their children."""
    parents = {one: stat.parent for one, stat in _all()}
    found, generation = list[int](), {process}
    while generation:
        generation = {one for one, its in parents.items() if its in generation}
        found += sorted(generation)
    return found


def command_line(process: int) -> str:
    """Return the command that a process was started with, for people; empty if it is gone."""
    return b" ".join(_parts(process, "cmdline")).decode(errors="replace")


def with_variable(name: str) -> dict[int, str]:
    """Return the ids of this user's processes that were started with a variable, each with its value."""
    begin, found = os.fsencode(f"{name}="), dict[int, str]()
    for process in _ids():
        for part in _parts(process, "environ"):
            if part.startswith(begin):
                found[process] = os.fsdecode(part.removeprefix(begin))
    return found


def _all() -> Iterator[tuple[int, _Stat]]:
    for process in _ids():
        if (stat := _stat(process)) is not None:
            yield process, stat


def _ids() -> list[int]:
    with contextlib.suppress(FileNotFoundError):
        return sorted(int(entry) for entry in os.listdir("/proc") if entry.isdigit())
    return []


def _stat(process: int) -> _Stat | None:
    """Return what the kernel says of a process, None if it has ended."""
    try:
        with open(f"/proc/{process}/stat", "rb") as file:
            # The second field, the name, may hold blanks and brackets; what follows is counted from the third.
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    if len(fields) < 20 or fields[0].decode() in _ENDED:
        return None
    return _Stat(int(fields[1]), int(fields[19]))


def _parts(process: int, file_name: str) -> list[bytes]:
    try:
        with open(f"/proc/{process}/{file_name}", "rb") as file:
            return [part for part in file.read().split(b"\0") if part]
    except OSError:
        return []
