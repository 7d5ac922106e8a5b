"""What people see: progress, tables, plain lines where there is no terminal.

Knows rich and records; decides nothing.
"""

from __future__ import annotations

import contextlib
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Column, Table

if TYPE_CHECKING:
    from infra.services import Services
    from tasks.clockwork import Beat
    from tasks.evaluating import Score
    from tasks.evidence import Verification
    from tasks.reporting import Status

# Names, paths and messages are shown as they are: nothing in them is markup.
OUT = Console(highlight=False, markup=False, emoji=False)
ERR = Console(highlight=False, markup=False, emoji=False, stderr=True)
# Without a terminal a line is printed at each of these shares of the work.
_LINES = 10
_WATCH_SECONDS = 2.0
# A smaller stamp counts base steps.
_FIRST_WALL_CLOCK = 1e8
# A table for a file or a pipe takes the width it needs.
_UNBOUNDED_WIDTH = 1000

Advance = Callable[[int, str], None]


def say(text: str) -> None:
    """Print a line on standard output, unbroken."""
    OUT.print(text, soft_wrap=True)


def complain(text: str) -> None:
    """Print a line on standard error, unbroken."""
    ERR.print(text, soft_wrap=True)


def show_json(value: Any) -> None:
    """Print plain values as one JSON document."""
    sys.stdout.write(json.dumps(value, indent=2) + "\n")


class Follower:
    """Follows a local run: smoothed loss, merges, and what happens to islands.

    Args:
        headline: printed at the first beat, when everything that can be refused has been accepted.
        total_tokens: of the run.
        advance: told of progress.
    """

    def __init__(self, headline: str, total_tokens: int, advance: Advance) -> None:
        self._headline = headline
        self._total = total_tokens
        self._advance = advance
        self._loss: float | None = None
        self._num_merges = 0

    def __call__(self, beat: Beat) -> None:
        """Take in one beat of the driver."""
        if self._headline:
            say(self._headline)
            self._headline = ""
        if beat.loss is not None:
            self._loss = beat.loss if self._loss is None else 0.98 * self._loss + 0.02 * beat.loss
        elif beat.what.startswith("merge"):
            self._num_merges += 1
        elif beat.what not in ("starts", "leaves"):
            say(f"  step {beat.time:.0f}: {beat.island} {beat.what}")
        loss = "" if self._loss is None else f"loss {self._loss / math.log(2):.3f} bits/byte, "
        self._advance(min(beat.trained, self._total), f"{loss}{self._num_merges} merges")


class FlowFollower:
    """Follows a run that flows train, through its status: progress, merges, who comes back.

    Args:
        advance: told of progress, in parts of `WHOLE`: how much a run trains may change.
    """

    WHOLE = 1_000_000

    def __init__(self, advance: Advance) -> None:
        self._advance = advance
        self._incarnations: dict[str, int] = {}
        self._warned: set[str] = set()

    def __call__(self, status: Status) -> None:
        """Take in the run as it stands."""
        for island in status.islands:
            before = self._incarnations.get(island.name, -1)
            if island.incarnation > before >= 0:
                say(
                    f"  {island.name} is back as incarnation {island.incarnation}, at step {island.step:,}"
                )
            self._incarnations[island.name] = island.incarnation
        for finding in status.findings:
            if finding.key not in self._warned:
                say(f"  warning: {finding.text}")
                self._warned.add(finding.key)
        num_merges = sum(fragment.version for fragment in status.fragments)
        note = f"{num_merges} merges, merged share {status.merged_share:.2f}"
        if not status.trained:
            note = "the islands start, each with its cluster: some 20 s"
        done = min(1.0, status.trained / status.total_tokens)
        self._advance(round(self.WHOLE * done), note)


@contextlib.contextmanager
def progress(title: str, total: int) -> Iterator[Advance]:
    """Show how far work is; yields `advance(done, note)`. Plain lines when the output is no terminal.

    Nothing is shown before the first call.
    """
    if not OUT.is_terminal:
        yield _plain_lines(title, total)
        return
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=20),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}", markup=False),
    )
    bar = Progress(*columns, console=OUT)
    task = bar.add_task(title, total=total, note="")

    def advance(done: int, note: str) -> None:
        bar.start()
        bar.update(task, completed=done, note=note)

    try:
        yield advance
    finally:
        if bar.live.is_started:
            bar.stop()


def _plain_lines(title: str, total: int) -> Advance:
    shown = -1

    def advance(done: int, note: str) -> None:
        nonlocal shown
        tenth = done * _LINES // max(1, total)
        if tenth > shown:
            shown = tenth
            say(f"  {title}: {tenth * 100 // _LINES:3d} %  {note}".rstrip())

    return advance


