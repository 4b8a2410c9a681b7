"""Two wrappers around any policy: no thrashing, no starvation.

They are policies themselves, have no memory and pass the inner policy's through. `guarded` composes
them in the order in which both bounds hold. Jobs that a policy ends early are not guarded: they
never resume, so switching costs nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import fsum, inf
from operator import mul
from statistics import median_low
from typing import TypeVar

from hermes_ops.core.grant_overrides import StarvedJobs, override_grants
from hermes_ops.core.model import (
    OPEN_PHASES,
    Grant,
    Job,
    JobId,
    Phase,
    Plan,
    Policy,
    Reason,
    Snapshot,
    SweepId,
    Term,
)
from hermes_ops.core.plan import DeferredReasons, JobIds, LazyReasons, overlay
from hermes_ops.core.wrapper import Wrapper

M = TypeVar("M")
QUANTA = 32
"""The part of the pool's time that `Aging` may take, inverted: our choice, about 3 %."""
_WAITING, _STOPPING = Phase.WAITING, Phase.STOPPING


_RUNS = Reason("runs", would_change="its end")
_PUT_OFF = Reason(
    "waits: its GPUs are kept for a job that has waited too long",
    would_change="the end of that job's turn",
)
_RUNS_ON = Reason("runs on: who was to follow it waits", would_change="that job's start")


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
        """Return the inner policy's plan around the jobs whose quantum is not over."""
        ends_s = self._quantum().ends_s(snapshot) if self.policy.preempts else {}
        if not ends_s:
            return self.policy.decide(snapshot, memory)
        around, after = self.policy.decide(_masked(snapshot, ends_s), memory)
        plan = _with_kept(snapshot, around, ends_s)

        def wanted() -> Plan:
            return self.policy.decide(snapshot, memory)[0]

        reasons = QuantumReasons(snapshot, around, plan, ends_s, wanted).reasons()
        return replace(plan, reasons=reasons).reviewed_by(min(ends_s.values())), after

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
        """Return the inner policy's plan, with the starved jobs served first."""
        plan, memory = self.policy.decide(snapshot, memory)
        if not self.policy.preempts:
            return plan, memory
        overdue, next_due = self._overdue(snapshot, plan)
        if not overdue:
            return plan.reviewed_by(next_due), memory
        protected = self._quantum().ends_s(snapshot)
        turn = StarvedJobs(snapshot, plan, protected)
        for job in overdue:
            if not turn.serve(job):
                break
        new = override_grants(snapshot, plan, turn.served, turn.reserved)

        def reasons() -> Mapping[JobId, Reason]:
            waited_s = {job.id: snapshot.time_s - _waits_since(job) for job in overdue}
            return served_reasons(snapshot, plan, new, waited_s, turn.served)

        explained = replace(new, reasons=overlay(plan.reasons, DeferredReasons(reasons)))
        return explained.reviewed_by(min((next_due, *protected.values()))), memory

    def _overdue(self, snapshot: Snapshot, plan: Plan) -> tuple[list[Job], float]:
        """Return the starved jobs in order, and when the next one becomes starved."""
        ends = set(plan.ends)
        waiting = [j for j in snapshot.queue if j.phase is _WAITING and j.id not in ends]
        if not waiting:
            return [], inf
        stopping = (j for j in snapshot.others if j.phase is _STOPPING and j.resumes)
        leaving = [j for j in stopping if j.id not in ends]
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
    """Wrap the policy in both guards.

    Aging stands outside, so that nothing undoes what it serves; it takes GPUs only from jobs
    whose quantum is over, so that the bound of AntiThrash inside holds as well.
    """
    calm = AntiThrash(policy, k, default_switch_s)
    return Aging(calm, quanta, k, default_switch_s)


def _masked(snapshot: Snapshot, protected: Collection[JobId]) -> Snapshot:
    """Return the snapshot with these running jobs marked not preemptible."""
    holding = tuple(
        replace(job, preemptible=False) if job.preemptible and job.id in protected else job
        for job in snapshot.holding
    )
    is_settled = len(snapshot.retained) == len(holding)  # whoever is preemptible, all keep theirs
    return Snapshot.prepared(
        snapshot.time_s,
        snapshot.gpus,
        holding=holding,
        queue=snapshot.queue,
        others=snapshot.others,
        index={**snapshot.index, **{job.id: job for job in holding}},
        retained=snapshot.retained if is_settled else None,
        held=snapshot.held if is_settled else None,
        free=snapshot.free if is_settled else None,
    )


def _with_kept(snapshot: Snapshot, plan: Plan, protected: Collection[JobId]) -> Plan:
    """Return the plan in which the protected jobs keep their GPUs, unless it ends them."""
    now, ends = snapshot.retained, set(plan.ends)
    kept = {g.job for g in plan.grants if g.job in protected and _keeps(g, now[g.job])}
    pinned = [job for job in protected if job not in ends]
    if kept.issuperset(pinned):
        return plan
    retained = [snapshot.retained[job] for job in pinned]  # these fit together
    return override_grants(snapshot, plan, retained)


