from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hermes_ops.core.model import Job, Phase, Plan, Snapshot
from hermes_ops.core.plan import check, diff
from hermes_ops.core.sizes import BatchRange
from hermes_ops.core.wrapper import OneSize
from hermes_ops.policies.fifo import Fifo
from tests.builders import arriving, world

BATCHES = BatchRange(32, 256)
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


def shown(*jobs: Job) -> Snapshot:
    inner = Looking()
    OneSize(inner).decide(world(*jobs, gpus=8), None)
    (snapshot,) = inner.seen
    return snapshot


def test_a_job_is_shown_without_a_range_of_batches_also_if_it_takes_one_size() -> None:
    narrow = arriving(0, batch_range=BATCHES, requested_batch=64)
    seen = shown(narrow, arriving(1)).index
    assert (seen[narrow.id].batch_range, seen[narrow.id].requested_batch) == (None, 64)


def test_a_job_with_gpus_that_it_does_not_take_is_shown_with_what_its_user_requests() -> None:
    wide = arriving(
        0, Phase.RUNNING, gpus_held=(0, 1, 2), requested_gpus=2, sizes=(1, 2, 4), **RANGE
    )
    snapshot = shown(wide)
    assert snapshot.index[wide.id].min_gpus == 2
    assert snapshot.retained == world(wide, gpus=8).retained == {}


@pytest.mark.parametrize(
    ("facts", "batch"),
    [
        ({"phase": Phase.PENDING}, 64),
        ({"phase": Phase.WAITING, "batch_held": 128}, 64),
        ({"phase": Phase.RUNNING, "gpus_held": (0,), "batch_held": 128}, 128),
        ({"phase": Phase.RUNNING, "gpus_held": (0,)}, None),
        ({"phase": Phase.PENDING, "requested_batch": None}, None),
    ],
)
def test_a_grant_names_the_batch_that_the_job_holds_else_the_one_that_its_user_requests(
    facts: dict[str, Any], batch: int | None
) -> None:
    job = arriving(0, **{"batch_range": BATCHES, "requested_batch": 64, **facts})
    snapshot = world(job, gpus=2)
    plan, _ = OneSize(Fifo()).decide(snapshot, None)
    check(snapshot, plan)
    assert [grant.batch for grant in plan.grants] == [batch]
    assert diff(snapshot, plan) == () or not job.holds_gpus


def test_a_job_of_which_nothing_has_changed_is_shown_as_the_same_object() -> None:
    inner, job = Looking(), arriving(0, **RANGE)
    policy = OneSize(inner)
    for jobs in ((job,), (job, arriving(1)), (replace(job, weight=2.0),)):
        policy.decide(world(*jobs, gpus=8), None)
    first, second, third = (snapshot.index[job.id] for snapshot in inner.seen)
    assert first is second
    assert third.weight == 2.0
