"""W&B sweep configurations, as `wandb sweep FILE` reads them.

Source: the reference "Sweep configuration options" of W&B's documentation, as of version 0.2x of
the client. Distributions that a sweep file has no counterpart for become a range, with a note.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from decimal import ROUND_HALF_EVEN, Decimal
from typing import Any

from hermes_ops.config.problems import show
from hermes_ops.sweep_import.draft import (
    DEFAULT_MAX_EPOCHS,
    DEFAULT_MAX_TRIALS,
    Conversion,
    Draft,
    DraftOptions,
    choice_parameter,
    combinations,
    literal,
    option_arguments,
    quoted,
    range_parameter,
    valid_name,
    valid_parameter,
)

_METHODS = {"grid": "grid", "random": "random", "bayes": "tpe"}
_DEFAULT_COMMAND = ("${env}", "${interpreter}", "${program}", "${args}")
_SIGMAS = 3.0


def convert(data: Mapping[str, Any], source: str, options: DraftOptions) -> Draft:
    """Convert a W&B sweep configuration."""
    return _WandbConversion(source, options, data).draft()


@dataclass(slots=True)
class _WandbConversion(Conversion):
    """One configuration on its way; `notes` grows as keys are converted."""

    data: Mapping[str, Any]

    def draft(self) -> Draft:
        space = dict(self._space(self._section("parameters"), "parameters", ""))
        sweep: dict[str, Any] = {
            "name": self._name(),
            "objective": self._objective(),
            "search": {**self._search(space), "space": space},
            "trial": {"command": self._command(list(space))},
            "budget": {"max_epochs": self._max_epochs()},
        }
        if self.data.get("early_terminate"):
            sweep["early_stop"] = "asha"
            self.note("early_stop", "`early_terminate` is Hyperband; `asha` is the nearest rule")
        self.note(
            "trial.command",
            "the script must print its metrics (name=value) or log them to MLflow; what it sends "
            "by wandb.log alone is not read",
        )
        return Draft(self.source, "a W&B sweep", sweep, tuple(self.notes))

    def _section(self, key: str) -> Mapping[str, Any]:
        value = self.data.get(key)
        if not isinstance(value, Mapping) or not value:
            raise self.refused(key, quoted(value), "a mapping with at least one key", "add it")
        return value

    def _name(self) -> str:
        given = self.options.name or self.data.get("name") or self.data.get("project") or "wandb"
        return valid_name(str(given), "wandb")

    def _objective(self) -> dict[str, Any]:
        metric = self.data.get("metric") or {}
        if not isinstance(metric, Mapping):
            raise self.refused("metric", quoted(metric), "a mapping", "write `name: …` below it")
        name = self.options.metric or metric.get("name")
        if name is None:
            name = "loss"
            self.note("objective.metric", "the sweep names none; set it, or use --metric")
        goal, target = metric.get("goal"), metric.get("target")
        if goal not in (None, "minimize", "maximize"):
            raise self.refused("metric.goal", quoted(goal), "minimize or maximize", "correct it")
        given = {"direction": goal, "target": target}
        stated = {key: value for key, value in given.items() if value is not None}
        if stated and metric.get("name") not in (None, name):
            self.renamed_objective(metric["name"], stated)
        return {"metric": name, **stated}

    def _search(self, space: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        method = self.data.get("method")
        if not isinstance(method, str) or method not in _METHODS:
            allowed = f"one of {', '.join(_METHODS)}"
            raise self.refused("method", quoted(method), allowed, "correct it")
        trials = self.options.max_trials or self.data.get("run_cap")
        if trials is None:
            trials = (combinations(space) or 1) if method == "grid" else DEFAULT_MAX_TRIALS
            if method != "grid":
                self.note("search.max_trials", "no `run_cap`; set it, or use --max-trials")
        return {"algorithm": self.affordable(_METHODS[method], trials, space), "max_trials": trials}

    def _max_epochs(self) -> int:
        early = self.data.get("early_terminate")
        most = early.get("max_iter") if isinstance(early, Mapping) else None
        if self.options.max_epochs is not None:
            return self.options.max_epochs
        if most is not None:
            where = "early_terminate.max_iter"
            return self.whole_number(most, where, "correct it, or use --max-epochs")
        self.note("budget.max_epochs", "not in the sweep; set it, or use --max-epochs")
        return DEFAULT_MAX_EPOCHS

    def _space(
        self, parameters: Mapping[str, Any], place: str, prefix: str
    ) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the parameters of a mapping; nested ones are named `outer.inner`."""
        for key, spec in parameters.items():
            here = f"{place}.{key}"
            if not isinstance(spec, Mapping):
                raise self.refused(here, quoted(spec), "a mapping", "write `value: …` for one")
            if isinstance(spec.get("parameters"), Mapping):
                outer = valid_parameter(f"{prefix}{key}")
                self.note(f"search.space.{outer}.*", "was nested; the names have a dot now")
                yield from self._space(spec["parameters"], f"{here}.parameters", f"{prefix}{key}.")
                continue
            name = self.parameter_name(f"{prefix}{key}", here)
            if name != f"{prefix}{key}":
                self.note(f"search.space.{name}", f"was named {quoted(key)}")
            yield name, self._parameter(spec, here, f"search.space.{name}")

    def _parameter(self, spec: Mapping[str, Any], where: str, place: str) -> dict[str, Any]:
        if "value" in spec:
            return choice_parameter(self._listed([spec["value"]], place))
        if "values" in spec:
            if "probabilities" in spec:
                self.note(place, "`probabilities` are left out: all values are equally likely")
            if not isinstance(spec["values"], list):
                raise self.refused(f"{where}.values", quoted(spec["values"]), "a list", "make it")
            return choice_parameter(self._listed(spec["values"], place))
        return self._range(spec, where, place)

    def _listed(self, values: list[Any], place: str) -> list[Any]:
        """Return the values of a choice: lists and mappings as the text that W&B's agent passes."""
        listed = [str(v) if isinstance(v, list | Mapping) else v for v in values]
        if listed != values:
            text = "lists and mappings are texts now, as W&B's agent writes them into arguments"
            self.note(place, f"{text}: the script must parse them")
        if any(v is None or isinstance(v, bool) for v in values):
            text = "the script gets `true`, `false` and an empty text, where W&B's agent writes"
            self.note(place, f"{text} `True`, `False` and `None`")
        return listed

    def _range(self, spec: Mapping[str, Any], where: str, place: str) -> dict[str, Any]:
        """Return the parameter of the sweep file for a distribution."""
        name = spec.get("distribution") or self._default_distribution(spec, where)
        converter = _DISTRIBUTIONS.get(str(name))
        if converter is None:
            allowed = ", ".join(_DISTRIBUTIONS)
            raise self.refused(f"{where}.distribution", quoted(name), allowed, "choose one")
        try:
            parameter, text = converter(spec)
        except _NumberError as error:
            fix = f"add or correct it: {name} needs it"
            raise self.refused(f"{where}.{error.key}", error.found, error.allowed, fix) from error
        except ArithmeticError as error:
            allowed = f"numbers that {name} can be computed with"
            raise self.refused(where, quoted(dict(spec)), allowed, "correct them") from error
        if text:
            self.note(place, text)
        return parameter

    def _default_distribution(self, spec: Mapping[str, Any], where: str) -> str:
        bounds = (spec.get("min"), spec.get("max"))
        if not all(isinstance(b, int | float) and not isinstance(b, bool) for b in bounds):
            found = quoted(dict(spec))
            raise self.refused(where, found, "value, values, or min and max", "add them")
        return "int_uniform" if all(isinstance(b, int) for b in bounds) else "uniform"

    def _command(self, names: list[str]) -> list[str]:
        given = self.data.get("command") or list(_DEFAULT_COMMAND)
        program = self.options.script or self.data.get("program")
        if program is None:
            program = "train.py"
            self.note("trial.command", "the sweep has no `program`; set it, or use --script")
        if not isinstance(program, str):
            raise self.refused("program", quoted(program), "a script's name", "correct it")
        words = given.split() if isinstance(given, str) else self.scalars(given, "command")
        arguments: list[str] = []
        for word in words:
            arguments += self._argument(str(word), program, names)
        return arguments

    def _argument(self, word: str, program: str, names: list[str]) -> list[str]:
        """Return what one entry of `command` becomes."""
        plain = {
            "${env}": [],
            "${interpreter}": ["python"],
            "${program}": [literal(program)],
            "${args}": option_arguments(names),
            "${args_no_boolean_flags}": option_arguments(names),
            "${args_no_hyphens}": [f"{name}={{{name}}}" for name in names],
        }
        if word == "${args_no_boolean_flags}":
            self.note("trial.command", "a flag for a true value became `--name=true`")
        if word in plain:
            return plain[word]
        if word.startswith("${args_json"):
            self.note(
                "trial.command",
                f"`{word}` has no counterpart: the script finds each value in HERMES_PARAM_<NAME>",
            )
            return []
        if "${" in word:
            self.note("trial.command", f"{quoted(word)} is passed as it stands")
        return [literal(word)]


