"""The command line, `diloco`: reads arguments, calls one flow or task, shows the result. The composition root.

Exit status: 0 done; 1 what was asked for failed; 2 bad usage or configuration; 130 stopped on request, resumable.
Heavy imports (torch) happen inside commands, so that help and status stay quick.
"""

from __future__ import annotations

import importlib.metadata
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, CycloptsError, Parameter, UnusedCliTokensError
from cyclopts.validators import Number

from flows import cli_bench, cli_chaos, cli_running, cli_steering, screen
from flows.cli_options import (
    ConfigFile,
    HtmlFile,
    Json,
    RunName,
    Set,
    Snapshot,
    StoreUrl,
    load,
    open_named,
    require_file_place,
    store_url,
)
from flows.following import BAD_USAGE, DONE, FAILED, STOPPED
from infra import services, settings
from islands.config import to_toml
from islands.types import ConfigError, DamagedObject, IslandsError, ServiceUnavailable

if TYPE_CHECKING:
    from tasks.reporting import Status

LARGEST_SEED = 2**63 - 1
COLDEST = 0.01  # below it, logits divided by the temperature overflow


def _version() -> str:
    try:
        return importlib.metadata.version("diloco")
    except importlib.metadata.PackageNotFoundError:
        return "not installed: running from its source folder"


app = App(
    name="diloco",
    help="Train one model on islands of compute that never wait for each other. To begin: diloco demo",
    version=_version,
    result_action="return_value",
)


@app.command
def runs(*, store: StoreUrl = None, json: Json = False) -> int:
    """List the runs of a store."""
    from tasks.reporting import as_plain
    from tasks.runs import list_runs

    url = store_url(store)
    found = {run_id: _glance(url, run_id) for run_id in list_runs(url)}
    if json:
        screen.show_json(
            [
                {"run_id": run_id, "problem": one} if isinstance(one, str) else as_plain(one)
                for run_id, one in found.items()
            ]
        )
    else:
        screen.show_runs(list(found.values()), url)
    return DONE


@app.command
def status(
    run: RunName,
    /,
    *,
    store: StoreUrl = None,
    watch: Annotated[
        bool,
        Parameter(
            negative="", show_default=False, help="Again every two seconds, until the run ends."
        ),
    ] = False,
    json: Json = False,
) -> int:
    """Show a run's islands and fragments."""
    from tasks.health import Doctor
    from tasks.reporting import as_plain
    from tasks.reporting import status as status_of
    from tasks.runs import refreshed

    if watch and json:
        raise ConfigError("--json prints one document, got --watch too; leave one of them out")
    opened = open_named(run, store)
    doctor = Doctor(opened)

    def look() -> Status:
        return status_of(refreshed(opened), doctor=doctor)

    if json:
        screen.show_json(as_plain(look()))
    elif watch:
        screen.watch_status(look)
    else:
        screen.show_status(look())
    return DONE


@app.command
def evaluate(
    run: RunName, /, *, snapshot: Snapshot = None, store: StoreUrl = None, json: Json = False
) -> int:
    """Score a snapshot on the held-out text, in bits per byte."""
    from tasks.evaluating import evaluate as evaluate_run

    score = evaluate_run(open_named(run, store), snapshot)
    if json:
        screen.show_json(asdict(score))
    else:
        screen.show_score(score)
    return DONE


@app.command
def export(
    run: RunName,
    /,
    *,
    to: Annotated[Path, Parameter(help="File to write; an existing one is replaced.")],
    snapshot: Snapshot = None,
    store: StoreUrl = None,
) -> int:
    """Write a snapshot's weights as a safetensors file."""
    from tasks.evaluating import export as export_run

    require_file_place("--to", to)
    chosen = export_run(open_named(run, store), to, snapshot)
    screen.say(f"snapshot {chosen.number} ({chosen.merged_tokens:,} merged tokens) written to {to}")
    return DONE


@app.command
def sample(
    run: RunName,
    /,
    *,
    prompt: Annotated[str, Parameter(help="The text to continue.")],
    num_bytes: Annotated[int, Parameter(help="Bytes to generate.", validator=Number(gte=1))] = 200,
    temperature: Annotated[
        float, Parameter(help="0 takes the likeliest byte.", validator=Number(gte=0, lte=100))
    ] = 0.8,
    seed: Annotated[
        int,
        Parameter(help="Same seed, same text.", validator=Number(gte=0, lte=LARGEST_SEED)),
    ] = 0,
    snapshot: Snapshot = None,
    store: StoreUrl = None,
) -> int:
    """Let a snapshot continue a text."""
    if not (temperature == 0 or temperature >= COLDEST):
        raise ConfigError(
            f"--temperature must be 0 or >= {COLDEST}, got {temperature}; 0.8 is usual"
        )
    try:
        prompt.encode()
    except UnicodeEncodeError as exc:
        raise ConfigError(f"--prompt must be UTF-8 text, got {prompt!r}; convert it") from exc
    from tasks.evaluating import sample as sample_run

    opened = open_named(run, store)
    text = sample_run(
        opened, prompt, num_bytes=num_bytes, temperature=temperature, seed=seed, number=snapshot
    )
    sys.stdout.write(f"{prompt}{text}\n")
    return DONE


