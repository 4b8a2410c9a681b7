"""Any policy within the quotas of a pool's teams and users."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Set
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from math import inf
from typing import Generic, TypeVar

from hermes_ops.core.gpu_time import DecayedUse, GpuTime
from hermes_ops.core.guards import Quantum
from hermes_ops.core.model import Job, JobId, Plan, Policy, Reason, Snapshot, Term
from hermes_ops.core.plan import LazyReasons, overlay
from hermes_ops.core.priority_class import named_classes, refused_jobs
from hermes_ops.core.quota import Quota, TeamQuota
from hermes_ops.core.quota_limits import HeldGpus, QuotaLimits, amount_of
from hermes_ops.core.reclaim_notice import Notices, ReclaimNotice
from hermes_ops.core.team_shares import class_shares, job_priorities, team_shares
from hermes_ops.core.user_limits import blocked_jobs, review_s

M = TypeVar("M")

LENDINGS = 3
"""How often a decision lends GPUs that the plan leaves idle; each time the policy decides again."""

SHRINKINGS = 3
"""How often a decision gives jobs with a range fewer GPUs, before it hides those beyond a limit."""

MOST_DECISIONS = 40
"""How often a decision asks the policy at most; jobs beyond a limit start nothing after that."""

EARLY = Reason(
    "waits until a job of its team or user has left its GPUs",
    would_change="that job leaving its GPUs",
)
"""Why a job that the policy starts does not start yet."""


@dataclass(frozen=True, slots=True)
class QuotaMemory(Generic[M]):
    """The inner policy's memory, and what each team and each limited user has used.

    `notices`: the jobs that keep borrowed GPUs a little longer, and since when.
    """

    inner: M
    use: DecayedUse
    time: GpuTime = field(default_factory=GpuTime)
    notices: Notices = ()


@dataclass(frozen=True, slots=True)
class WithinQuota(Generic[M]):
    """Any policy, but each team's guaranteed GPUs are its own, and limits are kept.

    GPUs that a team leaves idle are lent to others; when it wants them back, borrowed jobs are
    stopped. Which jobs of a team train is the inner policy's choice: it decides as if there were
    no quota, jobs beyond their team's share or their user's limit are hidden from it, those that
    hold GPUs last, and it decides again. Together with a job beyond a limit, the waiting jobs that
    would be beyond it too are hidden, and those far behind others of their team (`AHEAD`), so that
    a few decisions about fewer jobs suffice. GPUs that are still idle then are lent beyond the
    shares. The policy's memory and the jobs that it ends are those of its first decision, which
    sees every job. To a policy that `compares` the trials of a sweep the hidden ones are shown as
    stopping, so that the ranks of the others do not change.

    Put it outside of the guards. Jobs within their quantum keep their GPUs (`quantum`), so a team
    waits for a guaranteed GPU no longer than the longest quantum and the switch after it, if the
    policy itself leaves no GPU idle that a job of the team could take. With one team and no limits
    the plan is the inner policy's.

    The scheme is that of Kueue's cohorts (nominal quota, borrowing, reclaim by preemption) with
    Slurm's decayed use among borrowers. A job that takes several numbers of GPUs takes none beyond
    its team's share and its user's limit, nor more than other jobs leave of them. Under a policy
    that `sizes` jobs, one that holds more gets fewer in place of being stopped, unless it is owed a
    notice before that.
    """

    policy: Policy[M]
    quota: Quota
    quantum: Quantum = field(default_factory=Quantum)
    past_use: DecayedUse = field(default_factory=DecayedUse)
    compares: bool = False
    sizes: bool = False

    @property
    def name(self) -> str:
        """The inner policy's name."""
        return self.policy.name

    @property
    def preempts(self) -> bool:
        """True with teams, which reclaim what they have lent, and with limits of GPU time."""
        return self.policy.preempts or bool(self.quota.teams or self.quota.user_budgets)

    def initial(self) -> QuotaMemory[M]:
        """Return the inner policy's memory before the first decision, and the past use."""
        return QuotaMemory(self.policy.initial(), self.past_use)

    def decide(self, snapshot: Snapshot, memory: QuotaMemory[M]) -> tuple[Plan, QuotaMemory[M]]:
        """Return the inner policy's plan within the quotas."""
        quota = self.quota.scaled(len(snapshot.gpus))
        use = memory.use.advance(snapshot, quota)
        budgets = quota.budget_of_user
        time = memory.time.advance(snapshot, budgets) if budgets else memory.time
        blocked = blocked_jobs(snapshot, budgets, time)
        named = named_classes(snapshot)
        blocked.update(refused_jobs(snapshot, quota.class_by_name, named))
        pinned = self._pinned(snapshot)
        able = _without(snapshot, blocked.keys() - pinned)
        priority_of = job_priorities(able, quota, named)
        shares = team_shares(able, quota, use, pinned, priority_of)
        classes = class_shares(able, quota, priority_of, shares, pinned)
        notice = ReclaimNotice(quota.reclaim_notice_s)
        shrinks = self.sizes and not quota.reclaim_notice_s
        fixed = pinned if shrinks else snapshot.retained.keys()
        limits = QuotaLimits(quota, shares, blocked, classes, fixed)
        notices = notice.wanted(snapshot, quota, memory.notices, limits.of_team)
        leaving = {job for job, _ in notices}
        plan, inner, hidden = self._within(snapshot, memory.inner, limits, pinned, leaving)
        if quota.reclaim_notice_s:
            owing = hidden - blocked.keys()
            notices = notice.given(snapshot, quota, plan, notices, owing)
        plan = _without_early(snapshot, plan, quota)
        if blocked:
            hidden |= blocked.keys() - {grant.job for grant in plan.grants}.union(plan.ends)
        if budgets:
            plan = plan.reviewed_by(review_s(snapshot, budgets, time))
        hidden |= limits.shrunk.intersection(_fewer(snapshot, plan))
        if hidden:
            reasons = LazyReasons(hidden, _Why(snapshot, plan, limits).reason)
            plan = replace(plan, reasons=overlay(plan.reasons, reasons))
        plan = notice.with_kept(snapshot, plan, notice.kept(snapshot, notices))
        return plan, QuotaMemory(inner, use, time, notices)

    def _pinned(self, snapshot: Snapshot) -> set[JobId]:
        """Return the jobs that keep their GPUs: not preemptible, or within their quantum."""
        pinned = {job.id for job in snapshot.holding if not job.preemptible}
        if self.preempts:
            pinned.update(self.quantum.ends_s(snapshot))
        return pinned & snapshot.retained.keys()

    def _within(
        self,
        snapshot: Snapshot,
        memory: M,
        limits: QuotaLimits,
        pinned: Collection[JobId],
        leaving: Set[JobId] = frozenset(),
    ) -> tuple[Plan, M, set[JobId]]:
        """Ask the inner policy until its plan keeps the limits and leaves no GPU idle for them.

        Jobs that are `leaving` get GPUs only if those would be idle.
        """
        view = _QuotaView.of(snapshot, limits, shows_hidden=self.compares)
        lendings, shrinkings = LENDINGS, SHRINKINGS
        plan, after = self.policy.decide(view.without(()), memory)
        first, hidden = plan, {*limits.blocked, *leaving}.difference(pinned)
        always = frozenset(hidden)
        if hidden:
            plan, _ = self.policy.decide(view.without(hidden), memory)
        for _ in range(MOST_DECISIONS):
            surplus = limits.surplus(snapshot, plan, pinned, shrinks=shrinkings > 0)
            if surplus.jobs:
                if hidden == always:
                    hidden |= limits.behind(snapshot, first)
                hidden |= surplus.jobs
                hidden |= limits.full(snapshot, plan, surplus.jobs, pinned)
            if surplus.most_gpus:
                shrinkings -= 1
                limits.of_job.update(surplus.most_gpus)
            if not surplus:
                lent = limits.lend(snapshot, plan, hidden) if lendings else set()
                if not lent:
                    plan = _ended(snapshot, plan, first)
                    hidden.difference_update(plan.ends)
                    return _ranked(snapshot, plan, first, hidden), after, hidden
                lendings -= 1
                hidden -= lent
            plan, _ = self.policy.decide(view.without(hidden), memory)
        beyond = limits.surplus(snapshot, plan, pinned, shrinks=False).jobs
        grants = tuple(grant for grant in plan.grants if grant.job not in beyond)
        hidden = (hidden | beyond).difference(grant.job for grant in grants)
        plan = _ended(snapshot, replace(plan, grants=grants), first)
        hidden.difference_update(plan.ends)
        return _ranked(snapshot, plan, first, hidden), after, hidden


