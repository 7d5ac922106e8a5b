"""A plan of faults against a live run: what strikes whom, when and for how long; and the record of a strike.

Knows words, steps and seconds; must not know a process or a store. A plan is a TOML file of `[[faults]]`, or random
with a seed: the same seed is the same plan.

    kind        what happens
    kill        SIGKILL
    stop        stands still for `seconds` (SIGSTOP, SIGCONT)
    slow        runs `factor` times slower for `seconds`
    cut         the island's link to the store refuses everything for `seconds`
    fill        the island's link to the store refuses to create anything, as a full disk does, for `seconds`
    corrupt     a byte of the island's newest pending contribution is another one
    blackhole   the server accepts connections and never answers, for `seconds`

`cut`, `fill` and `corrupt` are of an island's learner, `blackhole` of a server; the others strike any target.
"""

from __future__ import annotations

import math
import random
import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, get_args, get_type_hints

from islands.parsing import parse
from islands.types import ConfigError

Kind = Literal["kill", "stop", "slow", "cut", "corrupt", "fill", "blackhole"]
Target = Literal[
    "learner", "nanny", "cluster", "island", "synchronizer", "train", "prefect", "mlflow", "serve"
]
FOLDER = "chaos"
KINDS: tuple[Kind, ...] = get_args(Kind)
TARGETS: tuple[Target, ...] = get_args(Target)
OF_AN_ISLAND = ("learner", "nanny", "cluster", "island")
SERVERS = ("prefect", "mlflow")
LASTING = ("stop", "slow", "cut", "fill", "blackhole")
LONGEST_SECONDS = 86_400.0
LARGEST_FACTOR = 1_000.0
MOST_FAULTS = 10_000
# A random plan's lasting faults take this part of the time between two faults, and slow down by this much.
_PARTS = (0.25, 0.75)
_FACTORS = (2.0, 6.0)


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that happens once.

    Attributes:
        kind: what happens.
        target: to whom: the process that trains, its nanny, all processes of the island's cluster, the island's flow,
            the newest synchronizer, the newest flow `train`, or a service that `diloco up` started.
        island: whose process, and whose steps are counted; absent where neither is asked for.
        step: when that island's records have reached this inner step, in whatever incarnation.
        after_seconds: or when the plan has run for so long.
        seconds: how long it lasts, where it lasts.
        factor: of slow: how many times slower.
    """

    kind: Kind
    target: Target = "learner"
    island: str | None = None
    step: int | None = None
    after_seconds: float | None = None
    seconds: float | None = None
    factor: float | None = None

    def __str__(self) -> str:
        whose = f"{self.island}'s " if self.target in OF_AN_ISLAND else ""
        how = f", {self.factor:g} times slower" if self.factor is not None else ""
        long = f" for {self.seconds:g} s" if self.seconds is not None else ""
        return f"{self.kind} {whose}{self.target}{how}{long}, {self._when()}"

    def _when(self) -> str:
        if self.step is not None:
            return f"at {self.island}'s step {self.step:,}"
        return f"after {self.after_seconds or 0:g} s"


@dataclass(frozen=True, slots=True)
class Plan:
    """Faults in any order; each strikes once."""

    faults: tuple[Fault, ...]


@dataclass(frozen=True, slots=True)
class Strike:
    """The record of a fault that has struck.

    Attributes:
        fault: what was planned.
        told: what happened, in words.
        at: the time, for people.
        mark: text no other strike has.
        merged_tokens: of the run, shortly before.
        spoiled: the object whose bytes are not what was committed; None if there is none.
    """

    fault: Fault
    told: str
    at: float
    mark: str
    merged_tokens: int
    spoiled: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values; `strike_from_json` is the inverse."""
        return asdict(self)


def strike_from_json(body: Mapping[str, Any]) -> Strike:
    """Return the strike that `Strike.to_json` wrote.

    Raises:
        ValueError: it holds something else.
    """
    strike: Strike = parse(Strike, body)
    return strike


