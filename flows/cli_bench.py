"""The command `bench`: one measurement, a table, figures as JSON, and one run in MLflow.

Imports nothing of Prefect: a benchmark that needs services starts its own, and Prefect reads its address once.
"""

from __future__ import annotations

import contextlib
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from cyclopts.validators import Number

from flows import cli_running, screen
from flows.cli_options import require_file_place
from flows.following import DONE, FAILED
from infra import services, settings
from infra.services import Services
from infra.tracking import TrackingUnavailable
from tasks import benchmarks
from tasks.figures import Measured, Order

# Its own deployments must score nothing meanwhile.
_NEVER_SECONDS = 86_400.0


def bench(
    name: Annotated[
        benchmarks.Name,
        Parameter(
            help="quality: loss against data-parallel training (long); codecs: loss by number format; "
            "overhead: what exchanging costs a learner; peer: the same beside torchft; store: a payload's speed and "
            "size; merge: time and memory; latency: of a merge, warm and cold; start: start-up times; "
            "chaos: goodput under deaths."
        ),
    ],
    /,
    *,
    json: Annotated[
        Path | None, Parameter(help="File for the figures; an existing one is replaced.")
    ] = None,
    seeds: Annotated[
        int, Parameter(help="Seeds 0..n-1 (quality, codecs, chaos).", validator=Number(gte=1))
    ] = 3,
    tokens: Annotated[
        int | None,
        Parameter(
            help="Tokens per run (quality, codecs, chaos); default: the benchmark's own.",
            validator=Number(gte=1),
        ),
    ] = None,
) -> int:
    """Measure one thing and print a table; exit status 1 if a target is missed."""
    if json is not None:
        require_file_place("--json", json)
    order = Order(seeds, tokens, screen.progress, _own_services)
    with _ending_in_order():
        measured = benchmarks.measure(name, order)
    _show(measured)
    if json is not None:
        json.write_text(benchmarks.as_json(measured), encoding="utf-8")
    _log(name, order, measured)
    return DONE if measured.is_met else FAILED


def _show(measured: Measured) -> None:
    screen.table(measured.table.words, measured.table.numbers, measured.table.rows)
    screen.OUT.print()
    rows = [
        (
            "met" if target.is_met else "MISSED",
            target.name,
            f"{target.value:.4g}",
            f"{target.relation} {target.limit:g}",
        )
        for target in measured.targets
    ]
    if rows:
        screen.table(("target", "figure"), ("measured", "must be"), rows)


def _log(name: benchmarks.Name, order: Order, measured: Measured) -> None:
    """Leave one run in MLflow, where there is one; a benchmark does not fail for lack of it."""
    found = services.find(settings.home())
    uri = settings.mlflow_tracking_uri() or (found.mlflow_url if found else "")
    if not uri:
        screen.say("no MLflow found (MLFLOW_TRACKING_URI, or `diloco up`): nothing was logged")
        return
    try:
        run = benchmarks.log(name, order, measured, uri)
    except TrackingUnavailable as exc:
        screen.complain(f"nothing was logged: {exc}")
        return
    screen.say(f"logged as run {run} of the experiment {benchmarks.EXPERIMENT!r} at {uri}")


@contextlib.contextmanager
def _ending_in_order() -> Iterator[None]:
    """Take SIGTERM, which Prefect's Cancel and `kill` send, for Ctrl-C: what was started is ended in order."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def _own_services() -> Iterator[Services]:
    """Start Prefect, MLflow and the deployments in a home of their own: nobody else's runs come in between."""
    with (
        settings.without_services(),
        tempfile.TemporaryDirectory(prefix="diloco-bench-") as home,
    ):
        serve = cli_running.serve_command(f"file://{home}/runs", _NEVER_SECONDS)
        with services.running(
            Path(home),
            serve=[*serve, "--also", "empty"],
            is_served=cli_running.is_served,
            say=screen.say,
        ) as found:
            yield found
