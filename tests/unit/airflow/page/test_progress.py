from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import Any, cast

import pytest

from hermes_ops.airflow.page.pool_view import PageSources
from hermes_ops.airflow.page.progress import (
    ENDED_FRESH_S,
    MOST_KEPT,
    LiveSweep,
    ProgressCache,
    SweepProgress,
    read_progress,
)
from hermes_ops.airflow.page.usage_view import UsageQuery
from hermes_ops.core.summary import KEPT, Segment, SweepSummary
from hermes_ops.errors import Unavailable
from hermes_ops.tracking import SweepRef
from hermes_ops.tracking.overview import MOST_CURVES
from hermes_ops.tracking.runs import LatestMetric
from hermes_ops.tracking.summary import BOUNDS_TAG
from tests.unit.airflow.builders import running, sweep_with, waiting
from tests.unit.airflow.page.builders import Mlflow, Users, planned, trial_run

REF = SweepRef("digits-1", "7", "parent")
OBJECTIVE = ("val_loss", "minimize")


def progress(state: str = "running") -> SweepProgress:
    return SweepProgress(SweepSummary("s", state, (), "loss", "minimize", 0.0), (), 0, 0.0)


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_one_reading_serves_everybody_for_a_while_and_an_ended_sweep_for_longer() -> None:
    clock = Clock()
    cache = ProgressCache(clock)
    first = cache.get("s", progress)
    assert cache.get("s", progress) is first
    clock.now_s = ENDED_FRESH_S
    second = cache.get("s", lambda: progress("finished"))
    assert second is not first
    clock.now_s += ENDED_FRESH_S - 1
    assert cache.get("s", progress) is second


def test_a_clock_that_is_set_back_leaves_no_reader_with_an_old_pool_or_table(users: Users) -> None:
    database: Any = planned()
    mlflow: Any = Mlflow()
    clock = Clock()
    clock.now_s = 10_000.0
    sources = PageSources(database, lambda: mlflow, clock=clock)
    query = UsageQuery("gpus", 1, "user", frozenset({"hermes_sweep"}))

    def ask(tracker: Any) -> float | None:
        return cast("float | None", tracker.overview.best(None, maximize=True))

    mlflow.away, mlflow.best = True, 0.5
    first, old = sources.pool_view("gpus"), sources.usage.get(query)[0]
    assert sources.from_mlflow(ask) is None
    mlflow.away = False
    clock.now_s = 5_000.0
    assert sources.pool_view("gpus") is not first
    assert sources.from_mlflow(ask) == 0.5
    assert old is not None
    deadline_s = time.monotonic() + 60.0
    while sources.usage.get(query)[0] is old and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert sources.usage.get(query)[0] is not old


def test_what_is_read_again_keeps_nobody_waiting_who_can_have_the_last_one() -> None:
    clock = Clock()
    cache = ProgressCache(clock)
    first = cache.get("s", progress)
    clock.now_s = 1_000.0
    during: list[SweepProgress] = []

    def read() -> SweepProgress:
        other = threading.Thread(target=lambda: during.append(cache.get("s", progress)))
        other.start()
        other.join(30)
        return progress()

    assert cache.get("s", read) is not first
    assert during == [first]


def test_a_reading_that_fails_is_tried_again_and_few_sweeps_are_kept() -> None:
    cache = ProgressCache(Clock())

    def away() -> SweepProgress:
        raise Unavailable("away")

    with pytest.raises(Unavailable):
        cache.get("s", away)
    for number in range(MOST_KEPT + 5):
        cache.get(str(number), progress)
    assert len(cache._kept) == MOST_KEPT


def read(mlflow: Any, now: LiveSweep) -> SweepProgress:
    return read_progress(mlflow, REF, OBJECTIVE, now)


def test_segments_under_way_and_phases_come_from_airflow() -> None:
    now = LiveSweep.from_state("running", 300.0, sweep_with(running(0, 1), waiting(1)))
    assert dict(now.phases) == {0: "running", 1: "waiting"}
    ((segment),) = now.segments
    assert (segment.trial, segment.gpus, segment.start_s) == (0, (1,), 100.0)
    mlflow = Mlflow()
    mlflow.opened = (trial_run(0, "running", 0.5), trial_run(1, "running", 0.7))
    found = read(mlflow, now)
    assert [t.state for t in found.summary.trials] == ["running", "waiting"]


