"""Elastic scaling with batches: sizes and batches of all jobs by dynamic programming (Saxena)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import attrgetter
from typing import ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hermes_ops.core.model import Job, JobId, Phase, Plan, Reason, Snapshot
from hermes_ops.core.sizes import BatchRange
from hermes_ops.policies.toolbox.batch_speeds import (
    KnownSteps,
    LinearStepTime,
    batches_of,
    throughputs,
)
from hermes_ops.policies.toolbox.parameter_checks import one_of
from hermes_ops.policies.toolbox.sized_grants import Batches, Sizes, SizingProblem

OVERFLOWS = ("queue", "drop")
BATCHES = ("elastic", "random", "largest", "least")
GAIN = 1e-9  # of the total speed-up: less is rounding
_job = attrgetter("job")


class Scaling(NamedTuple):
    """A job's choice: numbers of GPUs, ascending, with its best batch and speed-up on each."""

    sizes: tuple[int, ...]
    batches: tuple[int | None, ...]
    speed_ups: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Saxena:
    """Choose the GPUs and the batch of all jobs so that the sum of their speed-ups is greatest.

    Jobs are admitted in order of submission while the sum of their least sizes fits; the newest
    others wait, or are ended at their first decision (`overflow="drop"`). A dynamic program over
    the admitted jobs and the GPUs finds the sizes. A job's speed-up on g GPUs is its throughput
    with the best batch that fits there in one pass, divided by that with the least batch on one
    GPU. Without a batch range a job has a speed-up by GPUs alone.

    `batch` fixes the batch: the job's requested one ("random", as the paper's baseline draws it),
    the largest, or the least; sizes are still chosen.

    Source: Saxena et al., "Effective Elastic Scaling of Deep Learning Workloads", MASCOTS 2020
    (arXiv 2006.13878), and US patent 11,586,475; the program as in the Voda scheduler's
    reimplementation (heyfey/vodascheduler, `ffdl_optimizer.go`), with the job's least size in
    place of 1. Ours: the normaliser; jobs are admitted up to the first that does not fit, and those
    after it take what the program leaves idle; speeds come from a fit to the job's step times,
    measured or declared in advance (the patent takes a run on one node and the latency of the
    network), else to those of its kind, else grow with the GPUs; batches are multiples of the
    initial one; ties give an earlier job the more GPUs.
    """

    overflow: str = "queue"
    batch: str = "elastic"
    name: ClassVar[str] = "saxena"
    preempts: ClassVar[bool] = True
    sizes: ClassVar[bool] = True

    def __post_init__(self) -> None:
        one_of("overflow", self.overflow, OVERFLOWS)
        one_of("batch", self.batch, BATCHES)

    def initial(self) -> None:
        """Return None: the policy has no memory."""
        return

    def decide(self, snapshot: Snapshot, memory: None) -> tuple[Plan, None]:
        """Return the plan of the greatest sum of speed-ups."""
        problem = SizingProblem.from_snapshot(snapshot)
        known_steps = KnownSteps(snapshot.jobs)

        def solve(subproblem: SizingProblem) -> tuple[Sizes, Batches]:
            scalings = {
                job.id: self._scaling(job, known_steps, subproblem.gpus) for job in subproblem.jobs
            }
            return _sized(subproblem.jobs, scalings, subproblem.gpus)

        plan = problem.plan(problem.solve_grants(solve), _reason)
        return (self._dropping(snapshot, plan) if self.overflow == "drop" else plan), memory

    def _scaling(self, job: Job, known_steps: KnownSteps, gpus: int) -> Scaling:
        held = job.requested_batch if self.batch == "random" else None
        sizes = tuple(job.sizes_up_to(gpus))
        return scaling(sizes, job.batch_range, known_steps.model(job), self.batch, held)

    def _dropping(self, snapshot: Snapshot, plan: Plan) -> Plan:
        granted = set(map(_job, plan.grants))
        ended = tuple(
            j.id for j in snapshot.queue if j.phase is Phase.PENDING and j.id not in granted
        )
        reason = Reason("is dropped: it does not fit", would_change="overflow=queue")
        ranking = tuple(job for job in plan.ranking if job not in set(ended))
        reasons = {job: plan.reasons[job] for job in snapshot.index} | dict.fromkeys(ended, reason)
        return Plan(plan.grants, ended, ranking, plan.review_at_s, reasons)


