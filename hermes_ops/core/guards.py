"""Two wrappers around any policy: no thrashing, no endless waiting.

They are policies themselves, keep no memory of their own and pass the inner policy's through.
`guarded` composes them in the order in which both bounds hold. Jobs that a policy ends early are
not guarded: they never resume, so that nothing is lost by switching.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from math import fsum, inf
from operator import mul
from typing import TypeVar

from hermes_ops.core.guard_reasons import Quanta, served_reasons
from hermes_ops.core.impose import Overdue, impose
from hermes_ops.core.model import Job, JobId, Phase, Plan, Policy, Snapshot, overlay
from hermes_ops.core.quantum import Quantum
from hermes_ops.core.wrapper import Wrapper

M = TypeVar("M")
QUANTA = 32
"""The part of the pool's time that `Aging` may take, inverted: our choice, about 3 %."""
_WAITING, _STOPPING = Phase.WAITING, Phase.STOPPING


@dataclass(frozen=True, slots=True)
class AntiThrash(Wrapper[M]):
    """Let no running or starting job be stopped before its quantum is over.

    Bound: the time lost to switching is at most 1/(k + 1) of the time for which stopped segments
    occupy GPUs, as far as switch costs are known when the job is stopped. (Not counted: jobs that
    fail, or whose GPUs leave the pool.)

    The inner policy sees the protected jobs as not preemptible, so that its plan fits around them;
    what it still gives away of theirs is taken back. It is asked again when the first quantum
    ends. A policy that does not preempt is left alone.
    """

    k: float = 3.0
    default_switch_s: float = 5.0

    def __post_init__(self) -> None:
        self._quantum()

    def decide(self, snapshot: Snapshot, memory: M) -> tuple[Plan, M]:
        """The inner policy's plan around the jobs whose quantum is not over."""
        ends_s = self._quantum().ends_s(snapshot) if self.policy.preempts else {}
        if not ends_s:
            return self.policy.decide(snapshot, memory)
        firm, after = self.policy.decide(_masked(snapshot, ends_s), memory)
        plan = _with_kept(snapshot, firm, ends_s)
        ask = _once(self.policy, snapshot, memory)
        reasons = Quanta(snapshot, firm, plan, ends_s, ask).reasons()
        return _review(replace(plan, reasons=reasons), min(ends_s.values())), after

    def _quantum(self) -> Quantum:
        return Quantum(self.k, self.default_switch_s)


