"""Inline SVG for the report: the shapes every drawing is made of, the loss over merged tokens, and the staleness strip.

Knows a timeline's records and shapes; must not know a page or a store. Places across are in percent, so that a drawing
fits any width; places down are in pixels. Text from records is escaped where it enters a shape.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from tasks.scores import Evaluation
    from tasks.timeline import Merge, Timeline

Item = TypeVar("Item")
Series = dict[str, list[tuple[float, float]]]

# More points than these add bytes, and nothing to see.
MOST_POINTS, MOST_POINTS_A_LINE, MOST_SCORES = 20_000, 400, 500
MOST_CELLS, MOST_COLUMNS, LEAST_COLUMNS = 12_000, 160, 10
_COLOURS = 8
_HEIGHT = 250
# Losses before this share of the merged tokens do not stretch the frame: beside their fall all else would lie flat.
_STEEP = 0.1
_ROW = 40
_WORST = 4


# --- shapes ---


def colour(i: int) -> str:
    """Return the colour of the i-th island; they repeat, names tell them apart."""
    return f"var(--i{i % _COLOURS})"


def percent(share: float) -> str:
    """Return a share, held within 0..1, as a length."""
    return f"{100 * min(max(share, 0.0), 1.0):.2f}%"


def titled(text: str) -> str:
    """Return the text as a shape's title: what pointing at it shows."""
    return f"<title>{escape(text)}</title>" if text else ""


def vertical(
    kind: str, x: str, top: float, bottom: float, title: str = "", stroke: str = ""
) -> str:
    """Return an upright line of a CSS class."""
    painted = f' stroke="{stroke}"' if stroke else ""
    place = f'x1="{x}" x2="{x}" y1="{top:.1f}" y2="{bottom:.1f}"'
    return f'<line class="{kind}" {place}{painted}>{titled(title)}</line>'


def level(kind: str, left: str, right: str, y: float) -> str:
    """Return a level line of a CSS class."""
    return f'<line class="{kind}" x1="{left}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>'


def dot(kind: str, x: str, y: float, radius: float, title: str = "", stroke: str = "") -> str:
    """Return a circle of a CSS class."""
    painted = f' stroke="{stroke}"' if stroke else ""
    place = f'cx="{x}" cy="{y:.1f}" r="{radius:.1f}"'
    return f'<circle class="{kind}" {place}{painted}>{titled(title)}</circle>'


def label(x: str, y: float, text: str, anchor: str = "start") -> str:
    """Return a line of text."""
    return f'<text x="{x}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def name(text: str, below: str, paint: str, height: float) -> str:
    """Return what stands to the left of a lane: a name in bold, and something below it."""
    swatch = f'<i style="background:{paint}"></i>'
    shown = f"<b>{swatch}{escape(text)}</b><small>{escape(below)}</small>"
    hint = escape(f"{text}, {below}")
    return f'<div class="name" style="height:{height:.0f}px" title="{hint}">{shown}</div>'


