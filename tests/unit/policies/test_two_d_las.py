"""2D-LAS in tiny worlds, and against a plain program."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hermes_ops.core.model import Gpu, Grant, Job, JobId, Phase, Plan, Snapshot
from hermes_ops.policies.toolbox.multilevel_queues import TRUSTED_DECISIONS, QueuesMemory
from hermes_ops.policies.two_d_las import TwoDLas
from hermes_ops.simulator.engine import layout, simulate
from hermes_ops.simulator.workload import Costs, Work, Workload
from tests.builders import arriving as job

NOW_S = 1_000.0


def running(number: int, gpus: tuple[int, ...], service_gpu_s: float, **facts: Any) -> Job:
    return job(
        number,
        phase=Phase.RUNNING,
        gpus_held=gpus,
        min_gpus=len(gpus),
        service_gpu_s=service_gpu_s,
        service_at_s=NOW_S,
        started_s=NOW_S,
        **facts,
    )


def world(*jobs: Job, gpus: int = 1, time_s: float = NOW_S) -> Snapshot:
    return Snapshot(time_s, tuple(Gpu(i, f"node-{i // 4}") for i in range(gpus)), jobs)


def served(plan: Plan) -> dict[str, tuple[int, ...]]:
    return {grant.job: grant.gpus for grant in plan.grants}


def decide(snapshot: Snapshot, memory: QueuesMemory | None = None, **parameters: Any) -> Plan:
    policy = TwoDLas(**parameters)
    return policy.decide(snapshot, policy.initial() if memory is None else memory)[0]


def test_a_job_that_has_had_less_takes_the_gpu_of_one_in_a_lower_queue() -> None:
    assert served(decide(world(running(0, (0,), 4_000.0), job(1)))) == {"s/1": (0,)}


def test_jobs_of_one_queue_do_not_swap() -> None:
    plan = decide(
        world(running(5, (0,), 3_000.0), job(1, submitted_s=0.0)), after(running(5, (0,), 2_000.0))
    )
    assert served(plan) == {"s/5": (0,)}


def after(*jobs: Job, gpus: int = 1, time_s: float = NOW_S - 1, **parameters: Any) -> QueuesMemory:
    """The memory of a decision in which these jobs had their GPUs."""
    policy = TwoDLas(**parameters)
    return policy.decide(world(*jobs, gpus=gpus, time_s=time_s), policy.initial())[1]


def test_service_counts_gpus_times_seconds() -> None:
    narrow, wide = running(0, (0,), 3_000.0), running(1, (1, 2, 3, 4), 4_000.0)
    plan = decide(world(narrow, wide, job(2, min_gpus=4), gpus=5))
    assert served(plan) == {"s/0": (0,), "s/2": (1, 2, 3, 4)}


def test_the_review_is_at_the_very_next_demotion() -> None:
    plan = decide(world(running(0, (0, 1), 3_000.0), job(1), gpus=2), demotion="exact")
    assert plan.review_at_s == NOW_S + 250.0 / 2


def test_no_review_when_nobody_waits() -> None:
    assert decide(world(running(0, (0,), 3_000.0)), demotion="exact").review_at_s is None


def test_a_demotion_puts_the_job_behind_those_that_wait_in_the_lower_queue() -> None:
    waiting = job(1, phase=Phase.WAITING, service_gpu_s=4_000.0)
    memory = after(running(0, (0,), 3_250.0), waiting)  # a second earlier it had 3_249
    plan = decide(world(running(0, (0,), 3_250.0), waiting), memory)
    assert served(plan) == {"s/1": (0,)}


def test_a_small_job_fills_the_hole_that_a_wide_one_leaves() -> None:
    plan = decide(world(job(0, min_gpus=3), job(1), gpus=2))
    assert served(plan) == {"s/1": (0,)}


def test_a_skewed_model_waits_for_one_node_and_an_even_one_does_not() -> None:
    busy = [running(n, (gpu,), 0.0) for n, gpu in enumerate((0, 1, 4, 5))]
    for skew, expected in ((0.7, None), (0.1, (2, 3, 6)), (None, (2, 3, 6))):
        wide = job(9, min_gpus=3, tensor_skew=skew)
        assert served(decide(world(*busy, wide, gpus=8))).get("s/9") == expected


def test_a_job_without_a_place_leaves_its_gpus_to_the_next() -> None:
    busy = [running(n, (gpu,), 0.0) for n, gpu in enumerate((0, 1, 4, 5))]
    wide, small = job(8, min_gpus=3, tensor_skew=0.7), job(9, min_gpus=2)
    assert served(decide(world(*busy, wide, small, gpus=8)))["s/9"] == (2, 3)


def test_nothing_is_stopped_for_a_job_without_a_place() -> None:
    low = running(0, (3,), 9_000.0)
    busy = [running(n, (n,), 0.0) for n in (4, 5, 6)]
    wide = job(8, min_gpus=5, tensor_skew=0.7)
    plan = decide(world(low, *busy, wide, gpus=8))
    assert served(plan).keys() == {"s/4", "s/5", "s/6", "s/0"} or "s/8" in served(plan)


def test_by_quanta_too_a_job_without_a_place_stops_nobody_and_leaves_its_gpus_to_the_next() -> None:
    fixed = [running(n, (4 * n,), 9_000.0, preemptible=False) for n in (0, 1)]
    others = [running(n, (4 * n - 7,), 9_000.0) for n in (2, 3)]
    wide, small = job(8, min_gpus=4, tensor_skew=0.7), job(9, min_gpus=4)
    plan = decide(world(*fixed, *others, wide, small, gpus=8), quantum_s=60.0)
    assert served(plan).keys() == {"s/0", "s/1", "s/9", "s/2", "s/3"}


def test_a_job_that_must_not_be_stopped_keeps_its_gpu() -> None:
    plan = decide(world(running(0, (0,), 9_000.0, preemptible=False), job(1)))
    assert served(plan) == {"s/0": (0,)}


def test_the_knob_promotes_a_job_that_has_waited_as_long_as_it_ran() -> None:
    stream = tuple(work(n, 10.0 + 90.0 * n, 90.0) for n in range(1, 5))
    jobs = Workload("w", (work(0, 0.0, 150.0), *stream))

    def resumes_s(knob: float | None) -> float:
        run = simulate(jobs, layout("1"), TwoDLas((100.0,), promote_knob=knob))
        return next(s.begin_s for s in run.segments if s.begin_s > 0 and s.job == "s/0")

    # It runs until 100 and is overdue at 200, when the second of the stream runs until 280.
    assert (resumes_s(None), resumes_s(1.0), resumes_s(3.0)) == (460.0, 280.0, 460.0)


def work(number: int, submitted_s: float, seconds: float, gpus: int = 1, **facts: Any) -> Work:
    return Work(JobId(f"s/{number}"), submitted_s, seconds, gpus, **facts)


def test_a_lost_memory_costs_no_more_than_the_order_within_a_queue() -> None:
    low, high = running(0, (0,), 8_000.0), running(1, (1,), 3_300.0)
    plan = decide(world(low, high, job(2), gpus=2), memory=QueuesMemory())
    assert served(plan) == {"s/1": (1,), "s/2": (0,)}


def test_a_job_that_keeps_its_gpu_against_the_plan_is_demoted_at_the_limit() -> None:
    """As within a quota: the plan stops it for a job that may not start."""
    policy, first = TwoDLas((100.0,)), job(0, min_gpus=2)
    running_on = replace(running(1, (1,), 90.0), submitted_s=NOW_S)
    _, memory = policy.decide(world(first, running_on, gpus=2), policy.initial())
    for second in range(1, 30):
        now_s = NOW_S + second
        plan, memory = policy.decide(world(first, running_on, gpus=2, time_s=now_s), memory)
        assert served(plan) == {"s/0": (0, 1)}
    assert "s/1" in memory.waiting[1]


def test_a_job_that_vanishes_while_another_appears_is_noticed_in_time() -> None:
    """The counts agree, so only the whole look finds it."""
    policy = TwoDLas()
    first = world(running(0, (0,), 0.0), job(1), job(3, submitted_s=9.0))
    _, memory = policy.decide(first, policy.initial())
    second = world(running(0, (0,), 0.0), job(2), job(3, submitted_s=9.0))
    plans = []
    for _ in range(TRUSTED_DECISIONS + 1):
        plan, memory = policy.decide(second, memory)
        plans.append(plan)
    assert "s/2" in plans[-1].ranking


@pytest.mark.parametrize(
    "parameters",
    [
        {"limits_gpu_s": (2.0, 1.0)},
        {"limits_gpu_s": (0.0,)},
        {"limits_gpu_s": (inf,)},
        {"limits_gpu_s": "many"},
        {"order": "last"},
        {"promote_knob": 0},
        {"quantum_s": -1.0},
        {"pack_limit": 3.0},
        {"demotion": "never"},
    ],
)
def test_impossible_parameters_are_refused(parameters: dict[str, Any]) -> None:
    with pytest.raises((ValueError, TypeError)):
        TwoDLas(**parameters)


def plain_completions(  # noqa: C901 - plain on purpose
    works: list[Work], gpus: int, limits: tuple[float, ...]
) -> list[float]:
    """2D-LAS with nothing remembered but lists; integers only."""
    had, level = [0] * len(works), [0] * len(works)
    runs, ends = [False] * len(works), [-1.0] * len(works)
    queues: list[list[int]] = [[] for _ in range(len(limits) + 1)]
    for second in range(10_000):
        for n, one in enumerate(works):
            if runs[n] and had[n] == one.seconds:
                ends[n], runs[n] = second, False
                queues[level[n]].remove(n)
            if one.submitted_s == second:
                queues[0].append(n)
        for n, one in enumerate(works):
            if runs[n] and level[n] < len(limits) and had[n] * one.gpus >= limits[level[n]]:
                queues[level[n]].remove(n)
                level[n] = sum(had[n] * one.gpus >= limit for limit in limits)
                queues[level[n]].append(n)
        left = gpus
        for queue in queues:
            for n in queue:
                runs[n] = works[n].gpus <= left
                left -= works[n].gpus * runs[n]
            queue.sort(key=lambda n: not runs[n])
        for n in range(len(works)):
            had[n] += runs[n]
        if min(ends) >= 0:
            return ends
    raise AssertionError("they do not end")


@st.composite
def workloads(draw: st.DrawFn) -> list[Work]:
    at_s, found = 0, []
    for number in range(draw(st.integers(1, 14))):
        at_s += draw(st.integers(0, 6))
        gpus = draw(st.sampled_from([1, 1, 2, 4]))
        found.append(work(number, float(at_s), float(draw(st.integers(1, 30))), gpus))
    return found


def test_jobs_that_reached_the_limit_while_nobody_waited_are_demoted_in_that_order() -> None:
    """The first, submitted earlier, gets there later, and is the one that is preempted."""
    works = [work(0, 0.0, 13.0), work(1, 2.0, 11.0, 2), work(2, 7.0, 6.0), work(3, 12.0, 1.0)]
    run = simulate(Workload("w", tuple(works)), layout("4"), TwoDLas((12.0,), demotion="exact"))
    assert [outcome.ended_s for outcome in run.outcomes] == [14.0, 13.0, 13.0, 13.0]


@given(works=workloads())
@settings(max_examples=200, deadline=None)
def test_remembered_queues_give_what_plain_lists_give(works: list[Work]) -> None:
    """Limits at whole multiples of every size: the plain program looks at whole seconds only."""
    limits = (12.0, 40.0)
    policy = TwoDLas(limits, demotion="exact")
    run = simulate(Workload("w", tuple(works)), layout("4"), policy)
    assert [outcome.ended_s for outcome in run.outcomes] == plain_completions(works, 4, limits)


@given(works=workloads(), order=st.sampled_from(["start", "entry"]), knob=st.none() | st.just(0.5))
@settings(max_examples=25, deadline=None)
def test_trusting_the_memory_gives_the_same_run_as_looking_at_every_job(
    works: list[Work], order: str, knob: float | None
) -> None:
    costs = Costs(startup_s=0.5, checkpoint_s=1.25)
    jobs = tuple(replace(one, costs=costs) for one in works)
    policy = TwoDLas((12.0, 40.0), order, promote_knob=knob)
    trusting = simulate(Workload("w", jobs), layout("4"), policy)
    assert (
        trusting.segments == simulate(Workload("w", jobs), layout("4"), _Doubting(policy)).segments
    )


class _Doubting:
    """Looks at every job at each decision."""

    name, preempts = "doubting", True

    def __init__(self, policy: TwoDLas) -> None:
        self._policy = policy

    def initial(self) -> QueuesMemory:
        return self._policy.initial()

    def decide(self, snapshot: Snapshot, memory: QueuesMemory) -> tuple[Plan, QueuesMemory]:
        return self._policy.decide(snapshot, replace(memory, trusted=TRUSTED_DECISIONS))


def test_grants_of_jobs_that_stay_are_those_of_the_snapshot() -> None:
    stays = running(0, (0,), 0.0)
    assert decide(world(stays, job(1))).grants == (Grant(stays.id, (0,)),)


def test_a_memory_of_other_submissions_gives_no_job_two_places() -> None:
    policy = TwoDLas()
    _, memory = policy.decide(world(replace(job(2), submitted_s=0.0)), policy.initial())
    plan, _ = policy.decide(world(job(1), job(2), gpus=2), memory)
    assert sorted(served(plan)) == ["s/1", "s/2"]
    assert len(plan.grants) == 2
