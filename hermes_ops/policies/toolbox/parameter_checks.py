"""Checks of a policy's parameters: TypeError for another type, ValueError for another value."""

from __future__ import annotations

from math import inf, isfinite


def whole(name: str, value: object, least: int) -> None:
    """Raise unless the value is a whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} is a whole number, at least {least}")
    if value < least:
        raise ValueError(f"{name} is at least {least}")


def positive(name: str, value: object) -> None:
    """Raise unless the value is a finite number above 0."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < inf:
        raise ValueError(f"{name} is a number above 0")


def positive_or_none(name: str, value: object) -> None:
    """Raise unless the value is None or a finite number above 0."""
    if value is not None:
        positive(name, value)


def one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    """Raise unless the value is one of these."""
    if value not in allowed:
        raise ValueError(f"{name} is one of {', '.join(allowed)}")


def ascending(name: str, values: object) -> tuple[float, ...]:
    """Return the values as numbers; raise unless they are positive, finite and ascending."""
    if not isinstance(values, tuple | list) or any(isinstance(x, bool | str) for x in values):
        raise TypeError(f"{name} is a list of numbers, ascending")
    numbers = tuple(float(value) for value in values)
    rises = all(a < b for a, b in zip((0.0, *numbers), numbers, strict=False))
    if not rises or not all(map(isfinite, numbers)):
        raise ValueError(f"{name} are numbers above 0, ascending")
    return numbers
