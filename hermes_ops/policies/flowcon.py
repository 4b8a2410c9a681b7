"""FlowCon: all jobs run at once, with shares of their GPUs by growth efficiency."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from heapq import heapify, heappop, heappush, nsmallest
from math import floor, inf
from typing import ClassVar

import numpy as np

from hermes_ops.core.amounts import figure
from hermes_ops.core.curves import Memo, columns
from hermes_ops.core.model import Grant, Job, JobId, Plan, Point, Reason, Snapshot, Term
from hermes_ops.core.nodes import usable
from hermes_ops.core.order import by_submission
from hermes_ops.core.speed_model import Floats
from hermes_ops.policies.toolbox.answer import answer
from hermes_ops.policies.toolbox.convergence import largest_drops
from hermes_ops.policies.toolbox.parameter_checks import whole

GRAIN = 10_000  # shares are whole parts of this: sums stay exact enough


class GrowthList(Enum):
    """The list of a job: how long it has been growing too slowly."""

    NEW = "new"
    WATCHING = "watching"
    COMPLETING = "completing"


@dataclass(frozen=True, slots=True)
class Growth:
    """A job's newest growth efficiency (None: not seen yet) and the list that it puts it on."""

    efficiency: float | None
    rank: GrowthList


@dataclass(frozen=True, slots=True)
class FlowCon:
    """Divide each GPU among its jobs by growth efficiency; those that hardly grow get a floor.

    Growth efficiency G is the change of the loss between two reports over the seconds of training
    alone, which is progress over time and mean use of the GPU. A job is New, falls to Watching
    when G < alpha, and to Completing when that happens again; New and Watching jobs get G over the
    sum of G, Completing ones `floor`.

    Source: Zheng et al., "FlowCon", ICPP 2019; the full text was not at hand, so the formulas are a
    reconstruction. Ours: losses are divided by the largest drop of the sweep, G is multiplied by
    the weight; alpha is a share of the job's own largest G, and a job whose G recovers is New
    again; a job without G yet counts as the fastest; no limit falls below `floor` either, and all
    limits of a GPU are scaled to fill it; a gang gets the smallest of its limits on all of its
    GPUs; at most `jobs_a_gpu` jobs share a GPU (its memory), later ones wait in order of submission
    and join the GPUs with the fewest; jobs never move; limits are renewed at every report, so there
    is no check interval to back off.
    """

    alpha: float = 0.05
    floor: float = 0.01
    jobs_a_gpu: int = 16
    name: ClassVar[str] = "flowcon"
    preempts: ClassVar[bool] = False
    shares: ClassVar[bool] = True  # it gives fractions of GPUs: a simulation only

    def __post_init__(self) -> None:
        whole("jobs_a_gpu", self.jobs_a_gpu, 1)
        if not 0 <= self.alpha <= 1 or not 0 < self.floor <= 1:
            raise ValueError("alpha and floor are shares, at most 1; floor is over 0")

    def initial(self) -> None:
        """Return None: lists are read off the newest points of the curves."""
        return

    def decide(self, snapshot: Snapshot, memory: None) -> tuple[Plan, None]:
        """Assign GPUs to the jobs for which there is capacity, then set all limits."""
        seats = self._seats(snapshot)
        drops = largest_drops(snapshot.jobs)
        jobs = [snapshot.index[job] for job in seats]
        growths = {job.id: growth(job, drops.get(job.sweep, 0.0), self.alpha) for job in jobs}
        limits = self._limits(jobs, seats, growths)
        grants = tuple(Grant(job, gpus, share=limits[job]) for job, gpus in seats.items())

        def explain(job: Job, is_granted: bool) -> Reason:
            return (
                self._running_reason(growths[job.id], limits[job.id])
                if is_granted
                else self._waiting_reason()
            )

        return answer(snapshot, grants, snapshot.queue, explain), memory

    def _seats(self, snapshot: Snapshot) -> dict[JobId, tuple[int, ...]]:
        """Return the GPUs of each job from now on, without the jobs that do not fit."""
        seats = dict(snapshot.held)
        load = {gpu.index: 0 for gpu in snapshot.gpus}
        for gpus in seats.values():
            for gpu in gpus:
                load[gpu] += 1
        room = [(jobs, gpu) for gpu, jobs in load.items() if jobs < self.jobs_a_gpu]
        heapify(room)
        for job in snapshot.queue:
            chosen = _drawn(snapshot, job, room)
            if chosen is None:
                continue
            seats[job.id] = tuple(sorted(gpu for _, gpu in chosen))
            for jobs, gpu in chosen:
                if jobs + 1 < self.jobs_a_gpu:
                    heappush(room, (jobs + 1, gpu))
        return seats

    def _limits(
        self,
        jobs: Sequence[Job],
        seats: Mapping[JobId, tuple[int, ...]],
        growths: Mapping[JobId, Growth],
    ) -> dict[JobId, float]:
        """Return each job's share of each of its GPUs: over 0, at most 1 in total per GPU."""
        efficiencies = [g.efficiency for g in growths.values() if g.efficiency is not None]
        fastest = max(efficiencies, default=0.0) or 1.0
        on: dict[int, list[JobId]] = {}
        for job in by_submission(jobs):
            for gpu in seats[job.id]:
                on.setdefault(gpu, []).append(job.id)
        limits: dict[JobId, float] = {}
        for there in on.values():
            parts = self._parts([growths[job] for job in there], fastest)
            for job_id, part in zip(there, parts, strict=True):
                limits[job_id] = min(limits.get(job_id, 1.0), part)
        return limits

    def _parts(self, growths: Sequence[Growth], fastest: float) -> list[float]:
        """Return the limits of the jobs of one GPU."""
        rates = [fastest if g.efficiency is None else g.efficiency for g in growths]
        grows = [g.rank is not GrowthList.COMPLETING for g in growths]
        total = sum(rate for rate, grow in zip(rates, grows, strict=True) if grow)
        raw = [
            max(self.floor, rate / total) if grow and total > 0 else self.floor
            for rate, grow in zip(rates, grows, strict=True)
        ]
        scale = sum(raw)
        grains = [max(1, floor(GRAIN * part / scale + 1e-9)) for part in raw]
        grains[grains.index(max(grains))] -= max(
            0, sum(grains) - GRAIN
        )  # the grains that small parts were raised by
        return [number / GRAIN for number in grains]

    def _waiting_reason(self) -> Reason:
        text = f"waits: each GPU that it could take has {self.jobs_a_gpu} jobs"
        return Reason(text, (), None, "a running job ending")

    def _running_reason(self, grown: Growth, share: float) -> Reason:
        terms = [Term("share", share), Term("alpha", self.alpha)]
        if grown.efficiency is None:
            text = f"gets {figure(share)} of a GPU: new, not seen to grow yet"
            return Reason(text, tuple(terms), None, "its next reports")
        terms.append(Term("growth_efficiency_per_s", grown.efficiency))
        change = f"growing by {self.alpha:g} of its fastest, or less"
        rate = f"{figure(grown.efficiency)}/s"
        text = f"gets {figure(share)} of a GPU: {grown.rank.value}, grows by {rate}"
        return Reason(text, tuple(terms), None, change)


