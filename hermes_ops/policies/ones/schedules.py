"""The schedules of one decision: jobs as arrays, their remaining GPU time, the best schedule."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from hermes_ops.core.model import JobId
from hermes_ops.core.order import submission
from hermes_ops.core.speed_model import Floats
from hermes_ops.policies.ones.evolution import (
    Generation,
    Integers,
    Limits,
    Operators,
    evolved,
    padded,
)
from hermes_ops.policies.ones.history import JobState
from hermes_ops.policies.toolbox.job_speeds import KindKey, MeasuredSpeeds, kind_key

Schedule = tuple[tuple[JobId, int], ...]
"""The GPUs of each job that has any."""

LEAST_PROGRESS = 1e-6
"""The least progress of a job: with less, the remaining work would not be finite."""


@dataclass(frozen=True, slots=True)
class SearchedJob:
    """A job of the search: `most` GPUs at most, and the seconds that a restart counts for it."""

    state: JobState
    most: int
    restart_s: float


@dataclass(eq=False, slots=True)
class ScheduleSearch:
    """The search of one decision over at least one job, on `gpus` GPUs.

    In the genes jobs whose size must stay come first, then those that hold GPUs, by their lowest
    GPU, then the others by submission.
    """

    jobs: Sequence[SearchedJob]
    gpus: int
    speeds: MeasuredSpeeds
    limits: Limits = field(init=False)
    _kind: Integers = field(init=False)
    _gpu_s: Floats = field(init=False)  # of a sample, by kind and size
    _tried: Integers = field(init=False)  # the largest size that was measured, by kind
    _samples: Floats = field(init=False)
    _held: Integers = field(init=False)
    _restart_s: Floats = field(init=False)
    _rank: Integers = field(init=False)

    def __post_init__(self) -> None:
        self.jobs = sorted(self.jobs, key=_gene_order)
        states = [job.state for job in self.jobs]
        self._kind, self._gpu_s = _gpu_seconds(states, self.gpus, self.speeds)
        self._tried = _largest_tried(states, self.speeds)
        self._samples = np.array([state.samples for state in states])
        self._held = np.array([state.held for state in states])
        self._restart_s = np.array([job.restart_s for job in self.jobs])
        by_submission = sorted(range(len(states)), key=lambda n: submission(states[n].job))
        self._rank = np.argsort(by_submission)
        self.limits = self._limits(states)

    @property
    def expected(self) -> Floats:
        """For each job the samples left over those done, at its mean progress a / (a + b)."""
        a, b = self._beta()
        return b / a

    def score(self, sizes: Integers, factors: Floats) -> Floats:
        """Return the remaining GPU-seconds of schedules, the restarts of running jobs included.

        A job with Y samples done has Y x its factor left, and takes n / X(n) GPU-seconds for each.
        """
        left = self._gpu_s[self._kind, sizes] * (factors * self._samples)
        moves = (sizes != self._held) & (self._held > 0)
        lost = np.where(moves, np.maximum(sizes, self._held) * self._restart_s, 0.0)
        return np.asarray((left + lost).sum(axis=1))

    def order(self, factors: Floats) -> Integers:
        """Return the jobs by what they have left on their least size, then by submission."""
        left = factors * self._samples * self._gpu_s[self._kind, self.limits.least]
        return np.lexsort((self._rank, left))

    def starts(self, remembered: Iterable[Schedule], most: int) -> Integers:
        """Return at most `most` valid schedules to begin with.

        They are the present one with its free GPUs used, one filled from nothing, remembered ones.
        New jobs have their least size in each, where the jobs with the most left make room.
        """
        order = self.order(self.expected)
        present = [(job.state.job.id, job.state.held) for job in self.jobs]
        rows = self._rows([present, (), *remembered][:most])
        rows = np.maximum(rows, np.where(self._samples > 0, 0, self.limits.least))
        kept_first = order[np.argsort(~self.limits.keeps[order], kind="stable")]
        return padded(self.limits, self.limits.refreshed(rows, kept_first), order)

    def evolve(
        self,
        starts: Integers,
        population: int,
        generations: int,
        operators: Operators,
        rng: np.random.Generator,
    ) -> Integers:
        """Return the population after the last generation, the best by expectation first.

        The first of `starts` is always compared with. Each generation draws the progress of every
        job from Beta(a, b), the same for all schedules.
        """
        drawn = rng.beta(*self._beta(), size=(generations, len(self.jobs)))
        factors = 1.0 / np.maximum(drawn, LEAST_PROGRESS) - 1.0
        each = [Generation(self.order(row), partial(self.score, factors=row)) for row in factors]
        first = np.resize(starts, (population, len(self.jobs)))
        last = evolved(self.limits, first, each, operators, rng)
        every = np.concatenate((starts[:1], last))
        best = np.argsort(self.score(every, self.expected), kind="stable")
        return every[best[:population]]

    def schedule(self, sizes: Integers) -> Schedule:
        """Return the schedule of a row of sizes."""
        pairs = zip(self.jobs, sizes.tolist(), strict=True)
        return tuple((job.state.job.id, size) for job, size in pairs if size)

    def filled(self, schedule: Mapping[JobId, int], without: Collection[JobId]) -> dict[JobId, int]:
        """Return the schedule with its last free GPUs given away, to no job of `without`.

        Waiting jobs come before those that grow, each in the order of what they have left.
        """
        sizes = {job: size for job, size in schedule.items() if job not in without}
        free = self.gpus - sum(sizes.values())
        limits, order = self.limits, self.order(self.expected).tolist()
        for is_waiting in (True, False):
            for n in order:
                job = self.jobs[n].state.job
                now = sizes.get(job.id, 0)
                if not free or job.id in without or (now == 0) != is_waiting:
                    continue
                wanted = int(limits.least[n]) if is_waiting else int(limits.target[n])
                size = int(limits.floors[limits.kind[n], min(wanted, now + free)])
                if size > now:
                    sizes[job.id], free = size, free - (size - now)
        return sizes

    def _beta(self) -> tuple[Floats, Floats]:
        states = [job.state for job in self.jobs]
        a = np.array([max(1.0, state.epochs) for state in states])
        return a, np.array([state.left_epochs for state in states])

    def _rows(self, schedules: Sequence[Iterable[tuple[JobId, int]]]) -> Integers:
        column = {job.state.job.id: n for n, job in enumerate(self.jobs)}
        rows = np.zeros((len(schedules), len(column)), dtype=np.int64)
        for row, schedule in enumerate(schedules):
            for job, size in schedule:
                if job in column:
                    rows[row, column[job]] = size
        return rows

    def _limits(self, states: Sequence[JobState]) -> Limits:
        ranges: dict[tuple[object, ...], int] = {}
        kind = np.array(
            [
                ranges.setdefault((s.job.min_gpus, s.job.max_gpus, s.job.sizes), len(ranges))
                for s in states
            ]
        )
        floors = np.zeros((len(ranges), self.gpus + 1), dtype=np.int64)
        for state, row in zip(states, kind.tolist(), strict=True):
            sizes = state.job.sizes_up_to(self.gpus)
            floors[row, sizes] = sizes
        floors = np.maximum.accumulate(floors, axis=1)
        keeps = np.array([not state.is_ready for state in states])
        least = np.array([state.job.min_gpus for state in states])
        target = np.where(keeps, self._held, floors[kind, self._targets(least)])
        leaves = np.array([state.may_leave for state in states])
        return Limits(self.gpus, floors, kind, least, target, keeps, leaves)

    def _targets(self, least: Integers) -> Integers:
        """Return the most GPUs that each job may grow to: the fastest number within its limit.

        A running job does not grow if that would not save more than a restart counts. A limit
        beyond what the kind has tried is tried.
        """
        most = np.minimum([job.most for job in self.jobs], self.gpus)
        seconds = self._gpu_s.copy()
        seconds[:, 1:] /= np.arange(1, self.gpus + 1)
        seconds[:, 0] = np.inf
        is_best = seconds == np.minimum.accumulate(seconds, axis=1)
        fastest = np.maximum.accumulate(np.where(is_best, np.arange(self.gpus + 1), 0), axis=1)
        is_new = most > self._tried[self._kind]
        target = np.maximum(np.where(is_new, most, fastest[self._kind, most]), least)
        now = np.minimum(self._held, most)
        saved_s = seconds[self._kind, now] - seconds[self._kind, target]
        saved_s = np.where(now > 0, saved_s, 0.0) * self._samples * self.expected
        grows = (now == 0) | is_new | ((saved_s > self._restart_s) & (target > now))
        return np.where(grows, target, now)


def _gpu_seconds(
    states: Sequence[JobState], gpus: int, speeds: MeasuredSpeeds
) -> tuple[Integers, Floats]:
    """Return the kind of each job, and for each kind the GPU-seconds of a sample by size."""
    kinds: dict[KindKey, int] = {}
    rows = np.array([kinds.setdefault(kind_key(state.job), len(kinds)) for state in states])
    some = {kind_key(state.job): state.job for state in states}
    gpu_s = np.zeros((len(kinds), gpus + 1))
    for kind, row in kinds.items():
        gpu_s[row, 1:] = [n / speeds.speed(some[kind], n) for n in range(1, gpus + 1)]
    return rows, gpu_s


def _largest_tried(states: Sequence[JobState], speeds: MeasuredSpeeds) -> Integers:
    kinds: dict[KindKey, int] = {kind_key(state.job): 0 for state in states}
    for job in speeds.snapshot.jobs:
        kind = kind_key(job)
        if kind in kinds:
            kinds[kind] = max(kinds[kind], max((time.gpus for time in job.step_times), default=0))
    return np.array(list(kinds.values()), dtype=np.int64)


def _gene_order(job: SearchedJob) -> tuple[object, ...]:
    state = job.state
    gpus = state.job.gpus_held if state.held else ()
    return (state.is_ready, not gpus, min(gpus, default=0), submission(state.job))