def plan_from_toml(text: str, islands: Collection[str], *, source: str) -> Plan:
    """Return the plan that a file's text holds, checked against the names of the run's islands.

    Raises:
        ConfigError: rules are broken; one line each with source, path, rule, value and remedy.
    """
    try:
        tree = tomllib.loads(text)
    except ValueError as exc:
        raise ConfigError(
            f"{source}: must be TOML, got an error: {exc}; correct that place"
        ) from exc
    rows = tree.get("faults")
    if tree.keys() - {"faults"} or not isinstance(rows, list):
        raise ConfigError(
            f"{source}: a plan must hold [[faults]] and nothing else, got {', '.join(tree) or 'nothing'}; "
            'begin with [[faults]] and kind = "kill"'
        )
    problems, faults = list[str](), list[Fault]()
    for index, row in enumerate(rows):
        wrong = [*_wrong_fields(row)]
        problems += [f"{source}: faults.{index}{text}" for text in wrong]
        if not wrong:
            faults.append(Fault(**_read(row)))
    if problems:
        raise ConfigError("\n".join(problems))
    return checked(Plan(tuple(faults)), islands, source=source)


def checked(plan: Plan, islands: Collection[str], *, source: str) -> Plan:
    """Return a plan that keeps every rule.

    Raises:
        ConfigError: it does not, is empty, or too long.
    """
    if not 1 <= len(plan.faults) <= MOST_FAULTS:
        raise ConfigError(
            f"{source}: a plan must have 1 to {MOST_FAULTS:,} faults, got {len(plan.faults):,}; add or remove some"
        )
    problems = [
        f"{source}: faults.{index}.{text}"
        for index, fault in enumerate(plan.faults)
        for text in _broken_rules(fault, islands)
    ]
    if problems:
        raise ConfigError("\n".join(problems))
    return plan


def random_plan(
    islands: Sequence[str],
    *,
    seed: int,
    seconds: float,
    every_seconds: float,
    kinds: Collection[str] = KINDS,
    targets: Collection[str] = TARGETS,
) -> Plan:
    """Return a fault for every `every_seconds` up to `seconds`: a kind, then a target it can strike, then an island.

    Raises:
        ConfigError: there is no time for a fault, or none of the kinds can strike any of the targets.
    """
    fitting = {
        kind: [target for target in TARGETS if target in targets and _can_strike(kind, target)]
        for kind in KINDS
        if kind in kinds
    }
    possible = [kind for kind, its in fitting.items() if its]
    if not islands:
        raise ConfigError("a random plan must have an island to strike, got none: all have left")
    if not possible:
        raise ConfigError(
            f"a kind of fault must be able to strike a target, got {', '.join(kinds) or 'no kind'} for "
            f"{', '.join(targets) or 'no target'}; cut, fill and corrupt strike a learner, blackhole prefect or mlflow"
        )
    if not (0 < every_seconds <= seconds <= min(LONGEST_SECONDS, MOST_FAULTS * every_seconds)):
        raise ConfigError(
            f"a random plan must hold 1 to {MOST_FAULTS:,} faults in at most {LONGEST_SECONDS:g} s, got one every "
            f"{every_seconds:g} s of {seconds:g} s; change one of the two"
        )
    generator = random.Random(seed)
    faults = []
    for number in range(1, math.floor(seconds / every_seconds) + 1):
        kind = generator.choice(possible)
        target = generator.choice(fitting[kind])
        island, part, factor = (
            generator.choice(list(islands)),
            generator.uniform(*_PARTS),
            generator.uniform(*_FACTORS),
        )
        fault = Fault(
            kind=kind,
            target=target,
            island=island if target in OF_AN_ISLAND else None,
            after_seconds=round(number * every_seconds, 3),
            seconds=round(max(0.1, part * every_seconds), 1) if kind in LASTING else None,
            factor=round(factor, 1) if kind == "slow" else None,
        )
        faults.append(fault)
    return Plan(tuple(faults))


