from __future__ import annotations

from dataclasses import dataclass, field, replace
from statistics import median_low
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hermes_ops.core.guards import guarded
from hermes_ops.core.model import Gpu, JobId, Plan, Point, Snapshot, SweepId
from hermes_ops.core.wrapper import Wrapper
from hermes_ops.errors import ConfigError, HermesError
from hermes_ops.policies import make_policy
from hermes_ops.simulator.engine import simulate
from hermes_ops.simulator.metrics import time_to_best_s
from hermes_ops.simulator.replay import (
    MOST_POINTS,
    OBSERVATION_SHIFTS_S,
    Bounds,
    ReplaySettings,
    completions,
    replay,
)
from hermes_ops.simulator.sweep_history import MeasuredFigures, RecordedSweep
from hermes_ops.simulator.workload import Costs, SegmentStart, SimulationRun, Work, Workload
from tests.unit.simulator.recorded_sweeps import config

SWEEP = "digits-1"
FIFO = ReplaySettings("fifo", {})


def work(number: int, losses: list[float], step_s: float = 1.0, **changes: Any) -> Work:
    """A trial of the sweep with these losses, one a step; planned are 4 steps."""
    facts: dict[str, Any] = {
        "submitted_s": 0.0,
        "seconds": len(losses) * step_s,
        "sweep": SweepId(SWEEP),
        "total_steps": 4,
        "curve": tuple(Point(n, loss, n * step_s) for n, loss in enumerate(losses, start=1)),
    }
    return Work(JobId(f"{SWEEP}/{number}"), **{**facts, **changes})


def cut(number: int, losses: list[float], step_s: float = 1.0, **changes: Any) -> Work:
    return work(number, losses, step_s, cut_short=True, **changes)


def sweep(*works: Work, gpus: int | None = 1, **changes: Any) -> RecordedSweep:
    measured = MeasuredFigures("fifo", None, None, 0.0, 0)
    costs = works[0].costs if works else Costs()
    return RecordedSweep(Workload(SWEEP, works), config(**changes), gpus, measured, costs)


def test_a_sweep_of_whole_curves_has_one_replay_and_points_for_results() -> None:
    found = replay(sweep(work(0, [3, 2]), work(1, [3, 1]), work(2, [3, 2])), FIFO)
    assert found.time_to_best_s == Bounds(4.0, 4.0)
    assert found.gpu_hours == Bounds(6 / 3600, 6 / 3600)
    assert (found.cut_short, found.needed, [name for name, _ in found.runs]) == ((), (), ["whole"])


def test_a_missing_part_counts_for_nothing_at_the_least_and_for_all_its_steps_at_the_most() -> None:
    found = replay(sweep(cut(0, [3], step_s=2.0), work(1, [3, 1])), FIFO)
    # Trial 0 takes 2 s or all of its four steps, and can be the best one or not.
    assert found.time_to_best_s == Bounds(2.0, 10.0)
    assert found.makespan_s == Bounds(4.0, 10.0)
    assert (found.cut_short, found.needed) == ((0,), (0,))


def test_the_best_complete_trial_cannot_be_the_best_once_a_cut_short_one_has_shown_less() -> None:
    found = replay(sweep(work(0, [3, 2]), cut(1, [3, 1])), FIFO)
    assert found.time_to_best_s == Bounds(4.0, 6.0)


def test_a_trial_without_a_recorded_step_may_need_all_of_them_at_the_slowest_pace() -> None:
    found = replay(sweep(cut(0, []), work(1, [3, 2], step_s=1.0), work(2, [3], 5.0)), FIFO)
    assert found.makespan_s == Bounds(7.0, 4 * 5.0 + 7.0)


def test_the_slowest_recorded_step_is_the_pace_of_the_missing_ones() -> None:
    uneven = cut(0, [3, 2], curve=(Point(1, 3.0, 1.0), Point(2, 2.0, 4.0)), seconds=4.0)
    found = replay(sweep(uneven, work(1, [3, 1])), FIFO)
    assert found.makespan_s == Bounds(6.0, 4.0 + 2 * 3.0 + 2.0)


def test_a_missing_part_ends_with_the_longest_exit_of_the_sweep() -> None:
    slow_exit = replace(work(1, [3, 1]), seconds=2.5)
    found = replay(sweep(cut(0, [3]), slow_exit), FIFO)
    assert found.makespan_s == Bounds(3.5, 4.5 + 2.5)


