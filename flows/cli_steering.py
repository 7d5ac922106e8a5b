"""The commands that steer a run that is under way: `adjust`, `quarantine`, `join`, `leave`."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from flows import screen
from flows.cli_options import Json, RunName, Set, StoreUrl, open_named
from flows.following import DONE

if TYPE_CHECKING:
    from tasks.adjusting import Adjusted


def adjust(run: RunName, /, *, set_: Set = (), store: StoreUrl = None, json: Json = False) -> int:
    """Change settings of a run that is under way; it takes them over by itself."""
    from tasks import adjusting

    return _show(run, adjusting.adjust(open_named(run, store), set_), json=json)


Island = Annotated[str, Parameter(help="Name of the island.")]


def quarantine(
    run: RunName,
    island: Island,
    /,
    *,
    release: Annotated[
        bool,
        Parameter(negative="", show_default=False, help="Let its contributions count again."),
    ] = False,
    store: StoreUrl = None,
    json: Json = False,
) -> int:
    """Refuse an island's contributions, and wait for none, while it trains on and adopts."""
    from tasks import adjusting

    adjusted = adjusting.quarantine(open_named(run, store), island, is_released=release)
    return _show(run, adjusted, json=json)


def join(
    run: RunName,
    island: Island,
    /,
    *,
    set_: Annotated[
        tuple[str, ...],
        Parameter(
            "--set",
            negative="",
            consume_multiple=1,
            show_default=False,
            help="Settings of the island, such as region=ap-south batch_size=4.",
        ),
    ] = (),
    store: StoreUrl = None,
    json: Json = False,
) -> int:
    """Let a new island, or a spare of the run, take part in what is left to train; `train` starts it."""
    from tasks import joining

    joined = joining.join(open_named(run, store), island, set_)
    if not json:
        screen.say(f"{island} joins: whoever trains run {run} starts it")
    return _show(run, joined, json=json)


def leave(run: RunName, island: Island, /, *, store: StoreUrl = None, json: Json = False) -> int:
    """Let an island leave with all it has trained; the others, or a spare, train the rest of its share."""
    from tasks import joining

    left = joining.leave(open_named(run, store), island)
    if not json:
        screen.say(
            f"{island} leaves with what it has trained; the others, or a spare, train the rest of its share"
        )
    return _show(run, left, json=json)


def _show(run: str, adjusted: Adjusted, *, json: bool) -> int:
    if json:
        screen.show_json(asdict(adjusted))
        return DONE
    if not adjusted.changes:
        screen.say(f"run {run}: nothing differs, nothing was changed")
    for change in adjusted.changes:
        screen.say(f"{change}, {change.acts}")
    if adjusted.changes and adjusted.departed:
        screen.say(f"{', '.join(adjusted.departed)}: left, and trains no more whatever changes")
    return DONE
