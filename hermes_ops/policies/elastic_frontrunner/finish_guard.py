"""The jobs of one size that are served before the knapsack decides, so that none ends too late."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from hermes_ops.core.model import Job, JobId
from hermes_ops.policies.toolbox.guarded_finish import FinishFacts, predicted_finish_order

Crowds = tuple[tuple[float, int], ...]
"""Times and the numbers of open jobs then, of which each is above all later ones."""


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