def test_a_cut_short_trial_that_the_policy_never_takes_further_leaves_points() -> None:
    # Median stopping ends the bad trial before its curve ends, in each of the simulations.
    others = [work(n, [3, 2, 1, 1], submitted_s=0.0) for n in range(5)]
    bad = cut(5, [9, 9, 9, 9], total_steps=6)
    found = replay(sweep(*others, bad, early_stop="median", max_epochs=6), FIFO)
    assert (found.cut_short, found.needed) == ((5,), ())
    assert found.time_to_best_s == Bounds(4.0, 4.0)
    assert found.makespan_s.low == found.makespan_s.high


def test_nothing_is_said_of_a_sweep_in_which_no_step_was_ever_seen() -> None:
    with pytest.raises(HermesError, match="no trial has shown how long a step takes"):
        replay(sweep(cut(0, []), cut(1, [])), FIFO)


def test_the_time_in_which_a_gpu_changes_hands_is_nobodys_gpu_time() -> None:
    costs = Costs(startup_s=1.0, handover_s=2.0)
    works = [work(n, [3, n], costs=costs) for n in range(2)]
    found = replay(sweep(*works), FIFO)
    assert found.time_to_best_s == Bounds(5.0, 5.0)
    assert found.gpu_hours.low == pytest.approx(2 * 3.0 / 3600)


def test_a_given_switch_cost_stands_in_the_place_of_the_measured_ones() -> None:
    works = [work(n, [3, n], costs=Costs(1.0, 1.0, 1.0, 1.0, 1.0, 1.0)) for n in range(2)]
    found = replay(sweep(*works), replace(FIFO, switch_s=10.0))
    assert found.makespan_s == Bounds(24.0, 24.0)
    assert (found.costs, found.gpu_hours.low) == (Costs(startup_s=10.0), 24 / 3600)


def test_the_policy_is_within_the_guards_of_a_live_pool_unless_they_are_taken_off() -> None:
    costs = Costs(startup_s=0.5, restore_s=0.5, checkpoint_s=0.5)
    improvements = [[1 / (1 + (n + 1) * step) for step in range(1, 13)] for n in range(4)]
    works = [work(n, fall, costs=costs, total_steps=12) for n, fall in enumerate(improvements)]
    guarded, bare, calm = (
        replay(sweep(*works), ReplaySettings("hermes", options, guards=guards)).preemptions.low
        for guards, options in ((True, {}), (False, {}), (True, {"guard_k": 1000}))
    )
    assert guarded is not None
    assert bare is not None
    assert bare > guarded
    assert calm == 0


def test_a_search_that_learns_has_no_more_trials_without_a_loss_than_in_a_live_pool() -> None:
    from_step_2 = tuple(Point(step, 1.0 / step, float(step)) for step in (2, 3, 4))
    works = [work(n, [4, 3, 2, 1], curve=from_step_2) for n in range(4)]

    def first_starts(algorithm: str, *, guards: bool = True, **options: Any) -> list[float | None]:
        given = config().search.model_dump(mode="json") | {"algorithm": algorithm}
        no_wait = {"quantum_s": 1.0, "guard_k": 0, "guard_default_switch_s": 0}
        settings = ReplaySettings("fair", {**no_wait, **options}, guards=guards)
        run = dict(replay(sweep(*works, search=given), settings).runs)["whole"]
        return [outcome.first_start_s for outcome in run.outcomes]

    assert first_starts("random") == first_starts("tpe", guards=False) == [0, 1, 2, 3]
    # Two for the GPU: trial 0 reports first in its second turn, at 3 s, trial 1 at 5 s.
    assert first_starts("tpe") == [0, 1, 3, 5]
    assert first_starts("tpe", guard_open=1) == [0, 2, 5, 9]


def test_the_sweeps_own_limit_on_parallel_trials_holds() -> None:
    works = [work(n, [3, n]) for n in range(4)]
    free = replay(sweep(*works, gpus=4), FIFO)
    limited = replay(sweep(*works, gpus=4, budget={"max_epochs": 4, "max_parallel": 1}), FIFO)
    assert (free.makespan_s.high, limited.makespan_s.high) == (2.0, 8.0)


@pytest.mark.parametrize(
    "settings",
    [
        ReplaySettings("fastest", {}),
        ReplaySettings("fifo", {"colour": "red"}),
        ReplaySettings("hermes", {"guard_k": "x"}),
        ReplaySettings("fifo", {}, gpus=0),
    ],
)
def test_a_choice_that_cannot_be_is_refused(settings: ReplaySettings) -> None:
    with pytest.raises(ConfigError):
        replay(sweep(work(0, [1])), settings)


def test_an_unknown_number_of_gpus_must_be_given() -> None:
    with pytest.raises(ConfigError, match="--gpus"):
        replay(sweep(work(0, [1]), gpus=None), FIFO)
    assert replay(sweep(work(0, [1]), gpus=None), replace(FIFO, gpus=2)).gpus == 2


