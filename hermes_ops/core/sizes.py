"""How many GPUs a job may take, and how many samples a step, as frozen facts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil, inf

from hermes_ops.errors import ConfigError, Problem


@dataclass(frozen=True, slots=True)
class StepTime:
    """A measured time: `seconds` of one pass over `local_batch` samples on each GPU.

    It contains the all-reduce; `compute_s` is the part that is not communication, None where that
    was not measured. With gradients accumulated over further passes a step takes
    `seconds + passes x compute_s`.
    """

    gpus: int
    seconds: float
    nodes: int = 1
    local_batch: int | None = None
    compute_s: float | None = None


@dataclass(frozen=True, slots=True)
class BatchRange:
    """The batches a job may train with, in samples.

    `initial` to `most` a step, over all GPUs; on one GPU at least `least_local` and at most
    `most_local` in one pass. More a GPU are accumulated over several passes.
    """

    initial: int
    most: int
    least_local: int = 1
    most_local: int | None = None

    def __post_init__(self) -> None:
        problems = tuple(self._problems())
        if problems:
            raise ConfigError("the range of batches", problems)

    def _problems(self) -> Iterable[Problem]:
        if self.initial < 1:
            yield Problem("initial", str(self.initial), "at least 1", "correct it")
        if self.most < self.initial:
            allowed = f"at least the initial batch, {self.initial}"
            yield Problem("most", str(self.most), allowed, "raise it")
        if self.least_local < 1:
            yield Problem("least_local", str(self.least_local), "at least 1", "correct it")
        if self.most_local is not None and self.most_local < self.least_local:
            allowed = f"at least least_local, {self.least_local}"
            yield Problem("most_local", str(self.most_local), allowed, "raise it")
        elif self.most < self.least_local:
            allowed = f"at least least_local, {self.least_local}: no number of GPUs allows it"
            yield Problem("most", str(self.most), allowed, "raise it, or lower least_local")

    @property
    def most_gpus(self) -> int:
        """The largest number of GPUs on which each still has `least_local` samples."""
        return max(1, self.most // self.least_local)

    def allows(self, batch: int, gpus: int) -> bool:
        """Return whether a step over `gpus` GPUs may have `batch` samples."""
        least = max(self.initial, self.least_local * gpus) if gpus > 1 else self.initial
        return least <= batch <= self.most

    def passes(self, batch: int, gpus: int) -> int:
        """Return the least number of passes (at least 1) in which each GPU gets its samples."""
        most_local = inf if self.most_local is None else self.most_local
        return max(1, ceil(ceil(batch / gpus) / most_local))


def powers_of_two(least: int, most: int) -> tuple[int, ...]:
    """Return the powers of two in a range, ascending."""
    powers = (1 << exponent for exponent in range(most.bit_length()))
    return tuple(power for power in powers if least <= power <= most)
