"""Measurements that jobs of one kind share: their work, and their speeds by numbers of GPUs."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import exp, inf, log
from statistics import mean
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hermes_ops.core.goodput import best_rates, goodputs
from hermes_ops.core.model import Job, JobId, Phase, Snapshot
from hermes_ops.core.order import by_submission
from hermes_ops.core.sizes import BatchRange, StepTime
from hermes_ops.core.speed_model import AllReduceSpeed, Floats, SpeedModel, fit_speed_model
from hermes_ops.policies.elastic_frontrunner.finish_guard import Crowds
from hermes_ops.policies.elastic_frontrunner.trial_speeds import NO_SEARCH, SearchMemory
from hermes_ops.policies.toolbox.job_speeds import KindKey, kind_key

REMEMBERED = 64
"""The ended jobs of a kind whose work is remembered."""

_PLACE = tuple[int, int, int | None]

Integers = NDArray[np.int64]

NOISE_STEP = 0.05
"""Noise scales are compared by their logarithm in steps of this: jobs share what is computed."""

NO_PENALTY = 1e15
"""The noise scale taken for a kind that measures none: larger batches of its range cost nothing."""

NO_PLACE = (0, 0)
"""The GPUs and nodes of a job that has none."""


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
    """The memory of the policy: what it has learnt from its decisions so far."""

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
    keys = dict.fromkeys(map(kind_key, snapshot.jobs))
    news: dict[KindKey, _News] = {}
    telling = (j for j in snapshot.jobs if j.step_times or j.noise_scale or j.id in ended)
    for job in by_submission(telling):  # of two measures the later job's is kept
        name = kind_key(job)
        if name not in news:
            news[name] = _News()
        lesson = news[name]
        for time in job.step_times:
            lesson.times[_place(time)] = time
        if job.noise_scale is not None:
            lesson.measures_noise = True
            if job.holds_gpus:
                lesson.noise[job.last_step] = job.noise_scale
        if job.id in ended and _is_complete(job):
            lesson.works.append(ended[job.id])
    kinds = dict.fromkeys(keys, Kind()) | dict(before)
    return kinds | {name: lesson.added_to(kinds[name]) for name, lesson in news.items()}


@dataclass(slots=True)
class _News:
    """The measurements of the jobs of one kind in one snapshot."""

    times: dict[_PLACE, StepTime] = field(default_factory=dict)
    noise: dict[int, float] = field(default_factory=dict)
    works: list[float] = field(default_factory=list)
    measures_noise: bool = False

    def added_to(self, kind: Kind) -> Kind:
        """Return the kind with this."""
        if self.measures_noise:
            kind = replace(kind, measures_noise=True)
        if self.noise:
            noise = dict(kind.noise_scales) | self.noise
            kind = replace(kind, noise_scales=tuple(sorted(noise.items())))
        if self.works:
            kind = replace(kind, works=(*kind.works, *self.works)[-REMEMBERED:])
        return _with_times(kind, self.times)


def _is_complete(job: Job) -> bool:
    """Return whether a job has ended with all its steps: one that was ended early tells no work."""
    return job.phase is Phase.ENDED and job.last_step >= (job.total_steps or 0)


def _place(time: StepTime) -> _PLACE:
    return time.gpus, time.nodes, time.local_batch


def _with_times(kind: Kind, measured: Mapping[_PLACE, StepTime]) -> Kind:
    time_at = {_place(time): time for time in kind.times}
    if measured.keys() <= time_at.keys():
        return kind
    time_at.update(measured)
    times = tuple(time_at[place] for place in sorted(time_at, key=_sortable))
    if not any(time.local_batch for time in times):
        return replace(kind, times=times)
    return replace(kind, times=times, model=fit_speed_model(times, kind.model).model)


def _sortable(place: _PLACE) -> tuple[int, int, int]:
    return place[0], place[1], place[2] or 0


def expected_work(job: Job, kind: Kind, done: float) -> float | None:
    """Return the whole work of a job: as of ended jobs of its kind, else by the steps that it has.

    Where a unit of work is a step, it is the number of its steps. None while nothing tells it.
    """
    if job.total_steps and job.batch_range is None and kind.times:
        return float(job.total_steps)
    if kind.works:
        return max(_mean(kind.works), done)
    if job.total_steps and 0 < job.last_step <= job.total_steps and done > 0:
        return done * job.total_steps / job.last_step
    return None


@lru_cache(maxsize=256)  # asked for each job of the kind
def _mean(works: tuple[float, ...]) -> float:
    return mean(works)


class SizedGroup(NamedTuple):
    """The inputs shared by jobs whose rates are computed together.

    `held`: the GPUs and nodes that they have: at this size no other nodes are looked at.
    """

    kind: KindKey
    batches: BatchRange | None
    sizes: tuple[int, ...]
    held: tuple[int, int] = NO_PLACE


@dataclass(frozen=True, slots=True)
class SizeRates:
    """For J jobs and S sizes the work a second and the number of nodes that gives it, (J, S).

    `batch`, (J, S): the samples of a step that give it; 0: as the job chooses.
    """

    rate: Floats
    nodes: Integers
    batch: Integers


class Rates:
    """The work a second of jobs by number of GPUs, on the number of nodes that suits them best.

    These are as few as the GPUs need, or twice as many. What was measured on a number of GPUs and
    nodes corrects the model there; where nothing was, the model is believed, and thus tried. A kind
    that measures no noise scale makes the same progress with each sample of a larger batch of the
    range that its user allows; the batch is then the policy's to choose.
    """

    def __init__(self, kinds: Mapping[KindKey, Kind], gpus_a_node: int, nodes: int) -> None:
        self._kinds, self.gpus_a_node, self._nodes = kinds, gpus_a_node, nodes
        self._noise_steps: dict[tuple[KindKey, int], int | None] = {}
        self._corrections: dict[KindKey, dict[tuple[int, int], float]] = {}

    def noise_step(self, job: Job, kind: KindKey) -> int | None:
        """Return the noise scale that is taken for a job, in steps; None: nothing tells it.

        Its own, or before it has measured one that of its kind at its step.
        """
        if job.noise_scale is not None:
            return _noise_step(job.noise_scale)
        place = kind, job.last_step
        if place not in self._noise_steps:
            noise = self._kinds[kind].noise_scale(job.last_step)
            self._noise_steps[place] = None if noise is None else _noise_step(noise)
        return self._noise_steps[place]

    def of(self, group: SizedGroup, noise_steps: Sequence[int | None]) -> SizeRates:
        """Return the rates of jobs of these noise scales; linear before any measure."""
        kind, sizes = self._kinds[group.kind], group.sizes
        shape = len(noise_steps), len(sizes)
        packed = np.array([-(-size // self.gpus_a_node) for size in sizes], dtype=np.int64)
        if kind.model is None or group.batches is None:
            rate = np.broadcast_to(_by_size(kind.times, sizes), shape)
            return SizeRates(rate, np.broadcast_to(packed, shape), np.zeros(shape, dtype=np.int64))
        different = {step: row for row, step in enumerate(dict.fromkeys(noise_steps))}
        rows = [different[step] for step in noise_steps]
        size_rates = self._on_best_nodes(group, group.batches, kind, kind.model, tuple(different))
        return SizeRates(size_rates.rate[rows], size_rates.nodes[rows], size_rates.batch[rows])

    def _on_best_nodes(
        self,
        group: SizedGroup,
        batches: BatchRange,
        kind: Kind,
        model: SpeedModel,
        noise_steps: Sequence[int | None],
    ) -> SizeRates:
        """Return the rates by noise scale, of which no two are equal."""
        few, many = (self._spread(group, times) for times in (1, 2))
        column = {place: number for number, place in enumerate(dict.fromkeys((*few, *many)))}
        gpus, nodes = zip(*column, strict=True)
        usual = 0.0 if kind.measures_noise else NO_PENALTY
        noise = [usual if step is None else exp(step * NOISE_STEP) for step in noise_steps]
        rate = best_rates(model, batches, np.array(noise), gpus, nodes)
        batch = np.zeros(rate.shape, dtype=np.int64)
        if None in noise_steps and not kind.measures_noise:
            free = goodputs(model, batches, NO_PENALTY, gpus, nodes)
            batch[noise_steps.index(None)] = free.batch.astype(np.int64)
        corrections = self._corrections_of(group.kind, kind)
        rate = rate * np.array([corrections.get(place, 1.0) for place in column])
        on_few, on_many = ([column[place] for place in places] for places in (few, many))
        better = rate[:, on_many] > rate[:, on_few]
        spread = np.array(nodes, dtype=np.int64)
        return SizeRates(
            np.where(better, rate[:, on_many], rate[:, on_few]),
            np.where(better, spread[on_many], spread[on_few]),
            np.where(better, batch[:, on_many], batch[:, on_few]),
        )

    def _spread(self, group: SizedGroup, times: int) -> list[tuple[int, int]]:
        """Return GPUs and nodes of each size, on `times` as many nodes as it needs."""
        places = []
        for size in group.sizes:
            packed = -(-size // self.gpus_a_node)
            nodes = min(packed * times, size, self._nodes) if packed > 1 else packed
            places.append((size, group.held[1] if size == group.held[0] else nodes))
        return places

    def _corrections_of(self, name: KindKey, kind: Kind) -> dict[tuple[int, int], float]:
        """Return fitted over measured seconds by GPUs and nodes, as geometric means."""
        if name not in self._corrections:
            self._corrections[name] = _corrections(kind)
        return self._corrections[name]


@lru_cache(maxsize=1 << 15)  # most jobs wait and measure nothing new
def _noise_step(noise_scale: float) -> int:
    return round(log(max(noise_scale, 1e-9)) / NOISE_STEP)


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
