"""A policy: finish what is nearly done."""

from dataclasses import dataclass
from typing import ClassVar

from hermes_ops.core.model import Job
from hermes_ops.policies.priority import PriorityPolicy


@dataclass(frozen=True, slots=True)
class MostProgress(PriorityPolicy):
    """Serve the job with the fewest steps left; without a known total the steps left are many."""

    unknown_steps: int = 1_000_000
    name: ClassVar[str] = "most-progress"
    measure: ClassVar[str] = "training left"
    term: ClassVar[str] = "steps_left"

    def __post_init__(self) -> None:
        """Refuse a parameter that makes no sense: the message reaches the user."""
        if self.unknown_steps < 1:
            raise ValueError("unknown_steps is at least 1")

    def key(self, job: Job, now_s: float) -> float:
        """Return the number of steps left."""
        return max((job.total_steps or self.unknown_steps) - job.last_step, 0)
