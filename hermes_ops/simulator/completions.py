"""Extreme continuations of curves that were cut short."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from math import inf, isfinite

from hermes_ops.core.model import Point
from hermes_ops.errors import HermesError
from hermes_ops.simulator.metrics import lowest_loss
from hermes_ops.simulator.workload import Work, Workload

MOST_POINTS = 1_000
"""The maximum number of points of a missing part, whatever its number of steps."""


@dataclass(frozen=True, slots=True)
class Completion:
    """The workload with every missing part replaced by the same guess for all trials."""

    name: str
    workload: Workload


def completions(workload: Workload) -> tuple[Completion, ...]:
    """Return the workload itself when no curve is cut short; else three continuations.

    * `at-once`: the trial would have ended with its last recorded step;
    * `slow-and-better`: it needs all its planned steps, each as long as its slowest recorded one
      (or the sweep's slowest, if it has none), then the longest exit of all trials; its loss falls
      evenly to the lowest of the sweep;
    * `slow-and-flat`: as long, with a constant loss.

    Raise HermesError when a trial is cut short and no trial has recorded how long a step takes.
    """
    if not any(work.cut_short for work in workload.jobs):
        return (Completion("whole", workload),)
    extremes = _Extremes.from_workload(workload)
    return (
        Completion("at-once", workload),
        Completion("slow-and-better", _completed(workload, extremes, better=True)),
        Completion("slow-and-flat", _completed(workload, extremes, better=False)),
    )


@dataclass(frozen=True, slots=True)
class _Extremes:
    """The extremes that the sweep has recorded."""

    slowest_step_s: float
    longest_exit_s: float
    lowest: float
    highest: float

    @classmethod
    def from_workload(cls, workload: Workload) -> _Extremes:
        slowest_s = max((_slowest_step_s(work) for work in workload.jobs), default=0.0)
        missing = [w.id for w in workload.jobs if w.cut_short and _missing(w)]
        if slowest_s == 0.0 and missing:
            raise HermesError(
                f"nothing can be said of {workload.name!r}: no trial has shown how long a step "
                f"takes, and {missing[0]} did not come to its end. Let a trial finish first."
            )
        losses = [p.loss for work in workload.jobs for p in work.curve if isfinite(p.loss)]
        exits_s = (w.seconds - w.curve[-1].seconds for w in workload.jobs if w.curve)
        return cls(
            slowest_step_s=slowest_s,
            longest_exit_s=max(exits_s, default=0.0),
            lowest=min(losses, default=0.0),
            highest=max(losses, default=0.0),
        )


def _completed(workload: Workload, extremes: _Extremes, *, better: bool) -> Workload:
    jobs = (_work(w, extremes, better=better) if w.cut_short else w for w in workload.jobs)
    return replace(workload, jobs=tuple(jobs))


def _work(work: Work, extremes: _Extremes, *, better: bool) -> Work:
    step_s = _slowest_step_s(work) or extremes.slowest_step_s
    seconds = work.seconds + _missing(work) * step_s + extremes.longest_exit_s
    points = tuple(_points(work, step_s, extremes, better=better))
    return replace(work, seconds=seconds, curve=(*work.curve, *points))


def _points(work: Work, step_s: float, extremes: _Extremes, *, better: bool) -> Iterator[Point]:
    missing = _missing(work)
    finite = [p.loss for p in work.curve if isfinite(p.loss)]
    begin = finite[-1] if finite else extremes.highest
    end = min(extremes.lowest, lowest_loss(work)) if better else begin
    last = work.curve[-1].step if work.curve else 0
    stride = max(1, -(-missing // MOST_POINTS))
    for done in (*range(stride, missing, stride), *([missing] if missing else [])):
        loss = begin + (end - begin) * done / missing
        yield Point(last + done, loss, work.seconds + done * step_s)


def _missing(work: Work) -> int:
    """Return the number of planned steps that were not recorded."""
    last = work.curve[-1].step if work.curve else 0
    return max(0, (work.total_steps or 0) - last)


def _slowest_step_s(work: Work) -> float:
    """Return the longest of the trial's recorded steps; 0 without a point."""
    begin = Point(0, inf, 0.0)
    return max(
        (
            (later.seconds - earlier.seconds) / (later.step - earlier.step)
            for earlier, later in pairwise((begin, *work.curve))
            if later.step > earlier.step
        ),
        default=0.0,
    )
