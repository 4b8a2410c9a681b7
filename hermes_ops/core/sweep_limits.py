"""Limits of a sweep: trials that train at once, and open trials without a reported loss."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from hermes_ops.core.model import Job, JobId, Phase, Plan, Reason, Snapshot, SweepId
from hermes_ops.core.nodes import unplaceable
from hermes_ops.core.plan import overlay
from hermes_ops.core.wrapper import Wrapper

M = TypeVar("M")

_EARLY = Reason(
    "waits until a trial of its sweep has left its GPUs",
    would_change="a trial of its sweep leaving its GPUs",
)


@dataclass(frozen=True, slots=True)
class MaxParallel(Wrapper[M]):
    """Any policy under the sweeps' limits; `limits` are (sweep, trials that may hold GPUs at once).

    The inner policy decides as if there were no limit. The trials to which it grants GPUs beyond a
    limit are hidden from it, those that hold GPUs last, and it is asked again: so the GPUs go to
    other sweeps instead of idling, and which trials of the sweep train is still the policy's
    choice. To a policy that `compares` the trials of a sweep the hidden ones are shown as stopping,
    so that the ranks of the others do not change. Wrap it around the guards: a trial within its
    quantum keeps its GPUs.

    A trial that leaves its GPUs counts until it has left: its successor starts in a later
    round, or the two would train at the same time on different GPUs.
    """

    limits: tuple[tuple[SweepId, int], ...]
    compares: bool = False

    def decide(self, snapshot: Snapshot, memory: M) -> tuple[Plan, M]:
        """Return the inner policy's plan for as many trials as may train."""
        limits = dict(self.limits)
        hidden: dict[JobId, int] = {}
        while True:
            seen = _without(snapshot, hidden, shows_hidden=self.compares)
            plan, after = self.policy.decide(seen, memory)
            surplus = _surplus(snapshot, plan, limits)
            if not surplus:
                return _without_early(snapshot, _explained(plan, hidden), limits), after
            hidden |= surplus


def _without(snapshot: Snapshot, hidden: Mapping[JobId, int], *, shows_hidden: bool) -> Snapshot:
    if shows_hidden or not hidden:
        return snapshot.with_stopping(hidden)
    return replace(snapshot, jobs=tuple(job for job in snapshot.jobs if job.id not in hidden))


def _surplus(snapshot: Snapshot, plan: Plan, limits: dict[SweepId, int]) -> dict[JobId, int]:
    """Return the granted jobs beyond their sweep's limit, with that limit.

    A running job that must not be stopped counts first and is never among them.
    """
    granted: dict[SweepId, list[tuple[bool, bool, int, Job]]] = {}
    for place, grant in enumerate(plan.grants):
        job = snapshot.index[grant.job]
        if job.sweep in limits:
            goes_on = snapshot.held.get(job.id) == grant.gpus
            pinned = goes_on and job.phase is Phase.RUNNING and not job.preemptible
            granted.setdefault(job.sweep, []).append((not pinned, not goes_on, place, job))
    return {
        job.id: limits[sweep]
        for sweep, jobs in granted.items()
        for hideable, _, _, job in sorted(jobs, key=lambda entry: entry[:3])[limits[sweep] :]
        if hideable
    }


def _without_early(snapshot: Snapshot, plan: Plan, limits: dict[SweepId, int]) -> Plan:
    """Return the plan without the starts that must wait until others of their sweep have left."""
    room = dict(limits)
    for job in snapshot.jobs:
        occupies = job.phase is Phase.STOPPING or job.holds_gpus
        if job.sweep in room and occupies:
            room[job.sweep] -= 1
    early: dict[JobId, Reason] = {}
    for job in (snapshot.index[grant.job] for grant in plan.grants):
        if job.sweep in room and not job.holds_gpus:
            room[job.sweep] -= 1
            if room[job.sweep] < 0:
                early[job.id] = _EARLY
    if not early:
        return plan
    grants = tuple(grant for grant in plan.grants if grant.job not in early)
    ranking = (*early, *plan.ranking)
    reasons = overlay(plan.reasons, early)
    return replace(plan, grants=grants, ranking=ranking, reasons=reasons)


def _explained(plan: Plan, hidden: dict[JobId, int]) -> Plan:
    reasons = {
        job: Reason(
            f"waits: its sweep trains at most {limit} trials at once",
            would_change="one of them ends, or budget.max_parallel is raised, or max_active_tasks "
            "of its DAG where that is less",
        )
        for job, limit in hidden.items()
    }
    return replace(plan, reasons=overlay(plan.reasons, reasons))


PER_GPU = 2


@dataclass(frozen=True, slots=True)
class MaxUnreported(Wrapper[M]):
    """Any policy, with a bound on the open trials whose loss a learning search does not know yet.

    The trials of a sweep in `learning` get their configurations, when they are opened, from the
    results of earlier ones. At most `per_gpu` (at least 1) trials of such a sweep for each GPU of
    the pool are open without a reported loss. A trial that has reported does not count, whether it
    has ended or not; nor does one whose nodes have left the pool, as it may report nothing for
    long. Pending trials beyond the bound are hidden from the inner policy, so GPUs go to other
    sweeps. The configurations of pending trials are hidden too: a replay knows them before they are
    drawn.

    The bound is the threshold of Hermes' queues (Son et al. 2021, Algorithm 1). We apply it to
    every policy, to each sweep separately, and to trials without a loss only: if all open trials
    counted, policies that pause trials would find good ones later (docs/frontrunner-measured.md).
    """

    learning: frozenset[SweepId]
    per_gpu: int = PER_GPU

    def decide(self, snapshot: Snapshot, memory: M) -> tuple[Plan, M]:
        """Return the inner policy's plan without the trials and configurations still unknown."""
        most = self.per_gpu * len(snapshot.gpus)
        hidden = _beyond(snapshot, self.learning, most)
        sealed = {job.id for job in snapshot.queue if job.configuration and self._unknown(job)}
        if not hidden and not sealed:
            return self.policy.decide(snapshot, memory)
        seen = tuple(
            replace(job, configuration=()) if job.id in sealed else job
            for job in snapshot.jobs
            if job.id not in hidden
        )
        plan, after = self.policy.decide(replace(snapshot, jobs=seen), memory)
        why = Reason(
            f"waits to be opened: its search learns from results, so {most} trials of its sweep "
            "at most are open without one",
            would_change="one of them reporting a loss, or a larger guard_open",
        )
        return replace(plan, reasons=overlay(plan.reasons, dict.fromkeys(hidden, why))), after

    def _unknown(self, job: Job) -> bool:
        return job.phase is Phase.PENDING and job.sweep in self.learning


def _beyond(snapshot: Snapshot, learning: frozenset[SweepId], most: int) -> set[JobId]:
    """Return the pending trials of learning sweeps beyond the bound, the last ones first."""
    room = dict.fromkeys(learning, most)
    for job in snapshot.jobs:
        unknown = job.sweep in room and job.is_open and not job.curve
        if unknown and not unplaceable(snapshot, job):
            room[job.sweep] -= 1
    hidden: set[JobId] = set()
    for job in snapshot.queue:
        if job.sweep in room and job.phase is Phase.PENDING:
            room[job.sweep] -= 1
            if room[job.sweep] < 0:
                hidden.add(job.id)
    return hidden