def table(words: Sequence[str], numbers: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table: first the columns of words, then the columns of numbers, flush right."""
    left = [Column(header) for header in words]
    right = [Column(header, justify="right") for header in numbers]
    made = Table(*left, *right, box=None, padding=(0, 2, 0, 0), header_style="bold")
    for row in rows:
        made.add_row(*row)
    target = OUT if OUT.is_terminal else Console(width=_UNBOUNDED_WIDTH)
    target.print(made)


def show_services(found: Services, store: str) -> None:
    """Print where the services are."""
    table(
        ("service", "address"),
        (),
        [("Prefect", found.prefect_url), ("MLflow", found.mlflow_url), ("store", store)],
    )
    say(
        "start runs from Prefect's page (Deployments, train), or with `diloco train`; Ctrl-C stops everything"
    )
    say(
        f"for commands of `prefect` in another terminal: export PREFECT_API_URL={found.prefect_api_url}"
    )


def show_status(status: Status) -> None:
    """Print a run at a glance."""
    say(
        f"run {status.run_id}: {status.state}, {status.trained:,} of {status.total_tokens:,} tokens trained, "
        f"merged share {status.merged_share:.3f}{f', from {status.origin}' if status.origin else ''}"
    )
    if not status.is_finished:
        say(
            f"islands: {status.live} live, {status.contributing} contributing, {status.quorum} needed for a merge"
        )
    OUT.print()
    numbers = (
        "life",
        "step",
        "tokens",
        "tokens\n/s",
        "share",
        "merged\nshare",
        "stale",
        "last\nseen",
    )
    rows = [
        (
            i.name,
            i.region,
            i.state,
            ", ".join(f"{reason} {count}" for reason, count in sorted(i.refused.items())) or "-",
            str(i.incarnation) if i.incarnation >= 0 else "-",
            f"{i.step:,}",
            f"{i.tokens:,}",
            f"{i.tokens_per_second:,.0f}" if i.tokens_per_second else "-",
            f"{i.share:.3f}",
            f"{i.merged_share:.3f}",
            # What was merged after an island had left it has nothing to be late for.
            "-" if i.state == "left" else str(i.staleness),
            _seen(i.last_seen),
        )
        for i in status.islands
    ]
    table(("island", "region", "state", "refused"), numbers, rows)
    OUT.print()
    table(
        ("fragment",),
        ("elements", "version", "merged tokens", "pending", "islands\nwaiting"),
        [
            (
                str(f.index),
                f"{f.elements:,}",
                str(f.version),
                f"{f.merged_tokens:,}",
                str(f.pending),
                f"{f.waiting} of {f.quorum}",
            )
            for f in status.fragments
        ],
    )
    _show_traffic(status)
    if status.findings and not status.is_finished:  # no setting would mend what is over
        OUT.print()
        for finding in status.findings:
            say(f"warning: {finding.text}")


def _show_traffic(status: Status) -> None:
    """Print what the wire carried for the model, and what it could not carry; nothing before the first merge."""
    up, down = status.bytes_per_merged_token_up, status.bytes_per_merged_token_down
    if up is None or down is None:
        return
    OUT.print()
    say(f"payload bytes per merged token: {up:.2f} up, {down:.2f} down")
    late = [
        f"{i.name} {i.replaced_copies:,} of {i.replaced_tokens:,} tokens"
        for i in status.islands
        if i.replaced_copies
    ]
    if late:
        say(f"copies replaced before they were sent: {', '.join(late)}, counted once per fragment")


def _seen(stamp: float) -> str:
    """Say when an island wrote something last: how long ago, or at which base step of the local driver."""
    if stamp <= 0:
        return "-"
    if stamp < _FIRST_WALL_CLOCK:
        return f"step {stamp:.0f}"
    ago = max(0.0, time.time() - stamp)
    for size, unit in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if ago >= size:
            return f"{ago / size:.0f} {unit} ago"
    return f"{ago:.0f} s ago"


def show_ledger(found: Verification) -> None:
    """Print what became of every token; what is wrong goes to standard error."""
    numbers = (
        "trained", "merged", "passed over", "pending", "overwritten", "rolled back", "open", "imbalance",
    )  # fmt: skip
    rows = []
    for row in found.rows:
        offered = (row.merged, row.passed_over, row.pending)
        lost = (row.overwritten, row.rolled_back, row.open, row.imbalance)
        rows.append((row.learner, *(f"{count:,}" for count in (row.trained, *offered, *lost))))
    say("what became of every trained token, counted once per fragment:")
    OUT.print()
    table(("island",), numbers, rows)
    OUT.print()
    for problem in found.problems:
        complain(f"{problem.name}: {problem.text}")
    num_problems = len(found.problems)
    counted = "1 problem" if num_problems == 1 else f"{num_problems} problems"
    verdict = counted if num_problems else "balanced, nothing missing, nothing altered"
    say(f"{found.num_objects:,} objects, {found.num_versions:,} versions: {verdict}")


def ledger_as_plain(found: Verification) -> dict[str, Any]:
    """Return what `verify` found as plain JSON values."""
    rows = [asdict(row) | {"imbalance": row.imbalance} for row in found.rows]
    return {"is_sound": not found.problems, **asdict(found), "rows": rows}


def show_runs(found: Sequence[Status | str], url: str) -> None:
    """Print one line per run; a text stands for a run that cannot be read, and says why."""
    if not found:
        say(f"no runs in {url}")
        return
    rows = [
        (
            one.run_id,
            one.state,
            str(len(one.islands)),
            f"{one.trained:,}",
            f"{one.total_tokens:,}",
            f"{one.merged_share:.3f}",
        )
        for one in found
        if not isinstance(one, str)
    ]
    if rows:
        table(("run", "state"), ("islands", "trained", "of tokens", "merged share"), rows)
    for one in found:
        if isinstance(one, str):
            complain(one)


def show_score(score: Score) -> None:
    """Print a snapshot's score beside the bigram's."""
    say(
        f"snapshot {score.snapshot}: {score.bits_per_byte:.4f} bits/byte on {score.num_bytes:,} held-out bytes "
        f"after {score.merged_tokens:,} merged tokens (byte bigram: {score.bigram:.4f})"
    )


def watch_status(look: Callable[[], Status]) -> None:
    """Show a run's status again and again until it has finished; without a terminal, only when it has changed."""
    shown: Status | None = None
    while True:
        seen = look()
        if OUT.is_terminal:
            OUT.clear()
            show_status(seen)
        elif seen != shown:
            show_status(seen)
        shown = seen
        if seen.is_finished:
            return
        time.sleep(_WATCH_SECONDS)
