"""The parameters that a search space names, seen in the user's data before it is known sound."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from hermes_ops.config.files import KeyPath

DEEPEST_SPACE = 5
"""Choices inside one another that bring parameters with them."""

MOST_PARAMETERS = 1_000
"""Of the whole tree."""


@dataclass(frozen=True, slots=True)
class Declared:
    """A parameter: its name, where it stands in the space, under how many choices."""

    name: str
    path: KeyPath
    depth: int

    @property
    def conditional(self) -> bool:
        """True when only some values of a choice bring it with them."""
        return self.depth > 0


def declared(space: object) -> Iterator[Declared]:
    """Every parameter in the order of the file; those too deep down to a depth one too great."""
    return _declared(space, (), 0)


def _declared(space: object, path: KeyPath, depth: int) -> Iterator[Declared]:
    for name, parameter in space.items() if isinstance(space, Mapping) else ():
        if not isinstance(name, str):
            continue
        here = (*path, name)
        yield Declared(name, here, depth)
        if depth > DEEPEST_SPACE:
            continue
        for index, below in _spaces(parameter):
            yield from _declared(below, (*here, "values", index, "space"), depth + 1)


def _spaces(parameter: object) -> Iterator[tuple[int, object]]:
    values = parameter.get("values") if isinstance(parameter, Mapping) else None
    for index, option in enumerate(values) if isinstance(values, list | tuple) else ():
        if isinstance(option, Mapping) and "space" in option:
            yield index, option["space"]
