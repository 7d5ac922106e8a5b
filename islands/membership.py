"""Who takes part in a run that is under way, and how many tokens each trains once somebody comes or goes.

Knows a configuration, what everybody has trained and who has left; must not know a store. Each function returns the
configuration from then on, the same one where nothing changes. Three kinds of shares:

    founder    its part, by speed and batch, of what the others below leave of total_tokens: nothing is written down
    departed   what it had trained, so that the others' parts grow by what it leaves undone
    joiner     what it had trained, and its part of all that is still to train, dealt anew at each coming and going
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

from islands.config import RunConfig
from islands.sections import IslandConfig

# A run that is nearly trained still has a schedule to end.
_LATEST = 0.999_999


@dataclass(frozen=True, slots=True)
class Progress:
    """`trained`: island -> tokens by its last account. `departed`: the islands that have left for good."""

    trained: Mapping[str, int]
    departed: frozenset[str]

    def tokens_of(self, name: str) -> int:
        """Return what an island has trained."""
        return self.trained.get(name, 0)


def remaining(config: RunConfig, progress: Progress) -> int:
    """Return the tokens that are still to train."""
    done = sum(progress.tokens_of(island.name) for island in config.members)
    return max(0, config.total_tokens - done)


def joined(config: RunConfig, name: str, progress: Progress) -> RunConfig:
    """Let an island of the configuration take part from now on: a new one, or one that was declared a spare."""
    return _deal(_enlisted(config, name, progress), progress)


def staying(config: RunConfig, progress: Progress) -> set[str]:
    """Return the islands that can train more: they have neither left nor been told to go with what they have."""
    return {
        island.name
        for island in config.members
        if island.name not in progress.departed
        and (island.tokens is None or island.tokens > progress.tokens_of(island.name))
    }


def departing(
    config: RunConfig, name: str, progress: Progress, *, may_replace: bool = True
) -> RunConfig:
    """Let an island leave with what it has trained; a spare, if there is one and it may, takes its place.

    Of one that is leaving already the place is taken.
    """
    gone = Progress(progress.trained, progress.departed | {name})
    num_free = 1 if may_replace and name in staying(config, progress) else 0
    return _deal(_replaced(config, num_free, gone), gone)


def settled(config: RunConfig, progress: Progress) -> RunConfig:
    """Hand on what islands left undone that have left before their shares were trained, to spares if there are any.

    And deal anew what was dealt to newcomers before the run was made shorter.
    """
    early = [
        island.name
        for island in config.members
        if island.name in progress.departed
        and progress.tokens_of(island.name) < config.share_of(island.name)
    ]
    if early or _is_overdealt(config, progress):
        return _deal(_replaced(config, len(early), progress), progress)
    return config


def _is_overdealt(config: RunConfig, progress: Progress) -> bool:
    """Say whether shares that are written down exceed the run, and a newcomer's can be smaller."""
    written = sum(island.tokens or 0 for island in config.members)
    is_dealt = any(
        island.name not in progress.departed and _is_dealt(island, progress)
        for island in config.members
    )
    # Each share was rounded up.
    return is_dealt and written > config.total_tokens + len(config.members)


def _replaced(config: RunConfig, num_gone: int, progress: Progress) -> RunConfig:
    if remaining(config, progress) == 0:
        return config
    for name in [island.name for island in config.islands if island.spare][:num_gone]:
        config = _enlisted(config, name, progress)
    return config


def _enlisted(config: RunConfig, name: str, progress: Progress) -> RunConfig:
    done = config.total_tokens - remaining(config, progress)
    begins_at = min(_LATEST, done / config.total_tokens)
    return _with(config, {name: {"spare": False, "tokens": None, "joined_at": begins_at}})


def _deal(config: RunConfig, progress: Progress) -> RunConfig:
    """Write down the shares of those who have left and of those who joined; the founders' follow from them."""
    gone = {i.name for i in config.members if i.name in progress.departed}
    training = [i for i in config.members if i.name not in gone]
    # Of these, some have their tokens from whoever wrote the configuration, and some are about to leave.
    bound = [i for i in training if i.tokens is not None and not _is_dealt(i, progress)]
    owed = sum(max(0, (i.tokens or 0) - progress.tokens_of(i.name)) for i in bound)
    left = max(0, remaining(config, progress) - owed)
    free = [i for i in training if i not in bound]
    rates = {i.name: Fraction(config.rates[i.name]) for i in free}
    tokens = {name: progress.tokens_of(name) for name in gone}
    for island in free:
        if island.joined_at > 0:
            part = math.ceil(left * rates[island.name] / sum(rates.values()))
            tokens[island.name] = progress.tokens_of(island.name) + part
    return _with(config, {name: {"tokens": number} for name, number in tokens.items()})


def _is_dealt(island: IslandConfig, progress: Progress) -> bool:
    """Say whether an island joined, and was not asked to leave since."""
    return island.joined_at > 0 and (island.tokens or 0) > progress.tokens_of(island.name)


def _with(config: RunConfig, updates: Mapping[str, Mapping[str, object]]) -> RunConfig:
    islands = [i.model_copy(update=dict(updates.get(i.name, {}))) for i in config.islands]
    return config.model_copy(update={"islands": tuple(islands)})
