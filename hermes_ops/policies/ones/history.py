"""The memory of ONES: the samples and epochs that jobs have done, and the limits of their sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, takewhile
from math import inf
from statistics import mean, median

from hermes_ops.core.model import Job, JobId, Phase, Snapshot
from hermes_ops.core.order import submission
from hermes_ops.policies.toolbox.job_speeds import (
    KindKey,
    MeasuredSpeeds,
    kind_key,
    steps_to_convergence,
)

EPOCHS_AT_LIMIT = 2
"""Epochs that a job does at its limit until this doubles, and in all until it may be taken out."""

GROWTH = 4
"""A limit is at most this many times the GPUs that the job has."""

NEWEST = 5
"""The ended jobs of a kind whose measured speeds are used; the prototype uses 5 measures."""

Lengths = Mapping[KindKey, tuple[float, ...]]
"""The epochs that ended jobs of each kind have done."""


@dataclass(frozen=True, slots=True)
class JobHistory:
    """The past of an open job.

    `samples`: done up to `gpu_s` of attained service, in the units of its speed; the newest of the
    service was on `size` GPUs. `limit`: the GPUs that it may have.
    """

    job: JobId
    samples: float
    gpu_s: float
    size: int
    limit: int


@dataclass(frozen=True, slots=True)
class JobState:
    """A job at a decision: samples and epochs done, and the epochs that are predicted to be left.

    `size`: the GPUs that it has, else had last, else its least size. `limit`: those that it may
    have. `here`: the epochs done since its GPUs last changed, inf while it holds none.
    """

    job: Job
    held: int
    size: int
    samples: float
    epochs: float
    left_epochs: float
    here: float
    limit: int

    @property
    def is_ready(self) -> bool:
        """True when its GPUs may change: it holds none, or has done an epoch on them."""
        return self.here >= 1

    @property
    def may_leave(self) -> bool:
        """True when a mutation may take it out of a schedule."""
        return self.is_ready and max(self.epochs, self.here) >= EPOCHS_AT_LIMIT

    def remembered(self, now_s: float, granted: int) -> JobHistory:
        """Return what to remember when it has `granted` GPUs from now on."""
        gpu_s = self.job.attained_gpu_s(now_s)
        return JobHistory(self.job.id, self.samples, gpu_s, granted or self.size, self.limit)


def measured_speeds(snapshot: Snapshot) -> MeasuredSpeeds:
    """Return the speeds that open jobs and the NEWEST ended ones of each kind have measured."""
    ended: dict[KindKey, list[Job]] = {}
    for job in snapshot.others:
        if job.phase is Phase.ENDED and job.step_times:
            ended.setdefault(kind_key(job), []).append(job)
    newest = (sorted(jobs, key=submission)[-NEWEST:] for jobs in ended.values())
    stopping = (job for job in snapshot.others if job.phase is not Phase.ENDED)
    jobs = (*snapshot.holding, *snapshot.queue, *stopping, *chain.from_iterable(newest))
    return MeasuredSpeeds(Snapshot(snapshot.time_s, snapshot.gpus, jobs))


@dataclass(frozen=True, slots=True)
class HistoryReader:
    """Derives the state of jobs from a snapshot and what is remembered.

    `epoch_s`: the seconds of training that count as an epoch, where a job's own are longer or it
    reports none.
    """

    snapshot: Snapshot
    speeds: MeasuredSpeeds
    before: Mapping[JobId, JobHistory]
    epoch_s: float

    def samples(self, job: Job) -> float:
        """Return the samples that a job has done; without a memory as if on its present size."""
        past = self.before.get(job.id)
        size = past.size if past is not None else len(job.gpus_held) or job.min_gpus
        done, until = (past.samples, past.gpu_s) if past is not None else (0.0, 0.0)
        more = max(0.0, job.attained_gpu_s(self.snapshot.time_s) - until)
        return done + more * self.speeds.speed(job, size) / size

    def epochs(self, job: Job, samples: float) -> float:
        """Return the epochs done: the points of its curve, or the time where it reports none."""
        if job.curve or job.total_steps is not None:
            return float(len(job.curve))
        return samples / self.speeds.speed(job, job.min_gpus) / self.epoch_s

    def state(self, job: Job, held: int, lengths: Lengths, gpus: int) -> JobState:
        """Return the state of an open job that can keep `held` of the `gpus` GPUs."""
        past, samples = self.before.get(job.id), self.samples(job)
        size = held or (past.size if past is not None else job.min_gpus)
        epochs, here = self.epochs(job, samples), self._epochs_here(job) if held else inf
        left = predicted_epochs(job, epochs, lengths.get(kind_key(job), ()))
        limit = max(job.min_gpus, past.limit if past is not None else held)
        # A job that skips a slow size is at half of its limit: it may try the next one.
        if held and (2 * held >= limit or held >= _largest(job, limit)):
            limit = grown_limit(job, limit, held, here, gpus)
        return JobState(job, held, size, samples, epochs, left, here, limit)

    def _epochs_here(self, job: Job) -> float:
        """Return the epochs that a job has done on its present GPUs, by its steps or the time."""
        if job.phase is not Phase.RUNNING:
            return 0.0
        new = takewhile(lambda point: point.step > job.steps_at_start, reversed(job.curve))
        since_s = 0.0 if job.started_s is None else self.snapshot.time_s - job.started_s
        return max(float(sum(1 for _ in new)), since_s / self.epoch_s)


def predicted_epochs(job: Job, epochs: float, lengths: Sequence[float]) -> float:
    """Return the epochs that a job is predicted to have left, at least 1: b of its progress.

    Its declared steps tell it; else the mean of what longer jobs of its kind did beyond `epochs`;
    else the fit of its curve; else as many as it has done.
    """
    steps = job.last_step / len(job.curve) if job.last_step > 0 else 1.0
    if job.total_steps is not None:
        return max(1.0, (job.total_steps - job.last_step) / steps)
    longer = [length - epochs for length in lengths if length > epochs]
    if longer:
        return max(1.0, mean(longer))
    fitted = steps_to_convergence(job)
    return max(1.0, epochs if fitted is None else fitted / steps)


def grown_limit(job: Job, limit: int, held: int, epochs: float, gpus: int) -> int:
    """Return the limit of a job after `epochs` epochs on its GPUs: doubled for every two.

    At most GROWTH x held and all GPUs; at least the job's next size once it is doubled.
    """
    doublings = int(min(epochs // EPOCHS_AT_LIMIT, GROWTH))
    following = job.size_above(held)
    if not doublings or following is None:
        return limit
    grown = min(limit << doublings, GROWTH * held)
    return max(limit, min(max(grown, following), gpus))


def overtime_limits(states: Sequence[JobState], gpus: int) -> dict[JobId, int]:
    """Return lower limits of jobs on half of the GPUs or more that have run longer than the median.

    The limit becomes 2 x size / (run / median + 1), where run is the job's training time. While no
    job waits there are none (ours).
    """
    if all(s.held for s in states):
        return {}
    runs_s = {s.job.id: s.job.service_gpu_s / s.held for s in states if s.held}
    usual_s = median(runs_s.values()) if runs_s else 0.0
    return {
        s.job.id: max(s.job.min_gpus, int(2 * s.held / (runs_s[s.job.id] / usual_s + 1)))
        for s in states
        if 2 * s.held >= gpus and 0 < usual_s < runs_s[s.job.id]
    }


def _largest(job: Job, limit: int) -> int:
    sizes = job.sizes_up_to(limit)
    return sizes[-1] if sizes else 0
