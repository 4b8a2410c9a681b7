"""HyperSched: ASHA that opens no new trial when too little time is left for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from statistics import median
from typing import ClassVar

from hermes_ops.core.model import Job, JobId, Phase, Plan, Reason, Snapshot, SweepId, Term
from hermes_ops.policies import asha
from hermes_ops.policies.toolbox.parameter_checks import whole
from hermes_ops.policies.toolbox.rungs import RungRank, rung_ranks
from hermes_ops.policies.toolbox.sweep_queues import by_sweep, in_turn, serve


@dataclass(frozen=True, slots=True)
class HyperSched:
    """ASHA with pausing up to a deadline, before which open trials are trained further.

    No trial is opened once the time left is less than the smaller of eta x the longest training
    so far and the steps of a whole trial x the median seconds a step.

    Source: Liaw et al., "HyperSched", SoCC 2019, and its published code. Ours: the deadline is
    `deadline_s` seconds after the sweep's first submission, else the earliest `Job.deadline_s` (an
    instant) of the sweep, else none: then this is `asha`; trials that are not opened in time come
    behind all that are open, so that all finish; training seconds are those of the curves, without
    start-ups; the choices of `asha` hold here too. The paper also gives trials more GPUs near the
    end; a policy of one size does not.
    """

    eta: int = 4
    first_rung: int = 1
    deadline_s: float | None = None
    name: ClassVar[str] = "hypersched"
    preempts: ClassVar[bool] = True
    compares: ClassVar[bool] = True

    def __post_init__(self) -> None:
        whole("eta", self.eta, 2)
        whole("first_rung", self.first_rung, 1)
        if self.deadline_s is not None and not 0 <= self.deadline_s < inf:
            raise ValueError("deadline_s is a number of seconds, not negative")

    def initial(self) -> None:
        """Return None: rungs are read off the curves."""
        return

    def decide(self, snapshot: Snapshot, memory: None) -> tuple[Plan, None]:
        """Decide as `asha`, with new trials last in sweeps that are past their limit."""
        ranks: dict[JobId, RungRank] = {}
        closed: dict[SweepId, Reason] = {}
        queues = {}
        for sweep, jobs in by_sweep(snapshot).items():
            sweep_ranks = rung_ranks(jobs, self.first_rung, self.eta)
            ranks |= sweep_ranks
            left_s, needed_s = self._left_s(jobs, snapshot.time_s), self._needed_s(jobs)
            if left_s < needed_s:
                closed[sweep] = _closed(left_s, needed_s)
            queues[sweep] = asha.asha_queue(snapshot, jobs, sweep_ranks, opens=sweep not in closed)

        def explain(job: Job, is_granted: bool) -> Reason:
            if job.phase is Phase.PENDING and not is_granted and job.sweep in closed:
                return closed[job.sweep]
            return asha.why(job, is_granted, ranks[job.id])

        return serve(snapshot, in_turn(queues), explain), memory

    def _left_s(self, jobs: Sequence[Job], now_s: float) -> float:
        """Return the seconds until the sweep's deadline; inf without one."""
        if self.deadline_s is not None:
            return min(job.submitted_s for job in jobs) + self.deadline_s - now_s
        return min((j.deadline_s for j in jobs if j.deadline_s is not None), default=inf) - now_s

    def _needed_s(self, jobs: Sequence[Job]) -> float:
        """Return the time left below which no new trial is opened; 0 before any training."""
        curves = [job.curve for job in jobs if job.curve and job.curve[-1].step > 0]
        if not curves:
            return 0.0
        steps = [job.total_steps for job in jobs if job.total_steps is not None]
        complete_s = max(steps, default=inf) * median(c[-1].seconds / c[-1].step for c in curves)
        return min(self.eta * max(c[-1].seconds for c in curves), complete_s)


def _closed(left_s: float, needed_s: float) -> Reason:
    text = f"not opened: {left_s:.1f} s are left, a new trial is worth it with {needed_s:.1f} s"
    terms = (Term("time_left_s", left_s), Term("limit_s", needed_s))
    return Reason(text, terms, None, "a later deadline, or all open trials ending")
