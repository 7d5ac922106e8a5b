"""The report's timeline as inline SVG: a lane for each island, and one for the synchronizer.

Knows a timeline's records; must not know a page or a store. A lane holds, from above: adoptions, a bar for each
incarnation, pushes. A merge is one group with the pushes it took, so that pointing at either lights up both.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from flows.charts import colour, dot, evenly, label, level, name, round_step, titled, vertical

if TYPE_CHECKING:
    from tasks.blows import Blow
    from tasks.timeline import Adoption, Bar, Lane, Merge, Push, Timeline

Mark = TypeVar("Mark", "Merge", "Push", "Adoption")

# More marks than these a browser draws slowly, and nobody can tell apart.
MOST_PUSHES, MOST_ADOPTIONS, MOST_BARS, MOST_BLOWS = 2_400, 2_400, 2_000, 1_000
_LANE = 56
_MOST_TICKS = 9
_TIME_STEPS = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200)
_DAY = 86_400
# In a run of fewer seconds, tenths of them matter.
_SHORT = 600
_ENDINGS = {
    "left": "left when its share was trained",
    "gone": "gone without a farewell: killed or stopped",
    "lost": "gone for good before its share was trained",
    "open": "has not left",
}


def draw_timeline(timeline: Timeline) -> str:
    """Return the drawing of a timeline that `thin_out` has made small enough."""
    rows = timeline.num_fragments
    row, top = min(13.0, max(2.0, 160 / rows)), _LANE * len(timeline.lanes)
    height = top + 20 + row * rows
    names = [
        name(lane.learner, lane.region, colour(i), _LANE) for i, lane in enumerate(timeline.lanes)
    ]
    names.append(name("synchronizer", f"{rows} fragments", "var(--soft)", height - top))
    unit = "base steps" if timeline.axis.is_steps else "h:mm:ss"
    names.append(f'<div class="name" style="height:26px"><small>{unit}</small></div>')
    marks = [level("edge", "0", "100%", y) for y in range(_LANE, top + 1, _LANE)]
    for place, text in _time_ticks(timeline):
        x = _x(timeline, place)
        anchor = (
            "start" if place == 0 else "end" if place > 0.96 * timeline.axis.length else "middle"
        )
        marks += [vertical("grid", x, 0, height), label(x, height + 18, text, anchor)]
    marks += _synchronizers(timeline, top + 7)
    if row >= 10:
        marks += [label("0", top + 24 + row * (p + 0.5), f"f{p}") for p in range(rows)]
    order = {lane.learner: i for i, lane in enumerate(timeline.lanes)}
    for merge in timeline.merges:
        marks.append(_merge(timeline, merge, order, top + 20 + row * (merge.fragment + 0.5), row))
    for i, lane in enumerate(timeline.lanes):
        inside = "".join([*_bars(timeline, lane, i), *_adoptions_and_pushes(timeline, lane, i)])
        marks.append(f'<g class="lane">{inside}</g>')
    for blow in timeline.blows:
        marks += _blow(
            timeline, blow, _LANE * order[blow.learner] if blow.learner in order else top
        )
    svg = f'<svg height="{height + 26:.0f}" role="img" aria-label="timeline">{"".join(marks)}</svg>'
    return f'<div class="lanes"><div>{"".join(names)}</div><div class="scroll">{svg}</div></div>'


def thin_out(timeline: Timeline) -> tuple[Timeline, str]:
    """Return what of a timeline is drawn, and in words what is not; "" if everything is."""
    num_lanes = max(1, len(timeline.lanes))
    num_taken = sum(len(merge.entries) for merge in timeline.merges)
    most = min(MOST_PUSHES, len(timeline.merges) * MOST_PUSHES // max(1, num_taken))
    merges = _by_fragment(timeline.merges, most)
    lanes = tuple(
        replace(
            lane,
            bars=tuple(evenly(lane.bars, MOST_BARS // num_lanes)),
            adoptions=_by_fragment(lane.adoptions, MOST_ADOPTIONS // num_lanes),
            pushes=_by_fragment(lane.pushes, MOST_PUSHES // num_lanes),
        )
        for lane in timeline.lanes
    )
    blows = tuple(evenly(timeline.blows, MOST_BLOWS))
    drawn = replace(timeline, merges=merges, lanes=lanes, blows=blows)
    before, after = _count(timeline), _count(drawn)
    missing = [
        f"{count - after[what]:,} of {count:,} {what}"
        for what, count in before.items()
        if after[what] < count
    ]
    return drawn, f"Left out of the drawing, evenly: {', '.join(missing)}." if missing else ""


def _by_fragment(items: tuple[Mark, ...], most: int) -> tuple[Mark, ...]:
    """Return the items thinned out per fragment: fragments take turns, and a stride must not meet always the same."""
    if len(items) <= most:
        return items
    fragments: dict[int, list[Mark]] = {}
    for item in items:
        fragments.setdefault(item.fragment, []).append(item)
    share = most // len(fragments)
    return tuple(item for some in fragments.values() for item in evenly(some, share))


def _count(timeline: Timeline) -> dict[str, int]:
    lanes = timeline.lanes
    return {
        "merges with the pushes they took": len(timeline.merges),
        "incarnations": sum(len(lane.bars) for lane in lanes),
        "adoptions": sum(len(lane.adoptions) for lane in lanes),
        "pushes that no merge took": sum(len(lane.pushes) for lane in lanes),
        "faults on purpose": len(timeline.blows),
    }


# --- lanes ---


def _bars(timeline: Timeline, lane: Lane, i: int) -> Iterator[str]:
    middle, before = _LANE * i + 26, None
    for bar in lane.bars:
        if before is not None:
            ends = _x(timeline, before.end), _x(timeline, bar.begin)
            yield level("away", *ends, middle)
        yield _bar(timeline, lane, bar, i)
        if before is not None:
            when = when_of(timeline, bar.begin)
            told = f"{lane.learner} is back as incarnation {bar.number}, {when}"
            yield dot("return", _x(timeline, bar.begin), middle, 6, told, colour(i))
        if bar.ending in ("gone", "lost"):
            yield _death(timeline, lane, bar, middle)
        before = bar
    if lane.left_at is not None:
        is_lost = before is None or before.ending == "lost"
        how = "was written off, or sent away, before its share was trained" if is_lost else "left"
        told = f"{lane.learner} {how}, {when_of(timeline, lane.left_at)}"
        yield vertical("end", _x(timeline, lane.left_at), middle - 12, middle + 12, told)


def _bar(timeline: Timeline, lane: Lane, bar: Bar, i: int) -> str:
    span = f"{when_of(timeline, bar.begin)} to {when_of(timeline, bar.end)}"
    told = f"{lane.learner}, incarnation {bar.number}: {span}\n{_ENDINGS[bar.ending]}"
    told += f"\n{bar.where}" if bar.where else ""
    width = _width(timeline, bar.end - bar.begin)
    place = f'x="{_x(timeline, bar.begin)}" y="{_LANE * i + 18}" width="{width}" height="16" rx="3"'
    return f'<rect class="bar {bar.ending}" {place} fill="{colour(i)}">{titled(told)}</rect>'


def _death(timeline: Timeline, lane: Lane, bar: Bar, y: float) -> str:
    told = (
        f"{lane.learner}, incarnation {bar.number}: {_ENDINGS[bar.ending]}\n"
        f"its last record is of {when_of(timeline, bar.end)}"
    )
    place = f'x="{_x(timeline, bar.end)}" y="{y:.0f}" overflow="visible"'
    strokes = 'd="M-6-6L6 6M6-6L-6 6"'
    cross = f'<path class="halo" {strokes}/><path {strokes}/>'
    return f'<svg class="death" {place}>{titled(told)}{cross}</svg>'


def _blow(timeline: Timeline, blow: Blow, y: int) -> Iterator[str]:
    """Yield a fault: an arrow head down on its lane, and a stripe for as long as it lasted."""
    told, x = f"{blow.told}\n{when_of(timeline, blow.place)}, on purpose", _x(timeline, blow.place)
    if blow.length:
        place = f'x="{x}" y="{y + 2}" width="{_width(timeline, blow.length)}" height="4"'
        yield f'<rect class="blow" {place}>{titled(told)}</rect>'
    place = f'x="{x}" y="{y + 17}" overflow="visible"'
    yield f'<svg class="blow" {place}>{titled(told)}<path d="M0 0L-6-15H6Z"/></svg>'


def _adoptions_and_pushes(timeline: Timeline, lane: Lane, i: int) -> Iterator[str]:
    y = _LANE * i
    for one in lane.adoptions:
        told = (
            f"{lane.learner} adopts version {one.version} of fragment {one.fragment} at its step "
            f"{one.step:,}\n{when_of(timeline, one.place)}, interpolated"
        )
        yield vertical("adopt", _x(timeline, one.place), y + 6, y + 16, told)
    for push in lane.pushes:
        kind = {"waiting": "waiting", "passed over": "over"}.get(push.fate, "refused")
        told = (
            f"{push.learner} pushes fragment {push.fragment} on version {push.base_version}: "
            f"{push.num_tokens:,} tokens, {push.fate}\n{when_of(timeline, push.place)}, "
            f"its step {push.stop.step:,}"
        )
        yield _tick(timeline, push, i, f"push {kind}", told)


def _tick(timeline: Timeline, push: Push, i: int, kind: str, told: str = "") -> str:
    y, x = _LANE * i, _x(timeline, push.place)
    return vertical(kind, x, y + 37, y + 49, told, colour(i) if push.fate in _ISLANDS_OWN else "")


_ISLANDS_OWN = ("merged", "waiting")


# --- the synchronizer ---


def _merge(timeline: Timeline, merge: Merge, order: Mapping[str, int], y: float, row: float) -> str:
    x, parts = _x(timeline, merge.place), []
    when = when_of(timeline, merge.place)
    lines = [f"fragment {merge.fragment}, version {merge.version}, {when}"]
    for entry in merge.entries:
        push = entry.push
        how = f"weight {entry.share:.0%}, staleness {entry.staleness}"
        lines.append(f"{push.learner}: {push.num_tokens:,} tokens, {how}")
        if (i := order.get(push.learner)) is not None:
            place = f'x1="{_x(timeline, push.place)}" y1="{_LANE * i + 49}" x2="{x}" y2="{y:.1f}"'
            parts.append(f'<line class="join" {place}/>{_tick(timeline, push, i, "push")}')
    shape = dot("version", x, y, min(4.0, row / 2))
    return f'<g class="merge">{titled(chr(10).join(lines))}{"".join(parts)}{shape}</g>'


def _synchronizers(timeline: Timeline, y: int) -> Iterator[str]:
    begun = timeline.synchronizers
    last = max((merge.place for merge in timeline.merges), default=0.0)
    ends = [*(place for _, place in begun[1:]), last]
    for (number, begin), end in zip(begun, ends, strict=bool(begun)):
        told = f"synchronizer {number}, from {when_of(timeline, begin)}"
        width = _width(timeline, max(0.0, end - begin))
        place = f'x="{_x(timeline, begin)}" y="{y}" width="{width}" height="5" rx="2"'
        yield f'<rect class="sync" {place}>{titled(told)}</rect>'


# --- time ---


def when_of(timeline: Timeline, place: float) -> str:
    """Return a place on the axis in words."""
    if timeline.axis.is_steps:
        return f"base step {place:,.1f}"
    return f"at {place:.1f} s" if timeline.axis.length < _SHORT else f"at {duration(place)}"


def duration(seconds: float) -> str:
    """Return h:mm:ss, with days before it from one day on."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days = f"{hours // 24} d " if hours >= 24 else ""
    return f"{days}{hours % 24}:{minutes:02d}:{rest:02d}"


def _time_ticks(timeline: Timeline) -> Iterator[tuple[float, str]]:
    axis = timeline.axis
    if axis.is_steps:
        step = round_step(axis.length / _MOST_TICKS)
    else:
        days = _DAY * round_step(max(1.0, axis.length / _DAY / _MOST_TICKS))
        step = next((s for s in _TIME_STEPS if axis.length / s <= _MOST_TICKS), days)
    for n in range(int(axis.length / step) + 1):
        yield n * step, f"{n * step:,.10g}" if axis.is_steps else duration(n * step)


def _x(timeline: Timeline, place: float) -> str:
    return f"{2.4 + 96.4 * place / timeline.axis.length:.2f}%"


def _width(timeline: Timeline, length: float) -> str:
    return f"{max(0.1, 96.4 * length / timeline.axis.length):.2f}%"
