"""ONES: its operators as laws, its search and its limits in tiny worlds."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hermes_ops.core.model import Gpu, Job, JobId, Phase, Plan, Point, Snapshot, SweepId
from hermes_ops.core.sizes import BatchRange, StepTime
from hermes_ops.core.wrapper import Wrapper
from hermes_ops.errors import ConfigError
from hermes_ops.policies import make_policy
from hermes_ops.policies.ones import Ones, OnesMemory
from hermes_ops.policies.ones.evolution import (
    Integers,
    Limits,
    Operators,
    crossover,
    mutation,
    padded,
)
from hermes_ops.policies.ones.history import (
    HistoryReader,
    JobHistory,
    JobState,
    grown_limit,
    overtime_limits,
    predicted_epochs,
)
from hermes_ops.policies.ones.schedules import ScheduleSearch, SearchedJob
from hermes_ops.policies.toolbox.job_speeds import MeasuredSpeeds
from hermes_ops.simulator.engine import layout, simulate
from hermes_ops.simulator.workload import Workload
from hermes_ops.testing.worlds import elastic_workloads

A = SweepId("a")


def job(number: int, *, epochs: int = 0, total: int = 20, most: int = 8, **facts: Any) -> Job:
    """A waiting job of 1 to `most` GPUs that has done `epochs` of its `total` epochs."""
    curve = tuple(Point(n, 1.0 / n, 100.0 * n) for n in range(1, epochs + 1))
    begun = {"service_gpu_s": 100.0 * epochs, "segments": min(1, epochs)}
    own = Job(
        JobId(f"a/{number}"), A, float(number), Phase.WAITING if epochs else Phase.PENDING,
        max_gpus=most, curve=curve, total_steps=total, waiting_since_s=0.0,
    )  # fmt: skip
    return replace(own, **(begun | facts))


def running(own: Job, gpus: tuple[int, ...], *, done_here: int = 1) -> Job:
    """The job on these GPUs, of whose epochs it has done `done_here` there; no time has passed."""
    return replace(
        own, phase=Phase.RUNNING, gpus_held=gpus, started_s=1000.0, waiting_since_s=None,
        steps_at_start=own.last_step - done_here,
    )  # fmt: skip


def world(gpus: int, *jobs: Job, now_s: float = 1000.0) -> Snapshot:
    return Snapshot(now_s, tuple(Gpu(n) for n in range(gpus)), jobs)


def sizes(plan: Plan) -> dict[str, int]:
    return {grant.job: len(grant.gpus) for grant in plan.grants}


def remembering(snapshot: Snapshot, limit: int) -> OnesMemory:
    """A memory in which every job may have that many GPUs."""
    return OnesMemory(
        jobs=tuple(
            JobHistory(j.id, j.service_gpu_s, j.service_gpu_s, len(j.gpus_held) or 1, limit)
            for j in snapshot.jobs
        )
    )


# --- the operators -------------------------------------------------------------------------------


@st.composite
def problems(draw: st.DrawFn) -> tuple[Limits, Integers, Integers]:
    """Draw limits of up to six jobs, valid schedules of them, and an order."""
    gpus = draw(st.integers(1, 12))
    kinds = draw(
        st.lists(
            st.sampled_from([(1, 2, 3, 4, 5, 6), (1, 2, 4), (2, 3), (3,), (1, 8), (4, 12)]),
            min_size=1, max_size=6,
        )
    )  # fmt: skip
    floors = np.zeros((len(kinds), gpus + 1), dtype=np.int64)
    for row, allowed in enumerate(kinds):
        for size in allowed:
            if size <= gpus:
                floors[row, size] = size
    floors = np.maximum.accumulate(floors, axis=1)
    least = np.array([allowed[0] for allowed in kinds])
    kind = np.arange(len(kinds))
    at_most = np.array([draw(st.integers(0, gpus)) for _ in kinds])
    target = floors[kind, at_most]
    keeps = np.zeros(len(kinds), dtype=bool)
    left = gpus
    for n in range(len(kinds)):  # they stand first in the genes
        if not (draw(st.booleans()) and 0 < target[n] <= left):
            break
        keeps[n], left = True, left - int(target[n])
    leaves = np.array([draw(st.booleans()) for _ in kinds]) & ~keeps
    limits = Limits(gpus, floors, kind, least, target, keeps, leaves)
    order = np.array(draw(st.permutations(range(len(kinds)))))
    kept_first = order[np.argsort(~keeps[order], kind="stable")]
    drawn = [[draw(st.integers(0, gpus)) for _ in kinds] for _ in range(draw(st.integers(1, 5)))]
    return limits, limits.refreshed(np.array(drawn), kept_first), order


def assert_valid(limits: Limits, schedules: Integers) -> None:
    assert (schedules.sum(axis=1) <= limits.gpus).all()
    assert (schedules <= limits.target).all()
    assert (limits.floors[limits.kind, schedules] == schedules).all()
    assert (schedules[:, limits.keeps] == limits.target[limits.keeps]).all()


@given(problem=problems(), seed=st.integers(0, 99), share=st.floats(0, 1))
@settings(max_examples=150, deadline=None)
def test_no_operator_exceeds_the_gpus_or_a_limit_or_moves_a_job_that_must_stay(
    problem: tuple[Limits, Integers, Integers], seed: int, share: float
) -> None:
    limits, parents, order = problem
    rng = np.random.default_rng(seed)
    assert_valid(limits, parents)
    assert_valid(limits, crossover(limits, parents, share, rng))
    mutants = mutation(limits, parents, share, rng)
    assert_valid(limits, mutants)
    kept = ~limits.leaves
    assert (mutants[:, kept] == parents[:, kept]).all()
    full = padded(limits, mutants, order)
    assert_valid(limits, full)
    assert (full >= mutants).all()


@given(problem=problems())
@settings(max_examples=100, deadline=None)
def test_padding_gives_the_first_waiting_job_its_least_size_if_that_fits(
    problem: tuple[Limits, Integers, Integers],
) -> None:
    limits, parents, order = problem
    for row, full in zip(parents, padded(limits, parents, order), strict=True):
        free = limits.gpus - row.sum()
        able = (row == 0) & (limits.least <= np.minimum(free, limits.target))
        waiting = [n for n in order if able[n]]
        assert not waiting or full[waiting[0]] > 0


def test_a_crossover_without_swaps_returns_the_parents_and_one_of_all_swaps_too() -> None:
    limits, parents = three_jobs(6), np.array([[4, 2, 0], [1, 1, 4]])
    for share in (0.0, 1.0):
        children = crossover(limits, parents, share, np.random.default_rng(0))
        assert sorted(map(tuple, children.tolist())) == [(1, 1, 4), (4, 2, 0)]


def three_jobs(gpus: int) -> Limits:
    floors = np.arange(gpus + 1)[None, :]
    ones, no = np.ones(3, dtype=np.int64), np.zeros(3, dtype=bool)
    return Limits(gpus, floors, 0 * ones, ones, gpus * ones, no, ~no)


# --- the search ----------------------------------------------------------------------------------


def search_of(snapshot: Snapshot, limit: int) -> ScheduleSearch:
    speeds = MeasuredSpeeds(snapshot)
    past = {p.job: p for p in remembering(snapshot, limit).jobs}
    reader = HistoryReader(snapshot, speeds, past, 120.0)
    states = [
        reader.state(j, len(j.gpus_held), {}, len(snapshot.gpus)) for j in snapshot.jobs
    ]  # fmt: skip
    return ScheduleSearch([SearchedJob(s, s.limit, 0.0) for s in states], 8, speeds)


def test_generations_find_a_schedule_with_less_left_than_the_present_one() -> None:
    """The present schedule serves the four longest jobs; the four that end first wait."""
    served = [running(job(n, epochs=4, total=90), (2 * n, 2 * n + 1)) for n in range(4)]
    waiting = [job(n, epochs=4, total=6) for n in range(4, 8)]
    search = search_of(world(8, *served, *waiting), 4)
    starts = search.starts((), 1)
    found = search.evolve(starts, 16, 40, Operators(0.5, 0.3), np.random.default_rng(0))
    before, after = search.score(np.stack((starts[0], found[0])), search.expected).tolist()
    assert after < 0.5 * before
    assert len(found) <= 16
    assert_valid(search.limits, found)


def test_jobs_with_less_left_run_when_there_are_more_jobs_than_gpus() -> None:
    served = [running(job(n, epochs=4, total=90), (n,)) for n in range(2)]
    waiting = [job(n, epochs=4, total=6) for n in range(2, 4)]
    snapshot, policy = world(2, *served, *waiting), Ones(generations=40, default_switch_s=1.0)
    plan, _ = policy.decide(snapshot, remembering(snapshot, 1))
    assert sizes(plan) == {"a/2": 1, "a/3": 1}


def test_a_restart_that_costs_more_than_it_gains_is_not_made() -> None:
    served = [running(job(n, epochs=4, total=8), (n,)) for n in range(2)]
    waiting = [job(n, epochs=4, total=7) for n in range(2, 4)]
    snapshot, policy = world(2, *served, *waiting), Ones(generations=40, default_switch_s=3600.0)
    plan, _ = policy.decide(snapshot, remembering(snapshot, 1))
    assert sizes(plan) == {"a/0": 1, "a/1": 1}


def test_a_new_job_comes_before_one_that_has_begun() -> None:
    snapshot = world(1, job(0, epochs=4), job(1))
    assert sizes(Ones().decide(snapshot, Ones().initial())[0]) == {"a/1": 1}


def test_a_job_without_an_epoch_on_its_gpus_keeps_them_and_free_ones_are_used() -> None:
    held = running(job(0, epochs=4, total=90), (0, 1), done_here=0)
    snapshot = world(4, held, job(1, epochs=4, total=6), job(2))
    plan, _ = Ones(generations=20).decide(snapshot, remembering(snapshot, 8))
    assert plan.gpus_of(held.id) == (0, 1)
    assert sum(sizes(plan).values()) == 4
    assert {"a/1", "a/2"} <= sizes(plan).keys()


def test_decisions_repeat_with_the_same_memory_and_draw_anew_with_another_seed() -> None:
    served = [running(job(n, epochs=5, total=40 + n), (n,)) for n in range(8)]
    snapshot = world(8, *served, *(job(n, epochs=3, total=30 + n) for n in range(8, 20)))
    memory = remembering(snapshot, 4)
    first, again = (Ones().decide(snapshot, memory) for _ in range(2))
    assert first[0].grants == again[0].grants
    assert first[1] == again[1]
    populations = {Ones(seed=n).decide(snapshot, memory)[1].population for n in range(4)}
    assert len(populations) > 1
    later = Ones().decide(snapshot, replace(memory, generation=8))[1]
    assert later.population != first[1].population


def test_the_population_is_bounded_and_has_no_ended_job() -> None:
    jobs = [job(n, epochs=3, total=30 + n) for n in range(12)]
    policy = Ones(population=5)
    _, memory = policy.decide(world(8, *jobs), policy.initial())
    assert 1 <= len(memory.population) <= 5
    gone = [replace(j, phase=Phase.ENDED) for j in jobs[:11]]
    _, memory = policy.decide(world(8, *gone, jobs[11]), memory)
    assert {name for schedule in memory.population for name, _ in schedule} == {"a/11"}
    assert [past.job for past in memory.jobs] == ["a/11"]


@dataclass(frozen=True, slots=True)
class Forgetful(Wrapper[OnesMemory]):
    """Loses its memory before every decision."""

    def decide(self, snapshot: Snapshot, memory: OnesMemory) -> tuple[Plan, OnesMemory]:
        return self.policy.decide(snapshot, self.initial())


@given(workload=elastic_workloads())
@settings(max_examples=20, deadline=None)
def test_all_jobs_end_within_their_sizes_although_the_memory_is_lost(workload: Workload) -> None:
    run = simulate(workload, layout("2x2"), Forgetful(Ones(generations=2)))
    allowed = {w.id: w.training.sizes for w in workload.jobs if w.training is not None}
    assert {outcome.state for outcome in run.outcomes} == {"finished"}
    assert all(len(segment.gpus) in allowed[segment.job] for segment in run.segments)


# --- limits, progress and batches ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("limit", "held", "epochs", "expected"),
    [
        (1, 1, 1.9, 1),
        (1, 1, 2.0, 2),
        (4, 4, 2.0, 8),
        (2, 2, 7.0, 8),
        (8, 8, 99.0, 20),
        (9, 2, 2.0, 9),
    ],
)
def test_a_limit_doubles_for_every_two_epochs_at_it_to_four_times_the_gpus(
    limit: int, held: int, epochs: float, expected: int
) -> None:
    assert grown_limit(job(0, most=64), limit, held, epochs, gpus=20) == expected


def test_a_limit_that_has_doubled_allows_the_next_size_of_a_list() -> None:
    listed = job(0, sizes=(1, 8))
    assert grown_limit(listed, 1, 1, 2.0, gpus=16) == 8
    assert grown_limit(listed, 1, 1, 2.0, gpus=4) == 4


def test_a_job_grows_after_two_epochs_at_its_limit_and_not_after_one() -> None:
    times = (StepTime(1, 100.0),)
    for done, expected in ((1, 1), (2, 2)):
        own = running(job(0, epochs=3, total=90, step_times=times), (0,), done_here=done)
        snapshot = world(8, own)
        assert sizes(Ones().decide(snapshot, remembering(snapshot, 1))[0]) == {"a/0": expected}


def test_a_job_without_reports_does_an_epoch_in_its_time() -> None:
    silent = replace(job(0, total=1, service_gpu_s=500.0), total_steps=None)
    silent = running(silent, (0,))
    for later_s, expected in ((239.0, 1), (240.0, 2)):
        snapshot = world(8, silent, now_s=1000.0 + later_s)
        assert sizes(Ones().decide(snapshot, remembering(snapshot, 1))[0]) == {"a/0": expected}


SLOWER = tuple(StepTime(gpus, s) for gpus, s in ((1, 100.0), (2, 150.0), (4, 150.0)))


@pytest.mark.parametrize(
    ("times", "limit", "expected"), [(SLOWER, 4, 1), (SLOWER[:1], 4, 4), (SLOWER, 8, 8)]
)
def test_a_job_grows_where_that_is_faster_or_larger_than_its_kind_has_tried(
    times: tuple[StepTime, ...], limit: int, expected: int
) -> None:
    own = running(job(0, epochs=9, total=90, step_times=times), (0,), done_here=1)
    snapshot = world(8, own)
    plan, _ = Ones().decide(snapshot, remembering(snapshot, limit))
    assert sizes(plan) == {"a/0": expected}


def test_a_new_job_takes_the_place_of_the_one_with_the_most_left() -> None:
    served = [running(job(n, epochs=4, total=10 + 80 * n), (n,)) for n in range(2)]
    snapshot, policy = world(2, *served, job(2)), Ones(default_switch_s=3600.0)
    assert sizes(policy.decide(snapshot, remembering(snapshot, 1))[0]) == {"a/0": 1, "a/2": 1}


def test_only_a_job_on_half_of_the_gpus_that_ran_longer_than_the_median_loses_of_its_limit() -> (
    None
):
    def state(number: int, held: int, service_gpu_s: float) -> JobState:
        own = job(number, service_gpu_s=service_gpu_s)
        return JobState(own, held, held, 1.0, 1.0, 1.0, 1.0, held)

    others = [state(1, 2, 200.0), state(2, 2, 200.0), state(3, 0, 0.0)]
    assert overtime_limits([state(0, 4, 1200.0), *others], 8) == {"a/0": 2}
    assert overtime_limits([state(0, 4, 1200.0), *others[:2]], 8) == {}  # no job waits
    assert overtime_limits([state(0, 3, 1200.0), *others], 8) == {}
    assert overtime_limits([state(0, 4, 200.0), *others], 8) == {}


def test_what_is_left_follows_from_declared_steps_then_longer_jobs_of_the_kind_then_itself() -> (
    None
):
    declared = job(0, epochs=4, total=10)
    silent = replace(job(0, epochs=2), total_steps=None)
    assert predicted_epochs(declared, 4.0, (90.0,)) == 6.0
    assert predicted_epochs(silent, 4.0, (3.0, 9.0, 13.0)) == pytest.approx(7.0)
    assert predicted_epochs(silent, 4.0, (3.0,)) == 4.0
    assert predicted_epochs(silent, 0.0, ()) == 1.0


def test_the_epochs_of_ended_jobs_of_a_kind_are_remembered() -> None:
    ended = replace(job(0, epochs=7), phase=Phase.ENDED, model_name="vgg16")
    _, memory = Ones().decide(world(2, ended), Ones().initial())
    assert memory.lengths == ((("vgg16", ""), (7.0,)),)
    _, memory = Ones().decide(world(2, ended), memory)
    assert memory.lengths == ((("vgg16", ""), (7.0,)),)


@pytest.mark.parametrize(
    ("noise_scale", "most", "expected"), [(None, 320, 64), (None, 40, 40), (9.0, 320, None)]
)
def test_the_batch_grows_with_the_gpus_unless_the_job_chooses_it(
    noise_scale: float | None, most: int, expected: int | None
) -> None:
    own = job(0, epochs=3, total=90, batch_range=BatchRange(32, most), noise_scale=noise_scale)
    snapshot = world(8, running(own, (0,), done_here=2))
    plan, _ = Ones().decide(snapshot, remembering(snapshot, 1))
    assert [(len(g.gpus), g.batch) for g in plan.grants] == [(2, expected)]


@pytest.mark.parametrize(
    ("parameter", "value"),
    [("population", 1), ("generations", 0), ("seed", -1), ("crossover", 1.5), ("mutation", "no"),
     ("epoch_s", 0), ("interval_s", 0), ("patience", -1), ("default_switch_s", -1.0)],
)  # fmt: skip
def test_a_parameter_outside_its_range_is_refused_by_name(parameter: str, value: object) -> None:
    with pytest.raises(ConfigError, match=parameter):
        make_policy("ones", {parameter: value})


def test_a_new_job_that_fits_starts_however_many_wider_ones_were_submitted_before_it() -> None:
    begun = [running(job(n, epochs=2, most=1), (n,), done_here=0) for n in (0, 1)]
    wide = [job(n, min_gpus=3, most=3) for n in range(2, 9)]
    plan, _ = Ones().decide(world(4, *begun, *wide, job(9, most=1)), Ones().initial())
    assert sizes(plan) == {"a/0": 1, "a/1": 1, "a/9": 1}
