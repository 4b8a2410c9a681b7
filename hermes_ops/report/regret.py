"""Regret: the distance of the best value so far from the sweep's best, over time and GPU time."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from math import inf
from typing import TYPE_CHECKING

from hermes_ops.core.summary import CurvePoints, Segment, SweepSummary
from hermes_ops.report.background import Alternative, Background, BestSoFar, GpuUse, Improvement
from hermes_ops.report.canvas import DARK, TOO_GREAT, NothingToDrawError, figure_of, unit_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Steps = list[tuple[float, float]]
_COLOURS = ("#d9822b", "#3b6fb5", "#7a4fa3", "#2f8f5b")  # of the alternatives, in their order
FLOOR = 1e-4  # of the largest regret; a logarithmic axis has no place for 0
_MOST_STEPS = 600


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
    seen = [
        (ms / 1_000 - origin_s, value)
        for number, points in curves.items()
        if number not in never
        for _, value, ms in points
        if abs(value) < TOO_GREAT
    ]
    end_s = origin_s + summary.wall_seconds
    held: list[GpuUse] = [
        (
            s.start_s - origin_s,
            max(s.start_s, end_s if s.end_s is None else s.end_s) - origin_s,
            len(s.gpus),
        )
        for s in segments
    ]
    return BestSoFar.from_values(seen, held, maximize=summary.direction == "maximize")


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
    floor = most * FLOOR if most > 0 else FLOOR
    figure, both = figure_of(13.0, 4.8, columns=2)
    unit, unit_s = unit_of(max(c.end_s for c in every))
    for axes, by_gpu, label in (
        (both[0], False, f"time since the sweep's start ({unit})"),
        (both[1], True, f"GPU time held by then (GPU-{unit})"),
    ):
        scale = _Scale(best, sign, floor, by_gpu, unit_s)
        for colour, alternative in zip(_COLOURS, background.alternatives, strict=False):
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


class _Scale:
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


def _draw_alternative(axes: Axes, alternative: Alternative, scale: _Scale, colour: str) -> None:
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
    stride = -(-len(grid) // _MOST_STEPS)
    grid = [*grid[:-1:stride], grid[-1]] if len(grid) > 1 else grid
    values = [[value_at(line, x) for line in lines] for x in grid]
    return grid, [min(v) for v in values], [max(v) for v in values]


def value_at(line: Sequence[tuple[float, float]], x: float) -> float:
    """Return the value of a step function at `x`, which is not before its first corner."""
    return line[bisect_right(line, (x, inf)) - 1][1]
