"""Sizes that hold until a job arrives or ends, the pool changes, or an interval is over."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import ClassVar

from hermes_ops.core.model import JobId, Snapshot
from hermes_ops.core.oracle import Oracle
from hermes_ops.policies.toolbox.job_speeds import JobSpeeds, KnownSpeeds, MeasuredSpeeds
from hermes_ops.policies.toolbox.parameter_checks import positive_or_none
from hermes_ops.policies.toolbox.sized_grants import SizingProblem

INTERVAL_S = 600.0
"""Seconds between two plans of the sizes by measured speeds."""


@dataclass(frozen=True, slots=True)
class PlannedSizes:
    """The memory of a policy: the sizes by job, for which jobs and GPUs, and when planned."""

    jobs: tuple[tuple[JobId, int, int], ...] = ()
    gpus: int = 0
    sizes: tuple[tuple[JobId, int], ...] = ()
    at_s: float = -inf

    def review_s(self, interval_s: float | None) -> float | None:
        """Return when the sizes are to be planned again; None: only when something happens."""
        return None if interval_s is None or not self.jobs else self.at_s + interval_s


def planned(
    memory: PlannedSizes,
    problem: SizingProblem,
    interval_s: float | None,
    plan: Callable[[SizingProblem], dict[JobId, int]],
) -> PlannedSizes:
    """Return the memory if its sizes still hold, else the sizes by `plan` that can be placed.

    They hold for the same jobs with the same ranges on the same number of GPUs.
    """
    jobs = tuple([(job.id, job.min_gpus, job.max_gpus) for job in problem.jobs])
    now_s = problem.snapshot.time_s
    ends_s = inf if interval_s is None else memory.at_s + interval_s
    same = memory.jobs == jobs and memory.gpus == problem.gpus
    if same and memory.at_s <= now_s < ends_s and _takes(memory, problem):
        return memory
    return PlannedSizes(jobs, problem.gpus, tuple(problem.solve_sizes(plan).items()), now_s)


@dataclass(frozen=True, slots=True)
class SpeedPolicy:
    """Base of policies that plan sizes by speeds and the work left, and keep them for a while.

    With an oracle both are known; without one, or with `blind`, they are those of `MeasuredSpeeds`,
    and sizes are planned every `interval_s` (600 by default) too.
    """

    oracle: Oracle | None = None
    blind: bool = False
    interval_s: float | None = None
    preempts: ClassVar[bool] = True
    sizes: ClassVar[bool] = True

    def __post_init__(self) -> None:
        positive_or_none("interval_s", self.interval_s)

    def initial(self) -> PlannedSizes:
        """Return the memory without planned sizes."""
        return PlannedSizes()

    @property
    def known(self) -> bool:
        """True when an oracle knows the speeds and the work left."""
        return self.oracle is not None and not self.blind

    @property
    def period_s(self) -> float | None:
        """Seconds between two plans of the sizes; None: only when a job arrives or ends."""
        return self.interval_s if self.known or self.interval_s else INTERVAL_S

    def speeds(self, snapshot: Snapshot) -> JobSpeeds:
        """Return the known speeds, or the measured ones."""
        if self.oracle is None or self.blind:
            return MeasuredSpeeds(snapshot)
        return KnownSpeeds(self.oracle, snapshot)


def _takes(memory: PlannedSizes, problem: SizingProblem) -> bool:
    """Return whether each job still takes its size: its list of sizes may have changed."""
    index = problem.snapshot.index
    return all(index[job].takes(size) for job, size in memory.sizes)
