"""Which jobs may hold nothing now by the limits of their user: sweeps at once, and GPU-hours."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from hermes_ops.core.amounts import counted, figure
from hermes_ops.core.gpu_time import GpuTime, day_end_s, month_end_s
from hermes_ops.core.model import Job, JobId, Reason, Snapshot, SweepId, Term
from hermes_ops.core.quota import UserBudget

SPENT_GPU_S = 1e-3
"""GPU-seconds that are left of a limit which counts as reached."""


@dataclass(frozen=True, slots=True)
class GpuTimeLimit:
    """How much of its GPU time a user has had in a period, which ends at `until_s`."""

    period: str
    used_gpu_s: float
    limit_gpu_s: float
    until_s: float

    @property
    def is_reached(self) -> bool:
        """True where nothing is left until the period ends."""
        return self.used_gpu_s >= self.limit_gpu_s - SPENT_GPU_S

    def change_s(self, now_s: float, held: int) -> float | None:
        """Return when this changes: the limit is reached with that many GPUs, or the period ends.

        None where neither comes.
        """
        if self.is_reached:
            return self.until_s
        return now_s + (self.limit_gpu_s - self.used_gpu_s) / held if held else None


def gpu_time_limits(budget: UserBudget, time: GpuTime, now_s: float) -> list[GpuTimeLimit]:
    """Return the limits of a user's GPU time: of the day, then of the month."""
    limits = []
    if budget.gpu_s_per_day is not None:
        used = dict(time.day).get(budget.user, 0.0)
        limits.append(GpuTimeLimit("day", used, budget.gpu_s_per_day, day_end_s(now_s)))
    if budget.gpu_s_per_month is not None:
        used = dict(time.month).get(budget.user, 0.0)
        limits.append(GpuTimeLimit("month", used, budget.gpu_s_per_month, month_end_s(now_s)))
    return limits


def blocked_jobs(
    snapshot: Snapshot, budgets: Mapping[str, UserBudget], time: GpuTime
) -> dict[JobId, Reason]:
    """Return the jobs that may hold nothing now, each with the reason.

    These are all jobs of a user whose GPU time is spent, and those of sweeps beyond the number that
    a user may have at once. Waiting jobs are among them until the earlier use has been read.
    """
    blocked: dict[JobId, Reason] = {}
    if not budgets:
        return blocked
    for user, jobs in _by_user(snapshot, budgets).items():
        budget = budgets[user]
        limits = gpu_time_limits(budget, time, snapshot.time_s)
        reached = [limit for limit in limits if limit.is_reached]
        if reached:
            last = max(reached, key=lambda limit: limit.until_s)
            blocked.update((job.id, _spent(job, last)) for job in jobs)
            continue
        if limits and not time.is_known:
            blocked.update((job.id, _uncounted(user)) for job in jobs if not job.holds_gpus)
        if budget.sweeps is not None:
            blocked.update(_beyond(snapshot, jobs, user, budget.sweeps))
    return blocked


def review_s(snapshot: Snapshot, budgets: Mapping[str, UserBudget], time: GpuTime) -> float | None:
    """Return when the GPU time of a user that has jobs is next spent, or is there again."""
    held = dict(time.held)
    changes = (
        limit.change_s(snapshot.time_s, held.get(user, 0))
        for user in _by_user(snapshot, budgets)
        for limit in gpu_time_limits(budgets[user], time, snapshot.time_s)
    )
    return min((at_s for at_s in changes if at_s is not None), default=None)


def _by_user(snapshot: Snapshot, budgets: Mapping[str, UserBudget]) -> dict[str, list[Job]]:
    jobs: dict[str, list[Job]] = defaultdict(list)
    for job in (*snapshot.holding, *snapshot.queue):
        if job.user in budgets:
            jobs[job.user].append(job)
    return jobs


def _beyond(
    snapshot: Snapshot, jobs: list[Job], user: str, most: int
) -> Iterator[tuple[JobId, Reason]]:
    """Yield the jobs of the sweeps beyond that number.

    Sweeps that have begun come first, then by submission. One whose last trial is stopping, and
    goes on later, counts as well.
    """
    begun = {job.sweep for job in snapshot.jobs if job.is_open and job.user == user}
    others = (job for job in snapshot.others if job.user == user and job.is_open and job.resumes)
    order: dict[SweepId, tuple[bool, float, str]] = {}
    for job in (*jobs, *others):
        place = (job.sweep not in begun, job.submitted_s, job.sweep)
        order[job.sweep] = min(order.get(job.sweep, place), place)
    beyond = set(sorted(order, key=order.__getitem__)[most:])
    text = f"user {user} may have {counted(most, 'sweep')} at once"
    change = "a sweep of the user ending, or a higher limit"
    for job in jobs:
        if job.sweep in beyond:
            verb = "stops" if job.holds_gpus else "waits"
            yield job.id, Reason(f"{verb}: {text}", would_change=change)


def _spent(job: Job, limit: GpuTimeLimit) -> Reason:
    until = datetime.fromtimestamp(limit.until_s, UTC).strftime("%Y-%m-%d %H:%M UTC")
    hours = figure(limit.limit_gpu_s / 3_600.0, 4)
    verb = "stops" if job.holds_gpus else "waits"
    terms = (Term("used_gpu_s", limit.used_gpu_s), Term("limit_gpu_s", limit.limit_gpu_s))
    text = f"{verb} until {until}: user {job.user} has used the {hours} GPU-hours of this "
    return Reason(text + limit.period, terms, would_change=f"{until}, or a higher limit")


def _uncounted(user: str) -> Reason:
    text = f"waits: the GPU-hours that user {user} has used are being counted"
    return Reason(text, would_change="the end of that count")
