"""How a long command runs: under a progress bar, stoppable, with an exit status for each way it can end.

Knows signals and exit statuses; must not know what it follows. Imports no torch.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from dataclasses import asdict
from types import FrameType
from typing import TYPE_CHECKING

from flows import screen

if TYPE_CHECKING:
    from flows.local import Outcome, Watch
    from flows.pipeline import Started

DONE, FAILED, BAD_USAGE, STOPPED = 0, 1, 2, 130
Claim = Callable[[], bool]


def follow(
    work: Callable[[Watch], Outcome], headline: str, total_tokens: int, again: str, json: bool
) -> int:
    """Run a flow, show how it goes and how it ended, and return the exit status.

    Args:
        work: runs the flow; it is handed what watches it.
        headline: printed when the run begins.
        total_tokens: of the run.
        again: the command that continues the run.
        json: print one JSON document at the end, and nothing else on standard output.
    """
    from tasks.reporting import as_plain, status

    try:
        if json:
            outcome = work(lambda beat: None)
        else:
            with screen.progress("training", total_tokens) as advance:
                outcome = work(screen.Follower(headline, total_tokens, advance))
    except KeyboardInterrupt:
        screen.complain(f"interrupted at once; `{again}` continues from what was saved last")
        raise
    seen, score = status(outcome.run), outcome.score
    if json:
        plain = None if score is None else asdict(score)
        screen.show_json({"status": as_plain(seen), "score": plain})
    elif outcome.is_finished:
        screen.show_status(seen)
        if score is not None:
            screen.OUT.print()
            screen.show_score(score)
    if not outcome.is_finished:
        screen.complain(f"stopped on request; `{again}` continues")
        return STOPPED
    if score is None:
        screen.complain(
            "an island must live until its first merge, got none; see what `diloco status` says was refused, "
            "and start a new run"
        )
        return FAILED
    return DONE


def follow_flow(started: Started, again: str, json: bool, is_stopped: Claim) -> int:
    """Follow a run that flows train, show how it goes and how it ended, and return the exit status."""
    from flows import pipeline
    from tasks import evaluating, reporting
    from tasks.runs import open_run

    if json:
        state = pipeline.follow(started, lambda seen: None, is_stopped)
    else:
        with screen.progress("training", screen.FlowFollower.WHOLE) as advance:
            state = pipeline.follow(started, screen.FlowFollower(advance), is_stopped)
    if state.kind != "COMPLETED":
        complaint = state.message or f"its flow run ended as {state.kind}"
        is_stopping = state.kind == "CANCELLED" or is_stopped()
        screen.complain(complaint if is_stopping else f"{complaint}; `{again}` tries again")
        return STOPPED if is_stopping else FAILED
    run = open_run(started.store_url, started.run_id)
    seen, score = reporting.status(run), evaluating.evaluate(run)
    if json:
        screen.show_json({"status": reporting.as_plain(seen), "score": asdict(score)})
    else:
        screen.show_status(seen)
        screen.OUT.print()
        screen.show_score(score)
    return DONE


@contextlib.contextmanager
def stopping(
    text: str = "stopping with the state saved; once more interrupts at once",
) -> Iterator[Claim]:
    """Yield a claim that becomes true at the first SIGINT or SIGTERM; a second one interrupts at once."""
    asked: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        if asked:
            raise KeyboardInterrupt
        asked.append(number)
        screen.complain(text)

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: bool(asked)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
