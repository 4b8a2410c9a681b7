"""Elastic 2D-LAS: Tiresias' queues of attained service, whose jobs shrink and grow."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from hermes_ops.core.model import Job, JobId, Plan, Reason, Snapshot, Term
from hermes_ops.core.oracle import Oracle
from hermes_ops.core.order import submission
from hermes_ops.policies.toolbox.job_speeds import JobSpeeds, KnownSpeeds, MeasuredSpeeds
from hermes_ops.policies.toolbox.multilevel_queues import SLACK_GPU_S
from hermes_ops.policies.toolbox.parameter_checks import ascending, whole
from hermes_ops.policies.toolbox.planned_sizes import PlannedSizes, planned, speed_up_gain, widen
from hermes_ops.policies.toolbox.sized_grants import SizingProblem


@dataclass(frozen=True, slots=True)
class ElasticLasMemory:
    """The sizes planned last, and the queue of each job then."""

    planned: PlannedSizes = field(default_factory=PlannedSizes)
    levels: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ElasticTwoDLas:
    """Serve queues of attained service in order, then give the GPUs left where they speed up most.

    A job's queue is the number of `limits_gpu_s` that its GPUs x seconds have reached. In the order
    of the queues each job gets the size that its user requests, if it fits. If more than `pending`
    jobs wait then, the jobs of all queues but the first shrink to their least size. What is left
    goes to the greatest gain of speed-up a GPU: a waiting job may get its least size, another its
    next. Sizes are planned when a job arrives, ends or changes its queue.

    Source: Wu et al., "Elastic Deep Learning in Multi-Tenant GPU Clusters" (TPDS 2021),
    E-Tiresias, as in the Voda scheduler (heyfey/vodascheduler, commit 756e4d0), whose limit and
    `pending` are the defaults. Our choices: within a queue those that have begun are first, then by
    submission (Voda: by first start); no promotion of jobs that wait for long, which is left to
    the pool's guards; speeds as in `doubling`.
    """

    limits_gpu_s: tuple[float, ...] = (3_600.0,)
    pending: int = 10
    oracle: Oracle | None = None
    name: ClassVar[str] = "elastic-2d-las"
    preempts: ClassVar[bool] = True
    sizes: ClassVar[bool] = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "limits_gpu_s", ascending("limits_gpu_s", self.limits_gpu_s))
        whole("pending", self.pending, 0)

    def initial(self) -> ElasticLasMemory:
        """Return the memory without planned sizes."""
        return ElasticLasMemory()

    def decide(self, snapshot: Snapshot, memory: ElasticLasMemory) -> tuple[Plan, ElasticLasMemory]:
        """Return the plan that serves the queues, and ask for the next demotion."""
        problem = SizingProblem.from_snapshot(snapshot)
        levels = {job.id: self._level(job, snapshot.time_s) for job in snapshot.jobs}

        def place(job: Job) -> tuple[object, ...]:
            return levels[job.id], not job.segments and not job.curve, submission(job)

        speeds: JobSpeeds = (
            MeasuredSpeeds(snapshot) if self.oracle is None else KnownSpeeds(self.oracle, snapshot)
        )
        now = tuple(levels[job.id] for job in problem.jobs)
        before = memory.planned if now == memory.levels else PlannedSizes()

        def sizes(subproblem: SizingProblem) -> dict[JobId, int]:
            order = sorted(subproblem.jobs, key=place)
            return _Service(order, levels, subproblem.gpus, speeds).sizes(self.pending)

        after = planned(before, problem, None, sizes)
        granted = dict(after.sizes)

        def explain(job: Job, is_granted: bool) -> Reason:
            terms = (Term("attained_gpu_s", job.attained_gpu_s(snapshot.time_s)),)
            if is_granted:
                return Reason("runs: its queue has its turn, or it fits beside them", terms)
            change = "a job of its queue ending or being demoted"
            return Reason("waits: others have had less GPU time", terms, None, change)

        waiting = sorted((job for job in problem.jobs if not job.holds_gpus), key=place)
        review_s = self._next_demotion_s(problem, granted)
        plan = problem.plan(problem.grants(granted), explain, waiting, review_s)
        return plan, ElasticLasMemory(after, now)

    def _level(self, job: Job, now_s: float) -> int:
        return bisect_right(self.limits_gpu_s, job.attained_gpu_s(now_s) + SLACK_GPU_S)

    def _next_demotion_s(self, problem: SizingProblem, sizes: dict[JobId, int]) -> float | None:
        """Return when the first job reaches the limit of its queue."""
        now_s, due_s = problem.snapshot.time_s, []
        for job in problem.jobs:
            level = self._level(job, now_s)
            if sizes.get(job.id) and level < len(self.limits_gpu_s):
                left_gpu_s = self.limits_gpu_s[level] - job.attained_gpu_s(now_s)
                due_s.append(now_s + left_gpu_s / sizes[job.id])
        return min(due_s, default=None)


@dataclass(slots=True)
class _Service:
    """One service of the jobs in order: GPUs that are left, and the size of each job."""

    order: Sequence[Job]
    levels: dict[JobId, int]
    left: int
    speeds: JobSpeeds
    given: dict[JobId, int] = field(default_factory=dict)

    def sizes(self, pending: int) -> dict[JobId, int]:
        """Return the sizes; more than `pending` jobs without GPUs make the others shrink."""
        for job in self.order:
            self._give(job, _requested(job))
        if len(self.order) - len(self.given) > pending:
            for job in self.order:
                if job.id in self.given and self.levels[job.id]:
                    self._give(job, job.min_gpus)
        # ties go by the order
        widen(self.order, self.given, self.left, speed_up_gain(self.speeds), Job.size_above)
        return self.given

    def _give(self, job: Job, size: int) -> None:
        added = size - self.given.get(job.id, 0)
        if added <= self.left:
            self.given[job.id] = size
            self.left -= added


def _requested(job: Job) -> int:
    """Return the size that its user requests, if the job takes it."""
    requested = job.requested_gpus
    return requested if requested is not None and job.takes(requested) else job.min_gpus
