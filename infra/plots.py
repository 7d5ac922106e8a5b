"""Figures as PNG bytes: lines over a number, and a timeline of lanes.

Knows axes, colours and labels; must not know what is drawn. It is the only file that imports matplotlib, late (that
takes most of a second), by its object interface: no figure is global, so threads may draw at once.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from islands.types import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours: told apart by the colour-blind too. Yellow and black are left out.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")
# Dashes tell apart what has the same colour.
DASHES = ("-", (0, (5, 2)), (0, (1, 1.5)), (0, (5, 1.5, 1, 1.5)))
GREY = "#555555"
MOST_NAMED = 16
WIDTH_INCHES, HEIGHT_INCHES, DOTS_PER_INCH = 9.0, 4.8, 110


@dataclass(frozen=True, slots=True)
class Line:
    """One series. `kind`: "thin" (one of many), "points" (measured now and then) or "level" (one height throughout)."""

    label: str
    xs: tuple[float, ...]
    ys: tuple[float, ...]
    kind: str = "thin"


@dataclass(frozen=True, slots=True)
class Lane:
    """One row of a timeline: stretches (start, end), and moments marked on them."""

    label: str
    spans: tuple[tuple[float, float], ...]
    marks: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Labels:
    """What is written on a figure. `note` explains in a few words what the axes cannot."""

    title: str
    x: str
    y: str = ""
    note: str = ""


def draw_lines(lines: Sequence[Line], labels: Labels) -> bytes:
    """Return the lines as a PNG image; without any value, an image that says so."""
    figure, axes = _canvas(labels, HEIGHT_INCHES)
    thin = [line for line in lines if line.kind == "thin"]
    for n, line in enumerate(thin):
        colour, dash = COLOURS[n % len(COLOURS)], DASHES[n // len(COLOURS) % len(DASHES)]
        is_few = len(line.xs) < 2  # a line needs two points to be seen
        label = line.label if n < MOST_NAMED else None
        axes.plot(
            line.xs,
            line.ys,
            color=colour,
            linestyle=dash,
            linewidth=1.1,
            marker="." if is_few else None,
            alpha=0.9,
            label=label,
        )
    if len(thin) > MOST_NAMED:
        axes.plot([], [], color="none", label=f"and {len(thin) - MOST_NAMED} more")
    for line in lines:
        _draw_measured(axes, line)
    if not any(line.xs for line in lines):
        _say_empty(axes)
    else:
        axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), frameon=False, fontsize=9)
    return _png(figure)


def draw_timeline(lanes: Sequence[Lane], title: str, unit: str = "seconds") -> bytes:
    """Return the lanes as a PNG image, the first one on top, over the time since the first moment.

    Args:
        lanes: their times in `unit`.
        title: of the figure.
        unit: many seconds are shown as minutes or hours, anything else as it is.
    """
    moments = [
        at for lane in lanes for at in (*lane.marks, *(end for s in lane.spans for end in s))
    ]
    first, last = min(moments, default=0.0), max(moments, default=0.0)
    shown, size = _unit_of(last - first) if unit == "seconds" else (unit, 1.0)
    labels = Labels(title, f"{shown} since the start")
    figure, axes = _canvas(labels, min(max(2.2, 1.4 + 0.42 * len(lanes)), 40.0))
    for row, lane in enumerate(lanes):
        colour = COLOURS[row % len(COLOURS)] if lane.spans else GREY
        bars = [((start - first) / size, (end - start) / size) for start, end in lane.spans]
        axes.broken_barh(bars, (row - 0.32, 0.64), facecolors=colour, alpha=0.25, linewidth=0)
        starts = [start for start, _ in bars]  # drawn too: two stretches may meet without a gap
        axes.vlines(starts, row - 0.32, row + 0.32, colors=colour, linewidth=2.5)
        marks = [(at - first) / size for at in lane.marks]
        axes.vlines(marks, row - 0.2, row + 0.2, colors=colour, linewidth=0.8)
    axes.set_yticks(range(len(lanes)), [lane.label for lane in lanes])
    axes.set_ylim(max(len(lanes), 1) - 0.4, -0.6)
    axes.grid(visible=False, axis="y")
    if not moments:
        _say_empty(axes)
    return _png(figure)


def _unit_of(seconds: float) -> tuple[str, float]:
    """Return a unit of time that suits a span, and how many seconds it has."""
    if seconds < 600:
        return "seconds", 1.0
    return ("minutes", 60.0) if seconds < 7200 else ("hours", 3600.0)


def _say_empty(axes: Axes) -> None:
    axes.text(0.5, 0.5, "nothing yet", transform=axes.transAxes, ha="center", color=GREY)


def _draw_measured(axes: Axes, line: Line) -> None:
    if not line.xs:
        return
    if line.kind == "level":
        axes.axhline(line.ys[-1], color=GREY, linestyle=":", linewidth=1.4, label=line.label)
    elif line.kind == "points":
        axes.plot(
            line.xs,
            line.ys,
            color="black",
            linewidth=1.0,
            marker="o",
            markersize=5,
            zorder=3,
            label=line.label,
        )


def _canvas(labels: Labels, height: float) -> tuple[Figure, Axes]:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.ticker import EngFormatter
    except ModuleNotFoundError as exc:
        raise ConfigError(f"figures need the package matplotlib, but {exc}; install it") from exc
    figure = Figure(figsize=(WIDTH_INCHES, height), dpi=DOTS_PER_INCH, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.set_title(labels.title, loc="left", fontsize=12, fontweight="bold")
    axes.set_xlabel(labels.x if not labels.note else f"{labels.x}\n{labels.note}", fontsize=9.5)
    axes.set_ylabel(labels.y, fontsize=9.5)
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.margins(x=0.02)
    return figure, axes


def _png(figure: Figure) -> bytes:
    place = io.BytesIO()
    figure.savefig(place, format="png")
    return place.getvalue()
