"""Jobs of a trace whose batch may be chosen: seconds of a step by GPUs and batch, as declared."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import ceil, inf
from typing import NamedTuple

import numpy as np

from hermes_ops.core.goodput import efficiency
from hermes_ops.core.sizes import BatchRange, StepTime
from hermes_ops.errors import ConfigError, Problem
from hermes_ops.simulator.workload import Pace, Placement

COLUMN = "step_times"
EXAMPLE = "1x32:0.1 1x256:0.7 2x32:0.06 2x256:0.4"
_ENTRY = re.compile(r"([1-9][0-9]{0,8})x([1-9][0-9]{0,8}):([-+.0-9eE]+)")


class DeclaredStep(NamedTuple):
    """The seconds of a step of `batch` samples, over all GPUs."""

    gpus: int
    batch: int
    seconds: float

    @property
    def place(self) -> str:
        """The GPUs and the batch, as in a cell."""
        return f"{self.gpus}x{self.batch}"


@dataclass(frozen=True)
class DeclaredSteps:
    """A training model of declared steps, ascending; its user requests `gpus` and `batch`.

    Each number of GPUs has a step of the least batch and one of the greatest, the same for all;
    between two declared batches the seconds are linear in the samples. A unit of work is a second
    with the requested GPUs and batch. With a `noise` scale a sample of a larger batch makes less
    progress, by `efficiency`, and a job that may choose takes the declared batch with the greatest
    pace. Without one each sample makes the same progress, and the job keeps the requested batch.
    Where the GPUs are makes no difference.
    """

    steps: tuple[DeclaredStep, ...]
    gpus: int
    batch: int
    noise: float | None = None

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """The numbers of GPUs, ascending."""
        return tuple(dict.fromkeys(step.gpus for step in self.steps))

    @cached_property
    def batch_range(self) -> BatchRange:
        """From the least declared batch to the greatest."""
        batches = [step.batch for step in self.steps]
        return BatchRange(min(batches), max(batches))

    @property
    def step_times(self) -> tuple[StepTime, ...]:
        """The declared steps as a job measures them."""
        return tuple(StepTime(g, seconds, 1, ceil(b / g)) for g, b, seconds in self.steps)

    def seconds(self, gpus: int, batch: int) -> float:
        """Return the seconds of a step with one of the sizes and a batch of the range."""
        batches, seconds = zip(*(s[1:] for s in self.steps if s.gpus == gpus), strict=True)
        return float(np.interp(batch, batches, seconds))

    def pace(self, placement: Placement, epoch: int, batch: int | None) -> Pace:  # noqa: ARG002 - interface
        """Return the pace, 1 with the requested GPUs and batch."""
        gpus = sum(placement)
        total = self.own_batch(gpus) if batch is None else batch
        step = StepTime(gpus, self.seconds(gpus, total), len(placement), ceil(total / gpus))
        return Pace(self._speed(gpus, total) / self._speed(self.gpus, self.batch), step, total)

    def noise_scale(self, epoch: int) -> float | None:  # noqa: ARG002 - the same in all epochs
        """Return the declared noise scale, in samples; None: it is not known."""
        return self.noise

    def own_batch(self, gpus: int) -> int:
        """Return the batch that the job chooses by itself; of equals the smallest."""
        if self.noise is None:
            return self.batch
        batches = (step.batch for step in self.steps if step.gpus == gpus)
        return max(batches, key=lambda batch: self._speed(gpus, batch))

    def _speed(self, gpus: int, batch: int) -> float:
        """Return the progress a second, in samples of the least batch."""
        progress = float(batch)
        if self.noise is not None:
            least = self.steps[0].batch
            progress *= float(efficiency(np.array(progress), least, self.noise))
        return progress / self.seconds(gpus, batch)


@lru_cache(maxsize=1 << 10)  # many jobs of a trace have the same cell
def parse_steps(text: str) -> tuple[DeclaredStep, ...]:
    """Return the steps of a cell such as `1x32:0.1 1x256:0.7`: GPUs x samples a step : seconds.

    Raise ConfigError, with one problem, for text of another form, a place that is named twice,
    seconds that are not above 0, a number of GPUs without the least or the greatest batch, and
    batches with fewer samples than GPUs.
    """
    steps = tuple(sorted(_entries(text)))
    _check_once(steps)
    _check_ends(steps)
    least, most = steps[0].batch, steps[-1].gpus
    if least < most:
        found, allowed = f"a batch of {least} on {most} GPUs", "at least one sample for each GPU"
        raise _refusal(found, allowed, "raise the least batch, or remove the larger sizes")
    return steps


def _entries(text: str) -> Iterator[DeclaredStep]:
    entries = text.split()
    if not entries:
        raise _refusal("no entry", f"as {EXAMPLE}", "add the entries")
    for entry in entries:
        match = _ENTRY.fullmatch(entry)
        try:
            seconds = float(match[3]) if match else 0.0
        except ValueError:
            match, seconds = None, 0.0
        if match is None:
            allowed = f"GPUs x samples a step : seconds, as {EXAMPLE}"
            raise _refusal(repr(entry), allowed, "correct the entry")
        if not 0 < seconds < inf:
            raise _refusal(repr(entry), "seconds above 0", "correct the seconds")
        yield DeclaredStep(int(match[1]), int(match[2]), seconds)


def _check_once(steps: tuple[DeclaredStep, ...]) -> None:
    places = [step.place for step in steps]
    twice = next((p for p in places if places.count(p) > 1), None)
    if twice is not None:
        raise _refusal(f"{twice} twice", "each number of GPUs and batch once", "remove one of them")


def _check_ends(steps: tuple[DeclaredStep, ...]) -> None:
    """Refuse a number of GPUs that lacks an end of the range: nothing tells its seconds there."""
    batches = [step.batch for step in steps]
    ends, places = (min(batches), max(batches)), {step.place for step in steps}
    for gpus in dict.fromkeys(step.gpus for step in steps):
        lacking = dict.fromkeys(p for end in ends if (p := f"{gpus}x{end}") not in places)
        if lacking:
            allowed = f"on each number of GPUs the least and the greatest batch, {ends[0]}"
            allowed = f"{allowed} and {ends[1]}"
            raise _refusal(f"no {' and no '.join(lacking)}", allowed, "add what lacks")


def _refusal(found: str, allowed: str, fix: str) -> ConfigError:
    return ConfigError(COLUMN, (Problem(COLUMN, found, allowed, fix),))
