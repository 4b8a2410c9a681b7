"""The oracle of a simulated workload, and the bound for all policies that it allows."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from typing import ClassVar

from hermes_ops.core.model import Job, JobId, Plan, Reason, Snapshot
from hermes_ops.core.oracle import GoodputOracle, Oracle
from hermes_ops.core.order import submission
from hermes_ops.policies.toolbox.fill import fill
from hermes_ops.simulator.metrics import lowest_loss
from hermes_ops.simulator.simulated_job import OracleJob
from hermes_ops.simulator.workload import Work, Workload


def oracle(workload: Workload) -> GoodputOracle:
    """Return the oracle of the workload's jobs."""
    return _Clairvoyant({work.id: work for work in workload.jobs})


@dataclass(frozen=True, slots=True)
class _Clairvoyant:
    works: dict[JobId, Work] = field(repr=False)

    def remaining_s(self, job: Job, now_s: float) -> float:
        """Return the seconds of training that are left; exact for the jobs of a simulation."""
        seconds = self.works[job.id].seconds
        if isinstance(job, OracleJob):
            return max(0.0, seconds - job.progress_s(now_s))
        return max(0.0, seconds - job.attained_gpu_s(now_s) / job.min_gpus)

    def remaining_work(self, job: Job, now_s: float) -> float:
        """Return the units of work of the job's training model that are left, or its seconds."""
        return self.remaining_s(job, now_s)

    def rate(self, job: Job, placement: tuple[int, ...], batch: int | None = None) -> float:
        """Return the pace of the training model; without one, 1 on the GPUs that the job needs.

        A job that is shown without a range of batches trains with the requested one.
        """
        work, gpus = self.works[job.id], sum(placement)
        if work.training is None:
            return float(gpus == work.gpus)
        if not job.takes(gpus):
            return 0.0
        chosen = work.batch if batch is None and job.batch_range is None else batch
        return work.training.pace(placement, len(job.curve), chosen).rate

    def expected_rate(self, job: Job, placement: tuple[int, ...]) -> float:
        """Return what the job expects by the noise that it has measured last."""
        work = self.works[job.id]
        if work.expects is None:
            return self.rate(job, placement)
        batch = job.batch_trained if isinstance(job, OracleJob) else None
        return work.expects(placement, len(job.curve), batch)

    def remaining_steps(self, job: Job, now_s: float) -> float:
        """Return the recorded steps after the next point of the curve, or the work that is left."""
        steps = self.works[job.id].steps
        if not steps:
            return self.remaining_work(job, now_s)
        return max(1.0, steps[-1] - steps[min(len(job.curve), len(steps) - 1)])

    def step_s(self, job: Job, placement: tuple[int, ...]) -> float:
        """Return the seconds of a step with the requested batch, or of a unit of work."""
        work, gpus = self.works[job.id], sum(placement)
        if work.training is None or not work.steps or not job.takes(gpus):
            rate = self.rate(job, placement, work.batch)
            return 1.0 / rate if rate > 0 else inf
        return work.training.pace(placement, len(job.curve), work.batch).step_s

    def final_loss(self, job: Job) -> float:
        """Return the lowest finite loss of the job's whole curve; inf without one."""
        return lowest_loss(self.works[job.id])


@dataclass(frozen=True, slots=True)
class OracleBest:
    """Run the trials in the order of their lowest losses.

    No policy finishes the best trial sooner, if it is there from the start: it starts at once and
    is never stopped. No trial is stopped for a better one that is submitted later.
    """

    oracle: Oracle
    name: ClassVar[str] = "oracle-best"
    preempts: ClassVar[bool] = False

    def initial(self) -> None:
        """Return None: the policy has no memory."""
        return

    def decide(self, snapshot: Snapshot, memory: None) -> tuple[Plan, None]:
        """Keep running trials; grant free GPUs to the best waiting ones."""
        jobs = (*snapshot.holding, *snapshot.queue)
        order = sorted(jobs, key=lambda job: (self.oracle.final_loss(job), submission(job)))
        reason = Reason("in the order of the losses that the trials will come to")
        grants = fill(snapshot, order, preempt=False)
        ranking = tuple(job.id for job in order if not job.holds_gpus)
        return Plan(grants, ranking=ranking, reasons=dict.fromkeys(snapshot.index, reason)), memory
