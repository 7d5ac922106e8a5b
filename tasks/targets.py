"""Whose processes a fault strikes: those of this machine, found by records and by descent. No torch, no Prefect.

Knows where learners, synchronizers and flows say they run, and how the services are started; must not know what happens
to them. On an island's own cluster the nanny is a part of the island's flow, one process for both targets; at a
scheduler elsewhere on this machine it is the worker's parent.
"""

from __future__ import annotations

import os
from typing import Any

from infra import processes, services, settings
from islands import names
from islands.chaos import OF_AN_ISLAND, Fault
from tasks import records
from tasks.runs import Run

# How the process that executes a flow run is started.
_ENGINE = "prefect.engine"
_FOLDERS = {"synchronizer": "synchronizers", "train": "trainers"}
# What stands in the command line of a service and of its guard.
_COMMANDS = {
    "prefect": "prefect server start",
    "mlflow": "mlflow server",
    "serve": "flows.serving",
}


def processes_of(run: Run, fault: Fault) -> list[dict[str, Any]]:
    """Return the living processes that a fault strikes, parents before their children; empty if it is not there."""
    if fault.target in OF_AN_ISLAND:
        found = _of_island(run, fault.target, fault.island or "")
    elif fault.target in _FOLDERS:
        found = _recorded(run, _FOLDERS[fault.target])
    else:
        found = _of_service(fault.target)
    return [one for pid in found if pid != os.getpid() and (one := processes.of(pid)) is not None]


def is_away(run: Run, island: str) -> bool:
    """Say whether nobody trains an island now, as far as this machine can tell; of another one it cannot."""
    where = _where(run, names.incarnation(island, records.newest_incarnation(run.store, island)))
    return not where or (
        where.get("host") == processes.here()["host"] and processes.find(where) is None
    )


def _of_island(run: Run, target: str, island: str) -> list[int]:
    number = records.newest_incarnation(run.store, island)
    learner = processes.find(_where(run, names.incarnation(island, number)))
    if learner is None:
        return []
    if target == "learner":
        return [learner]
    if target == "nanny":
        nanny = processes.parent(learner)
        return [] if nanny is None or nanny <= 1 else [nanny]
    flow = _flow_above(learner)
    if flow is None:
        return []
    return [flow] if target == "island" else [flow, *processes.descendants(flow)]


def _flow_above(process: int) -> int | None:
    """Return the flow run's process from which another one descends."""
    above: int | None = process
    while above is not None and above > 1:
        above = processes.parent(above)
        if above is not None and _ENGINE in processes.command_line(above):
            return above
    return None


def _recorded(run: Run, folder: str) -> list[int]:
    """Return the process that the newest record of a folder names, if it lives here."""
    number = records.next_number(run.store, folder) - 1
    process = processes.find(_where(run, names.numbered(folder, number)))
    return [] if process is None else [process]


def _of_service(target: str) -> list[int]:
    """Return the processes of a service, without its guard; of serve the one that serves, not the flows it runs."""
    starter = services.starter(settings.home())
    if starter is None:
        return []
    for guard in processes.children(starter):
        if _COMMANDS[target] in processes.command_line(guard):
            below = processes.children(guard) if target == "serve" else processes.descendants(guard)
            return below[:1] if target == "serve" else below
    return []


def _where(run: Run, name: str) -> dict[str, Any]:
    found = records.read(run.store, name)
    where = {} if found is None else found[0].get("where")
    return dict(where) if isinstance(where, dict) else {}
