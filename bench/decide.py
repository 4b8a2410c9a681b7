"""How long a decision takes, without any input or output."""

from __future__ import annotations

import random
import time

from bench.measure import QUICK, Figures, figures
from hermes_ops.core.guards import guarded
from hermes_ops.core.model import Gpu, Job, JobId, Phase, Point, Snapshot, SweepId
from hermes_ops.core.plan import check, diff
from hermes_ops.policies import make_policy

JOBS = (64, 1_000) if QUICK else (64, 1_000, 10_000)
POINTS = 30
JOBS_A_GPU = 16
SWEEPS = 4
NOW_S = 1_000_000.0


def run() -> Figures:
    """CPU milliseconds of decide, check and diff within the guards, as the controller does it."""
    return {
        policy: {f"jobs_{jobs}_ms": _decision_ms(policy, jobs) for jobs in JOBS}
        for policy in ("hermes", "fifo")
    } | {"jobs_a_gpu": JOBS_A_GPU, "points_a_curve": POINTS}


def _decision_ms(name: str, jobs: int) -> Figures:
    policy = guarded(make_policy(name, {}), k=3.0, quanta=8)
    seen = _snapshot(jobs)
    _, memory = policy.decide(seen, policy.initial())
    took = []
    for _ in range(3 if QUICK else 15):
        started_s = time.process_time()
        plan, _ = policy.decide(seen, memory)
        check(seen, plan)
        diff(seen, plan)
        took.append((time.process_time() - started_s) * 1000.0)
    return figures(took, 3)


def _snapshot(jobs: int) -> Snapshot:
    """A busy pool: a job on every GPU, another waiting behind each, the others not begun."""
    chance = random.Random(1)
    gpus = max(2, jobs // JOBS_A_GPU)
    made = tuple(_job(number, gpus, chance) for number in range(jobs))
    return Snapshot(NOW_S, tuple(Gpu(index) for index in range(gpus)), made)


def _job(number: int, gpus: int, chance: random.Random) -> Job:
    sweep = SweepId(f"s{number % SWEEPS}")
    name, submitted_s = JobId(f"{sweep}/{number}"), NOW_S - 5_000.0 + number / 1000
    if number >= 2 * gpus:
        return Job(name, sweep, submitted_s, Phase.PENDING)
    running = number < gpus
    rate = chance.uniform(0.01, 0.3)
    return Job(
        name,
        sweep,
        submitted_s,
        Phase.RUNNING if running else Phase.WAITING,
        gpus_held=(number,) if running else (),
        curve=tuple(Point(s, 2.0 / (1.0 + rate * s), 3.0 * s) for s in range(1, POINTS + 1)),
        started_s=NOW_S - chance.uniform(1.0, 90.0) if running else None,
        waiting_since_s=None if running else NOW_S - chance.uniform(1.0, 90.0),
        steps_at_start=POINTS // 2,
        checkpoint_s=0.1,
        restore_s=0.4,
        startup_s=3.0,
    )
