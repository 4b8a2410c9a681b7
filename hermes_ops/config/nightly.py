"""The section `nightly` of a sweep file: how a sweep with a schedule is repeated."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from pydantic import AfterValidator, Field

from hermes_ops.config.fields import Model, Text, refusal


class Overlap(StrEnum):
    """What becomes of a night whose predecessor still runs."""

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
    """How the sweep is repeated where `schedule` says when."""

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
