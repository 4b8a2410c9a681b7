"""SLAQ with sizes: GPUs one by one to the job whose loss is predicted to fall most for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from math import inf
from typing import ClassVar

import numpy as np

from hermes_ops.core.model import Job, JobId, Plan, Reason, Snapshot
from hermes_ops.core.order import submission
from hermes_ops.policies.slaq import (
    PREDICTIONS,
    CurvePrediction,
    is_within_slice,
    shown_drop,
    usual_step_s,
)
from hermes_ops.policies.toolbox.batch_speeds import IDEAL, KnownSteps, LinearStepTime
from hermes_ops.policies.toolbox.parameter_checks import positive_or_none
from hermes_ops.policies.toolbox.sized_grants import SizingProblem

RESTART_SLICES = 8
"""A restart counts as if it were made once in this many slices, or in as many times its seconds."""


@dataclass(frozen=True, slots=True)
class SlaqSized:
    """Share the GPUs so that the normalised losses fall most, in sum, within the next slice.

    Each job gets its least size, those with the greatest predicted drop first if not all fit.
    Then the job with the greatest further drop a GPU grows, until no GPU is left or none gains. A
    job may grow to at most twice its size in one step: a size that is slower than a smaller one
    does not hide a larger one that is faster. A running job keeps its size until it has run for a
    slice and reported a step; from then on another size loses a part of its drop to the restart
    (`RESTART_SLICES`).

    Source: Zhang et al., "SLAQ", SoCC 2017, section 4. The drop is that of `slaq`; the steps of a
    slice on g GPUs come from a fit to the measured step times, else grow with the GPUs (ours). A
    job with fewer than two points keeps its least size. The paper counts no restarts.
    """

    slice_s: float | None = None
    name: ClassVar[str] = "slaq-sized"
    preempts: ClassVar[bool] = True
    sizes: ClassVar[bool] = True

    def __post_init__(self) -> None:
        positive_or_none("slice_s", self.slice_s)

    def initial(self) -> None:
        """Return None: fits are made from the curves."""
        return

    def decide(self, snapshot: Snapshot, memory: None) -> tuple[Plan, None]:
        """Return the plan of the greatest predicted drop."""
        problem = SizingProblem.from_snapshot(snapshot)
        slice_s = self.slice_s or usual_step_s(snapshot.jobs)
        known_steps = KnownSteps(snapshot.jobs)
        drops = _drops(problem, known_steps, slice_s)
        held = (job for job in problem.jobs if job.id in snapshot.held)
        kept = {job.id for job in held if is_within_slice(job, snapshot.time_s, slice_s)}

        def solve(subproblem: SizingProblem) -> dict[JobId, int]:
            return _greedy(subproblem, _drops(subproblem, known_steps, slice_s), kept)

        grants = problem.grants(problem.solve_sizes(solve))
        order = sorted(snapshot.queue, key=lambda job: _rank(job, drops))

        def explain(job: Job, is_granted: bool) -> Reason:
            predicted = drops.get(job.id)
            least = predicted.values[0] if predicted is not None and predicted.values else 0.0
            text, terms = shown_drop(least, slice_s)
            if is_granted:
                change = "a greater prediction for a job that waits"
                return Reason(f"runs: {text}", terms, None, change)
            change = "the prediction for a running job falling below its own"
            return Reason(f"waits: {text}", terms, None, change)

        return problem.plan(grants, explain, order), memory


@dataclass(frozen=True, slots=True)
class Drops:
    """The predicted drop of a job on each of its sizes, ascending; inf: it is not known yet."""

    sizes: tuple[int, ...]
    values: tuple[float, ...]

    def next(self, index: int, left: int) -> tuple[float, int]:
        """Return the greatest further drop a GPU from this size, and the index of that size.

        Among sizes of at most twice the GPUs, or the next one; (0, index) if none gains or fits.
        """
        best, to = 0.0, index
        for larger in range(index + 1, len(self.sizes)):
            more = self.sizes[larger] - self.sizes[index]
            if more > left or (larger > index + 1 and more > self.sizes[index]):
                break
            gain = (self.values[larger] - self.values[index]) / more
            if gain > best:
                best, to = gain, larger
        return best, to


def _drops(problem: SizingProblem, known_steps: KnownSteps, slice_s: float) -> dict[JobId, Drops]:
    seen = [job for job in problem.jobs if len(job.curve) >= 2]
    predictions = dict(
        zip((j.id for j in seen), PREDICTIONS.get(job.curve for job in seen), strict=True)
    )
    drops = {}
    for job in problem.jobs:
        sizes, prediction = tuple(job.sizes_up_to(problem.gpus)), predictions.get(job.id)
        values = (inf,) * len(sizes)
        if prediction is not None:
            slices_s = _slices_s(job, known_steps.model(job), prediction, slice_s, sizes)
            kept, left = problem.held(job), _left_by_restart(job, slice_s)
            values = tuple(
                job.weight
                * prediction.drop(seconds, job.total_steps)
                * (1.0 if kept in (0, size) else left)
                for size, seconds in zip(sizes, slices_s, strict=True)
            )
        drops[job.id] = Drops(sizes, values)
    return drops


def _left_by_restart(job: Job, slice_s: float) -> float:
    """Return the part of a drop that is left where a running job changes its size."""
    if not job.switch_s:
        return 1.0
    until_next_s = RESTART_SLICES * max(slice_s, job.switch_s)
    return until_next_s / (until_next_s + job.switch_s)


def _slices_s(
    job: Job,
    model: LinearStepTime,
    prediction: CurvePrediction,
    slice_s: float,
    sizes: tuple[int, ...],
) -> list[float]:
    """Return for each size the time in which the job, at its pace so far, does as many steps."""
    gpus = np.array(sizes, dtype=np.float64)
    batch = job.batch_held or job.requested_batch
    if batch is None:
        batch = job.batch_range.initial if job.batch_range is not None else 1
    step_s = model.seconds(gpus, batch / gpus)
    if model == IDEAL:  # nothing was measured: the pace so far is taken for that of the least size
        scaled: list[float] = (slice_s * gpus / gpus[0]).tolist()
        return scaled
    pace_s = prediction.seconds / prediction.last if prediction.last > 0 else slice_s
    steps: list[float] = (slice_s / step_s * pace_s).tolist()
    return steps


def _rank(job: Job, drops: dict[JobId, Drops]) -> tuple[object, ...]:
    predicted = drops.get(job.id)
    least = predicted.values[0] if predicted is not None and predicted.values else 0.0
    return (-least, not job.holds_gpus, submission(job))


def _greedy(
    problem: SizingProblem, drops: dict[JobId, Drops], kept: set[JobId]
) -> dict[JobId, int]:
    """Return the sizes: kept ones, least ones, then growth by the greatest drop a GPU."""
    picks: dict[JobId, int] = {}
    left = problem.gpus
    for job in sorted(problem.jobs, key=lambda job: (job.id not in kept, _rank(job, drops))):
        predicted = drops[job.id]
        pick = predicted.sizes.index(problem.held(job)) if job.id in kept else 0
        if predicted.sizes[pick] <= left:
            picks[job.id] = pick
            left -= predicted.sizes[pick]
    growing = [job.id for job in problem.jobs if job.id in picks and job.id not in kept]
    _grow([job for job in growing if drops[job].values[0] < inf], drops, picks, left)
    return {job: drops[job].sizes[pick] for job, pick in picks.items()}


def _grow(
    jobs: Sequence[JobId], drops: dict[JobId, Drops], picks: dict[JobId, int], left: int
) -> None:
    """Let the job of the greatest further drop grow, until no GPU is left or none gains."""
    heap = []
    for rank, job in enumerate(jobs):
        gain, to = drops[job].next(picks[job], left)
        heap.append((-gain, rank, job, to))
    heapify(heap)
    while heap and left and heap[0][0] < 0:
        _, rank, job, to = heappop(heap)
        predicted = drops[job]
        more = predicted.sizes[to] - predicted.sizes[picks[job]]
        if more <= left:
            picks[job], left = to, left - more
        gain, to = predicted.next(picks[job], left)
        heappush(heap, (-gain, rank, job, to))