def test_a_long_missing_part_is_drawn_with_few_points_up_to_its_last_step() -> None:
    planned = 10 * MOST_POINTS + 1
    (_, slow, _) = completions(Workload(SWEEP, (cut(0, [3], total_steps=planned),)))
    (job,) = slow.workload.jobs
    assert len(job.curve) <= MOST_POINTS + 1
    assert (job.curve[-1].step, job.seconds) == (planned, float(planned))


# -- the truth lies within the bounds --------------------------------------------------------------


@st.composite
def sweeps(draw: st.DrawFn) -> tuple[Workload, Workload, int]:
    """A sweep as it would have been, and as it was recorded with some of its curves cut short."""
    planned, truth, known = draw(st.integers(1, 6)), [], []
    size = draw(st.integers(1, 6))
    losses = draw(st.permutations(range(size * planned)))
    for number in range(size):
        steps = draw(st.integers(1, planned))
        own = [float(loss) for loss in losses[number * planned :][:steps]]
        step_s = draw(st.sampled_from([0.5, 1.0, 1.5, 3.0]))
        costs = Costs(startup_s=draw(st.sampled_from([0.0, 0.25])))
        whole = work(number, own, step_s, total_steps=planned, costs=costs)
        kept = draw(st.integers(0, steps))
        recorded = work(number, own[:kept], step_s, total_steps=planned, costs=costs)
        short = kept < steps or draw(st.booleans())
        truth.append(whole)
        known.append(replace(recorded, cut_short=True) if short else whole)
    slow = work(size, [1e6], 3.0, total_steps=planned)  # some trial has shown the slowest step
    return (
        Workload(SWEEP, (*truth, slow)),
        Workload(SWEEP, (*known, slow)),
        draw(st.integers(1, 3)),
    )


@given(sweeps())
def test_under_fifo_the_truth_lies_within_the_bounds(drawn: tuple[Workload, Workload, int]) -> None:
    truth, known, slots = drawn
    gpus = tuple(Gpu(index) for index in range(slots))
    run = simulate(truth, gpus, make_policy("fifo", {}))
    found = replay(replace(sweep(), workload=known, gpus=slots), FIFO)
    hours = sum((s.end_s - s.begin_s) * len(s.gpus) for s in run.segments) / 3600
    makespan_s = max(s.end_s for s in run.segments)
    true = (time_to_best_s(run), hours, makespan_s)
    for value, bounds in zip(
        true, (found.time_to_best_s, found.gpu_hours, found.makespan_s), strict=True
    ):
        assert value is not None
        assert bounds.low is not None
        assert bounds.high is not None
        assert bounds.low - 1e-9 <= value <= bounds.high + 1e-9


@given(sweeps(), st.sampled_from(["fifo", "hermes"]))
def test_a_sweep_with_nothing_missing_is_replayed_to_the_point(
    drawn: tuple[Workload, Workload, int], policy: str
) -> None:
    truth, _, slots = drawn
    found = replay(
        replace(sweep(), workload=truth, gpus=slots), ReplaySettings(policy, {}, guards=False)
    )
    run = simulate(truth, tuple(Gpu(i) for i in range(slots)), make_policy(policy, {}))
    assert found.time_to_best_s == Bounds(time_to_best_s(run), time_to_best_s(run))
    for bounds in (found.gpu_hours, found.preemptions, found.makespan_s):
        assert bounds.low == bounds.high


# -- what only recorded sweeps ask of the simulator ------------------------------------------------


@dataclass(frozen=True)
class Watched(Wrapper[None]):
    """Keeps what the policy sees."""

    seen: list[Snapshot] = field(default_factory=list)

    def decide(self, snapshot: Snapshot, memory: None) -> tuple[Plan, None]:
        self.seen.append(snapshot)
        return self.policy.decide(snapshot, memory)


def watched(workload: Workload) -> tuple[SimulationRun, list[Snapshot]]:
    policy = Watched(make_policy("fifo", {}))
    return simulate(workload, (Gpu(0),), policy), policy.seen


def test_a_figure_is_the_median_over_moments_at_which_values_may_be_seen() -> None:
    works = [work(n, [3 + n, 2, 1 + n / 10, 1 - n / 10], 0.9 + n / 7) for n in range(6)]
    found, fair = sweep(*works, gpus=2), ReplaySettings("fair", {"quantum_steps": 1}, guards=False)

    def replays(shifts_s: tuple[float, ...], observation_delay_s: float = 1.4) -> Bounds:
        seen_late = replace(found.workload, observation_delay_s=observation_delay_s)
        return replay(replace(found, workload=seen_late), fair, shifts_s=shifts_s).time_to_best_s

    lows_s = (replays((0.0,), 1.4 + shift_s).low for shift_s in OBSERVATION_SHIFTS_S)
    single = [low_s for low_s in lows_s if low_s is not None]
    assert len(single) == len(OBSERVATION_SHIFTS_S)
    assert len(set(single)) > 1
    assert replays(OBSERVATION_SHIFTS_S).low == pytest.approx(median_low(single))


