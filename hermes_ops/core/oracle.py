"""The future of jobs, which the workload of a simulation gives to clairvoyant baselines."""

from __future__ import annotations

from typing import Protocol

from hermes_ops.core.model import Job


class Oracle(Protocol):
    """The future of each job.

    A policy with a field named `oracle` gets it in a simulation. Unless the field has a default,
    the policy runs in a simulation only.
    """

    def remaining_s(self, job: Job, now_s: float) -> float:
        """Return the seconds (at least 0) that the job still runs, alone on the GPUs it needs.

        For a job that may take several sizes they are units of its work.
        """
        ...

    def remaining_work(self, job: Job, now_s: float) -> float:
        """Return the units of work (at least 0) that are left; `rate` is in the same units."""
        ...

    def rate(self, job: Job, placement: tuple[int, ...], batch: int | None = None) -> float:
        """Return the units of work a second, at least 0, at the present stage of its training.

        `placement` is the number of GPUs on each node, descending. `batch` is the samples of a
        step; None: as the job chooses. 0 for a number of GPUs that the job does not take.
        """
        ...

    def remaining_steps(self, job: Job, now_s: float) -> float:
        """Return the steps (at least 0) of its requested batch that are left, as far as recorded.

        Where steps were recorded by the points of the curve, those after the next point, at least
        1; else `remaining_work`.
        """
        ...

    def step_s(self, job: Job, placement: tuple[int, ...]) -> float:
        """Return the seconds, above 0, of one of the `remaining_steps`; inf for another size."""
        ...

    def final_loss(self, job: Job) -> float:
        """Return the lowest loss of the job's whole curve; inf for a job without one."""
        ...


class GoodputOracle(Oracle, Protocol):
    """An oracle that tells speeds, and leaves to the job what noise of its gradients it expects."""

    def expected_rate(self, job: Job, placement: tuple[int, ...]) -> float:
        """Return the units of work a second, at least 0, with the noise that the job expects.

        That is the noise measured last, in its last step; before any, that of its first epoch with
        its initial batch. `placement` as in `rate`, the batch is the one that is best by it. Equal
        to `rate` for a job that measures no noise.
        """
        ...
