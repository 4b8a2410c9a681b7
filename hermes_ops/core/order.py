"""The one order that breaks ties: submission time, then trial number as a person counts."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from itertools import islice
from operator import attrgetter, lt
from typing import Protocol, TypeVar

_DIGITS = re.compile(r"(\d+)")
_SUBMITTED, _ID = attrgetter("submitted_s"), attrgetter("id")
SubmissionKey = tuple[float, tuple[tuple[int, int | str], ...]]


class Submitted(Protocol):
    """Anything with a time of submission and an id, such as a job."""

    @property
    def id(self) -> str:
        """The id, unique in a pool."""
        ...

    @property
    def submitted_s(self) -> float:
        """The time of submission in seconds of the driver's clock."""
        ...


J = TypeVar("J", bound=Submitted)


@lru_cache(maxsize=65_536)  # ids stay the same from round to round
def natural(text: str) -> tuple[tuple[int, int | str], ...]:
    """Return a sort key that puts "s/2" before "s/10"; only "2" and "02" share a key."""
    parts = _DIGITS.split(text)
    return tuple((0, int(p)) if p.isdecimal() else (1, p) for p in parts)


@lru_cache(maxsize=131_072)
def _tie(text: str) -> tuple[tuple[int, int | str], ...]:
    return (*natural(text), (2, str(text)))


def submission(job: Submitted) -> SubmissionKey:
    """Return the sort key: submission time, natural order of the id, the id itself."""
    return (job.submitted_s, _tie(job.id))


def by_submission(jobs: Iterable[J]) -> list[J]:
    """Return the jobs, first submitted first; the same list for any order of the input."""
    by_time = sorted(jobs, key=_SUBMITTED)
    times_s = list(map(_SUBMITTED, by_time))
    if all(map(lt, times_s, islice(times_s, 1, None))):  # no ties
        return by_time
    # The keys of `submission`, made without a call in Python for each of 10,000 jobs.
    keys = list(zip(times_s, map(_tie, map(_ID, by_time)), strict=True))
    return [by_time[place] for place in sorted(range(len(by_time)), key=keys.__getitem__)]