_Converted = tuple[dict[str, Any], str]


class _NumberError(ValueError):
    """A key of a distribution has no number that it can be computed with."""

    def __init__(self, key: str, found: str, allowed: str) -> None:
        self.key, self.found, self.allowed = key, found, allowed
        super().__init__(key)


def _number(spec: Mapping[str, Any], key: str, default: float | None = None) -> float:
    value = spec.get(key, default)
    if value is None:
        raise _NumberError(key, "none", "a number")
    if isinstance(value, bool) or not isinstance(value, int | float) or not _is_finite(value):
        raise _NumberError(key, show(value), "a finite number")
    return value


def _is_finite(value: float) -> bool:
    """Say whether a number is finite, also as the float that some distributions need."""
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def _positive(spec: Mapping[str, Any], key: str, default: float | None = None) -> float:
    value = _number(spec, key, default)
    if value <= 0:
        raise _NumberError(key, show(value), "a number above 0")
    return value


def _whole(spec: Mapping[str, Any], key: str) -> int:
    value = _number(spec, key)
    if value != int(value):
        raise _NumberError(key, show(value), "a whole number")
    return int(value)


def _uniform(spec: Mapping[str, Any]) -> _Converted:
    low, high = float(_number(spec, "min")), float(_number(spec, "max"))
    return range_parameter(low, high), ""


