"""A search space: parameters, each a quantile function from [0, 1] to its values.

A sampler draws numbers from the unit interval and `from_unit` turns them into values (inverse
transform sampling), so every algorithm sees the same plain axes, no bound can be overstepped, and
a logarithmic parameter is logarithmic for all of them. Values are plain Python objects.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from decimal import Decimal
from typing import Protocol

Value = int | float | str | bool | None
Config = dict[str, Value]


def text(value: Value) -> str:
    """Format a value for the trial: floats round-trip, booleans true/false, null is empty.

    Negative floats are written without an exponent: argparse takes `-1e-05` for an option.
    """
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        shown = repr(value)
        return format(Decimal(shown), "f") if value < 0 and "e" in shown else shown
    return str(value)


class SearchParameter(Protocol):
    """One axis of a space. All bounds are inclusive."""

    @property
    def cardinality(self) -> int | None:
        """The number of different values; None for a continuous parameter."""
        ...

    def from_unit(self, unit: float) -> Value:
        """Return the value at that quantile, 0 <= unit <= 1."""
        ...

    def to_unit(self, value: Value) -> float:
        """Return the quantile of a value; `from_unit(to_unit(v)) == v` up to rounding of floats."""
        ...

    def canonical(self, value: object) -> Value:
        """Return the value as the parameter would produce it; ValueError if it never would."""
        ...

    def describe(self) -> str:
        """Describe the allowed values in words."""
        ...


class Discrete(SearchParameter, Protocol):
    """A parameter whose values can be counted."""

    @property
    def cardinality(self) -> int:
        """The number of different values, at least one."""
        ...

    def at(self, index: int) -> Value:
        """Return the value of that index (from 0), in ascending or listed order."""
        ...

    def index_of(self, value: Value) -> int:
        """Return the index of a value of this parameter."""
        ...


Space = tuple[tuple[str, SearchParameter], ...]


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError("not a number")
    return float(value)


def _clip(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)


class _EqualShares:
    """Quantiles of a parameter each of whose values has an equal share of the unit interval."""

    __slots__ = ()

    def from_unit(self: Discrete, unit: float) -> Value:
        """Return the value whose share holds the quantile."""
        levels = self.cardinality
        return self.at(min(int(_clip(unit, 0.0, 1.0) * levels), levels - 1))

    def to_unit(self: Discrete, value: Value) -> float:
        """Return the middle of the value's share."""
        return (self.index_of(value) + 0.5) / self.cardinality


@dataclass(frozen=True, slots=True)
class Uniform:
    """A float from `low` to `high`, all equally likely."""

    low: float
    high: float

    @property
    def cardinality(self) -> None:
        """None: the parameter is continuous."""

    def from_unit(self, unit: float) -> float:
        """Interpolate linearly between the bounds."""
        return _clip(self.low + unit * (self.high - self.low), self.low, self.high)

    def to_unit(self, value: Value) -> float:
        """Return the share of the range below the value."""
        return _clip((_number(value) - self.low) / (self.high - self.low), 0.0, 1.0)

    def canonical(self, value: object) -> float:
        """Return a float within the bounds; ValueError for anything else."""
        number = _number(value)
        if not self.low <= number <= self.high:
            raise ValueError("outside the range")
        return number

    def describe(self) -> str:
        """Describe the bounds."""
        return f"a number from {self.low!r} to {self.high!r}"


@dataclass(frozen=True, slots=True)
class LogUniform(Uniform):
    """A float from `low` > 0 to `high` whose logarithm is uniform."""

    def from_unit(self, unit: float) -> float:
        """Interpolate linearly in the logarithm."""
        span = math.log(self.high) - math.log(self.low)
        return _clip(math.exp(math.log(self.low) + unit * span), self.low, self.high)

    def to_unit(self, value: Value) -> float:
        """Return the share of the logarithmic range below the value."""
        number = _clip(_number(value), self.low, self.high)
        span = math.log(self.high) - math.log(self.low)
        return _clip((math.log(number) - math.log(self.low)) / span, 0.0, 1.0) if span else 0.5


