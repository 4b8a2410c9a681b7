"""The parameters of a search space, one model for each value of the key `type`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator

from hermes_ops.config.fields import (
    GREATEST_INTEGER,
    LogBound,
    Model,
    Number,
    ParameterName,
    Real,
    ValueField,
    Whole,
    refusal,
)
from hermes_ops.config.files import KeyPath
from hermes_ops.search import space as search_space
from hermes_ops.search.space import SearchParameter, Value

DEEPEST_SPACE = 5
"""Nesting depth of choices that bring parameters with them."""

MOST_PARAMETERS = 1_000
"""Parameters of the whole tree."""


def _bounded(space: object) -> object:
    """Refuse a space that is too deep or too wide before pydantic descends into it."""
    depths = tuple(islice(_depths(space, 0), MOST_PARAMETERS + 1))
    if any(depth > DEEPEST_SPACE for depth in depths):
        deeper = f"choices inside one another deeper than {DEEPEST_SPACE} levels"
        allowed = f"parameters under at most {DEEPEST_SPACE} choices"
        raise refusal(allowed, "bring some of the parameters further up", deeper)
    if len(depths) > MOST_PARAMETERS:
        allowed = f"at most {MOST_PARAMETERS} parameters, those under choices included"
        raise refusal(allowed, "remove some", "more parameters")
    return space


def _depths(space: object, depth: int) -> Iterator[int]:
    """Yield the depth of each parameter of unvalidated data, down to one below the deepest."""
    for parameter in space.values() if isinstance(space, Mapping) else ():
        yield depth
        values = parameter.get("values") if isinstance(parameter, Mapping) else None
        if depth > DEEPEST_SPACE or not isinstance(values, list | tuple):
            continue
        for option in values:
            if isinstance(option, Mapping):
                yield from _depths(option.get("space"), depth + 1)


class _Range(Model):
    type: str
    low: float
    high: float

    @model_validator(mode="after")
    def _ascending(self) -> Self:
        if self.low >= self.high:
            found = f"low {self.low!r} and high {self.high!r}"
            fix = f"use a choice of one value: {{type: choice, values: [{self.low!r}]}}"
            raise refusal("low below high", "swap them" if self.low > self.high else fix, found)
        return self


class UniformSpec(_Range):
    """A float, all equally likely."""

    type: Literal["uniform"]
    """uniform"""
    low: Annotated[Real, Field(examples=[0.0])]
    """Least value."""
    high: Annotated[Real, Field(examples=[0.6])]
    """Greatest value."""

    def to_parameter(self) -> SearchParameter:
        """Return the search parameter."""
        return search_space.Uniform(self.low, self.high)


class LogUniformSpec(_Range):
    """A float whose logarithm is uniform."""

    type: Literal["loguniform"]
    """loguniform"""
    low: Annotated[LogBound, Field(examples=[0.0001])]
    """Least value, above 0."""
    high: Annotated[LogBound, Field(examples=[0.1])]
    """Greatest value."""

    def to_parameter(self) -> SearchParameter:
        """Return the search parameter."""
        return search_space.LogUniform(self.low, self.high)


class IntegerSpec(_Range):
    """A whole number, all equally likely."""

    type: Literal["integer"]
    """integer"""
    low: Annotated[Whole, Field(examples=[8])]
    """Least value."""
    high: Annotated[Whole, Field(examples=[32])]
    """Greatest value."""

    def to_parameter(self) -> SearchParameter:
        """Return the search parameter."""
        return search_space.Integer(self.low, self.high)


class LogIntegerSpec(_Range):
    """A whole number, log-uniformly distributed."""

    type: Literal["log_integer"]
    """log_integer"""
    low: Annotated[Whole, Field(ge=1, examples=[16])]
    """Least value, at least 1."""
    high: Annotated[Whole, Field(ge=1, examples=[256])]
    """Greatest value."""

    def to_parameter(self) -> SearchParameter:
        """Return the search parameter."""
        return search_space.LogInteger(self.low, self.high)


class QuantisedSpec(_Range):
    """low, low + step, low + 2 steps, ... up to high."""

    type: Literal["quantised"]
    """quantised"""
    low: Annotated[Number, Field(examples=[16])]
    """Least value."""
    high: Annotated[Number, Field(examples=[128])]
    """Greatest value; the last step does not exceed it."""
    step: Annotated[Number, Field(examples=[16])]
    """Distance of neighbouring values, above 0 and not beyond high - low."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        span = self.high - self.low
        if self.step <= 0:
            raise refusal("a step above 0", "write the distance of two values", f"{self.step!r}")
        few = span > 0 and span / self.step <= GREATEST_INTEGER
        if span > 0 and not (few and self.to_parameter().cardinality > 1):
            found = f"step {self.step!r} in a range of {span!r}"
            most = f"a step of at most high - low ({span!r})"
            fix = "write a smaller step" if few else "write a greater step: it fits over 2^53 times"
            raise refusal(most, fix, found)
        return self

    def to_parameter(self) -> search_space.Quantised:
        """Return the search parameter."""
        return search_space.Quantised(self.low, self.high, self.step)


