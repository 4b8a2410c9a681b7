"""The jobs of one size that are served before the knapsack decides, so that none ends too late.

`Paces` predicts how long each of them still trains, `FinishGuard` chooses among them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import NamedTuple, Protocol, TypeVar

import numpy as np

from hermes_ops.core.curves import Table, columns
from hermes_ops.core.model import Job, JobId, Snapshot
from hermes_ops.core.speed_model import Floats
from hermes_ops.policies.toolbox.job_speeds import KindKey, kind_key

Crowds = tuple[tuple[float, int], ...]
"""Times and the numbers of open jobs then, of which each is above all later ones."""

TAIL = 0.9
NEAR_S = 600.0

PARTS = 20
"""The parts of a training, equal in steps, whose paces are compared between jobs of a kind."""

NEWEST = 5
"""The newest steps that are reported, whose pace a job has now."""


class FinishFacts(NamedTuple):
    """A job: since its submission, left alone on its GPUs, and in all on its fair share of them."""

    elapsed_s: float
    left_s: float
    gpus: int
    fair_s: float

    @property
    def slack_s(self) -> float:
        """The seconds that it may still wait and end within its time on a fair share."""
        return self.fair_s - self.elapsed_s - self.left_s


def guarded_finish_order(
    jobs: Sequence[FinishFacts], gpus: int, *, tail: float = TAIL, near_s: float = NEAR_S
) -> list[int]:
    """Return the indices of the jobs, first served first; ties by index.

    First the jobs that will soon be late: slack in [0, `near_s`), the least first. Then those that
    would end last: left at least `tail` x the time until all GPUs have done all work, or the
    longest job; the longest first. Then the least work left, seconds x GPUs. A job that is late
    already is not first: nothing makes it end in time. All our own; with `tail` from 0.5 to 0.9 and
    `near_s` of 600 and 1800 s the figures on Shockwave's trace hardly differ.
    """
    if not jobs:
        return []
    last_s = _last_s(jobs, gpus)

    def rank(index: int) -> tuple[int, float, int]:
        job = jobs[index]
        if 0 <= job.slack_s < near_s:
            return 0, job.slack_s, index
        if job.left_s >= tail * last_s:
            return 1, -job.left_s, index
        return 2, job.left_s * job.gpus, index

    return sorted(range(len(jobs)), key=rank)


def predicted_finish_order(
    jobs: Sequence[FinishFacts],
    gpus: int,
    *,
    tail: float,
    near_s: float = NEAR_S,
    other_gpu_s: float = 0.0,
) -> list[int]:
    """Return the indices of the jobs to serve before all others, where `left_s` is predicted.

    First those that would end last: left at least `tail` x the time until all GPUs have done all
    work (`other_gpu_s` is that of other jobs), or the longest job; the longest first. Then those
    with slack below `near_s`, the least left first. Other than in `guarded_finish_order` a job that
    is late is among them: the prediction may be wrong, and a job that is given up waits for ever
    longer. The tail comes before them: late jobs may be many. Ties by index. All our own.
    """
    if not jobs:
        return []
    last_s = _last_s(jobs, gpus, other_gpu_s)
    ends_last = {i for i, job in enumerate(jobs) if job.left_s >= tail * last_s}
    near = (i for i, job in enumerate(jobs) if job.slack_s < near_s and i not in ends_last)
    longest = sorted(ends_last, key=lambda i: (-jobs[i].left_s, i))
    return [*longest, *sorted(near, key=lambda i: (jobs[i].slack_s + jobs[i].left_s, i))]


def _last_s(jobs: Sequence[FinishFacts], gpus: int, other_gpu_s: float = 0.0) -> float:
    """Return the seconds until all GPUs have done all work, or the longest job, whichever later."""
    work_gpu_s = other_gpu_s + sum(job.left_s * job.gpus for job in jobs)
    return max(work_gpu_s / max(1, gpus), *(job.left_s for job in jobs))


class Served(Protocol):
    """A job with what is left of it."""

    @property
    def job(self) -> Job:
        """The job."""
        ...

    @property
    def left_s(self) -> float:
        """Seconds on one GPU."""
        ...

    @property
    def alone_s(self) -> float | None:
        """Seconds of the whole training on its one size; None: it has several, or is unknown."""
        ...


ServedJob = TypeVar("ServedJob", bound=Served)


def with_crowd(before: Crowds, now_s: float, jobs: int, oldest_s: float) -> Crowds:
    """Return the crowds with that of now, without those before `oldest_s` and smaller ones."""
    kept = (entry for entry in before if oldest_s <= entry[0] <= now_s and entry[1] > jobs)
    return (*kept, (now_s, jobs))


def contention(crowds: Crowds, submitted_s: float, gpus: int) -> float:
    """Return the most jobs a GPU that were open at a time since then, at least 1.

    Source: Zheng et al., "Shockwave", NSDI 2023, compare with a share among all jobs of a trace;
    how many these are is not known beforehand, so here they are those that a job has met.
    """
    entry = min(bisect_left(crowds, (submitted_s, -1)), len(crowds) - 1)
    return max(1.0, crowds[entry][1] / max(1, gpus)) if crowds else 1.0


@dataclass(frozen=True, slots=True)
class FinishGuard:
    """Serves the jobs of one size that would end last, or later than on their fair share.

    A job of several sizes is not guarded: it gets more GPUs as it nears its end. `tail`, `near_s`:
    see `predicted_finish_order`.
    """

    tail: float
    near_s: float
    now_s: float
    gpus: int
    crowds: Crowds

    def sizes(
        self,
        choices: Sequence[ServedJob],
        gpus: int,
        best: Callable[[Sequence[ServedJob], int], dict[JobId, int]],
    ) -> dict[JobId, int]:
        """Return the sizes of all: the guarded jobs in their order, and the `best` of the rest."""
        guarded = self.guarded(choices, gpus)
        if not guarded:
            return best(choices, gpus)
        rest = [choice for choice in choices if choice.job.id not in guarded]
        return best(rest, gpus - sum(guarded.values())) | guarded

    def guarded(self, choices: Sequence[Served], gpus: int) -> dict[JobId, int]:
        """Return the sizes of the guarded jobs that fit, one after the other."""
        facts, jobs, other_gpu_s = [], [], 0.0
        for choice in choices:
            if choice.alone_s is None:
                other_gpu_s += choice.left_s
                continue
            jobs.append(choice.job)
            facts.append(self._facts(choice.job, choice.left_s, choice.alone_s))
        sizes: dict[JobId, int] = {}
        order = predicted_finish_order(
            facts, self.gpus, tail=self.tail, near_s=self.near_s, other_gpu_s=other_gpu_s
        )
        for job in (jobs[index] for index in order):
            if job.min_gpus <= gpus:
                sizes[job.id] = job.min_gpus
                gpus -= job.min_gpus
        return sizes

    def slack_s(self, job: Job, left_gpu_s: float, alone_s: float) -> float:
        """Return the seconds that the job may still wait and end as on its fair share."""
        return self._facts(job, left_gpu_s, alone_s).slack_s

    def _facts(self, job: Job, left_gpu_s: float, alone_s: float) -> FinishFacts:
        fair_s = alone_s * contention(self.crowds, job.submitted_s, self.gpus)
        elapsed_s = max(0.0, self.now_s - job.submitted_s)
        return FinishFacts(elapsed_s, left_gpu_s / job.min_gpus, job.min_gpus, fair_s)


@dataclass(frozen=True, slots=True)
class Paces:
    """The paces of the jobs of one size in a snapshot, by kind.

    `profiles`: by kind the mean seconds of each of PARTS parts of a training, over those of the
    first; a part that no job has reached has the pace of the one before. `first_s`: the mean
    seconds of a step in the first part, by kind and number of GPUs.
    """

    profiles: Mapping[KindKey, Floats]
    first_s: Mapping[tuple[KindKey, int], float]

    @classmethod
    def from_snapshot(cls, snapshot: Snapshot) -> Paces:
        """Learn from all jobs that have begun, the ended ones too."""
        begun = [
            job for job in snapshot.jobs if job.curve and job.total_steps and has_one_size(job)
        ]
        rows = _PARTS.get(begun) if begun else np.empty((0, PARTS))
        of_kind: dict[KindKey, list[int]] = {}
        firsts: dict[tuple[KindKey, int], list[float]] = {}
        for row, job in enumerate(begun):
            if rows[row, 0] > 0:
                kind = kind_key(job)
                of_kind.setdefault(kind, []).append(row)
                step_s = float(rows[row, 0]) * PARTS / (job.total_steps or 1)
                firsts.setdefault((kind, job.min_gpus), []).append(step_s)
        return cls(
            {kind: _profile(rows[numbers]) for kind, numbers in of_kind.items()},
            {key: mean(sorted(steps)) for key, steps in firsts.items()},
        )

    def left_s(self, job: Job) -> float | None:
        """Predict the seconds that the job still trains on its GPUs; None: nothing tells them."""
        if not job.total_steps:
            return None
        step_s = newest_step_s(job)
        if step_s is None:
            step_s = job.seconds_a_step(job.min_gpus)
        if step_s is None:
            step_s = self.first_s.get((kind_key(job), job.min_gpus))
        if step_s is None:
            return None
        done = min(job.last_step / job.total_steps, 1.0)
        return step_s * job.total_steps * self._relative_left(kind_key(job), done)

    def _relative_left(self, kind: KindKey, done: float) -> float:
        """Return the time left over that of the whole training at the pace of `done`, a part."""
        profile = self.profiles.get(kind)
        if profile is None:
            return 1.0 - done
        place = done * PARTS
        now = min(int(place), PARTS - 1)
        left = float(profile[now]) * (now + 1 - place) + float(profile[now + 1 :].sum())
        before = min(max(0, int(np.ceil(place)) - 1), PARTS - 1)
        return max(0.0, left) / float(profile[before]) / PARTS


def has_one_size(job: Job) -> bool:
    """Return whether the job takes one number of GPUs alone, and no batch from a plan."""
    return job.min_gpus == job.max_gpus and job.batch_range is None


def newest_step_s(job: Job) -> float | None:
    """Return the seconds of a step over the newest steps reported; None before any."""
    if not job.curve:
        return None
    newest, since = job.curve[-1], job.curve[-NEWEST - 1] if len(job.curve) > NEWEST else None
    steps = newest.step - (since.step if since else 0)
    seconds = newest.seconds - (since.seconds if since else 0.0)
    return seconds / steps if steps > 0 and seconds > 0 else None


def _profile(rows: Floats) -> Floats:
    """Return the mean relative pace of each part, of jobs that have all reached the first."""
    relative = rows / rows[:, :1]
    reached = np.isfinite(relative)
    numbers = reached.sum(axis=0)
    sums = np.sort(np.where(reached, relative, 0.0), axis=0).sum(axis=0)
    profile = np.ones(PARTS)
    for part in range(PARTS):
        if numbers[part] and sums[part] > 0:
            profile[part] = sums[part] / numbers[part]
        elif part:
            profile[part] = profile[part - 1]
    return profile


def _part_seconds(jobs: Sequence[Job]) -> Floats:
    """Return the seconds of each part of each job's training, (jobs, PARTS); NaN: not reached."""
    rows = np.full((len(jobs), PARTS), np.nan)
    for row, job in enumerate(jobs):
        curve = columns(job.curve)
        steps = np.concatenate(([0.0], curve.steps))
        seconds = np.concatenate(([0.0], curve.seconds))
        marks = np.linspace(0.0, 1.0, PARTS + 1) * (job.total_steps or 1)
        rows[row] = np.diff(np.interp(marks, steps, seconds, right=np.nan))
    return rows


_PARTS: Table[Job] = Table(_part_seconds, PARTS)
