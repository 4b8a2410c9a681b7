"""Plots over hyper-parameters: parallel coordinates, a slice a parameter, and their importance.

The importance for the result is estimated from the trials.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite, log10
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from hermes_ops.core.summary import SweepSummary, TrialSummary
from hermes_ops.report.canvas import (
    DARK,
    RED,
    TEXT,
    TOO_GREAT,
    NothingToDrawError,
    figure_of,
    is_wide,
    plain,
)
from hermes_ops.report.table import format_cell, parameters

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MOST_TICKS = 12


@dataclass(frozen=True, slots=True)
class ParameterAxis:
    """The axis of one hyper-parameter, for the trials that have it.

    `numbers` by trial: the value, its logarithm to base 10 if `is_log`, or the index of a
    categorical value in `categories`. Trials without the parameter are missing.
    """

    name: str
    numbers: Mapping[int, float]
    categories: tuple[str, ...] = ()
    is_log: bool = False

    @property
    def varies(self) -> bool:
        """True when the trials have different values."""
        return len(set(self.numbers.values())) > 1

    def position(self, trial: int) -> float | None:
        """Return the trial's position in [0, 1]; None when it lacks the parameter."""
        number = self.numbers.get(trial)
        if number is None:
            return None
        low, high = min(self.numbers.values()), max(self.numbers.values())
        return 0.5 if low == high else (number - low) / (high - low)

    def ticks(self) -> list[tuple[float, str]]:
        """Return at most 12 labels: position among `numbers`, and text."""
        if self.categories:
            stride = -(-len(self.categories) // _MOST_TICKS)
            return [(float(i), c) for i, c in enumerate(self.categories) if i % stride == 0]
        low, high = min(self.numbers.values()), max(self.numbers.values())
        places = [low + (high - low) * part / 4 for part in range(5)] if high > low else [low]
        return [(place, f"{10**place if self.is_log else place:.3g}") for place in places]


def valued(summary: SweepSummary) -> tuple[TrialSummary, ...]:
    """Return the trials that have a best value and did not fail."""
    return tuple(
        t
        for t in summary.trials
        if t.state != "failed" and t.best is not None and abs(t.best) < TOO_GREAT
    )


def axes_of(trials: Sequence[TrialSummary], summary: SweepSummary) -> tuple[ParameterAxis, ...]:
    """Return the parameters that any of the trials has, in the order of the configurations."""
    configs = {t.number: t.config or {} for t in trials}
    every = (
        parameter_axis(name, {n: c[name] for n, c in configs.items() if c.get(name) is not None})
        for name in parameters(summary)
    )
    return tuple(p for p in every if p.numbers)


def _varying(trials: Sequence[TrialSummary], summary: SweepSummary) -> tuple[ParameterAxis, ...]:
    """Return the parameters that differ between the trials, or that some of them lack."""
    every = axes_of(trials, summary)
    return tuple(p for p in every if p.varies or len(p.numbers) < len(trials))


def parameter_axis(name: str, values: Mapping[int, object]) -> ParameterAxis:
    """Return the parameter with these values by trial.

    The axis is numeric if all values are finite numbers, logarithmic if they are above 0 and far
    apart; anything else (text, booleans, lists, a mixture) is categorical, sorted as text.
    """
    if all(is_number(value) for value in values.values()):
        numbers = {n: float(v) for n, v in values.items() if isinstance(v, int | float)}
        if is_wide(list(numbers.values())):
            return ParameterAxis(name, {n: log10(v) for n, v in numbers.items()}, is_log=True)
        return ParameterAxis(name, numbers)
    texts = {n: format_cell(value) for n, value in values.items()}
    categories = tuple(sorted(set(texts.values())))
    places = {text: float(place) for place, text in enumerate(categories)}
    return ParameterAxis(name, {n: places[text] for n, text in texts.items()}, categories)


def is_number(value: object) -> bool:
    """Return whether a value has a position on a numeric axis."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) < TOO_GREAT and isfinite(value)


MOST_AXES = 12
_ABSENT = -0.12  # the height of trials that lack a parameter


def parallel_coordinates(summary: SweepSummary) -> Figure:
    """Draw the trials that have a value; better ones are darker and on top.

    At most 12 parameters are drawn: those that vary, in the order of the configuration. A trial
    that lacks one crosses its axis at the bottom, at "not set". Raise NothingToDrawError.
    """
    trials = valued(summary)
    if not trials:
        raise NothingToDrawError(f"No trial has reported {summary.metric}.")
    varying = _varying(trials, summary)
    if not varying:
        raise NothingToDrawError("All trials with a value have the same configuration.")
    objective = parameter_axis(summary.metric, {t.number: t.best for t in trials})
    columns = [*varying[:MOST_AXES], objective]
    figure, (axes,) = figure_of(13.0, 5.2, columns=1)
    _draw_axes(axes, columns, {t.number for t in trials})
    best = summary.best.number if summary.best is not None else None
    _draw_lines(axes, columns, trials, _goodness(summary, trials, objective), best)
    return figure


def _goodness(
    summary: SweepSummary, trials: Sequence[TrialSummary], objective: ParameterAxis
) -> Mapping[int, float]:
    """Return how good each trial's value is, from 0 (the worst) to 1."""
    places = {t.number: objective.position(t.number) or 0.0 for t in trials}
    return places if summary.direction == "maximize" else {n: 1.0 - p for n, p in places.items()}


def _draw_axes(axes: Axes, columns: Sequence[ParameterAxis], trials: set[int]) -> None:
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
    columns: Sequence[ParameterAxis],
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
    collection = LineCollection(
        parts,
        colors=[map_of(goodness[t.number]) for t in ordered],
        linewidths=[2.4 if t.number == best else 1.1 for t in ordered],
        alpha=0.85,
    )
    axes.add_collection(collection)


def _height(column: ParameterAxis, trial: int) -> float:
    place = column.position(trial)
    return _ABSENT if place is None else place


MOST_SLICES = 16
_COLUMNS = 4
_BLUE = "#3b6fb5"


def slices(summary: SweepSummary) -> Figure:
    """Draw a panel a parameter, at most 16, one dot a trial that has both it and a value.

    A dot is a finished trial, a ring one that did not finish (its value is of fewer steps), the red
    diamond the best one. Raise NothingToDrawError.
    """
    trials = valued(summary)
    if not trials:
        raise NothingToDrawError(f"No trial has reported {summary.metric}.")
    drawn = axes_of(trials, summary)[:MOST_SLICES]
    if not drawn:
        raise NothingToDrawError("The trials have no hyper-parameters.")
    columns = min(_COLUMNS, len(drawn))
    rows = -(-len(drawn) // columns)
    figure, panels = figure_of(13.0, 0.4 + 2.9 * rows, columns, rows)
    wide = is_wide([t.best for t in trials if t.best is not None])
    best = summary.best.number if summary.best is not None else None
    for index, (panel, parameter) in enumerate(zip(panels, drawn, strict=False)):
        _draw(panel, parameter, trials, best)
        panel.set_yscale("log" if wide else "linear")
        panel.set_ylabel(plain(summary.metric, 30) if index % columns == 0 else "")
    for panel in panels[len(drawn) :]:
        panel.set_visible(False)
    return figure


def _draw(
    axes: Axes, parameter: ParameterAxis, trials: Sequence[TrialSummary], best: int | None
) -> None:
    places = parameter.numbers
    for shape, chosen in _markers(trials, best):
        with_it = [t for t in chosen if t.number in places]
        values = [t.best for t in with_it if t.best is not None]
        axes.scatter([places[t.number] for t in with_it], values, **shape)
    axes.set_xlabel(plain(parameter.name, 36))
    ticks = parameter.ticks()
    axes.set_xticks([at for at, _ in ticks], [plain(text, 12) for _, text in ticks])
    if parameter.categories:
        axes.set_xlim(-0.5, len(parameter.categories) - 0.5)
        axes.tick_params(axis="x", rotation=30 if len(ticks) > 3 else 0)


def _markers(
    trials: Sequence[TrialSummary], best: int | None
) -> tuple[tuple[dict[str, Any], list[TrialSummary]], ...]:
    """Return the three kinds of trials, each with its marker."""
    others = [t for t in trials if t.number != best]
    ring = {"s": 24, "facecolors": "white", "edgecolors": _BLUE, "linewidths": 1.1, "zorder": 2}
    dot = {"s": 24, "color": _BLUE, "alpha": 0.75, "linewidths": 0, "zorder": 3}
    diamond = {"s": 62, "marker": "D", "color": RED, "edgecolors": DARK, "zorder": 4}
    return (
        (ring, [t for t in others if t.state != "finished"]),
        (dot, [t for t in others if t.state == "finished"]),
        (diamond, [t for t in trials if t.number == best]),
    )


LEAST_TRIALS = 10
FEW_TRIALS = 30
MOST_BARS = 20
_MOST_TRIALS = 1_000  # a forest of more takes minutes for the same result
_FOLDS, _REPEATS, _SHUFFLES, _TREES = 5, 2, 3, 60
Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Importance:
    """The fall of the forest's R² on unseen trials when the parameter is shuffled.

    `low` and `high`: the minimum and the maximum of the ten forests.
    """

    name: str
    mean: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Importances:
    """The importances, greatest first. `explained`: R² on unseen trials, 1 at best."""

    trials: int
    explained: float
    found: tuple[Importance, ...]

    @property
    def remark(self) -> str:
        """Return a sentence on how reliable the importances are."""
        parts = [
            f"The forest explains {max(0.0, self.explained):.0%} of the order of trials that it "
            f"has not seen (of {self.trials} trials)."
        ]
        if self.explained <= 0.1:
            parts.append("That is next to nothing: read no order into the bars.")
        if self.trials < FEW_TRIALS:
            parts.append(f"So few trials (fewer than {FEW_TRIALS}) tell little: the bars are weak.")
        return " ".join(parts)


def importances(summary: SweepSummary) -> Importances:
    """Return the permutation importance of each parameter that varies.

    A random forest predicts the rank of a trial's best value, so one diverged trial does not
    dominate; a parameter that a trial lacks is missing data. It is scored on held-out trials alone:
    five folds, twice. Parameters that vary together share their importance. Seeded.
    Raise NothingToDrawError with fewer than ten trials with a value, or when nothing varies.

    Source: Breiman, "Random Forests", Machine Learning 45, 2001, section 10; ranks, folds and
    repeats are our choice.
    """
    trials = valued(summary)
    if len(trials) < LEAST_TRIALS:
        raise NothingToDrawError(
            f"Too few trials: {len(trials)} have a value, and below {LEAST_TRIALS} an importance "
            "would be chance."
        )
    trials = trials[:: -(-len(trials) // _MOST_TRIALS)]
    varying = _varying(trials, summary)
    ranks = _ranks(trials)
    if not varying or len(set(ranks)) < 2:
        what = "values are equal" if varying else "trials with a value have the same configuration"
        raise NothingToDrawError(f"All {what}.")
    folds, explained = _judge(_table(varying, trials), ranks)
    unordered = [
        Importance(p.name, float(of.mean()), float(of.min()), float(of.max()))
        for p, of in zip(varying, folds.T, strict=True)
    ]
    ordered = sorted(unordered, key=lambda i: (-i.mean, i.name))
    return Importances(len(trials), explained, tuple(ordered))


def _ranks(trials: Sequence[TrialSummary]) -> Array:
    from scipy.stats import rankdata

    ranks: Array = rankdata([t.best for t in trials])
    return ranks


def _table(parameters: Sequence[ParameterAxis], trials: Sequence[TrialSummary]) -> Array:
    """Return a row a trial and a column a parameter; NaN where the trial lacks it."""
    rows = [[p.numbers.get(t.number, np.nan) for p in parameters] for t in trials]
    return np.array(rows, dtype=np.float64)


def _judge(table: Array, ranks: Array) -> tuple[Array, float]:
    """Return importances, a row a fold and a column a parameter, and the folds' mean R²."""
    from sklearn.ensemble import RandomForestRegressor
    from sklearn.inspection import permutation_importance
    from sklearn.model_selection import RepeatedKFold

    rows, explained = [], []
    splits = RepeatedKFold(n_splits=_FOLDS, n_repeats=_REPEATS, random_state=0)
    for seed, (training, unseen) in enumerate(splits.split(table)):
        forest = RandomForestRegressor(n_estimators=_TREES, random_state=seed, n_jobs=1)
        forest.fit(table[training], ranks[training])
        explained.append(float(forest.score(table[unseen], ranks[unseen])))
        permuted = permutation_importance(
            forest, table[unseen], ranks[unseen], n_repeats=_SHUFFLES, random_state=seed, n_jobs=1
        )
        rows.append(permuted.importances_mean)
    return np.array(rows), float(np.mean(explained))


def importance_bars(result: Importances) -> Figure:
    """Draw a bar a parameter, at most 20, with a whisker from the minimum to the maximum."""
    shown = result.found[:MOST_BARS]
    figure, (axes,) = figure_of(9.0, 1.2 + 0.4 * len(shown), columns=1)
    places = range(len(shown))
    axes.barh(places, [i.mean for i in shown], height=0.6, color=_BLUE, alpha=0.75)
    axes.hlines(places, [i.low for i in shown], [i.high for i in shown], color=DARK, linewidth=1.3)
    axes.set_yticks(places, [plain(i.name, 30) for i in shown])
    axes.set_ylim(len(shown) - 0.5, -0.5)
    axes.axvline(0.0, color=DARK, linewidth=0.8)
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("fall of R² on unseen trials when the parameter is shuffled")
    return figure
