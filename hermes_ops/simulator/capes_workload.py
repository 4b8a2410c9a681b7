"""The jobs of Capes et al.: one network on 1, 2, 4 or 8 GPUs, arriving at random.

Source: Capes, Raheja, Kemertas, Mohomed, "Dynamic Scheduling of MPI-based Distributed Deep Learning
Training Jobs" (arXiv 1908.08082), section 4 and table 3: ResNet-110 on CIFAR-10, 64 GPUs, Poisson
arrivals of three intensities. The hours alone on 1, 2, 4 and 8 GPUs are those of its column without
contention. Our choices: a job's progress is a part of the whole that adds up over its sizes; the
first job arrives after a gap too; 8 nodes of 8 GPUs.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from math import exp, log
from random import Random

from hermes_ops.core.model import JobId, Point
from hermes_ops.core.sizes import BatchRange, StepTime
from hermes_ops.simulator.workload import Costs, Pace, Placement, Work, Workload
from hermes_ops.simulator.workload_source import DrawnWorkload

HOURS = ((1, 6.37), (2, 3.78), (4, 2.21), (8, 1.40))
"""GPUs, and the hours that a job of length 1 takes on them."""

STEPS = 1_000
"""Steps of a job of length 1. A step is a part of its training, whatever its GPUs."""

POINTS = 20
"""Points of a job's curve: what a policy sees of its progress."""

MOVE_S = 10.0
"""Seconds of every restart, on other GPUs or on the same; the first start costs nothing."""

CONTENTION = {"extreme": (250.0, 206), "moderate": (500.0, 114), "none": (1_000.0, 44)}
"""Mean seconds between arrivals, and the number of jobs."""

REQUESTS = {"eight": 8, "four": 4, "two": 2, "one": 1}
"""The GPUs that users request in the four fixed rows of table 3."""

LAYOUT = "8x8"
"""Nodes x GPUs."""

LENGTHS = (0.25, 4.0)
"""Least and greatest length of unequal jobs, before they are scaled to a mean of 1."""


@dataclass(frozen=True, slots=True)
class ResNet110:
    """The pace of the network by its number of GPUs; its unit of work is the whole training."""

    sizes: tuple[int, ...] = tuple(gpus for gpus, _ in HOURS)
    batch_range: BatchRange | None = None

    def pace(self, placement: Placement, epoch: int, batch: int | None) -> Pace:  # noqa: ARG002 - interface
        """Return the pace; where the GPUs are makes no difference."""
        gpus = sum(placement)
        seconds = 3_600.0 * dict(HOURS)[gpus]
        return Pace(1 / seconds, StepTime(gpus, seconds / STEPS, len(placement)))

    def noise_scale(self, epoch: int) -> float | None:  # noqa: ARG002 - interface
        """Return None: the paper does not measure it."""
        return None


@dataclass(frozen=True, slots=True)
class CapesSource:
    """The jobs of table 3 for a contention of CONTENTION, each requesting `gpus`.

    `unequal`: lengths are log-uniform over LENGTHS, then scaled so that the work of all is the same
    (our choice; in the paper all jobs are equal).
    """

    contention: str
    gpus: int = 8
    unequal: bool = False
    varies: bool = True

    @property
    def name(self) -> str:
        """The name of the workload."""
        request = next(name for name, gpus in REQUESTS.items() if gpus == self.gpus)
        parts = ["capes", self.contention]
        parts += ["unequal"] if self.unequal else []
        parts += [request] if self.gpus != max(REQUESTS.values()) else []
        return "-".join(parts)

    def draw(self, seed: int) -> DrawnWorkload:
        """Draw the arrivals, then the lengths, of this seed."""
        gap_s, number = CONTENTION[self.contention]
        random = Random(seed)  # noqa: S311 - a simulation
        at_s, arrivals = 0.0, []
        for _ in range(number):
            at_s += random.expovariate(1 / gap_s)
            arrivals.append(at_s)
        lengths = _lengths(random, number) if self.unequal else [1.0] * number
        jobs = (
            _job(index, at_s, length, self.gpus)
            for index, (at_s, length) in enumerate(zip(arrivals, lengths, strict=True), start=1)
        )
        return DrawnWorkload(Workload(self.name, tuple(jobs)))


def sources() -> tuple[CapesSource, ...]:
    """Return the source of each contention, request, and of equal and unequal jobs."""
    kinds = product(CONTENTION, REQUESTS.values(), (False, True))
    return tuple(CapesSource(*kind) for kind in kinds)


def _lengths(random: Random, number: int) -> list[float]:
    low, high = map(log, LENGTHS)
    drawn = [exp(random.uniform(low, high)) for _ in range(number)]
    mean = sum(drawn) / number
    return [length / mean for length in drawn]


def _job(index: int, at_s: float, length: float, gpus: int) -> Work:
    steps = max(POINTS, round(STEPS * length))
    marks = [round(steps * point / POINTS) for point in range(1, POINTS + 1)]
    curve = tuple(Point(mark, falling_loss(mark / steps), length * mark / steps) for mark in marks)
    return Work(
        JobId(f"capes/{index}"),
        at_s,
        length,
        gpus=gpus,
        model_name="resnet110",
        total_steps=steps,
        curve=curve,
        costs=Costs(restore_s=MOVE_S),
        training=ResNet110(),
        exclusive_s=length * 3_600.0 * dict(HOURS)[gpus],
    )


def falling_loss(progress: float) -> float:
    """Return a loss that falls as in the paper's equation 1; its constants are our choice."""
    return 1 / (2.0 * progress + 0.5) + 0.1
