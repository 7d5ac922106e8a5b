"""Runs, metrics and files in MLflow: a few verbs over one client.

Knows MLflow's words, limits and time-outs; must not know what a metric means or where it comes from. It is the only
file that imports mlflow, and does so late: that takes seconds.

Every verb either does its work or raises `TrackingUnavailable` within seconds: a server that is down, or takes calls
and never answers, must not hold up whoever reports to it.
"""

from __future__ import annotations

import json
import logging
import math
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import urlsplit

from islands.types import ConfigError, ServiceUnavailable

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

LARGEST_BATCH = 1000
LARGEST_PARAM_BATCH = 100
LONGEST_PARAM = 6000
LONGEST_TAG = 8000
# As JSON at most 8,000 characters, up to numbers of 14 digits.
NUMBERS_PER_TAG = 500
RUNNING = "RUNNING"
FINISHED = "FINISHED"


class TrackingUnavailable(ServiceUnavailable):
    """MLflow did not answer, or refused what it was told."""


class Metric(Protocol):
    """What `log_points` sends. `at` in seconds since 1970, `step` a whole number below 2**63."""

    @property
    def key(self) -> str: ...
    @property
    def value(self) -> float: ...
    @property
    def step(self) -> int: ...
    @property
    def at(self) -> float: ...


@dataclass(frozen=True, slots=True)
class Found:
    """A run in MLflow. `is_new`: it was created just now. `tags` as they were when it was found."""

    run_id: str
    status: str
    tags: Mapping[str, str]
    is_new: bool


