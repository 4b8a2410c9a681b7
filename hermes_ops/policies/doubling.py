"""Doubling: the job whose remaining time shrinks most for each further GPU gets twice as many."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from hermes_ops.core.model import Job, JobId, Plan, Reason, Snapshot
from hermes_ops.core.oracle import Oracle
from hermes_ops.policies.toolbox.job_speeds import JobSpeeds, KnownSpeeds, MeasuredSpeeds
from hermes_ops.policies.toolbox.parameter_checks import positive, positive_or_none
from hermes_ops.policies.toolbox.planned_sizes import (
    INTERVAL_S,
    PlannedSizes,
    planned,
    time_gain,
    twice,
    widened,
)
from hermes_ops.policies.toolbox.sized_grants import SizingProblem

STEP_S = 150.0
EPS = 1e-9  # a turn is over at its very end, although clocks are floats


@dataclass(frozen=True, slots=True)
class DoublingMemory:
    """The sizes planned last, and when each exploring job began to explore."""

    planned: PlannedSizes = field(default_factory=PlannedSizes)
    exploring: tuple[tuple[JobId, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Doubling:
    """Give each job its least size by submission, then double where it saves most time a GPU.

    The time saved is work left / speed(w) - work left / speed(2w), over the w GPUs that it takes.
    Sizes are planned when a job arrives or ends, and every `interval_s`.

    With an oracle the work left and the speeds are known: the paper's precompute. With `explore`
    the work left is known and the speeds are measured: a job first holds its largest size (a
    power of two times its least) for `explore_s` at each of these sizes, and trains on that size
    while the rest of its GPUs idle; exploring jobs are served first, by submission, and one that
    finds no room then starts without exploring. With `blind`, or without an oracle, jobs of a kind
    share their measured speeds, and the work left is that of `MeasuredSpeeds`.

    Source: Capes et al. (arXiv 1908.08082), sections 3 and 4. Our choices: jobs that do not fit
    wait in order of submission; with known speeds and `interval_s` none, sizes are planned at
    arrivals and ends alone, with measured ones every 600 s too; that others wait for an exploring
    job is read from the paper's figures.
    """

    oracle: Oracle | None = None
    interval_s: float | None = None
    explore: bool = False
    explore_s: float = STEP_S
    blind: bool = False
    name: ClassVar[str] = "doubling"
    preempts: ClassVar[bool] = True
    sizes: ClassVar[bool] = True

    def __post_init__(self) -> None:
        positive_or_none("interval_s", self.interval_s)
        positive("explore_s", self.explore_s)

    def initial(self) -> DoublingMemory:
        """Return the memory without planned sizes."""
        return DoublingMemory()

    def decide(self, snapshot: Snapshot, memory: DoublingMemory) -> tuple[Plan, DoublingMemory]:
        """Return the plan of the sizes, which are planned again when that is due."""
        problem = SizingProblem.from_snapshot(snapshot)
        knows_speeds = self.oracle is not None and not (self.explore or self.blind)
        interval_s = self.interval_s if knows_speeds or self.interval_s else INTERVAL_S
        exploring = self._exploring(problem, memory) if self.explore else {}
        before = memory.planned if tuple(exploring.items()) == memory.exploring else PlannedSizes()
        now_s = snapshot.time_s
        reserved = {job.id: _widths(job) for job in problem.jobs if job.id in exploring}

        def sizes(fitting: SizingProblem) -> dict[JobId, int]:
            others = [job for job in fitting.jobs if job.id not in exploring]
            gpus = fitting.gpus - sum(widths[-1] for widths in reserved.values())
            return widened(others, gpus, time_gain(self._speeds(snapshot)))

        after = planned(before, problem, interval_s, sizes)
        granted = dict(after.sizes)
        review_s = after.review_s(interval_s)
        for job, began_s in exploring.items():
            widths = reserved[job]
            turn = min(int((now_s - began_s) / self.explore_s + EPS), len(widths) - 1)
            granted[job] = widths[turn]
            next_s = began_s + (turn + 1) * self.explore_s
            review_s = next_s if review_s is None else min(next_s, review_s)
        plan = problem.plan(problem.grants(granted), _reason, None, review_s)
        return plan, DoublingMemory(after, tuple(exploring.items()))

    def _speeds(self, snapshot: Snapshot) -> JobSpeeds:
        if self.oracle is None or self.blind:
            return MeasuredSpeeds(snapshot)
        if self.explore:
            return MeasuredSpeeds(snapshot, self.oracle)
        return KnownSpeeds(self.oracle, snapshot)

    def _exploring(self, problem: SizingProblem, memory: DoublingMemory) -> dict[JobId, float]:
        """Return the exploring jobs, by submission, and when each began."""
        began = dict(memory.exploring)
        now_s, left = problem.snapshot.time_s, problem.gpus
        exploring: dict[JobId, float] = {}
        for job in problem.jobs:
            widths = _widths(job)
            began_s = began.get(job.id, None if job.segments else now_s)
            if began_s is None or widths[-1] > left:
                continue
            if began_s <= now_s < began_s + len(widths) * self.explore_s:
                exploring[job.id] = began_s
                left -= widths[-1]
        return exploring


def _widths(job: Job) -> list[int]:
    """Return the least size of a job, and those of doubling it, ascending."""
    widths = [job.min_gpus]
    while (more := twice(job, widths[-1])) is not None:
        widths.append(more)
    return widths


def _reason(job: Job, is_granted: bool) -> Reason:  # noqa: ARG001 - the same for every job
    if is_granted:
        return Reason("runs: no job would save more time by twice as many GPUs")
    return Reason("waits for jobs submitted before it", would_change="one of them ending")
