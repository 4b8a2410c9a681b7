"""How long a decision takes, without any input or output."""

from __future__ import annotations

import random
import time
from dataclasses import replace
from typing import TypeVar

from bench.measure import QUICK, Figures, figures
from hermes_ops.core.guards import QUANTA, guarded
from hermes_ops.core.model import Gpu, Job, JobId, Phase, Plan, Point, Policy, Snapshot, SweepId
from hermes_ops.core.plan import check, diff
from hermes_ops.policies import make_policy

POLICIES = ("hermes", "fifo", "2d-las")
JOBS = (64, 1_000) if QUICK else (64, 1_000, 10_000)
JOBS_A_GPU = 10
POINTS = 30
SWEEPS = 4
NOW_S = 1_000_000.0
LATER_S = 15.0
STEP_S = 3.0
STARTUP_S, RESTORE_S, CHECKPOINT_S = 3.0, 0.4, 0.1
QUANTUM_S = 4 * (STARTUP_S + RESTORE_S + CHECKPOINT_S)

M = TypeVar("M")


def run() -> Figures:
    """CPU milliseconds from the jobs to the actions, within the guards, as the controller does it.

    Every job is open and has a curve; in each round the snapshot is new. `first`: the controller
    has just started, it remembers nothing and changes half the pool. `next`: that was applied, and
    a while later it is asked again.
    """
    return {name: _figures(name) for name in POLICIES} | {
        "jobs_a_gpu": JOBS_A_GPU,
        "points_a_curve": POINTS,
    }


def _figures(name: str) -> Figures:
    policy, results = guarded(make_policy(name, {})), {}
    for jobs in JOBS:
        gpus, world_jobs = world(jobs)
        seen = Snapshot(NOW_S, gpus, world_jobs)
        plan, memory = policy.decide(seen, policy.initial())
        later = Snapshot(NOW_S + LATER_S, gpus, applied(seen, plan))
        results[f"jobs_{jobs}_first_ms"] = decision_ms(policy, seen, policy.initial())
        results[f"jobs_{jobs}_next_ms"] = decision_ms(policy, later, memory)
    return results


def decision_ms(policy: Policy[M], state: Snapshot, memory: M) -> Figures:
    """Return the CPU milliseconds from the jobs of the snapshot to the actions."""
    took = []
    for _ in range(3 if QUICK else 15):
        started_s = time.process_time()
        seen = Snapshot(state.time_s, state.gpus, state.jobs)
        plan, _ = policy.decide(seen, memory)
        diff(seen, plan, check(seen, plan))
        took.append((time.process_time() - started_s) * 1000.0)
    return figures(took, 3)


def applied(seen: Snapshot, plan: Plan) -> tuple[Job, ...]:
    """Return the jobs after the plan: those with GPUs have trained until the next look."""
    gpus = {grant.job: grant.gpus for grant in plan.grants}
    return tuple(_trained(seen, job, gpus.get(job.id, ())) for job in seen.jobs)


def _trained(seen: Snapshot, job: Job, gpus: tuple[int, ...]) -> Job:
    if not gpus:
        since_s = seen.time_s if job.gpus_held else job.waiting_since_s
        return replace(
            job, phase=Phase.WAITING, gpus_held=(), started_s=None, waiting_since_s=since_s
        )
    rate = 2.0 / job.curve[0].loss - 1.0
    last = len(job.curve) + int(LATER_S / STEP_S)
    new = tuple(_point(step, rate) for step in range(len(job.curve) + 1, last + 1))
    keeps_gpus = job.gpus_held == gpus
    return replace(
        job,
        phase=Phase.RUNNING,
        gpus_held=gpus,
        service_gpu_s=job.service_gpu_s + LATER_S,
        curve=(*job.curve, *new),
        started_s=job.started_s if keeps_gpus else seen.time_s,
        waiting_since_s=None,
        steps_at_start=job.steps_at_start if keeps_gpus else len(job.curve),
    )


def _point(step: int, rate: float) -> Point:
    return Point(step, 2.0 / (1.0 + rate * step), STEP_S * step)


def world(jobs: int) -> tuple[tuple[Gpu, ...], tuple[Job, ...]]:
    """Return a busy pool: nine jobs wait for each GPU; one in a hundred has waited too long."""
    chance = random.Random(1)
    gpus = max(2, jobs // JOBS_A_GPU)
    world_jobs = tuple(_job(number, gpus, chance) for number in range(jobs))
    return tuple(Gpu(index, f"node-{index // 8}") for index in range(gpus)), world_jobs


def _job(number: int, gpus: int, chance: random.Random) -> Job:
    sweep, running = SweepId(f"s{number % SWEEPS}"), number < gpus
    rate, trains_s = chance.uniform(0.01, 0.3), chance.uniform(1.0, 113.0)
    waits_s = chance.uniform(1.0, 1.01 * QUANTA * (JOBS_A_GPU - 1) * QUANTUM_S)
    service_gpu_s = chance.uniform(10.0, 20_000.0)
    return Job(
        JobId(f"{sweep}/{number}"),
        sweep,
        NOW_S - 5_000.0 + number / 1000,
        Phase.RUNNING if running else Phase.WAITING,
        gpus_held=(number,) if running else (),
        service_gpu_s=service_gpu_s,
        curve=tuple(_point(step, rate) for step in range(1, POINTS + 1)),
        started_s=NOW_S - trains_s if running else None,
        waiting_since_s=None if running else NOW_S - waits_s,
        steps_at_start=POINTS // 2,
        checkpoint_s=CHECKPOINT_S,
        restore_s=RESTORE_S,
        startup_s=STARTUP_S,
    )
