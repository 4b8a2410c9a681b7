"""What jobs of one kind have measured together: their speeds, and how much work they are."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp, inf, log
from statistics import mean

import numpy as np
from numpy.typing import NDArray

from hermes_ops.core.all_reduce_speed import AllReduceSpeed
from hermes_ops.core.goodput import goodputs
from hermes_ops.core.model import Job, JobId, Phase, Snapshot
from hermes_ops.core.order import submission
from hermes_ops.core.sizes import StepTime
from hermes_ops.core.speed_model import Floats, SpeedModel, fit_speed_model
from hermes_ops.policies.elastic_frontrunner.finish_guard import Crowds
from hermes_ops.policies.elastic_frontrunner.trial_speeds import NO_SEARCH, SearchMemory
from hermes_ops.policies.toolbox.job_speeds import KindKey, kind_key

NOISE_STEP = 0.05
"""Noise scales are compared by their logarithm in steps of this: jobs share what is computed."""

REMEMBERED = 64
"""The ended jobs of a kind whose work is remembered."""

NO_PENALTY = 1e15
"""The noise scale taken for a kind that measures none: larger batches of its range cost nothing."""

_PLACE = tuple[int, int, int | None]


@dataclass(frozen=True, slots=True)
class Kind:
    """The measured steps of one kind of job, the model fitted to them, and the work of ended jobs.

    `noise_scales`: the newest by the step of the job that measured it, ascending. `works` is in
    steps of the initial batch, or in steps where a job has no range of batches. `measures_noise`:
    a job of the kind has measured its noise scale.
    """

    times: tuple[StepTime, ...] = ()
    model: SpeedModel | None = None
    noise_scales: tuple[tuple[int, float], ...] = ()
    works: tuple[float, ...] = ()
    measures_noise: bool = False

    @property
    def largest(self) -> int:
        """The largest number of GPUs that was measured; 0 before any."""
        return max((time.gpus for time in self.times), default=0)

    def noise_scale(self, step: int) -> float | None:
        """Return the noise scale of a job of this kind at that step; None before any measure."""
        place = bisect_right(self.noise_scales, step, key=_step)
        return self.noise_scales[max(0, place - 1)][1] if self.noise_scales else None


def _step(entry: tuple[int, float]) -> int:
    return entry[0]


@dataclass(frozen=True, slots=True)
class Progress:
    """The work a job had done at `at_s`, and at what `rate` a second it does more."""

    done: float = 0.0
    at_s: float = 0.0
    rate: float = 0.0
    since_s: float = 0.0  # its start-up on its present GPUs ends then

    def until(self, now_s: float) -> float:
        """Return the work done until then."""
        return self.done + self.rate * max(0.0, now_s - max(self.at_s, self.since_s))

    def seen_in(self, job: Job, now_s: float) -> Progress:
        """Return the progress that agrees with the steps that the job has reported until now.

        Where a unit of work is a step: at least its newest one, and less than another as far away.
        """
        if job.batch_range is not None or job.total_steps is None:
            return self
        gap = job.last_step - (job.curve[-2].step if len(job.curve) > 1 else 0)
        done = min(max(self.until(now_s), job.last_step), job.last_step + gap)
        return Progress(done, now_s, self.rate, self.since_s)


@dataclass(frozen=True, slots=True)
class Knowledge:
    """What the policy has learnt from its decisions so far; its memory."""

    kinds: tuple[tuple[KindKey, Kind], ...] = ()
    progress: tuple[tuple[JobId, Progress], ...] = ()
    crowds: Crowds = ()
    search: SearchMemory = NO_SEARCH


def learn_kinds(
    snapshot: Snapshot, before: Mapping[KindKey, Kind], ended: Mapping[JobId, float]
) -> dict[KindKey, Kind]:
    """Return the kinds with what the jobs of the snapshot have measured since.

    `ended`: the work of jobs that have ended since the last decision.
    """
    kinds = {kind_key(job): Kind() for job in snapshot.jobs} | dict(before)
    times: dict[KindKey, dict[_PLACE, StepTime]] = {}
    telling = (j for j in snapshot.jobs if j.step_times or j.noise_scale or j.id in ended)
    for job in sorted(telling, key=submission):  # of two measures the later job's is kept
        name = kind_key(job)
        known = times.setdefault(name, {})
        known.update((_place(time), time) for time in job.step_times)
        kind = kinds[name]
        if job.noise_scale is not None:
            kind = replace(kind, measures_noise=True)
        if job.noise_scale is not None and job.holds_gpus:
            noise = dict(kind.noise_scales) | {job.last_step: job.noise_scale}
            kind = replace(kind, noise_scales=tuple(sorted(noise.items())))
        if job.id in ended and _is_complete(job):
            kind = replace(kind, works=(*kind.works, ended[job.id])[-REMEMBERED:])
        kinds[name] = kind
    for name, measured in times.items():
        kinds[name] = _with_times(kinds[name], measured)
    return kinds


def _is_complete(job: Job) -> bool:
    """Return whether a job has ended with all its steps: one that was ended early tells no work."""
    return job.phase is Phase.ENDED and job.last_step >= (job.total_steps or 0)


def _place(time: StepTime) -> _PLACE:
    return time.gpus, time.nodes, time.local_batch


def _with_times(kind: Kind, measured: Mapping[_PLACE, StepTime]) -> Kind:
    known = {_place(time): time for time in kind.times}
    if measured.keys() <= known.keys():
        return kind
    known.update(measured)
    times = tuple(known[place] for place in sorted(known, key=_sortable))
    if not any(time.local_batch for time in times):
        return replace(kind, times=times)
    return replace(kind, times=times, model=fit_speed_model(times, kind.model).model)


def _sortable(place: _PLACE) -> tuple[int, int, int]:
    return place[0], place[1], place[2] or 0


@dataclass(frozen=True, slots=True)
class SizeRates:
    """For each of S sizes the work a second, (S,), and the number of nodes that gives it, (S,).

    `batch`, (S,): the samples of a step that give it; 0: as the job chooses.
    """

    rate: Floats
    nodes: NDArray[np.int64]
    batch: NDArray[np.int64]


class Rates:
    """The work a second of jobs by number of GPUs, on the number of nodes that suits them best.

    These are as few as the GPUs need, or twice as many. What was measured on a number of GPUs and
    nodes corrects the model there; where nothing was, the model is believed, and thus tried. A kind
    that measures no noise scale makes the same progress with each sample of a larger batch of the
    range that its user allows; the batch is then the policy's to choose.
    """

    def __init__(self, kinds: Mapping[KindKey, Kind], gpus_a_node: int, nodes: int) -> None:
        self._kinds, self.gpus_a_node, self._nodes = kinds, gpus_a_node, nodes
        self._known: dict[tuple[object, ...], SizeRates] = {}
        self._corrections: dict[KindKey, dict[tuple[int, int], float]] = {}

    def of(self, job: Job, sizes: Sequence[int], held: tuple[int, int] = (0, 0)) -> SizeRates:
        """Return the rates on these numbers of GPUs; linear before any measure.

        `held`: the GPUs and nodes that the job has: at this size no other nodes are looked at.
        """
        kind = self._kinds[kind_key(job)]
        noise = job.noise_scale
        if noise is None:
            noise = kind.noise_scale(job.last_step)
        step = None if noise is None else round(log(max(noise, 1e-9)) / NOISE_STEP)
        batch = None if job.batch_range else job.requested_batch
        key = (kind_key(job), step, job.batch_range, batch, tuple(sizes), held)
        if key not in self._known:
            self._known[key] = self._computed(job, kind, step, sizes, held)
        return self._known[key]

    def _computed(
        self, job: Job, kind: Kind, step: int | None, sizes: Sequence[int], held: tuple[int, int]
    ) -> SizeRates:
        packed = [-(-size // self.gpus_a_node) for size in sizes]
        if kind.model is None or job.batch_range is None:
            own = np.zeros(len(sizes), dtype=np.int64)
            return SizeRates(_by_size(kind.times, sizes), np.array(packed), own)
        free = step is None and not kind.measures_noise
        noise = NO_PENALTY if free else 0.0 if step is None else exp(step * NOISE_STEP)
        best: SizeRates | None = None
        for times in (1, 2):
            wide = [
                min(n * times, size, self._nodes) for n, size in zip(packed, sizes, strict=True)
            ]
            nodes = [
                held[1] if size == held[0] else n if p > 1 else p
                for size, n, p in zip(sizes, wide, packed, strict=True)
            ]
            goodput = goodputs(kind.model, job.batch_range, noise, sizes, nodes)
            batch = (goodput.batch if free else 0.0 * goodput.batch).astype(np.int64)
            known = self._corrections_of(kind_key(job), kind)
            factors = [known.get((s, n), 1.0) for s, n in zip(sizes, nodes, strict=True)]
            rate = goodput.rate * np.array(factors)
            if best is None:
                best = SizeRates(rate, np.array(nodes), batch)
            else:
                better = rate > best.rate
                best = SizeRates(
                    np.where(better, rate, best.rate),
                    np.where(better, nodes, best.nodes),
                    np.where(better, batch, best.batch),
                )
        none = np.zeros(0, dtype=np.int64)
        return best or SizeRates(np.zeros(0), none, none)

    def _corrections_of(self, name: KindKey, kind: Kind) -> dict[tuple[int, int], float]:
        """Return fitted over measured seconds by GPUs and nodes, as geometric means."""
        if name not in self._corrections:
            self._corrections[name] = _corrections(kind)
        return self._corrections[name]


def _corrections(kind: Kind) -> dict[tuple[int, int], float]:
    gaps: dict[tuple[int, int], list[float]] = {}
    times = [time for time in kind.times if time.local_batch]
    if kind.model is None or not times:
        return {}
    rows = [(time.gpus, time.nodes, time.local_batch or 0) for time in times]
    fitted = kind.model.pass_s(*np.array(rows, dtype=np.float64).T)
    for time, seconds in zip(times, fitted.tolist(), strict=True):
        gaps.setdefault((time.gpus, time.nodes), []).append(log(seconds / time.seconds))
    return {place: exp(mean(logs)) for place, logs in gaps.items()}


def _by_size(times: Iterable[StepTime], sizes: Sequence[int]) -> Floats:
    """Return the rates of steps whose batch is not known: linear before any was measured."""
    measured = tuple((time.gpus, 1 / time.seconds) for time in times if 0 < time.seconds < inf)
    if not measured:
        return np.array(sizes, dtype=np.float64)
    speed = AllReduceSpeed.fit(measured)
    return np.array([speed.speed(size) for size in sizes])


def expected_work(job: Job, kind: Kind, done: float) -> float | None:
    """Return the whole work of a job: as of ended jobs of its kind, else by the steps that it has.

    Where a unit of work is a step, it is the number of its steps. None while nothing tells it.
    """
    if job.total_steps and job.batch_range is None and kind.times:
        return float(job.total_steps)
    if kind.works:
        return max(mean(kind.works), done)
    if job.total_steps and 0 < job.last_step <= job.total_steps and done > 0:
        return done * job.total_steps / job.last_step
    return None
