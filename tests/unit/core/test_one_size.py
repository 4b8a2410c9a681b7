from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from hypothesis import given
from hypothesis import strategies as st

from hermes_ops.core.model import Job, Phase, Plan, Snapshot
from hermes_ops.core.plan import check
from hermes_ops.core.wrapper import OneSize
from hermes_ops.policies.fifo import Fifo
from tests.builders import arriving, world

RANGE: dict[str, Any] = {"min_gpus": 1, "max_gpus": 4}


@dataclass
class Looking:
    """Keeps the snapshot that it was shown."""

    seen: list[Snapshot] = field(default_factory=list)
    name: ClassVar[str] = "looking"
    preempts: ClassVar[bool] = True

    def initial(self) -> None:
        return

    def decide(self, snapshot: Snapshot, memory: None) -> tuple[Plan, None]:
        self.seen.append(snapshot)
        return Plan(), memory


def _sizes(*jobs: Job) -> list[tuple[int, int]]:
    inner = Looking()
    OneSize(inner).decide(world(*jobs, gpus=8), None)
    (shown,) = inner.seen
    return [(shown.index[job.id].min_gpus, shown.index[job.id].max_gpus) for job in jobs]


def test_a_job_with_gpus_is_shown_with_these_and_another_with_what_its_user_requests() -> None:
    wide = arriving(0, Phase.RUNNING, gpus_held=(0, 1, 2), **RANGE)
    wanted = arriving(1, requested_gpus=2, sizes=(1, 2, 4), **RANGE)
    plain = arriving(2, **RANGE)
    assert _sizes(wide, wanted, plain) == [(3, 3), (2, 2), (1, 1)]


def test_jobs_of_one_size_are_shown_as_they_are() -> None:
    inner, snapshot = Looking(), world(arriving(0), gpus=2)
    OneSize(inner).decide(snapshot, None)
    assert inner.seen == [snapshot]
    assert inner.seen[0] is snapshot


@given(held=st.integers(0, 4), waiting=st.integers(0, 3))
def test_a_plan_for_jobs_of_one_size_is_possible_for_jobs_with_a_range(
    held: int, waiting: int
) -> None:
    gpus = tuple(range(held))
    running = [arriving(9, Phase.RUNNING, gpus_held=gpus, preemptible=False, **RANGE)]
    jobs = [arriving(n, **RANGE) for n in range(waiting)] + (running if held else [])
    snapshot = world(*jobs, gpus=4)
    plan, _ = OneSize(Fifo()).decide(snapshot, None)
    check(snapshot, plan)
    assert len(plan.gpus_of(running[0].id)) == held