def _integer(spec: Mapping[str, Any]) -> _Converted:
    return range_parameter(_whole(spec, "min"), _whole(spec, "max")), ""


def _quantised(spec: Mapping[str, Any]) -> _Converted:
    return _multiples(_number(spec, "min"), _number(spec, "max"), spec)


def _multiples(low: float, high: float, spec: Mapping[str, Any]) -> _Converted:
    """Return the multiples of `q` that W&B's round(X / q) * q makes of a range."""
    step = _positive(spec, "q", 1)
    first, last = _multiple(low, step), _multiple(high, step)
    moved = (first, last) != (low, high)
    text = f"was {low} to {high}; is {first} to {last}, the multiples of {step} that W&B draws"
    return range_parameter(first, last, step=step), text if moved else ""


def _multiple(value: float, step: float) -> float:
    """Return round(value / step) * step without errors of binary fractions."""
    exact_step = Decimal(str(step))
    multiple = (Decimal(str(value)) / exact_step).to_integral_value(ROUND_HALF_EVEN) * exact_step
    return int(multiple) if isinstance(step, int) else float(multiple)


def _log(spec: Mapping[str, Any]) -> _Converted:
    low, high = math.exp(_number(spec, "min")), math.exp(_number(spec, "max"))
    return range_parameter(low, high, log=True), ""


