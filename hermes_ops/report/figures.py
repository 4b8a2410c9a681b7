"""Learning curves, the GPU timeline and regret, drawn by matplotlib's object interface.

Regret is the distance of the best value so far from the sweep's best, over time and GPU time.
"""

from __future__ import annotations

import colorsys
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from hermes_ops.core.summary import CurvePoints, Segment, SweepSummary
from hermes_ops.report.background import Alternative, Background, BestSoFar, GpuUse, Improvement
from hermes_ops.report.canvas import (
    DARK,
    RED,
    TEXT,
    TOO_GREAT,
    NothingToDrawError,
    downsample,
    figure_of,
    is_wide,
    plain,
    say_empty,
    unit_of,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_FEW = 20  # up to this number of trials, each is in the legend and has marks
_GOLDEN = 0.6180339887498949
_MOST_POINTS = 240  # of a curve: more cannot be distinguished and would make the page large
_MOST_SHAPES = 2_000  # bars; more are rasterised
_MOST_CURVES = 200  # without marks; more are rasterised
_LARGE, _SMALL = 26.0, 7.0  # rings, in square points
Colour = tuple[float, float, float]

Steps = list[tuple[float, float]]
_ALTERNATIVE_COLOURS = (
    "#d9822b",
    "#3b6fb5",
    "#7a4fa3",
    "#2f8f5b",
)  # of the alternatives, in their order
REGRET_FLOOR = 1e-4  # of the largest regret; a logarithmic axis has no place for 0
_MOST_REGRET_STEPS = 600


def colour_of(number: int) -> Colour:
    """Return a trial's colour, the same in every picture; neighbours differ clearly."""
    hue = (0.58 + number * _GOLDEN) % 1.0
    lightness = (0.46, 0.62, 0.36)[number % 3]
    return colorsys.hls_to_rgb(hue, lightness, 0.62)


def learning_curves(
    summary: SweepSummary, curves: Mapping[int, CurvePoints], segments: Sequence[Segment]
) -> Figure:
    """Draw the objective by step and by time.

    A ring marks a preemption; by time, the line is broken while the trial waited and a dotted line
    joins its parts. The best trial is drawn thick and last. With more than 20 trials the others are
    thin, have small rings and only by step, and are not in the legend. Long curves are downsampled.
    """
    best = summary.best.number if summary.best else None
    by_trial = _by_trial(segments)
    ordered = sorted(curves.items())
    thin = ((n, _thin(_finite(points), by_trial.get(n, ()))) for n, points in ordered)
    drawn = {n: points for n, points in thin if points}
    origin_s = _origin_s(drawn.values(), segments)
    unit, unit_s = unit_of(_end_s(drawn.values(), segments) - origin_s)
    few = len(drawn) <= _FEW
    figure, (by_step, by_time) = figure_of(13.0, 5.2, columns=2)

    def placed(number: int) -> list[list[tuple[float, float]]]:
        """Return the parts of a trial's curve by time."""
        stretches = _stretches(drawn[number], by_trial.get(number, []))
        return [[((ms / 1_000 - origin_s) / unit_s, v) for _, v, ms in part] for part in stretches]

    marked = [n for n in drawn if few or n == best]
    plain_ones = [n for n in drawn if not few and n != best]
    _draw_together(by_step, [(n, [p[:2] for p in drawn[n]]) for n in plain_ones])
    _draw_together(by_time, [(n, part) for n in plain_ones for part in placed(n)])
    _ring_together(by_step, {n: _cuts(drawn[n], by_trial.get(n, ())) for n in plain_ones})
    for number in sorted(marked, key=lambda n: n == best):
        style = _style(number, number == best, few)
        _draw_by_step(by_step, drawn[number], by_trial.get(number, []), style)
        _draw_by_time(by_time, placed(number), style)
    _finish_curves(summary, drawn, (by_step, by_time), unit)
    if drawn:
        _legend(figure, by_step, few)
    return figure


def gpu_timeline(summary: SweepSummary, segments: Sequence[Segment]) -> Figure:
    """Draw the segments on each GPU, one row a GPU and one bar a segment.

    A bar has its trial's colour, and its number where it fits; a red edge marks a preemption; the
    best trial's bars have a dark frame. A segment without an end reaches to the end of the picture.
    """
    gpus = sorted({gpu for s in segments for gpu in s.gpus})
    figure, (axes,) = figure_of(13.0, min(14.0, 1.4 + 0.42 * max(1, len(gpus))), columns=1)
    origin_s = min((s.start_s for s in segments), default=0.0)
    end_s = max((s.end_s or s.start_s for s in segments), default=origin_s + 1.0)
    end_s = max(end_s, origin_s + 1e-3)
    unit, unit_s = unit_of(end_s - origin_s)
    bars = [_bar(s, gpus.index(gpu), origin_s, end_s, unit_s) for s in segments for gpu in s.gpus]
    _draw_bars(axes, bars, (end_s - origin_s) / unit_s, summary.best.number if summary.best else -1)
    axes.set_xlim(0, (end_s - origin_s) / unit_s)
    axes.set_ylim(len(gpus) - 0.5 if gpus else 0.5, -0.5)
    axes.set_yticks(range(len(gpus)), [f"GPU {gpu}" for gpu in gpus])
    axes.set_xlabel(f"time since the first segment ({unit})")
    axes.grid(axis="y", visible=False)
    if not segments:
        say_empty(axes, "No segment has been recorded.")
    return figure


@dataclass(frozen=True, slots=True)
class _Bar:
    """A segment on a row of the timeline, in the units of its axis."""

    trial: int
    row: int
    left: float
    right: float
    preempted: bool


def _bar(segment: Segment, row: int, origin_s: float, end_s: float, unit_s: float) -> _Bar:
    left = (segment.start_s - origin_s) / unit_s
    right = ((segment.end_s if segment.end_s is not None else end_s) - origin_s) / unit_s
    return _Bar(segment.trial, row, left, right, segment.outcome == "preempted")


def _draw_bars(axes: Axes, bars: Sequence[_Bar], whole: float, best: int) -> None:
    for wanted_best in (False, True):  # the best trial's frames are drawn on top
        chosen = [b for b in bars if (b.trial == best) == wanted_best]
        axes.barh(
            [b.row for b in chosen],
            [max(b.right - b.left, whole / 2_000) for b in chosen],
            left=[b.left for b in chosen],
            height=0.78,
            color=[colour_of(b.trial) for b in chosen],
            edgecolor=DARK if wanted_best else "white",
            linewidth=1.4 if wanted_best else 0.4,
            rasterized=len(bars) > _MOST_SHAPES,
        )
    cut = [b for b in bars if b.preempted]
    rows = [b.row for b in cut]
    ends = [b.right for b in cut]
    axes.vlines(ends, [r - 0.39 for r in rows], [r + 0.39 for r in rows], RED, linewidth=1.4)
    for bar in bars if len(bars) <= _MOST_SHAPES else ():
        if bar.right - bar.left > whole * 0.0075 * len(str(bar.trial)):
            middle = (bar.left + bar.right) / 2
            place: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 7.5}
            axes.text(middle, bar.row, str(bar.trial), color=_text_colour(bar.trial), **place)
    axes.set_title(
        "number: trial   ·   red edge: preempted   ·   dark frame: best trial",
        fontsize=9,
        color=TEXT,
        loc="left",
    )


