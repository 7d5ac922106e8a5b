"""The one reader of the process environment.

This module knows that `os.environ` exists and which variable answers which question; it must not know what an option
of the configuration means, or what a service does with its address.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

PREFIX = "DILOCO_"
HOME = "DILOCO_HOME"
PREFECT_API_URL = "PREFECT_API_URL"
PREFECT_HOME = "PREFECT_HOME"
MLFLOW_TRACKING_URI = "MLFLOW_TRACKING_URI"
DEFAULT_HOME = ".diloco"


def environment() -> dict[str, str]:
    """Return the `DILOCO_…` variables of this process as they are now, names unchanged.

    Without `DILOCO_HOME`: that is a place on this machine and no option of a run.
    """
    return {
        name: value
        for name, value in os.environ.items()
        if name.upper().startswith(PREFIX) and name != HOME
    }


def home() -> Path:
    """Return the absolute folder where this machine's services keep what they store; it need not exist."""
    return Path(os.environ.get(HOME) or DEFAULT_HOME).expanduser().absolute()


def prefect_home(home: Path) -> Path:
    """Return the folder where a Prefect server that is started on this home keeps all it has."""
    return home / "prefect"


def is_prefect_ours() -> bool:
    """Say whether this process uses a Prefect server that was started on its home: of this machine alone."""
    return _address(PREFECT_HOME) == str(prefect_home(home()))


def prefect_api_url() -> str | None:
    """Return the address of the Prefect API to use, None where the environment names none."""
    return _address(PREFECT_API_URL)


def mlflow_tracking_uri() -> str | None:
    """Return where MLflow keeps runs, None where the environment does not say."""
    return _address(MLFLOW_TRACKING_URI)


def child_environment(extra: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for a process to start: this one's, then what is extra."""
    return {**os.environ, **extra}


def _address(name: str) -> str | None:
    return os.environ.get(name, "").strip() or None


def export(variables: Mapping[str, str]) -> None:
    """Set variables of this process, for libraries that read them when they are imported."""
    os.environ.update(variables)


@contextmanager
def without_services() -> Iterator[None]:
    """Let this process know of no Prefect and no MLflow while the block runs, whatever the environment names."""
    names = (PREFECT_API_URL, MLFLOW_TRACKING_URI)
    before = {name: os.environ.pop(name) for name in names if name in os.environ}
    try:
        yield
    finally:
        for name in names:
            os.environ.pop(name, None)
        os.environ.update(before)