@dataclass(frozen=True, slots=True)
class Integer(_EqualShares):
    """A whole number from `low` to `high`, all equally likely."""

    low: int
    high: int

    @property
    def cardinality(self) -> int:
        """The number of whole numbers, both bounds included."""
        return self.high - self.low + 1

    def at(self, index: int) -> int:
        """Return the value of that index, ascending from `low`."""
        return self.low + index

    def index_of(self, value: Value) -> int:
        """Return the distance from `low`."""
        return int(_clip(round(_number(value)), self.low, self.high)) - self.low

    def canonical(self, value: object) -> int:
        """Return a whole number within the bounds; ValueError for a float or a boolean."""
        if isinstance(value, bool) or not isinstance(value, int):
            raise ValueError("not a whole number")
        if not self.low <= value <= self.high:
            raise ValueError("outside the range")
        return value

    def describe(self) -> str:
        """Describe the bounds."""
        return f"a whole number from {self.low} to {self.high}"


@dataclass(frozen=True, slots=True)
class LogInteger(Integer):
    """A whole number from `low` >= 1 to `high`, drawn log-uniformly.

    Half a unit is added at either end before rounding, so that the bounds are as likely as their
    neighbours lead one to expect: P(k) is proportional to log((k + 1/2) / (k - 1/2)).
    """

    def from_unit(self, unit: float) -> int:
        """Interpolate linearly in the logarithm and round to the nearest whole number."""
        low, high = math.log(self.low - 0.5), math.log(self.high + 0.5)
        return int(_clip(round(math.exp(low + unit * (high - low))), self.low, self.high))

    def to_unit(self, value: Value) -> float:
        """Return the share of the logarithmic range below the value."""
        low, high = math.log(self.low - 0.5), math.log(self.high + 0.5)
        return (math.log(self.at(self.index_of(value))) - low) / (high - low)


@dataclass(frozen=True, slots=True)
class Quantised(_EqualShares):
    """`low`, `low + step`, ... up to `high`; whole numbers if both `low` and `step` are.

    Steps are counted in decimal, so 0.1 + 2 x 0.1 is 0.3. The last value is the greatest that does
    not exceed `high`.
    """

    low: int | float
    high: int | float
    step: int | float

    @property
    def cardinality(self) -> int:
        """The number of steps that fit, plus one."""
        return int((_decimal(self.high) - _decimal(self.low)) // _decimal(self.step)) + 1

    def at(self, index: int) -> int | float:
        """Return the value of that index, ascending from `low`."""
        value = _decimal(self.low) + index * _decimal(self.step)
        whole = isinstance(self.low, int) and isinstance(self.step, int)
        return int(value) if whole else float(value)

    def index_of(self, value: Value) -> int:
        """Return the index of the nearest step."""
        steps = round((_decimal(_number(value)) - _decimal(self.low)) / _decimal(self.step))
        return int(_clip(steps, 0, self.cardinality - 1))

    def canonical(self, value: object) -> int | float:
        """Return the step equal to the value; ValueError if there is none."""
        number = _number(value)
        if not self.low <= number <= self.high:
            raise ValueError("outside the range")
        step = self.at(self.index_of(number))
        if not math.isclose(step, number, rel_tol=1e-12, abs_tol=0.0):
            raise ValueError("between two steps")
        return step

    def describe(self) -> str:
        """Describe the bounds and the step."""
        return f"{self.low!r} plus a multiple of {self.step!r}, up to {self.high!r}"


@dataclass(frozen=True, slots=True)
class ChoiceParameter(_EqualShares):
    """One of the listed values, all equally likely and without an order.

    `spaces`: for each value the parameters that are active with it alone; empty when no value
    has any.
    """

    values: tuple[Value, ...]
    spaces: tuple[Space, ...] = ()

    def space_of(self, value: Value) -> Space:
        """Return the parameters that are active with this value alone."""
        return self.spaces[self.index_of(value)] if self.spaces else ()

    @property
    def cardinality(self) -> int:
        """The number of listed values; the parameters that they activate do not count."""
        return len(self.values)

    def at(self, index: int) -> Value:
        """Return the value of that index, in the order listed."""
        return self.values[index]

    def index_of(self, value: Value) -> int:
        """Find the value by the text that reaches the trial, which tells 1, 1.0 and true apart."""
        return [text(v) for v in self.values].index(text(value))

    def canonical(self, value: object) -> Value:
        """Return the listed value that is equal and of the same type; ValueError if none is."""
        for listed in self.values:
            if type(listed) is type(value) and listed == value:
                return listed
        raise ValueError("not one of the values")

    def describe(self) -> str:
        """List the values."""
        return "one of " + ", ".join(repr(v) for v in self.values)


def _decimal(number: float) -> Decimal:
    return Decimal(repr(number))