def _text_colour(number: int) -> str:
    """Return a colour of text that can be read on the trial's colour."""
    red, green, blue = colour_of(number)
    return "black" if 0.299 * red + 0.587 * green + 0.114 * blue > 0.55 else "white"


def _style(number: int, is_best: bool, few: bool) -> dict[str, Any]:
    if is_best:
        label = f"trial {number} (best)"
        from matplotlib.patheffects import withStroke

        frame = [withStroke(linewidth=4.4, foreground=DARK)]
        look = {"color": colour_of(number), "linewidth": 2.6, "path_effects": frame}
        return {**look, "zorder": 5, "label": label}
    return {
        "color": colour_of(number),
        "linewidth": 1.3 if few else 0.8,
        "alpha": 0.9 if few else 0.6,
        "zorder": 2,
        "label": f"trial {number}",
    }


def _draw_together(axes: Axes, lines: Sequence[tuple[int, Sequence[tuple[float, float]]]]) -> None:
    """Draw lines of trials as one shape: a shape for each of thousands takes minutes.

    More than `_MOST_CURVES` are rasterised.
    """
    from matplotlib.collections import LineCollection

    if not lines:
        return
    look: dict[str, Any] = {"alpha": 0.6, "zorder": 2, "rasterized": len(lines) > _MOST_CURVES}
    colours = [colour_of(number) for number, _ in lines]
    axes.add_collection(
        LineCollection([list(line) for _, line in lines], colors=colours, linewidths=0.8, **look)
    )
    dots = [(colour_of(number), *line[0]) for number, line in lines if len(line) == 1]
    if dots:
        axes.scatter(
            [d[1] for d in dots], [d[2] for d in dots], s=9, c=[d[0] for d in dots], **look
        )
    axes.autoscale_view()


