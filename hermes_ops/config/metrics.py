"""Metrics beside the objective: what is kept of them, and the bounds that the best trial keeps."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field, model_validator

from hermes_ops.config.fields import Model, OwnPattern, Real, Text, refusal
from hermes_ops.core.secondary import Secondary

MOST_METRICS = 50


class Direction(StrEnum):
    """Which way a metric is better."""

    MINIMIZE = "minimize"
    MAXIMIZE = "maximize"


class MetricSpec(Model):
    """A metric beside the objective; it is shown with it, and may be bounded."""

    name: Annotated[Text, Field(min_length=1, max_length=250, examples=["latency_ms"])]
    """Name of the metric, as the script reports it."""
    direction: Annotated[Direction | None, Field(strict=False, examples=["minimize"])] = None
    """minimize or maximize, for its best value; null: that of its only bound, and without one it
    has no best value."""
    pattern: Annotated[OwnPattern | None, Field(examples=["latency: (?P<value>\\S+) ms"])] = None
    """Regular expression for the output's lines, with the group value, optionally step; null: it
    is read as all others."""
    at_most: Annotated[Real | None, Field(examples=[20])] = None
    """A trial whose last value is greater is never the best; null: no bound."""
    at_least: Annotated[Real | None, Field(examples=[0.9])] = None
    """A trial whose last value is less is never the best; null: no bound."""

    @model_validator(mode="after")
    def _possible(self) -> MetricSpec:
        if self.at_most is not None and self.at_least is not None and self.at_least > self.at_most:
            found = f"at_least {self.at_least:g} and at_most {self.at_most:g}"
            raise refusal("bounds between which there is a value", "exchange them", found)
        return self

    @property
    def is_bounded(self) -> bool:
        """True when a trial can miss a bound of it."""
        return self.at_most is not None or self.at_least is not None

    def to_secondary(self) -> Secondary:
        """The metric as those who judge trials know it, its direction told by its only bound."""
        direction = self.direction
        if direction is None and (self.at_most is None) != (self.at_least is None):
            direction = Direction.MINIMIZE if self.at_least is None else Direction.MAXIMIZE
        word = None if direction is None else direction.value
        return Secondary(self.name, word, self.at_most, self.at_least)
