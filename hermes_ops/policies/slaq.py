"""SLAQ: the GPU goes where the loss is predicted to fall most within the next slice."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf, isfinite
from statistics import median
from typing import ClassVar

import numpy as np

from hermes_ops.core.amounts import figure, short_duration
from hermes_ops.core.curves import Memo, columns
from hermes_ops.core.model import Job, JobId, Phase, Plan, Point, Reason, Snapshot, Term
from hermes_ops.core.order import submission
from hermes_ops.policies.toolbox.curve_fit import MIN_POINTS, Fitted, lowest_fits
from hermes_ops.policies.toolbox.sweep_queues import serve


@dataclass(frozen=True, slots=True)
class Slaq:
    """Run the jobs with the greatest predicted normalised drop of the loss in one slice.

    The drop comes from an exponentially weighted fit of the job's lowest losses so far
    (`toolbox.curve_fit`), and is divided by the largest drop that the job has shown. A running job
    may be replaced once it has run for a slice and reported a step.

    Source: Zhang et al., "SLAQ", SoCC 2017, in the one-GPU form in which the Hermes paper takes it
    as a baseline. Ours: `slice_s` None makes a slice as long as the median step of the jobs that
    have begun; a job with two points is predicted to go on as fast as between them, one with fewer
    drops infinitely fast, so that each is seen before any is compared; a newest loss that is not
    finite predicts no drop; drops are multiplied by the weight; ties go to the job that runs, then
    to the earlier. Each job gets `min_gpus`.
    """

    slice_s: float | None = None
    name: ClassVar[str] = "slaq"
    preempts: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.slice_s is not None and not 0 < self.slice_s < inf:
            raise ValueError("slice_s is a number of seconds, over 0")

    def initial(self) -> None:
        """Return None: fits are made from the curves."""
        return

    def decide(self, snapshot: Snapshot, memory: None) -> tuple[Plan, None]:
        """Serve the jobs within their slice, then those with the greatest predicted drops."""
        jobs = [j for j in snapshot.jobs if j.id in snapshot.held or not j.holds_gpus]
        jobs = [j for j in jobs if j.phase not in (Phase.ENDED, Phase.STOPPING)]
        slice_s = self.slice_s or usual_step_s(jobs)
        drops = predicted_drops(jobs, slice_s)
        running = (j for j in jobs if j.holds_gpus)
        pinned = {j.id for j in running if is_within_slice(j, snapshot.time_s, self.slice_s)}

        def place(job: Job) -> tuple[object, ...]:
            return (job.id not in pinned, -drops[job.id], not job.holds_gpus, submission(job))

        order = sorted(jobs, key=place)
        best = next((j.id for j in order if not j.holds_gpus), None)
        view = SlaqDecision(drops, pinned, slice_s, best)
        return serve(snapshot, order, view.why), memory


def is_within_slice(job: Job, now_s: float, slice_s: float | None) -> bool:
    """Return whether a job that holds GPUs is still within its slice and keeps them.

    `slice_s` is the length in seconds; None: until it reports a value. A job whose start is more
    than a slice in the future, because the clock was set back, does not keep them.
    """
    if job.phase is not Phase.RUNNING or not job.has_finished_slice:
        return True
    if slice_s is None or job.started_s is None:
        return False
    return job.started_s - slice_s <= now_s < job.started_s + slice_s


def predicted_drops(jobs: Iterable[Job], slice_s: float) -> dict[JobId, float]:
    """Predict each job's weighted drop in a slice, as a share of its largest drop; inf: unseen.

    At least 0. No job is predicted to run past its last step.
    """
    drops = {job.id: inf for job in jobs}
    seen = [job for job in jobs if len(job.curve) >= 2]
    for job, prediction in zip(seen, PREDICTIONS.get(job.curve for job in seen), strict=True):
        drops[job.id] = job.weight * prediction.drop(slice_s, job.total_steps)
    return drops


@dataclass(frozen=True, slots=True)
class CurvePrediction:
    """The prediction of a curve of at least two points."""

    fitted: Fitted
    fitted_now: float  # the fit at the newest step
    finite: int  # points with a finite loss at them or before
    falls: bool  # the loss has fallen, and is finite now
    largest: float  # drop so far
    last: float  # step
    interval: float  # steps between the newest two points
    seconds: float

    def drop(self, slice_s: float, total_steps: int | None) -> float:
        """Predict the drop of a slice, as a share of the largest drop."""
        if not self.falls:
            return 0.0
        steps = slice_s * self.last / self.seconds if self.seconds > 0 else 1.0
        if total_steps is not None:
            steps = min(steps, max(0.0, total_steps - self.last))
        if self.finite < MIN_POINTS:
            return steps / self.interval if self.interval > 0 else 0.0
        return max(0.0, self.fitted_now - self.fitted.loss(self.last + steps)) / self.largest


def _predictions(curves: Sequence[Sequence[Point]]) -> Iterator[CurvePrediction]:
    for points, fitted in zip(curves, lowest_fits(curves), strict=True):
        curve = columns(points)
        best = curve.best[np.isfinite(curve.best)]
        largest = float(best[0] - best[-1]) if len(best) else 0.0
        last = float(curve.steps[-1])
        yield CurvePrediction(
            fitted=fitted,
            fitted_now=fitted.loss(last),
            finite=len(best),
            falls=largest > 0 and isfinite(curve.losses[-1]),
            largest=largest,
            last=last,
            interval=last - float(curve.steps[-2]),
            seconds=float(curve.seconds[-1]),
        )


PREDICTIONS = Memo[Sequence[Point], CurvePrediction](_predictions)


def usual_step_s(jobs: Iterable[Job]) -> float:
    """Return the median seconds of a step of the jobs that have begun; 1 before any."""
    step_s = [j.curve[-1].seconds / j.curve[-1].step for j in jobs if j.last_step > 0]
    return median(step_s) if step_s else 1.0


@dataclass(frozen=True, slots=True)
class SlaqDecision:
    """A decision, for its explanation."""

    drops: Mapping[JobId, float]
    pinned: set[JobId]
    slice_s: float
    best_waiting: JobId | None

    def why(self, job: Job, is_granted: bool) -> Reason:
        """Return the reason why the job has GPUs (`is_granted`) or has none."""
        text, terms = shown_drop(self.drops.get(job.id, 0.0), self.slice_s)
        if not is_granted:
            change = "the prediction for a running job falling below its own"
            return Reason(f"waits: {text}", terms, None, change)
        if job.id in self.pinned:
            text = f"runs until its slice is over: {text}"
            return Reason(text, terms, self.best_waiting, "the end of its slice")
        rival = self.best_waiting if self.best_waiting != job.id else None
        change = f"a greater prediction for {rival or 'a job that waits'}"
        return Reason(f"{'runs' if job.holds_gpus else 'starts'}: {text}", terms, rival, change)


def shown_drop(drop: float, slice_s: float) -> tuple[str, tuple[Term, ...]]:
    """Return the drop that is predicted for a slice as text and as terms; inf: it is not known."""
    shown = "not seen yet" if drop == inf else f"predicted to win {figure(drop)} of its drop"
    terms = Term.several(predicted_drop=drop, slice_s=slice_s)
    return f"{shown} in {short_duration(slice_s)}", terms
