"""The command line, `diloco`: reads arguments, calls one flow or task, shows the result. The composition root.

Exit status: 0 done; 1 what was asked for failed; 2 bad usage or configuration; 130 stopped on request, resumable.
Heavy imports (torch) happen inside commands, so that help and status stay quick.
"""

from __future__ import annotations

import importlib.metadata
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import App, CycloptsError, Parameter
from cyclopts.validators import Number

from flows import following, screen
from flows.following import BAD_USAGE, DONE, FAILED, STOPPED
from infra import settings
from islands.config import RunConfig, parse_config, to_toml
from islands.types import ConfigError, IslandsError

if TYPE_CHECKING:
    from flows.local import Outcome, Watch
    from tasks.reporting import Status
    from tasks.runs import Run

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


@app.command
def train(
    config: ConfigFile = None,
    /,
    *,
    set_: Set = (),
    run: Annotated[
        str | None, Parameter(help="Name of the new run; default: run-1, run-2, ...")
    ] = None,
    driver: Annotated[Literal["local"], Parameter(help="Where islands run.")] = "local",
    json: Json = False,
) -> int:
    """Train one run to its end. Ctrl-C stops it at a saved state."""
    with following.stopping() as is_stopped:
        from flows import local
        from tasks.runs import next_run_id

        settled = _load(config, set_)
        name = next_run_id(settled.store, "run") if run is None else run

        def work(watch: Watch) -> Outcome:
            return local.train(settled, name, watch=watch, is_stopped=is_stopped)

        again = _resume_line(settled.store, name)
        return following.follow(
            work, f"run {name} in {settled.store}", settled.total_tokens, again, json
        )


@app.command
def resume(run: RunName, /, *, set_: Set = (), store: StoreUrl = None, json: Json = False) -> int:
    """Continue an interrupted run; operational settings may change, its identity may not."""
    with following.stopping() as is_stopped:
        from flows import local
        from tasks.runs import change_config, require_unfinished

        opened = change_config(require_unfinished(_open(run, store)), set_, settings.environment())

        def work(watch: Watch) -> Outcome:
            return local.resume(opened, watch=watch, is_stopped=is_stopped)

        headline = f"run {run} in {opened.store_url}"
        again = _resume_line(opened.store_url, run)
        return following.follow(work, headline, opened.config.total_tokens, again, json)


@app.command
def runs(*, store: StoreUrl = None, json: Json = False) -> int:
    """List the runs of a store."""
    from tasks.runs import list_runs

    url = _store_url(store)
    found = {run_id: _glance(url, run_id) for run_id in list_runs(url)}
    if json:
        screen.show_json(
            [
                {"run_id": run_id, "problem": one} if isinstance(one, str) else asdict(one)
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
    from tasks.reporting import status as status_of

    if watch and json:
        raise ConfigError("--json prints one document, got --watch too; leave one of them out")
    url = _store_url(store)

    def look() -> Status:
        return status_of(_open(run, url))

    if json:
        screen.show_json(asdict(look()))
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

    score = evaluate_run(_open(run, store), snapshot)
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

    _require_file_place("--to", to)
    chosen = export_run(_open(run, store), to, snapshot)
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

    opened = _open(run, store)
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

    url = _store_url(store)
    found = verify_run(url, require_plain(run))
    if replay and not found.problems:
        from tasks.replaying import replay_into

        with screen.progress("replay", found.num_versions) as advance:
            replay_into(
                _open(run, url),
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
    sys.stdout.write(to_toml(_load(config, set_)))
    return DONE


@app.command
def demo(*, set_: Set = ()) -> int:
    """Train the example run on four islands, lose one and take it back, and compare with data-parallel training."""
    with following.stopping() as is_stopped:
        from flows.demo import run_demo

        return run_demo(set_, settings.environment(), is_stopped)


@app.command
def bench(
    name: Annotated[
        Literal["quality", "merge", "start"],
        Parameter(help="Loss against data-parallel training, a merge's memory, start-up times."),
    ],
    /,
    *,
    json: Annotated[
        Path | None, Parameter(help="File for the figures; an existing one is replaced.")
    ] = None,
    seeds: Annotated[int, Parameter(help="Seeds 0..n-1 (quality).", validator=Number(gte=1))] = 3,
    tokens: Annotated[
        int, Parameter(help="Tokens per run (quality).", validator=Number(gte=1))
    ] = 3_072_000,
) -> int:
    """Measure one thing and print a table; exit status 1 if a target is missed."""
    from flows import benchmark

    if json is not None:
        _require_file_place("--json", json)
    return benchmark.run_benchmark(name, json, seeds=seeds, tokens=tokens)


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
        rule = str(exc) if str(exc).endswith("...") else str(exc).removesuffix(".")
        screen.complain(f"{rule}; `{command} --help` shows what it takes")
        return BAD_USAGE
    except ConfigError as exc:
        screen.complain(str(exc))
        return BAD_USAGE
    except IslandsError as exc:
        kind = "" if type(exc) is IslandsError else f"{type(exc).__name__}: "
        screen.complain(f"{kind}{exc}")
        return FAILED
    except KeyboardInterrupt:
        return STOPPED
    return result if isinstance(result, int) else DONE


def _resume_line(url: str, name: str) -> str:
    store = [] if url == _store_url(None) else ["--store", url]
    return shlex.join(["diloco", "resume", name, *store])


def _load(config: Path | None, assignments: tuple[str, ...]) -> RunConfig:
    text = ""
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


def _store_url(store: str | None) -> str:
    return store if store is not None else _load(None, ()).store


def _open(run: str, store: str | None) -> Run:
    from tasks.runs import open_run

    return open_run(_store_url(store), run)


def _glance(url: str, run_id: str) -> Status | str:
    """Return a run's status, or why it cannot be read: one damaged run must not hide the others."""
    from tasks.reporting import status as status_of

    try:
        return status_of(_open(run_id, url))
    except IslandsError as exc:
        return f"{run_id}: cannot be read ({exc}); `diloco verify {run_id}` says more"


def _require_file_place(option: str, path: Path) -> None:
    """Raise ConfigError unless a file can be written at `path`: better now than after the work."""
    if path.is_dir() or not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise ConfigError(
            f"{option} must be a file in an existing, writable folder, got {str(path)!r}; choose another path"
        )
