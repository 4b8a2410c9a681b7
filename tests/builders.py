"""Builders of jobs, curves and snapshots for tests of decisions.

Jobs belong to the sweep before the "/" of their id; a number n stands for the id "s/n".
"""

from __future__ import annotations

from typing import Any

from hermes_ops.core.model import (
    Gpu,
    Job,
    JobId,
    Phase,
    Plan,
    Point,
    Policy,
    Snapshot,
    SweepId,
)
from hermes_ops.core.plan import check


def curve(*losses: float, step_s: float = 1.0) -> tuple[Point, ...]:
    """Return a curve of these losses at steps 1, 2, ..., `step_s` seconds apart."""
    return tuple(Point(n, loss, n * step_s) for n, loss in enumerate(losses, start=1))


def job(name: int | str, phase: Phase = Phase.PENDING, *losses: float, **facts: Any) -> Job:
    """Return a job submitted at 0 that takes exactly `min_gpus`, unless the facts say otherwise."""
    id_ = f"s/{name}" if isinstance(name, int) else name
    defaults: dict[str, Any] = {
        "sweep": SweepId(id_.partition("/")[0]),
        "submitted_s": 0.0,
        "curve": curve(*losses),
        "max_gpus": facts.get("min_gpus", 1),
    }
    return Job(JobId(id_), phase=phase, **(defaults | facts))


def arriving(number: int, phase: Phase = Phase.PENDING, **facts: Any) -> Job:
    """Return a job that was submitted at the second of its number."""
    return job(number, phase, **({"submitted_s": float(number)} | facts))


def trial(name: int | str, *losses: float, gpu: int | None = None, **facts: Any) -> Job:
    """Return a trial with steps of 2 s: on a GPU, else waiting, or pending without losses."""
    phase = Phase.RUNNING if gpu is not None else Phase.WAITING if losses else Phase.PENDING
    held = () if gpu is None else (gpu,)
    defaults = {"phase": phase, "gpus_held": held, "curve": curve(*losses, step_s=2.0)}
    return job(name, **(defaults | facts))


def world(*jobs: Job, gpus: int = 1, now_s: float = 100.0) -> Snapshot:
    """Return a snapshot of these jobs on so many GPUs of one node."""
    return Snapshot(now_s, tuple(Gpu(index) for index in range(gpus)), jobs)


def decided(policy: Policy[None], *jobs: Job, gpus: int = 1, now_s: float = 100.0) -> Plan:
    """Return the plan of a policy without a memory, which must be possible."""
    snapshot = world(*jobs, gpus=gpus, now_s=now_s)
    plan, _ = policy.decide(snapshot, None)
    check(snapshot, plan)
    return plan


def granted(plan: Plan) -> list[str]:
    """Return the jobs that get GPUs, sorted."""
    return sorted(grant.job for grant in plan.grants)
