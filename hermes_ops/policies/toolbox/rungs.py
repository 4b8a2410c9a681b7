"""Rungs: the steps at which the trials of a sweep are compared, and the ranks there.

The figure at a rung is the lowest finite loss up to its step; ties go to the earlier trial.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf, isfinite, nan

import numpy as np

from hermes_ops.core.curves import best_by, columns
from hermes_ops.core.model import Job, JobId, Phase


@dataclass(frozen=True, slots=True)
class RungRank:
    """The rank of one trial at the newest rung that it has reached.

    `rung` is its steps (0: none reached), `following` the next one's, None when the trial ends
    before it. `is_waiting` is True until the trial's first report after that rung, unless its
    present segment began there: then it was decided that it continues. `rank` counts from 1
    among `size` trials that have reached the rung, of which the first `places` are promoted;
    `limit` is the figure of the last of these (nan: no places).
    """

    rung: int = 0
    following: int | None = None
    is_waiting: bool = False
    rank: int = 0
    size: int = 0
    places: int = 0
    loss: float = inf
    limit: float = nan

    @property
    def is_promoted(self) -> bool:
        """True for a trial among the first 1/eta of its rung, with a finite loss."""
        return self.rank <= self.places and isfinite(self.loss)


def rung_steps(first: int, eta: int, last: int) -> Iterator[int]:
    """Yield the rungs first, first x eta, first x eta², ... up to `last` steps."""
    rung = first
    while rung <= last:
        yield rung
        rung *= eta


def rung_ranks(jobs: Sequence[Job], first: int, eta: int) -> dict[JobId, RungRank]:
    """Return the rank of each job that has not ended; `jobs` of one sweep, by submission.

    All that have reached a rung count there, ended ones too. A rung at or beyond a trial's last
    step is none for it.
    """
    ranks = {
        job.id: RungRank(following=_next(job, 0, first, eta)) for job in jobs if _is_alive(job)
    }
    deepest = max((job.last_step for job in jobs), default=0)
    there = list(jobs)
    for rung in rung_steps(first, eta, deepest):
        there = [job for job in there if job.last_step >= rung]
        figures = np.array([best_by(job.curve, rung) for job in there])
        order = np.argsort(figures, kind="stable")
        places = len(there) // eta
        limit = float(figures[order[places - 1]]) if places else nan
        for rank, index in enumerate(order.tolist(), start=1):
            job = there[index]
            if job.id in ranks and not _ends_by(job, rung) and job.last_step < rung * eta:
                ranks[job.id] = RungRank(
                    rung=rung,
                    following=_next(job, rung, first, eta),
                    is_waiting=_waits(job, rung),
                    rank=rank,
                    size=len(there),
                    places=places,
                    loss=float(figures[index]),
                    limit=limit,
                )
    return ranks


@dataclass(frozen=True, slots=True)
class Bracket:
    """One synchronous halving: the trials that must reach `rung` now, and those cut before.

    `rung` is None when those that are left run to their ends. `runs` have still to reach it, the
    better at the rung before first; `rests` have and wait for the others. `cut` are (trial, rung,
    rank, size) of those left behind, the last to be cut first, the better first. `size` counts
    `runs`, `rests` and ended ones.
    """

    rung: int | None
    runs: tuple[Job, ...]
    rests: tuple[Job, ...]
    cut: tuple[tuple[Job, int, int, int], ...]
    size: int


def bracket(members: Sequence[Job], rungs: Sequence[int], eta: int) -> Bracket:
    """Return how far the halving of these trials has come; `members` by submission.

    At each rung all wait for the last of those that are left, then the first 1/eta (at least one)
    go on. A trial that has ended counts as having reached every rung.
    """
    left = list(members)
    number = {job.id: place for place, job in enumerate(members)}
    cut: list[tuple[Job, int, int, int]] = []
    for rung in rungs:
        if len(left) < 2:
            break
        there = [job for job in left if not _is_alive(job) or job.last_step >= rung]
        figures = {job.id: (best_by(job.curve, rung), number[job.id]) for job in there}
        there.sort(key=lambda job: figures[job.id])
        if len(there) < len(left):
            runs = tuple(job for job in left if _is_alive(job) and job.last_step < rung)
            rests = tuple(filter(_is_alive, there))
            return Bracket(rung, runs, rests, tuple(cut), len(left))
        keep = max(1, len(left) // eta)
        ranked = enumerate(there[keep:], start=keep + 1)
        losers = [(job, rung, rank, len(there)) for rank, job in ranked if _is_alive(job)]
        cut = losers + cut
        left = there[:keep]
    return Bracket(None, tuple(filter(_is_alive, left)), (), tuple(cut), len(left))


def _is_alive(job: Job) -> bool:
    return job.phase is not Phase.ENDED


def _ends_by(job: Job, rung: int) -> bool:
    return job.total_steps is not None and rung >= job.total_steps


def _next(job: Job, rung: int, first: int, eta: int) -> int | None:
    following = rung * eta if rung else first
    return None if _ends_by(job, following) else following


def _waits(job: Job, rung: int) -> bool:
    resumed = job.holds_gpus and job.last_step <= job.steps_at_start
    if resumed or job.phase is Phase.STARTING:
        return False
    steps = columns(job.curve).steps
    return len(steps) < 2 or bool(steps[-2] < rung)