def _ring_together(axes: Axes, places: Mapping[int, Sequence[tuple[float, float]]]) -> None:
    """Draw small rings where trials were preempted, all as one shape."""
    rings = [(colour_of(number), *place) for number, of in places.items() for place in of]
    if not rings:
        return
    axes.scatter(
        [r[1] for r in rings], [r[2] for r in rings], s=_SMALL, linewidths=_edge(_SMALL), zorder=3,
        facecolors="white", edgecolors=[r[0] for r in rings], rasterized=len(places) > _MOST_CURVES,
    )  # fmt: skip


def _cuts(points: CurvePoints, segments: Sequence[Segment]) -> list[tuple[float, float]]:
    """Return the points of a curve by step at which a segment before the last one ended."""
    ends = {s.last_step for s in segments[:-1]}
    return [(p[0], p[1]) for p in points if p[0] in ends]


def _draw_by_step(
    axes: Axes, points: CurvePoints, segments: Sequence[Segment], style: dict[str, Any]
) -> None:
    axes.plot([p[0] for p in points], [p[1] for p in points], **style, **_dot(points))
    _ring(axes, _cuts(points, segments), style)


def _draw_by_time(
    axes: Axes, placed: Sequence[Sequence[tuple[float, float]]], style: dict[str, Any]
) -> None:
    for stretch in placed:
        axes.plot([x for x, _ in stretch], [y for _, y in stretch], **style, **_dot(stretch))
    quiet = {**style, "linestyle": ":", "linewidth": 0.9, "alpha": 0.6}
    quiet |= {"label": None, "path_effects": None}
    for before, after in pairwise(placed):
        axes.plot([before[-1][0], after[0][0]], [before[-1][1], after[0][1]], **quiet)
    _ring(axes, [stretch[-1] for stretch in placed[:-1]], style)


def _dot(points: Sequence[object]) -> dict[str, Any]:
    """Return a marker for a line of one point, which would be invisible."""
    return {"marker": "o", "markersize": 3} if len(points) == 1 else {}


def _edge(size: float) -> float:
    return 0.04 * float(size**0.5) + 0.6


def _ring(axes: Axes, places: Sequence[tuple[float, float]], style: dict[str, Any]) -> None:
    if not places:
        return
    xs, ys = [x for x, _ in places], [y for _, y in places]
    look: dict[str, Any] = {"facecolors": "white", "edgecolors": [style["color"]]}
    axes.scatter(xs, ys, s=_LARGE, linewidths=_edge(_LARGE), zorder=6, **look)


def _stretches(points: CurvePoints, segments: Sequence[Segment]) -> list[CurvePoints]:
    """Split a curve where a new segment begins."""
    starts = sorted(s.start_s for s in segments)
    stretches: dict[int, list[tuple[int, float, int]]] = defaultdict(list)
    for point in sorted(points, key=lambda p: p[2]):
        stretches[sum(start <= point[2] / 1_000 for start in starts)].append(point)
    return [tuple(stretches[i]) for i in sorted(stretches)]


