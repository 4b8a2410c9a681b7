"""POP of HyperDrive: GPUs of their own for trials that will probably reach the target."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import erf, floor, hypot, inf, isfinite, sqrt
from typing import ClassVar

from hermes_ops.core.amounts import figure
from hermes_ops.core.curves import Memo, best
from hermes_ops.core.model import Job, JobId, Phase, Plan, Point, Reason, Snapshot, Term
from hermes_ops.core.order import submission
from hermes_ops.policies.toolbox.curve_fit import Fitted, lowest_fits
from hermes_ops.policies.toolbox.parameter_checks import whole
from hermes_ops.policies.toolbox.sweep_queues import (
    SweepQueue,
    by_sweep,
    holding,
    in_turn,
    queued,
    serve,
)

_FITS = Memo[Sequence[Point], Fitted](lowest_fits)
EXTRAPOLATION = 0.5  # standard error of a predicted further drop, over that drop
NOISE = 0.01  # of the sweep's largest drop: no prediction is more exact


@dataclass(frozen=True, slots=True)
class TargetForecast:
    """A trial's chance to reach the sweep's target, and the seconds until it does or ends."""

    chance: float
    remaining_s: float
    final_loss: float
    target: float


@dataclass(frozen=True, slots=True)
class Pop:
    """Promising trials keep GPUs of their own, others take turns on the rest, poor ones pause.

    A learning-curve model gives each trial's chance p to reach the target by its last step, and
    the expected remaining time. p* is the chance for which min(desired, deserved) slots is
    greatest: desired are the GPUs of trials with p >= p*, deserved is p* x the pool's GPUs.
    Trials with p >= p* are promising, the most probable first, then the soonest; they get that
    many slots. A trial with p below `poor` pauses (`kill` ends it).

    Source: Rasley et al., "HyperDrive", Middleware 2017. Ours: the target is `target_loss`, else
    the lowest loss that the sweep has shown, so that promising means: may become the best; the
    model is `toolbox.curve_fit` on the lowest losses so far with a normal error, of half the
    predicted further drop and the error of the fit; without `total_steps` a trial is taken to run
    twice as far as the sweep's deepest; nobody is judged before `grace_steps`; opportunistic trials
    run `slice_steps` steps at a time, those with the fewest slices first; paused ones are resumed
    when nothing else is left, the most probable first; one p* for the pool, and sweeps share the
    GPUs by (GPUs + 1) / weight.
    """

    target_loss: float | None = None
    poor: float = 0.05
    grace_steps: int = 3
    slice_steps: int = 3
    kill: bool = False
    name: ClassVar[str] = "pop"
    preempts: ClassVar[bool] = True
    compares: ClassVar[bool] = True

    def __post_init__(self) -> None:
        whole("grace_steps", self.grace_steps, 1)
        whole("slice_steps", self.slice_steps, 1)
        if not 0 <= self.poor < 1:
            raise ValueError("poor is a probability, at least 0 and below 1")
        if self.target_loss is not None and not isfinite(self.target_loss):
            raise ValueError("target_loss is a finite number")

    def initial(self) -> None:
        """Return None: forecasts are made from the curves."""
        return

    def decide(self, snapshot: Snapshot, memory: None) -> tuple[Plan, None]:
        """Forecast all open trials, divide the slots, serve the sweeps."""
        sweeps = by_sweep(snapshot)
        forecasts: dict[JobId, TargetForecast] = {}
        for jobs in sweeps.values():
            forecasts |= self._forecasts(jobs)
        division = divide(
            [(forecasts[j.id], j) for j in snapshot.jobs if j.id in forecasts], snapshot
        )
        order = TrialOrder(forecasts, division, self.poor, self.slice_steps)
        queues = {sweep: order.queue(snapshot, jobs) for sweep, jobs in sweeps.items()}
        ends = {}
        if self.kill:
            ends = {job: order.ended(job) for job in forecasts if order.is_poor(job)}
        return serve(snapshot, in_turn(queues), order.why, ends), memory

    def _forecasts(self, jobs: Sequence[Job]) -> dict[JobId, TargetForecast]:
        """Forecast each open trial of a sweep that has run for `grace_steps`."""
        lowest = [best(job.curve) for job in jobs if job.curve]
        shown = [loss for loss in lowest if isfinite(loss)]
        if not shown:
            return {}
        target = min(shown) if self.target_loss is None else self.target_loss
        tops = (p.loss for job in jobs for p in job.curve[:1] if isfinite(p.loss))
        spread = max(max(tops, default=0.0) - min(shown), 0.0)
        open_now = (j for j in jobs if j.is_open and j.phase is not Phase.STOPPING)
        judged = [job for job in open_now if job.last_step >= self.grace_steps]
        deepest = max((job.last_step for job in jobs), default=0)
        forecasts = _FORECASTS.get(judged, target, NOISE * spread, 2 * deepest)
        return {job.id: forecast for job, forecast in zip(judged, forecasts, strict=True)}


def forecast(job: Job, fitted: Fitted, target: float, noise: float, horizon: int) -> TargetForecast:
    """Forecast the chance that the trial's lowest loss at its end is the target or less.

    `noise` is the least standard error; `horizon` the last step of a trial that names none.
    """
    last = job.last_step
    end = max(last, horizon if job.total_steps is None else job.total_steps)
    now = best(job.curve)
    step_s = job.curve[-1].seconds / last
    if now <= target:
        return TargetForecast(1.0, (end - last) * step_s, now, target)
    final = min(now, fitted.loss(end))
    if not isfinite(now):
        return TargetForecast(0.0, inf, now, target)
    error = max(hypot(fitted.error, EXTRAPOLATION * (now - final), noise), 1e-300)
    chance = 0.5 * (1 + erf((target - final) / error / sqrt(2)))
    return TargetForecast(
        chance, (_reaches(fitted, target, last, end) - last) * step_s, final, target
    )


def _forecasts(
    jobs: Sequence[Job], target: float, noise: float, horizon: int
) -> Iterator[TargetForecast]:
    for job, fitted in zip(jobs, _FITS.get(job.curve for job in jobs), strict=True):
        yield forecast(job, fitted, target, noise, horizon)


_FORECASTS = Memo[Job, TargetForecast](_forecasts)


def _reaches(fitted: Fitted, target: float, last: int, end: int) -> int:
    """Return the first step after `last` at which the fit is at the target, at most `end`."""
    low, high = last, end
    while low < high:
        middle = (low + high) // 2
        if fitted.loss(middle) <= target:
            high = middle
        else:
            low = middle + 1
    return low


@dataclass(frozen=True, slots=True)
class Division:
    """p* (`threshold`), the slots of promising trials, and the trials that get them, best first."""

    threshold: float = inf
    slots: float = 0.0
    promising: tuple[JobId, ...] = ()


def divide(forecasts: Sequence[tuple[TargetForecast, Job]], snapshot: Snapshot) -> Division:
    """Return the division with the most slots for promising trials; ties go to the higher p*."""
    pairs = [pair for pair in forecasts if pair[0].chance > 0]
    pairs.sort(key=lambda p: (-p[0].chance, p[0].remaining_s, submission(p[1])))
    most, threshold, desired = 0.0, inf, 0
    for forecast, job in pairs:
        desired += job.min_gpus
        slots = min(float(desired), forecast.chance * len(snapshot.gpus))
        if slots > most:
            most, threshold = slots, forecast.chance
    promising: list[JobId] = []
    left = max(1, floor(most + 1e-9))
    for forecast, job in pairs:
        if forecast.chance >= threshold and job.min_gpus <= left:
            promising.append(job.id)
            left -= job.min_gpus
    return Division(threshold, most, tuple(promising))


@dataclass(frozen=True, slots=True)
class TrialOrder:
    """All forecasts, and the order that follows from them."""

    forecasts: Mapping[JobId, TargetForecast]
    division: Division
    poor: float
    slice_steps: int
    place: dict[JobId, int] = field(init=False)

    def __post_init__(self) -> None:
        places = {job: number for number, job in enumerate(self.division.promising)}
        object.__setattr__(self, "place", places)

    def is_poor(self, job: JobId) -> bool:
        """Return True for a judged trial whose chance is below the floor."""
        return job in self.forecasts and self.forecasts[job].chance < self.poor

    def queue(self, snapshot: Snapshot, jobs: Sequence[Job]) -> SweepQueue:
        """Order a sweep's trials: those within their slice, then promising, opportunistic, poor."""
        on_gpus = holding(snapshot, jobs)
        goes_on = tuple(job for job in on_gpus if not self._slice_is_over(job))
        rest = [job for job in on_gpus if self._slice_is_over(job)]
        rest += queued(jobs, Phase.WAITING)
        promising = sorted((j for j in rest if j.id in self.place), key=lambda j: self.place[j.id])
        poor = [job for job in rest if self.is_poor(job.id) and job.id not in self.place]
        poor.sort(key=lambda job: (-self.forecasts[job.id].chance, submission(job)))
        taken = {job.id for job in (*promising, *poor)}
        others = [job for job in rest if job.id not in taken]
        others += queued(jobs, Phase.PENDING)
        others.sort(key=lambda job: (job.last_step // self.slice_steps, submission(job)))
        return SweepQueue(goes_on, (*promising, *others, *poor))

    def _slice_is_over(self, job: Job) -> bool:
        ran = job.last_step - job.steps_at_start
        return job.phase is Phase.RUNNING and ran >= self.slice_steps

    def why(self, job: Job, is_granted: bool) -> Reason:
        """Return the reason why the job has GPUs (`is_granted`) or has none."""
        if job.id not in self.forecasts:
            text = (
                "takes its turn: too few steps for a forecast"
                if is_granted
                else "waits for its turn"
            )
            return Reason(text, (Term("step", job.last_step),), None, "its next reports")
        if job.id in self.place:
            kind = "promising" if is_granted else "promising, waits for a slice to end"
        elif self.is_poor(job.id):
            kind = "poor, but nothing else is left" if is_granted else "paused as poor"
        else:
            kind = (
                "opportunistic, takes its turn"
                if is_granted
                else "opportunistic, waits for its turn"
            )
        change = f"a chance of {figure(min(self.division.threshold, 1.0))} or more"
        forecast = self.forecasts[job.id]
        shown = f"{kind}: chance {figure(forecast.chance)} to reach {figure(forecast.target, 4)}"
        if job.id in self.place:
            change = (
                f"a chance below {figure(min(self.division.threshold, 1.0))}"
                if is_granted
                else "a slice ending"
            )
        return Reason(shown, self._terms(forecast), None, change)

    def ended(self, job: JobId) -> Reason:
        """Return the reason for ending a poor trial."""
        forecast = self.forecasts[job]
        text = (
            f"ended as poor: chance {figure(forecast.chance)} to reach {figure(forecast.target, 4)}"
        )
        return Reason(text, self._terms(forecast), None, f"a chance of {figure(self.poor)}")

    def _terms(self, forecast: TargetForecast) -> tuple[Term, ...]:
        return (
            Term("chance", forecast.chance),
            Term("p_star", self.division.threshold),
            Term("slots", self.division.slots),
            Term("predicted_final_loss", forecast.final_loss),
            Term("remaining_s", forecast.remaining_s),
        )
