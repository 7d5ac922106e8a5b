"""Which runs islands in processes of their own train, and which can. Loads neither Prefect nor torch.

The command line asks before it knows where Prefect is, and Prefect reads its address when it is imported.
"""

from __future__ import annotations

from islands import names
from islands.config import RunConfig
from islands.types import ConfigError
from tasks import records, trainers
from tasks.runs import Run


def require_shareable(config: RunConfig) -> RunConfig:
    """Return a configuration that islands in processes of their own can train.

    Raises:
        ConfigError: it needs one process.
    """
    places = {"store": config.store}
    places |= {f"islands.{i.name}.checkpoints": i.checkpoints or "" for i in config.islands}
    for key, url in places.items():
        if url.startswith("memory:"):
            raise ConfigError(
                f"{key} must be a place that several processes share, got {url}; "
                "choose file://, s3:// or gs://, or train with `--driver local`"
            )
    return config


def require_local(run: Run) -> Run:
    """Return a run that the local driver can go on with.

    Raises:
        ConfigError: Prefect has trained it. What the driver has not saved itself it takes back, to begin again.
    """
    if trainers.count(run) > 0:
        raise ConfigError(
            f"a run to go on with under --driver local must be one that Prefect never trained, got {run.run_id!r}, "
            "whose work would be lost; leave the option out"
        )
    return run


def was_local(run: Run) -> bool:
    """Say whether the local driver trained a run, and Prefect never did: its learners run nowhere in particular.

    On Prefect that is so of islands that were written off, whose last life is nobody's.
    """
    if trainers.count(run) > 0:
        return False
    if run.store.list_names("driver/"):
        return True
    newest = records.newest_incarnations(run.store).items()
    found = [records.require(run.store, names.incarnation(*one))[0] for one in newest]
    return bool(found) and not any(body.get("where") for body in found)
