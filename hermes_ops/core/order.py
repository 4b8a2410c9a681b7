"""The one order that breaks ties: submission time, then trial number as a person counts."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from itertools import islice
from operator import attrgetter, lt
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hermes_ops.core.model import Job

_DIGITS = re.compile(r"(\d+)")
_SUBMITTED, _ID = attrgetter("submitted_s"), attrgetter("id")
SubmissionKey = tuple[float, tuple[tuple[int, int | str], ...]]


@lru_cache(maxsize=65_536)  # ids stay the same from round to round
def natural(text: str) -> tuple[tuple[int, int | str], ...]:
    """A sort key that puts "s/2" before "s/10"; distinct texts may share it only if "2" is "02"."""
    parts = _DIGITS.split(text)
    return tuple((0, int(p)) if p.isdecimal() else (1, p) for p in parts)


@lru_cache(maxsize=131_072)
def _tie(text: str) -> tuple[tuple[int, int | str], ...]:
    return (*natural(text), (2, str(text)))


def submission(job: Job) -> SubmissionKey:
    """Sort key: submission time, then natural order of the id, then the id itself."""
    return (job.submitted_s, _tie(job.id))


def by_submission(jobs: Iterable[Job]) -> list[Job]:
    """The jobs, first submitted first; the same list for any order of the input."""
    found = sorted(jobs, key=_SUBMITTED)
    times_s = list(map(_SUBMITTED, found))
    if all(map(lt, times_s, islice(times_s, 1, None))):  # nobody came at the same time: no tie
        return found
    # The keys of `submission`, made without a call in Python for each of 10,000 jobs.
    keys = list(zip(map(_SUBMITTED, found), map(_tie, map(_ID, found)), strict=True))
    return [found[place] for place in sorted(range(len(found)), key=keys.__getitem__)]
