"""Hand-computed simulations, and the laws that hold for all of them."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hermes_ops.core.model import (
    Gpu,
    Grant,
    JobId,
    Phase,
    Plan,
    Point,
    Reason,
    Snapshot,
    SweepId,
)
from hermes_ops.core.sizes import StepTime
from hermes_ops.errors import ConfigError, PlanError
from hermes_ops.policies import make_policy
from hermes_ops.policies.toolbox.fill import fill
from hermes_ops.simulator.engine import layout, simulate
from hermes_ops.simulator.event_log import EventLog, replay
from hermes_ops.simulator.oracle import oracle
from hermes_ops.simulator.workload import (
    Costs,
    Interference,
    LossObservation,
    NodeFailure,
    SimulatedSegment,
    SimulationRun,
    Work,
    Workload,
)

ONE = layout("1")
Wanted = Mapping[str, tuple[int, ...] | tuple[tuple[int, ...], float]]


@dataclass(frozen=True)
class Script:
    """From each time on these jobs hold these GPUs (and this share of them); `ends` end then."""

    steps: Mapping[float, Wanted]
    ends: Mapping[float, tuple[str, ...]] = field(default_factory=dict)
    seen: list[Snapshot] = field(default_factory=list)
    name: ClassVar[str] = "script"
    preempts: ClassVar[bool] = True

    def initial(self) -> None:
        return

    def decide(self, snapshot: Snapshot, memory: None) -> tuple[Plan, None]:
        self.seen.append(snapshot)
        now_s = snapshot.time_s
        wanted = self.steps[max(s for s in self.steps if s <= now_s)]
        there = {j.id for j in snapshot.jobs if j.phase is not Phase.ENDED}
        free = {j.id for j in (*snapshot.holding, *snapshot.queue)}
        ends = tuple(JobId(j) for s in self.ends if s <= now_s for j in self.ends[s] if j in there)
        pool = {gpu.index for gpu in snapshot.gpus}
        given = (_grant(job, what) for job, what in wanted.items())
        grants = tuple(
            g for g in given if g.job in free.difference(ends) and pool.issuperset(g.gpus)
        )
        later = (s for s in (*self.steps, *self.ends) if s > now_s)
        return Plan(grants, ends, review_at_s=min(later, default=None)), None


def _grant(job: str, what: Any) -> Grant:
    gpus, share = what if what and isinstance(what[0], tuple) else (what, 1.0)
    return Grant(JobId(job), gpus, share=share)


@dataclass(frozen=True)
class Whim:
    """Serves the jobs in a random order, another one at every decision; asks to be asked again."""

    seed: int
    review_s: float = 7.0
    name: ClassVar[str] = "whim"
    preempts: ClassVar[bool] = True

    def initial(self) -> None:
        return

    def decide(self, snapshot: Snapshot, memory: None) -> tuple[Plan, None]:
        jobs = [*snapshot.holding, *snapshot.queue]
        random.Random(f"{self.seed} {snapshot.time_s}").shuffle(jobs)
        reasons = {job.id: Reason("a whim") for job in jobs}
        return Plan(
            fill(snapshot, jobs), review_at_s=snapshot.time_s + self.review_s, reasons=reasons
        ), None


def work(name: str, seconds: float, submitted_s: float = 0.0, **facts: Any) -> Work:
    return Work(JobId(name), submitted_s, seconds, **facts)


def workload(*jobs: Work, disturbances: tuple[NodeFailure | Interference, ...] = ()) -> Workload:
    return Workload("made", jobs, disturbances)


def curve(*seconds: float) -> tuple[Point, ...]:
    return tuple(Point(n, 1.0 / n, s) for n, s in enumerate(seconds, start=1))


def ends(run: SimulationRun) -> dict[str, float | None]:
    return {str(o.work.id): o.ended_s for o in run.outcomes}


def fifo(*jobs: Work, gpus: str = "1") -> SimulationRun:
    return simulate(workload(*jobs), layout(gpus), make_policy("fifo", {}))


# -- by hand


def test_start_up_restore_and_checkpoint_are_paid_to_the_second() -> None:
    costs = Costs(startup_s=2.0, restore_s=3.0, checkpoint_s=1.0)
    jobs = workload(work("a", 10.0, costs=costs), work("b", 4.0, costs=costs))
    run = simulate(jobs, ONE, Script({0.0: {"a": (0,)}, 7.0: {"b": (0,)}, 14.0: {"a": (0,)}}))

    # a: starts up to 2, trains to 7, writes to 8; b: starts up to 10, trains to 14;
    # a: starts up to 16, reads to 19, trains its other 5 s to 24
    assert run.segments == (
        SimulatedSegment(JobId("a"), (0,), 0.0, 8.0, 3.0, "preempted"),
        SimulatedSegment(JobId("b"), (0,), 8.0, 14.0, 2.0, "finished"),
        SimulatedSegment(JobId("a"), (0,), 14.0, 24.0, 5.0, "finished"),
    )
    a, b = run.outcomes
    assert (a.first_start_s, a.ended_s, a.waited_s, a.preemptions) == (0.0, 24.0, 6.0, 1)
    assert (a.service_gpu_s, a.lost_gpu_s, a.trained_s) == (18.0, 8.0, 10.0)
    assert (b.first_start_s, b.ended_s, b.waited_s, b.preemptions) == (8.0, 14.0, 8.0, 0)
    assert (b.service_gpu_s, b.lost_gpu_s, b.completion_s) == (6.0, 2.0, 14.0)


def test_a_policy_sees_phases_service_and_costs_as_they_become_known() -> None:
    costs = Costs(startup_s=2.0, restore_s=3.0, checkpoint_s=1.0)
    a = work("a", 10.0, costs=costs, gpus=2, curve=curve(4.0, 8.0))
    script = Script({0.0: {}, 1.0: {"a": (0, 1)}, 8.0: {}, 9.5: {"a": (0, 1)}})
    simulate(workload(a), layout("2"), script)

    seen = [(s.time_s, s.index[JobId("a")]) for s in script.seen]
    assert [(t, j.phase) for t, j in seen] == [
        (0.0, Phase.PENDING),
        (1.0, Phase.PENDING),
        (3.0, Phase.RUNNING),
        (7.0, Phase.RUNNING),  # its first point
        (8.0, Phase.RUNNING),
        (9.0, Phase.WAITING),
        (9.5, Phase.WAITING),
        (14.5, Phase.RUNNING),
        (17.5, Phase.RUNNING),  # its second point
        (19.5, Phase.ENDED),
    ]
    job = dict(seen)
    assert [job[t].attained_gpu_s(t) for t in (3.0, 7.0, 9.0, 14.5)] == [4.0, 12.0, 16.0, 26.0]
    assert [len(job[t].curve) for t in (3.0, 7.0, 17.5)] == [0, 1, 2]
    assert (job[3.0].startup_s, job[3.0].checkpoint_s, job[3.0].restore_s) == (2.0, None, None)
    assert (job[9.0].checkpoint_s, job[9.0].waiting_since_s, job[9.0].preemptions) == (1.0, 9.0, 1)
    assert (job[14.5].restore_s, job[14.5].started_s, job[14.5].steps_at_start) == (3.0, 9.5, 1)
    assert job[17.5].step_times == (StepTime(2, 4.0),)


def test_a_job_that_stops_is_stopping_until_it_has_left() -> None:
    a = work("a", 10.0, costs=Costs(checkpoint_s=2.0))
    script = Script({0.0: {"a": (0,)}, 4.0: {}, 5.0: {}, 6.5: {"a": (0,)}})
    run = simulate(workload(a), ONE, script)
    seen = {s.time_s: s.index[JobId("a")] for s in script.seen}
    assert (seen[5.0].phase, seen[5.0].gpus_held) == (Phase.STOPPING, ())
    assert seen[5.0].attained_gpu_s(5.0) == 4.0
    assert seen[6.0].phase is Phase.WAITING
    assert ends(run) == {"a": 12.5}


@pytest.mark.parametrize(("told_s", "ended_s"), [(7.5, 25.0), (8.5, 24.0), (9.0, 10.0)])
def test_a_job_that_is_told_to_stop_in_its_last_lines_ends_by_itself(
    told_s: float, ended_s: float
) -> None:
    costs = Costs(checkpoint_s=0.5, ending_s=1.0)
    jobs = workload(work("a", 10.0, costs=costs, curve=curve(4.0, 8.0)), work("b", 3.0))
    run = simulate(jobs, ONE, Script({0.0: {"a": (0,)}, told_s: {"b": (0,)}, 22.5: {"a": (0,)}}))
    assert ends(run)["a"] == ended_s
    assert run.outcomes[0].preemptions == (ended_s > 10.0)
    assert ends(run)["b"] == (13.0 if ended_s == 10.0 else told_s + 3.5)


def test_a_job_that_has_not_begun_to_train_leaves_without_a_checkpoint() -> None:
    a = work("a", 10.0, costs=Costs(startup_s=5.0, checkpoint_s=2.0))
    run = simulate(workload(a), ONE, Script({0.0: {"a": (0,)}, 3.0: {}, 4.0: {"a": (0,)}}))
    assert run.segments[0] == SimulatedSegment(JobId("a"), (0,), 0.0, 3.0, 3.0, "preempted")
    assert ends(run) == {"a": 19.0}


def test_a_start_on_gpus_that_are_still_occupied_can_be_taken_back() -> None:
    a, b = work("a", 10.0, costs=Costs(checkpoint_s=4.0)), work("b", 5.0)
    script = Script({0.0: {"a": (0,)}, 2.0: {"b": (0,)}, 3.0: {}, 8.0: {"b": (0,)}})
    run = simulate(workload(a, b), ONE, script)
    seen = {s.time_s: s.index[JobId("b")] for s in script.seen}
    assert (seen[3.0].phase, seen[3.0].gpus_held) == (Phase.STARTING, (0,))
    assert (seen[6.0].phase, seen[6.0].preemptions) == (Phase.PENDING, 0)
    assert run.outcomes[1].first_start_s == 8.0


def test_a_job_is_moved_at_once_when_it_has_no_checkpoint_to_write() -> None:
    run = simulate(
        workload(work("a", 10.0)), layout("2"), Script({0.0: {"a": (0,)}, 4.0: {"a": (1,)}})
    )
    assert [(s.gpus, s.begin_s, s.end_s) for s in run.segments] == [
        ((0,), 0.0, 4.0),
        ((1,), 4.0, 10.0),
    ]


def test_a_later_arrival_is_decided_on_when_it_comes() -> None:
    run = fifo(work("a", 10.0), work("b", 5.0, submitted_s=3.0), work("c", 1.0, submitted_s=20.0))
    assert ends(run) == {"a": 10.0, "b": 15.0, "c": 21.0}
    assert [o.waited_s for o in run.outcomes] == [0.0, 7.0, 0.0]
    assert run.decisions == 6


def test_all_that_happens_at_one_instant_is_handled_before_one_decision() -> None:
    script = Script({0.0: {"a": (0,), "b": (1,)}, 5.0: {"c": (0,), "d": (1,)}})
    a, b, c = work("a", 5.0), work("b", 5.0), work("c", 1.0, submitted_s=5.0)
    simulate(workload(a, b, c, work("d", 1.0, submitted_s=5.0)), layout("2"), script)
    assert [s.time_s for s in script.seen] == [0.0, 5.0, 6.0]


def test_a_job_without_a_curve_is_seen_once_after_its_end() -> None:
    script = Script({0.0: {"a": (0,)}, 2.0: {}, 4.0: {}})
    run = simulate(workload(work("a", 1.0), work("b", 1.0)), ONE, script)
    seen = {s.time_s: {str(j.id): j.phase for j in s.jobs} for s in script.seen}
    assert seen[1.0] == {"a": Phase.ENDED, "b": Phase.PENDING}
    assert seen[2.0] == {"b": Phase.PENDING}
    assert run.outcomes[1].state == "stopped_early"


def test_losses_are_seen_when_their_seconds_have_been_trained() -> None:
    a = work("a", 6.0, curve=curve(2.0, 4.0, 6.0))
    b = work("b", 1.0, submitted_s=3.0)
    run = simulate(
        workload(a, b), ONE, Script({0.0: {"a": (0,)}, 3.0: {"b": (0,)}, 4.0: {"a": (0,)}})
    )
    assert run.observations == (
        LossObservation(JobId("a"), 1, 1.0, 2.0),
        LossObservation(JobId("a"), 2, 1.0 / 2, 5.0),
        LossObservation(JobId("a"), 3, 1.0 / 3, 7.0),
    )


def test_jobs_that_share_a_gpu_train_at_their_shares() -> None:
    half = ((0,), 0.5)
    script = Script({0.0: {"a": half, "b": half}, 4.0: {"a": ((0,), 0.75), "b": ((0,), 0.25)}})
    run = simulate(workload(work("a", 5.0), work("b", 4.0)), ONE, script)
    # a: 2 s by 4, then 3 s at 0.75 to 8; b: 2 s by 4, 2 s at 0.25 to 12
    assert ends(run) == {"a": 8.0, "b": 12.0}
    assert [o.lost_gpu_s for o in run.outcomes] == [0.0, 0.0]
    assert [s.lost_s for s in run.segments] == [0.0, 0.0]


def test_a_job_that_is_ended_early_frees_its_gpus_at_once() -> None:
    a, b = work("a", 10.0, costs=Costs(checkpoint_s=3.0)), work("b", 10.0)
    script = Script({0.0: {"a": (0,)}, 2.0: {}, 4.0: {"b": (0,)}}, ends={4.0: ("a",)})
    run = simulate(workload(a, b), ONE, script)
    assert ends(run) == {"a": 4.0, "b": 14.0}
    assert [o.state for o in run.outcomes] == ["stopped_early", "finished"]
    assert run.segments[0] == SimulatedSegment(JobId("a"), (0,), 0.0, 4.0, 2.0, "stopped_early")
    assert run.outcomes[0].trained_s == 2.0
    assert run.outcomes[0].completion_s is None


def test_jobs_that_a_policy_never_resumes_are_stopped_early_at_the_end() -> None:
    run = simulate(
        workload(work("a", 10.0), work("b", 3.0)), ONE, Script({0.0: {"a": (0,)}, 4.0: {}})
    )
    a, b = run.outcomes
    assert (a.state, a.ended_s, a.trained_s) == ("stopped_early", None, 4.0)
    assert (b.state, b.ended_s, b.first_start_s, b.waited_s) == ("stopped_early", None, None, 4.0)


def test_reviews_that_change_nothing_for_ever_end_the_simulation() -> None:
    @dataclass(frozen=True)
    class Idle(Script):
        def decide(self, snapshot: Snapshot, memory: None) -> tuple[Plan, None]:
            return Plan(review_at_s=snapshot.time_s + 1e-12), None

    run = simulate(workload(work("a", 1.0)), ONE, Idle({}))
    assert run.outcomes[0].state == "stopped_early"


def test_a_policy_that_moves_jobs_for_ever_is_refused() -> None:
    @dataclass(frozen=True)
    class Restless(Script):
        def decide(self, snapshot: Snapshot, memory: None) -> tuple[Plan, None]:
            """Starts who waits and moves one that does not."""
            waiting = {job.id for job in snapshot.queue}
            mover = "b" if waiting == {"a"} else "a"
            grants = []
            for name, seats in (("a", (0, 1)), ("b", (2, 3))):
                seat = snapshot.held.get(JobId(name), seats[:1])[0]
                moves = name == mover and name in snapshot.held
                grants.append(Grant(JobId(name), (sum(seats) - seat if moves else seat,)))
            return Plan(tuple(grants), review_at_s=0.5), None

    with pytest.raises(PlanError, match=r"moves jobs without end at 0\.5"):
        simulate(workload(work("a", 1.0), work("b", 1.0)), layout("4"), Restless({}))


def test_the_clock_gives_the_seconds_of_each_decision() -> None:
    ticks = iter(range(1_000))
    run = simulate(
        workload(work("a", 1.0)), ONE, make_policy("fifo", {}), clock=lambda: float(next(ticks))
    )
    assert run.decision_s == (1.0,) * run.decisions


def test_the_oracle_knows_what_is_left_in_spite_of_costs_and_shares() -> None:
    jobs = workload(work("a", 10.0, costs=Costs(startup_s=3.0), curve=curve(2.0, 9.0)))
    script = Script({0.0: {"a": ((0,), 0.5)}, 5.0: {"a": ((0,), 0.5)}, 9.0: {"a": (0,)}})
    simulate(jobs, ONE, script)
    future = oracle(jobs)
    left = {s.time_s: future.remaining_s(s.index[JobId("a")], s.time_s) for s in script.seen}
    assert left == {0.0: 10.0, 3.0: 10.0, 5.0: 9.0, 7.0: 8.0, 9.0: 7.0, 15.0: 1.0, 16.0: 0.0}
    assert future.final_loss(script.seen[0].jobs[0]) == 0.5


def test_a_snapshot_that_is_kept_does_not_change_with_the_world() -> None:
    script = Script({0.0: {}, 1.0: {}, 2.0: {"a": (0,)}, 3.0: {"b": (0,)}, 4.0: {}})
    simulate(workload(work("a", 9.0), work("b", 9.0)), ONE, script)
    del script.seen[1]  # of two snapshots between which nothing changed, one is kept
    for snapshot in script.seen:
        again = Snapshot(snapshot.time_s, snapshot.gpus, snapshot.jobs)
        assert again == snapshot
        for view in ("queue", "holding", "others"):
            assert tuple(getattr(again, view)) == tuple(getattr(snapshot, view))
        for view in ("queue_of", "index", "held", "retained", "free"):
            assert getattr(again, view) == getattr(snapshot, view)


def test_the_free_gpus_are_those_that_nobody_keeps_through_shares_and_failed_nodes() -> None:
    half, fail = ((1,), 0.5), NodeFailure(5.0, "node-0", 8.0)
    script = Script(
        {
            0.0: {"a": (0,), "b": half, "c": half},
            2.0: {"a": (0,), "c": half},
            4.0: {"a": (0,), "b": (2,), "c": half},
            6.0: {"a": (3,)},
        }
    )
    jobs = [work(name, 40.0) for name in "abc"]
    simulate(workload(*jobs, disturbances=(fail,)), layout("2x2"), script)
    free = {snapshot.time_s: sorted(snapshot.free) for snapshot in script.seen}
    assert free[2.0] == [2, 3]
    assert free[4.0] == [2, 3]
    assert (free[5.0], free[6.0]) == ([3], [3])
    assert free[8.0] == [0, 1, 2]
    for snapshot in script.seen:
        assert snapshot.free == Snapshot(snapshot.time_s, snapshot.gpus, snapshot.jobs).free


# -- machines


def test_a_failed_node_takes_its_jobs_back_to_their_last_checkpoint() -> None:
    a, b = work("a", 10.0, curve=curve(2.0, 4.0)), work("b", 10.0, gpus=1)
    troubles = (NodeFailure(5.0, "node-0", 8.0),)
    script = Script({0.0: {"a": (0,), "b": (1,)}, 8.0: {"a": (0,), "b": (1,)}})
    run = simulate(workload(a, b, disturbances=troubles), layout("2x1"), script)
    assert run.segments[0] == SimulatedSegment(JobId("a"), (0,), 0.0, 5.0, 1.0, "failed")
    assert ends(run) == {"a": 14.0, "b": 10.0}  # 4 s of a were saved
    assert (run.outcomes[0].lost_gpu_s, run.outcomes[0].preemptions) == (1.0, 0)
    pools = {s.time_s: [g.index for g in s.gpus] for s in script.seen}
    assert (pools[4.0], pools[5.0], pools[8.0]) == ([0, 1], [1], [0, 1])


def test_a_job_without_a_curve_loses_its_whole_segment_but_nothing_before_it() -> None:
    a = work("a", 10.0)
    troubles = (NodeFailure(7.0, "node-0", 9.0),)
    script = Script({0.0: {"a": (0,)}, 3.0: {}, 5.0: {"a": (0,)}, 7.0: {}, 9.0: {"a": (0,)}})
    run = simulate(workload(a, disturbances=troubles), ONE, script)
    assert [s.lost_s for s in run.segments] == [0.0, 2.0, 0.0]
    assert ends(run) == {"a": 16.0}


def test_a_gang_is_lost_with_one_of_its_nodes() -> None:
    a = work("a", 10.0, gpus=2)
    jobs = workload(a, disturbances=(NodeFailure(4.0, "node-1", 5.0),))
    run = simulate(jobs, layout("2x1"), make_policy("fifo", {}))
    assert ends(run) == {"a": 15.0}


def test_interference_slows_its_node_for_its_time() -> None:
    troubles = (Interference(2.0, "node-0", 6.0, 0.5), Interference(4.0, "node-0", 6.0, 0.5))
    a, b = work("a", 10.0), work("b", 10.0)
    jobs = workload(a, b, disturbances=troubles)
    run = simulate(jobs, layout("2x1"), make_policy("fifo", {}))
    # a: 2 s by 2, 1 s more by 4, half a second by 6, then the other 6.5 s
    assert ends(run) == {"a": 12.5, "b": 10.0}
    assert run.outcomes[0].lost_gpu_s == 2.5


def test_a_gang_trains_at_the_pace_of_its_slowest_node() -> None:
    troubles = (Interference(0.0, "node-1", 99.0, 0.5), Interference(0.0, "node-0", 99.0, 0.8))
    jobs = workload(work("a", 10.0, gpus=2), disturbances=troubles)
    assert ends(simulate(jobs, layout("2x1"), make_policy("fifo", {}))) == {"a": 20.0}


def test_what_was_trained_before_an_interference_is_lost_with_the_node_too() -> None:
    troubles = (Interference(4.0, "node-0", 99.0, 0.5), NodeFailure(6.0, "node-0", 7.0))
    jobs = workload(work("a", 10.0), disturbances=troubles)
    run = simulate(jobs, ONE, make_policy("fifo", {}))
    assert run.segments[0].lost_s == 6.0
    assert ends(run) == {"a": 27.0}


def test_a_model_that_is_spread_over_more_nodes_than_it_needs_is_slower() -> None:
    together, apart = (
        work("a", 10.0, gpus=2, model_name="vgg16"),
        work("b", 10.0, gpus=2, model_name="vgg16"),
    )
    wide = work("c", 10.0, gpus=4, model_name="vgg16")
    jobs = Workload("made", (together, apart, wide), (), (("vgg16", 0.5),))
    wanted = {"a": (0, 1), "b": (3, 5), "c": (6, 7, 8, 9)}
    run = simulate(jobs, layout("5x2"), Script({0.0: wanted}))
    assert ends(run) == {"a": 10.0, "b": 20.0, "c": 10.0}


@pytest.mark.parametrize("text", ["", "0", "2x0", "x4", "4x", "2x4x8", "-3", "two"])
def test_a_layout_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="nodes x GPUs"):
        layout(text)


def test_a_layout_is_nodes_times_gpus() -> None:
    assert layout("2x2") == (Gpu(0, "node-0"), Gpu(1, "node-0"), Gpu(2, "node-1"), Gpu(3, "node-1"))
    assert {gpu.node for gpu in layout("64")} == {"node-0"}


def test_a_workload_with_a_doubled_id_or_an_unknown_node_is_refused() -> None:
    troubles = (NodeFailure(1.0, "node-9", 2.0),)
    with pytest.raises(ConfigError, match="1 ids twice") as caught:
        simulate(
            workload(work("a", 1.0), work("a", 1.0), disturbances=troubles),
            ONE,
            make_policy("fifo", {}),
        )
    assert "node-9" in str(caught.value)


# -- laws


@st.composite
def worlds(draw: st.DrawFn) -> Workload:
    """A few jobs of one or two GPUs on two nodes of two, with costs, curves and disturbances."""
    jobs = []
    for number in range(draw(st.integers(1, 7))):
        seconds = draw(st.sampled_from([0.0, 1.0, 5.0, 12.5, 40.0]))
        points = draw(st.integers(0, 4))
        costs = Costs(*(draw(st.sampled_from([0.0, 0.0, 1.5, 0.7])) for _ in range(3)))
        jobs.append(
            Work(
                JobId(f"s/{number}"),
                draw(st.sampled_from([0.0, 0.0, 3.0, 30.0])),
                seconds,
                draw(st.sampled_from([1, 1, 2, 4])),
                sweep=SweepId("s"),
                curve=tuple(Point(n, 1 / n, seconds * n / points) for n in range(1, points + 1)),
                costs=costs,
            )
        )
    troubles: list[NodeFailure | Interference] = []
    for _ in range(draw(st.integers(0, 2))):
        at_s, node = draw(st.sampled_from([1.0, 6.0])), draw(st.sampled_from(["node-0", "node-1"]))
        troubles.append(NodeFailure(at_s, node, at_s + draw(st.sampled_from([2.0, 20.0]))))
        troubles.append(Interference(at_s + 3, node, at_s + 9, draw(st.sampled_from([0.25, 0.5]))))
    return Workload("drawn", tuple(jobs), tuple(draw(st.permutations(troubles))))


GPUS = layout("2x2")
POLICIES = ("fifo", "fifo-backfill", "srtf", "srsf", "2d-las", "hermes", "whim")


def simulated(drawn: Workload, name: str, log: EventLog | None = None) -> SimulationRun:
    policy: Any = Whim(1) if name == "whim" else make_policy(name, {}, {"oracle": oracle(drawn)})
    return simulate(drawn, GPUS, policy, log=log)


@pytest.mark.parametrize("name", POLICIES)
@given(drawn=worlds())
@settings(max_examples=40, deadline=None)
def test_service_is_conserved_and_gpus_are_never_given_twice(name: str, drawn: Workload) -> None:
    run = simulated(drawn, name)
    for gpu in GPUS:
        mine = sorted((s.begin_s, s.end_s) for s in run.segments if gpu.index in s.gpus)
        assert all(before[1] <= after[0] for before, after in pairwise(mine))
    for outcome in run.outcomes:
        mine_too = [s for s in run.segments if s.job == outcome.work.id]
        held_s = sum(s.end_s - s.begin_s for s in mine_too)
        lost_s = sum(s.lost_s for s in mine_too)
        gpus = outcome.work.gpus
        assert all(len(s.gpus) == gpus for s in mine_too)
        assert outcome.state == "finished"
        assert outcome.trained_s == outcome.work.seconds
        assert outcome.service_gpu_s == pytest.approx(held_s * gpus)
        assert outcome.lost_gpu_s == pytest.approx(lost_s * gpus, abs=1e-9)
        assert outcome.lost_gpu_s >= -1e-9
        assert outcome.completion_s == pytest.approx(held_s + outcome.waited_s)
        assert outcome.preemptions == sum(s.outcome == "preempted" for s in mine_too)


@pytest.mark.parametrize("name", POLICIES)
@given(drawn=worlds(), chance=st.randoms(use_true_random=False))
@settings(max_examples=15, deadline=None)
def test_the_same_workload_gives_the_same_run_in_any_order_of_its_jobs(
    name: str, drawn: Workload, chance: random.Random
) -> None:
    jobs = list(drawn.jobs)
    chance.shuffle(jobs)
    shuffled = Workload(drawn.name, tuple(jobs), drawn.disturbances)
    first, again = simulated(drawn, name), simulated(shuffled, name)
    assert (first.outcomes, first.segments, first.observations) == (
        again.outcomes,
        again.segments,
        again.observations,
    )


@pytest.mark.parametrize("name", ["fifo", "whim"])
@given(drawn=worlds())
@settings(max_examples=40, deadline=None)
def test_the_outcomes_follow_from_the_event_log_alone(name: str, drawn: Workload) -> None:
    lines: list[str] = []
    run = simulated(drawn, name, EventLog(lines.append))
    assert replay(lines) == run.outcomes


@pytest.mark.law
def test_the_versions_of_a_long_curve_take_no_memory_of_their_own() -> None:
    steps = 900
    works = [
        Work(
            JobId(f"s/{n}"), 0.0, float(steps), sweep=SweepId("s"), total_steps=steps,
            curve=tuple(Point(k, 1.0 / k + n, float(k)) for k in range(1, steps + 1)),
        )
        for n in range(3)
    ]  # fmt: skip
    tracemalloc.start()
    run = simulate(Workload("long", tuple(works)), layout("3"), make_policy("hermes", {}))
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(run.outcomes) == 3
    assert peak_bytes < 20_000_000  # all versions as tuples, with their arrays, take 60 MB
