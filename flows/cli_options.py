"""What several commands take, and how it is read: configurations, runs, stores, files to write.

Knows the command line's words; must not run anything.
"""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from infra import settings
from islands.config import RunConfig, parse_config, to_toml
from islands.types import ConfigError

if TYPE_CHECKING:
    from tasks.origins import Origin
    from tasks.runs import Run

ConfigFile = Annotated[Path | None, Parameter(help="A TOML file; without one, all defaults.")]
RunName = Annotated[str, Parameter(help="Name of a run; `diloco runs` lists them.")]
Set = Annotated[
    tuple[str, ...],
    Parameter(
        "--set",
        negative="",
        consume_multiple=1,
        show_default=False,
        help="Settings such as sync.period_steps=24 islands.west.speed=0.5; values are TOML literals.",
    ),
]
StoreUrl = Annotated[str | None, Parameter(help="Default: $DILOCO_STORE, or file://./runs.")]
Json = Annotated[bool, Parameter(negative="", show_default=False, help="Print one JSON document.")]
Snapshot = Annotated[int | None, Parameter(help="Number of the snapshot; default: the newest.")]
Driver = Annotated[
    Literal["prefect", "local"],
    Parameter(
        help="Flows on a Prefect server with islands on Dask, or one process on a virtual clock."
    ),
]
Detach = Annotated[
    bool,
    Parameter(negative="", show_default=False, help="Start it, and do not wait for its end."),
]
HtmlFile = Annotated[Path, Parameter(help="File to write; an existing one is replaced.")]


def resume_line(url: str, name: str) -> str:
    """Return the command that goes on with a run."""
    store = [] if url == store_url(None) else ["--store", url]
    return shlex.join(["diloco", "resume", name, *store])


def load(
    config: Path | None, assignments: tuple[str, ...], base: RunConfig | None = None
) -> RunConfig:
    """Return the configuration that file (else `base`), environment and assignments make; or raise ConfigError."""
    text = "" if base is None else to_toml(base)
    if config is not None:
        try:
            text = config.read_text(encoding="utf-8")
        except (OSError, ValueError) as exc:
            raise ConfigError(
                f"the configuration must be a readable UTF-8 file, got {str(config)!r} ({exc}); "
                "correct the path or the file"
            ) from exc
    elif stray := [assignment for assignment in assignments if "=" not in assignment]:
        raise ConfigError(
            f"--set must be followed by assignments a.b=c, got {stray[0]!r}; "
            "write the configuration file before --set"
        )
    source = "defaults" if config is None else str(config)
    return parse_config(
        text, assignments=assignments, environment=settings.environment(), source=source
    )


def store_url(store: str | None) -> str:
    """Return the store asked for, or the default one."""
    return store if store is not None else load(None, ()).store


def open_source(spec: str, config: Path | None, assignments: tuple[str, ...]) -> Origin:
    """Return what a new run is to begin from; a run without a URL is looked for in the new run's store."""
    from tasks.origins import open_origin

    known = assignments if config is not None else tuple(a for a in assignments if _sets_store(a))
    return open_origin(spec, load(config, known).store)


def _sets_store(assignment: str) -> bool:
    return assignment.partition("=")[0].strip() == "store"


def absolute_store(url: str) -> str:
    """Return a store's URL as processes in other folders can use it."""
    from infra.store import open_store

    return url if url.startswith("memory:") else open_store(url).url


def open_named(run: str, store: str | None) -> Run:
    """Open a run by its name."""
    from tasks.runs import open_run

    return open_run(store_url(store), run)


def require_file_place(option: str, path: Path) -> None:
    """Raise ConfigError unless a file can be written at `path`: better now than after the work."""
    if path.is_dir() or not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise ConfigError(
            f"{option} must be a file in an existing, writable folder, got {str(path)!r}; choose another path"
        )
