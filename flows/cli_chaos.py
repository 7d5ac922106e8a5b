"""The command that harms a run on purpose: `chaos`.

It strikes from its own process, below no service, so that it outlives whatever it strikes.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter
from cyclopts.validators import Number

from flows import following, screen
from flows.cli_options import RunName, StoreUrl, open_named
from flows.following import DONE, FAILED, STOPPED
from islands.chaos import KINDS, TARGETS, Fault, Kind, Plan, Target, plan_from_toml, random_plan
from islands.types import ConfigError

if TYPE_CHECKING:
    from tasks.runs import Run

DEFAULT_SECONDS, DEFAULT_EVERY_SECONDS = 60.0, 20.0


def chaos(
    run: RunName,
    /,
    *,
    plan: Annotated[Path | None, Parameter(help="A TOML file of [[faults]].")] = None,
    seed: Annotated[
        int | None,
        Parameter(help="Instead of a file: at random; the same seed, the same plan."),
    ] = None,
    seconds: Annotated[
        float | None,
        Parameter(
            help=f"How long a random plan goes on; default: {DEFAULT_SECONDS:g}.",
            validator=Number(gt=0),
        ),
    ] = None,
    every: Annotated[
        float | None,
        Parameter(
            help=f"Seconds between two random faults; default: {DEFAULT_EVERY_SECONDS:g}.",
            validator=Number(gt=0),
        ),
    ] = None,
    kinds: Annotated[
        tuple[Kind, ...] | None,
        Parameter(
            consume_multiple=True, negative="", help="What a random fault may be; default: all."
        ),
    ] = None,
    targets: Annotated[
        tuple[Target, ...] | None,
        Parameter(
            consume_multiple=True, negative="", help="Whom it may strike; default: everybody."
        ),
    ] = None,
    store: StoreUrl = None,
) -> int:
    """Strike a run on this machine with faults, and record each; exit status 1 if some found nobody to strike."""
    from tasks.chaos import require_strikable, strikable_islands

    with following.stopping("ending the plan; whoever stands still goes on") as is_stopped:
        if (plan is None) == (seed is None):
            what = "neither" if plan is None else "both"
            raise ConfigError(
                f"chaos must be told --plan FILE or --seed N, one of them, got {what}; give one"
            )
        drawn = {"seconds": seconds, "every": every, "kinds": kinds, "targets": targets}
        given = [f"--{name}" for name, value in drawn.items() if value is not None]
        if plan is not None and given:
            raise ConfigError(
                f"--plan must be alone: a file holds all of its faults, got {', '.join(given)} beside it; "
                "leave that out, or draw a plan with --seed N"
            )
        opened = require_strikable(open_named(run, store))
        if plan is not None:
            members = [island.name for island in opened.config.members]
            written = plan_from_toml(_read(plan), members, source=str(plan))
            return _strike(opened, written, is_stopped)
        drawn_plan = random_plan(
            strikable_islands(opened),
            seed=seed or 0,
            seconds=DEFAULT_SECONDS if seconds is None else seconds,
            every_seconds=DEFAULT_EVERY_SECONDS if every is None else every,
            kinds=KINDS if kinds is None else kinds,
            targets=TARGETS if targets is None else targets,
        )
        return _strike(opened, drawn_plan, is_stopped)


def _strike(run: Run, plan: Plan, is_stopped: following.Claim) -> int:
    from tasks.chaos import unleash

    num_faults = len(plan.faults)

    def watch(num_struck: int, waiting: Sequence[Fault]) -> None:
        first = f", waits for: {waiting[0]}" if waiting else ""
        advance(num_struck, f"{num_struck} of {num_faults}{first}")

    with screen.progress("faults struck", num_faults) as advance:
        missed = unleash(
            run,
            plan,
            say=lambda told: screen.say(f"  {told}"),
            is_stopped=is_stopped,
            watch=watch,
        )
    for fault in missed:
        screen.complain(f"did not strike: {fault}")
    if missed:
        return STOPPED if is_stopped() else FAILED
    return DONE


def _read(plan: Path) -> str:
    try:
        return plan.read_text(encoding="utf-8")
    except (OSError, ValueError) as exc:
        raise ConfigError(
            f"--plan must be a readable UTF-8 file, got {str(plan)!r} ({exc}); correct the path or the file"
        ) from exc
