"""Slices: the best value of each trial against each hyper-parameter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hermes_ops.core.summary import SweepSummary, TrialSummary
from hermes_ops.report.canvas import (
    DARK,
    RED,
    NothingToDrawError,
    figure_of,
    is_wide,
    plain,
)
from hermes_ops.report.parameters import Parameter, axes_of, valued

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_SLICES = 16
_COLUMNS = 4
_BLUE = "#3b6fb5"


def slices(summary: SweepSummary) -> Figure:
    """Draw a panel a parameter, at most 16, one dot a trial that has both it and a value.

    A full dot is a trial that finished, a ring one that did not (its value is that of fewer
    steps), the red diamond the best one. Raises NothingToDrawError.
    """
    trials = valued(summary)
    if not trials:
        raise NothingToDrawError(f"No trial has reported {summary.metric}.")
    found = axes_of(trials, summary)[:MOST_SLICES]
    if not found:
        raise NothingToDrawError("The trials have no hyper-parameters.")
    columns = min(_COLUMNS, len(found))
    rows = -(-len(found) // columns)
    figure, panels = figure_of(13.0, 0.4 + 2.9 * rows, columns, rows)
    wide = is_wide([t.best for t in trials if t.best is not None])
    best = summary.best.number if summary.best is not None else None
    for index, (panel, parameter) in enumerate(zip(panels, found, strict=False)):
        _draw(panel, parameter, trials, best)
        panel.set_yscale("log" if wide else "linear")
        panel.set_ylabel(plain(summary.metric, 30) if index % columns == 0 else "")
    for panel in panels[len(found) :]:
        panel.set_visible(False)
    return figure


def _draw(
    axes: Axes, parameter: Parameter, trials: Sequence[TrialSummary], best: int | None
) -> None:
    places = parameter.numbers
    for shape, chosen in _looks(trials, best):
        with_it = [t for t in chosen if t.number in places]
        values = [t.best for t in with_it if t.best is not None]
        axes.scatter([places[t.number] for t in with_it], values, **shape)
    axes.set_xlabel(plain(parameter.name, 36))
    ticks = parameter.ticks()
    axes.set_xticks([at for at, _ in ticks], [plain(text, 12) for _, text in ticks])
    if parameter.categories:
        axes.set_xlim(-0.5, len(parameter.categories) - 0.5)
        axes.tick_params(axis="x", rotation=30 if len(ticks) > 3 else 0)


def _looks(
    trials: Sequence[TrialSummary], best: int | None
) -> tuple[tuple[dict[str, Any], list[TrialSummary]], ...]:
    """The three kinds of trials, each with its marks."""
    others = [t for t in trials if t.number != best]
    ring = {"s": 24, "facecolors": "white", "edgecolors": _BLUE, "linewidths": 1.1, "zorder": 2}
    dot = {"s": 24, "color": _BLUE, "alpha": 0.75, "linewidths": 0, "zorder": 3}
    diamond = {"s": 62, "marker": "D", "color": RED, "edgecolors": DARK, "zorder": 4}
    return (
        (ring, [t for t in others if t.state != "finished"]),
        (dot, [t for t in others if t.state == "finished"]),
        (diamond, [t for t in trials if t.number == best]),
    )
