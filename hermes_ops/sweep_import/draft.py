"""Draft of a sweep file: its keys, and notes on what the user has to complete or check."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hermes_ops.config import parse
from hermes_ops.config.fields import GREATEST_INTEGER
from hermes_ops.config.files import printable, to_yaml
from hermes_ops.config.problems import show
from hermes_ops.errors import ConfigError, Problem

DEFAULT_MAX_EPOCHS = 100
DEFAULT_MAX_TRIALS = 20
DEFAULT_POINTS = 10


@dataclass(frozen=True, slots=True)
class DraftOptions:
    """Values that the user states because the source has none; None leaves them to the source."""

    name: str | None = None
    metric: str | None = None
    script: str | None = None
    max_epochs: int | None = None
    max_trials: int | None = None
    study: str | None = None
    """Name of the Optuna study, where a storage holds several."""
    points: int = DEFAULT_POINTS
    """How many of the best known configurations become `search.points_to_evaluate`."""


@dataclass(frozen=True, slots=True)
class Note:
    """A key of the sweep file that a person should look at, and why."""

    place: str
    text: str

    def __str__(self) -> str:
        return f"{self.place}: {self.text}"


@dataclass(frozen=True, slots=True)
class Draft:
    """A sweep file, valid as it stands, with notes on what the conversion changed or guessed."""

    source: str
    kind: str
    sweep: Mapping[str, Any]
    notes: tuple[Note, ...]

    def to_yaml(self) -> str:
        """Return the sweep file; the notes are comments above it."""
        lines = [f"Converted from {self.kind}: {self.source}."]
        lines += ["Look at these before it is run:"] if self.notes else []
        lines += [f"* {note}" for note in self.notes]
        return "".join(f"# {printable_line(line)}\n" for line in lines) + to_yaml(dict(self.sweep))

    def check(self) -> None:
        """Raise ConfigError when the sweep file is not valid."""
        parse(self.sweep, f"the sweep file made of {self.source}", None)


def printable_line(text: str) -> str:
    """Return a text as one line that is harmless to a terminal and in a YAML comment."""
    return "".join(c if c.isprintable() else " " for c in text)


def refusal(source: str, where: str, found: str, allowed: str, fix: str) -> ConfigError:
    """Return the error for a source that cannot be converted."""
    return ConfigError(source, (Problem(where, found, allowed, fix),))


@dataclass(slots=True)
class Conversion:
    """One source on its way to a `Draft`; `notes` grows as its keys are converted."""

    source: str
    options: DraftOptions
    notes: list[Note] = field(default_factory=list, init=False)
    _named: dict[str, tuple[str, str]] = field(default_factory=dict, init=False)

    def note(self, place: str, text: str) -> None:
        """Add a note on a key of the sweep file."""
        self.notes.append(Note(place, text))

    def refused(self, where: str, found: str, allowed: str, fix: str) -> ConfigError:
        """Return the error for a key of the source that cannot be converted."""
        return refusal(self.source, where, found, allowed, fix)

    def parameter_name(self, given: str, where: str) -> str:
        """Return the nearest valid name of a parameter; refuse one that another has already."""
        name = valid_parameter(given)
        if name in self._named:
            other, place = self._named[name]
            found = f"{quoted(given)}, which becomes `{name}` as {quoted(other)} ({place}) does"
            allowed = "names that differ in letters, digits, `_`, `.` or `-`"
            fix = "rename one of them in the source, or write the space by hand"
            raise self.refused(where, found, allowed, fix)
        self._named[name] = (given, where)
        return name

    def items(self, value: object, where: str) -> list[Any]:
        """Return the items of a list of the source; none where there is no list."""
        if value is None:
            return []
        if not isinstance(value, list):
            raise self.refused(where, show(value), "a list", "write it as a list: [a, b]")
        return value

    def scalars(self, value: object, where: str) -> list[str | int | float]:
        """Return the items of a list of texts and numbers."""
        listed = self.items(value, where)
        for index, item in enumerate(listed):
            if not isinstance(item, str | int | float):
                allowed = "a text or a number"
                raise self.refused(f"{where}[{index}]", show(item), allowed, "write one there")
        return listed

    def mappings(self, value: object, where: str) -> list[Mapping[str, Any]]:
        """Return the items of a list of mappings."""
        listed = self.items(value, where)
        for index, item in enumerate(listed):
            if not isinstance(item, Mapping):
                fix = "write its keys with their values there"
                raise self.refused(f"{where}[{index}]", "no mapping", "a mapping", fix)
        return listed

    def inside(self, given: Mapping[str, Any], where: str, *keys: str) -> Mapping[str, Any]:
        """Return the mapping below some keys of `given`, which lies at `where`; empty if absent."""
        for key in keys:
            where = f"{where}.{key}" if where else key
            value = given.get(key)
            if not isinstance(value, Mapping | None):
                fix = "write its keys with their values there"
                raise self.refused(where, show(value), "a mapping", fix)
            given = value or {}
        return given

    def renamed_objective(self, former: object, keys: Iterable[str]) -> None:
        """Note the keys of the objective that the source gives for another metric."""
        for key in keys:
            self.note(f"objective.{key}", f"is that of {quoted(former)}: check it")

    def affordable(
        self, algorithm: str, trials: object, space: Mapping[str, Mapping[str, Any]]
    ) -> str:
        """Return `random` instead of `grid` if the grid has more combinations than trials."""
        size = combinations(space) if algorithm == "grid" else None
        if size is None or not isinstance(trials, int) or trials >= size:
            return algorithm
        text = f"the grid has {size:,} combinations; `random` tries {trials:,} of them, each once."
        self.note("search.algorithm", f"{text} For all: `grid`, `max_trials: {size}`")
        return "random"

    def whole_number(self, value: Any, where: str, fix: str) -> int:  # noqa: ANN401 - checked here
        """Return a whole number, which the source may have as a text."""
        try:
            if not isinstance(value, bool) and float(value).is_integer():
                return int(float(value))
        except (TypeError, ValueError, OverflowError):
            pass
        raise self.refused(where, quoted(value), "a whole number", fix)


def combinations(space: Mapping[str, Mapping[str, Any]]) -> int | None:
    """Return the size of a grid over parameters of a sweep file; None with a range of floats."""
    levels = [_levels(parameter) for parameter in space.values()]
    return None if None in levels else math.prod(level or 1 for level in levels)


def _levels(parameter: Mapping[str, Any]) -> int | None:
    """Return how many values a parameter has; None where they cannot be counted."""
    if parameter["type"] == "choice":
        return len(parameter["values"])
    low, high, step = parameter["low"], parameter["high"], parameter.get("step", 1)
    if step <= 0 or parameter["type"] in ("uniform", "loguniform"):
        return None
    if all(isinstance(number, int) for number in (low, high, step)):
        return int(max(0, (high - low) // step)) + 1
    return int(min(max(0.0, (high - low) / step + 1e-9), GREATEST_INTEGER)) + 1


def quoted(value: object) -> str:
    """Return a value of the source for a message: short and on one line."""
    return repr(printable(str(value)))


def range_parameter(
    low: float, high: float, *, log: bool = False, step: float | None = None
) -> dict[str, Any]:
    """Return the parameter of the sweep file for numbers from `low` to `high`, bounds inclusive.

    Both bounds as `int` make whole numbers; a step of whole numbers is kept before the logarithm,
    one of floats is not. A range of one value becomes a choice of it, because the ranges of a
    sweep file have two different bounds. Reversed bounds stay as they are:
    `Draft.check` refuses them.
    """
    if low == high:
        return {"type": "choice", "values": [low]}
    whole = isinstance(low, int) and isinstance(high, int)
    if whole and step in (None, 1):
        return {"type": "log_integer" if log else "integer", "low": low, "high": high}
    if step is not None and (whole or not log):
        return {"type": "quantised", "low": low, "high": high, "step": step}
    return {"type": "loguniform" if log else "uniform", "low": low, "high": high}


def choice_parameter(values: Iterable[object]) -> dict[str, Any]:
    """Return the parameter of the sweep file for listed values."""
    return {"type": "choice", "values": list(values)}


def valid_name(name: str, fallback: str) -> str:
    """Return the nearest name that a sweep may have."""
    cleaned = re.sub(r"[^A-Za-z0-9._-]+", "-", name).lstrip(".-")[:64].rstrip("-.")
    return cleaned or fallback


def valid_parameter(name: str) -> str:
    """Return the nearest name that a parameter may have."""
    cleaned = re.sub(r"[^A-Za-z0-9_.-]+", "_", name)
    return cleaned if re.match(r"[A-Za-z_]", cleaned) else f"_{cleaned}"


def literal(text: str) -> str:
    """Return a text of a command that contains no placeholder, braces doubled."""
    return text.replace("{", "{{").replace("}", "}}")


def option_arguments(names: Iterable[str]) -> list[str]:
    """Return `--name={name}` for each parameter."""
    return [f"--{name}={{{name}}}" for name in names]
