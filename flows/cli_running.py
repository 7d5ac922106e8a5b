"""The commands that train: `up`, `demo`, `train`, `resume`, `stop`. Each reads its arguments and calls one flow.

Heavy imports happen inside, after the first Ctrl-C can be understood.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter
from cyclopts.validators import Number

from flows import following, screen
from flows.cli_options import (
    ConfigFile,
    Detach,
    Driver,
    Json,
    RunName,
    Set,
    StoreUrl,
    absolute_store,
    load,
    open_named,
    open_source,
    resume_line,
    store_url,
)
from flows.following import DONE, FAILED
from infra import services, settings
from infra.services import Services
from islands.config import RunConfig
from islands.types import ConfigError, ServiceUnavailable

if TYPE_CHECKING:
    from flows.local import Outcome, Watch
    from flows.pipeline import Started
    from tasks.origins import Origin
    from tasks.runs import Run

EVALUATE_SECONDS = 60.0
_STOP_SECONDS = 45.0


def up(
    *,
    store: StoreUrl = None,
    evaluate_seconds: Annotated[
        float,
        Parameter(
            help="First interval of the schedule of `evaluate`; later, only the Prefect UI changes it.",
            validator=Number(gte=10),
        ),
    ] = EVALUATE_SECONDS,
) -> int:
    """Start Prefect, MLflow and the deployments on this machine, and stop them at Ctrl-C."""
    url = absolute_store(store_url(store))
    with following.stopping("stopping what was started; runs save their state") as is_stopped:
        home = settings.home()
        serve = serve_command(url, evaluate_seconds)
        with services.running(home, serve=serve, is_served=is_served, say=screen.say) as found:
            screen.show_services(found, url)
            while not is_stopped():
                time.sleep(0.2)
    return DONE


def demo(
    *,
    set_: Set = (),
    keep: Annotated[
        bool,
        Parameter(negative="", show_default=False, help="Leave the services running until Ctrl-C."),
    ] = False,
    compare: Annotated[
        bool,
        Parameter(
            negative="",
            show_default=False,
            help="Then train the same configuration by the local driver, and compare.",
        ),
    ] = False,
) -> int:
    """Train the example run on four islands with all services, lose one by SIGKILL and take it back."""
    with following.stopping() as is_stopped:
        from flows.demo import run_demo

        return run_demo(set_, settings.environment(), is_stopped, keep=keep, compare=compare)


def train(
    config: ConfigFile = None,
    /,
    *,
    set_: Set = (),
    run: Annotated[
        str | None, Parameter(help="Name of the new run; default: run-1, run-2, ...")
    ] = None,
    from_: Annotated[
        str | None,
        Parameter(
            "--from",
            help="What it begins from: RUN or RUN@SNAPSHOT (also URL/RUN), or a .safetensors file as `export` writes. "
            "Without a configuration file, the configuration is that of the origin.",
        ),
    ] = None,
    driver: Driver = "prefect",
    detach: Detach = False,
    json: Json = False,
) -> int:
    """Train one run to its end. Ctrl-C stops it with its state saved."""
    with following.stopping() as is_stopped:
        origin = None if from_ is None else open_source(from_, config, set_)
        settled = load(config, set_, _base(origin))
        if driver == "local":
            _refuse_to_detach(detach)
            return _train_here(settled, run, is_stopped, origin=origin, json=json)
        from tasks import creating  # nothing of Prefect before `connect` has said where it is
        from tasks.runs import next_run_id
        from tasks.sharing import require_shareable

        require_shareable(settled)
        settled = settled.model_copy(update={"store": absolute_store(settled.store)})
        name = next_run_id(settled.store, "run") if run is None else run
        # What can be refused, is, before anything begins.
        creating.prepare_run(settled, name, origin=origin)
        spec = None if origin is None else origin.spec
        start = partial(_start_there, settled, name, origin=spec)
        return _follow_there(start, settled, is_stopped, detach=detach, json=json)


def resume(
    run: RunName,
    /,
    *,
    set_: Set = (),
    store: StoreUrl = None,
    driver: Annotated[
        Driver | None, Parameter(help="Who goes on; default: who trained it before.")
    ] = None,
    detach: Detach = False,
    json: Json = False,
) -> int:
    """Continue an interrupted run; operational settings may change, its identity may not."""
    with following.stopping() as is_stopped:
        from tasks.runs import change_config, require_unfinished
        from tasks.sharing import require_local, require_shareable, was_local

        opened = require_unfinished(open_named(run, absolute_store(store_url(store))))
        if driver == "local" or (driver is None and was_local(opened)):
            _refuse_to_detach(detach)
            require_local(opened)
            opened = change_config(opened, set_, settings.environment())
            return _resume_here(opened, is_stopped, json=json)
        require_shareable(opened.config)
        connect()  # before anything is changed
        opened = change_config(opened, set_, settings.environment())
        config = opened.config.model_copy(update={"store": opened.store_url})
        start = partial(_start_there, config, run, resume=True)
        return _follow_there(start, config, is_stopped, detach=detach, json=json)


def stop(run: RunName, /, *, store: StoreUrl = None) -> int:
    """Ask a run to stop at the next step, with its state saved, and wait until it has."""
    from tasks import stopping
    from tasks.records import new_attempt
    from tasks.runs import require_unfinished
    from tasks.sharing import was_local

    opened = require_unfinished(open_named(run, absolute_store(store_url(store))))
    if was_local(opened):
        raise ConfigError(
            f"a run to stop must be one that Prefect trains, got {run!r}, which the local driver trains; "
            "press Ctrl-C where it runs"
        )
    # The request lies in the store; Prefect is only asked who still trains.
    stopping.ask(opened, is_stop=True, reason="diloco stop", mark=new_attempt())
    connect()
    from flows import pipeline

    if not pipeline.wait_for_islands(opened, _STOP_SECONDS):
        screen.complain(
            f"run {run} was asked to stop, but its islands still train after {_STOP_SECONDS:g} s; "
            "their flow runs say why"
        )
        return FAILED
    screen.say(f"run {run} has stopped; `{resume_line(opened.store_url, run)}` continues")
    return DONE


# --- services ---


def connect() -> Services:
    """Return the running services, and point this process at them.

    Raises:
        ServiceUnavailable: there are none.
    """
    found = services.find(settings.home())
    if found is None:
        raise ServiceUnavailable(
            "a Prefect server must be running, found none; start one with `diloco up` (in another terminal), "
            "set PREFECT_API_URL, or train with `--driver local`"
        )
    settings.export(services.client_variables(found))
    return found


def serve_command(url: str, evaluate_seconds: float) -> list[str]:
    """Return the command that serves the deployments for a store."""
    interval = ["--evaluate-seconds", str(evaluate_seconds)]
    return [sys.executable, "-m", "flows.serving", "--store", url, *interval]


def is_served(found: Services) -> bool:
    """Say whether all deployments are there; points this process at the services."""
    settings.export(services.client_variables(found))
    from infra import deployments

    return deployments.are_served()


# --- the two drivers ---


def _refuse_to_detach(detach: bool) -> None:
    if detach:
        raise ConfigError(
            "--detach needs a process that goes on, got --driver local; leave one of them out"
        )


def _base(origin: Origin | None) -> RunConfig | None:
    """Return the origin's configuration, to be changed; where it lay is its own affair."""
    if origin is None or origin.config is None:
        return None
    return origin.config.as_founded().model_copy(update={"store": RunConfig().store})


