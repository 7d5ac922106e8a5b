"""Flow `demo`: the example run beside data-parallel training on as many tokens, and a summary."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.resources import files
from multiprocessing import get_context
from multiprocessing.connection import Connection

from flows import local, screen
from flows.following import DONE, FAILED, STOPPED
from islands.config import RunConfig, parse_config
from islands.types import IslandsError
from tasks import building
from tasks.baseline import train_data_parallel
from tasks.creating import split_text
from tasks.evaluating import Score
from tasks.reporting import status
from tasks.runs import next_run_id
from tasks.verifying import verify

_POLL_SECONDS = 0.2


def run_demo(
    assignments: Sequence[str], environment: Mapping[str, str], is_stopped: Callable[[], bool]
) -> int:
    """Train, compare, verify, print; 0 if the ledger balances and the loss is below the bigram's."""
    text = files("flows").joinpath("demo.toml").read_text(encoding="utf-8")
    config = parse_config(
        text, assignments=assignments, environment=environment, source="flows/demo.toml"
    )
    run_id = next_run_id(config.store, "demo")
    for line in _introduction(config, run_id):
        screen.say(line)
    with _baseline(config) as baseline:
        with screen.progress("training", config.total_tokens) as advance:
            follower = screen.Follower("", config.total_tokens, advance)
            outcome = local.train(config, run_id, watch=follower, is_stopped=is_stopped)
        if not outcome.is_finished:
            screen.complain(
                f"stopped on request; `diloco resume {run_id} --store {config.store}` continues"
            )
            return STOPPED
        joint = _await(baseline, config, is_stopped)
    if joint is None:
        screen.complain(f"stopped on request; run {run_id} itself has finished")
        return STOPPED
    if outcome.score is None:
        raise IslandsError(
            "an island must live until its first merge, got none; correct the faults"
        )
    return _summary(outcome, outcome.score, joint)


def train_baseline(config_json: str, results: Connection) -> None:
    """Send the tokens so far, and at the end the data-parallel baseline's bits per byte; runs in its own process."""
    # Ctrl-C at a terminal reaches every process; the parent decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    building.use_one_thread()
    config = RunConfig.model_validate_json(config_json)
    shown = 0

    def watch(num_tokens: int) -> None:
        nonlocal shown
        percent = 100 * num_tokens // config.total_tokens
        if (
            percent > shown
        ):  # a pipe that nobody reads yet holds a few thousand messages, then it blocks
            shown = percent
            results.send(num_tokens)

    results.send(train_data_parallel(config, split_text(config), watch=watch))


@contextlib.contextmanager
def _baseline(config: RunConfig) -> Iterator[Connection]:
    """Train the baseline in a process that ends with this block."""
    context = get_context("spawn")
    results, sender = context.Pipe(duplex=False)
    process = context.Process(
        target=train_baseline, args=(config.model_dump_json(), sender), daemon=True
    )
    process.start()
    sender.close()
    try:
        yield results
    finally:
        process.terminate()
        process.join()


def _await(baseline: Connection, config: RunConfig, is_stopped: Callable[[], bool]) -> float | None:
    """Return the baseline's bits per byte; None if asked to stop before."""
    with screen.progress(
        "data-parallel training on as many tokens", config.total_tokens
    ) as advance:
        while not is_stopped():
            try:
                news = baseline.recv() if baseline.poll(_POLL_SECONDS) else 0
            except EOFError as exc:
                raise IslandsError(
                    "the data-parallel baseline ended without a result; run the demo again"
                ) from exc
            if isinstance(news, float):
                return news
            if news and not baseline.poll():  # what is past needs no line
                advance(min(news, config.total_tokens), "")
    return None


def _introduction(config: RunConfig, run_id: str) -> Iterator[str]:
    yield f"run {run_id} in {config.store}"
    yield f"{len(config.islands)} islands train one byte-level GPT on the prose that comes with Python:"
    for island in config.islands:
        yield (
            f"  {island.name:<8} {island.region:<9} speed {island.speed:g}, starts at step {island.start_steps:g}, "
            f"{island.push_delay_steps:g} steps to push, {island.fetch_delay_steps:g} to fetch"
        )
    for fault in config.local.faults:
        back = fault.return_after_steps
        after = "does not come back" if back is None else f"comes back {back} steps later"
        yield f"  {fault.island} will be killed after its own step {fault.step}, and {after}"
    yield "another process trains the same model data-parallel, for comparison"


def _summary(outcome: local.Outcome, score: Score, joint: float) -> int:
    run = outcome.run
    seen, found = status(run), verify(run.store_url, run.run_id)
    screen.OUT.print()
    screen.show_status(seen)
    screen.OUT.print()
    screen.show_ledger(found)
    screen.OUT.print()
    losses = (
        ("islands, merged when it suits them", score.bits_per_byte),
        ("data-parallel, as many tokens", joint),
        ("byte bigram (counting pairs)", score.bigram),
    )
    screen.table(
        ("held-out text",), ("bits/byte",), [(name, f"{loss:.4f}") for name, loss in losses]
    )
    screen.OUT.print()
    screen.say(f"merged share {seen.merged_share:.3f}: so much of all trained work is in the model")
    is_good = not found.problems and score.bits_per_byte < score.bigram
    if not is_good:
        screen.complain(
            "the loss must be below the bigram's and the ledger balanced; one of them is not"
        )
    screen.say(
        f"look around with `diloco status {run.run_id} --store {run.store_url}`, `sample`, `export`, `verify`"
    )
    return DONE if is_good else FAILED
