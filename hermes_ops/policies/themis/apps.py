"""The apps of finish-time fairness: what each still has to train, and how late it would end."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import inf
from statistics import median

from hermes_ops.core.model import QUEUED_PHASES, Job, JobId, Phase, Snapshot
from hermes_ops.core.order import SubmissionKey, submission
from hermes_ops.policies.themis.job_shares import predicted_left_s
from hermes_ops.policies.toolbox.sweep_queues import by_sweep, searches

LeftSeconds = Callable[[Job, float], float]
"""Return the seconds that a job still trains on its GPUs; the float is the time now."""

LEAST_GPU_S = 1e-3
"""GPU-seconds that are left at least of an app with a job that has not ended."""


@dataclass(frozen=True, slots=True)
class AppShare:
    """An app's time on its share of the GPUs for what it has trained, up to the newest decision.

    `done_gpu_s` is the GPU time that its jobs had had by then.
    """

    app: str
    alone_s: float
    done_gpu_s: float


@dataclass(frozen=True, slots=True)
class App:
    """A sweep, the sweeps of a user, or a single job, at one decision.

    `jobs` may have GPUs now, next first: those that hold GPUs, those that have begun, then the
    others, each by submission. `demand` are the GPUs of all of them. `work_gpu_s` and `longest_s`
    are what is left to train of all its jobs, and of the longest one. `share_gpus` is its share of
    the pool, `alone_s` its time on that share for what it has trained.
    """

    name: str
    jobs: tuple[Job, ...]
    demand: int
    elapsed_s: float
    work_gpu_s: float
    longest_s: float
    share_gpus: float
    alone_s: float
    done_gpu_s: float
    first: SubmissionKey  # of its jobs

    def shared_s(self, gpus: float) -> float:
        """Return the seconds from its submission to its end with that many GPUs from now on."""
        if gpus <= 0:
            return inf
        return self.elapsed_s + max(self.longest_s, self.work_gpu_s / gpus)

    @property
    def independent_s(self) -> float:
        """The seconds that it takes alone on its share: what is done, and what is left."""
        usable = _usable(self.share_gpus, self.demand)
        return self.alone_s + max(self.longest_s, self.work_gpu_s / usable)

    def rho(self, gpus: float) -> float:
        """Return its finish-time fairness with that many GPUs from now on: 1 is fair."""
        return self.shared_s(gpus) / self.independent_s

    def rank(self, pool_gpus: int) -> tuple[float, SubmissionKey]:
        """Return the sort key by which the app that is furthest behind comes first.

        It is furthest behind by its rho with all GPUs that it can use.
        """
        return (-self.rho(min(self.demand, pool_gpus)), self.first)

    @property
    def share(self) -> AppShare:
        """The time on its share, as the policy remembers it until the next decision."""
        return AppShare(self.name, self.alone_s, self.done_gpu_s)


def apps_of(
    snapshot: Snapshot,
    shares: Iterable[AppShare],
    left_s: LeftSeconds | None,
    *,
    by_user: bool,
    least_s: float,
) -> list[App]:
    """Return the apps with jobs that have not ended, the one submitted first first.

    `shares` are those of the decision before. `left_s` tells what is left of a job; without it,
    that is predicted (`predicted_seconds`), with `least_s` where nothing is known.
    """
    groups = {
        name: jobs
        for name, jobs in _groups(snapshot, by_user=by_user).items()
        if any(_is_alive(job) for job in jobs)
    }
    weights = {name: 1.0 if by_user else jobs[0].weight for name, jobs in groups.items()}
    total, share_of = sum(weights.values()), {share.app: share for share in shares}
    left = _left(snapshot, groups, left_s, least_s)
    gpus = max(1, len(snapshot.gpus))
    apps = [
        _app(
            snapshot,
            name,
            jobs,
            left,
            share_gpus=gpus * weights[name] / total,
            before=share_of.get(name),
        )
        for name, jobs in groups.items()
    ]
    return sorted(apps, key=lambda app: app.first)


def _groups(snapshot: Snapshot, *, by_user: bool) -> dict[str, list[Job]]:
    """Return the jobs of each app by its name, in order of submission."""
    trials = {job.id for jobs in searches(snapshot).values() for job in jobs}
    groups: dict[str, list[Job]] = {}
    for sweep, jobs in by_sweep(snapshot).items():
        for job in jobs:
            name = f"sweep {sweep}" if job.id in trials else f"job {job.id}"
            if by_user and job.user:
                name = f"user {job.user}"
            groups.setdefault(name, []).append(job)
    return groups


def _is_alive(job: Job) -> bool:
    return job.phase is not Phase.ENDED and (job.phase is not Phase.STOPPING or job.resumes)


def _left(
    snapshot: Snapshot,
    groups: Mapping[str, Sequence[Job]],
    left_s: LeftSeconds | None,
    least_s: float,
) -> Mapping[JobId, float]:
    """Return the seconds left of each job that has not ended."""
    now_s, left = snapshot.time_s, dict[JobId, float]()
    for jobs in groups.values():
        alive = [job for job in jobs if _is_alive(job)]
        if left_s is not None:
            left |= {job.id: left_s(job, now_s) for job in alive}
            continue
        sweeps: dict[str, list[Job]] = {}
        for job in jobs:
            sweeps.setdefault(job.sweep, []).append(job)
        for trials in sweeps.values():
            left |= predicted_seconds(trials, now_s, least_s)
    return left


def predicted_seconds(trials: Sequence[Job], now_s: float, least_s: float) -> dict[JobId, float]:
    """Predict the seconds that each trial of a sweep which has not ended still trains.

    These are the steps that are expected of it times the seconds of a step: its own, else the
    median of its sweep. Expected are the steps that it has left, but as trials of the sweep have
    ended early, by the mean over those that had come further than it and one that runs to its end.
    Where no step is timed, or the number of steps is unknown: as long again as it has trained, and
    at least `least_s`.
    """
    paces = {job.id: pace for job in trials if (pace := _step_s(job)) is not None}
    usual_s = median(paces.values()) if paces else None
    ends = _EarlyEnds.from_trials(trials)
    left: dict[JobId, float] = {}
    for job in filter(_is_alive, trials):
        step_s = paces.get(job.id, usual_s)
        if step_s is None or job.total_steps is None:
            left[job.id] = predicted_left_s(job, now_s, least_s)
        else:
            left[job.id] = ends.expected_steps(job.last_step, job.total_steps) * step_s
    return left


def _step_s(job: Job) -> float | None:
    if job.last_step <= 0 or not 0 < job.curve[-1].seconds < inf:
        return None
    return job.curve[-1].seconds / job.last_step


@dataclass(frozen=True, slots=True)
class _EarlyEnds:
    """The last steps of the trials of a sweep that have ended, ascending, and their sums."""

    steps: tuple[int, ...]
    sums: tuple[int, ...]  # of the first 0, 1, 2, ... of them

    @classmethod
    def from_trials(cls, trials: Iterable[Job]) -> _EarlyEnds:
        ended = sorted(job.last_step for job in trials if job.phase is Phase.ENDED)
        return cls(tuple(ended), tuple(accumulate(ended, initial=0)))

    def expected_steps(self, step: int, total: int) -> float:
        """Return the steps that a trial at `step`, of `total` at most, is expected to train."""
        first = bisect_right(self.steps, step)
        further = len(self.steps) - first
        ahead = self.sums[-1] - self.sums[first] - further * step
        return max(0.0, min(float(total - step), (ahead + total - step) / (further + 1)))


def _app(
    snapshot: Snapshot,
    name: str,
    jobs: Sequence[Job],
    left: Mapping[JobId, float],
    *,
    share_gpus: float,
    before: AppShare | None,
) -> App:
    alive = [job for job in jobs if _is_alive(job)]
    able = tuple(sorted(filter(_is_served, alive), key=_turn))
    demand = sum(_gpus(job) for job in able)
    work_gpu_s = max(LEAST_GPU_S, sum(left[job.id] * _gpus(job) for job in alive))
    done_gpu_s = sum(job.attained_gpu_s(snapshot.time_s) for job in jobs)
    usable = _usable(share_gpus, demand)
    alone_s, since_gpu_s = (0.0, 0.0) if before is None else (before.alone_s, before.done_gpu_s)
    return App(
        name,
        able,
        demand,
        max(0.0, snapshot.time_s - min(job.submitted_s for job in _present(jobs, alive))),
        work_gpu_s,
        max(left[job.id] for job in alive),
        share_gpus,
        alone_s + max(0.0, done_gpu_s - since_gpu_s) / usable,
        done_gpu_s,
        min(map(submission, alive)),
    )


def _usable(share_gpus: float, demand: int) -> float:
    """Return the GPUs of its share that an app can use; all while none of its jobs can start."""
    return min(share_gpus, demand) if demand else share_gpus


def _present(jobs: Sequence[Job], alive: Sequence[Job]) -> Iterator[Job]:
    """Yield the jobs of the sweeps that have jobs left: a user's earlier sweeps are over."""
    sweeps = {job.sweep for job in alive}
    return (job for job in jobs if job.sweep in sweeps)


def _is_served(job: Job) -> bool:
    return job.holds_gpus or job.phase in QUEUED_PHASES


def _turn(job: Job) -> tuple[bool, bool, SubmissionKey]:
    return (not job.holds_gpus, job.phase is Phase.PENDING, submission(job))


def _gpus(job: Job) -> int:
    return len(job.gpus_held) if job.holds_gpus else job.min_gpus
