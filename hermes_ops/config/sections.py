"""The smaller sections of a sweep file: `metrics`, `nightly`, `checkpoints` and `model`."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Annotated
from urllib.parse import urlsplit
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from pydantic import AfterValidator, Field, model_validator

from hermes_ops.config.fields import MetricPattern, Model, Real, Text, refusal
from hermes_ops.core.secondary_metrics import SecondaryMetric

MOST_METRICS = 50


class Direction(StrEnum):
    """Which way a metric is better."""

    MINIMIZE = "minimize"
    MAXIMIZE = "maximize"


class MetricSpec(Model):
    """A metric other than the objective; it is shown with it, and may be bounded."""

    name: Annotated[Text, Field(min_length=1, max_length=250, examples=["latency_ms"])]
    """Name of the metric, as the script reports it."""
    direction: Annotated[Direction | None, Field(strict=False, examples=["minimize"])] = None
    """minimize or maximize, for its best value; null: that of its only bound, and without one it
    has no best value."""
    pattern: Annotated[MetricPattern | None, Field(examples=["latency: (?P<value>\\S+) ms"])] = None
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

    def to_secondary(self) -> SecondaryMetric:
        """Return the metric as trials are judged by it; its only bound implies its direction."""
        direction = self.direction
        if direction is None and (self.at_most is None) != (self.at_least is None):
            direction = Direction.MINIMIZE if self.at_least is None else Direction.MAXIMIZE
        word = None if direction is None else direction.value
        return SecondaryMetric(self.name, word, self.at_most, self.at_least)


class Overlap(StrEnum):
    """What to do with a night whose predecessor still runs."""

    SKIP = "skip"
    QUEUE = "queue"
    REPLACE = "replace"


def _timezone(value: str) -> str:
    try:
        ZoneInfo(value)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        raise refusal(
            "a name of the time zone database", "for example Europe/Berlin, or UTC"
        ) from None
    return value


class Nightly(Model):
    """How a sweep with a `schedule` is repeated."""

    timezone: Annotated[
        Text, Field(max_length=100, examples=["Europe/Berlin"]), AfterValidator(_timezone)
    ] = "UTC"
    """Time zone of the schedule."""
    overlap: Annotated[Overlap, Field(strict=False)] = Overlap.SKIP
    """If the last night's sweep still runs: skip tonight's, queue it, or replace the old one."""
    warm_start: bool = True
    """Whether the last night's best configuration is tried first."""
    compare: Annotated[int, Field(ge=0, le=365)] = 7
    """How many earlier nights the report shows beside this one."""


WEEK_S = 604_800.0
BYTES_OF_GIGABYTE = 1e9
REGISTERED_NAME = r"^[A-Za-z0-9_][A-Za-z0-9 ._\-]{0,127}$"
ALIAS = r"^[A-Za-z][A-Za-z0-9_\-]{0,127}$"
STORE = r"[a-z][a-z0-9+.\-]*://[A-Za-z0-9._~%@:/+,=\-]+"


def _store(value: str) -> str:
    example = "for example s3://bucket/prefix"
    allowed = "the URL of a folder as fsspec reads it, without blanks, wildcards and options"
    if not re.fullmatch(STORE, value) or "/.." in value:
        raise refusal(allowed, example, "another text")
    try:
        place = urlsplit(value)
        secret = place.password is not None
    except ValueError:
        raise refusal(allowed, example, "another text") from None
    if secret:
        fix = "remove it; give it to trials as environment variables, such as AWS_ACCESS_KEY_ID"
        raise refusal("a URL without user:password@", fix, "a URL with a password in it")
    if place.scheme == "memory" or not (place.netloc + place.path).strip("/"):
        raise refusal("a folder that outlives its trials", example)
    return value


Store = Annotated[str, Field(max_length=1_000), AfterValidator(_store)]


class Checkpoints(Model):
    """How many checkpoints are kept, and for how long."""

    keep_seconds: Annotated[float, Field(ge=0, le=1e9, examples=[86400])] = WEEK_S
    """How long trials that `hermes sweep resume` can take up keep theirs after the sweep's end."""
    keep_last: Annotated[int, Field(ge=1, le=10_000)] | None = None
    """How many a trial keeps in addition to the best; null: Keras 2, other scripts all that they
    leave. Each file or folder directly in $HERMES_CHECKPOINT_DIR is one."""
    max_gigabytes: Annotated[float, Field(gt=0, le=1e9, examples=[100])] | None = None
    """Size of all checkpoints of the sweep above which those of ended trials go; null: no limit."""
    store: Annotated[Store | None, Field(examples=["s3://bucket/prefix"])] = None
    """Folder of an object store, by fsspec's URL, to which checkpoints are copied and from which a
    trial takes the newest wherever it goes on; null: only the trial's folder has them."""

    @property
    def max_bytes(self) -> float | None:
        """The limit in bytes."""
        return None if self.max_gigabytes is None else self.max_gigabytes * BYTES_OF_GIGABYTE


class BestModel(Model):
    """Registration of the best trial's model in MLflow's registry."""

    register_as: Annotated[str, Field(pattern=REGISTERED_NAME, examples=["digits"])] | None = None
    """Name of the registered model of which it becomes a version; null: it is not registered."""
    alias: Annotated[str, Field(pattern=ALIAS, examples=["champion"])] | None = None
    """Alias that points to the new version from then on."""

    @model_validator(mode="after")
    def _registered(self) -> BestModel:
        if self.alias is not None and self.register_as is None:
            fix = "write register_as: with the registered model's name"
            raise refusal("an alias with register_as only", fix, f"alias {self.alias}")
        if self.alias is not None and _is_reserved(self.alias):
            allowed = "an alias that is neither `latest` nor a version such as v1"
            raise refusal(allowed, "write another one", self.alias)
        return self


def _is_reserved(alias: str) -> bool:
    """Return whether MLflow reserves the alias."""
    return alias.lower() == "latest" or (alias[:1].lower() == "v" and alias[1:].isdigit())
