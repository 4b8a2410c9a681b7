"""Two wrappers around any policy: no thrashing, no endless waiting.

They are policies themselves, keep no memory of their own and pass the inner policy's through.
`guarded` composes them in the order in which both bounds hold. Jobs that a policy ends early are
not guarded: they never resume, so that nothing is lost by switching.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import inf
from typing import TypeVar

from hermes_ops.core.convergence import finished_slice
from hermes_ops.core.model import Grant, Job, JobId, Phase, Plan, Policy, Reason, Snapshot, Term
from hermes_ops.core.order import natural, submission
from hermes_ops.core.placement import Places, holders, holdings
from hermes_ops.core.quantum import Quantum
from hermes_ops.core.wrapper import Wrapper

M = TypeVar("M")


@dataclass(frozen=True, slots=True)
class AntiThrash(Wrapper[M]):
    """Let no running or starting job be stopped before its quantum is over.

    Bound: the time lost to switching is at most 1/(k + 1) of the time for which stopped segments
    occupy GPUs, as far as switch costs are known when the job is stopped. (Not counted: jobs that
    fail, or whose GPUs leave the pool.)

    The inner policy is asked again with the protected jobs marked not preemptible, so that its
    plan fits around them; what it still gives away of theirs is taken back.
    """

    k: float = 3.0
    default_switch_s: float = 5.0

    def __post_init__(self) -> None:
        self._quantum()

    def decide(self, snapshot: Snapshot, memory: M) -> tuple[Plan, M]:
        """The inner policy's plan, with the jobs kept whose quantum is not over."""
        wanted, after = self.policy.decide(snapshot, memory)
        ends_s = self._quantum().ends_s(snapshot)
        held = holdings(snapshot)
        hit = {j for j in ends_s if j not in wanted.ends and wanted.gpus_of(j) != held[j]}
        if not hit:
            return wanted, after
        masked = tuple(
            replace(job, preemptible=False) if job.id in ends_s else job for job in snapshot.jobs
        )
        plan, after = self.policy.decide(replace(snapshot, jobs=masked), memory)
        kept = {j: Grant(j, gpus) for j, gpus in held.items() if j in ends_s and j not in plan.ends}
        kept |= {g.job: g for g in plan.grants if g.job in kept and g.gpus == held[g.job]}
        plan = _impose(snapshot, plan, tuple(kept.values()))
        hit -= set(plan.ends)
        return _explain_kept(snapshot, wanted, plan, {j: ends_s[j] for j in hit}), after

    def _quantum(self) -> Quantum:
        return Quantum(self.k, self.default_switch_s)


@dataclass(frozen=True, slots=True)
class Aging(Wrapper[M]):
    """Serve a waiting open job once it has waited for `quanta` quanta, the longest waiting first.

    It takes idle GPUs, else those of the job whose segment is the oldest among the ones that may
    be stopped: preemptible, its quantum over, a slice finished (else its work could be thrown
    away again and again).

    Bound: let R be the longest round: a quantum and the switch around it, (k + 1) x the largest
    switch cost, or, if longer, the start-up, first slice and checkpoint of a job. Let G be the
    GPUs that non-preemptible jobs do not hold and W the open jobs that wait when this one comes
    of age, itself included. Among jobs of one GPU it is served after at most

        quanta x quantum_s + ceil(W / G) x R

    seconds of waiting, and after quanta x quantum_s + W x R if there are gangs among them: while a
    gang is the first in line nothing else starts on GPUs that it could take, as long as it can
    ever fit. `quantum_s` is (k + 1) x the largest switch cost of an open job unless it is given.
    The bound counts from snapshot to snapshot: a driver that looks later adds its delay.

    A policy that does not preempt promises no bound and is left alone. A pending job has lost
    nothing yet and does not age.
    """

    quanta: int = 8
    k: float = 3.0
    default_switch_s: float = 5.0
    quantum_s: float | None = None

    def __post_init__(self) -> None:
        self._quantum()
        if self.quanta < 0 or (self.quantum_s is not None and not 0 <= self.quantum_s < inf):
            raise ValueError("quanta and quantum_s are finite and not negative")

    def decide(self, snapshot: Snapshot, memory: M) -> tuple[Plan, M]:
        """The inner policy's plan, with the overdue jobs served first."""
        plan, memory = self.policy.decide(snapshot, memory)
        if not self.policy.preempts:
            return plan, memory
        patience_s = self.quanta * self._quantum_s(snapshot)
        due = [(_waits_since(j) + patience_s, j) for j in snapshot.jobs if _may_age(j, plan)]
        overdue = [job for due_s, job in due if due_s <= snapshot.time_s]
        next_due = min((due_s for due_s, _ in due if due_s > snapshot.time_s), default=inf)
        if not overdue:
            return _review(plan, next_due), memory
        overdue.sort(key=lambda job: (_waits_since(job), submission(job)))
        line = _Line(snapshot, plan, self._quantum().ends_s(snapshot))
        for job in overdue:
            if not line.serve(job):
                break
        next_end = min(line.protected.values(), default=inf)
        return _review(line.plan(), min(next_due, next_end)), memory

    def _quantum(self) -> Quantum:
        return Quantum(self.k, self.default_switch_s)

    def _quantum_s(self, snapshot: Snapshot) -> float:
        if self.quantum_s is not None:
            return self.quantum_s
        return self._quantum().longest_s(snapshot)


