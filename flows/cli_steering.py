"""The commands that steer a run that is under way: `adjust`, `quarantine`."""

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


def quarantine(
    run: RunName,
    island: Annotated[str, Parameter(help="Name of the island.")],
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