@dataclass(frozen=True, slots=True)
class _QuotaView:
    """The snapshot as the policy sees it: jobs that take at most the GPUs that the limits allow.

    `shows_hidden`: hidden jobs are shown as stopping, with their curves, instead of left out.
    """

    snapshot: Snapshot
    limits: QuotaLimits
    shows_hidden: bool
    elastic: tuple[Job, ...]
    _shown: dict[JobId, Job] = field(default_factory=dict)

    @classmethod
    def of(cls, snapshot: Snapshot, limits: QuotaLimits, *, shows_hidden: bool) -> _QuotaView:
        """Return the view of the snapshot within these limits."""
        jobs = chain(snapshot.holding, snapshot.queue)
        elastic = tuple([job for job in jobs if job.max_gpus > job.min_gpus])
        return cls(snapshot, limits, shows_hidden, elastic)

    def without(self, hidden: Collection[JobId]) -> Snapshot:
        """Return the snapshot without these jobs, which hold GPUs or wait."""
        shown = _without(self.snapshot, hidden, tuple(self._stopping(hidden)))
        return self.limits.resized(shown, self.elastic)

    def _stopping(self, hidden: Collection[JobId]) -> Iterator[Job]:
        if not self.shows_hidden:
            return
        for job in (*self.snapshot.holding, *self.snapshot.queue):
            if job.id in hidden:
                if job.id not in self._shown:
                    self._shown[job.id] = job.as_stopping(resumes=False)
                yield self._shown[job.id]


