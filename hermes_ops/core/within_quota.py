"""Any policy within the quotas of a pool's teams and users."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf
from typing import Generic, TypeVar

from hermes_ops.core.decayed_use import DecayedUse
from hermes_ops.core.guards import Quantum
from hermes_ops.core.model import (
    SHARE_EPS,
    Grant,
    Job,
    JobId,
    LazyReasons,
    Phase,
    Plan,
    Policy,
    Reason,
    Snapshot,
    Term,
    overlay,
)
from hermes_ops.core.quota import Quota, TeamQuota
from hermes_ops.core.team_shares import team_shares

M = TypeVar("M")

AHEAD = 2
"""How many times a team's share the first jobs of its policy's order need, to hide the others."""

LENDINGS = 3
"""How often a decision lends GPUs that the plan leaves idle; each time the policy decides anew."""

SHRINKINGS = 3
"""How often a decision gives jobs with a range fewer GPUs, before it hides those beyond a limit."""

MOST_DECISIONS = 40
"""How often a decision asks the policy at most; jobs beyond a limit start nothing after that."""

_EARLY = Reason(
    "waits until a job of its team or user has left its GPUs",
    would_change="that job leaving its GPUs",
)


@dataclass(frozen=True, slots=True)
class QuotaMemory(Generic[M]):
    """The inner policy's memory, and what each team has used."""

    inner: M
    use: DecayedUse


@dataclass(frozen=True, slots=True)
class WithinQuota(Generic[M]):
    """Any policy, but each team's guaranteed GPUs are its own, and limits are kept.

    GPUs that a team leaves idle are lent to others; when it wants them back, borrowed jobs are
    stopped. Which jobs of a team train is the inner policy's choice: it decides as if there were
    no quota, jobs beyond their team's share or their user's limit are hidden from it, those that
    hold GPUs last, and it decides again. With a job beyond a limit go the waiting ones that would
    be beyond it as well, and those far behind others of their team (`AHEAD`), so that a few
    decisions about fewer jobs suffice. GPUs that are still idle then are lent beyond the shares.
    What it remembers, and whom it ends, is that of its first decision, which sees every job.

    Put it outside of the guards. Jobs within their quantum keep their GPUs (`quantum`), so a team
    waits for a guaranteed GPU no longer than the longest quantum and the switch after it, if the
    policy itself leaves no GPU idle that a job of the team could take. With one team and no limits
    the plan is the inner policy's.

    The scheme is that of Kueue's cohorts (nominal quota, borrowing, reclaim by preemption) with
    Slurm's decayed use among borrowers. A job that takes several numbers of GPUs takes none beyond
    its team's share and its user's limit, nor more than other jobs leave of them.
    """

    policy: Policy[M]
    quota: Quota
    quantum: Quantum = field(default_factory=Quantum)
    past_use: DecayedUse = field(default_factory=DecayedUse)

    @property
    def name(self) -> str:
        """The inner policy's name."""
        return self.policy.name

    @property
    def preempts(self) -> bool:
        """True with teams, which reclaim what they have lent."""
        return self.policy.preempts or bool(self.quota.teams)

    def initial(self) -> QuotaMemory[M]:
        """Return the inner policy's memory before the first decision, and the past use."""
        return QuotaMemory(self.policy.initial(), self.past_use)

    def decide(self, snapshot: Snapshot, memory: QuotaMemory[M]) -> tuple[Plan, QuotaMemory[M]]:
        """Return the inner policy's plan within the quotas."""
        quota = self.quota.scaled(len(snapshot.gpus))
        use = memory.use.advance(snapshot, quota)
        pinned = self._pinned(snapshot)
        shares = team_shares(snapshot, quota, use, pinned)
        limits = _Limits(quota, shares)
        plan, inner, hidden = self._within(snapshot, memory.inner, limits, pinned)
        plan = _without_early(snapshot, plan, quota)
        if hidden:
            reasons = _Why(snapshot, plan, limits).reasons(hidden)
            plan = replace(plan, reasons=overlay(plan.reasons, reasons))
        return plan, QuotaMemory(inner, use)

    def _pinned(self, snapshot: Snapshot) -> set[JobId]:
        """Return the jobs that keep their GPUs: not preemptible, or within their quantum."""
        pinned = {job.id for job in snapshot.holding if not job.preemptible}
        if self.preempts:
            pinned.update(self.quantum.ends_s(snapshot))
        return pinned & snapshot.retained.keys()

    def _within(
        self, snapshot: Snapshot, memory: M, limits: _Limits, pinned: Collection[JobId]
    ) -> tuple[Plan, M, set[JobId]]:
        """Ask the inner policy until its plan keeps the limits and leaves no GPU idle for them."""
        hidden: set[JobId] = set()
        lendings, shrinkings, seen = LENDINGS, SHRINKINGS, limits.resized(snapshot)
        plan, after = self.policy.decide(seen, memory)
        first = plan
        for _ in range(MOST_DECISIONS):
            surplus = limits.surplus(snapshot, plan, pinned, shrinks=shrinkings > 0)
            if surplus.jobs:
                hidden |= set() if hidden else limits.behind(snapshot, first)
                hidden |= surplus.jobs | limits.full(seen, plan, surplus.jobs, pinned)
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
            seen = limits.resized(_without(snapshot, hidden))
            plan, _ = self.policy.decide(seen, memory)
        beyond = limits.surplus(snapshot, plan, pinned, shrinks=False).jobs
        grants = tuple(grant for grant in plan.grants if grant.job not in beyond)
        hidden = (hidden | beyond).difference(grant.job for grant in grants)
        plan = _ended(snapshot, replace(plan, grants=grants), first)
        hidden.difference_update(plan.ends)
        return _ranked(snapshot, plan, first, hidden), after, hidden