def _keeps(grant: Grant, now: Grant) -> bool:
    """Return whether the job goes on without a restart; another share needs none."""
    return grant.gpus == now.gpus and grant.batch in (None, now.batch)


def _waits_since(job: Job) -> float:
    return job.submitted_s if job.waiting_since_s is None else job.waiting_since_s


def _slice_s(job: Job) -> float:
    """Return the seconds from a segment's start to the checkpoint after its first report."""
    report_s = job.curve[-1].seconds / len(job.curve) if job.curve else 0.0
    return (job.switch_s or 0.0) + report_s


@dataclass(frozen=True, slots=True)
class Quantum:
    """How long a job must run, from its start or resume, before it may be stopped.

    `k` times its switch cost of training, after the start-up and restore that come first. Its
    switch cost is measured (`Job.switch_s`), else the largest one known in its sweep, else the
    median of those of the other sweeps, but not less than `default_switch_s`, which is also the
    least of a script without the hook (`Job.repeat_s`); while its parts are unknown the whole cost
    is taken to come first. With the checkpoint at its end a stopped segment thus occupies its GPUs
    for at least k + 1 switch costs.
    """

    k: float = 3.0
    default_switch_s: float = 5.0

    def __post_init__(self) -> None:
        if not (0 <= self.k < inf and 0 <= self.default_switch_s < inf):
            raise ValueError("k and default_switch_s are finite and not negative")

    def ends_s(self, snapshot: Snapshot) -> dict[JobId, float]:
        """Return when the quantum of each job that it still protects ends.

        A job without a known start begins its quantum now. A start in the future means that the
        clock was set back: if it is more than a quantum ahead, the job is not protected, as it
        would keep its GPUs until the clock has caught up.
        """
        held = snapshot.held
        ends: dict[JobId, float] = {}
        expected: dict[SweepId, float] | None = None
        for job in snapshot.holding:
            cost, checkpoint_s = self._cost_s(job), job.checkpoint_s or 0.0
            if cost is None:
                expected = self._expected_s(snapshot) if expected is None else expected
                cost, checkpoint_s = expected[job.sweep], 0.0
            started = snapshot.time_s if job.started_s is None else job.started_s
            end = started + self.k * cost + (cost - checkpoint_s)
            is_too_far_ahead = started - snapshot.time_s > end - started
            if end > snapshot.time_s and not is_too_far_ahead and job.id in held:
                ends[job.id] = end
        return ends

    def longest_s(self, snapshot: Snapshot) -> float:
        """Return k + 1 times the largest switch cost of an open job: a quantum and its switch."""
        most, unmeasured = -1.0, set[SweepId]()
        for job in snapshot.jobs:
            if job.phase not in OPEN_PHASES:
                continue
            cost = self._cost_s(job)
            if cost is None:
                unmeasured.add(job.sweep)
            elif cost > most:
                most = cost
        if unmeasured:
            expected = self._expected_s(snapshot)
            most = max(most, *(expected[sweep] for sweep in unmeasured))
        return (self.k + 1) * (most if most >= 0 else self.default_switch_s)

    def _expected_s(self, snapshot: Snapshot) -> dict[SweepId, float]:
        """Return the switch cost that unmeasured jobs of each sweep are taken to have."""
        largest: dict[SweepId, float] = {}
        for job in snapshot.jobs:
            cost = self._cost_s(job)
            if cost is not None and cost > largest.get(job.sweep, -1.0):
                largest[job.sweep] = cost
        usual = max(self.default_switch_s, median_low(largest.values()) if largest else 0.0)
        return defaultdict(lambda: usual, largest)

    def _cost_s(self, job: Job) -> float | None:
        """Return the measured switch cost; at least the default where a stop repeats training.

        That is a script without the hook, of which less can be seen.
        """
        if job.repeat_s is None:
            return job.switch_s
        return max(job.switch_s or 0.0, self.default_switch_s)