def test_a_policy_sees_a_point_as_late_as_live_and_the_trial_reaches_it_in_time() -> None:
    run, seen = watched(Workload(SWEEP, (work(0, [3, 2]), work(1, [3])), observation_delay_s=0.25))
    points = {s.time_s: len(s.index[JobId(f"{SWEEP}/0")].curve) for s in seen}
    assert (points[1.0], points[1.25], points[2.0], points[2.25]) == (0, 1, 1, 2)
    assert [s.at_s for s in run.observations] == [1.0, 2.0, 3.0]


def test_what_nobody_measures_of_a_switch_is_training_to_a_policy_as_it_is_live() -> None:
    costs = Costs(startup_s=1.0, restore_s=0.5, checkpoint_s=0.25, warm_s=4.0, leave_s=0.125)
    works = tuple(work(n, [3, 2, 1], costs=costs, total_steps=3) for n in range(2))
    policy = Watched(make_policy("fair", {"quantum_steps": 1}))
    simulate(Workload(SWEEP, works), (Gpu(0),), policy)
    (ended, _) = policy.seen[-1].jobs
    assert [point.seconds for point in ended.curve] == [5.0, 10.375, 15.75]


def test_a_start_that_took_less_than_its_parts_never_turns_a_policys_clock_back() -> None:
    starts = (SegmentStart(1.0, 1.0), SegmentStart(0.5, 4.0))
    works = tuple(work(n, [3, 2], starts=starts, total_steps=2) for n in range(2))
    policy = Watched(make_policy("fair", {"quantum_steps": 1}))
    simulate(Workload(SWEEP, works), (Gpu(0),), policy)
    (ended, _) = policy.seen[-1].jobs
    assert [point.seconds for point in ended.curve] == [1.0, 1.0]


def test_the_handover_and_the_first_batch_cost_time_that_no_policy_sees() -> None:
    costs = Costs(startup_s=1.0, handover_s=2.0, warm_s=4.0)
    run, seen = watched(Workload(SWEEP, (work(0, [3, 2], costs=costs),)))
    (job,) = seen[-2].jobs
    assert (job.started_s, job.startup_s, job.switch_s) == (2.0, 1.0, 1.0)
    assert [s.at_s for s in run.observations] == [8.0, 9.0]


@pytest.mark.parametrize(("repeat_s", "first_stop_s"), [(None, 3.0), (0.0, 20.0)])
def test_the_guards_keep_a_trial_without_the_hook_for_their_default(
    repeat_s: float | None, first_stop_s: float
) -> None:
    costs = Costs(startup_s=0.5, repeat_s=repeat_s)
    works = tuple(work(n, [*range(30, 0, -1)], costs=costs, total_steps=30) for n in range(2))
    policy = guarded(make_policy("fair", {"quantum_steps": 1}))
    run = simulate(Workload(SWEEP, works), (Gpu(0),), policy)
    first = run.segments[0]
    assert first.outcome == "preempted"
    assert first.end_s == pytest.approx(first_stop_s, abs=1.0)


def test_a_start_that_was_recorded_costs_what_it_did_and_later_ones_the_usual() -> None:
    costs = Costs(startup_s=1.0, restore_s=0.5, warm_s=3)
    trial = work(0, [3], starts=(SegmentStart(5.0, 2.0),), costs=costs)
    assert trial.start_of(0, resumed=False) == SegmentStart(5.0, 2.0)
    assert trial.start_of(1, resumed=True) == SegmentStart(4.5, 1.0, 0.5)
    run, _ = watched(Workload(SWEEP, (trial,)))
    assert [s.at_s for s in run.observations] == [6.0]


def test_leaving_keeps_the_gpu_after_the_checkpoint() -> None:
    costs = Costs(checkpoint_s=0.5, leave_s=1.5)
    works = tuple(work(n, [3, 2, 1, 0], costs=costs, total_steps=4) for n in range(2))
    run = simulate(Workload(SWEEP, works), (Gpu(0),), make_policy("fair", {"quantum_steps": 2}))
    first, second = run.segments[:2]
    assert (first.end_s, first.outcome, second.begin_s) == (4.0, "preempted", 4.0)
