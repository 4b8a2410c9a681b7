"""The space of an Optuna study, with the parameters that a value of a choice brings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution, CategoricalDistribution
    from optuna.trial import FrozenTrial

Decider = tuple[str, int]
"""A choice, and the place of one of its values."""


@dataclass(frozen=True, slots=True)
class StudySpace:
    """The parameters of a study, and by name the value of a choice that brings one.

    A value brings a parameter if the complete trials with that value are exactly those that have
    the parameter, and other trials have another value of the choice.
    """

    axes: Mapping[str, BaseDistribution]
    deciders: Mapping[str, Decider] = field(default_factory=dict)

    @classmethod
    def from_trials(
        cls, axes: Mapping[str, BaseDistribution], trials: Sequence[FrozenTrial]
    ) -> StudySpace:
        """Return the space of these complete trials."""
        having = {name: {t.number for t in trials if name in t.params} for name in axes}
        groups = _groups(axes, trials)
        deciders = {}
        for name, numbers in having.items():
            found = (d for d, group in groups.items() if group == numbers < having[d[0]])
            if (decider := next(found, None)) is not None:
                deciders[name] = decider
        return cls(axes, deciders)

    def value_of(self, decider: Decider) -> object:
        """Return the value of the choice."""
        return _choice(self.axes[decider[0]]).choices[decider[1]]

    def names_for(self, params: Mapping[str, Any]) -> set[str]:
        """Return the names that a trial with these values has."""
        return {name for name in self.axes if self._is_brought(name, params)}

    def _is_brought(self, name: str, params: Mapping[str, Any]) -> bool:
        if name not in self.deciders:
            return True
        choice, place = self.deciders[name]
        return choice in params and _place(self.axes[choice], params[choice]) == place

    def tree(
        self, parameters: Mapping[str, dict[str, Any]], names: Mapping[str, str]
    ) -> dict[str, Any]:
        """Return the space of a sweep file.

        `parameters`: those of the sweep file by name; `names`: what each is called there. The
        parameters are changed.
        """
        spaces: dict[Decider, dict[str, Any]] = {}
        for name, decider in self.deciders.items():
            spaces.setdefault(decider, {})[names[name]] = parameters[name]
        for (choice, place), space in spaces.items():
            values = parameters[choice]["values"]
            values[place] = {"value": values[place], "space": space}
        return {names[n]: p for n, p in parameters.items() if n not in self.deciders}


def _groups(
    axes: Mapping[str, BaseDistribution], trials: Sequence[FrozenTrial]
) -> dict[Decider, set[int]]:
    """Return the numbers of the trials that have each value of each choice."""
    from optuna.distributions import CategoricalDistribution

    groups: dict[Decider, set[int]] = {}
    for name, axis in axes.items():
        if isinstance(axis, CategoricalDistribution):
            for trial in (t for t in trials if name in t.params):
                place = _place(axis, trial.params[name])
                groups.setdefault((name, place), set()).add(trial.number)
    return groups


def _place(axis: BaseDistribution, value: object) -> int:
    return int(axis.to_internal_repr(value))


def _choice(axis: BaseDistribution) -> CategoricalDistribution:
    from optuna.distributions import CategoricalDistribution

    if not isinstance(axis, CategoricalDistribution):
        raise TypeError(f"{axis} is no choice")
    return axis
