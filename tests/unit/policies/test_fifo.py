"""Fifo in tiny worlds."""

from __future__ import annotations

from hermes_ops.core.model import Gpu, Grant, Job, JobId, Phase, Snapshot
from hermes_ops.policies.fifo import Fifo
from tests.builders import job


def grants(*jobs: Job, gpus: int = 1) -> tuple[Grant, ...]:
    snapshot = Snapshot(100.0, tuple(Gpu(i) for i in range(gpus)), jobs)
    plan, _ = Fifo().decide(snapshot, None)
    return plan.grants


def test_trial_2_comes_before_trial_10() -> None:
    assert grants(job(10), job(2)) == (Grant(JobId("s/2"), (0,)),)


def test_the_earlier_submission_comes_first() -> None:
    assert grants(job(1, submitted_s=2.0), job(9, submitted_s=1.0))[0].job == "s/9"


def test_a_running_job_is_kept_whatever_waits() -> None:
    running = job(5, phase=Phase.RUNNING, gpus_held=(0,), submitted_s=9.0)
    assert grants(job(1), running) == (Grant(JobId("s/5"), (0,)),)


def test_the_head_of_the_line_blocks_the_ones_behind_it() -> None:
    running = job(0, phase=Phase.RUNNING, gpus_held=(0,))
    gang = job(1, min_gpus=2, max_gpus=2)
    assert grants(running, gang, job(2), gpus=2) == (Grant(JobId("s/0"), (0,)),)


def test_a_job_larger_than_the_pool_does_not_block_it() -> None:
    assert grants(job(1, min_gpus=3, max_gpus=3), job(2), gpus=2)[0].job == "s/2"


def test_the_reasons_name_the_place_in_line() -> None:
    running = job(0, phase=Phase.RUNNING, gpus_held=(0,))
    large = job(9, min_gpus=5, max_gpus=5)
    jobs = (running, large, job(1), job(2), job(3))
    plan, _ = Fifo().decide(Snapshot(100.0, (Gpu(0), Gpu(1)), jobs), None)
    texts = {str(name): reason.text for name, reason in plan.reasons.items()}
    assert texts == {
        "s/0": "runs until it ends: fifo never stops a job",
        "s/1": "starts: it was submitted before all that wait",
        "s/2": "waits for GPUs at the head of the line",
        "s/3": "waits behind s/2",
        "s/9": "waits: it needs more GPUs than the pool has",
    }
    assert [t.value for t in plan.reasons[JobId("s/3")].terms] == [2, 1]
    assert plan.ranking[:2] == ("s/2", "s/3")