def guarded(
    policy: Policy[M], k: float = 3.0, quanta: int = 8, default_switch_s: float = 5.0
) -> Policy[M]:
    """The policy under both guards.

    Aging stands outside, so that nothing undoes what it serves; it takes GPUs only from jobs
    whose quantum is over, so that the bound of AntiThrash inside holds as well.
    """
    calm = AntiThrash(policy, k, default_switch_s)
    return Aging(calm, quanta, k, default_switch_s)


class _Line:
    """The overdue jobs' turn: which GPUs they take from the plan, or reserve."""

    def __init__(self, snapshot: Snapshot, plan: Plan, protected: dict[JobId, float]) -> None:
        self.protected = protected
        self._snapshot = snapshot
        self._plan = plan
        self._served: list[Grant] = []
        self._reserved: set[int] = set()
        self._owner = {g: job for job in holders(snapshot) for g in job.gpus_held}
        self._user = {gpu: grant.job for grant in plan.grants for gpu in grant.gpus}

    def serve(self, job: Job) -> bool:
        """Grant the job GPUs, or reserve what it could take; False: nobody after it may take any.

        A job that cannot fit beside the non-preemptible ones is passed over.
        """
        own = self._plan.gpus_of(job.id)
        if own and not self._taken().intersection(own):
            self._served.append(Grant(job.id, own))
            return True
        gpus = [gpu for gpu in self._pool() if self._available(gpu)]
        if job.min_gpus <= len(gpus):
            chosen = sorted(gpus, key=self._cost)[: job.min_gpus]
            self._served.append(Grant(job.id, tuple(sorted(chosen))))
            return True
        if job.min_gpus > sum(self._obtainable(gpu) for gpu in self._pool()):
            return True
        self._reserved.update(gpus)
        return False

    def plan(self) -> Plan:
        """The policy's plan, repaired around what was served and reserved."""
        plan = _impose(self._snapshot, self._plan, tuple(self._served), frozenset(self._reserved))
        return _explain_served(self._snapshot, self._plan, plan, self._served)

    def _pool(self) -> list[int]:
        return [gpu.index for gpu in self._snapshot.gpus]

    def _taken(self) -> set[int]:
        return {gpu for grant in self._served for gpu in grant.gpus}

    def _obtainable(self, gpu: int) -> bool:
        runs = self._owner.get(gpu)
        return runs is None or runs.preemptible

    def _available(self, gpu: int) -> bool:
        if gpu in self._taken():
            return False
        runs = self._owner.get(gpu)
        if runs is None or runs.id in self._plan.ends:
            return True
        return runs.preemptible and runs.id not in self.protected and finished_slice(runs)

    def _cost(self, gpu: int) -> tuple[int, float, int]:
        """Unused GPUs first, then those of a job that has not started, then the oldest segment."""
        user, runs = self._user.get(gpu), self._owner.get(gpu)
        if user is None:
            return (0, 0.0, gpu)
        if runs is None or runs.id != user:
            return (1, 0.0, gpu)
        return (2, -inf if runs.started_s is None else runs.started_s, gpu)


def _impose(
    snapshot: Snapshot, plan: Plan, first: tuple[Grant, ...], reserved: frozenset[int] = frozenset()
) -> Plan:
    """The plan with the grants of `first` in force and no new start on reserved GPUs.

    Grants that overlap are withdrawn; a job that had lost its GPUs to a withdrawn grant gets them
    back if they are free.
    """
    held = holdings(snapshot)
    wins = {grant.job for grant in first}
    taken = {gpu for grant in first for gpu in grant.gpus}
    grants = list(first)
    withdrawn: set[int] = set()
    for grant in plan.grants:
        if grant.job in wins:
            withdrawn.update(grant.gpus)
        elif taken.isdisjoint(grant.gpus) and (
            held.get(grant.job) == grant.gpus or reserved.isdisjoint(grant.gpus)
        ):
            grants.append(grant)
        else:
            withdrawn.update(grant.gpus, held.get(grant.job, ()))
    return replace(plan, grants=tuple(_restore(grants, held, plan.ends, withdrawn)))


