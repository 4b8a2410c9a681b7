"""The controller's own share of slot time: 10,000 stub trials of a second."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from itertools import pairwise

from bench.measure import QUICK, Figures, figures
from hermes_ops.core.guards import guarded
from hermes_ops.core.model import Gpu, Job, JobId, Phase, Plan, Point, Snapshot, SweepId
from hermes_ops.core.plan import Action, Start
from hermes_ops.loop import run as loop
from hermes_ops.policies import make_policy

POLICIES = ("fifo", "frontrunner")
TRIALS = int(os.environ.get("BENCH_TRIALS", "200" if QUICK else "10000"))
SLOTS = 16
TRIAL_S = 1.0
NOBODY_S = 60.0
"""Seconds that the controller would sleep without events: never reached."""


@dataclass(slots=True)
class StubCluster:
    """A cluster whose trials are entries in a heap of ends: a start takes no time."""

    clock: Callable[[], float]
    jobs: dict[JobId, Job]
    ends: list[tuple[float, JobId]] = field(default_factory=list)

    def observe(self) -> Snapshot:
        """Return the pool; every trial whose second is over has ended."""
        now_s = self.clock()
        while self.ends and self.ends[0][0] <= now_s:
            _, job = heappop(self.ends)
            self.jobs[job] = replace(
                self.jobs[job],
                phase=Phase.ENDED,
                gpus_held=(),
                service_gpu_s=TRIAL_S,
                curve=(Point(1, 1.0 / (2.0 + len(self.ends)), TRIAL_S),),
            )
        return Snapshot(now_s, tuple(map(Gpu, range(SLOTS))), tuple(self.jobs.values()))

    def apply(self, snapshot: Snapshot, plan: Plan, actions: Sequence[Action]) -> None:  # noqa: ARG002
        """Start trials; none is long enough to be stopped."""
        now_s = self.clock()
        for action in actions:
            if isinstance(action, Start):
                self.jobs[action.job] = replace(
                    self.jobs[action.job],
                    phase=Phase.RUNNING,
                    gpus_held=action.gpus,
                    started_s=now_s,
                )
                heappush(self.ends, (now_s + TRIAL_S, action.job))

    def wait(self, until_s: float | None) -> None:
        """Wait until the next trial ends or the policy's next review."""
        due_s = self.ends[0][0] if self.ends else self.clock() + NOBODY_S
        due_s = due_s if until_s is None else min(due_s, until_s)
        time.sleep(max(0.0, due_s - self.clock()))

    def close(self) -> None:
        """Do nothing."""


def run() -> Figures:
    """Measure the seconds of the real loop, policy and guards over the minimum of the trials."""
    return {name: _measured(name) for name in POLICIES} | {
        "trials": TRIALS,
        "slots": SLOTS,
        "trial_s": TRIAL_S,
        "target_over_the_minimum": 0.10,
        "ray_tune_published": 0.144,
    }


def _measured(name: str) -> Figures:
    sweep = SweepId("s")
    jobs = {
        JobId(f"s/{n}"): Job(JobId(f"s/{n}"), sweep, 0.0, Phase.PENDING, total_steps=1)
        for n in range(TRIALS)
    }
    cluster, policy = StubCluster(time.monotonic, jobs), guarded(make_policy(name, {}))
    rounds: list[float] = []

    def over(snapshot: Snapshot) -> bool:
        rounds.append(snapshot.time_s)
        return not cluster.ends

    started_s, cpu_s = time.monotonic(), time.process_time()
    loop(policy, cluster, policy.initial(), over)
    took_s, used_s = time.monotonic() - started_s, time.process_time() - cpu_s
    least_s = -(-TRIALS // SLOTS) * TRIAL_S
    return {
        "took_s": round(took_s, 2),
        "least_s": least_s,
        "over_the_minimum": round(took_s / least_s - 1.0, 4),
        "cpu_share": round(used_s / took_s, 3),
        "decisions": len(rounds),
        "between_decisions_s": figures(b - a for a, b in pairwise(rounds)),
    }