class Tracker:
    """An MLflow server or database. Usable from one thread at a time, and not in a process forked later.

    Attributes:
        deadline: monotonic seconds after which every verb raises `TrackingUnavailable` without asking.
    """

    def __init__(self, client: MlflowClient, uri: str) -> None:
        self.uri = uri
        self.deadline = math.inf
        self._client = client

    def find_or_create(
        self, experiment: str, name: str, tags: Mapping[str, str], parent: str | None
    ) -> Found:
        """Return the run of an experiment with all these tags; it is created, with its experiment, if there is none.

        Not atomic. Where two callers create at once the older run is kept, and the newer one's maker deletes it.

        Args:
            experiment: its name.
            name: what people see; not searched for.
            tags: they name the run; keys and values without quotes.
            parent: id of the run above it, or None.
        """
        with self._reaching(f"finding run {name}"):
            place = self._experiment(experiment)
            if found := self._search(place, tags):
                return _found(found[0], is_new=False)
            above = {} if parent is None else {"mlflow.parentRunId": parent}
            made = self._client.create_run(place, run_name=name, tags={**tags, **above})
            first = self._search(place, tags)[0]
            if first.info.run_id == made.info.run_id:
                return _found(made, is_new=True)
            self._client.delete_run(made.info.run_id)
            return _found(first, is_new=False)

    def log_points(self, run_id: str, points: Sequence[Metric]) -> None:
        """Log metrics. In a database a point that is there already (same key, step, time, value) is not doubled.

        Batches of `LARGEST_BATCH`: each is logged whole or not at all, and an error may leave the first ones logged.
        """
        from mlflow.entities import Metric as Entry

        entries = [Entry(p.key, p.value, int(p.at * 1000), p.step) for p in points]
        for start in range(0, len(entries), LARGEST_BATCH):
            with self._reaching("logging metrics"):
                batch = entries[start : start + LARGEST_BATCH]
                self._client.log_batch(run_id, metrics=batch)

    def log_params(self, run_id: str, tree: Mapping[str, Any]) -> None:
        """Log a tree of settings as flat parameters, leaving out those the run has: MLflow never changes one.

        Args:
            run_id: as found.
            tree: nested mappings and lists of plain values; an item of a list is addressed by its "name" if it has one,
                else by its index. None is left out.
        """
        from mlflow.entities import Param

        flat = dict(flatten(tree))
        with self._reaching("logging parameters"):
            known = self._client.get_run(run_id).data.params
            new = [Param(k, _cut(v, LONGEST_PARAM)) for k, v in flat.items() if k not in known]
            for start in range(0, len(new), LARGEST_PARAM_BATCH):
                batch = new[start : start + LARGEST_PARAM_BATCH]
                self._client.log_batch(run_id, params=batch)

    def log_text(self, run_id: str, text: str, path: str) -> None:
        """Store a text as a file of the run, in place of an older one."""
        with self._reaching(f"storing {path}"):
            self._client.log_text(run_id, text, path)

    def log_figure(self, run_id: str, png: bytes, path: str) -> None:
        """Store a PNG image as a file of the run, in place of an older one."""
        import tempfile
        from pathlib import Path, PurePosixPath

        target = PurePosixPath(path)
        with (
            self._reaching(f"storing {path}"),
            tempfile.TemporaryDirectory(prefix="diloco-") as place,
        ):
            file = Path(place) / target.name
            file.write_bytes(png)
            folder = "" if target.parent == PurePosixPath(".") else target.parent.as_posix()
            self._client.log_artifact(run_id, str(file), folder or None)

    def set_tag(self, run_id: str, key: str, value: str) -> None:
        """Set a tag, in place of an older one; at most `LONGEST_TAG` characters, the rest is cut off."""
        with self._reaching(f"setting tag {key}"):
            self._client.set_tag(run_id, key, _cut(value, LONGEST_TAG))

    def remember(self, run_id: str, key: str, numbers: Sequence[int]) -> None:
        """Keep whole numbers as JSON in the tag `key`, and in `key.1`, `key.2`, ... where one has no room.

        Not atomic over several tags: a reader may see some of an earlier call's. `recall` reads them.
        """
        for place, start in enumerate(range(0, max(len(numbers), 1), NUMBERS_PER_TAG)):
            some = list(numbers[start : start + NUMBERS_PER_TAG])
            self.set_tag(run_id, _numbered(key, place), json.dumps(some))

    def get_tags(self, run_id: str) -> dict[str, str]:
        """Return the run's tags."""
        with self._reaching("reading tags"):
            return dict(self._client.get_run(run_id).data.tags)

    def set_tags(self, found: Found, tags: Mapping[str, str]) -> None:
        """Set the tags that the run did not have so when it was found."""
        for key, value in tags.items():
            if found.tags.get(key) != _cut(value, LONGEST_TAG):
                self.set_tag(found.run_id, key, value)

    def reopen(self, found: Found) -> Found:
        """Return the run, marked as running again."""
        if found.status != RUNNING:
            with self._reaching("reopening a run"):
                self._client.update_run(found.run_id, status=RUNNING)
        return replace(found, status=RUNNING)

    def end(self, run_id: str, status: str) -> None:
        """Mark the run as ended now.

        Args:
            run_id: as found.
            status: "FINISHED", "FAILED" or "KILLED".
        """
        with self._reaching("ending a run"):
            self._client.set_terminated(run_id, status)

    def _experiment(self, name: str) -> str:
        from mlflow.exceptions import MlflowException

        known = self._client.get_experiment_by_name(name)
        if known is None:
            try:
                return str(self._client.create_experiment(name))
            except MlflowException:
                known = self._client.get_experiment_by_name(name)  # somebody else was first
                if known is None:
                    raise
        if known.lifecycle_stage != "active":
            raise ConfigError(
                f"an MLflow experiment must not be deleted, got {name!r}, which is; restore it or choose another name"
            )
        return str(known.experiment_id)

    def _search(self, place: str, tags: Mapping[str, str]) -> list[Run]:
        """Return the runs with these tags, the oldest first."""
        query = " and ".join(f"tags.`{key}` = '{value}'" for key, value in tags.items())
        found = self._client.search_runs([place], query, order_by=["attributes.start_time ASC"])
        return sorted(found, key=lambda run: (run.info.start_time, run.info.run_id))

    @contextmanager
    def _reaching(self, what: str) -> Iterator[None]:
        from mlflow.exceptions import MlflowException

        if time.monotonic() > self.deadline:
            raise TrackingUnavailable(
                f"MLflow at {_shown(self.uri)} must answer in time, but there was none left for {what}"
            )
        try:
            yield
        except (MlflowException, OSError) as exc:
            # The reason may quote the address, with name and password.
            reason = (
                str(exc)
                .strip()
                .partition("\n")[0]
                .replace(self.uri.rstrip("/"), _shown(self.uri))[:300]
            )
            raise TrackingUnavailable(
                f"MLflow at {_shown(self.uri)} must answer, but {what} failed: {reason}; look whether it runs there. "
                "Training does not depend on it"
            ) from exc