class OptionSpec(Model):
    """A value of a choice with the parameters that only it has."""

    value: Annotated[ValueField, Field(examples=["sgd"])]
    """The value itself: a text, a number, true, false or null."""
    space: Annotated[
        dict[ParameterName, ParameterSpec],
        Field(
            max_length=MOST_PARAMETERS,
            examples=[{"momentum": {"type": "uniform", "low": 0.0, "high": 0.99}}],
        ),
    ] = Field(default_factory=dict)
    """Parameters that a trial has only with this value."""


def _form(value: object) -> str:
    return "option" if isinstance(value, Mapping | OptionSpec) else "value"


class ChoiceSpec(Model):
    """One of the listed values."""

    type: Literal["choice"]
    """choice"""
    values: Annotated[
        tuple[
            Annotated[
                Annotated[ValueField, Tag("value")] | Annotated[OptionSpec, Tag("option")],
                Discriminator(_form),
            ],
            ...,
        ],
        Field(strict=False, min_length=1, max_length=10_000, examples=[["adam", "sgd"]]),
    ]
    """Texts, numbers, true, false or null, which reaches the trial as an empty text; or {value:
    ..., space: ...} for a value that brings parameters of its own with it."""

    @model_validator(mode="after")
    def _distinct(self) -> Self:
        seen: dict[str, Value] = {}
        for option in self._options():
            same = search_space.text(option.value)
            if same in seen:
                found = f"{seen[same]!r} and {option.value!r}, the same text for the trial"
                raise refusal("each value once", "remove one of them", found)
            seen[same] = option.value
        return self

    def _options(self) -> tuple[OptionSpec, ...]:
        given = self.values
        return tuple(v if isinstance(v, OptionSpec) else OptionSpec(value=v) for v in given)

    def to_parameter(self) -> SearchParameter:
        """Return the search parameter."""
        options = self._options()
        spaces = tuple(to_space(option.space) for option in options)
        return search_space.ChoiceParameter(
            tuple(o.value for o in options), spaces if any(spaces) else ()
        )


ParameterSpec = Annotated[
    UniformSpec | LogUniformSpec | IntegerSpec | LogIntegerSpec | QuantisedSpec | ChoiceSpec,
    Field(discriminator="type"),
]
SpaceSpec = Annotated[
    dict[ParameterName, ParameterSpec],
    BeforeValidator(_bounded),
    Field(
        min_length=1,
        max_length=MOST_PARAMETERS,
        examples=[{"learning_rate": {"type": "loguniform", "low": 0.0001, "high": 0.1}}],
    ),
]
OptionSpec.model_rebuild()
ChoiceSpec.model_rebuild()


@dataclass(frozen=True, slots=True)
class PlacedParameter:
    """A parameter with its path below `search.space`."""

    name: str
    path: KeyPath
    is_conditional: bool
    """True if only some values of a choice bring it with them."""


def placed_parameters(
    space: Mapping[str, ParameterSpec], holder: KeyPath = ()
) -> Iterator[PlacedParameter]:
    """Yield all parameters in the order of the file, a choice before those under it.

    `holder`: the path of the space itself below `search.space`.
    """
    for name, parameter in space.items():
        here = (*holder, name)
        yield PlacedParameter(name, here, is_conditional=bool(holder))
        for index, option in enumerate(getattr(parameter, "values", ())):
            if isinstance(option, OptionSpec):
                yield from placed_parameters(option.space, (*here, "values", index, "space"))


def to_space(space: Mapping[str, ParameterSpec]) -> search_space.Space:
    """Return the space of search parameters, in the order of the file."""
    return tuple((name, spec.to_parameter()) for name, spec in space.items())
