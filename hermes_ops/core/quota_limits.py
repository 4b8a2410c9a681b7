"""The GPUs that teams and users may hold, and which jobs of a plan are beyond that."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, compress, groupby
from math import inf

from hermes_ops.core.model import SHARE_EPS, Grant, Job, JobId, Plan, Reason, Snapshot
from hermes_ops.core.quota import Quota, TeamQuota
from hermes_ops.core.team_shares import NO_CLASSES, Account, ClassShares

_NONE: Mapping[JobId, Reason] = {}

AHEAD = 2
"""How many times a team's share the first jobs of its policy's order need, to hide the others."""

MANY_TEAMS = 20
"""With more teams than that, jobs of all full ones are hidden at once."""


@dataclass(frozen=True, slots=True)
class QuotaSurplus:
    """Granted jobs beyond a limit: those to hide, and those that may have fewer GPUs."""

    jobs: set[JobId]
    most_gpus: dict[JobId, int]

    def __bool__(self) -> bool:
        return bool(self.jobs or self.most_gpus)


class _TeamNames(dict[str, str]):
    """The name of the team of each virtual cluster, looked up once."""

    def __init__(self, quota: Quota) -> None:
        super().__init__()
        self._quota = quota

    def __missing__(self, virtual_cluster: str) -> str:
        name = self[virtual_cluster] = self._quota.team_of(virtual_cluster).name
        return name


class QuotaLimits:
    """The GPUs that teams and users may hold; those of teams grow as idle GPUs are lent.

    In a team with jobs of several priorities the jobs of each have a limit (`Account`) as well.
    """

    def __init__(
        self,
        quota: Quota,
        shares: Mapping[str, int],
        blocked: Mapping[JobId, Reason] = _NONE,
        classes: ClassShares = NO_CLASSES,
        fixed: Collection[JobId] = (),
    ) -> None:
        self.quota, self.blocked = quota, blocked  # blocked jobs may hold nothing now
        self.fixed = fixed  # jobs that never get fewer GPUs than they hold: they are stopped
        self.shrunk: set[JobId] = set()  # jobs shown with a part of the GPUs that they hold
        self.classes = classes
        self.of_team: dict[Account, float] = dict(classes.most_gpus)
        self.of_team.update(shares)
        self.of_job: dict[JobId, int] = {}  # the GPUs of jobs that would take too many
        self._names = _TeamNames(quota)

    def team(self, job: Job) -> TeamQuota:
        """Return the job's team."""
        return self.quota.team_of(job.virtual_cluster)

    def account(self, job: Job) -> Account:
        """Return what the job's GPUs count for."""
        accounts = self.classes.account_of
        account = accounts.get(job.id) if accounts else None
        return self._names[job.virtual_cluster] if account is None else account

    def of_user(self, job: Job) -> float:
        """Return the GPUs that its user may hold, as far as this job is concerned."""
        return 0 if job.id in self.blocked else self.quota.limit_of_user.get(job.user, inf)

    def granted(self, snapshot: Snapshot, plan: Plan) -> HeldGpus:
        """Return the GPUs that teams and users are granted."""
        held, jobs = HeldGpus(), snapshot.index
        for grant in plan.grants:
            job = jobs[grant.job]
            team = self._names[job.virtual_cluster]
            held.add(team, job.user, amount_of(grant), self.account(job))
        return held

    def resized(self, snapshot: Snapshot, elastic: Iterable[Job]) -> Snapshot:
        """Return the snapshot in which no job takes more GPUs than its team and its user may hold.

        `elastic` are at least those of its jobs that take several numbers. One that holds more
        already is shown with the part of its GPUs that it may keep; their rest is free.
        """
        smaller = {
            job.id: less for job in elastic if (less := self._smaller(job, snapshot)) is not job
        }
        if not smaller:
            return snapshot
        retained = dict(snapshot.retained)
        for job, grant in snapshot.retained.items():
            if job in smaller and len(kept := smaller[job].gpus_held) < len(grant.gpus):
                retained[job] = replace(grant, gpus=kept)
                self.shrunk.add(job)
        return Snapshot.prepared(
            snapshot.time_s,
            snapshot.gpus,
            holding=tuple(smaller.get(job.id, job) for job in snapshot.holding),
            queue=tuple(smaller.get(job.id, job) for job in snapshot.queue),
            others=snapshot.others,
            retained=retained,
        )

    def _smaller(self, job: Job, snapshot: Snapshot) -> Job:
        limits = (self.of_team.get(self.account(job), 0), self.of_user(job))
        most = int(min(*limits, self.of_job.get(job.id, inf)))
        least = max(job.min_gpus, len(job.gpus_held)) if job.id in self.fixed else job.min_gpus
        if not least <= most < min(job.max_gpus, len(snapshot.gpus)):
            return job
        sizes = tuple(job.sizes_up_to(most)) if job.sizes else ()
        if job.sizes and not sizes:
            return job
        most = max(sizes, default=most)
        held = snapshot.held.get(job.id, ())
        kept = tuple(sorted(_packed(snapshot, held)[:most])) if len(held) > most else job.gpus_held
        return replace(job, max_gpus=most, sizes=sizes, gpus_held=kept)

    def surplus(
        self, snapshot: Snapshot, plan: Plan, pinned: Collection[JobId], *, shrinks: bool
    ) -> QuotaSurplus:
        """Return the granted jobs beyond a limit; pinned jobs count first and are never among them.

        Jobs that keep their GPUs count before those that start, each in the order of the plan. With
        `shrinks`, a job that may take fewer GPUs, of a `fixed` one not fewer than it holds, gets
        what is left. Those that run get their least number first: none is stopped for another.
        """
        held, surplus = HeldGpus(), QuotaSurplus(set(), {})
        grants, priority_of = self._in_question(snapshot, plan), self.classes.priority_of
        claims = _by_claim(snapshot, grants, pinned, priority_of)
        for _, group in groupby(claims, lambda c: (c[0].id in pinned, priority_of.get(c[0].id))):
            alike = tuple(group)
            least = self._least(snapshot, alike, held) if shrinks else {}
            for job, grant in alike:
                amount, has = amount_of(grant), least.get(job.id, 0)
                left = has + self._left(job, held)
                if amount > max(has, left + SHARE_EPS) and job.id not in pinned:
                    sizes = job.sizes_up_to(int(left)) if shrinks else ()
                    floor = len(job.gpus_held) if job.id in self.fixed else 1
                    if job.max_gpus == job.min_gpus or not sizes or sizes[-1] < floor:
                        surplus.jobs.add(job.id)
                        continue
                    amount = surplus.most_gpus[job.id] = sizes[-1]
                self._hold(held, job, amount - has)
        return surplus

    def _least(
        self, snapshot: Snapshot, claims: Iterable[tuple[Job, Grant]], held: HeldGpus
    ) -> dict[JobId, float]:
        """Count the least GPUs of jobs that run and may shrink, and all of those that keep theirs.

        Return them for each job for which the limits leave as many.
        """
        least: dict[JobId, float] = {}
        for job, grant in claims:
            amount = amount_of(grant)
            if job.holds_gpus and job.id not in self.fixed:
                amount = min(amount, job.sizes_up_to(len(grant.gpus))[0])
            elif snapshot.held.get(job.id) != grant.gpus:
                continue
            if amount <= self._left(job, held) + SHARE_EPS:
                least[job.id] = amount
                self._hold(held, job, amount)
        return least

    def _hold(self, held: HeldGpus, job: Job, amount: float) -> None:
        held.add(self._names[job.virtual_cluster], job.user, amount, self.account(job))

    def _left(self, job: Job, held: HeldGpus) -> float:
        """Return how many GPUs the limits of the job leave."""
        team, account = self._names[job.virtual_cluster], self.account(job)
        left = min(
            self.of_team.get(team, 0) - held.teams[team],
            self.of_user(job) - held.users[job.user],
        )
        return left if account is team else min(left, self.of_team[account] - held.teams[account])

    def _in_question(self, snapshot: Snapshot, plan: Plan) -> Sequence[Grant]:
        """Return the grants among which a job may be beyond a limit, in their order.

        Without limits of users those are the grants of teams that hold too much.
        """
        if self.blocked or self.quota.limit_of_user or self.classes.account_of:
            return plan.grants
        jobs, names, held = snapshot.index, self._names, defaultdict[str, float](float)
        teams = [names[jobs[grant.job].virtual_cluster] for grant in plan.grants]
        for team, grant in zip(teams, plan.grants, strict=True):
            held[team] += len(grant.gpus) * grant.share
        over = {team for team, amount in held.items() if amount > self.of_team.get(team, 0)}
        return list(compress(plan.grants, map(over.__contains__, teams))) if over else ()

    def _waiting(self, snapshot: Snapshot, accounts: Collection[Account]) -> Iterator[Job]:
        """Return the waiting jobs whose GPUs count for these accounts."""
        teams = set(map(_team_of, accounts))
        queues = (queue for name, queue in snapshot.queue_of.items() if self._names[name] in teams)
        jobs = chain.from_iterable(queues)
        if not self.classes.account_of:
            return jobs
        return (job for job in jobs if self.account(job) in accounts)

    def behind(self, snapshot: Snapshot, first: Plan) -> set[JobId]:
        """Return the waiting jobs far behind others of their team in the order of the first plan.

        That order is the grants, then the ranking. Before them are jobs that need `AHEAD` times
        their team's share, each within its user's limit. None of a team with fewer.
        """
        ahead, counted = set[JobId](), HeldGpus()
        of_team = {name: AHEAD * share for name, share in self.of_team.items()}
        of_teams, of_users, jobs = counted.teams, counted.users, snapshot.index
        for job_id in chain([grant.job for grant in first.grants], first.ranking):
            job = jobs[job_id]
            team = self.account(job)
            if of_teams[team] >= of_team.get(team, 0):
                continue
            if of_users[job.user] + job.min_gpus <= self.of_user(job):
                counted.add(team, job.user, job.min_gpus)
                ahead.add(job_id)
        enough = {name for name, most in of_team.items() if of_teams[name] >= most}
        return {job.id for job in self._waiting(snapshot, enough)} - ahead

    def full(
        self,
        snapshot: Snapshot,
        plan: Plan,
        surplus: Collection[JobId],
        pinned: Collection[JobId],
    ) -> set[JobId]:
        """Return the jobs not granted that have no room under limits of teams and users.

        The limits are those of the teams that `surplus` is beyond, of more than `MANY_TEAMS` those
        of all, and those of all users: with one team or user in each decision, WithinQuota would
        run out of decisions before it has a plan. Pinned jobs are never among them.
        """
        held, teams = HeldGpus(), set[str]()
        for grant in plan.grants:
            job = snapshot.index[grant.job]
            team = self._names[job.virtual_cluster]
            if grant.job in surplus:
                teams.add(team)
            else:
                held.add(team, job.user, amount_of(grant), self.account(job))
        is_shared = any(grant.share < 1 for grant in plan.grants)

        def lacks(job: Job, room: float) -> bool:
            return (SHARE_EPS if is_shared else job.min_gpus) > room

        full = set(self.blocked)
        holding = defaultdict[Account, list[Job]](list)
        for job in snapshot.holding:
            holding[self.account(job)].append(job)
        are_many = len(self.of_team) > MANY_TEAMS
        for account in [key for key in self.of_team if are_many or _team_of(key) in teams]:
            room = self._room(account, held)
            jobs = chain(holding[account], self._waiting(snapshot, (account,)))
            full |= {job.id for job in jobs if lacks(job, room)}
        limits = self.quota.limit_of_user
        if limits:
            left = {user: most - held.users[user] for user, most in limits.items()}
            jobs = chain(snapshot.holding, snapshot.queue)
            full |= {job.id for job in jobs if lacks(job, left.get(job.user, inf))}
        full.difference_update((grant.job for grant in plan.grants), pinned)
        return full

    def _room(self, account: Account, held: HeldGpus) -> float:
        """Return what is left under the limit of the account.

        It is 0 only if the whole team has nothing left: a gang may need more than what the team has
        left, and get it from jobs of lower priorities.
        """
        team = _team_of(account)
        if self.of_team.get(team, 0) <= held.teams[team]:
            return 0
        return self.of_team[account] - held.teams[account]

    def lend(self, snapshot: Snapshot, plan: Plan, hidden: Collection[JobId]) -> set[JobId]:
        """Lend GPUs that the plan leaves idle and no team keeps for a gang; return the borrowers.

        The hidden jobs are asked in their order, those that hold GPUs first.
        """
        idle = len(snapshot.gpus) - len({gpu for grant in plan.grants for gpu in grant.gpus})
        if not hidden or idle <= 0:
            return set()
        held = self.granted(snapshot, plan)
        idle -= self._kept(snapshot, plan, hidden, held, idle)
        lent: set[JobId] = set()
        for job, most in self._borrowers(snapshot, hidden):
            if idle <= 0:
                break
            size = len(snapshot.held.get(job.id, ())) or job.min_gpus
            if size > idle or job.id in lent:
                continue
            team = self.team(job)
            if held.fits(team.name, most, job.user, self.of_user(job), size):
                idle -= size
                account = self.account(job)
                held.add(team.name, job.user, size, account)
                for key in (team.name, account):
                    self.of_team[key] = max(self.of_team[key], held.teams[key])
                lent.add(job.id)
        return lent

    def _borrowers(
        self, snapshot: Snapshot, hidden: Collection[JobId]
    ) -> Iterator[tuple[Job, float]]:
        """Yield the hidden jobs in the order in which idle GPUs are lent, each with a limit.

        The limit is that of its team. Where jobs have several priorities, all of them are yielded
        before that once more, by priority and with their team's share as the limit.
        """
        jobs: Iterable[Job] = chain(snapshot.holding, snapshot.queue)
        jobs = (job for job in jobs if job.id in hidden)
        if self.classes.account_of:
            jobs = self.classes.by_priority(jobs)
            yield from (
                (job, self.of_team.get(self._names[job.virtual_cluster], 0)) for job in jobs
            )
        yield from ((job, self.team(job).limit) for job in jobs)

    def _kept(
        self, snapshot: Snapshot, plan: Plan, hidden: Collection[JobId], held: HeldGpus, idle: int
    ) -> int:
        """Return the idle GPUs kept for teams with a gang that fits into their share, and not yet
        into the idle GPUs."""
        granted = {grant.job for grant in plan.grants}
        kept: dict[Account, int] = {}
        roomy = [key for key, most in self.of_team.items() if most - held.teams[key] > idle]
        for job in self._waiting(snapshot, roomy):
            account = self.account(job)
            left = int(self.of_team[account] - held.teams[account])
            waits = job.id not in granted and job.id not in hidden
            if waits and idle < job.min_gpus <= left:
                kept[account] = left
        return min(idle, sum(kept.values()))


