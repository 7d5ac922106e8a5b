"""Which runs islands in processes of their own train, and which can. Loads neither Prefect nor torch.

The command line asks before it knows where Prefect is, and Prefect reads its address when it is imported.
"""

from __future__ import annotations

from islands import names
from islands.config import RunConfig
from islands.types import ConfigError
from tasks import records
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


def was_local(run: Run) -> bool:
    """Say whether the local driver trained a run: its learners run nowhere in particular.

    On Prefect that is so of islands that were written off, whose last life is nobody's.
    """
    if run.store.list_names("driver/"):
        return True
    newest = records.newest_incarnations(run.store).items()
    found = [records.require(run.store, names.incarnation(*one))[0] for one in newest]
    return bool(found) and not any(body.get("where") for body in found)