def _finish_curves(
    summary: SweepSummary, drawn: Mapping[int, CurvePoints], both: Sequence[Axes], unit: str
) -> None:
    both[0].locator_params(axis="x", integer=True)
    values = [p[1] for points in drawn.values() for p in points]
    spread = is_wide(values)
    for axes, label in zip(both, ("step", f"time since the first segment ({unit})"), strict=True):
        axes.set_xlabel(label)
        axes.set_ylabel(plain(summary.metric))
        if spread:
            axes.set_yscale("log")
        if not values:
            say_empty(axes, f"No trial has reported {plain(summary.metric)}.")


def _legend(figure: Figure, axes: Axes, few: bool) -> None:
    handles, labels = axes.get_legend_handles_labels()
    pairs = dict(zip(labels, handles, strict=True))
    if not few:
        pairs = {label: handle for label, handle in pairs.items() if "best" in label}
    names = sorted(pairs, key=lambda label: int(label.split()[1]))
    figure.legend(
        [pairs[n] for n in names],
        names,
        loc="outside right center",
        frameon=False,
        fontsize=8.5,
        title="ring: stopped, resumed later",
        title_fontsize=8.5,
    )


def _thin(points: CurvePoints, segments: Sequence[Segment]) -> CurvePoints:
    ends = {s.last_step for s in segments if s.last_step is not None}
    return downsample(points, _MOST_POINTS, ends)


def _finite(points: CurvePoints) -> CurvePoints:
    return tuple(p for p in points if abs(p[1]) < TOO_GREAT)


def _by_trial(segments: Sequence[Segment]) -> dict[int, list[Segment]]:
    by_trial: dict[int, list[Segment]] = defaultdict(list)
    for segment in sorted(segments, key=lambda s: s.start_s):
        by_trial[segment.trial].append(segment)
    return by_trial


def _origin_s(curves: Iterable[CurvePoints], segments: Sequence[Segment]) -> float:
    firsts = [p[2] / 1_000 for points in curves for p in points]
    return min([s.start_s for s in segments] or firsts or [0.0])


def _end_s(curves: Iterable[CurvePoints], segments: Sequence[Segment]) -> float:
    lasts = [p[2] / 1_000 for points in curves for p in points]
    return max(lasts + [s.end_s for s in segments if s.end_s is not None] or [1.0])


def measured_course(
    summary: SweepSummary,
    curves: Mapping[int, CurvePoints],
    segments: Sequence[Segment],
    origin_s: float,
) -> BestSoFar:
    """Return the best value so far of the sweep itself, without trials that cannot be the best.

    `origin_s`: the sweep's start in Unix seconds. A segment without an end lasts until the sweep's
    end.
    """
    never = {t.number for t in summary.trials if not t.can_be_best}
    maximize = summary.direction == "maximize"
    able = (points for number, points in curves.items() if number not in never)
    seen = [better for points in able for better in _improvements(points, origin_s, maximize)]
    end_s = origin_s + summary.wall_seconds
    held: list[GpuUse] = [
        (
            s.start_s - origin_s,
            max(s.start_s, end_s if s.end_s is None else s.end_s) - origin_s,
            len(s.gpus),
        )
        for s in segments
    ]
    return BestSoFar.from_values(seen, held, maximize=maximize)


def _improvements(
    points: CurvePoints, origin_s: float, maximize: bool
) -> Iterator[tuple[float, float]]:
    """Yield the values of a curve, with their times, that are its best so far.

    Of 50,000,000 values of a sweep no more than these need to be held at once.
    """
    sign, lowest = -1.0 if maximize else 1.0, inf
    values = ((ms / 1_000 - origin_s, value) for _, value, ms in points if abs(value) < TOO_GREAT)
    for at_s, value in sorted(values, key=itemgetter(0)):
        if sign * value < lowest:
            lowest = sign * value
            yield at_s, value