def _drawn(
    snapshot: Snapshot, job: Job, room: list[tuple[int, int]]
) -> list[tuple[int, int]] | None:
    """Take as many GPUs as the job needs out of `room`, those with the fewest jobs; None: too few.

    `room` is a heap of (jobs, GPU).
    """
    able = usable(snapshot, job, [gpu for _, gpu in room]) if job.nodes else room
    if job.min_gpus > len(able):
        return None
    if not job.nodes:
        return [heappop(room) for _ in range(job.min_gpus)]
    chosen = nsmallest(job.min_gpus, [entry for entry in room if entry[1] in able])
    room[:] = [entry for entry in room if entry not in chosen]
    heapify(room)
    return chosen


def growth(job: Job, largest_drop: float, alpha: float) -> Growth:
    """Return the growth efficiency of the newest interval, and the list after the newest two.

    Intervals between losses that are not finite count as no growth.
    """
    (unweighted,) = _GROWTHS.get((job.curve,), largest_drop, alpha)
    if unweighted.efficiency is None:
        return unweighted
    return Growth(unweighted.efficiency * job.weight, unweighted.rank)


def _growths(
    curves: Sequence[Sequence[Point]], largest_drop: float, alpha: float
) -> Iterator[Growth]:
    """Yield the growth of each curve for weight 1."""
    for points in curves:
        rates = _rates(points, largest_drop)
        yield _grown(rates.tolist(), alpha) if len(rates) else Growth(None, GrowthList.NEW)


_GROWTHS = Memo[Sequence[Point], Growth](_growths)


def _grown(rates: Sequence[float], alpha: float) -> Growth:
    limit = alpha * max(rates)
    slow = [rate < limit or rate == 0 for rate in rates[-2:]]
    if not slow[-1]:
        rank = GrowthList.NEW
    else:
        rank = GrowthList.COMPLETING if len(slow) == 2 and slow[0] else GrowthList.WATCHING
    return Growth(rates[-1], rank)


def _rates(points: Sequence[Point], largest_drop: float) -> Floats:
    """Return the change per second of each interval, as a share of the largest drop."""
    if len(points) < 2:
        return np.empty(0)
    curve = columns(points)
    gaps_s = np.diff(curve.seconds)
    if not 0 < largest_drop < inf:
        return np.zeros(len(gaps_s))
    with np.errstate(invalid="ignore", over="ignore"):
        changes = np.abs(np.diff(curve.losses)) / largest_drop
        counts = np.isfinite(changes) & (gaps_s > 0)
        return np.where(counts, changes, 0.0) / np.where(counts, gaps_s, 1.0)
