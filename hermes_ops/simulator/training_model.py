"""The truth about a job that may take several sizes: its pace by GPUs, nodes and batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from hermes_ops.core.sizes import BatchRange, StepTime

Placement = tuple[int, ...]
"""The number of GPUs on each node of a job, descending: (4, 4, 2) are ten GPUs on three nodes."""

ExpectedRate = Callable[[Placement, int, int | None], float]
"""The units of work a second by placement, and by the epoch and batch of the last step."""


class Pace(NamedTuple):
    """How fast a job trains: `rate` units of work a second.

    `step` is what the job measures of it, `batch` the samples of a step; None: not measured.
    A step takes so many `passes`.
    """

    rate: float
    step: StepTime | None = None
    batch: int | None = None
    passes: int = 1

    @property
    def step_s(self) -> float:
        """The seconds of a step, all passes; of a unit of work where steps are not measured."""
        if self.step is None:
            return 1.0 / self.rate
        return self.step.seconds + (self.passes - 1) * (self.step.compute_s or 0.0)


class TrainingModel(Protocol):
    """How fast a job does its work, which is counted in units of the model's own.

    `Work.seconds` and the `seconds` of the points of `Work.curve` are such units then.
    """

    @property
    def sizes(self) -> tuple[int, ...]:
        """The numbers of GPUs on which it may run, ascending; at least one."""
        ...

    @property
    def batch_range(self) -> BatchRange | None:
        """The batches that a plan may give it; None: it takes none from a plan."""
        ...

    def pace(self, placement: Placement, epoch: int, batch: int | None) -> Pace:
        """Return its pace on these GPUs, once `epoch` points of its curve have been reached.

        `batch` are the samples of a step; None: as the job itself chooses them.
        """
        ...

    def noise_scale(self, epoch: int) -> float | None:
        """Return the noise scale of its gradients in samples, as it measures it; None: it cannot.

        Source: McCandlish et al., "An Empirical Model of Large-Batch Training", 2018.
        """
        ...
