"""The user's data where nothing is wrong with it, for checks that go on past what is."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from pydantic import TypeAdapter, ValidationError

from hermes_ops.config.declared import Declared, declared
from hermes_ops.config.files import KeyPath
from hermes_ops.config.parameters import ParameterSpec
from hermes_ops.search.constraint import Constraint
from hermes_ops.search.feasible import Feasible
from hermes_ops.search.space import Parameter, Space
from hermes_ops.search.tree import axes

_SPEC: TypeAdapter[Any] = TypeAdapter(ParameterSpec)
SPACE: KeyPath = ("search", "space")


@dataclass(frozen=True)
class Sound:
    """The user's data, seen only where nothing is wrong with it."""

    data: object
    defects: Collection[KeyPath]

    def get(self, *path: str | int) -> Any:  # noqa: ANN401 - data of any shape
        """The value there, None when it is absent or it, a part or its holder is defective."""
        if any(path[: len(d)] == d or d[: len(path)] == path for d in self.defects):
            return None
        return self.raw(*path)

    def raw(self, *path: str | int) -> Any:  # noqa: ANN401 - data of any shape
        """The value there, sound or not; None when absent."""
        value: Any = self.data
        for part in path:
            if not isinstance(value, dict) or part not in value:
                return None
            value = value[part]
        return value

    @cached_property
    def declared(self) -> tuple[Declared, ...]:
        """Every parameter, those with defects included."""
        return tuple(declared(self.raw(*SPACE)))

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Their names, each once."""
        return tuple(dict.fromkeys(parameter.name for parameter in self.declared))

    @cached_property
    def space(self) -> Space:
        """The sound parameters that every configuration has, with what they bring with them."""
        always = (parameter.name for parameter in self.declared if not parameter.conditional)
        found = ((name, self._axis(name)) for name in always)
        return tuple((name, axis) for name, axis in found if axis is not None)

    @cached_property
    def parameters(self) -> dict[str, Parameter | None]:
        """Every parameter by name; None where it has defects."""
        return {**dict.fromkeys(self.names), **dict(axes(self.space))}

    @cached_property
    def whole(self) -> bool:
        """True when all parameters are sound and each name stands once."""
        return len(list(axes(self.space))) == len(self.declared) == len(self.names) > 0

    @cached_property
    def constraints(self) -> tuple[tuple[int, Constraint], ...]:
        """Those of the language, with their places in the list."""
        given = self.raw("search", "constraints")
        listed = given if isinstance(given, list | tuple) else ()
        sound = (
            (index, text)
            for index, text in enumerate(listed)
            if isinstance(text, str) and not self._defective("search", "constraints", index)
        )
        return tuple((index, Constraint.of(text)) for index, text in sound)

    @cached_property
    def feasible(self) -> Feasible | None:
        """The space with its constraints; None unless all of both is sound."""
        given = self.raw("search", "constraints") or ()
        mistakes = (c.mistakes(self.parameters) for _, c in self.constraints)
        if not self.whole or self._defective("search", "constraints"):
            return None
        if len(given) != len(self.constraints) or any(next(m, None) for m in mistakes):
            return None
        return Feasible(self.space, tuple(constraint for _, constraint in self.constraints))

    def _defective(self, *path: str | int) -> bool:
        return any(d == path[: len(d)] for d in self.defects)

    def _axis(self, name: str) -> Parameter | None:
        try:
            axis: Parameter = _SPEC.validate_python(self.get(*SPACE, name)).to_axis()
        except ValidationError:
            return None
        return axis