def is_due(fault: Fault, *, steps: Mapping[str, int], elapsed: float) -> bool:
    """Say whether a fault's time has come.

    Args:
        fault: the fault.
        steps: island -> the inner step that its records have reached.
        elapsed: seconds since the plan began.
    """
    if fault.step is not None:
        return fault.island is not None and steps.get(fault.island, 0) >= fault.step
    return elapsed >= (fault.after_seconds or 0.0)


# --- rules ---


def _can_strike(kind: str, target: str) -> bool:
    if kind in ("cut", "fill", "corrupt"):
        return target == "learner"
    return kind != "blackhole" or target in SERVERS


def _wrong_fields(row: Any) -> Iterator[str]:
    """Yield what is wrong with a table's fields, one by one."""
    if not isinstance(row, Mapping):
        yield f" must be a table, got {row!r}; write [[faults]]"
        return
    known = get_type_hints(Fault)
    for key, value in row.items():
        if key not in known:
            yield f".{key} must be one of {', '.join(known)}, got another; correct the name"
            continue
        try:
            parse(known[key], value)
        except ValueError as exc:
            yield f".{key} {exc}; correct it"
    if "kind" not in row:
        yield f".kind must be one of {', '.join(KINDS)}, got nothing; add it"


def _read(row: Mapping[str, Any]) -> dict[str, Any]:
    known = get_type_hints(Fault)
    return {
        field.name: parse(known[field.name], row[field.name])
        for field in fields(Fault)
        if field.name in row
    }


def _broken_rules(fault: Fault, islands: Collection[str]) -> Iterator[str]:
    if not _can_strike(fault.kind, fault.target):
        whom = "prefect or mlflow" if fault.kind == "blackhole" else "learner"
        yield f"target must be {whom} for {fault.kind}, got {fault.target}; correct it"
    yield from _broken_island_rules(fault, islands)
    yield from _broken_time_rules(fault)
    needs_factor = fault.kind == "slow"
    if needs_factor and not (fault.factor and 1 < fault.factor <= LARGEST_FACTOR):
        yield f"factor must be > 1 and <= {LARGEST_FACTOR:g} for slow, got {_shown(fault.factor)}; 5 is usual"
    if not needs_factor and fault.factor is not None:
        yield f"factor must be absent for {fault.kind}, got {fault.factor:g}; only slow has one"


def _broken_island_rules(fault: Fault, islands: Collection[str]) -> Iterator[str]:
    is_needed = fault.target in OF_AN_ISLAND or fault.step is not None
    if is_needed and fault.island not in islands:
        yield f"island must be one of {', '.join(islands)}, got {_shown(fault.island)}; correct the name"
    if not is_needed and fault.island is not None:
        yield (
            f"island must be absent for {fault.target} without a step, got {fault.island}; remove it, or give a step"
        )


def _broken_time_rules(fault: Fault) -> Iterator[str]:
    if (fault.step is None) == (fault.after_seconds is None):
        what = "neither" if fault.step is None else "both"
        yield f"step or after_seconds must be given, one of them, got {what}; say when it strikes"
    if fault.step is not None and fault.step < 1:
        yield f"step must be >= 1, got {fault.step}; raise it"
    if fault.after_seconds is not None and not 0 <= fault.after_seconds <= LONGEST_SECONDS:
        yield f"after_seconds must be >= 0 and <= {LONGEST_SECONDS:g}, got {fault.after_seconds:g}; correct it"
    lasts = fault.kind in LASTING
    if lasts and not (fault.seconds and 0 < fault.seconds <= LONGEST_SECONDS):
        yield (
            f"seconds must be > 0 and <= {LONGEST_SECONDS:g} for {fault.kind}, got {_shown(fault.seconds)}; "
            "say how long it lasts"
        )
    if not lasts and fault.seconds is not None:
        yield f"seconds must be absent for {fault.kind}, got {fault.seconds:g}; it happens at once"


def _shown(value: object) -> str:
    return "nothing" if value is None else str(value)
