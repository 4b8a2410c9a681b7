"""Goodputs of many jobs by size: known, or by what jobs have measured, alone or as a kind."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache

import numpy as np

from hermes_ops.core.goodput import BatchTable
from hermes_ops.core.model import Job
from hermes_ops.core.sizes import StepTime
from hermes_ops.core.speed_model import Floats, SpeedModel, fit_speed_model
from hermes_ops.policies.toolbox.job_speeds import MeasuredSpeeds, kind_key, packed
from hermes_ops.policies.toolbox.sized_grants import SizingProblem

KnownRate = Callable[[Job, tuple[int, ...]], float]
"""The rate of a job by the GPUs on each of its nodes."""

_Place = tuple[int, int]


class GoodputSpeeds:
    """The goodput of jobs by size, up to a factor a job, and the largest sizes tried.

    `known` tells it; without it speeds are fitted to the steps that jobs have measured, those of
    all jobs of a kind together if it is `shared`.
    """

    def __init__(self, problem: SizingProblem, known: KnownRate | None, *, shared: bool) -> None:
        self._known, self._by_kind = known, shared and known is None
        self._snapshot = problem.snapshot
        self._placements: dict[int, tuple[int, ...]] = {}
        self._plain = MeasuredSpeeds(problem.snapshot)
        self._extremes: dict[object, dict[_Place, list[StepTime]]] = {}
        self._models: dict[object, SpeedModel | None] = {}
        self._noise: dict[object, float] = {}
        for job in problem.snapshot.jobs:
            if job.step_times:
                _note_extremes(self._extremes.setdefault(self.key(job), {}), job.step_times)
            if job.noise_scale is not None:
                key = self.key(job)
                self._noise[key] = min(self._noise.get(key, job.noise_scale), job.noise_scale)

    def key(self, job: Job) -> object:
        """Return what jobs of equal speed share, apart from their batches and noise."""
        return kind_key(job) if self._by_kind else job.id

    def tried(self, key: object) -> int:
        """Return the largest number of GPUs that the job, or its kind, has measured; 0: none."""
        return max((gpus for gpus, _ in self._extremes.get(key, ())), default=0)

    def rates(self, jobs: Sequence[Job], sizes: Sequence[int]) -> Floats:
        """Return the goodputs of jobs of one key and range of batches, shape (jobs, sizes).

        Sizes are on as few nodes as possible.
        """
        if self._known is not None:
            placements = [self._packed(size) for size in sizes]
            return np.array([[self._known(job, place) for place in placements] for job in jobs])
        first = jobs[0]
        if first.batch_range is None:
            speeds = [self._plain.speed(first, size) for size in sizes]
            return np.tile(np.array(speeds), (len(jobs), 1))
        key = self.key(first)
        model = self._model(key)
        if model is None:
            return np.tile(np.array(sizes, dtype=np.float64), (len(jobs), 1))
        usual = self._noise.get(key, 0.0)
        noise = [usual if job.noise_scale is None else job.noise_scale for job in jobs]
        different, place = np.unique(np.array(noise), return_inverse=True)
        nodes = [len(self._packed(size)) for size in sizes]
        table = BatchTable.from_model(model, first.batch_range, sizes, nodes)
        return np.asarray(table.rates(different)[place])

    def _model(self, key: object) -> SpeedModel | None:
        if key not in self._models:
            places = sorted(self._extremes.get(key, {}).items())
            times = (time for _, extremes in places for time in dict.fromkeys(extremes))
            self._models[key] = _fitted(tuple(times))
        return self._models[key]

    def _packed(self, size: int) -> tuple[int, ...]:
        if size not in self._placements:
            self._placements[size] = packed(self._snapshot, size)
        return self._placements[size]


def _note_extremes(extremes: dict[_Place, list[StepTime]], times: Iterable[StepTime]) -> None:
    """Keep for each number of GPUs and nodes the times with the fewest and the most samples.

    A time between them tells little more, and each new time costs a fit.
    """
    for time in times:
        found = extremes.setdefault((time.gpus, time.nodes), [time, time])
        local = time.local_batch or 0
        if local <= (found[0].local_batch or 0) and _by_batch(time) < _by_batch(found[0]):
            found[0] = time
        if local >= (found[1].local_batch or 0) and _by_batch(time) > _by_batch(found[1]):
            found[1] = time


def _by_batch(time: StepTime) -> tuple[float, ...]:
    return time.local_batch or 0, time.seconds, time.compute_s or 0.0


@lru_cache(maxsize=4096)
def _fitted(times: tuple[StepTime, ...]) -> SpeedModel | None:
    """Return the model of the step times; None if none of them tells its samples a GPU."""
    try:
        return fit_speed_model(times).model
    except ValueError:
        return None