def open_tracker(uri: str) -> Tracker:
    """Return a tracker over an MLflow server (http://…) or database (sqlite:///…). Calls nobody yet.

    MLflow's own time-outs, two minutes with seven retries, are shortened for this process and those that it starts,
    wherever the environment does not name others. What it sends home is switched off.

    Raises:
        ConfigError: the address is of no kind that MLflow knows, or MLflow is not installed.
    """
    try:
        from mlflow import MlflowClient
        from mlflow.exceptions import MlflowException
    except ModuleNotFoundError as exc:
        raise ConfigError(
            f"tracking needs the package mlflow, but {exc}; install it, or leave out the tracking address"
        ) from exc
    _calm_down()
    try:
        return Tracker(MlflowClient(tracking_uri=uri), uri)
    except MlflowException as exc:
        reason = str(exc).strip().partition("\n")[0]
        raise ConfigError(
            f"a tracking address must be one that MLflow opens, got {_shown(uri)!r}: {reason}; "
            "for a server write http://host:port"
        ) from exc


def recall(tags: Mapping[str, str], key: str) -> list[int]:
    """Return the numbers that `remember` kept; what somebody else wrote there counts as nothing."""
    numbers: list[int] = []
    for place in count():
        try:
            some = json.loads(tags[_numbered(key, place)])
        except (KeyError, ValueError):
            return numbers
        if not isinstance(some, list) or any(type(number) is not int for number in some):
            return numbers
        numbers += some
        if len(some) < NUMBERS_PER_TAG:
            return numbers
    return numbers


def flatten(tree: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (dotted path, text) for every plain value of a tree, as `Tracker.log_params` logs them."""
    for key, value in tree.items():
        if isinstance(value, list | tuple):
            # A name may be taken twice (faults of one island): only unique ones address.
            named = [item.get("name") if isinstance(item, Mapping) else None for item in value]
            value = {
                name if name and named.count(name) == 1 else str(index): item
                for index, (name, item) in enumerate(zip(named, value, strict=True))
            }
        if isinstance(value, Mapping):
            yield from ((f"{key}.{path}", text) for path, text in flatten(value))
        elif value is not None:
            yield key, str(value)


def git_commit() -> str | None:
    """Return the commit of the git repository this process stands in; None without one, or without git."""
    command = ["git", "rev-parse", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None


def _numbered(key: str, place: int) -> str:
    return f"{key}.{place}" if place else key


def _calm_down() -> None:
    """Shorten the time-outs, and silence what would print into a training's screen."""
    from mlflow import environment_variables as options
    from mlflow import telemetry

    # The back-off factor must be whole: "0.5" makes every call raise.
    for option, value in (
        (options.MLFLOW_HTTP_REQUEST_MAX_RETRIES, 1),
        (options.MLFLOW_HTTP_REQUEST_TIMEOUT, 5),
        (options.MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR, 1),
        (options.MLFLOW_HTTP_RESPECT_RETRY_AFTER_HEADER, "false"),
        (options.MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT, "true"),
        (options.MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR, "false"),
        (options.MLFLOW_DISABLE_TELEMETRY, "true"),
    ):
        if not option.defined:
            option.set(value)  # type: ignore[no-untyped-call]
    telemetry.set_telemetry_client()  # type: ignore[no-untyped-call]  # looks again: at import it did not know yet
    # Each retry would be a warning on stderr; what comes of them is in our own error.
    logging.getLogger("urllib3.connectionpool").setLevel(logging.ERROR)


def _found(run: Run, *, is_new: bool) -> Found:
    return Found(run.info.run_id, run.info.status, dict(run.data.tags), is_new)


def _cut(text: str, longest: int) -> str:
    return text if len(text) <= longest else text[: longest - 1] + "…"


def _shown(uri: str) -> str:
    """Return an address without the name and password it may hold."""
    parts = urlsplit(uri)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl().rstrip("/")