def _without(
    snapshot: Snapshot, hidden: Collection[JobId], stopping: tuple[Job, ...] = ()
) -> Snapshot:
    """Return the snapshot without these jobs, and with others that are stopping."""
    if not hidden:
        return snapshot
    retained = None
    if len(snapshot.retained) == len(snapshot.holding):  # none may keep what another one claims
        retained = {job: grant for job, grant in snapshot.retained.items() if job not in hidden}
    return Snapshot.prepared(
        snapshot.time_s,
        snapshot.gpus,
        holding=tuple([job for job in snapshot.holding if job.id not in hidden]),
        queue=tuple([job for job in snapshot.queue if job.id not in hidden]),
        others=(*snapshot.others, *stopping),
        retained=retained,
    )


def _ended(snapshot: Snapshot, plan: Plan, first: Plan) -> Plan:
    """Return the plan that ends the jobs that the first one ends, which has compared all jobs.

    A running job that must not be stopped is ended as the plan says.
    """
    if plan.ends == first.ends:
        return plan
    granted, of_all = {grant.job for grant in plan.grants}, set(first.ends)
    ends = [job for job in first.ends if job not in granted]
    others = (job for job in plan.ends if job not in of_all)
    ends += (job for job in others if not snapshot.index[job].preemptible)
    reasons = {job: first.reasons[job] for job in ends if job in first.reasons}
    return replace(
        plan,
        ends=tuple(ends),
        ranking=tuple(job for job in plan.ranking if job not in reasons),
        reasons=overlay(plan.reasons, reasons),
    )


def _ranked(snapshot: Snapshot, plan: Plan, first: Plan, hidden: Collection[JobId]) -> Plan:
    """Return the plan with the hidden waiting jobs last, in the order of the first plan."""
    if not hidden:
        return plan
    order = chain([grant.job for grant in first.grants], first.ranking)
    holding = {job.id for job in snapshot.holding}
    waiting = [job for job in order if job in hidden and job not in holding]
    return replace(plan, ranking=(*plan.ranking, *dict.fromkeys(waiting)))


def _without_early(snapshot: Snapshot, plan: Plan, quota: Quota) -> Plan:
    """Return the plan without starts that must wait until others have left their GPUs.

    A job that leaves its GPUs counts towards the limits of its team and its user until then.
    """
    if not quota.has_limits:
        return plan
    held = HeldGpus()
    for job in (*snapshot.holding, *snapshot.others):
        size = len(job.gpus_held or job.gpus_to_leave) * job.share_held
        held.add(quota.team_of(job.virtual_cluster).name, job.user, size)
    early: dict[JobId, Reason] = {}
    for grant in plan.grants:
        job = snapshot.index[grant.job]
        if job.holds_gpus:
            continue
        team = quota.team_of(job.virtual_cluster)
        of_user = quota.limit_of_user.get(job.user, inf)
        if held.fits(team.name, team.limit, job.user, of_user, amount_of(grant)):
            held.add(team.name, job.user, amount_of(grant))
        else:
            early[job.id] = EARLY
    if not early:
        return plan
    return replace(
        plan,
        grants=tuple(grant for grant in plan.grants if grant.job not in early),
        ranking=(*early, *plan.ranking),
        reasons=overlay(plan.reasons, early),
    )


