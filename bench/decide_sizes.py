"""How long a decision takes that gives each job a number of GPUs, without any input or output."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from typing import TypeVar

import numpy as np

from bench.measure import QUICK, Figures, figures
from hermes_ops.core.model import Gpu, Job, JobId, Phase, Point, Policy, Snapshot, SweepId
from hermes_ops.core.sizes import BatchRange, StepTime
from hermes_ops.core.speed_model import SpeedModel
from hermes_ops.policies import make_policy

POLICIES = ("doubling", "throughput", "afs", "saxena", "pollux", "elastic-frontrunner")
POOLS = ((1_000, 100),) if QUICK else ((1_000, 100), (10_000, 1_000))
GPUS_A_NODE = 8
NOW_S = 1_000_000.0
HELD = (1, 1, 1, 2, 2, 4, 8)
BATCHES = BatchRange(128, 4096, 32, 1024)
KINDS = {
    "small": SpeedModel(0.017, 0.0007, 0.13, 0.0026, 0.036, 0.0025, 2.4),
    "speech": SpeedModel(0.3, 0.002, 0.5, 0.01, 0.11, 0.003, 1.5),
    "large": SpeedModel(0.06, 0.0045, 0.33, 0.006, 0.08, 0.0026, 2.7),
    "linear": SpeedModel(0.01, 0.01, 0.02, 0.001, 0.01, 0.001, 1.0),
}
"""Four kinds of jobs with the parameters of their step times."""

M = TypeVar("M")


def run() -> Figures:
    """CPU milliseconds of one decision about a busy pool, as the policies know it when live.

    Each GPU is held by a job of 1 to 8 GPUs; the others wait, half of them have trained before.
    Jobs have measured step times and noise scales. `first`: the policy remembers nothing, fits of
    step times included; `next`: a minute later, with what it remembers then.
    """
    return {name: _figures(name) for name in POLICIES} | {"gpus_a_node": GPUS_A_NODE}


def _figures(name: str) -> Figures:
    policy = make_policy(name, {})
    results: Figures = {}
    for jobs, gpus in POOLS:
        pool, world = sized_world(jobs, gpus)
        started_s = time.process_time()
        _, memory = policy.decide(Snapshot(NOW_S, pool, world), policy.initial())
        results[f"jobs_{jobs}_first_ms"] = round(1000 * (time.process_time() - started_s), 1)
        results[f"jobs_{jobs}_next_ms"] = figures(_decisions_ms(policy, pool, world, memory), 1)
    return results


def _decisions_ms(
    policy: Policy[M], pool: tuple[Gpu, ...], jobs: tuple[Job, ...], memory: M
) -> Iterator[float]:
    for number in range(3 if QUICK else 15):
        snapshot = Snapshot(NOW_S + 60.0 * (number + 1), pool, jobs)
        started_s = time.process_time()
        policy.decide(snapshot, memory)
        yield (time.process_time() - started_s) * 1000.0


def sized_world(jobs: int, gpus: int) -> tuple[tuple[Gpu, ...], tuple[Job, ...]]:
    """Return a pool of which each GPU is held, and its jobs."""
    chance = random.Random(1)
    pool = tuple(Gpu(index, f"node-{index // GPUS_A_NODE}") for index in range(gpus))
    free, world = 0, []
    for number in range(jobs):
        size = min(chance.choice(HELD), gpus - free)
        size = min(size, GPUS_A_NODE - free % GPUS_A_NODE)
        world.append(_job(number, tuple(range(free, free + size)), chance))
        free += size
    return pool, tuple(world)


def _job(number: int, held: tuple[int, ...], chance: random.Random) -> Job:
    name = chance.choice(tuple(KINDS))
    began = bool(held) or chance.random() < 0.5
    epochs = chance.randint(1, 20) if began else 0
    return Job(
        JobId(f"s{number % 4}/{number}"),
        SweepId(f"s{number % 4}"),
        NOW_S - 50_000.0 + number,
        Phase.RUNNING if held else Phase.WAITING,
        max_gpus=chance.choice((8, 16, 32)),
        gpus_held=held,
        batch_range=BATCHES,
        requested_batch=128,
        model_name=name,
        total_steps=30,
        service_gpu_s=chance.uniform(10.0, 20_000.0) if began else 0.0,
        curve=tuple(Point(n, 1 / n, 60.0 * n) for n in range(1, epochs + 1)),
        step_times=tuple(_steps(KINDS[name], len(held) or 1, chance)) if began else (),
        noise_scale=chance.uniform(100.0, 10_000.0) if began else None,
        segments=chance.randint(1, 4) if began else 0,
        started_s=NOW_S - 300.0 if held else None,
        waiting_since_s=None if held else NOW_S - 600.0,
    )


def _steps(model: SpeedModel, size: int, chance: random.Random) -> Iterator[StepTime]:
    for gpus in {1, size}:
        local = float(chance.choice((32, 64, 128)))
        columns = (np.array([float(gpus)]), np.array([1.0]), np.array([local]))
        seconds, compute_s = model.pass_s(*columns)[0], model.compute_s(columns[2])[0]
        yield StepTime(gpus, float(seconds), 1, int(local), float(compute_s))
