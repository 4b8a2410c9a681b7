"""Which hyper-parameters decided over the result, as far as the trials can tell."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from hermes_ops.core.summary import SweepSummary, TrialSummary
from hermes_ops.report.canvas import DARK, NothingToDrawError, figure_of, plain
from hermes_ops.report.parameters import Parameter, axes_of, valued

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LEAST_TRIALS = 10
FEW_TRIALS = 30
MOST_BARS = 20
_MOST_TRIALS = 1_000  # a forest of more takes minutes and says the same
_FOLDS, _REPEATS, _SHUFFLES, _TREES = 5, 2, 3, 60
_BLUE = "#3b6fb5"
Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Importance:
    """By how much the forest's R² on trials that it has not seen falls without the parameter.

    `low` and `high`: the least and the most of the ten forests.
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
        """How far to trust them."""
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

    A random forest predicts the rank of a trial's best value, so one diverged trial does not rule;
    a parameter that a trial lacks is missing data to it. It is judged on held-out trials alone:
    five folds, twice. Parameters that vary together share their importance. Seeded.
    Raises NothingToDrawError with fewer than ten trials with a value, or when nothing varies.

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
    varying = [p for p in axes_of(trials, summary) if p.varies or len(p.numbers) < len(trials)]
    ranks = _ranks(trials)
    if not varying or len(set(ranks)) < 2:
        what = "values are equal" if varying else "trials with a value have the same configuration"
        raise NothingToDrawError(f"All {what}.")
    folds, explained = _judge(_table(varying, trials), ranks)
    found = [
        Importance(p.name, float(of.mean()), float(of.min()), float(of.max()))
        for p, of in zip(varying, folds.T, strict=True)
    ]
    ordered = sorted(found, key=lambda i: (-i.mean, i.name))
    return Importances(len(trials), explained, tuple(ordered))


def _ranks(trials: Sequence[TrialSummary]) -> Array:
    from scipy.stats import rankdata

    ranks: Array = rankdata([t.best for t in trials])
    return ranks


def _table(parameters: Sequence[Parameter], trials: Sequence[TrialSummary]) -> Array:
    """A row a trial, a column a parameter; NaN where the trial lacks it."""
    rows = [[p.numbers.get(t.number, np.nan) for p in parameters] for t in trials]
    return np.array(rows, dtype=np.float64)


def _judge(table: Array, ranks: Array) -> tuple[Array, float]:
    """Importances, a row a fold and a column a parameter, and the mean R² of the folds."""
    from sklearn.ensemble import RandomForestRegressor
    from sklearn.inspection import permutation_importance
    from sklearn.model_selection import RepeatedKFold

    rows, explained = [], []
    splits = RepeatedKFold(n_splits=_FOLDS, n_repeats=_REPEATS, random_state=0)
    for seed, (known, unseen) in enumerate(splits.split(table)):
        forest = RandomForestRegressor(n_estimators=_TREES, random_state=seed, n_jobs=1)
        forest.fit(table[known], ranks[known])
        explained.append(float(forest.score(table[unseen], ranks[unseen])))
        found = permutation_importance(
            forest, table[unseen], ranks[unseen], n_repeats=_SHUFFLES, random_state=seed, n_jobs=1
        )
        rows.append(found.importances_mean)
    return np.array(rows), float(np.mean(explained))


def importance_bars(found: Importances) -> Figure:
    """Draw a bar a parameter, at most 20, with a whisker from the least to the most."""
    shown = found.found[:MOST_BARS]
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
