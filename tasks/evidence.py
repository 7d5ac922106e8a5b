"""What `verify` has read of a run, and what it has found. No torch.

Knows records and problems; must not know what makes a run sound.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from islands.retention import Facts
from islands.types import DamagedObject
from tasks import records
from tasks.runs import Run


@dataclass(frozen=True, slots=True)
class Problem:
    """What is wrong with which object."""

    name: str
    text: str


@dataclass(frozen=True, slots=True)
class Row:
    """One learner's tokens, summed over fragments. `trained` = all the others together.

    `pending` is offered and may yet be merged; `passed_over` was offered and will not be.
    """

    learner: str
    trained: int
    merged: int
    passed_over: int
    pending: int
    overwritten: int
    rolled_back: int
    open: int

    @property
    def imbalance(self) -> int:
        """Tokens without a fate, or with two: 0 in a sound run."""
        return self.trained - sum(
            (
                self.merged,
                self.passed_over,
                self.pending,
                self.overwritten,
                self.rolled_back,
                self.open,
            )
        )


@dataclass(slots=True)
class Verification:
    """Problems found, the ledger, and how much was read."""

    problems: list[Problem] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    num_objects: int = 0
    num_versions: int = 0

    def note(self, name: str, text: str) -> None:
        """Add a problem; that an object is missing is said once, whoever misses it."""
        is_known = any(
            problem.name == name and problem.text.startswith("is missing")
            for problem in self.problems
        )
        if is_known and text.startswith("is missing"):
            return
        self.problems.append(Problem(name, text))


@dataclass(slots=True)
class Evidence:
    """Everything of a run that could be read.

    Attributes:
        run: the run.
        present: every name in its store.
        dead: names that the retention rules give up.
        facts: what those rules depend on.
        bodies, digests: of each header whose seal is whole.
        found: what is wrong so far.
    """

    run: Run
    present: frozenset[str]
    dead: frozenset[str]
    facts: Facts
    bodies: dict[str, dict[str, Any]]
    digests: dict[str, str]
    found: Verification

    def is_news(self, fragment: int, version: int) -> bool:
        """Say whether a version was published after the facts had been gathered: the run is under way."""
        heads = self.facts.heads
        return fragment < len(heads) and version > heads[fragment]

    def parsed(self, name: str, parse: Callable[[Any], Any], value: Any) -> Any:
        """Return `parse(value)`, or None with a problem noted; None in, None out."""
        if value is None:
            return None
        try:
            return records.parsed(name, parse, value)
        except DamagedObject as exc:
            self.found.note(name, exc.problem)
            return None
