"""Pictures of simulations, as PNG: completion times, who held which GPU, regret."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from hermes_ops.core.model import JobId
from hermes_ops.report.canvas import DARK, RED, TEXT, figure_of, is_wide, png, say_empty, unit_of
from hermes_ops.report.figures import REGRET_FLOOR, Colour, colour_of, value_at
from hermes_ops.simulator.metrics import best_work
from hermes_ops.simulator.workload import SimulationRun

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Steps = Sequence[tuple[float, float]]
Array = NDArray[np.float64]
MOST_BARS = 20_000  # more are thinner than a pixel: the GPUs in use are drawn instead
MOST_NAMED = 1_500


def cdf(values: Iterable[float]) -> tuple[list[float], list[float]]:
    """Return the values in ascending order, each with the part of them that is no larger."""
    xs = sorted(values)
    return xs, [rank / len(xs) for rank in range(1, len(xs) + 1)]


def completion_cdf(completions_s: Mapping[str, Sequence[float]]) -> bytes:
    """Draw the part of the jobs that has completed over time, one line a policy."""
    figure, (axes,) = figure_of(8.0, 4.6, columns=1)
    everything = [v for values in completions_s.values() for v in values]
    unit, unit_s = unit_of(max(everything, default=1.0))
    for number, (name, values) in enumerate(completions_s.items()):
        xs, ys = cdf(values)
        axes.step([x / unit_s for x in xs], ys, where="post", color=colour_of(number), label=name)
    if is_wide([v for v in everything if v > 0]):
        axes.set_xscale("log")
    axes.set_ylim(0, 1.02)
    axes.set_xlabel(f"completion time: submission to end ({unit})")
    axes.set_ylabel("part of the finished jobs")
    _legend(axes, bool(everything), "No job finished.")
    return png(figure)


def regret_curves(regrets: Mapping[str, Sequence[Steps]]) -> bytes:
    """Draw the regret over time, one line a policy: the median over its seeds, and the quartiles.

    Regret 0 (the lowest loss of all is observed) lies on the bottom of the picture.
    """
    figure, (axes,) = figure_of(8.0, 4.6, columns=1)
    drawn = {name: [s for s in curves if s] for name, curves in regrets.items()}
    every = [point for curves in drawn.values() for steps in curves for point in steps]
    unit, unit_s = unit_of(max((at for at, _ in every), default=1.0))
    floor = max((value for _, value in every), default=1.0) * REGRET_FLOOR or REGRET_FLOOR
    end_s = max((at for at, _ in every), default=1.0)
    for number, (name, curves) in enumerate(drawn.items()):
        if curves:
            grid, quartiles = quartiles_over_time(curves, end_s)
            low, middle, high = (np.maximum(q, floor) for q in quartiles)
            colour = colour_of(number)
            axes.step(grid / unit_s, middle, where="post", color=colour, label=name)
            if len(curves) > 1:
                axes.fill_between(
                    grid / unit_s, low, high, step="post", color=colour, alpha=0.13, linewidth=0
                )
    axes.set_yscale("log")
    axes.set_ylim(bottom=floor)
    axes.set_xlabel(f"time since the first submission ({unit})")
    axes.set_ylabel("regret: lowest loss seen − lowest of all")
    _legend(axes, bool(every), "No loss was seen.")
    return png(figure)


def quartiles_over_time(curves: Sequence[Steps], end_s: float) -> tuple[Array, Array]:
    """Return the times of all steps once every seed has one, with three quartiles at each."""
    begin_s = max(steps[0][0] for steps in curves)
    inside = {at for steps in curves for at, _ in steps if begin_s <= at <= end_s}
    grid = np.array(sorted(inside | {begin_s, max(begin_s, end_s)}))
    values = [[value_at(steps, at_s) for at_s in grid] for steps in curves]
    return grid, np.percentile(np.array(values), (25, 50, 75), axis=0)


def gpu_timeline(run: SimulationRun) -> bytes:
    """Draw the segments on each GPU: a row a GPU, a bar a segment, in the colour of its job.

    A red edge marks a preemption; the bars of the best trial have a dark frame. With too many
    segments to distinguish, the number of GPUs in use is drawn.
    """
    bars = sum(len(s.gpus) for s in run.segments)
    rows = len(run.gpus)
    begin_s = min((w.submitted_s for w in run.workload.jobs), default=0.0)
    span_s = max((s.end_s for s in run.segments), default=begin_s + 1.0) - begin_s
    unit, unit_s = unit_of(span_s)
    few = bars <= MOST_BARS
    figure, (axes,) = figure_of(13.0, min(14.0, 1.4 + 0.3 * rows) if few else 4.6, columns=1)
    if few:
        _draw_bars(axes, run, begin_s, unit_s)
        axes.set_ylim(rows - 0.5, -0.5)
        axes.set_ylabel("GPU")
        axes.locator_params(axis="y", integer=True)
    else:
        times, counts = in_use(run)
        axes.fill_between((times - begin_s) / unit_s, counts, step="post", color=colour_of(0))
        axes.set_ylim(0, rows)
        axes.set_ylabel("GPUs in use")
    axes.set_xlim(0, span_s / unit_s)
    axes.set_xlabel(f"time since the first submission ({unit})")
    return png(figure)


def in_use(run: SimulationRun) -> tuple[Array, Array]:
    """Return the times at which the number of GPUs in use changes, and the new numbers."""
    changes: dict[float, int] = {}
    for segment in run.segments:
        changes[segment.begin_s] = changes.get(segment.begin_s, 0) + len(segment.gpus)
        changes[segment.end_s] = changes.get(segment.end_s, 0) - len(segment.gpus)
    times = sorted(changes)
    return np.array(times), np.array(list(accumulate(changes[t] for t in times)))


def _draw_bars(axes: Axes, run: SimulationRun, begin_s: float, unit_s: float) -> None:
    from matplotlib.collections import PolyCollection

    numbers = {o.work.id: n for n, o in enumerate(run.outcomes)}
    row_of = {gpu.index: row for row, gpu in enumerate(run.gpus)}
    best = best_work(run.workload)
    shapes: list[tuple[tuple[float, float], ...]] = []
    colours: list[Colour] = []
    edges: list[str] = []
    cuts: list[tuple[float, int]] = []
    for segment in run.segments:
        left, right = ((at_s - begin_s) / unit_s for at_s in (segment.begin_s, segment.end_s))
        for row in (row_of[gpu] for gpu in segment.gpus):
            top, bottom = row - 0.4, row + 0.4
            shapes.append(((left, top), (right, top), (right, bottom), (left, bottom)))
            colours.append(colour_of(numbers[segment.job]))
            edges.append(DARK if best is not None and segment.job == best.id else "white")
            if segment.outcome == "preempted":
                cuts.append((right, row))
    axes.add_collection(
        PolyCollection(shapes, facecolors=colours, edgecolors=edges, linewidths=0.5)
    )
    rows = [row for _, row in cuts]
    tops, bottoms = [row - 0.4 for row in rows], [row + 0.4 for row in rows]
    axes.vlines([at for at, _ in cuts], tops, bottoms, RED, linewidth=1.2)
    if len(shapes) <= MOST_NAMED:
        _name_bars(axes, run, numbers, begin_s, unit_s)
    text = "number: job in order of submission   ·   red edge: preempted"
    text += "   ·   dark frame: best trial" if best is not None else ""
    axes.set_title(text, fontsize=9, color=TEXT, loc="left")


def _name_bars(
    axes: Axes, run: SimulationRun, numbers: Mapping[JobId, int], begin_s: float, unit_s: float
) -> None:
    """Write the job's number into each bar that is wide enough for it."""
    row_of = {gpu.index: row for row, gpu in enumerate(run.gpus)}
    whole_s = max(s.end_s for s in run.segments) - begin_s if run.segments else 0.0
    for segment in run.segments:
        text = str(numbers[segment.job])
        if segment.end_s - segment.begin_s > whole_s * 0.0075 * len(text):
            middle = ((segment.begin_s + segment.end_s) / 2 - begin_s) / unit_s
            for row in (row_of[gpu] for gpu in segment.gpus):
                axes.text(middle, row, text, ha="center", va="center", fontsize=7, clip_on=True)


def _legend(axes: Axes, any_line: bool, otherwise: str) -> None:
    if any_line:
        axes.legend(frameon=False, fontsize=8.5)
    else:
        say_empty(axes, otherwise)
