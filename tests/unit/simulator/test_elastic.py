"""Jobs that change their size in a simulation."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hermes_ops.core.model import Grant, Job, JobId, Plan, Point, Snapshot
from hermes_ops.core.sizes import BatchRange, StepTime
from hermes_ops.core.wrapper import OneSize
from hermes_ops.policies.elastic_fifo import ElasticFifo
from hermes_ops.policies.fifo import Fifo
from hermes_ops.policies.toolbox.sized_grants import SizingProblem
from hermes_ops.simulator.engine import layout, simulate
from hermes_ops.simulator.event_log import EventLog, replay
from hermes_ops.simulator.metrics import measure
from hermes_ops.simulator.oracle import oracle
from hermes_ops.simulator.workload import (
    Costs,
    Pace,
    Placement,
    SimulationRun,
    TrainingModel,
    Work,
    Workload,
)
from hermes_ops.testing.worlds import built, elastic_workloads

BATCHES = BatchRange(32, 64)


@dataclass(frozen=True, slots=True)
class Linear:
    """A unit of work a second for each GPU; twice that with a batch of 64."""

    sizes: tuple[int, ...] = (1, 2, 4)
    batch_range: BatchRange | None = BATCHES

    def pace(self, placement: Placement, epoch: int, batch: int | None) -> Pace:
        gpus = sum(placement)
        rate = float(gpus * (2 if batch == 64 else 1))
        return Pace(rate, StepTime(gpus, 1 / rate, len(placement), 32), batch)

    def noise_scale(self, epoch: int) -> float | None:
        return 100.0 * epoch


@dataclass(frozen=True, slots=True)
class Sizes:
    """Gives the sizes of a table by time; the newest entry holds."""

    table: tuple[tuple[float, dict[str, int]], ...]
    batch: int | None = None
    name: ClassVar[str] = "sizes"
    preempts: ClassVar[bool] = True
    sizes: ClassVar[bool] = True

    def initial(self) -> None:
        return

    def decide(self, snapshot: Snapshot, memory: None) -> tuple[Plan, None]:
        sizes = max((e for e in self.table if e[0] <= snapshot.time_s), key=lambda e: e[0])[1]
        problem = SizingProblem.from_snapshot(snapshot)
        wanted = {JobId(job): size for job, size in sizes.items()}
        batches = dict.fromkeys(wanted, self.batch)
        later = [at_s for at_s, _ in self.table if at_s > snapshot.time_s]
        plan = Plan(problem.grants(wanted, batches), review_at_s=min(later, default=None))
        return plan, memory


def elastic(name: str, work: float, *, costs: Costs | None = None, at_s: float = 0.0) -> Work:
    return Work(JobId(name), at_s, work, costs=costs or Costs(), training=Linear())


def run(
    *jobs: Work, table: tuple[tuple[float, dict[str, int]], ...], gpus: str = "4"
) -> SimulationRun:
    return simulate(Workload("w", jobs), layout(gpus), Sizes(table))


def test_a_job_trains_at_the_pace_of_its_size_and_keeps_its_progress_over_a_resize() -> None:
    result = run(elastic("a", 100.0), table=((0.0, {"a": 1}), (20.0, {"a": 4})))
    (outcome,) = result.outcomes
    assert outcome.ended_s == 20.0 + 80.0 / 4
    assert (outcome.resizes, outcome.preemptions, outcome.waited_s) == (1, 0, 0.0)
    assert outcome.lost_gpu_s == pytest.approx(0.0)
    assert [segment.outcome for segment in result.segments] == ["resized", "finished"]


def test_a_resize_costs_its_start_on_all_of_the_new_gpus() -> None:
    work = elastic("a", 100.0, costs=Costs(startup_s=5.0))
    (outcome,) = run(work, table=((0.0, {"a": 1}), (20.0, {"a": 2}))).outcomes
    assert outcome.ended_s == 20.0 + 5.0 + 85.0 / 2
    assert outcome.lost_gpu_s == pytest.approx(5.0 + 2 * 5.0)


def test_a_resize_that_has_to_save_first_leaves_its_gpus_then() -> None:
    work = elastic("a", 100.0, costs=Costs(checkpoint_s=3.0))
    (outcome,) = run(work, table=((0.0, {"a": 1}), (20.0, {"a": 2}))).outcomes
    assert outcome.ended_s == 20.0 + 3.0 + 80.0 / 2


def test_the_log_of_a_resized_job_gives_its_outcome_again() -> None:
    lines: list[str] = []
    policy = Sizes(((0.0, {"a": 1, "b": 2}), (20.0, {"a": 2, "b": 1})))
    jobs = (elastic("a", 100.0, costs=Costs(startup_s=5.0)), elastic("b", 60.0, at_s=3.0))
    result = simulate(Workload("w", jobs), layout("4"), policy, log=EventLog(lines.append))
    for again, outcome in zip(replay(lines), result.outcomes, strict=True):
        assert (again.ended_s, again.resizes) == (outcome.ended_s, outcome.resizes)
        assert again.lost_gpu_s == pytest.approx(outcome.lost_gpu_s)


@dataclass(frozen=True, slots=True)
class Watched(Sizes):
    """Keeps the snapshots of its decisions."""

    seen: list[Snapshot] = field(default_factory=list)

    def decide(self, snapshot: Snapshot, memory: None) -> tuple[Plan, None]:
        self.seen.append(snapshot)
        return super(Watched, self).decide(snapshot, memory)

    def at(self, time_s: float) -> Job:
        return next(s for s in self.seen if s.time_s == time_s).index[JobId("a")]


def test_a_policy_sees_sizes_measured_steps_and_noise() -> None:
    policy = Watched(((0.0, {"a": 1}), (20.0, {"a": 4}), (30.0, {"a": 4})))
    simulate(Workload("w", (elastic("a", 100.0),)), layout("4"), policy)
    job = policy.at(30.0)
    assert (job.sizes, job.min_gpus, job.max_gpus, job.segments) == ((1, 2, 4), 1, 4, 2)
    assert [time.gpus for time in job.step_times] == [1]  # the running one is measured at its end
    assert job.seconds_a_step(1) == 1.0


def test_where_speeds_take_reports_each_segment_shows_its_speed_only_after_them() -> None:
    reviews = (5.0, 15.0, 20.0, 28.0, 35.0)
    policy = Watched(tuple((at_s, {"a": 1 if at_s < 20 else 2}) for at_s in (0.0, *reviews)))
    points = tuple(Point(n, 1.0, 10.0 * n) for n in range(1, 11))
    job = replace(elastic("a", 100.0), curve=points)
    simulate(Workload("w", (job,), speed_reports=2), layout("4"), policy)
    sizes = [[time.gpus for time in policy.at(at_s).step_times] for at_s in reviews]
    assert sizes == [[], [], [1], [1], [1, 2]]


def test_in_rounds_decisions_are_made_at_multiples_alone() -> None:
    workload = Workload("w", (elastic("a", 100.0, at_s=50.0),), round_s=60.0)
    result = simulate(workload, layout("4"), Sizes(((0.0, {"a": 1}), (70.0, {"a": 4}))))
    (outcome,) = result.outcomes
    assert outcome.first_start_s == 60.0
    assert outcome.ended_s == 120.0 + 40.0 / 4


def test_times_are_whole_seconds_half_to_even() -> None:
    workload = Workload("w", (elastic("a", 30.5), elastic("b", 31.5)), whole_seconds=True)
    result = simulate(workload, layout("4"), Sizes(((0.0, {"a": 1, "b": 1}),)))
    assert [outcome.ended_s for outcome in result.outcomes] == [30.0, 32.0]


def test_a_batch_of_a_plan_is_trained_with() -> None:
    policy = Sizes(((0.0, {"a": 1}),), batch=64)
    (outcome,) = simulate(Workload("w", (elastic("a", 100.0),)), layout("4"), policy).outcomes
    assert outcome.ended_s == 50.0


@dataclass(frozen=True, slots=True)
class HalfThenWhole:
    """Gives half of a GPU, and from 10 s on the whole."""

    name: ClassVar[str] = "half-then-whole"
    preempts: ClassVar[bool] = True

    def initial(self) -> None:
        return

    def decide(self, snapshot: Snapshot, memory: None) -> tuple[Plan, None]:
        share = 0.5 if snapshot.time_s < 10 else 1.0
        jobs = (job.id for job in (*snapshot.holding, *snapshot.queue))
        return Plan(tuple(Grant(job, (0,), share) for job in jobs), review_at_s=10.0), memory


def test_nothing_is_lost_when_the_share_of_a_gpu_grows() -> None:
    (outcome,) = simulate(
        Workload("w", (elastic("a", 100.0),)), layout("1"), HalfThenWhole()
    ).outcomes
    assert outcome.ended_s == 10.0 + 95.0
    assert outcome.lost_gpu_s == pytest.approx(0.0)


@pytest.mark.parametrize(("batch", "seconds"), [(None, 50.0), (32, 50.0), (64, 25.0)])
def test_under_a_policy_of_one_size_a_job_has_the_size_and_batch_that_its_user_requests(
    batch: int | None, seconds: float
) -> None:
    work = Work(JobId("a"), 0.0, 100.0, gpus=2, training=Linear(), batch=batch)
    (outcome,) = simulate(Workload("w", (work,)), layout("4"), OneSize(Fifo())).outcomes
    assert outcome.ended_s == seconds


def test_elastic_fifo_uses_all_gpus_and_lets_an_arrival_in() -> None:
    jobs = (elastic("a", 100.0), elastic("b", 100.0, at_s=10.0))
    result = simulate(Workload("w", jobs), layout("4"), ElasticFifo())
    assert [outcome.ended_s for outcome in result.outcomes] == [40.0, 50.0]
    assert measure(result).resizes == 2


@dataclass(frozen=True, slots=True)
class Rigid:
    """Another model at one size and batch."""

    model: TrainingModel
    gpus: int
    batch: int | None
    batch_range: BatchRange | None = None

    @property
    def sizes(self) -> tuple[int, ...]:
        return (self.gpus,)

    def pace(self, placement: Placement, epoch: int, batch: int | None) -> Pace:
        return self.model.pace(placement, epoch, self.batch)

    def noise_scale(self, epoch: int) -> float | None:
        return self.model.noise_scale(epoch)


def rigid(work: Work) -> Work:
    assert work.training is not None
    return replace(work, training=Rigid(work.training, work.gpus, work.batch))


@given(
    workload=elastic_workloads(),
    name=st.sampled_from(["fifo", "2d-las", "srsf", "gandiva"]),
    wrapper=st.sampled_from(["bare", "aging", "guarded"]),
)
@settings(max_examples=60, deadline=None)
def test_a_policy_of_one_size_runs_jobs_with_ranges_as_if_they_had_none(
    workload: Workload, name: str, wrapper: str
) -> None:
    alike = replace(workload, jobs=tuple(map(rigid, workload.jobs)))
    ranged, plain = (built(name, wrapper, oracle(jobs)) for jobs in (workload, alike))
    expected = simulate(alike, layout("2x2"), plain)
    found = simulate(workload, layout("2x2"), OneSize(ranged))
    assert found.segments == expected.segments
    assert measure(found) == measure(expected)
