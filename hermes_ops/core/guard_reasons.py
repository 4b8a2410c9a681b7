"""The guards' reasons for the jobs that they keep, serve or hold back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

from hermes_ops.core.model import Grant, Job, JobId, LazyReasons, Plan, Reason, Snapshot, Term

_RUNS = Reason("runs", would_change="its end")
_PUT_OFF = Reason(
    "waits: its GPUs are kept for a job that has waited too long",
    would_change="the end of that job's turn",
)
_RUNS_ON = Reason("runs on: who was to follow it waits", would_change="that job's start")


@dataclass(frozen=True)
class QuantumReasons:
    """Reasons under AntiThrash.

    `around` is the policy's plan around the protected jobs, `plan` what became of it. `ask` says
    what the policy wanted without protection; it costs a whole decision, so only a reason asks it.
    """

    snapshot: Snapshot
    around: Plan
    plan: Plan
    ends_s: Mapping[JobId, float]
    ask: Callable[[], Plan]

    def reasons(self) -> Mapping[JobId, Reason]:
        """Return a reason for each job of the plan's reasons, and each protected one."""
        return LazyReasons(dict.fromkeys((*self.around.reasons, *self.ends_s)), self._explain)

    @cached_property
    def _wanted(self) -> Plan:
        return self.ask()

    @cached_property
    def _wanted_gpus(self) -> dict[JobId, tuple[int, ...]]:
        return {grant.job: grant.gpus for grant in self._wanted.grants}

    @cached_property
    def _gpus(self) -> dict[JobId, tuple[int, ...]]:
        return {grant.job: grant.gpus for grant in self.plan.grants}

    @cached_property
    def _around_gpus(self) -> dict[JobId, tuple[int, ...]]:
        return {grant.job: grant.gpus for grant in self.around.grants}

    @cached_property
    def _users(self) -> dict[int, JobId]:
        """Return the job of each GPU in the plan of the policy, before the guards."""
        return {gpu: grant.job for grant in self._wanted.grants for gpu in grant.gpus}

    @cached_property
    def _protectors(self) -> dict[int, JobId]:
        """The job whose quantum keeps each GPU."""
        held = self.snapshot.held
        return {gpu: job for job in self.ends_s for gpu in held[job] if job in self._gpus}

    def _explain(self, job: JobId) -> Reason:
        held = self.snapshot.held.get(job)
        if job not in self._gpus:
            reason = self.around.reasons.get(job, _RUNS)
            return reason if held is not None else self._waits(job, reason)
        if held != self._gpus[job]:
            return self.around.reasons.get(job, _RUNS)
        if self._wanted_gpus.get(job) == held:
            return self._wanted.reasons.get(job, _RUNS)
        if job in self.ends_s and job not in self._wanted.ends:
            return self._kept(job, held)
        return self.around.reasons.get(job, _RUNS) if job in self._around_gpus else _RUNS_ON

    def _kept(self, job: JobId, held: tuple[int, ...]) -> Reason:
        left_s = self._left_s(job)
        rivals = (self._users[gpu] for gpu in held if gpu in self._users)
        rival = next((rival for rival in rivals if rival != job), None)
        terms = (Term("quantum_left_s", left_s), *_terms(self._wanted, job))
        text = f"kept: {left_s:.1f} s of its quantum left"
        return Reason(text, terms, rival, "the end of its quantum")

    def _waits(self, job: JobId, reason: Reason) -> Reason:
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


def _terms(plan: Plan, job: JobId) -> tuple[Term, ...]:
    reason = plan.reasons.get(job)
    return reason.terms if reason else ()
