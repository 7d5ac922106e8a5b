"""What a learner bears of a chaos plan: faults of its own link to the store, told by way of the store. No torch.

Knows the records of strikes and the link; must not know a plan, nor a learner's steps.
"""

from __future__ import annotations

from infra.link import Link
from islands import chaos, names
from islands.types import DamagedObject
from tasks import records
from tasks.runs import Run


class Endured:
    """Cuts, or fills up, an island's link as the strikes recorded from now on say. For one thread.

    A strike acts from when it is seen, on this process's own clock; a successor of a learner that died in it has a link
    that is whole.
    """

    def __init__(self, run: Run, island: str, link: Link) -> None:
        self._store = run.store
        self._island = island
        self._link = link
        self._number = records.next_number(run.store, chaos.FOLDER)

    def look(self) -> None:
        """Let what has been recorded since the last call come true.

        Raises:
            StoreUnavailable: the store did not answer; perhaps because the link is cut.
        """
        while True:
            name = names.numbered(chaos.FOLDER, self._number)
            try:
                found = records.read(self._store, name)
                if found is None:
                    return
                self._bear(records.parsed(name, chaos.strike_from_json, found[0]).fault)
            except DamagedObject:
                pass  # `verify` names it; it must not end whoever looks here
            self._number += 1

    def _bear(self, fault: chaos.Fault) -> None:
        if fault.island != self._island or fault.seconds is None:
            return
        if fault.kind == "cut":
            self._link.cut(fault.seconds)
        elif fault.kind == "fill":
            self._link.fill(fault.seconds)
