"""How fast a job trains on each size, and how much it has left: known, or as measured."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import inf
from typing import Protocol, TypeVar

from hermes_ops.core.curves import columns
from hermes_ops.core.model import Job, Snapshot
from hermes_ops.core.oracle import Oracle
from hermes_ops.core.speed_model import AllReduceSpeed
from hermes_ops.policies.toolbox.curve_fit import MIN_POINTS, fit

T = TypeVar("T")
KindKey = tuple[str, str]
FALL = 0.05  # of the loss over WINDOW points: a smaller fall is convergence
WINDOW = 10
MOST_POINTS = 100  # of a curve that has no end of its own


class JobSpeeds(Protocol):
    """Speeds and what is left, in one unit of work a job."""

    def speed(self, job: Job, gpus: int) -> float:
        """Return the units of work a second, above 0, on that number of packed GPUs."""
        ...

    def left(self, job: Job) -> float:
        """Return the units of work that are left, at least 0."""
        ...


@dataclass(frozen=True, slots=True)
class KnownSpeeds:
    """The speeds and the work left by an oracle."""

    oracle: Oracle
    snapshot: Snapshot
    placements: dict[int, tuple[int, ...]] = field(default_factory=dict)

    def speed(self, job: Job, gpus: int) -> float:
        """Return the true pace on GPUs of as few nodes as possible."""
        if gpus not in self.placements:
            self.placements[gpus] = packed(self.snapshot, gpus)
        return max(self.oracle.rate(job, self.placements[gpus]), 1e-12)

    def left(self, job: Job) -> float:
        """Return what the job has left."""
        return self.oracle.remaining_work(job, self.snapshot.time_s)


@dataclass(frozen=True)
class MeasuredSpeeds:
    """The speeds that jobs have measured; jobs of a kind (sweep and model) share them.

    Before any measurement a job is as fast as it has GPUs. A unit of work is a reported step where
    steps have no known batch, else a step of the batch that the kind's jobs first had.
    `remaining`: an oracle of the work left, if that is known although the speeds are not.
    """

    snapshot: Snapshot
    remaining: Oracle | None = None

    def speed(self, job: Job, gpus: int) -> float:
        """Return the fitted speed."""
        model = self._models.get(kind_key(job))
        return float(gpus) if model is None else model.speed(gpus)

    def left(self, job: Job) -> float:
        """Return the steps left: to `total_steps`, to convergence, else as many as it has done."""
        if self.remaining is not None:
            return self.remaining.remaining_work(job, self.snapshot.time_s)
        if job.total_steps is not None:
            return float(max(0, job.total_steps - job.last_step))
        converging = steps_to_convergence(job)
        return float(max(1, job.last_step)) if converging is None else converging

    @cached_property
    def _models(self) -> Mapping[KindKey, AllReduceSpeed]:
        by_kind: dict[KindKey, list[Job]] = defaultdict(list)
        for job in self.snapshot.jobs:
            if any(0 < time.seconds < inf for time in job.step_times):
                by_kind[kind_key(job)].append(job)
        return {key: AllReduceSpeed.fit(_speeds(jobs)) for key, jobs in by_kind.items()}


def kind_key(job: Job) -> KindKey:
    """Return what jobs of equal speed share: the model, or the sweep without one."""
    return (job.model_name, "") if job.model_name is not None else ("", job.sweep)


def kept_kinds(kinds: Mapping[KindKey, T], snapshot: Snapshot) -> dict[KindKey, T]:
    """Return what is known of models, and of the sweeps that have a job in the snapshot.

    No later job is of a sweep that has ended.
    """
    sweeps = {job.sweep for job in snapshot.jobs}
    return {kind: value for kind, value in kinds.items() if kind[0] or kind[1] in sweeps}


def packed(snapshot: Snapshot, gpus: int) -> tuple[int, ...]:
    """Return how many of that many GPUs are on each node when they are on as few as possible."""
    sizes = sorted(Counter(snapshot.node_of.values()).values(), reverse=True)
    placement: list[int] = []
    for size in sizes:
        placement.append(min(size, gpus - sum(placement)))
        if sum(placement) == gpus:
            break
    return tuple(placement)


def steps_to_convergence(job: Job) -> float | None:
    """Return the steps until the fitted loss hardly falls; None with fewer than three points.

    The curve is 1/(b k + c) + d with b, c >= 0; it has converged when it falls by at most FALL of
    the fall so far over WINDOW points. Source: Capes et al., equation 1, and Optimus (EuroSys
    2018), whose window this is; that the fall is a part of the fall so far is our choice, as losses
    may have any scale. 0 after convergence, at most MOST_POINTS further points.
    """
    if len(job.curve) < MIN_POINTS:
        return None
    arrays = columns(job.curve)
    (fitted,) = fit([arrays.steps], [arrays.best], 1.0, exponential=False, squared=False)
    last = float(job.last_step)
    gap = last / len(job.curve)
    least = FALL * (fitted.loss(gap) - fitted.loss(last))
    for point in range(MOST_POINTS):
        step = last + point * gap
        if fitted.loss(step) - fitted.loss(step + WINDOW * gap) <= least:
            return point * gap
    return MOST_POINTS * gap


def _speeds(jobs: Iterable[Job]) -> tuple[tuple[int, float], ...]:
    """Return the mean measured speed of each size, of all jobs of a kind."""
    jobs = sorted(jobs, key=lambda job: job.id)
    sized = all(time.local_batch is not None for job in jobs for time in job.step_times)
    base = next((j.requested_batch for j in jobs if j.requested_batch is not None), None)
    by_gpus: dict[int, list[float]] = defaultdict(list)
    for job in jobs:
        for time in job.step_times:
            if not 0 < time.seconds < inf:
                continue
            samples = time.gpus * (time.local_batch or 1)
            base = samples if base is None else base
            by_gpus[time.gpus].append((samples / base if sized else 1.0) / time.seconds)
    return tuple((gpus, sum(v) / len(v)) for gpus, v in sorted(by_gpus.items()))
