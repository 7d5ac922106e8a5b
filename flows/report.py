"""One run as one self-contained page: records in, HTML out. The frame of the page is `report.html`.

Knows records and words; decides nothing, and reads no store itself. All text from a record is escaped.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING

from flows.charts import colour, draw_loss, draw_staleness, percent
from flows.lanes import draw_timeline, duration, thin_out
from islands.config import to_toml
from islands.types import ConfigError

if TYPE_CHECKING:
    from tasks.evidence import Row, Verification
    from tasks.reporting import Status
    from tasks.runs import Run
    from tasks.timeline import Timeline

MOST_PROBLEMS = 200
_FATES = ("merged", "passed over", "pending", "overwritten", "rolled back", "open")
_BLOW_KEY = '<li><svg><path d="M11 13L5 1H17Z" class="blow"/></svg>a fault on purpose, as long as its stripe</li>\n'
_LIVE = " The run has not ended: what is missing here may have come or gone while it was read."


def write_report(run: Run, to: Path) -> None:
    """Write the page of a run; an existing file is replaced.

    Raises:
        ConfigError: the file cannot be written.
        IslandsError: the run's creation was interrupted, or the record of a version is damaged.
    """
    from tasks.reporting import status
    from tasks.timeline import read_timeline
    from tasks.verifying import verify

    seen, timeline = status(run), read_timeline(run)
    page = render(seen, timeline, verify(run.store_url, run.run_id), to_toml(run.config))
    try:
        to.write_bytes(page.encode("utf-8", "backslashreplace"))
    except OSError as exc:
        raise ConfigError(
            f"--to must be a file that can be written, got {str(to)!r} ({exc}); choose another path"
        ) from exc


def render(seen: Status, timeline: Timeline, found: Verification, configuration: str) -> str:
    """Return the page."""
    frame = Template(files("flows").joinpath("report.html").read_text(encoding="utf-8"))
    drawn, left_out = thin_out(timeline)
    return frame.substitute(
        run_id=escape(seen.run_id),
        state=_state(seen),
        tiles="".join(_tiles(seen, timeline, found)),
        axis_note=_axis_note(timeline),
        timeline=draw_timeline(drawn),
        blow_key=_BLOW_KEY if timeline.blows else "",
        footnotes=_list("foot", [*_footnotes(timeline), *filter(None, [left_out])]),
        loss=draw_loss(timeline),
        staleness_note=_staleness_note(timeline),
        staleness=draw_staleness(timeline),
        shares=_shares(seen, timeline),
        health=_health(seen),
        motion="" if seen.is_finished else _LIVE,
        ledger=_ledger(found),
        refusals=_refusals(timeline),
        configuration=escape(configuration),
    )


# --- the headline ---


def _state(seen: Status) -> str:
    origin = f" from {escape(seen.origin)}" if seen.origin else ""
    if seen.is_finished:
        return f'<span class="pill good">finished</span>{origin}'
    if seen.state == "stopped":
        return f'<span class="pill warn">stopped</span>{origin}'
    return f'<span class="pill warn">unfinished: a snapshot, perhaps in motion</span>{origin}'


def _tiles(seen: Status, timeline: Timeline, found: Verification) -> Iterator[str]:
    done = seen.trained / seen.total_tokens
    yield _tile(f"{seen.trained:,}", f"of {seen.total_tokens:,} tokens trained", share=done)
    merged = "merged share of all trained work"
    yield _tile(f"{seen.merged_share:.3f}", merged, share=seen.merged_share)
    if timeline.evaluations:
        last = timeline.evaluations[-1]
        beside = f"bits/byte on held-out text; byte bigram {last.bigram:.3f}"
        mood = "good" if last.bits_per_byte < last.bigram else "bad"
        yield _tile(f"{last.bits_per_byte:.3f}", beside, mood=mood)
    else:
        yield _tile("no score", "no snapshot has been evaluated")
    yield _tile(f"{len(timeline.merges):,}", f"merges of {timeline.num_fragments} fragments")
    up, down = seen.bytes_per_merged_token_up, seen.bytes_per_merged_token_down
    if up is not None and down is not None:
        yield _tile(f"{up:,.1f} / {down:,.1f}", "payload bytes up / down per merged token")
    num_lives = sum(len(lane.bars) for lane in timeline.lanes)
    yield _tile(f"{len(timeline.lanes)}", f"islands in {num_lives} incarnations")
    if found.problems:
        yield _tile(_num_problems(found), "in ledger and records", mood="bad")
    else:
        yield _tile("balanced", "ledger: every token has one fate", mood="good")


def _tile(value: str, what: str, *, share: float | None = None, mood: str = "") -> str:
    shown = f'<b class="{mood}">{escape(value)}</b><span>{escape(what)}</span>'
    if share is not None:
        shown += f'<div class="meter"><i style="width:{percent(share)}"></i></div>'
    return f'<div class="tile">{shown}</div>'


# --- notes ---


def _axis_note(timeline: Timeline) -> str:
    axis = timeline.axis
    if axis.is_steps:
        return "Time in base steps of the local driver's clock."
    try:
        begun = f"{datetime.fromtimestamp(axis.origin, UTC):%Y-%m-%d %H:%M:%S} UTC"
    except (ValueError, OverflowError, OSError):  # no such year
        begun = f"{axis.origin:g} s after 1970"
    return f"Hours, minutes and seconds since {begun}."


def _footnotes(timeline: Timeline) -> Iterator[str]:
    axis = timeline.axis
    yield (
        "When a version was adopted is not recorded: its mark is interpolated between the records around it, by the "
        "island's steps. Nor is when an island was gone: its cross stands at the last record it left."
    )
    yield (
        "Stamps come from the clocks of several machines and decide nothing. A push that no merge took is shown while "
        "its record is kept."
    )
    for writer, seconds in sorted(axis.shifts.items()):
        way = "ahead of" if seconds > 0 else "behind"
        by = duration(abs(seconds))
        yield f"The clock of {writer} runs {by} {way} the synchronizer's: its marks are moved back by that much."
    for count, what in (
        (axis.num_absurd, "an absurd stamp"),
        (axis.num_unknown, "no stamp or are gone"),
    ):
        if count:
            yield f"{count:,} records bear {what}: their marks stand between the records around them."


def _staleness_note(timeline: Timeline) -> str:
    return (
        "How many versions behind the head each island's work was when it was merged, over all "
        f"{len(timeline.merges):,} merges in the order of time. Beside a name: its mean, and the share of merges it "
        "was in."
    )


# --- tables ---


def _health(seen: Status) -> str:
    num_islands = (
        f"{seen.live} live, {seen.contributing} contributing, {seen.quorum} needed for a merge"
    )
    line = f'<p class="note">Islands: {num_islands}.</p>'
    if not seen.findings:
        return line + '<p class="verdict"><span class="good">nothing found</span></p>'
    rows = [
        [
            escape(one.kind),
            escape(one.island or "all"),
            f"{one.value:.3g} {escape(one.meaning)}",
            escape(one.remedy),
            f"{one.threshold:.3g}",
        ]
        for one in seen.findings
    ]
    return line + _table(("finding", "island", "what", "remedy", "limit"), rows, num_words=4)


def _shares(seen: Status, timeline: Timeline) -> str:
    weights = timeline.weight_shares()
    rows = []
    for i, island in enumerate(seen.islands):
        shares = (island.share, weights.get(island.name, 0.0), island.merged_share)
        replaced = f"{island.replaced_copies:,}"
        if island.replaced_copies:
            replaced += f" of {island.replaced_tokens:,} tokens"
        gauges = (_gauge(share, colour(i)) for share in shares)
        rows.append([escape(island.name), *gauges, replaced])
    gauged = ("share of trained tokens", "share of merge weight", "merged share")
    heads = ("island", *gauged, "copies replaced unsent")
    return _table(heads, rows, num_words=len(heads) - 1)


def _gauge(share: float, paint: str) -> str:
    bar = f'<span><i style="width:{percent(share)};background:{paint}"></i></span>'
    return f'<div class="gauge">{bar}{share:.3f}</div>'


def _ledger(found: Verification) -> str:
    heads = ("island", "trained", *_FATES, "imbalance")
    rows = [
        [escape(row.learner), *(f"{n:,}" for n in (row.trained, *_fates(row), row.imbalance))]
        for row in found.rows
    ]
    verdict = (
        _num_problems(found) if found.problems else "balanced, nothing missing, nothing altered"
    )
    mood = "bad" if found.problems else "good"
    counted = f"{found.num_objects:,} objects, {found.num_versions:,} versions: "
    named = [f"{problem.name}: {problem.text}" for problem in found.problems[:MOST_PROBLEMS]]
    if len(found.problems) > MOST_PROBLEMS:
        named.append(f"and {len(found.problems) - MOST_PROBLEMS:,} more")
    closing = f'<p class="verdict">{counted}<span class="{mood}">{verdict}</span></p>'
    return _fate_bars(found) + _table(heads, rows) + closing + _list("problems", named)


def _fate_bars(found: Verification) -> str:
    key = "".join(f'<li><i class="f{n}"></i>{fate}</li>' for n, fate in enumerate(_FATES))
    rows = []
    for row in found.rows:
        total = sum(max(0, count) for count in _fates(row)) or 1
        parts = "".join(
            f'<i class="f{n}" style="width:{percent(count / total)}" title="{fate} {count / total:.1%}"></i>'
            for n, (fate, count) in enumerate(zip(_FATES, _fates(row), strict=True))
            if count > 0
        )
        name = f'<span title="{escape(row.learner)}">{escape(row.learner)}</span>'
        rows.append(f'{name}<div class="fates">{parts}</div>')
    return f'<ul class="legend">{key}</ul><div class="fate-rows">{"".join(rows)}</div>'


def _fates(row: Row) -> tuple[int, ...]:
    offered = (row.merged, row.passed_over, row.pending)
    return (*offered, row.overwritten, row.rolled_back, row.open)


def _num_problems(found: Verification) -> str:
    return "1 problem" if len(found.problems) == 1 else f"{len(found.problems):,} problems"


def _refusals(timeline: Timeline) -> str:
    if not timeline.refusals:
        return '<p class="note">No contribution was refused.</p>'
    rows = [
        [escape(one.reason), escape(one.learner), f"{one.count:,}", f"{one.tokens:,}"]
        for one in sorted(timeline.refusals, key=lambda one: (one.reason, one.learner))
    ]
    return _table(("reason", "island", "contributions", "tokens announced"), rows, num_words=2)


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]], *, num_words: int = 1) -> str:
    """Return a table of cells that are HTML already; the columns after the words are flush right."""

    def line(tag: str, cells: Sequence[str]) -> str:
        words = "".join(f"<{tag}>{cell}</{tag}>" for cell in cells[:num_words])
        numbers = "".join(f'<{tag} class="n">{cell}</{tag}>' for cell in cells[num_words:])
        return f"<tr>{words}{numbers}</tr>"

    body = "".join(line("td", row) for row in rows)
    head = line("th", heads)
    return f'<div class="scroll"><table><thead>{head}</thead><tbody>{body}</tbody></table></div>'


def _list(kind: str, lines: Sequence[str]) -> str:
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return f'<ul class="{kind}">{items}</ul>' if lines else ""
