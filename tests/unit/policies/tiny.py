"""Tiny worlds for the policies of sweeps: one sweep "s", steps of 2 s, it is second 100."""

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


def trial(number: int, *losses: float, gpu: int | None = None, **facts: Any) -> Job:
    """A trial with these losses: on a GPU, else waiting, or pending when it has none."""
    phase = Phase.RUNNING if gpu is not None else Phase.WAITING if losses else Phase.PENDING
    curve = tuple(Point(n, loss, 2.0 * n) for n, loss in enumerate(losses, start=1))
    held = () if gpu is None else (gpu,)
    known: dict[str, Any] = {"sweep": SweepId("s"), "submitted_s": 0.0, "phase": phase}
    known |= {"gpus_held": held, "curve": curve}
    return Job(JobId(f"s/{number}"), **(known | facts))


def decided(policy: Policy[None], *jobs: Job, gpus: int = 1, now_s: float = 100.0) -> Plan:
    """What a policy without a memory decides, which must be possible."""
    snapshot = Snapshot(now_s, tuple(Gpu(n) for n in range(gpus)), jobs)
    found, _ = policy.decide(snapshot, None)
    check(snapshot, found)
    return found


def granted(found: Plan) -> list[str]:
    """Who gets GPUs, sorted."""
    return sorted(grant.job for grant in found.grants)