@dataclass(frozen=True)
class _Why:
    """Why jobs are hidden: the limit that each exceeds, or the team that takes back its GPUs."""

    snapshot: Snapshot
    plan: Plan
    limits: QuotaLimits

    @cached_property
    def _takers(self) -> Mapping[int, JobId]:
        """The job that is granted each GPU."""
        return {gpu: grant.job for grant in self.plan.grants for gpu in grant.gpus}

    @cached_property
    def _granted(self) -> frozenset[JobId]:
        return frozenset(grant.job for grant in self.plan.grants)

    @cached_property
    def _of_users(self) -> Mapping[str, float]:
        """The GPUs that each user is granted."""
        return self.limits.granted(self.snapshot, self.plan).users

    @cached_property
    def _owed(self) -> Mapping[str, TeamQuota]:
        """The teams that hold less than their jobs may have of the guaranteed GPUs."""
        held, of_team = self.limits.quota.held_by_team(self.snapshot), self.limits.of_team
        return {
            team.name: team
            for team in self.limits.quota.everyone
            if held[team.name] < min(of_team.get(team.name, 0), team.guaranteed)
        }

    def reason(self, job_id: JobId) -> Reason:
        """Return the reason of a hidden job."""
        if job_id in self.limits.blocked:
            return self.limits.blocked[job_id]
        job = self.snapshot.index[job_id]
        team, of_user = self.limits.team(job), self.limits.of_user(job)
        share = self.limits.of_team.get(team.name, 0)
        terms = (Term("team_gpus", share), Term("guaranteed_gpus", team.guaranteed))
        now = f"{_name(team)} may hold {share:g} GPUs now, {team.guaranteed} of them its own"
        if self._of_users.get(job.user, 0) + job.min_gpus > of_user:
            text = f"user {job.user} may hold {of_user:g} GPUs at once"
            change = "a trial of the user leaving its GPUs, or a higher limit"
            return Reason(f"{self._verb(job)}: {text}", terms, would_change=change)
        takers = (self._takers[gpu] for gpu in job.gpus_held if gpu in self._takers)
        taker = next((taker for taker in takers if taker != job.id), None)
        if (above := self._higher(job, taker)) is not None:
            return replace(above, terms=terms)
        other = self._preemptor(team, taker) if job.holds_gpus else None
        if other is None:
            change = "a job of its team ending, or other teams leaving GPUs idle"
            return Reason(f"{self._verb(job)}: {now}", terms, would_change=change)
        verb = self._verb(job, "preempted")
        if other.name in self._owed:
            text = f"{verb} because {_name(other)} wants its guaranteed GPUs back"
            change = f"{_name(other)} leaving its guaranteed GPUs idle"
        else:
            text = f"{verb} because {_name(other)} now gets its share of the GPUs that are lent"
            change = f"{_name(other)} leaving GPUs idle"
        return Reason(f"{text}; {now}", terms, runner_up=taker, would_change=change)

    def _higher(self, job: Job, taker: JobId | None) -> Reason | None:
        """Return the reason if a higher class of its own team keeps the job from its GPUs."""
        accounts, priority_of = self.limits.classes.account_of, self.limits.classes.priority_of
        account, team = accounts.get(job.id), self.limits.team(job)
        if account is None:
            return None
        change = "jobs of a higher class of its team ending"
        if job.holds_gpus:
            index = self.snapshot.index
            if taker is None or self.limits.team(index[taker]) != team:
                return None
            if priority_of[taker] <= priority_of[job.id]:
                return None
            verb = self._verb(job, "preempted")
            text = f"{verb} because {taker} of {_name(team)} is of a higher class"
            return Reason(text, runner_up=taker, would_change=change)
        if self.limits.of_team[account] >= self.limits.of_team.get(team.name, 0):
            return None
        text = f"waits: trials of a higher class of {_name(team)} go first"
        return Reason(text, would_change=change)

    def _verb(self, job: Job, loses: str = "stops") -> str:
        """Say what becomes of the job: `loses` is said where it loses all GPUs."""
        if job.id in self._granted:
            return "has fewer GPUs"
        return loses if job.holds_gpus else "waits"

    def _preemptor(self, team: TeamQuota, taker: JobId | None) -> TeamQuota | None:
        """Return the team for which a job of `team` is stopped: the one that takes its GPUs.

        If they go to a team that is owed none, return the first team that is. None: no other team.
        """
        taking = None if taker is None else self.limits.team(self.snapshot.index[taker])
        if taking is not None and taking.name == team.name:
            taking = None
        if taking is not None and taking.name in self._owed:
            return taking
        return next((owing for owing in self._owed.values() if owing.name != team.name), taking)


def _fewer(snapshot: Snapshot, plan: Plan) -> set[JobId]:
    """Return the jobs that are granted fewer GPUs than they hold."""
    held = snapshot.held
    return {g.job for g in plan.grants if len(g.gpus) < len(held.get(g.job, ()))}


def _name(team: TeamQuota) -> str:
    return f"team {team.name}" if team.name else "the team of other users"
