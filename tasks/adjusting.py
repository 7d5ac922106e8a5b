"""Changing the settings of a run that is under way: `adjust` and `quarantine`. Loads neither Prefect nor torch.

Knows a run and who trains it; must not know who reads a change. Nobody has to be reached: whoever trains, merges or
supervises finds the record.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from islands import membership, steering
from islands.config import RunConfig, config_from_json, parse_config, to_toml
from islands.membership import Progress
from islands.steering import Change
from islands.types import ConfigError
from tasks import history, records, stopping
from tasks.runs import Run, record_change, require_same_members
from tasks.sharing import was_local

RESUMED = "when the run is resumed"


@dataclass(frozen=True, slots=True)
class Adjusted:
    """What was changed, and the islands that have left: whatever changed, they train no more."""

    changes: tuple[Change, ...]
    departed: tuple[str, ...]


def adjust(run: Run, assignments: Sequence[str]) -> Adjusted:
    """Record changed settings of a run that is under way, or stopped.

    Raises:
        ConfigError: a rule is broken, a key is unknown or no setting that may change, or the run has ended.
    """
    if not assignments:
        raise ConfigError(
            "an adjustment must name a setting, got none; write for example --set sync.min_learners=3"
        )
    is_local = was_local(run)

    def derive(config: RunConfig) -> RunConfig:
        changed = parse_config(to_toml(config), assignments=assignments, source="the run")
        if changed.store != config.store:
            raise ConfigError(
                f"store must stay where the run lies ({config.store}), got {changed.store}; "
                f"`diloco train --from {run.run_id}` begins a run elsewhere"
            )
        if not is_local:
            _require_free_pace(config, changed)
        require_same_members(run.run_id, config, changed)
        return changed

    return record(run, derive, is_local=is_local)


def quarantine(run: Run, island: str, *, is_released: bool) -> Adjusted:
    """Set an island of a run apart, or let its contributions count again.

    Raises:
        ConfigError: no such island, too few others, or the run has ended.
    """

    def derive(config: RunConfig) -> RunConfig:
        apart = set(config.quarantine) - {island} if is_released else {*config.quarantine, island}
        body = config.model_copy(update={"quarantine": tuple(sorted(apart))}).model_dump_json()
        return config_from_json(body, source="the run")

    names = [known.name for known in run.config.islands]
    if island not in names:
        raise ConfigError(
            f"an island must be one of the run's ({', '.join(names)}), got {island!r}; correct the name"
        )
    return record(run, derive, is_local=was_local(run))


def record(
    run: Run,
    derive: Callable[[RunConfig], RunConfig],
    *,
    is_local: bool,
    may_grow: bool = False,
) -> Adjusted:
    """Record a change of the run's settings, and return what it changes and when that acts.

    Raises:
        ConfigError: what the change breaks, or all that train on would be in quarantine.
    """

    def derive_counting(config: RunConfig) -> RunConfig:
        changed = derive(config)
        _require_counting(run, config, changed)
        return changed

    changes = steering.changes_between(*record_change(run, derive_counting, may_grow=may_grow))
    if is_local or stopping.is_asked(run):
        changes = tuple(replace(change, acts=RESUMED) for change in changes)
    return Adjusted(changes, tuple(sorted(records.departed(run.store))))


def progress_of(run: Run, config: RunConfig) -> Progress:
    """Return what each island has trained, and who has left."""
    links = {island.name: history.last_link(run, island.name) for island in config.members}
    trained = {name: link.trained for name, link in links.items() if link is not None}
    return Progress(trained, records.departed(run.store))


def _require_counting(run: Run, config: RunConfig, changed: RunConfig) -> None:
    """Refuse what would leave nobody to train for the model, where somebody did."""
    if not changed.quarantine:
        return
    left = membership.staying(changed, progress_of(run, changed))
    if left <= set(changed.quarantine) and not (
        membership.staying(config, progress_of(run, config)) <= set(config.quarantine)
    ):
        raise ConfigError(
            f"somebody outside quarantine must train on, got {', '.join(sorted(left)) or 'nobody'} left, all in it; "
            f"`diloco quarantine {run.run_id} ISLAND --release` releases one, `diloco stop {run.run_id}` stops the run"
        )


def _require_free_pace(config: RunConfig, changed: RunConfig) -> None:
    """Refuse what no two learners that wait for one another would take over at the same step."""
    if config.sync.algorithm == "decoupled":
        return
    for change in steering.changes_between(config, changed):
        if change.key in steering.LOCKSTEP_KEYS:
            raise ConfigError(
                f"{change.key} must stay while learners wait for one another (sync.algorithm "
                f"{config.sync.algorithm}), got {change.after}; stop the run and resume it with --set"
            )