def evenly(items: Sequence[Item], most: int) -> Sequence[Item]:
    """Return at most so many of the items (but one, if there are any), spread evenly, the last one among them."""
    most = max(1, most)
    if len(items) <= most:
        return items
    return [items[(i + 1) * len(items) // most - 1] for i in range(most)]


def round_step(least: float) -> float:
    """Return the smallest of 1, 2 and 5 times a power of ten that is at least this positive number."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(m * power for m in (1, 2, 5, 10) if m * power >= least * (1 - 1e-9))


# --- loss ---


def draw_loss(timeline: Timeline) -> str:
    """Return the islands' smoothed training losses and the scores, over merged tokens."""
    series = _losses(timeline.merges, [lane.learner for lane in timeline.lanes])
    scores = evenly(timeline.evaluations, MOST_SCORES)
    xs = [x for some in series.values() for x, _ in some] + [one.merged_tokens for one in scores]
    ys = [y for some in series.values() for _, y in some]
    ys += [y for one in scores for y in (one.bits_per_byte, one.bigram)]
    if not xs:
        return '<p class="note">No merge has carried a loss yet.</p>'
    last = max(xs) or 1.0
    top = max([y for some in series.values() for x, y in some if x >= _STEEP * last] + ys[-2:])
    margin = 0.08 * (top - min(ys)) or 0.5
    low, high = min(ys) - margin, min(top + margin, max(ys) + margin)

    def down(value: float) -> float:
        return _HEIGHT * (high - value) / (high - low)

    marks = []
    step = round_step((high - low) / 5)
    for n in range(math.ceil(low / step), math.floor(high / step) + 1):
        marks.append(level("grid", "0", "100%", down(n * step)))
        marks.append(label("-8", down(n * step) + 4, f"{n * step:.4g}", "end"))
    step = round_step(last / 6)
    for n in range(int(last / step) + 1):
        marks.append(
            label(percent(n * step / last), _HEIGHT + 19, _short_count(n * step), "middle")
        )
    most = min(MOST_POINTS_A_LINE, MOST_POINTS // max(1, len(series)))
    curves = []
    for i, some in enumerate(series.values()):
        line = " ".join(f"{1000 * x / last:.1f},{down(y):.1f}" for x, y in evenly(some, most))
        curves.append(f'<path d="M{line}" stroke="{colour(i)}"/>' if line else "")
    box = f'width="100%" height="{_HEIGHT}" viewBox="0 0 1000 {_HEIGHT}" preserveAspectRatio="none"'
    marks.append(f"<svg {box}>{''.join(curves)}</svg>")
    if max(ys) > high:
        marks.append(label("100%", 14, f"begins at {max(ys):.3f}, above the frame", "end"))
    for one in scores[-1:]:
        marks.append(level("bigram", "0", "100%", down(one.bigram)))
        marks.append(label("6", down(one.bigram) - 6, f"byte bigram {one.bigram:.3f}"))
    marks += [
        _score(one, percent(one.merged_tokens / last), down(one.bits_per_byte)) for one in scores
    ]
    frame = f'<svg height="{_HEIGHT + 26}" role="img" aria-label="loss">{"".join(marks)}</svg>'
    return f'{_legend(list(series))}<div class="chart">{frame}</div>'


def _losses(merges: Sequence[Merge], learners: Sequence[str]) -> Series:
    series: Series = {learner: [] for learner in learners}
    for merge in merges:
        for entry in merge.entries:
            if entry.push.loss > 0 and entry.push.learner in series:
                series[entry.push.learner].append((merge.merged_tokens, entry.push.loss))
    return series


def _score(one: Evaluation, x: str, y: float) -> str:
    text = (
        f"snapshot {one.snapshot}: {one.bits_per_byte:.4f} bits/byte on held-out text\n"
        f"after {one.merged_tokens:,.0f} merged tokens"
    )
    if one.is_kept:
        return dot("score", x, y, 5, text)
    return dot("score guess", x, y, 5, f"{text}, interpolated: the snapshot is not kept any more")


def _legend(learners: Sequence[str]) -> str:
    lines = (
        f'<li><i style="background:{colour(i)}"></i>{escape(learner)}</li>'
        for i, learner in enumerate(learners)
    )
    merged = '<svg><circle cx="11" cy="7" r="5" class="score"/></svg>merged model, held-out text'
    return f'<ul class="legend">{"".join(lines)}<li>{merged}</li></ul>'


def _short_count(count: float) -> str:
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= size:
            return f"{count / size:.4g} {unit}"
    return f"{count:.4g}"


# --- staleness ---


def draw_staleness(timeline: Timeline) -> str:
    """Return one strip per island: how stale its work was in each merge, or in each of a few merges."""
    merges, lanes = timeline.merges, timeline.lanes
    if not merges:
        return '<p class="note">Nothing has been merged yet.</p>'
    num_columns = min(
        len(merges), MOST_COLUMNS, max(LEAST_COLUMNS, MOST_CELLS // max(1, len(lanes)))
    )
    edges = [i * len(merges) // num_columns for i in range(num_columns + 1)]
    cells: dict[tuple[str, int], list[int]] = {}
    for column in range(num_columns):
        for merge in merges[edges[column] : edges[column + 1]]:
            for entry in merge.entries:
                cells.setdefault((entry.push.learner, column), []).append(entry.staleness)
    names: list[str] = []
    marks: list[str] = []
    for i, lane in enumerate(lanes):
        strip = [cells.get((lane.learner, column), []) for column in range(num_columns)]
        names.append(name(lane.learner, _in_short(strip, len(merges)), colour(i), _ROW))
        marks += _cells(lane.learner, strip, edges, _ROW * i + 6)
    svg = f'<svg class="heat" height="{_ROW * len(lanes)}" role="img" aria-label="staleness">'
    scale = "".join(f'<li><i class="s{s}"></i>{text}</li>' for s, text in enumerate(_SCALE))
    legend = f'<ul class="legend">{scale}<li><i class="off"></i>not in it</li></ul>'
    strips = f'<div class="scroll">{svg}{"".join(marks)}</svg></div>'
    return f'{legend}<div class="lanes"><div>{"".join(names)}</div>{strips}</div>'


_SCALE = ("0, on the head", "1 version behind", "2", "3", "4 or more")


def _cells(learner: str, strip: Sequence[list[int]], edges: list[int], y: float) -> Iterator[str]:
    width = 100 / len(strip)
    for column, found in enumerate(strip):
        num_merges = edges[column + 1] - edges[column]
        which = f"merge {edges[column] + 1:,}"
        which += f" to {edges[column + 1]:,}" if num_merges > 1 else ""
        told = f"{learner}, {which}: in {len(found):,} of {num_merges:,}"
        if found:
            told += f"\nstaleness {sum(found) / len(found):.2f} on average, {max(found)} at most"
        kind = f"s{min(round(sum(found) / len(found) + 0.49), _WORST)}" if found else "off"
        place = f'x="{column * width:.3f}%" y="{y:.0f}" width="{width:.3f}%" height="{_ROW - 12}"'
        yield f'<rect class="{kind}" {place}>{titled(told)}</rect>'


def _in_short(strip: Sequence[list[int]], num_merges: int) -> str:
    found = [staleness for column in strip for staleness in column]
    if not found:
        return "in no merge"
    mean = sum(found) / len(found)
    return f"mean {mean:.2f}, in {len(found) / num_merges:.0%}"