@app.command
def verify(
    run: RunName,
    /,
    *,
    replay: Annotated[
        bool,
        Parameter(
            negative="",
            show_default=False,
            help='Also merge every version again (retention = "all").',
        ),
    ] = False,
    store: StoreUrl = None,
    json: Json = False,
) -> int:
    """Read every kept object, derive the ledger again, and name whatever is wrong."""
    from tasks.runs import require_plain
    from tasks.verifying import verify as verify_run

    url = store_url(store)
    found = verify_run(url, require_plain(run))
    if replay and not found.problems:
        from tasks.replaying import replay_into

        with screen.progress("replay", found.num_versions) as advance:
            replay_into(
                open_named(run, url),
                found,
                watch=lambda done: None if json else advance(done, f"{done} versions"),
            )
    if json:
        screen.show_json(screen.ledger_as_plain(found))
    else:
        screen.show_ledger(found)
    return FAILED if found.problems else DONE


@app.command(name="config")
def show_config(config: ConfigFile = None, /, *, set_: Set = ()) -> int:
    """Print the effective configuration as TOML."""
    sys.stdout.write(to_toml(load(config, set_)))
    return DONE


for command in (
    cli_bench.bench,
    cli_running.up,
    cli_running.demo,
    cli_running.train,
    cli_running.resume,
    cli_running.stop,
    cli_steering.adjust,
    cli_steering.quarantine,
    cli_steering.join,
    cli_steering.leave,
    cli_chaos.chaos,
):
    app.command(command)


@app.command
def report(run: RunName, /, *, to: HtmlFile = Path("report.html"), store: StoreUrl = None) -> int:
    """Write one page with a run's timeline, losses, shares and ledger; it opens without a network."""
    from flows.report import write_report

    require_file_place("--to", to)
    write_report(open_named(run, store), to)
    screen.say(f"run {run}: {to}")
    return DONE


@app.command
def track(
    run: RunName,
    /,
    *,
    uri: Annotated[
        str | None, Parameter(help="MLflow's address; default: $MLFLOW_TRACKING_URI, or `up`'s.")
    ] = None,
    store: StoreUrl = None,
) -> int:
    """Send to MLflow what it lacks of a run: after an outage, or of a run by the local driver."""
    from tasks.tracking import track as track_run

    found = services.find(settings.home())
    address = uri or settings.mlflow_tracking_uri() or (found.mlflow_url if found else "")
    if not address:
        raise ServiceUnavailable(
            "an MLflow server must be running, found none; start one with `diloco up`, "
            "set MLFLOW_TRACKING_URI, or give --uri"
        )
    num_points = track_run(open_named(run, store), address)
    screen.say(f"{num_points:,} points sent to {address}")
    return DONE


def main() -> None:
    """Run the command line and exit."""
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115  closed by the caller: `>&-`
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # text may hold what the terminal's encoding cannot
            stream.reconfigure(errors="backslashreplace")
    try:
        status_code = run_command(sys.argv[1:])
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader (`| head`) has gone. Without this, Python complains once more when it flushes at its exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status_code = FAILED
    sys.exit(status_code)


def run_command(arguments: Sequence[str]) -> int:
    """Run one command and return its exit status; what the user can cause ends in a message, not a traceback."""
    try:
        result = app(list(arguments), exit_on_error=False, print_error=False)
    except CycloptsError as exc:
        command = " ".join(["diloco", *(exc.command_chain or ())])
        screen.complain(f"{_rule(exc)}; `{command} --help` shows what it takes")
        return BAD_USAGE
    except ConfigError as exc:
        screen.complain(str(exc))
        return BAD_USAGE
    except DamagedObject as exc:
        screen.complain(f"{type(exc).__name__}: {exc}; {exc.remedy}")
        return FAILED
    except IslandsError as exc:
        kind = "" if type(exc) is IslandsError else f"{type(exc).__name__}: "
        screen.complain(f"{kind}{exc}")
        return FAILED
    except KeyboardInterrupt:
        return STOPPED
    return result if isinstance(result, int) else DONE


def _rule(exc: CycloptsError) -> str:
    if not isinstance(exc, UnusedCliTokensError):
        return str(exc) if str(exc).endswith("...") else str(exc).removesuffix(".")
    unused = exc.unused_tokens or []
    what = f"this command has no place for {' '.join(unused)}"
    return f"{what}: a setting goes behind --set" if any("=" in one for one in unused) else what


def _glance(url: str, run_id: str) -> Status | str:
    """Return a run's status, or why it cannot be read: one damaged run must not hide the others."""
    from tasks.reporting import status as status_of

    try:
        return status_of(open_named(run_id, url))
    except IslandsError as exc:
        return f"{run_id}: cannot be read ({exc}); `diloco verify {run_id}` says more"
