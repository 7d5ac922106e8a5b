"""Islands that come and go while a run is under way: `join`, `leave`, and spares for those that leave early. No torch.

Knows a run, its links and the record of a change; must not know who starts a learner: `train` finds the record.
"""

from __future__ import annotations

from collections.abc import Sequence

from islands import membership, names
from islands.config import RunConfig, parse_config, to_toml
from islands.membership import Progress
from islands.sections import IslandConfig
from islands.types import ConfigError, is_plain_name
from tasks import adjusting
from tasks.adjusting import Adjusted, progress_of
from tasks.runs import Run, record_change, refreshed
from tasks.sharing import was_local


def join(run: Run, name: str, assignments: Sequence[str]) -> Adjusted:
    """Let a new island, or a declared spare, take part in a run that is under way.

    `assignments`: its settings, such as `region=ap-south`.

    Raises:
        ConfigError: it takes part already, the run's learners wait for one another, nothing is left to train, the
            local driver trains the run, or a setting breaks a rule.
    """
    if was_local(run):
        raise ConfigError(
            f"an island can join a run on Prefect, got {run.run_id!r}, which the local driver trains; "
            f"`diloco train --from {run.run_id}` begins a run with other islands"
        )

    _require_plain(name, assignments)

    def derive(config: RunConfig) -> RunConfig:
        progress = progress_of(run, config)
        _require_open(config, name, progress)
        listed = _listed(config, name, assignments)
        return _checked(membership.joined(listed, name, progress))

    return adjusting.record(run, derive, is_local=False, may_grow=True)


def leave(run: Run, name: str) -> Adjusted:
    """Let an island leave a run that is under way, with all its work, and hand on what it leaves undone.

    Raises:
        ConfigError: no such island, it has left, or nobody would be left to train.
    """

    is_local = was_local(run)  # its learners are seated for good: no spare takes a place there

    def derive(config: RunConfig) -> RunConfig:
        progress = progress_of(run, config)
        training = {i.name for i in config.members} - progress.departed
        if name not in training:
            raise ConfigError(
                f"an island that leaves must be one at work ({', '.join(sorted(training)) or 'none'}), got {name!r}; "
                "correct the name"
            )
        has_spare = not is_local and any(island.spare for island in config.islands)
        if not has_spare and membership.staying(config, progress) <= {name}:
            raise ConfigError(
                f"somebody must train on when an island leaves, got {name!r}, the last one; "
                f"`diloco stop {run.run_id}` stops the run"
            )
        gone = membership.departing(config, name, progress, may_replace=not is_local)
        return _checked(gone)

    return adjusting.record(run, derive, is_local=is_local)


def settle(run: Run) -> Run:
    """Hand on what islands left undone that have left early, and start spares in their place; return the run so."""
    run = refreshed(run)
    is_settled = membership.settled(run.config, progress_of(run, run.config)) is run.config
    if is_settled or run.store.read(names.FINISHED) is not None:
        return run
    record_change(run, lambda config: membership.settled(config, progress_of(run, config)))
    return refreshed(run)


def _require_open(config: RunConfig, name: str, progress: Progress) -> None:
    if config.sync.blocks:
        raise ConfigError(
            f"islands can join where nobody waits for them, got sync.algorithm {config.sync.algorithm}, whose learners "
            "wait for one another; choose decoupled"
        )
    if name in {island.name for island in config.members}:
        has_left = "left for good" if name in progress.departed else "takes part already"
        raise ConfigError(
            f"an island that joins must be new to the run, or a spare of it, got {name!r}, which {has_left}; "
            "choose another name"
        )
    if membership.remaining(config, progress) == 0:
        raise ConfigError(
            f"something must be left to train when an island joins, got total_tokens {config.total_tokens}, all "
            "trained; raise it with `diloco adjust`"
        )


def _require_plain(name: str, assignments: Sequence[str]) -> None:
    """Refuse a name that is none, and settings that follow from the run and the moment."""
    if not is_plain_name(name):
        raise ConfigError(
            "an island's name must be 1 to 64 of a-z 0-9 - _, alphanumeric at both ends, "
            f"got {name!r}; choose a plain name"
        )
    keys = {assignment.partition("=")[0].strip() for assignment in assignments}
    if dealt := sorted(keys & {"name", "tokens", "joined_at", "spare"}):
        raise ConfigError(
            f"settings of an island that joins must not be those that joining decides, got {dealt[0]} for {name!r}; "
            "remove it"
        )


def _listed(config: RunConfig, name: str, assignments: Sequence[str]) -> RunConfig:
    """Return the configuration with this island, under these settings, at its end if it is new."""
    if name not in {island.name for island in config.islands}:
        # The door below is what checks the name.
        islands = (*config.islands, IslandConfig.model_construct(name=name))
        config = config.model_copy(update={"islands": islands})
    placed = [f"islands.{name}.{assignment}" for assignment in assignments]
    return parse_config(to_toml(config), assignments=placed, source="the run")


def _checked(config: RunConfig) -> RunConfig:
    return parse_config(to_toml(config), source="the run")
