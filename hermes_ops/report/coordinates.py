"""Parallel coordinates: each trial one line through its hyper-parameters to its best value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from hermes_ops.core.summary import SweepSummary, TrialSummary
from hermes_ops.report.canvas import DARK, TEXT, NothingToDrawError, figure_of, plain
from hermes_ops.report.parameters import Parameter, axes_of, parameter_of, valued

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


MOST_AXES = 12
_ABSENT = -0.12  # the height of trials that lack a parameter


def parallel_coordinates(summary: SweepSummary) -> Figure:
    """Draw the trials that have a value; the better, the darker, and on top of the others.

    At most 12 parameters are drawn: those that vary, in the order of the configuration. A trial
    that lacks one crosses its axis at the bottom, at "not set". Raises NothingToDrawError.
    """
    trials = valued(summary)
    if not trials:
        raise NothingToDrawError(f"No trial has reported {summary.metric}.")
    varying = [p for p in axes_of(trials, summary) if p.varies or len(p.numbers) < len(trials)]
    if not varying:
        raise NothingToDrawError("All trials with a value have the same configuration.")
    objective = parameter_of(summary.metric, {t.number: t.best for t in trials})
    columns = [*varying[:MOST_AXES], objective]
    figure, (axes,) = figure_of(13.0, 5.2, columns=1)
    _draw_axes(axes, columns, {t.number for t in trials})
    best = summary.best.number if summary.best is not None else None
    _draw_lines(axes, columns, trials, _goodness(summary, trials, objective), best)
    return figure


def _goodness(
    summary: SweepSummary, trials: Sequence[TrialSummary], objective: Parameter
) -> Mapping[int, float]:
    """How good each trial's value is, from 0 (the worst) to 1."""
    places = {t.number: objective.position(t.number) or 0.0 for t in trials}
    return places if summary.direction == "maximize" else {n: 1.0 - p for n, p in places.items()}


def _draw_axes(axes: Axes, columns: Sequence[Parameter], trials: set[int]) -> None:
    axes.grid(visible=False)
    axes.spines[["left", "bottom"]].set_visible(False)
    axes.set_yticks([])
    axes.set_xlim(-0.25, len(columns) - 0.4)
    axes.set_ylim(-0.2, 1.08)
    axes.set_xticks(range(len(columns)), [plain(c.name, 24) for c in columns], color=DARK)
    axes.tick_params(axis="x", length=0)
    for x, column in enumerate(columns):
        axes.plot([x, x], [0, 1], color=TEXT, linewidth=1.0, zorder=4)
        low, high = min(column.numbers.values()), max(column.numbers.values())
        for place, text in column.ticks():
            y = 0.5 if low == high else (place - low) / (high - low)
            _say(axes, x, y, plain(text, 16))
        if trials - column.numbers.keys():
            _say(axes, x, _ABSENT, "not set")


def _say(axes: Axes, x: float, y: float, text: str) -> None:
    box = {"facecolor": "white", "alpha": 0.75, "edgecolor": "none", "pad": 0.6}
    axes.text(x + 0.02, y, text, fontsize=8, color=TEXT, va="center", zorder=6, bbox=box)


def _draw_lines(
    axes: Axes,
    columns: Sequence[Parameter],
    trials: Sequence[TrialSummary],
    goodness: Mapping[int, float],
    best: int | None,
) -> None:
    from matplotlib import colormaps
    from matplotlib.collections import LineCollection

    ordered = sorted(trials, key=lambda t: (t.number == best, goodness[t.number], -t.number))
    heights = [[_height(c, t.number) for c in columns] for t in ordered]
    map_of = colormaps["viridis_r"]
    parts = [[(x, y) for x, y in enumerate(line)] for line in heights]
    found = LineCollection(
        parts,
        colors=[map_of(goodness[t.number]) for t in ordered],
        linewidths=[2.4 if t.number == best else 1.1 for t in ordered],
        alpha=0.85,
    )
    axes.add_collection(found)


def _height(column: Parameter, trial: int) -> float:
    place = column.position(trial)
    return _ABSENT if place is None else place
