"""SRTF, SRSF and FIFO with back-fill in tiny worlds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from hermes_ops.core.model import Gpu, Job, JobId, Phase, Plan, Policy, Snapshot, SweepId
from hermes_ops.errors import ConfigError
from hermes_ops.policies import check_live, live_policies, make_policy
from tests import builders


@dataclass(frozen=True)
class Known:
    """An oracle of a table."""

    left_s: dict[str, float]

    def remaining_s(self, job: Job, now_s: float) -> float:
        return self.left_s[str(job.id)]

    def remaining_work(self, job: Job, now_s: float) -> float:
        return self.remaining_s(job, now_s)

    def rate(self, job: Job, placement: tuple[int, ...], batch: int | None = None) -> float:
        return float(job.takes(sum(placement)))

    def final_loss(self, job: Job) -> float:
        return 0.0


def job(name: str, gpus: int = 1, held: tuple[int, ...] = (), **facts: Any) -> Job:
    phase = Phase.RUNNING if held else Phase.PENDING
    known = {"min_gpus": gpus, "gpus_held": held, "sweep": SweepId("s")}
    return builders.job(name, phase, **(known | facts))


def plan(name: str, jobs: tuple[Job, ...], gpus: int, **left_s: float) -> Plan:
    policy: Policy[None] = make_policy(name, {}, {"oracle": Known(left_s)})
    decided, _ = policy.decide(Snapshot(9.0, tuple(Gpu(i) for i in range(gpus)), jobs), None)
    return decided


def runs(name: str, jobs: tuple[Job, ...], gpus: int, **left_s: float) -> set[str]:
    return {str(grant.job) for grant in plan(name, jobs, gpus, **left_s).grants}


def test_srtf_gives_the_gpus_to_the_job_with_the_least_time_left() -> None:
    jobs = (job("a", held=(0,)), job("b"), job("c"))
    assert runs("srtf", jobs, 1, a=5.0, b=7.0, c=4.0) == {"c"}
    assert runs("srtf", jobs, 1, a=5.0, b=7.0, c=5.0) == {"a"}


def test_srtf_fills_what_is_left_with_longer_jobs_that_fit() -> None:
    jobs = (job("a", gpus=2), job("b", gpus=4), job("c"))
    assert runs("srtf", jobs, 3, a=1.0, b=2.0, c=3.0) == {"a", "c"}


def test_srsf_counts_the_gpus_in() -> None:
    jobs = (job("a", gpus=4), job("b"))
    assert runs("srtf", jobs, 4, a=3.0, b=10.0) == {"a"}
    assert runs("srsf", jobs, 4, a=3.0, b=10.0) == {"b"}


def test_srsf_serves_the_smaller_of_two_jobs_with_as_much_service_left() -> None:
    jobs = (job("a", gpus=2), job("b"))
    assert runs("srsf", jobs, 2, a=5.0, b=10.0) == {"b"}


def test_a_job_that_must_not_be_stopped_keeps_its_gpus() -> None:
    jobs = (job("a", held=(0,), preemptible=False), job("b"))
    assert runs("srtf", jobs, 1, a=50.0, b=1.0) == {"a"}


@pytest.mark.parametrize("name", ["srtf", "srsf"])
def test_the_reasons_say_how_much_is_left(name: str) -> None:
    decided = plan(name, (job("a"), job("b")), 1, a=1.0, b=2.0)
    less = {"srtf": "less time left", "srsf": "less GPU time left"}[name]
    started, waits = (decided.reasons[JobId(job)] for job in "ab")
    assert started.text == f"starts: it has {less} than all that wait"
    assert waits.text.startswith(f"waits: the GPUs go to jobs with {less}")
    assert [term.value for term in waits.terms] == [2.0, 1]
    assert decided.ranking == (JobId("b"),)


@pytest.mark.parametrize("name", ["srtf", "srsf"])
def test_who_knows_the_future_is_refused_live(name: str) -> None:
    with pytest.raises(ConfigError, match="how long each job will still run"):
        check_live(name)
    with pytest.raises(ConfigError, match="runs in a simulation only"):
        make_policy(name, {})


def test_backfill_passes_over_who_does_not_fit_and_stops_nobody() -> None:
    jobs = (job("z", held=(0,), submitted_s=5.0), job("a", gpus=3), job("b"), job("c"))
    assert runs("fifo", jobs, 3) == {"z"}
    assert runs("fifo-backfill", jobs, 3) == {"z", "b", "c"}
    assert runs("fifo-backfill", jobs, 2) == {"z", "b"}


def test_backfill_says_who_started_and_who_waits() -> None:
    decided = plan("fifo-backfill", (job("a", gpus=2), job("b"), job("c", held=(0,))), 2)
    texts = {str(name): decided.reasons[JobId(name)].text for name in ("a", "b", "c")}
    assert texts == {
        "a": "waits for GPUs at the head of the line",
        "b": "starts: it fits on GPUs that a, submitted earlier, cannot use",
        "c": "runs until it ends: fifo-backfill never stops a job",
    }
    assert decided.reasons[JobId("b")].runner_up == "a"


def test_in_place_of_an_unknown_policy_a_pool_is_offered_none_that_it_would_refuse() -> None:
    with pytest.raises(ConfigError) as refused:
        check_live("srft")
    (problem,) = refused.value.problems
    assert problem.allowed == ", ".join(live_policies())
    assert "srtf" not in problem.allowed.split(", ")
