"""The scenario of elastic scaling with batches: 40 GPUs, decisions every ten minutes (Saxena)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import ceil
from random import Random

from hermes_ops.core.model import JobId
from hermes_ops.core.sizes import BatchRange, StepTime
from hermes_ops.simulator.workload import Costs, Pace, Placement, Work, Workload
from hermes_ops.simulator.workload_source import DrawnWorkload

LAYOUT = "40"
MOST_GPUS = 10
WINDOW_S = 8 * 3600.0
ROUND_S = 600.0
CHANGE_S = 30.0
LENGTH_S = (1800.0, 5400.0)
LEAST_BATCH, MOST_BATCH, LOCAL_BATCH = 32, 320, 32
BATCHES = BatchRange(LEAST_BATCH, MOST_BATCH, most_local=LOCAL_BATCH)


@dataclass(frozen=True, slots=True)
class RingTraining:
    """A step takes `compute_s` a sample of the busiest GPU, and `reduce_s` x 2 (g - 1) / g.

    A unit of work is a second on one GPU with the least batch: the number of samples that a job
    needs does not depend on its batch. More samples than fit on a GPU take further passes.
    """

    compute_s: float
    reduce_s: float

    @property
    def sizes(self) -> tuple[int, ...]:
        """1 to 10 GPUs."""
        return tuple(range(1, MOST_GPUS + 1))

    @property
    def batch_range(self) -> BatchRange:
        """32 to 320 samples, at most 32 on a GPU at a time."""
        return BATCHES

    def step_s(self, gpus: int, batch: int) -> float:
        """Return the seconds of a step."""
        reduction = 2.0 * (gpus - 1) / gpus * self.reduce_s
        return self.compute_s * ceil(batch / gpus) + reduction

    def pace(self, placement: Placement, epoch: int, batch: int | None) -> Pace:  # noqa: ARG002
        """Return the pace; a job that may choose takes the least batch."""
        gpus, total = sum(placement), batch or LEAST_BATCH
        seconds = self.step_s(gpus, total)
        base = LEAST_BATCH / self.step_s(1, LEAST_BATCH)
        local = ceil(total / gpus)
        step = StepTime(gpus, seconds, len(placement), local, self.compute_s * local)
        return Pace(total / seconds / base, step, total)

    def noise_scale(self, epoch: int) -> None:  # noqa: ARG002 - it measures none
        """Return None."""
        return

    def profile(self) -> tuple[StepTime, ...]:
        """Return the step times that a job declares: on one GPU with two batches, and on two."""
        return tuple(
            StepTime(gpus, self.step_s(gpus, gpus * local), 1, local, self.compute_s * local)
            for gpus, local in ((1, LOCAL_BATCH // 2), (1, LOCAL_BATCH), (2, LOCAL_BATCH))
        )


KINDS: Mapping[str, RingTraining] = {
    "compute": RingTraining(0.010, 0.020),
    "balanced": RingTraining(0.005, 0.060),
    "communication": RingTraining(0.002, 0.160),
}
"""Jobs that compute, that communicate, and between: our choice; the paper's figures are not public.

Seconds of computing a sample, and of the all-reduce.
"""


def _poisson(gap_s: float) -> Callable[[Random], list[float]]:
    def arrivals(rng: Random) -> list[float]:
        times: list[float] = []
        now_s = rng.expovariate(1 / gap_s)
        while now_s < WINDOW_S:
            times.append(now_s)
            now_s += rng.expovariate(1 / gap_s)
        return times

    return arrivals


def _bursts(rng: Random) -> list[float]:
    hours = int(WINDOW_S // 3600)
    return sorted(hour * 3600.0 + rng.uniform(0, 600.0) for hour in range(hours) for _ in range(30))


ARRIVALS: Mapping[str, Callable[[Random], list[float]]] = {
    "low": _poisson(300.0),
    "high": _poisson(90.0),
    "extreme": _poisson(45.0),
    "bursty": _bursts,
}


@dataclass(frozen=True, slots=True)
class SaxenaSource:
    """The jobs of one arrival pattern by seed; `drops`: a job that does not fit at once leaves.

    Source: the settings of Saxena et al., MASCOTS 2020, as far as they are public; the kinds of
    jobs, their lengths (on one GPU, uniform from 30 to 90 minutes) and the arrivals are ours.
    """

    pattern: str
    drops: bool
    varies: bool = True

    @property
    def name(self) -> str:
        """The workload's name on the command line."""
        return f"saxena-{self.pattern}-{'drop' if self.drops else 'queue'}"

    def draw(self, seed: int) -> DrawnWorkload:
        """Draw the arrivals, then the kind, length and requested batch of each job."""
        rng = Random(seed)  # noqa: S311 - a seeded simulation
        times = ARRIVALS[self.pattern](rng)
        jobs = tuple(_job(rng, number, at_s) for number, at_s in enumerate(times))
        return DrawnWorkload(
            Workload(self.name, jobs, round_s=ROUND_S, window_s=WINDOW_S, drops=self.drops)
        )


def _job(rng: Random, number: int, submitted_s: float) -> Work:
    kind = rng.choice(sorted(KINDS))
    length_s = rng.uniform(*LENGTH_S)
    batch = LEAST_BATCH * rng.randint(1, MOST_BATCH // LEAST_BATCH)
    training = KINDS[kind]
    gpus = ceil(batch / LOCAL_BATCH)
    return Work(
        JobId(f"job/{number}"),
        submitted_s,
        length_s,
        gpus,
        model_name=kind,
        costs=Costs(startup_s=CHANGE_S),
        training=training,
        batch=batch,
        exclusive_s=CHANGE_S + length_s / training.pace((gpus,), 0, batch).rate,
        step_times=training.profile(),
    )