def _inverse_log(spec: Mapping[str, Any]) -> _Converted:
    low, high = math.exp(-_number(spec, "max")), math.exp(-_number(spec, "min"))
    return range_parameter(low, high, log=True), ""


def _log_values(spec: Mapping[str, Any]) -> _Converted:
    low, high = float(_positive(spec, "min")), float(_positive(spec, "max"))
    return range_parameter(low, high, log=True), ""


def _quantised_log(spec: Mapping[str, Any]) -> _Converted:
    return _rounded_log(math.exp(_number(spec, "min")), math.exp(_number(spec, "max")), spec)


def _quantised_log_values(spec: Mapping[str, Any]) -> _Converted:
    return _rounded_log(_positive(spec, "min"), _positive(spec, "max"), spec)


def _rounded_log(low: float, high: float, spec: Mapping[str, Any]) -> _Converted:
    """Return whole numbers for a step of them; else the range without its step."""
    step = _positive(spec, "q", 1)
    if step != 1 and step == int(step):
        parameter, text = _multiples(low, high, {"q": int(step)})
        equal = f"was logarithmic; all multiples of {int(step)} are equally likely"
        return parameter, "; ".join(filter(None, (equal, text)))
    if step != 1:
        text = f"was rounded to multiples of {step}"
        return range_parameter(float(low), float(high), log=True), text
    first, last = round(low), round(high)
    if first == last or min(first, last) > 0:
        return range_parameter(first, last, log=True), ""
    text = "could be 0, which a logarithmic range has not; starts at 1"
    return range_parameter(max(1, first), max(1, last), log=True), text


def _normal(spec: Mapping[str, Any]) -> _Converted:
    middle, sigma = _number(spec, "mu", 0.0), _positive(spec, "sigma", 1.0)
    low, high = middle - _SIGMAS * sigma, middle + _SIGMAS * sigma
    text = f"was normal (mu {middle:g}, sigma {sigma:g}); is uniform over three sigmas"
    if "q" in spec or spec.get("distribution") == "q_normal":
        parameter, _ = _multiples(low, high, spec)
        return parameter, text
    return range_parameter(float(low), float(high)), text


def _log_normal(spec: Mapping[str, Any]) -> _Converted:
    middle, sigma = _number(spec, "mu", 0.0), _positive(spec, "sigma", 1.0)
    low, high = math.exp(middle - _SIGMAS * sigma), math.exp(middle + _SIGMAS * sigma)
    text = f"was log-normal (mu {middle:g}, sigma {sigma:g}); is log-uniform over three sigmas"
    if spec.get("distribution") != "q_log_normal":
        return range_parameter(low, high, log=True), text
    parameter, rounding = _rounded_log(low, high, spec)
    return parameter, "; ".join(filter(None, (text, rounding)))


def _beta(spec: Mapping[str, Any]) -> _Converted:
    text = f"was beta (a {_number(spec, 'a', 1):g}, b {_number(spec, 'b', 1):g}); is uniform"
    if spec.get("distribution") != "q_beta":
        return range_parameter(0.0, 1.0), text
    parameter, rounding = _multiples(0, 1, spec)
    return parameter, "; ".join(filter(None, (text, rounding)))


_DISTRIBUTIONS: dict[str, Callable[[Mapping[str, Any]], _Converted]] = {
    "uniform": _uniform,
    "int_uniform": _integer,
    "q_uniform": _quantised,
    "log_uniform": _log,
    "log_uniform_values": _log_values,
    "q_log_uniform": _quantised_log,
    "q_log_uniform_values": _quantised_log_values,
    "inv_log_uniform": _inverse_log,
    "inv_log_uniform_values": _log_values,  # log(1/x) is uniform exactly where log(x) is
    "normal": _normal,
    "q_normal": _normal,
    "log_normal": _log_normal,
    "q_log_normal": _log_normal,
    "beta": _beta,
    "q_beta": _beta,
}
