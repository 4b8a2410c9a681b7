"""Sweeps of recorded curves whose trials may take several GPUs, as fast as steps were measured.

The curves are of trials on one GPU. On more GPUs a trial is faster by the ratio of the step times
that were measured of an application of Pollux' artefact, all with the same samples a step: more
GPUs change no loss. Our choice: `cifar10`, with its initial batch of 128 unless another one is
asked for.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import ceil
from pathlib import Path

import numpy as np

from hermes_ops.core.sizes import BatchRange, StepTime
from hermes_ops.errors import ConfigError, Problem
from hermes_ops.simulator.pollux_data import Application, read_pollux, written_ns
from hermes_ops.simulator.pollux_workload import StepTimes
from hermes_ops.simulator.workload import Pace, Placement, Work
from hermes_ops.simulator.workload_source import DerivedSource, DrawnWorkload

APPLICATION = "cifar10"
"""The application whose speed-ups the trials have."""


@dataclass(slots=True)
class SpeedUps:
    """How much faster than on one GPU a step of `batch` samples is; 1 on one GPU."""

    application: Application
    batch: int
    times: StepTimes = field(init=False)
    known: dict[Placement, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.times = StepTimes(self.application.steps)

    def on(self, placement: Placement) -> float:
        """Return the speed-up on these GPUs; raise ConfigError where no step was measured."""
        if placement not in self.known:
            self.known[placement] = self._seconds((1,)) / self._seconds(placement)
        return self.known[placement]

    def _seconds(self, placement: Placement) -> float:
        local = ceil(self.batch / sum(placement))
        seconds = float(self.times.seconds(placement, np.array([local]))[0][0])
        if seconds > 0:
            return seconds
        where = f"{self.application.name} on {'+'.join(map(str, placement))} GPUs"
        found = f"no step time with {local} samples a GPU"
        problem = Problem(where, found, "one that was measured", "choose other sizes or a batch")
        raise ConfigError("the size of a trial", (problem,))


@dataclass(frozen=True, slots=True)
class SizedTraining:
    """A trial of a recorded curve on several GPUs; its unit of work is a second on one GPU.

    What it measures of a size is the mean time of an epoch, which is a step of its curve:
    `epoch_s` on one GPU.
    """

    sizes: tuple[int, ...]
    speed_ups: SpeedUps = field(compare=False)
    epoch_s: float
    batch_range: BatchRange | None = None

    def pace(self, placement: Placement, epoch: int, batch: int | None) -> Pace:  # noqa: ARG002 - interface
        """Return the speed-up on these GPUs."""
        rate = self.speed_ups.on(placement)
        return Pace(rate, StepTime(sum(placement), self.epoch_s / rate, len(placement)))

    def noise_scale(self, epoch: int) -> float | None:  # noqa: ARG002 - interface
        """Return None: the batch never changes."""
        return None


@dataclass(frozen=True, slots=True)
class SizedSweepSource(DerivedSource):
    """The sweeps of another source, whose trials may take `sizes` GPUs, ascending.

    A policy of one size gives each the smallest of them. `batch` None: the initial one of the
    application. `folder` has the step times, in the form of `examples/elastic`.
    """

    folder: Path
    sizes: tuple[int, ...]
    batch: int | None = None

    @property
    def name(self) -> str:
        """The other source's name, and the numbers of GPUs."""
        return f"{self.source.name}, trials of {' or '.join(map(str, self.sizes))} GPUs"

    def draw(self, seed: int) -> DrawnWorkload:
        """Draw the other source's sweep; raise ConfigError if a size has no step time."""
        drawn = self.source.draw(seed)
        speed_ups = _speed_ups(self.folder.absolute(), written_ns(self.folder), self.batch)
        for size in self.sizes:
            speed_ups.on((size,))
        jobs = tuple(_sized(work, self.sizes, speed_ups) for work in drawn.workload.jobs)
        return replace(drawn, workload=replace(drawn.workload, jobs=jobs))


def _sized(work: Work, sizes: tuple[int, ...], speed_ups: SpeedUps) -> Work:
    epoch_s = work.seconds / (work.total_steps or 1)
    alone_s = work.seconds / speed_ups.on((sizes[0],))
    training = SizedTraining(sizes, speed_ups, epoch_s)
    return replace(work, gpus=sizes[0], training=training, exclusive_s=alone_s)


@lru_cache(maxsize=4)
def _speed_ups(folder: Path, written_ns: int, batch: int | None) -> SpeedUps:  # noqa: ARG001
    applications = read_pollux(folder).applications
    if APPLICATION not in applications:
        allowed = ", ".join(sorted(applications))
        problem = Problem("application", APPLICATION, allowed, "add its lines")
        raise ConfigError(str(folder), (problem,))
    application = applications[APPLICATION]
    return SpeedUps(application, batch or application.batches.initial)


def parse_sizes(text: str) -> tuple[int, ...]:
    """Return the numbers of GPUs of "2", "1-4" or "1,2,4", ascending; ValueError for other text."""
    sizes: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.partition("-")
        low, high = int(first), int(last if dash else first)
        if not 1 <= low <= high:
            raise ValueError(f"{part!r} is no range")
        sizes.update(range(low, high + 1))
    return tuple(sorted(sizes))