def _train_here(
    config: RunConfig,
    run: str | None,
    is_stopped: following.Claim,
    *,
    origin: Origin | None,
    json: bool,
) -> int:
    from flows import local
    from tasks.runs import next_run_id

    name = next_run_id(config.store, "run") if run is None else run

    def work(watch: Watch) -> Outcome:
        return local.train(config, name, watch=watch, is_stopped=is_stopped, origin=origin)

    again = resume_line(config.store, name)
    return following.follow(work, f"run {name} in {config.store}", config.total_tokens, again, json)


def _resume_here(run: Run, is_stopped: following.Claim, *, json: bool) -> int:
    from flows import local

    def work(watch: Watch) -> Outcome:
        return local.resume(run, watch=watch, is_stopped=is_stopped)

    again = resume_line(run.store_url, run.run_id)
    headline = f"run {run.run_id} in {run.store_url}"
    return following.follow(work, headline, run.config.total_tokens, again, json)


def _start_there(
    config: RunConfig, name: str, *, resume: bool = False, origin: str | None = None
) -> Started:
    from flows import pipeline

    return pipeline.start(config, name, resume=resume, origin=origin)


def _follow_there(
    start: Callable[[], Started],
    config: RunConfig,
    is_stopped: following.Claim,
    *,
    detach: bool,
    json: bool,
) -> int:
    found = connect()  # before anything of Prefect is imported
    started = start()
    name = started.run_id
    page = f"{found.prefect_url}/runs/flow-run/{started.flow_run}"
    if not json:
        screen.say(f"run {name} in {config.store}: {page}")
    if detach:
        if json:
            screen.show_json({"run_id": name, "flow_run": started.flow_run, "page": page})
        return DONE
    again = resume_line(config.store, name)
    return following.follow_flow(started, again, json, is_stopped)
