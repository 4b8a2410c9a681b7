"""What jobs of one kind have measured together: their speeds, and how much work they are."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from statistics import mean

from hermes_ops.core.model import Job, JobId, Phase, Snapshot
from hermes_ops.core.order import by_submission
from hermes_ops.core.sizes import StepTime
from hermes_ops.core.speed_model import SpeedModel, fit_speed_model
from hermes_ops.policies.elastic_frontrunner.finish_guard import Crowds
from hermes_ops.policies.elastic_frontrunner.trial_speeds import NO_SEARCH, SearchMemory
from hermes_ops.policies.toolbox.job_speeds import KindKey, kind_key

REMEMBERED = 64
"""The ended jobs of a kind whose work is remembered."""

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
    keys = dict.fromkeys(map(kind_key, snapshot.jobs))
    news: dict[KindKey, _News] = {}
    telling = (j for j in snapshot.jobs if j.step_times or j.noise_scale or j.id in ended)
    for job in by_submission(telling):  # of two measures the later job's is kept
        name = kind_key(job)
        if name not in news:
            news[name] = _News()
        found = news[name]
        for time in job.step_times:
            found.times[_place(time)] = time
        if job.noise_scale is not None:
            found.measures_noise = True
            if job.holds_gpus:
                found.noise[job.last_step] = job.noise_scale
        if job.id in ended and _is_complete(job):
            found.works.append(ended[job.id])
    kinds = dict.fromkeys(keys, Kind()) | dict(before)
    return kinds | {name: found.added_to(kinds[name]) for name, found in news.items()}


@dataclass(slots=True)
class _News:
    """What the jobs of one kind tell in one snapshot."""

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