def _restore(
    grants: list[Grant], held: Places, ends: Iterable[JobId], withdrawn: set[int]
) -> list[Grant]:
    """Add the jobs that had to leave for a withdrawn grant and whose GPUs nobody takes now."""
    out = {grant.job for grant in grants}.union(ends)
    taken = {gpu for grant in grants for gpu in grant.gpus}
    for job, gpus in held.items():
        if job not in out and withdrawn.intersection(gpus) and taken.isdisjoint(gpus):
            grants.append(Grant(job, gpus))
            taken.update(gpus)
    return grants


def _explain_kept(snapshot: Snapshot, wanted: Plan, plan: Plan, ends: dict[JobId, float]) -> Plan:
    """Say which jobs the quantum keeps, who wanted their GPUs, and ask again when it is over."""
    held = holdings(snapshot)
    reasons = dict(plan.reasons)
    granted = {grant.job for grant in plan.grants}
    for grant in wanted.grants:
        if held.get(grant.job) == grant.gpus and grant.job in granted:
            reasons[grant.job] = wanted.reasons.get(grant.job, Reason("runs"))
    for job, end_s in sorted(ends.items(), key=lambda e: natural(e[0])):
        left_s = end_s - snapshot.time_s
        text = f"kept: {left_s:.1f} s of its quantum left"
        rival = next((g.job for g in wanted.grants if set(g.gpus) & set(held[job])), None)
        terms = (Term("quantum_left_s", left_s), *_terms(wanted, job))
        reasons[job] = Reason(text, terms, rival, "the end of its quantum")
        if rival is not None and rival not in granted:
            waits = f"waits: {job} has {left_s:.1f} s of its quantum left"
            reasons[rival] = Reason(waits, _terms(wanted, rival), job, "the end of that quantum")
    return _review(_rank(replace(plan, reasons=reasons)), min(ends.values(), default=inf))


def _explain_served(snapshot: Snapshot, wanted: Plan, plan: Plan, served: Iterable[Grant]) -> Plan:
    """Say whom aging serves, who leaves for it, and whose start it put off."""
    reasons = dict(plan.reasons)
    granted = {grant.job for grant in plan.grants}
    jobs = {job.id: job for job in snapshot.jobs}
    for grant in served:
        waited_s = snapshot.time_s - _waits_since(jobs[grant.job])
        terms = (Term("waited_s", waited_s), *_terms(wanted, grant.job))
        reasons[grant.job] = Reason(f"served: it has waited {waited_s:.1f} s, long enough", terms)
        for job, gpus in _users(snapshot, wanted):
            if job not in granted and set(gpus) & set(grant.gpus):
                text = f"gives way to {grant.job}, which has waited {waited_s:.1f} s"
                change = f"{grant.job} having waited less"
                reasons[job] = Reason(text, _terms(wanted, job), grant.job, change)
    for grant in wanted.grants:
        if grant.job not in granted and reasons.get(grant.job) == wanted.reasons.get(grant.job):
            text = "waits: its GPUs are kept for a job that has waited too long"
            reasons[grant.job] = Reason(text, _terms(wanted, grant.job))
    for grant in plan.grants:
        if not wanted.gpus_of(grant.job) and reasons.get(grant.job) == wanted.reasons.get(
            grant.job
        ):
            text = "runs on: who was to follow it waits"
            reasons[grant.job] = Reason(text, _terms(wanted, grant.job))
    return _rank(replace(plan, reasons=reasons))


def _users(snapshot: Snapshot, plan: Plan) -> list[tuple[JobId, tuple[int, ...]]]:
    granted = [(grant.job, grant.gpus) for grant in plan.grants]
    return granted + [(job.id, job.gpus_held) for job in holders(snapshot)]


def _rank(plan: Plan) -> Plan:
    """Take out of the ranking who has GPUs now."""
    granted = {grant.job for grant in plan.grants}
    return replace(plan, ranking=tuple(job for job in plan.ranking if job not in granted))


def _terms(plan: Plan, job: JobId) -> tuple[Term, ...]:
    reason = plan.reasons.get(job)
    return reason.terms if reason else ()


def _review(plan: Plan, at_s: float) -> Plan:
    earliest = min(at_s, inf if plan.review_at_s is None else plan.review_at_s)
    return replace(plan, review_at_s=None if earliest == inf else earliest)


def _may_age(job: Job, plan: Plan) -> bool:
    return job.phase is Phase.WAITING and job.id not in plan.ends


def _waits_since(job: Job) -> float:
    return job.submitted_s if job.waiting_since_s is None else job.waiting_since_s
