"""Finish-time fairness, and Shockwave's trace on which it was published."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hermes_ops.core.model import Gpu, Job, JobId, Phase, Point, Snapshot, SweepId
from hermes_ops.errors import ConfigError
from hermes_ops.policies import check_live, make_policy
from hermes_ops.policies.themis import Themis, offered_number, predicted_left_s
from hermes_ops.simulator.engine import layout, simulate
from hermes_ops.simulator.metrics import Metrics, measure, static_fairness
from hermes_ops.simulator.oracle import oracle
from hermes_ops.simulator.published_workloads import published_workload
from hermes_ops.simulator.workload import Work, Workload

DATA = Path(__file__).parents[3] / "examples" / "elastic"


def waiting(name: str, submitted_s: float = 0.0, *, steps: int = 10) -> Job:
    return Job(
        JobId(name), SweepId("a"), submitted_s, Phase.WAITING, curve=(Point(1, 1.0, 100.0),),
        total_steps=steps, service_gpu_s=100.0,
    )  # fmt: skip


def started(policy: Themis, *jobs: Job, now_s: float = 1_200.0) -> list[str]:
    snapshot = Snapshot(now_s, (Gpu(0),), jobs)
    plan, _ = policy.decide(snapshot, policy.initial())
    return [grant.job for grant in plan.grants]


@pytest.mark.parametrize("form", ["simple", "fluid"])
def test_the_job_that_is_furthest_behind_its_share_runs(form: str) -> None:
    late, new = waiting("a/1", 0.0), waiting("a/2", 1_000.0)
    assert started(Themis(form), late, new) == ["a/1"]
    assert started(Themis(form), replace(new, id=JobId("a/1")), replace(late, id=JobId("a/2"))) == [
        "a/2"
    ]


def test_the_filter_offers_to_few_and_the_shortest_of_them_wins() -> None:
    jobs = (waiting("a/1", 0.0, steps=20), waiting("a/2", 0.0, steps=15), waiting("a/3", 1_190.0))
    assert started(Themis("filter", knob=0.5), *jobs) == ["a/2"]
    assert started(Themis("filter", knob=1.0), *jobs) == ["a/3"]


def test_a_lease_holds_until_its_multiple_of_time() -> None:
    policy = Themis("simple", lease_s=120.0)
    old, new = waiting("a/1", 1_100.0), waiting("a/2", 0.0, steps=2)
    plan, memory = policy.decide(Snapshot(1_200.0, (Gpu(0),), (old,)), policy.initial())
    assert plan.review_at_s == 1_320.0
    held = replace(old, phase=Phase.RUNNING, gpus_held=(0,), started_s=1_200.0)
    between, memory = policy.decide(Snapshot(1_250.0, (Gpu(0),), (held, new)), memory)
    assert [grant.job for grant in between.grants] == ["a/1"]
    after, _ = policy.decide(Snapshot(1_320.0, (Gpu(0),), (held, new)), memory)
    assert [grant.job for grant in after.grants] == ["a/2"]


def test_leases_end_though_the_clock_was_set_back() -> None:
    policy = Themis("simple", lease_s=120.0)
    old, new = waiting("a/1", 1_100.0), waiting("a/2", 0.0, steps=2)
    _, memory = policy.decide(Snapshot(9_000.0, (Gpu(0),), (old,)), policy.initial())
    held = replace(old, phase=Phase.RUNNING, gpus_held=(0,), started_s=9_000.0)
    after, memory = policy.decide(Snapshot(1_320.0, (Gpu(0),), (held, new)), memory)
    assert [grant.job for grant in after.grants] == ["a/2"]
    assert memory.round_s == 1_320.0


def test_what_is_left_is_predicted_from_the_steps_or_from_what_was_trained() -> None:
    assert predicted_left_s(waiting("a/1"), 0.0, 120.0) == 900.0
    unknown = replace(waiting("a/1"), total_steps=None)
    assert predicted_left_s(unknown, 0.0, 120.0) == 120.0
    assert predicted_left_s(replace(unknown, service_gpu_s=500.0), 0.0, 120.0) == 500.0


def test_it_runs_live_without_an_oracle() -> None:
    check_live("themis")
    assert make_policy("themis", {}).name == "themis"


@pytest.mark.parametrize("wrong", [{"form": "auction"}, {"knob": 2}, {"lease_s": 0}])
def test_a_wrong_parameter_is_named(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        make_policy("themis", wrong)


def on_shockwave(name: str, **options: object) -> Metrics:
    workload = published_workload("shockwave").make(DATA, 1.0).draw(0).workload
    policy = make_policy(name, options, {"oracle": oracle(workload)})
    return measure(simulate(workload, layout("8x4"), policy))


@pytest.mark.law
@pytest.mark.parametrize(
    ("name", "options", "mean_s", "makespan_s"),
    [
        ("themis", {}, 11_302, 31_929),
        ("2d-las", {"quantum_s": 120.0}, 11_274, 33_208),
        ("fifo", {}, 9_655, 31_909),
    ],
)
def test_on_shockwaves_trace_means_and_makespans_are_within_a_tenth_of_the_published(
    name: str, options: dict[str, object], mean_s: float, makespan_s: float
) -> None:
    metrics = on_shockwave(name, **options)
    assert metrics.mean_completion_seconds == pytest.approx(mean_s, rel=0.1)
    assert metrics.makespan_seconds == pytest.approx(makespan_s, rel=0.1)


def test_the_least_remaining_service_gives_the_figures_of_an_independent_program() -> None:
    metrics = on_shockwave("srsf")
    assert metrics.mean_completion_seconds == pytest.approx(6_586, abs=0.5)
    assert metrics.makespan_seconds == pytest.approx(33_009, abs=0.5)
    assert metrics.worst_finish_time_fairness == pytest.approx(1.23, abs=0.005)


def test_static_fairness_compares_with_a_share_among_all_jobs_of_the_workload() -> None:
    jobs = tuple(Work(JobId(f"j/{n}"), 0.0, 100.0) for n in range(4))
    run = simulate(Workload("w", jobs), layout("2"), make_policy("fifo", {}))
    assert sorted(static_fairness(run).values()) == [0.5, 0.5, 1.0, 1.0]


@pytest.mark.parametrize(
    ("text", "found"),
    [("job\n1\n", "job"), ("job,submitted_s,gpus,exclusive_s,run_s,kind\n1,0,0,9,9,x\n", "line 2")],
)
def test_a_bad_trace_is_refused_with_the_place(tmp_path: Path, text: str, found: str) -> None:
    (tmp_path / "shockwave_jobs.csv").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=found):
        published_workload("shockwave").make(tmp_path, 1.0).draw(0)


def test_a_missing_trace_is_refused_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--data"):
        published_workload("shockwave").make(tmp_path, 1.0).draw(0)


def test_the_offer_goes_to_the_share_of_apps_that_the_decimals_of_the_knob_say() -> None:
    assert [offered_number(0.7, number) for number in (1, 3, 10, 20, 30)] == [1, 1, 3, 6, 9]
    assert [offered_number(0.8, number) for number in (1, 5, 6)] == [1, 1, 2]
    assert [offered_number(knob, 7) for knob in (0.0, 1.0)] == [7, 0]