def regret_curves(course: BestSoFar, background: Background, *, direction: str) -> Figure:
    """Draw the regret of the sweep and of its replays over time, and over GPU-seconds held.

    Regret is the distance from the sweep's own best value; 0 is drawn at the bottom. The band of a
    replay with several simulations reaches from their minimum to their maximum. Raise
    NothingToDrawError when no value was reported.
    """
    if not course.improvements:
        raise NothingToDrawError("No trial that can be the best has reported a value.")
    best = course.improvements[-1].value
    sign = -1.0 if direction == "maximize" else 1.0
    every = [course, *(c for a in background.alternatives for c in a.courses)]
    most = max((sign * (f.value - best) for c in every for f in c.improvements), default=0.0)
    floor = most * REGRET_FLOOR if most > 0 else REGRET_FLOOR
    figure, both = figure_of(13.0, 4.8, columns=2)
    unit, unit_s = unit_of(max(c.end_s for c in every))
    for axes, by_gpu, label in (
        (both[0], False, f"time since the sweep's start ({unit})"),
        (both[1], True, f"GPU time held by then (GPU-{unit})"),
    ):
        scale = _RegretScale(best, sign, floor, by_gpu, unit_s)
        for colour, alternative in zip(_ALTERNATIVE_COLOURS, background.alternatives, strict=False):
            _draw_alternative(axes, alternative, scale, colour)
        steps = scale.steps(course)
        name = f"this sweep ({background.policy or 'its policy'})"
        xs, ys = zip(*steps, strict=True)
        axes.step(xs, ys, where="post", color=DARK, linewidth=2.0, label=name, zorder=5)
        axes.set_yscale("log")
        axes.set_ylim(floor, max(most, floor * 10) * 1.5)
        axes.set_xlim(left=0.0)
        axes.set_xlabel(label)
        axes.set_ylabel("distance to the sweep's best value")
    both[0].legend(frameon=False, fontsize=8.5)
    return figure


class _RegretScale:
    """Converts improvements to the steps of a line on one of the two axes."""

    def __init__(self, best: float, sign: float, floor: float, by_gpu: bool, unit_s: float) -> None:
        self._best, self._sign, self._floor = best, sign, floor
        self._by_gpu, self._unit_s = by_gpu, unit_s

    def steps(self, course: BestSoFar) -> Steps:
        """Return the line's corners, up to the end of the course."""
        corners = [(self._x(fall), self._y(fall)) for fall in course.improvements]
        end = (course.end_gpu_s if self._by_gpu else course.end_s) / self._unit_s
        return [*corners, (max(end, corners[-1][0]), corners[-1][1])] if corners else []

    def _x(self, fall: Improvement) -> float:
        return (fall.gpu_s if self._by_gpu else fall.at_s) / self._unit_s

    def _y(self, fall: Improvement) -> float:
        return max(self._floor, self._sign * (fall.value - self._best))


def _draw_alternative(
    axes: Axes, alternative: Alternative, scale: _RegretScale, colour: str
) -> None:
    lines = [steps for course in alternative.courses if (steps := scale.steps(course))]
    if not lines:
        return
    name = f"replayed: {alternative.policy}"
    if len(lines) == 1:
        xs, ys = zip(*lines[0], strict=True)
        axes.step(xs, ys, where="post", color=colour, linewidth=1.4, label=name)
        return
    grid, low, high = band(lines)
    axes.fill_between(
        grid,
        low,
        high,
        step="post",
        color=colour,
        alpha=0.28,
        linewidth=0,
        label=f"{name} (bounds)",
    )
    axes.step(grid, low, where="post", color=colour, linewidth=0.8)
    axes.step(grid, high, where="post", color=colour, linewidth=0.8)


def band(lines: Sequence[Steps]) -> tuple[list[float], list[float], list[float]]:
    """Return the x of all corners, once every line has begun, with their minimum and maximum.

    A line keeps its last value after its end.
    """
    begin = max(line[0][0] for line in lines)
    grid = sorted({begin, *(x for line in lines for x, _ in line if x >= begin)})
    stride = -(-len(grid) // _MOST_REGRET_STEPS)
    grid = [*grid[:-1:stride], grid[-1]] if len(grid) > 1 else grid
    values = [[value_at(line, x) for line in lines] for x in grid]
    return grid, [min(v) for v in values], [max(v) for v in values]


def value_at(line: Sequence[tuple[float, float]], x: float) -> float:
    """Return the value of a step function at `x`, which is not before its first corner."""
    return line[bisect_right(line, (x, inf)) - 1][1]
