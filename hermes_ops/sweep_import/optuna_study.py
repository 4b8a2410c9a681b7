"""Optuna studies: the space of their trials, and their best trials as known points.

The study is read by Optuna itself, an optional package. Nothing is written to its storage.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hermes_ops.database_address import with_driver
from hermes_ops.errors import HermesError
from hermes_ops.sweep_import.draft import (
    DEFAULT_MAX_EPOCHS,
    DEFAULT_MAX_TRIALS,
    Conversion,
    Draft,
    DraftOptions,
    choice_parameter,
    literal,
    option_arguments,
    quoted,
    range_parameter,
    refusal,
    valid_name,
    valid_parameter,
)

if TYPE_CHECKING:
    from optuna import Study
    from optuna.distributions import BaseDistribution
    from optuna.storages import BaseStorage
    from optuna.trial import FrozenTrial


def convert(source: str, options: DraftOptions) -> Draft:
    """Convert a study; `source` is a database URL, a SQLite file or a journal file."""
    place = _without_password(source)
    study = _study(_storage(source, place), place, options)
    return _StudyConversion(place, options, study).draft()


@dataclass(slots=True)
class _StudyConversion(Conversion):
    """One study on its way; `notes` grows as its parts are converted."""

    study: Study

    def draft(self) -> Draft:
        if len(self.study.directions) != 1:
            found = f"{len(self.study.directions)} objectives"
            fix = "make a sweep of one of them, the others as `metrics` with bounds"
            raise self.refused("the study", found, "one objective", fix)
        trials = self.study.get_trials(deepcopy=False)
        space = self._space(trials)
        names = {name: self.parameter_name(name, "the study's parameters") for name in space.axes}
        for name, valid in names.items():
            if name != valid:
                self.note(f"search.space.{valid}", f"was named {quoted(name)}")
        points = self._points(trials, space)
        search: dict[str, Any] = {
            "algorithm": "tpe",
            "max_trials": self.options.max_trials or max(len(trials), DEFAULT_MAX_TRIALS),
        }
        if points:
            search["points_to_evaluate"] = points
        if self.options.max_trials is None:
            self.note("search.max_trials", "as many as the study has trials, at least 20")
        parameters = {name: _parameter(axis) for name, axis in space.axes.items()}
        sweep = {
            "name": valid_name(self.options.name or self.study.study_name, "optuna"),
            "objective": self._objective(),
            "search": {**search, "space": space.tree(parameters, names)},
            "trial": {"command": self._command(list(names.values()))},
            "budget": {"max_epochs": self._max_epochs(trials)},
        }
        return Draft(self.source, "an Optuna study", sweep, tuple(self.notes))

    def _objective(self) -> dict[str, Any]:
        named = self.study.metric_names
        metric = self.options.metric or (named[0] if named else None)
        if metric is None:
            metric = "loss"
            text = "a study does not name what it returns; set it, or use --metric"
            self.note("objective.metric", text)
        return {"metric": metric, "direction": self.study.direction.name.lower()}

    def _command(self, names: list[str]) -> list[str]:
        script = self.options.script or "train.py"
        text = "a study's objective is a function: make it a script that takes these arguments"
        self.note("trial.command", f"{text} and prints its metric (name=value) each epoch")
        return ["python", literal(script), *option_arguments(names)]

    def _max_epochs(self, trials: Sequence[FrozenTrial]) -> int:
        """Return the number of steps that the longest trial has reported, counted from 0."""
        steps = [max(t.intermediate_values) for t in trials if t.intermediate_values]
        if self.options.max_epochs is not None:
            return self.options.max_epochs
        if steps:
            return max(steps) + 1
        self.note("budget.max_epochs", "the study reports no steps; set it, or use --max-epochs")
        return DEFAULT_MAX_EPOCHS

    def _space(self, trials: Sequence[FrozenTrial]) -> StudySpace:
        """Return the newest distribution of each parameter, in the order of first appearance."""
        axes: dict[str, BaseDistribution] = {}
        seen: Counter[str] = Counter()
        for trial in trials:
            for name, axis in trial.distributions.items():
                if name in axes and axes[name] != axis:
                    place = f"search.space.{valid_parameter(name)}"
                    self.note(place, "its range changed during the study; the newest is used")
                axes[name] = axis
                seen[name] += 1
        if not axes:
            found = "no trial with parameters"
            fix = "run the study first, or write the space by hand"
            raise self.refused("the study", found, "at least one", fix)
        space = StudySpace.from_trials(axes, [t for t in trials if t.state.name == "COMPLETE"])
        whole = sum(1 for trial in trials if trial.distributions)
        for name, count in seen.items():
            if (condition := space.conditions.get(name)) is not None:
                text = f"under {quoted(space.value_of(condition))} of {condition[0]}"
                place = f"search.space.{valid_parameter(name)}"
                self.note(place, f"{text}, as in each complete trial")
            elif count < whole:
                text = f"{count} of {whole} trials have it; if another parameter decides that, move"
                place = f"search.space.{valid_parameter(name)}"
                self.note(place, f"{text} it under that choice (docs/sweep-file.md)")
        self.notes[:] = dict.fromkeys(self.notes)
        return space

    def _points(self, trials: Sequence[FrozenTrial], space: StudySpace) -> list[dict[str, Any]]:
        """Return the configurations of the best complete trials, without repeats, best first.

        A trial whose value is infinite has failed: scripts return that as a penalty.
        """
        maximize = self.study.direction.name == "MAXIMIZE"
        most = min(self.options.points, self.options.max_trials or self.options.points)
        ended = (t for t in trials if t.state.name == "COMPLETE")
        complete = [t for t in ended if t.value is not None and isfinite(t.value)]
        fitting = [t for t in complete if _fits(t, space)]
        if len(fitting) < len(complete):
            text = f"{len(complete) - len(fitting)} complete trials do not fit the space as it is"
            self.note("search.points_to_evaluate", text)
        ordered = sorted(fitting, key=lambda t: -(t.value or 0) if maximize else (t.value or 0))
        points: list[dict[str, Any]] = []
        for trial in ordered:
            names = [name for name in space.axes if name in trial.params]
            point = {valid_parameter(name): trial.params[name] for name in names}
            if point not in points and len(points) < most:
                points.append(point)
        return points


def _fits(trial: FrozenTrial, space: StudySpace) -> bool:
    """Say whether the space gives a trial these parameters, and their values lie in it."""
    axes = space.axes
    return set(trial.params) == space.active_names(trial.params) and all(
        axes[name]._contains(axes[name].to_internal_repr(value))
        for name, value in trial.params.items()
    )


def _parameter(axis: BaseDistribution) -> dict[str, Any]:
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if isinstance(axis, CategoricalDistribution):
        return choice_parameter(axis.choices)
    if not isinstance(axis, FloatDistribution | IntDistribution):
        raise HermesError(f"Optuna's {type(axis).__name__} has no counterpart in a sweep file.")
    return range_parameter(axis.low, axis.high, log=axis.log, step=axis.step)


def _storage(source: str, place: str) -> BaseStorage:
    """Open the storage; HermesError where Optuna is missing or cannot read it."""
    try:
        import optuna
        from optuna.storages import JournalStorage, RDBStorage
        from optuna.storages.journal import JournalFileBackend
    except ImportError:
        message = "Optuna itself reads studies: `pip install 'hermes-ops[optuna]'`."
        raise HermesError(message) from None
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    path = Path(os.path.expanduser(source.removeprefix("sqlite:///")))
    if ("://" not in source or source.startswith("sqlite:///")) and not os.path.isfile(path):
        raise refusal(place, "the storage", "no such file", "the file of a study", "check the path")
    try:
        if "://" not in source and not _is_sqlite(path):
            return JournalStorage(JournalFileBackend(str(path)))
        url = with_driver(source) if "://" in source else f"sqlite:///{path}"
        return RDBStorage(url, skip_table_creation=True)
    except ImportError as error:
        raise _without_driver(place) from error
    except Exception as error:  # SQLAlchemy's, the driver's, Optuna's own RuntimeError
        raise _unreadable(place, error) from error


def _without_driver(place: str) -> HermesError:
    """Return the error for a database whose driver is not installed."""
    backend = place.partition("://")[0]
    cure = "Install it, or name an installed one before `://`, as in mysql+pymysql://"
    if backend.startswith("postgresql"):
        cure = "`pip install 'hermes-ops[postgresql]'`"
    return HermesError(f"{place}: the Python driver of this database is not installed. {cure}.")


def _is_sqlite(path: Path) -> bool:
    with path.open("rb") as stream:
        return stream.read(6) == b"SQLite"


def _study(storage: BaseStorage, place: str, options: DraftOptions) -> Study:
    import optuna

    try:
        names = optuna.study.get_all_study_names(storage)
    except Exception as error:
        raise _unreadable(place, error) from error
    name = options.study or (names[0] if len(names) == 1 else None)
    if name is None or name not in names:
        found = f"no study {quoted(name)}" if name else f"{len(names)} studies"
        shown = ", ".join(map(quoted, names[:20])) or "none: there is no study in it"
        raise refusal(place, "the study", found, shown, "name one with --study")
    return optuna.load_study(study_name=name, storage=storage)


def _unreadable(place: str, error: Exception) -> HermesError:
    """Return the error for a storage that Optuna cannot read; no text of it shows a password."""
    what = type(error).__name__
    return HermesError(
        f"{place}: Optuna cannot read this storage ({what}). Check the path or URL, and that the "
        "database has this Optuna's version of the tables (`optuna storage upgrade`)."
    )


def _without_password(source: str) -> str:
    """Return the source for messages and comments, a URL without its password."""
    if "://" not in source:
        return source
    from sqlalchemy.engine import make_url
    from sqlalchemy.exc import ArgumentError

    try:
        return make_url(source).render_as_string(hide_password=True)
    except ArgumentError:
        fix = "write it as driver://user:password@host/database"
        raise refusal("the URL", "the storage", "no URL", "a database URL", fix) from None


Condition = tuple[str, int]
"""What a conditional parameter needs: a choice, and the place of one of its values."""


@dataclass(frozen=True, slots=True)
class StudySpace:
    """The parameters of a study, and the condition of each conditional one.

    A parameter is conditional on a value of a choice if the complete trials with that value are
    exactly those that have the parameter, and other trials have another value of the choice.
    """

    axes: Mapping[str, BaseDistribution]
    conditions: Mapping[str, Condition] = field(default_factory=dict)

    @classmethod
    def from_trials(
        cls, axes: Mapping[str, BaseDistribution], trials: Sequence[FrozenTrial]
    ) -> StudySpace:
        """Return the space of these complete trials."""
        having = {name: {t.number for t in trials if name in t.params} for name in axes}
        groups = _groups(axes, trials)
        conditions = {}
        for name, numbers in having.items():
            matching = (d for d, group in groups.items() if group == numbers < having[d[0]])
            if (condition := next(matching, None)) is not None:
                conditions[name] = condition
        return cls(axes, conditions)

    def value_of(self, condition: Condition) -> object:
        """Return the value of a condition's choice."""
        choice, place = condition
        value: object = self.axes[choice].to_external_repr(place)
        return value

    def active_names(self, params: Mapping[str, Any]) -> set[str]:
        """Return the names of the parameters that a trial with these values has."""
        return {name for name in self.axes if self._is_active(name, params)}

    def _is_active(self, name: str, params: Mapping[str, Any]) -> bool:
        if name not in self.conditions:
            return True
        choice, place = self.conditions[name]
        return choice in params and _place(self.axes[choice], params[choice]) == place

    def tree(
        self, parameters: Mapping[str, dict[str, Any]], names: Mapping[str, str]
    ) -> dict[str, Any]:
        """Return the space of a sweep file.

        `parameters`: those of the sweep file by name; `names`: what each is called there. The
        parameters are changed.
        """
        spaces: dict[Condition, dict[str, Any]] = {}
        for name, condition in self.conditions.items():
            spaces.setdefault(condition, {})[names[name]] = parameters[name]
        for (choice, place), space in spaces.items():
            values = parameters[choice]["values"]
            values[place] = {"value": values[place], "space": space}
        return {names[n]: p for n, p in parameters.items() if n not in self.conditions}


def _groups(
    axes: Mapping[str, BaseDistribution], trials: Sequence[FrozenTrial]
) -> dict[Condition, set[int]]:
    """Return the numbers of the trials that have each value of each choice."""
    from optuna.distributions import CategoricalDistribution

    groups: dict[Condition, set[int]] = {}
    for name, axis in axes.items():
        if isinstance(axis, CategoricalDistribution):
            for trial in (t for t in trials if name in t.params):
                place = _place(axis, trial.params[name])
                groups.setdefault((name, place), set()).add(trial.number)
    return groups


def _place(axis: BaseDistribution, value: object) -> int:
    return int(axis.to_internal_repr(value))
