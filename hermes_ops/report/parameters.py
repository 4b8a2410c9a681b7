"""Hyper-parameters as axes: where the value of each trial stands, whatever its type."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite, log10

from hermes_ops.core.summary import SweepSummary, TrialSummary
from hermes_ops.report.canvas import TOO_GREAT, is_wide
from hermes_ops.report.table import parameters, shown

_MOST_TICKS = 12


@dataclass(frozen=True, slots=True)
class Parameter:
    """One hyper-parameter over the trials that have it.

    `numbers` by trial: the value, its logarithm to base 10 if `is_log`, or of a categorical one
    the place of the value in `categories`. A trial without the parameter is not among them.
    """

    name: str
    numbers: Mapping[int, float]
    categories: tuple[str, ...] = ()
    is_log: bool = False

    @property
    def varies(self) -> bool:
        """False when every trial that has it has the same."""
        return len(set(self.numbers.values())) > 1

    def position(self, trial: int) -> float | None:
        """Where the trial stands on the axis, in [0, 1]; None when it lacks the parameter."""
        number = self.numbers.get(trial)
        if number is None:
            return None
        low, high = min(self.numbers.values()), max(self.numbers.values())
        return 0.5 if low == high else (number - low) / (high - low)

    def ticks(self) -> list[tuple[float, str]]:
        """Labels for the axis: place among `numbers`, text; at most 12."""
        if self.categories:
            stride = -(-len(self.categories) // _MOST_TICKS)
            return [(float(i), c) for i, c in enumerate(self.categories) if i % stride == 0]
        low, high = min(self.numbers.values()), max(self.numbers.values())
        places = [low + (high - low) * part / 4 for part in range(5)] if high > low else [low]
        return [(place, f"{10**place if self.is_log else place:.3g}") for place in places]


def valued(summary: SweepSummary) -> tuple[TrialSummary, ...]:
    """Return the trials whose best value counts: those with one that did not fail."""
    return tuple(
        t
        for t in summary.trials
        if t.state != "failed" and t.best is not None and abs(t.best) < TOO_GREAT
    )


def axes_of(trials: Sequence[TrialSummary], summary: SweepSummary) -> tuple[Parameter, ...]:
    """Return the parameters that any of the trials has, in the order of the configurations."""
    configs = {t.number: t.config or {} for t in trials}
    found = (
        parameter_of(name, {n: c[name] for n, c in configs.items() if c.get(name) is not None})
        for name in parameters(summary)
    )
    return tuple(p for p in found if p.numbers)


def parameter_of(name: str, values: Mapping[int, object]) -> Parameter:
    """Return the parameter with these values by trial.

    It is a number if all its values are finite numbers, on a logarithmic scale if they are above 0
    and far apart; anything else (text, truth values, lists, a mixture) is a category, in the order
    of the text.
    """
    if all(is_number(value) for value in values.values()):
        numbers = {n: float(v) for n, v in values.items() if isinstance(v, int | float)}
        if is_wide(list(numbers.values())):
            return Parameter(name, {n: log10(v) for n, v in numbers.items()}, is_log=True)
        return Parameter(name, numbers)
    texts = {n: shown(value) for n, value in values.items()}
    categories = tuple(sorted(set(texts.values())))
    places = {text: float(place) for place, text in enumerate(categories)}
    return Parameter(name, {n: places[text] for n, text in texts.items()}, categories)


def is_number(value: object) -> bool:
    """Return whether a value has a place on an axis of numbers."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) < TOO_GREAT and isfinite(value)