def _without(snapshot: Snapshot, hidden: Collection[JobId]) -> Snapshot:
    """Return the snapshot without these jobs, which hold GPUs or wait."""
    if not hidden:
        return snapshot
    retained = None
    if len(snapshot.retained) == len(snapshot.holding):  # no job may keep what another one claims
        retained = {job: grant for job, grant in snapshot.retained.items() if job not in hidden}
    return Snapshot.prepared(
        snapshot.time_s,
        snapshot.gpus,
        holding=tuple(job for job in snapshot.holding if job.id not in hidden),
        queue=tuple(job for job in snapshot.queue if job.id not in hidden),
        others=snapshot.others,
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
    order = (*(grant.job for grant in first.grants), *first.ranking)
    waiting = (job for job in order if job in hidden and not snapshot.index[job].holds_gpus)
    return replace(plan, ranking=(*plan.ranking, *dict.fromkeys(waiting)))


@dataclass(frozen=True, slots=True)
class _Surplus:
    """Granted jobs beyond a limit: those to hide, and those that may have fewer GPUs."""

    jobs: set[JobId]
    most_gpus: dict[JobId, int]

    def __bool__(self) -> bool:
        return bool(self.jobs or self.most_gpus)


class _Limits:
    """The GPUs that teams and users may hold; those of teams grow as idle GPUs are lent."""

    def __init__(self, quota: Quota, shares: Mapping[str, int]) -> None:
        self.quota = quota
        self.of_team: dict[str, float] = dict(shares)
        self.of_job: dict[JobId, int] = {}  # the GPUs of jobs that would take too many

    def team(self, job: Job) -> TeamQuota:
        """Return the job's team."""
        return self.quota.team_of(job.virtual_cluster)

    def of_user(self, job: Job) -> float:
        """Return the GPUs that its user may hold."""
        return self.quota.limit_of_user.get(job.user, inf)

    def resized(self, snapshot: Snapshot) -> Snapshot:
        """Return the snapshot in which no job takes more GPUs than its team and its user may hold.

        A job that holds more already is left as it is: it is stopped, and starts again on fewer.
        """
        smaller = {
            job.id: less
            for job in (*snapshot.holding, *snapshot.queue)
            if job.max_gpus > job.min_gpus
            and (less := self._smaller(job, len(snapshot.gpus))) is not job
        }
        if not smaller:
            return snapshot
        return Snapshot.prepared(
            snapshot.time_s,
            snapshot.gpus,
            holding=tuple(smaller.get(job.id, job) for job in snapshot.holding),
            queue=tuple(smaller.get(job.id, job) for job in snapshot.queue),
            others=snapshot.others,
            retained=snapshot.retained,
        )

    def _smaller(self, job: Job, gpus: int) -> Job:
        limits = (self.of_team.get(self.team(job).name, 0), self.of_user(job))
        most = int(min(*limits, self.of_job.get(job.id, inf)))
        if not max(job.min_gpus, len(job.gpus_held)) <= most < min(job.max_gpus, gpus):
            return job
        sizes = tuple(job.sizes_up_to(most)) if job.sizes else ()
        if job.sizes and not sizes:
            return job
        return replace(job, max_gpus=max(sizes, default=most), sizes=sizes)

    def surplus(
        self, snapshot: Snapshot, plan: Plan, pinned: Collection[JobId], *, shrinks: bool
    ) -> _Surplus:
        """Return the granted jobs beyond a limit; pinned jobs count first and are never among them.

        Jobs that keep their GPUs count before those that start, each in the order of the plan. With
        `shrinks`, a job that may take fewer GPUs, and does not hold more, gets what is left.
        """
        held = _Held()
        surplus = _Surplus(set(), {})
        for job, grant in _by_claim(snapshot, plan, pinned):
            team, of_user = self.team(job).name, self.of_user(job)
            of_team = self.of_team.get(team, 0)
            if held.fits(team, of_team, job.user, of_user, grant) or job.id in pinned:
                held.add(team, job.user, _amount(grant))
                continue
            left = min(of_team - held.teams[team], of_user - held.users[job.user])
            sizes = job.sizes_up_to(int(left)) if shrinks and job.max_gpus > job.min_gpus else ()
            if sizes and sizes[-1] >= len(job.gpus_held):
                surplus.most_gpus[job.id] = sizes[-1]
                held.add(team, job.user, sizes[-1])
            else:
                surplus.jobs.add(job.id)
        return surplus

    def behind(self, snapshot: Snapshot, first: Plan) -> set[JobId]:
        """Return the waiting jobs far behind others of their team in the order of the first plan.

        That order is the grants, then the ranking. Before them are jobs that need `AHEAD` times
        their team's share, each within its user's limit. None of a team with fewer.
        """
        ahead, counted = set[JobId](), _Held()
        of_team = {name: AHEAD * share for name, share in self.of_team.items()}
        for job_id in (*(grant.job for grant in first.grants), *first.ranking):
            job = snapshot.index[job_id]
            team = self.team(job).name
            has_room = counted.users[job.user] + job.min_gpus <= self.of_user(job)
            if has_room and counted.teams[team] < of_team.get(team, 0):
                counted.add(team, job.user, job.min_gpus)
                ahead.add(job_id)
        enough = {name for name, most in of_team.items() if counted.teams[name] >= most}
        return {
            job.id
            for job in snapshot.queue
            if job.id not in ahead and self.team(job).name in enough
        }

    def full(
        self,
        seen: Snapshot,
        plan: Plan,
        surplus: Collection[JobId],
        pinned: Collection[JobId],
    ) -> set[JobId]:
        """Return the jobs not granted that have no room under the limits that `surplus` is beyond.

        Pinned jobs are never among them.
        """
        held, teams, users = _Held(), set[str](), set[str]()
        for grant in plan.grants:
            job = seen.index[grant.job]
            if grant.job in surplus:
                teams.add(self.team(job).name)
                users.add(job.user)
            else:
                held.add(self.team(job).name, job.user, _amount(grant))
        limits, is_shared = self.quota.limit_of_user, any(grant.share < 1 for grant in plan.grants)
        rooms = {team: self.of_team.get(team, 0) - held.teams[team] for team in teams}
        user_rooms = {user: limits[user] - held.users[user] for user in users if user in limits}
        full: set[JobId] = set()
        of_cluster: dict[str, float] = {}
        for job in (*seen.holding, *seen.queue):
            room = of_cluster.get(job.virtual_cluster)
            if room is None:
                room = of_cluster[job.virtual_cluster] = rooms.get(self.team(job).name, inf)
            if job.user in user_rooms:
                room = min(room, user_rooms[job.user])
            if (SHARE_EPS if is_shared else job.min_gpus) > room:
                full.add(job.id)
        return full.difference((grant.job for grant in plan.grants), pinned)

    def lend(self, snapshot: Snapshot, plan: Plan, hidden: Collection[JobId]) -> set[JobId]:
        """Lend GPUs that the plan leaves idle and no team keeps for a gang; return the borrowers.

        The hidden jobs are asked in their order, those that hold GPUs first.
        """
        idle = len(snapshot.gpus) - len({gpu for grant in plan.grants for gpu in grant.gpus})
        if not hidden or idle <= 0:
            return set()
        held = _Held()
        for grant in plan.grants:
            job = snapshot.index[grant.job]
            held.add(self.team(job).name, job.user, _amount(grant))
        idle -= self._kept(snapshot, plan, hidden, held, idle)
        lent: set[JobId] = set()
        for job in (*snapshot.holding, *snapshot.queue):
            if job.id not in hidden or idle <= 0:
                continue
            team, size = self.team(job), len(snapshot.held.get(job.id, ())) or job.min_gpus
            wanted = Grant(job.id, tuple(range(size)))
            within = held.fits(team.name, team.limit, job.user, self.of_user(job), wanted)
            if size <= idle and within:
                idle -= size
                held.add(team.name, job.user, size)
                self.of_team[team.name] = max(self.of_team[team.name], held.teams[team.name])
                lent.add(job.id)
        return lent

    def _kept(
        self, snapshot: Snapshot, plan: Plan, hidden: Collection[JobId], held: _Held, idle: int
    ) -> int:
        """Return the idle GPUs kept for teams with a gang that fits into their share, and not yet
        into the idle GPUs."""
        granted = {grant.job for grant in plan.grants}
        kept: dict[str, int] = {}
        for job in snapshot.queue:
            team = self.team(job).name
            left = int(self.of_team.get(team, 0) - held.teams[team])
            waits = job.id not in granted and job.id not in hidden
            if waits and idle < job.min_gpus <= left:
                kept[team] = left
        return min(idle, sum(kept.values()))


class _Held:
    """The GPUs that each team and each user holds; parts of a GPU where policies share it."""

    def __init__(self) -> None:
        self.teams: dict[str, float] = defaultdict(float)
        self.users: dict[str, float] = defaultdict(float)

    def fits(self, team: str, most: float, user: str, of_user: float, grant: Grant) -> bool:
        """Return whether the grant keeps both limits."""
        amount = _amount(grant) - SHARE_EPS
        return self.teams[team] + amount <= most and self.users[user] + amount <= of_user

    def add(self, team: str, user: str, amount: float) -> None:
        """Count GPUs."""
        self.teams[team] += amount
        self.users[user] += amount


def _amount(grant: Grant) -> float:
    return len(grant.gpus) * grant.share


def _by_claim(
    snapshot: Snapshot, plan: Plan, pinned: Collection[JobId]
) -> Iterator[tuple[Job, Grant]]:
    """Yield the granted jobs: pinned ones, then those that keep their GPUs, then the others."""
    order = sorted(
        plan.grants,
        key=lambda grant: (
            grant.job not in pinned,
            snapshot.held.get(grant.job) != grant.gpus,
        ),
    )
    return ((snapshot.index[grant.job], grant) for grant in order)


def _without_early(snapshot: Snapshot, plan: Plan, quota: Quota) -> Plan:
    """Return the plan without starts that must wait until others have left their GPUs.

    A job that leaves its GPUs counts towards the limits of its team and its user until then.
    """
    if not quota.has_limits:
        return plan
    held = _Held()
    for job in (*snapshot.holding, *snapshot.others):
        size = len(job.gpus_held) * job.share_held
        if job.phase is Phase.STOPPING:
            size = size or job.requested_gpus or job.min_gpus
        held.add(quota.team_of(job.virtual_cluster).name, job.user, size)
    early: dict[JobId, Reason] = {}
    for grant in plan.grants:
        job = snapshot.index[grant.job]
        if job.holds_gpus:
            continue
        team = quota.team_of(job.virtual_cluster)
        of_user = quota.limit_of_user.get(job.user, inf)
        if held.fits(team.name, team.limit, job.user, of_user, grant):
            held.add(team.name, job.user, _amount(grant))
        else:
            early[job.id] = _EARLY
    if not early:
        return plan
    return replace(
        plan,
        grants=tuple(grant for grant in plan.grants if grant.job not in early),
        ranking=(*early, *plan.ranking),
        reasons=overlay(plan.reasons, early),
    )


@dataclass(frozen=True, slots=True)
class _Why:
    """Why jobs are hidden: the limit that each is beyond, and who takes what it has borrowed."""

    snapshot: Snapshot
    plan: Plan
    limits: _Limits

    def reasons(self, hidden: Collection[JobId]) -> Mapping[JobId, Reason]:
        """Return the reasons of the hidden jobs, each made on demand."""
        takers = {gpu: grant.job for grant in self.plan.grants for gpu in grant.gpus}
        owed, held = self._owed_teams(), _Held()
        for grant in self.plan.grants:
            job = self.snapshot.index[grant.job]
            held.add(self.limits.team(job).name, job.user, _amount(grant))
        explain = partial(self._reason, takers=takers, owed=owed, of_users=held.users)
        return LazyReasons(dict.fromkeys(hidden), explain)

    def _reason(
        self,
        job_id: JobId,
        *,
        takers: Mapping[int, JobId],
        owed: Sequence[TeamQuota],
        of_users: Mapping[str, float],
    ) -> Reason:
        job = self.snapshot.index[job_id]
        team, of_user = self.limits.team(job), self.limits.of_user(job)
        share = self.limits.of_team.get(team.name, 0)
        terms = (Term("team_gpus", share), Term("guaranteed_gpus", team.guaranteed))
        now = f"{_name(team)} may hold {share:g} GPUs now, {team.guaranteed} of them its own"
        if of_users.get(job.user, 0) + job.min_gpus > of_user:
            text = f"user {job.user} may hold {of_user:g} GPUs at once"
            change = "a trial of the user leaving its GPUs, or a higher limit"
            return Reason(f"{_verb(job)}: {text}", terms, would_change=change)
        taker = next((takers[gpu] for gpu in job.gpus_held if gpu in takers), None)
        other = self._preemptor(team, taker, owed) if job.holds_gpus else None
        if other is None:
            change = "a job of its team ending, or other teams leaving GPUs idle"
            return Reason(f"{_verb(job)}: {now}", terms, would_change=change)
        if other in owed:
            text = f"preempted because {_name(other)} wants its guaranteed GPUs back"
            change = f"{_name(other)} leaving its guaranteed GPUs idle"
        else:
            text = f"preempted because {_name(other)} now gets its share of the GPUs that are lent"
            change = f"{_name(other)} leaving GPUs idle"
        return Reason(f"{text}; {now}", terms, runner_up=taker, would_change=change)

    def _preemptor(
        self, team: TeamQuota, taker: JobId | None, owed: Sequence[TeamQuota]
    ) -> TeamQuota | None:
        """Return the team for which a job of `team` is stopped: the one that takes its GPUs.

        Where those go to a team that is not owed any, the first that is; None: no other team.
        """
        taking = None if taker is None else self.limits.team(self.snapshot.index[taker])
        reclaiming = [other for other in owed if other.name != team.name]
        if taking in reclaiming or not reclaiming:
            return None if taking is None or taking.name == team.name else taking
        return reclaiming[0]

    def _owed_teams(self) -> list[TeamQuota]:
        """Return the teams that hold less than their jobs may have of the guaranteed GPUs."""
        held: dict[str, int] = defaultdict(int)
        for job in self.snapshot.holding:
            held[self.limits.team(job).name] += len(job.gpus_held)
        of_team = self.limits.of_team
        return [
            team
            for team in self.limits.quota.everyone
            if held[team.name] < min(of_team.get(team.name, 0), team.guaranteed)
        ]


def _verb(job: Job) -> str:
    return "stops" if job.holds_gpus else "waits"


def _name(team: TeamQuota) -> str:
    return f"team {team.name}" if team.name else "the team of other users"