@dataclass(frozen=True, slots=True)
class Aging(Wrapper[M]):
    """Serve a waiting open job once it has waited long enough, the longest waiting first.

    It takes idle GPUs, else those of the job whose segment is the oldest among the ones that may
    be stopped: preemptible, its quantum over, a slice finished (else its work could be thrown
    away again and again).

    Bound: let the round of a job be a quantum and the switch around it, (k + 1) x the largest
    switch cost, or, if longer, its start-up, a slice (the seconds from one report to the next) and
    its checkpoint; R the longest one of the waiting. Let G be the GPUs that non-preemptible jobs do
    not hold and W the open jobs that wait, or that are stopping and soon will. To serve each of
    them for its round takes the pool L = sum(GPUs x round) / G. Among jobs of one GPU each is
    served after at most

        quanta x max(R, L) + ceil(W / G) x R

    seconds of waiting, with the largest W, R and L of that time, and after quanta x max(R, L) +
    W x R if there are gangs among them: while a gang is the first in line nothing else starts on
    GPUs that it could take, as long as it can ever fit. So no more than 1 / quanta of the pool's
    time goes to jobs that have waited long enough, however many wait: the rest is the policy's.
    (k + 1) x the largest switch cost of an open job is `quantum_s` where that is given. The bound
    counts from snapshot to snapshot: a driver that looks later adds its delay.

    A policy that does not preempt promises no bound and is left alone. A pending job has lost
    nothing yet and does not age.
    """

    quanta: int = QUANTA
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
        overdue, next_due = self._overdue(snapshot, plan)
        if not overdue:
            return _review(plan, next_due), memory
        protected = self._quantum().ends_s(snapshot)
        turn = Overdue(snapshot, plan, protected)
        for job in overdue:
            if not turn.serve(job):
                break
        new = impose(snapshot, plan, turn.served, turn.reserved)
        waited_s = {job.id: snapshot.time_s - _waits_since(job) for job in overdue}
        reasons = served_reasons(snapshot, plan, new, waited_s, turn.served)
        new = replace(new, reasons=overlay(plan.reasons, reasons))
        return _review(new, min(next_due, min(protected.values(), default=inf))), memory

    def _overdue(self, snapshot: Snapshot, plan: Plan) -> tuple[list[Job], float]:
        """Who is to be served, in order, and when the next one comes of age."""
        ends = set(plan.ends)
        waiting = [j for j in snapshot.queue if j.phase is _WAITING and j.id not in ends]
        if not waiting:
            return [], inf
        leaving = [j for j in snapshot.others if j.phase is _STOPPING and j.id not in ends]
        patience_s, next_due = self._patience_s(snapshot, (*waiting, *leaving)), inf
        overdue: list[Job] = []
        for job in waiting:
            due_s = _waits_since(job) + patience_s
            if due_s <= snapshot.time_s:
                overdue.append(job)
            elif due_s < next_due:
                next_due = due_s
        overdue.sort(key=_waits_since)  # stable: the queue is in order of submission
        return overdue, next_due

    def _patience_s(self, snapshot: Snapshot, waiting: Sequence[Job]) -> float:
        quantum_s = self._quantum_s(snapshot)
        rounds_s = [max(quantum_s, _slice_s(job)) for job in waiting]
        total_gpu_s = fsum(map(mul, (job.min_gpus for job in waiting), rounds_s))  # in any order
        fixed = sum(len(job.gpus_held) for job in snapshot.holding if not job.preemptible)
        return self.quanta * max(*rounds_s, total_gpu_s / max(1, len(snapshot.gpus) - fixed))

    def _quantum(self) -> Quantum:
        return Quantum(self.k, self.default_switch_s)

    def _quantum_s(self, snapshot: Snapshot) -> float:
        if self.quantum_s is not None:
            return self.quantum_s
        return self._quantum().longest_s(snapshot)


def guarded(
    policy: Policy[M], k: float = 3.0, quanta: int = QUANTA, default_switch_s: float = 5.0
) -> Policy[M]:
    """The policy under both guards.

    Aging stands outside, so that nothing undoes what it serves; it takes GPUs only from jobs
    whose quantum is over, so that the bound of AntiThrash inside holds as well.
    """
    calm = AntiThrash(policy, k, default_switch_s)
    return Aging(calm, quanta, k, default_switch_s)


def _masked(snapshot: Snapshot, protected: Collection[JobId]) -> Snapshot:
    """The snapshot with these running jobs marked not preemptible; what waits is not touched."""
    holding = tuple(
        replace(job, preemptible=False) if job.preemptible and job.id in protected else job
        for job in snapshot.holding
    )
    return Snapshot.prepared(
        snapshot.time_s,
        snapshot.gpus,
        holding=holding,
        queue=snapshot.queue,
        others=snapshot.others,
        index={**snapshot.index, **{job.id: job for job in holding}},
    )


def _with_kept(snapshot: Snapshot, plan: Plan, protected: Collection[JobId]) -> Plan:
    """The plan in which the protected jobs keep their GPUs, unless it ends them."""
    held, ends = snapshot.held, set(plan.ends)
    kept = {g.job for g in plan.grants if g.job in protected and g.gpus == held[g.job]}
    firm = [job for job in protected if job not in ends]
    if kept.issuperset(firm):
        return plan
    return impose(snapshot, plan, [snapshot.stays[job] for job in firm])  # these fit together


def _once(policy: Policy[M], snapshot: Snapshot, memory: M) -> Callable[[], Plan]:
    """The policy's plan for the snapshot as it is, once somebody asks."""
    return lambda: policy.decide(snapshot, memory)[0]


def _review(plan: Plan, at_s: float) -> Plan:
    earliest = min(at_s, inf if plan.review_at_s is None else plan.review_at_s)
    return replace(plan, review_at_s=None if earliest == inf else earliest)


def _waits_since(job: Job) -> float:
    return job.submitted_s if job.waiting_since_s is None else job.waiting_since_s


def _slice_s(job: Job) -> float:
    """From the start of a segment to the checkpoint after its first report, as far as known."""
    report_s = job.curve[-1].seconds / len(job.curve) if job.curve else 0.0
    return (job.switch_s or 0.0) + report_s