@dataclass(frozen=True)
class QuantumReasons:
    """Reasons under AntiThrash.

    `around` is the policy's plan around the protected jobs, `plan` what became of it. `ask` returns
    the policy's plan without protection; it costs a whole decision, so only a reason calls it.
    """

    snapshot: Snapshot
    around: Plan
    plan: Plan
    ends_s: Mapping[JobId, float]
    ask: Callable[[], Plan]

    def reasons(self) -> Mapping[JobId, Reason]:
        """Return a reason for each job of the plan's reasons, and each protected one."""
        return LazyReasons(JobIds(self.around.reasons, self.ends_s), self._explain)

    @cached_property
    def _wanted_plan(self) -> Plan:
        return self.ask()

    @cached_property
    def _wanted_gpus(self) -> dict[JobId, tuple[int, ...]]:
        return {grant.job: grant.gpus for grant in self._wanted_plan.grants}

    @cached_property
    def _gpus(self) -> dict[JobId, tuple[int, ...]]:
        return {grant.job: grant.gpus for grant in self.plan.grants}

    @cached_property
    def _around_gpus(self) -> dict[JobId, tuple[int, ...]]:
        return {grant.job: grant.gpus for grant in self.around.grants}

    @cached_property
    def _users(self) -> dict[int, JobId]:
        """Return the job of each GPU in the plan of the policy, before the guards."""
        return {gpu: grant.job for grant in self._wanted_plan.grants for gpu in grant.gpus}

    @cached_property
    def _protectors(self) -> dict[int, JobId]:
        """The job whose quantum keeps each GPU."""
        held = self.snapshot.held
        return {gpu: job for job in self.ends_s for gpu in held[job] if job in self._gpus}

    def _explain(self, job: JobId) -> Reason:
        held = self.snapshot.held.get(job)
        if job not in self._gpus:
            reason = self.around.reasons.get(job, _RUNS)
            return reason if held is not None else self._waiting_reason(job, reason)
        if held != self._gpus[job]:
            return self.around.reasons.get(job, _RUNS)
        if self._wanted_gpus.get(job) == held:
            return self._wanted_plan.reasons.get(job, _RUNS)
        if job in self.ends_s and job not in self._wanted_plan.ends:
            return self._retained_reason(job, held)
        return self.around.reasons.get(job, _RUNS) if job in self._around_gpus else _RUNS_ON

    def _retained_reason(self, job: JobId, held: tuple[int, ...]) -> Reason:
        left_s = self._left_s(job)
        rivals = (self._users[gpu] for gpu in held if gpu in self._users)
        rival = next((rival for rival in rivals if rival != job), None)
        terms = (Term("quantum_left_s", left_s), *_terms_of(self._wanted_plan, job))
        text = f"kept: {left_s:.1f} s of its quantum left"
        return Reason(text, terms, rival, "the end of its quantum")

    def _waiting_reason(self, job: JobId, reason: Reason) -> Reason:
        """Return the reason of a waiting job: a quantum, if that keeps it from its GPU."""
        gpus = self._wanted_gpus.get(job) or self._around_gpus.get(job, ())
        for gpu in gpus:
            protector = self._protectors.get(gpu)
            if protector is not None:
                text = f"waits: {protector} has {self._left_s(protector):.1f} s of its quantum left"
                return Reason(text, reason.terms, protector, "the end of that quantum")
        return reason

    def _left_s(self, job: JobId) -> float:
        return self.ends_s[job] - self.snapshot.time_s


def served_reasons(
    snapshot: Snapshot,
    wanted: Plan,
    plan: Plan,
    waited_s: Mapping[JobId, float],
    served: list[Grant],
) -> Mapping[JobId, Reason]:
    """Return reasons: whom aging serves, who leaves for it, whose start waits, who stays on.

    `wanted` is the policy's own plan. Terms here are those of aging's choice: how long the served
    job waited, and how long the other's segment has run.
    """
    takers = {gpu: grant.job for grant in served for gpu in grant.gpus}
    before = {grant.job: grant.gpus for grant in wanted.grants}
    after = {grant.job for grant in plan.grants}
    gone = {job: gpus for job, gpus in {**snapshot.held, **before}.items() if job not in after}
    losers = {
        job: next((takers[g] for g in gpus if g in takers), None) for job, gpus in gone.items()
    }
    spoken = [grant.job for grant in served]
    spoken += [job for job in after if job not in before]
    spoken += [job for job, taker in losers.items() if taker or job in before]

    def explain(job: JobId) -> Reason:
        if job in after:
            return _served(waited_s[job]) if job in waited_s else _RUNS_ON
        taker = losers[job]
        if taker is None:
            return _PUT_OFF
        return _gives_way(snapshot.index[job], snapshot.time_s, taker, waited_s[taker])

    return LazyReasons(dict.fromkeys(spoken), explain)


def _served(waited_s: float) -> Reason:
    text = f"served: it has waited {waited_s:.1f} s, long enough"
    return Reason(text, (Term("waited_s", waited_s),), None, "having waited less")


def _gives_way(job: Job, now_s: float, taker: JobId, waited_s: float) -> Reason:
    ran = () if job.started_s is None else (Term("ran_s", now_s - job.started_s),)
    text = f"gives way to {taker}, which has waited {waited_s:.1f} s"
    return Reason(text, ran, taker, f"{taker} having waited less")


def _terms_of(plan: Plan, job: JobId) -> tuple[Term, ...]:
    reason = plan.reasons.get(job)
    return reason.terms if reason else ()
