"""How long a decision takes, without any input or output."""

from __future__ import annotations

import random
import time

from bench.measure import QUICK, Figures, figures
from hermes_ops.core.guards import guarded
from hermes_ops.core.model import Gpu, Job, JobId, Phase, Point, Snapshot, SweepId
from hermes_ops.core.plan import check, diff
from hermes_ops.policies import make_policy

POLICIES = ("hermes", "fifo", "2d-las")
JOBS = (64, 1_000) if QUICK else (64, 1_000, 10_000)
JOBS_A_GPU = 10
POINTS = 30
SWEEPS = 4
NOW_S = 1_000_000.0


def run() -> Figures:
    """CPU milliseconds from the jobs to the actions, within the guards, as the controller does it.

    Every job is open and has a curve. In each round the snapshot is new and the memory is that of
    the decision before.
    """
    return {
        policy: {f"jobs_{jobs}_ms": _decision_ms(policy, jobs) for jobs in JOBS}
        for policy in POLICIES
    } | {"jobs_a_gpu": JOBS_A_GPU, "points_a_curve": POINTS}


def _decision_ms(name: str, jobs: int) -> Figures:
    policy = guarded(make_policy(name, {}), k=3.0, quanta=8)
    gpus, made = _world(jobs)
    _, memory = policy.decide(Snapshot(NOW_S, gpus, made), policy.initial())
    took = []
    for _ in range(3 if QUICK else 15):
        started_s = time.process_time()
        seen = Snapshot(NOW_S, gpus, made)
        plan, _ = policy.decide(seen, memory)
        check(seen, plan)
        diff(seen, plan)
        took.append((time.process_time() - started_s) * 1000.0)
    return figures(took, 3)


def _world(jobs: int) -> tuple[tuple[Gpu, ...], tuple[Job, ...]]:
    """A busy pool: a job on every GPU, nine waiting for it, of which some have waited too long."""
    chance = random.Random(1)
    gpus = max(2, jobs // JOBS_A_GPU)
    made = tuple(_job(number, gpus, chance) for number in range(jobs))
    return tuple(Gpu(index, f"node-{index // 8}") for index in range(gpus)), made


def _job(number: int, gpus: int, chance: random.Random) -> Job:
    sweep, running = SweepId(f"s{number % SWEEPS}"), number < gpus
    rate, since_s = chance.uniform(0.01, 0.3), NOW_S - chance.uniform(1.0, 120.0)
    service_gpu_s = chance.uniform(10.0, 20_000.0)
    return Job(
        JobId(f"{sweep}/{number}"),
        sweep,
        NOW_S - 5_000.0 + number / 1000,
        Phase.RUNNING if running else Phase.WAITING,
        gpus_held=(number,) if running else (),
        service_gpu_s=service_gpu_s,
        curve=tuple(Point(s, 2.0 / (1.0 + rate * s), 3.0 * s) for s in range(1, POINTS + 1)),
        started_s=since_s if running else None,
        waiting_since_s=None if running else since_s,
        steps_at_start=POINTS // 2,
        checkpoint_s=0.1,
        restore_s=0.4,
        startup_s=3.0,
    )
