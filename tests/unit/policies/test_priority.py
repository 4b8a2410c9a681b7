"""The base of priority policies: what its plans are, and what its reasons say."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hermes_ops.core.model import Gpu, Grant, Job, JobId, Phase, Plan, Snapshot, SweepId
from hermes_ops.policies.priority import Key, PriorityPolicy, ServiceOrder
from tests import builders


@dataclass(frozen=True, slots=True)
class Lightest(PriorityPolicy):
    """Serve the job of the least weight first."""

    name: ClassVar[str] = "lightest"
    measure: ClassVar[str] = "weight"
    term: ClassVar[str] = "weight"

    def key(self, job: Job, now_s: float) -> Key:
        return job.weight


@dataclass(frozen=True, slots=True)
class LightestAlone(Lightest):
    backfill: ClassVar[bool] = False


@dataclass(frozen=True, slots=True)
class LightestNow(Lightest):
    preempts: ClassVar[bool] = True


def job(name: str, weight: float, gpus: int = 1, held: tuple[int, ...] = (), **facts: Any) -> Job:
    phase = Phase.RUNNING if held else Phase.PENDING
    known = {"weight": weight, "min_gpus": gpus, "gpus_held": held, "sweep": SweepId("s")}
    return builders.job(name, phase, **(known | facts))


def decided(policy: PriorityPolicy, *jobs: Job, gpus: int = 1) -> Plan:
    plan, memory = policy.decide(Snapshot(9.0, tuple(Gpu(i) for i in range(gpus)), jobs), None)
    assert memory is None
    return plan


def granted(plan: Plan) -> set[str]:
    return {str(grant.job) for grant in plan.grants}


def texts(plan: Plan) -> dict[str, str]:
    return {str(name): reason.text for name, reason in plan.reasons.items()}


def test_the_smallest_key_is_served_first_and_ties_go_by_submission() -> None:
    jobs = (job("a", 2.0), job("c", 1.0, submitted_s=5.0), job("b", 1.0, submitted_s=7.0))
    plan = decided(Lightest(), *jobs)
    assert granted(plan) == {"c"}
    assert plan.ranking == ("b", "a")


def test_a_running_job_stays_unless_the_policy_preempts() -> None:
    jobs = (job("heavy", 9.0, held=(0,)), job("light", 1.0))
    assert granted(decided(Lightest(), *jobs)) == {"heavy"}
    assert granted(decided(LightestNow(), *jobs)) == {"light"}


def test_backfill_decides_whether_a_job_that_does_not_fit_blocks_the_rest() -> None:
    jobs = (job("run", 5.0, held=(0,)), job("gang", 1.0, gpus=2), job("small", 2.0))
    assert granted(decided(Lightest(), *jobs, gpus=2)) == {"run", "small"}
    assert granted(decided(LightestAlone(), *jobs, gpus=2)) == {"run"}


def test_the_reasons_tell_backfill_from_a_place_at_the_head() -> None:
    jobs = (job("run", 5.0, held=(0,)), job("gang", 1.0, gpus=2), job("small", 2.0), job("z", 3.0))
    assert texts(decided(Lightest(), *jobs, gpus=2)) == {
        "run": "runs until it ends: lightest never stops a job",
        "gang": "waits: the GPUs go to jobs with less weight, and what is left is too small",
        "small": "starts: it fits on GPUs that gang, which comes first, cannot use",
        "z": "waits: the GPUs go to jobs with less weight, and what is left is too small",
    }
    blocked = decided(LightestAlone(), *jobs, gpus=2)
    assert blocked.reasons[JobId("small")].text == (
        "waits behind gang, which comes first and does not fit yet"
    )
    assert blocked.reasons[JobId("small")].runner_up == "gang"
    assert texts(decided(Lightest(), job("a", 1.0), job("b", 2.0)))["a"] == (
        "starts: it has less weight than all that wait"
    )


def test_a_job_that_must_not_be_stopped_says_so() -> None:
    jobs = (job("firm", 9.0, held=(0,), preemptible=False), job("light", 1.0))
    plan = decided(LightestNow(), *jobs)
    assert granted(plan) == {"firm"}
    assert texts(plan)["firm"] == "runs until it ends: it must not be stopped"


WEIGHTS = st.lists(st.tuples(st.floats(0, 9), st.integers(1, 3)), max_size=8)


@pytest.mark.parametrize("policy", [Lightest(), LightestAlone(), LightestNow()])
@given(weights=WEIGHTS, gpus=st.integers(1, 5))
def test_a_reason_that_speaks_of_a_job_that_waits_is_true(
    policy: PriorityPolicy, weights: list[tuple[float, int]], gpus: int
) -> None:
    jobs = tuple(job(f"j{n}", *facts) for n, facts in enumerate(weights))
    plan = decided(policy, *jobs, gpus=gpus)
    by_name = {j.id: j for j in jobs}
    waiting = [j for j in jobs if j.id not in granted(plan)]
    for name, reason in plan.reasons.items():
        own = by_name[name]
        if "than all that wait" in reason.text:
            rivals = [j for j in waiting if j.min_gpus <= gpus]
            assert all(own.weight <= rival.weight for rival in rivals)
        if "which comes first" in reason.text:
            assert reason.runner_up is not None
            first = by_name[reason.runner_up]
            assert first in waiting
            assert first.weight <= own.weight


class _Queue(list[Job]):
    """A queue that counts how many of its jobs are read."""

    read = 0

    def __iter__(self) -> Iterator[Job]:
        for found in super().__iter__():
            self.read += 1
            yield found


def test_why_a_job_starts_is_said_without_reading_the_queue_behind_the_first_that_waits() -> None:
    queue = _Queue(job(f"job-{n:03}", float(n)) for n in range(500))
    snapshot = Snapshot(9.0, (Gpu(0), Gpu(1)), tuple(queue))
    queue.read = 0
    grants = [Grant(found.id, (n,)) for n, found in enumerate(queue[:2])]
    service = ServiceOrder(snapshot, queue, {}, grants)
    assert [service.first_waiting_before(found) for found in queue[:3]] == [None] * 3
    assert service.first_waiting_before(queue[400]) is queue[2]
    assert queue.read == 3