@lru_cache(maxsize=1 << 14)
def scaling(
    sizes: tuple[int, ...],
    batches: BatchRange | None,
    model: LinearStepTime,
    rule: str = "elastic",
    requested: int | None = None,
) -> Scaling:
    """Return the best batch and the speed-up on each of the sizes on which a batch fits.

    Without a range of batches, or if no batch of the rule fits on any size, the job's batch is its
    own choice (None), and the speed-up is that of one sample a step.
    """
    if batches is not None:
        totals = _batches(batches, rule, requested)
        speeds = throughputs(model, totals, sizes, whole=True)
        fits = [[batches.allows(b, g) and batches.passes(b, g) == 1 for g in sizes] for b in totals]
        speeds = np.where(fits, speeds, 0.0)
        best = speeds.argmax(axis=0)
        speed_ups = speeds.max(axis=0, initial=0.0)
        base = float(throughputs(model, [batches.initial], [1], whole=True)[0, 0])
        usable = [n for n in range(len(sizes)) if speed_ups[n] > 0]
        if usable:
            return Scaling(
                tuple(sizes[n] for n in usable),
                tuple(totals[best[n]] for n in usable),
                tuple(float(speed_ups[n]) / base for n in usable),
            )
    total = 1.0 if batches is None else float(batches.initial)
    alone = throughputs(model, [total], [1], whole=False)[0, 0]
    relative = throughputs(model, [total], sizes, whole=False)[0] / alone
    return Scaling(sizes, (None,) * len(sizes), tuple(map(float, relative)))


def _batches(batches: BatchRange, rule: str, requested: int | None) -> tuple[int, ...]:
    if rule == "largest":
        return (batches.most,)
    if rule == "least":
        return (batches.initial,)
    if rule == "random":
        return (requested or batches.initial,)
    return batches_of(batches)


def _sized(
    jobs: Iterable[Job], scalings: Mapping[JobId, Scaling], gpus: int
) -> tuple[Sizes, Batches]:
    """Return the size and batch of each admitted job."""
    admitted: list[JobId] = []
    others: list[JobId] = []
    left = gpus
    for job in jobs:
        least = scalings[job.id].sizes[0]
        if others or least > left:
            others.append(job.id)
        else:
            admitted.append(job.id)
            left -= least
    chosen = greatest_sum([scalings[job] for job in admitted], gpus)
    picks = dict(zip(admitted, chosen, strict=True))
    left = gpus - sum(scalings[job].sizes[pick] for job, pick in picks.items())
    for job_id in others:
        if scalings[job_id].sizes[0] <= left:
            picks[job_id] = 0
            left -= scalings[job_id].sizes[0]
    return (
        {job: scalings[job].sizes[pick] for job, pick in picks.items()},
        {job: scalings[job].batches[pick] for job, pick in picks.items()},
    )


def greatest_sum(scalings: Sequence[Scaling], gpus: int) -> list[int]:
    """Return for each job the index of its size, so that the sum of speed-ups is greatest.

    The least sizes must fit on the GPUs. The program runs over the GPUs beyond these: its time is
    O(jobs x spare GPUs x sizes). Of equal sums the one in which later jobs have fewer GPUs is
    taken.
    """
    spare = gpus - sum(s.sizes[0] for s in scalings)
    if spare < 0:
        raise ValueError("the least sizes do not fit on the GPUs")
    best = np.zeros(spare + 1)
    picks = np.zeros((len(scalings), spare + 1), dtype=np.int32)
    for number, job in enumerate(scalings):
        best = _with_job(best, job, picks[number])
    chosen = [0] * len(scalings)
    for number in range(len(scalings) - 1, -1, -1):
        pick = int(picks[number, spare])
        chosen[number] = pick
        spare -= scalings[number].sizes[pick] - scalings[number].sizes[0]
    return chosen


def _with_job(
    best: NDArray[np.float64], job: Scaling, picks: NDArray[np.int32]
) -> NDArray[np.float64]:
    """Return the greatest sums with one job more, by spare GPUs; write its size's index."""
    sums = best + job.speed_ups[0]
    for index in range(1, len(job.sizes)):
        more = job.sizes[index] - job.sizes[0]
        if more >= len(best):
            break
        with_more = best[: len(best) - more] + job.speed_ups[index]
        better = with_more > sums[more:] * (1 + GAIN)
        sums[more:][better] = with_more[better]
        picks[more:][better] = index
    return sums


def _reason(job: Job, is_granted: bool) -> Reason:  # noqa: ARG001 - the same for every job
    if is_granted:
        text = "runs: the sum of all speed-ups is greatest with this size and batch"
        return Reason(text, would_change="a job arriving or ending")
    return Reason(
        "waits: jobs submitted before it need the GPUs", would_change="one of them ending"
    )
