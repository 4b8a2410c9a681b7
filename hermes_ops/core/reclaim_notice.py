"""The notice before a reclaim: borrowed GPUs stay with their job for a while once they are wanted.

Pure, like the policies: which jobs have notice since when is part of the quota's memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from math import inf

from hermes_ops.core.grant_overrides import override_grants
from hermes_ops.core.model import JobId, Plan, Reason, Snapshot
from hermes_ops.core.nodes import on_allowed_node
from hermes_ops.core.plan import overlay
from hermes_ops.core.quota import Quota
from hermes_ops.core.team_shares import Account

Notices = tuple[tuple[JobId, float], ...]
"""The jobs that have notice, and since when; in order of that time, then by id."""


@dataclass(frozen=True, slots=True)
class ReclaimNotice:
    """Tells jobs that they lose borrowed GPUs, `notice_s` seconds before they do."""

    notice_s: float

    def wanted(
        self, snapshot: Snapshot, quota: Quota, notices: Notices, of_team: Mapping[Account, float]
    ) -> Notices:
        """Return the notices that still hold: as many as their teams hold too much.

        `of_team` are the GPUs that each team may hold now. The oldest notices come first.
        """
        if not notices:
            return ()
        excess = quota.held_by_team(snapshot)
        for team in excess:
            excess[team] -= int(of_team.get(team, 0))
        kept = []
        for job_id, since_s in notices:
            held = snapshot.retained.get(job_id)
            if held is None:
                continue
            team = quota.team_of(snapshot.index[job_id].virtual_cluster).name
            if excess[team] > 0:
                excess[team] -= len(held.gpus)
                kept.append((job_id, min(since_s, snapshot.time_s)))
        return tuple(kept)

    def given(
        self,
        snapshot: Snapshot,
        quota: Quota,
        plan: Plan,
        notices: Notices,
        hidden: Collection[JobId],
    ) -> Notices:
        """Return the notices after this plan: of `hidden` jobs whose team loses borrowed GPUs.

        Whatever is beyond the limit of a team or a user has no notice.
        """
        granted = {grant.job for grant in plan.grants}.union(plan.ends)
        lost, since = _lost_gpus(snapshot, quota, plan), dict(notices)
        of_users, limits = Counter[str](), quota.limit_of_user
        for job in snapshot.holding:
            of_users[job.user] += len(job.gpus_held)
        losers = sorted(
            (since.get(job.id, snapshot.time_s), job.id)
            for job in snapshot.holding
            if job.id in hidden and job.id in snapshot.retained and job.id not in granted
            if of_users[job.user] <= limits.get(job.user, inf)
        )
        pending: list[tuple[JobId, float]] = []
        for since_s, job_id in losers:
            job = snapshot.index[job_id]
            team = quota.team_of(job.virtual_cluster).name
            if lost[team] > 0:  # further ones leave for jobs of their own team
                lost[team] -= len(job.gpus_held)
                pending.append((job_id, since_s))
        return tuple(pending)

    def kept(self, snapshot: Snapshot, notices: Notices) -> dict[JobId, float]:
        """Return the jobs whose notice is not over, each with the time at which it is."""
        ends = {job: since_s + self.notice_s for job, since_s in notices}
        return {job: end_s for job, end_s in ends.items() if end_s > snapshot.time_s}

    def with_kept(self, snapshot: Snapshot, plan: Plan, kept: Mapping[JobId, float]) -> Plan:
        """Return the plan in which these jobs keep their GPUs, with the reasons."""
        if not kept:
            return plan
        held = [snapshot.retained[job] for job in kept]
        new = _in_turn(snapshot, plan, override_grants(snapshot, plan, held))
        after = {grant.job for grant in new.grants}
        late = [
            grant.job
            for grant in plan.grants
            if grant.job not in after and not snapshot.index[grant.job].holds_gpus
        ]
        reasons = {job: _notice(plan.reasons[job], kept[job]) for job in kept}
        last_s = min(kept.values())
        reasons |= {job: _waits(last_s) for job in late}
        return replace(
            new,
            ranking=(*late, *new.ranking),
            reasons=overlay(plan.reasons, reasons),
            notices=tuple(sorted(kept.items())),
        ).reviewed_by(last_s)


def _in_turn(snapshot: Snapshot, wanted: Plan, plan: Plan) -> Plan:
    """Return the plan in which jobs start in the order of the wanted one, on what is free already.

    A job whose GPUs are still held takes those of the last job of its size that starts after it.
    """
    starts = {g.job: g for g in plan.grants if not snapshot.index[g.job].holds_gpus}
    order = [grant for grant in wanted.grants if not snapshot.index[grant.job].holds_gpus]
    for place, grant in enumerate(order):
        if grant.job in starts:
            continue
        job = snapshot.index[grant.job]
        for later in reversed(order[place + 1 :]):
            start = starts.get(later.job)
            if start is None or (len(start.gpus), start.share) != (len(grant.gpus), grant.share):
                continue
            if on_allowed_node(snapshot, job, start.gpus):
                starts[grant.job] = replace(grant, gpus=start.gpus)
                del starts[later.job]
                break
    kept = (grant for grant in plan.grants if snapshot.index[grant.job].holds_gpus)
    return replace(plan, grants=(*kept, *(starts[g.job] for g in order if g.job in starts)))


def _lost_gpus(snapshot: Snapshot, quota: Quota, plan: Plan) -> Counter[str]:
    """Return how many GPUs each team loses by the plan that holds more than its guarantee."""
    now, then = quota.held_by_team(snapshot), Counter[str]()
    for grant in plan.grants:
        then[quota.team_of(snapshot.index[grant.job].virtual_cluster).name] += len(grant.gpus)
    return Counter(
        {
            team.name: now[team.name] - then[team.name]
            for team in quota.everyone
            if then[team.name] < now[team.name] and team.guaranteed < now[team.name] <= team.limit
        }
    )


def _time_of_day(time_s: float) -> str:
    """Return the time of day in UTC."""
    return datetime.fromtimestamp(time_s, UTC).strftime("%H:%M:%S UTC")


def _notice(why: Reason, end_s: float) -> Reason:
    text = why.text.removeprefix("preempted because ")
    return replace(
        why, text=f"keeps its GPUs until {_time_of_day(end_s)}, then is preempted: {text}"
    )


def _waits(end_s: float) -> Reason:
    until = _time_of_day(end_s)
    text = f"waits until {until}: a trial that has borrowed its GPUs has notice until then"
    return Reason(text, would_change="the end of that notice")
