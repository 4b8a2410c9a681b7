"""What could have come after the end of a curve that was cut short: the extremes."""

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
"""A missing part is drawn with so many points at most, however many steps it has."""


@dataclass(frozen=True, slots=True)
class Completion:
    """The workload with every missing part replaced by one guess, the same for all trials."""

    name: str
    workload: Workload


def completions(workload: Workload) -> tuple[Completion, ...]:
    """The workload as it was when nothing is missing; else three ways in which it could go on.

    * `at-once`: the trial would have ended with its last recorded step;
    * `slow-and-better`: it needs all its planned steps, each as long as its slowest recorded one
      (as the sweep's slowest, if it has shown none), then as long to exit as any trial did; its
      loss falls evenly to the lowest of the sweep;
    * `slow-and-flat`: as long, and its loss stays where it was.

    Raises HermesError when a trial is cut short and no trial has shown how long a step takes.
    """
    if not any(work.cut_short for work in workload.jobs):
        return (Completion("whole", workload),)
    future = _Future.of(workload)
    return (
        Completion("at-once", workload),
        Completion("slow-and-better", _completed(workload, future, better=True)),
        Completion("slow-and-flat", _completed(workload, future, better=False)),
    )


@dataclass(frozen=True, slots=True)
class _Future:
    """The worst and the best that the sweep has shown."""

    slowest_step_s: float
    longest_exit_s: float
    lowest: float
    highest: float

    @classmethod
    def of(cls, workload: Workload) -> _Future:
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


def _completed(workload: Workload, future: _Future, *, better: bool) -> Workload:
    jobs = (_work(w, future, better=better) if w.cut_short else w for w in workload.jobs)
    return replace(workload, jobs=tuple(jobs))


def _work(work: Work, future: _Future, *, better: bool) -> Work:
    step_s = _slowest_step_s(work) or future.slowest_step_s
    seconds = work.seconds + _missing(work) * step_s + future.longest_exit_s
    points = tuple(_points(work, step_s, future, better=better))
    return replace(work, seconds=seconds, curve=(*work.curve, *points))


def _points(work: Work, step_s: float, future: _Future, *, better: bool) -> Iterator[Point]:
    missing = _missing(work)
    finite = [p.loss for p in work.curve if isfinite(p.loss)]
    begin = finite[-1] if finite else future.highest
    end = min(future.lowest, lowest_loss(work)) if better else begin
    last = work.curve[-1].step if work.curve else 0
    stride = max(1, -(-missing // MOST_POINTS))
    for done in (*range(stride, missing, stride), *([missing] if missing else [])):
        loss = begin + (end - begin) * done / missing
        yield Point(last + done, loss, work.seconds + done * step_s)


def _missing(work: Work) -> int:
    """The planned steps that were not recorded."""
    last = work.curve[-1].step if work.curve else 0
    return max(0, (work.total_steps or 0) - last)


def _slowest_step_s(work: Work) -> float:
    """The longest of the trial's recorded steps; 0 for one without a point."""
    begin = Point(0, inf, 0.0)
    return max(
        (
            (later.seconds - earlier.seconds) / (later.step - earlier.step)
            for earlier, later in pairwise((begin, *work.curve))
            if later.step > earlier.step
        ),
        default=0.0,
    )
