"""A sweep's own limit on how many of its trials train at the same time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from hermes_ops.core.model import (
    Job,
    JobId,
    Phase,
    Plan,
    Reason,
    Snapshot,
    SweepId,
    overlay,
)
from hermes_ops.core.wrapper import Wrapper

M = TypeVar("M")

_EARLY = Reason(
    "waits until a trial of its sweep has left its GPUs",
    would_change="a trial of its sweep leaving its GPUs",
)


@dataclass(frozen=True, slots=True)
class MaxParallel(Wrapper[M]):
    """Any policy under the sweeps' limits; `limits` are (sweep, trials that may hold GPUs at once).

    The inner policy decides as if there were no limit. What it grants a sweep beyond its limit is
    taken out of its sight, those that hold GPUs last, and it is asked again: so the GPUs go to
    other sweeps instead of idling, and which trials of the sweep train is still the policy's
    choice. Put it outside of the guards; a trial within its quantum holds GPUs and stays.

    A trial that leaves its GPUs counts until it has left: whoever follows it starts in a later
    round, or the two would train at the same time on different GPUs.
    """

    limits: tuple[tuple[SweepId, int], ...]

    def decide(self, snapshot: Snapshot, memory: M) -> tuple[Plan, M]:
        """The inner policy's plan for as many trials as may train."""
        limits = dict(self.limits)
        hidden: dict[JobId, int] = {}
        while True:
            plan, after = self.policy.decide(_without(snapshot, hidden), memory)
            surplus = _surplus(snapshot, plan, limits)
            if not surplus:
                return _without_early(snapshot, _explained(plan, hidden), limits), after
            hidden |= surplus


def _without(snapshot: Snapshot, hidden: Mapping[JobId, int]) -> Snapshot:
    if not hidden:
        return snapshot  # with what is known of it
    return replace(snapshot, jobs=tuple(j for j in snapshot.jobs if j.id not in hidden))


def _surplus(snapshot: Snapshot, plan: Plan, limits: dict[SweepId, int]) -> dict[JobId, int]:
    """The granted jobs beyond their sweep's limit, with that limit."""
    granted: dict[SweepId, list[tuple[bool, int, Job]]] = {}
    for place, grant in enumerate(plan.grants):
        job = snapshot.index[grant.job]
        if job.sweep in limits:
            goes_on = snapshot.held.get(job.id) == grant.gpus
            granted.setdefault(job.sweep, []).append((not goes_on, place, job))
    return {
        job.id: limits[sweep]
        for sweep, jobs in granted.items()
        for _, _, job in sorted(jobs, key=lambda entry: entry[:2])[limits[sweep] :]
    }


def _without_early(snapshot: Snapshot, plan: Plan, limits: dict[SweepId, int]) -> Plan:
    """The plan without the starts that have to wait until others of their sweep have left."""
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
            would_change="one of them ends, or budget.max_parallel is raised",
        )
        for job, limit in hidden.items()
    }
    return replace(plan, reasons=overlay(plan.reasons, reasons))
