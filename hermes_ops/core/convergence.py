"""How fast a job's loss falls: the number by which the Hermes policy ranks jobs.

The Hermes paper (Electronics 2021, 10(3), 350) ranks by "convergence", but its formula is not
recovered; what follows is a choice. The improvement of the best loss over the newest slice is
divided by the training seconds of the slice and by the largest drop seen in the job's SWEEP.

* The best loss so far, not the newest: a loss that rose and came back earns nothing for it.
* A slice is the newest `SLICE_STEPS` intervals of the curve (all of it while it is shorter): one
  interval is too noisy to preempt for, the whole curve would praise a plateau for its past.
* Trials of one sweep share an objective, so one scale serves them. When each job is its own
  sweep this equals SLAQ's normalisation by the job's own largest drop (SoCC 2017). Within a sweep
  own normalisation cannot compare two trials: after one drop each has lost exactly 1.0 of its own
  largest drop, the one that fell by 2.0 and the one that fell by 0.01.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import inf, isfinite

from hermes_ops.core.model import Job, JobId, Phase, Point, SweepId

SLICE_STEPS = 3
MIN_SLICE_S = 1e-3  # two points of one clock tick: no rate is infinite
UNSEEN = inf


def convergence(curve: Sequence[Point], largest_drop: float) -> float:
    """Share of `largest_drop` won for each second of the newest slice, in 1/s, at least 0.

    +inf (`UNSEEN`) with fewer than two points: such a job has still to show itself. 0 when the
    newest loss is NaN or infinite, or when there was no finite loss before the slice.
    """
    if len(curve) < 2:
        return UNSEEN
    if not isfinite(curve[-1].loss) or largest_drop <= 0:
        return 0.0
    start = max(0, len(curve) - 1 - SLICE_STEPS)
    before = _best(curve[: start + 1])
    drop = before - min(before, _best(curve[start + 1 :]))
    if not isfinite(drop):
        return 0.0
    seconds = max(curve[-1].seconds - curve[start].seconds, MIN_SLICE_S)
    return drop / largest_drop / seconds


def largest_drops(jobs: Iterable[Job]) -> dict[SweepId, float]:
    """Largest finite loss minus smallest, over all curves of a sweep (ended jobs count)."""
    highest: dict[SweepId, float] = {}
    lowest: dict[SweepId, float] = {}
    for job in jobs:
        losses = [p.loss for p in job.curve]
        if not isfinite(sum(losses)):  # one test for the usual curve: large sweeps have many points
            losses = [loss for loss in losses if isfinite(loss)]
        if losses:
            highest[job.sweep] = max(highest.get(job.sweep, -inf), *losses)
            lowest[job.sweep] = min(lowest.get(job.sweep, inf), *losses)
    return {sweep: highest[sweep] - lowest[sweep] for sweep in highest}


def weighted_convergences(jobs: Sequence[Job]) -> Mapping[JobId, float]:
    """Convergence times weight of every job that has not ended; +inf for those not seen yet."""
    drops = largest_drops(jobs)
    return {
        job.id: UNSEEN
        if job.phase is Phase.PENDING
        else convergence(job.curve, drops.get(job.sweep, 0.0)) * job.weight
        for job in jobs
        if job.phase is not Phase.ENDED
    }


def finished_slice(job: Job) -> bool:
    """True when the running segment has brought something to judge: the paper's PREEMPTIBLE.

    One new step since the segment began; two points when the segment began at step 0, because
    one point shows no drop. A job that reports nothing never finishes a slice. (What makes a job
    preemptible is not recovered from the paper; this is a choice.)
    """
    if job.steps_at_start == 0:
        return len(job.curve) >= 2
    return job.last_step > job.steps_at_start


def _best(points: Iterable[Point]) -> float:
    return min((p.loss for p in points if isfinite(p.loss)), default=inf)