def test_of_many_trials_the_open_ones_and_the_best_are_drawn() -> None:
    mlflow = Mlflow()
    finished = [trial_run(n, "finished", 1.0 + n) for n in range(MOST_CURVES + 20)]
    mlflow.opened = (*finished, trial_run(500, "running", 9_999.0))
    mlflow.points = {r.run_id: ((1, 2.0, 1_000), (2, 1.5, 2_000)) for r in mlflow.opened}
    asked: list[str] = []
    curves = mlflow.overview.curves

    def watched(runs: Any, metric: str, points: int) -> Any:
        asked.extend(runs)
        assert points == 30  # of many curves few points each: the page is fetched again and again
        return curves(runs, metric, points)

    mlflow.overview.curves = watched  # type: ignore[method-assign]
    found = read(mlflow, LiveSweep("running", 300.0))
    assert asked == ["run-500", *(f"run-{n}" for n in range(MOST_CURVES - 1))]
    assert found.left_out == 21
    assert [p.reason for p in found.pictures] == ["", ""]


def test_the_best_value_counts_though_the_curve_that_is_drawn_leaves_it_out() -> None:
    mlflow = Mlflow()
    mlflow.opened = (trial_run(0, "finished", 0.1),)
    mlflow.points = {"run-0": ((1, 0.5, 1_000), (9, 0.2, 2_000))}
    (trial,) = read(mlflow, LiveSweep("finished", 300.0)).summary.trials
    assert (trial.best, trial.final, trial.steps, trial.gpu_seconds) == (0.1, 0.2, 9, 30.0)


def test_the_gpus_of_a_trial_are_those_of_its_segments_and_of_the_one_under_way() -> None:
    mlflow = Mlflow()
    stored = '[[1, [0], 10.0, 20.0, 0, 3, "preempted"], [2, [0, 1], 30.0, null, 3, null]]'
    mlflow.opened = (trial_run(0, "running", 0.5, tags={"hermes.segment_log": stored}),)
    under_way = [Segment(0, 2, (0, 1), 30.0), Segment(1, 1, (5,), 30.0)]
    now = LiveSweep("running", 300.0, {0: "running"}, under_way)
    (trial,) = read(mlflow, now).summary.trials
    assert trial.sizes == (1, 2)
    now = LiveSweep("running", 300.0, {0: "running"}, [Segment(0, 3, (2,), 40.0)])
    (trial,) = read(mlflow, now).summary.trials
    assert trial.sizes == (1, 2, 1)


def test_the_best_so_far_keeps_the_bounds_by_the_last_values_that_trials_have_reported() -> None:
    mlflow = Mlflow()
    slow = {"latency": LatestMetric(9.0, 3, 1)}
    fast = {"latency": LatestMetric(2.0, 3, 1)}
    runs = [trial_run(n, "running", value) for n, value in enumerate((0.1, 0.2, 0.3))]
    mlflow.opened = tuple(
        replace(run, metrics={**run.metrics, **last})
        for run, last in zip(runs, (slow, {}, fast), strict=True)
    )
    bounded = sweep_with(running(0, 0), metrics=[{"name": "latency", "at_most": 5}])
    found = read(mlflow, LiveSweep.from_state("running", 300.0, bounded)).summary
    assert found.best is not None
    assert found.best.number == 2
    assert [t.violates for t in found.trials] == [
        ("latency is 9, at most 5 is allowed",),
        ("latency was not reported, at most 5 is allowed",),
        (),
    ]
    ended = replace(mlflow.opened[0], state="finished", tags={**runs[0].tags, BOUNDS_TAG: KEPT})
    mlflow.opened = (ended,)
    assert read(mlflow, LiveSweep("finished", 300.0)).summary.trials[0].violates == ()


def test_a_trial_that_goes_on_after_an_end_misses_the_bounds_by_its_values_of_now() -> None:
    mlflow = Mlflow()
    resumed = trial_run(0, "running", 0.1)
    earlier = {**resumed.tags, BOUNDS_TAG: "latency is 9, at most 5 is allowed"}
    fast = {**resumed.metrics, "latency": LatestMetric(2.0, 7, 1)}
    mlflow.opened = (replace(resumed, tags=earlier, metrics=fast),)
    bounded = sweep_with(running(0, 0), metrics=[{"name": "latency", "at_most": 5}])
    found = read(mlflow, LiveSweep.from_state("running", 300.0, bounded)).summary
    assert found.trials[0].violates == ()
