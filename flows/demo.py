"""The demo: the example run on Prefect, Dask and MLflow; one learner is killed and comes back; a summary to read."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from flows import cli_options, cli_running, screen
from flows.following import DONE, FAILED, STOPPED, Claim
from infra import services, settings
from infra.services import Services
from islands.chaos import Fault
from islands.config import RunConfig, parse_config
from islands.types import IslandsError
from tasks.reporting import Status, status
from tasks.runs import Run, next_run_id, open_run


def run_demo(
    assignments: tuple[str, ...],
    environment: Mapping[str, str],
    is_stopped: Claim,
    *,
    keep: bool,
    compare: bool,
) -> int:
    """Run the example configuration (with `assignments` applied) and print a summary; return the exit status."""
    text = Path(__file__).with_name("demo.toml").read_text(encoding="utf-8")
    config = parse_config(
        text, assignments=assignments, environment=environment, source="flows/demo.toml"
    )
    config = config.model_copy(update={"store": cli_options.absolute_store(config.store)})
    with _services(config.store) as found:
        run_id = next_run_id(config.store, "demo")
        status_code = _train(config, run_id, found, is_stopped)
        if compare and status_code == DONE:
            status_code = _compare(config, run_id, is_stopped)
        if keep and not is_stopped():
            screen.show_services(found, config.store)
            while not is_stopped():
                time.sleep(0.2)
    return status_code


@contextlib.contextmanager
def _services(store: str) -> Iterator[Services]:
    """Give the running services, or start them for the demo's time."""
    found = services.find(settings.home())
    if found is not None and cli_running.is_served(found):
        yield found
        return
    screen.say("starting Prefect, MLflow and the deployments (some 20 seconds)")
    serve = cli_running.serve_command(store, cli_running.EVALUATE_SECONDS)
    started = services.running(
        settings.home(), serve=serve, is_served=cli_running.is_served, say=screen.say
    )
    with started as found:
        yield found


def _train(config: RunConfig, run_id: str, found: Services, is_stopped: Claim) -> int:
    from flows import pipeline  # Prefect, which reads its address when it is imported
    from tasks.chaos import Chaos

    for line in _introduction(config, run_id):
        screen.say(line)
    started = pipeline.start(config, run_id)
    screen.say(f"  Prefect: {found.prefect_url}/runs/flow-run/{started.flow_run}")
    screen.say(f"  MLflow:  {found.mlflow_url}")
    faults = [Fault("kill", island=f.island, step=f.step) for f in config.local.faults]
    chaos: Chaos | None = None
    with screen.progress("training", screen.FlowFollower.WHOLE) as advance:
        follower = screen.FlowFollower(advance)

        def look(seen: Status) -> None:
            nonlocal chaos
            chaos = chaos or Chaos(open_run(config.store, run_id), faults, _say_inset)
            chaos.look()
            follower(seen)

        state = pipeline.follow(started, look, is_stopped)
    if state.kind != "COMPLETED":
        screen.complain(state.message or f"the run ended as {state.kind}")
        return STOPPED if is_stopped() else FAILED
    return _summary(
        open_run(config.store, run_id), chaos is not None and chaos.num_struck == len(faults)
    )


def _say_inset(line: str) -> None:
    screen.say(f"  {line}")


def _introduction(config: RunConfig, run_id: str) -> Iterator[str]:
    yield f"run {run_id} in {config.store}"
    yield (
        f"{len(config.islands)} islands, each a Dask cluster of its own, train one byte-level GPT "
        "on the prose that comes with Python:"
    )
    for island in config.islands:
        yield f"  {island.name:<8} {island.region:<9} share by speed {island.speed:g}"
    for fault in config.local.faults:
        yield f"  {fault.island}'s learner will get a SIGKILL at its step {fault.step}"


def _summary(run: Run, has_struck_all: bool) -> int:
    from tasks.evaluating import evaluate
    from tasks.latency import own_time
    from tasks.verifying import verify

    seen, score, found = status(run), evaluate(run), verify(run.store_url, run.run_id)
    screen.OUT.print()
    screen.show_status(seen)
    screen.OUT.print()
    screen.show_ledger(found)
    screen.OUT.print()
    rows = [("islands, merged when it suits them", score.bits_per_byte)]
    rows += [("byte bigram (counting pairs)", score.bigram)]
    screen.table(("held-out text",), ("bits/byte",), [(name, f"{x:.4f}") for name, x in rows])
    screen.OUT.print()
    times = own_time(run)
    screen.say(f"merged share {seen.merged_share:.3f}: so much of all trained work is in the model")
    screen.say(
        f"first merge {times.cold_seconds:.1f} s after the first quorum: "
        "its synchronizer was started by the quorum's event"
    )
    screen.say(
        f"learners' own threads: at most {100 * times.idle_share:.2f} % outside training steps and adoptions"
    )
    screen.say(
        f"look around: `diloco status {run.run_id}`, `diloco report {run.run_id} --to report.html`, `sample`, `verify`"
    )
    complaints = {
        "the ledger must balance": not found.problems,
        "the loss must be below the bigram's": score.bits_per_byte < score.bigram,
        "a learner must be killed and come back": has_struck_all and _is_anybody_back(run, seen),
    }
    for complaint in (text for text, is_met in complaints.items() if not is_met):
        screen.complain(f"{complaint}; it is not so")
    return DONE if all(complaints.values()) else FAILED


def _is_anybody_back(run: Run, seen: Status) -> bool:
    return not run.config.local.faults or any(i.incarnation > 0 for i in seen.islands)


def _compare(config: RunConfig, there_id: str, is_stopped: Callable[[], bool]) -> int:
    """Train the same configuration by the local driver and print both losses; STOPPED if asked to stop."""
    from flows import local
    from tasks.evaluating import evaluate

    there = evaluate(open_run(config.store, there_id))
    run_id = f"{there_id}-local"
    with screen.progress("the local driver", config.total_tokens) as advance:
        follower = screen.Follower("", config.total_tokens, advance)
        outcome = local.train(config, run_id, watch=follower, is_stopped=is_stopped)
    if not outcome.is_finished:
        return STOPPED
    if outcome.score is None:
        raise IslandsError(
            "an island must live until its first merge, got none; correct the faults"
        )
    here = outcome.score.bits_per_byte
    screen.say(
        f"the local driver reaches {here:.4f} bits/byte on the same configuration, "
        f"the islands {there.bits_per_byte:.4f}: {100 * (there.bits_per_byte / here - 1):+.2f} %"
    )
    return DONE