class HeldGpus:
    """The GPUs that each team and each user holds; parts of a GPU where policies share it."""

    def __init__(self) -> None:
        self.teams: dict[Account, float] = defaultdict(float)
        self.users: dict[str, float] = defaultdict(float)

    def fits(self, team: Account, most: float, user: str, of_user: float, amount: float) -> bool:
        """Return whether both limits allow `amount` more GPUs."""
        amount -= SHARE_EPS
        return self.teams[team] + amount <= most and self.users[user] + amount <= of_user

    def add(self, team: Account, user: str, amount: float, account: Account | None = None) -> None:
        """Count GPUs of a team and a user; for the account as well, if that is not the team."""
        self.teams[team] += amount
        self.users[user] += amount
        if account is not None and account != team:
            self.teams[account] += amount


def amount_of(grant: Grant) -> float:
    """Return the GPUs of a grant, as parts where policies share them."""
    return len(grant.gpus) * grant.share


def _packed(snapshot: Snapshot, gpus: Sequence[int]) -> list[int]:
    """Return the GPUs, those of the node with the most of them first."""
    nodes = [snapshot.node_of[gpu] for gpu in gpus]
    return sorted(gpus, key=lambda gpu: (-nodes.count(snapshot.node_of[gpu]), gpu))


def _team_of(account: Account) -> str:
    return account if isinstance(account, str) else account[0]


def _by_claim(
    snapshot: Snapshot,
    grants: Iterable[Grant],
    pinned: Collection[JobId],
    priority_of: Mapping[JobId, int],
) -> Iterator[tuple[Job, Grant]]:
    """Yield the granted jobs: pinned ones, then those that keep their GPUs, then the others.

    With priorities, those of a higher one come before both that keep their GPUs and that do not.
    """
    held, jobs = snapshot.held, snapshot.index
    lines: tuple[list[Grant], ...] = ([], [], [], [])
    for grant in grants:
        keeps_gpus = held.get(grant.job) == grant.gpus
        lines[2 * (grant.job not in pinned) + (not keeps_gpus)].append(grant)
    order = list(chain(*lines))
    if priority_of:
        order.sort(key=lambda grant: (grant.job not in pinned, -priority_of.get(grant.job, 0)))
    return ((jobs[grant.job], grant) for grant in order)
