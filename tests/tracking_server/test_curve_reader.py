from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest

from hermes_ops import report
from hermes_ops.core.summary import Segment
from hermes_ops.errors import Refused
from hermes_ops.tracking import LatestMetric, SweepRef, Tracker, TrialRun
from hermes_ops.tracking.curves import CurveReader
from hermes_ops.tracking.summary import collect
from hermes_ops.tracking.tracker import require_sweep

pytestmark = pytest.mark.integration

Point = tuple[int, float, int]


def log(tracker: Tracker, run_id: str, *points: Point, name: str = "loss") -> None:
    metrics = [{"key": name, "step": s, "value": v, "timestamp": t} for s, v, t in points]
    tracker.log_metrics(run_id, metrics)


class CountingTracker(Tracker):
    """A tracker that counts the histories that were asked for."""

    histories = searches = 0
    stretches: tuple[tuple[int, int], ...] = ()

    def trials(self, sweep: SweepRef, *, open_only: bool = False) -> tuple[TrialRun, ...]:
        self.searches += 1
        return super().trials(sweep, open_only=open_only)

    def history(self, run_id: str, metric: str) -> tuple[LatestMetric, ...]:
        self.histories += 1
        return super().history(run_id, metric)

    def stretch(
        self, run_id: str, metric: str, first_step: int, last_step: int
    ) -> tuple[LatestMetric, ...] | None:
        self.stretches += ((first_step, last_step),)
        return super().stretch(run_id, metric, first_step, last_step)


@pytest.fixture
def counting(tracker: Tracker) -> Iterator[CountingTracker]:
    counting = CountingTracker(tracker.uri)
    yield counting
    counting.close()


def test_curves_of_many_trials_grow_and_a_new_reader_sees_the_same(
    tracker: Tracker, sweep: SweepRef
) -> None:
    one, two = (tracker.open_trial(sweep, n, {}) for n in (0, 1))
    reader = CurveReader(tracker, "loss")
    assert reader.fetch(sweep).points == {}
    log(tracker, one, (1, 0.9, 1_000), (2, 0.8, 2_000))
    assert reader.fetch(sweep).points == {0: ((1, 0.9, 1_000), (2, 0.8, 2_000))}
    log(tracker, one, (3, 0.7, 3_000))
    log(tracker, two, (5, 0.6, 4_000))
    curves = reader.fetch(sweep)
    assert [p[0] for p in curves.points[0]] == [1, 2, 3]
    assert curves.points[1] == ((5, 0.6, 4_000),)
    assert CurveReader(tracker, "loss").fetch(sweep).points == curves.points


def test_a_curve_that_grows_by_one_step_a_read_needs_no_history(
    counting: CountingTracker, sweep: SweepRef
) -> None:
    run_id = counting.open_trial(sweep, 0, {})
    reader = CurveReader(counting, "loss")
    for step in range(1, 6):
        log(counting, run_id, (step, 1 / step, step))
        reader.fetch(sweep)
    reader.fetch(sweep)
    assert [p[0] for p in reader.held(sweep).points[0]] == [1, 2, 3, 4, 5]
    assert counting.histories == 1


def test_of_a_curve_that_grew_by_many_steps_only_these_are_asked_for(
    counting: CountingTracker, sweep: SweepRef
) -> None:
    run_id = counting.open_trial(sweep, 0, {})
    reader = CurveReader(counting, "loss")
    log(counting, run_id, (1, 1.0, 1), (2, 0.5, 2))
    reader.fetch(sweep)
    log(counting, run_id, *((step, 1 / step, step) for step in range(3, 40)))
    log(counting, run_id, (7, 9.0, 100))  # a second time, later
    grown = reader.fetch(sweep).points[0]
    assert grown == tuple((step, 1 / step, step) for step in range(1, 40))
    assert (counting.histories, counting.stretches) == (1, ((3, 39),))
    log(counting, run_id, *((step, 1 / step, step) for step in range(40, 900)))
    for begin in (900, 1_800, 2_700):
        log(counting, run_id, *((step, 1 / step, step) for step in range(begin, begin + 900)))
    assert [p[0] for p in reader.fetch(sweep).points[0]] == list(range(1, 3_600))
    assert (counting.histories, len(counting.stretches)) == (2, 2)  # too many for one answer


def test_a_step_that_is_logged_again_after_a_resume_keeps_its_first_value(
    tracker: Tracker, sweep: SweepRef
) -> None:
    run_id = tracker.open_trial(sweep, 0, {})
    reader = CurveReader(tracker, "loss")
    log(tracker, run_id, (1, 0.9, 1), (2, 0.8, 2), (3, 0.7, 3))
    reader.fetch(sweep)
    log(tracker, run_id, (2, 0.85, 12), (3, 0.75, 13), (4, 0.6, 14))
    points = ((1, 0.9, 1), (2, 0.8, 2), (3, 0.7, 3), (4, 0.6, 14))
    assert reader.fetch(sweep).points[0] == points
    assert CurveReader(tracker, "loss").fetch(sweep).points[0] == points


def test_the_last_points_of_a_trial_that_ended_between_two_reads_are_read(
    tracker: Tracker, sweep: SweepRef
) -> None:
    run_id = tracker.open_trial(sweep, 0, {})
    reader = CurveReader(tracker, "loss")
    log(tracker, run_id, (1, 0.9, 1_000))
    reader.fetch(sweep)
    log(tracker, run_id, (2, 0.8, 2_000), (3, 0.7, 3_000))
    tracker.finish(run_id, "finished")
    assert [p[0] for p in reader.fetch(sweep).points[0]] == [1, 2, 3]
    assert [p[0] for p in reader.fetch(sweep).points[0]] == [1, 2, 3]


def test_a_script_that_ends_its_own_run_is_still_read(tracker: Tracker, sweep: SweepRef) -> None:
    run_id = tracker.open_trial(sweep, 0, {})
    reader = CurveReader(tracker, "loss")
    reader.fetch(sweep)
    tracker._rest.post("runs/update", {"run_id": run_id, "status": "FINISHED", "end_time": 5})
    for step in (1, 2, 3):
        log(tracker, run_id, (step, 1.0, step))
        assert len(reader.fetch(sweep).points[0]) == step


def test_a_trial_that_begins_anew_has_nothing_of_its_former_run(
    tracker: Tracker, sweep: SweepRef
) -> None:
    former = tracker.open_trial(sweep, 0, {"rate": 0.1})
    reader = CurveReader(tracker, "loss")
    log(tracker, former, *((step, 1 / step, step) for step in range(1, 6)))
    assert len(reader.fetch(sweep).points[0]) == 5
    tracker.set_aside(tracker.trials(sweep)[0], "it begins anew")
    assert reader.held(sweep).points[0][-1][0] == 5
    fresh = tracker.open_trial(sweep, 0, {"rate": 0.1})
    assert fresh != former
    assert reader.fetch(sweep).points == {}
    log(tracker, fresh, (1, 0.9, 10))
    assert reader.fetch(sweep).points[0] == ((1, 0.9, 10),)
    assert [t.run_id for t in tracker.trials(sweep)] == [fresh]
    assert CurveReader(tracker, "loss").fetch(sweep).points == {0: ((1, 0.9, 10),)}


def test_a_nan_counts_as_a_point(tracker: Tracker, sweep: SweepRef) -> None:
    run_id = tracker.open_trial(sweep, 0, {})
    tracker.log_metrics(run_id, [{"key": "loss", "step": 1, "value": "NaN", "timestamp": 1}])
    reader = CurveReader(tracker, "loss")
    assert math.isnan(reader.fetch(sweep).points[0][0][1])
    assert len(reader.fetch(sweep).points[0]) == 1


def test_metrics_beside_the_objective_cost_a_read_no_search_of_their_own(
    counting: CountingTracker, sweep: SweepRef
) -> None:
    run_id = counting.open_trial(sweep, 0, {})
    reader = CurveReader(counting, "loss", constraint_metrics=("latency ms", "size"))
    log(counting, run_id, (1, 40.0, 5_000), name="latency ms")
    curves = reader.fetch(sweep)
    assert curves.points == {}
    assert curves.constraint_metrics == {"latency ms": {0: ((1, 40.0, 5_000),)}, "size": {}}
    log(counting, run_id, (1, 0.9, 6_000))
    log(counting, run_id, (2, 20.0, 7_000), name="latency ms")
    curves = reader.fetch(sweep)
    assert curves.points == {0: ((1, 0.9, 6_000),)}
    assert curves.constraint_metrics["latency ms"] == {0: ((1, 40.0, 5_000), (2, 20.0, 7_000))}
    assert (counting.searches, counting.histories) == (2, 2)


def test_the_last_values_beside_the_objective_of_a_trial_that_ended_are_read(
    tracker: Tracker, sweep: SweepRef
) -> None:
    run_id = tracker.open_trial(sweep, 0, {})
    reader = CurveReader(tracker, "loss", constraint_metrics=("latency",))
    log(tracker, run_id, (1, 0.9, 1_000))
    reader.fetch(sweep)
    log(tracker, run_id, (1, 15.0, 2_000), name="latency")
    tracker.finish(run_id, "finished")
    assert reader.fetch(sweep).constraint_metrics == {"latency": {0: ((1, 15.0, 2_000),)}}
    tracker.open_trial(sweep, 1, {})
    assert reader.fetch(sweep).constraint_metrics == {"latency": {0: ((1, 15.0, 2_000),)}}


def test_a_summary_is_collected_from_mlflow_alone(
    tracker: Tracker, sweep: SweepRef, tmp_path: Path
) -> None:
    runs = [tracker.open_trial(sweep, n, {"lr": n / 10}) for n in range(2)]
    log(tracker, runs[0], (1, 0.9, 1_000), (2, 0.4, 2_000), (3, 0.5, 3_000))
    log(tracker, runs[1], (1, 0.8, 1_000))
    tracker.save_segments(
        runs[0],
        [
            Segment(0, 1, (0,), 0.0, 1.5, 0, 1, "preempted"),
            Segment(0, 2, (0,), 2.0, 3.5, 1, 3, "finished"),
        ],
    )
    tracker.finish(runs[0], "finished")

    def now(state: str) -> list[str]:
        found = collect(tracker, sweep, metric="loss", direction="minimize", max_trials=4)
        assert found.summary.state == state
        return [t.state for t in found.summary.trials]

    assert now("running") == ["finished", "running", "pending", "pending"]
    tracker.finish(runs[1], "failed")
    tracker.finish(sweep.parent_run_id, "finished", {"hermes.pool_slots": "2"})
    assert now("finished") == ["finished", "failed", "cancelled", "cancelled"]
    collected = collect(tracker, sweep, metric="loss", direction="minimize", max_trials=4)
    document = collected.summary.to_document()
    assert document["best"] == document["trials"][0]
    assert document["trials"][0] == {
        "number": 0,
        "state": "finished",
        "config": {"lr": 0.0},
        "final": 0.5,
        "best": 0.4,
        "steps": 3,
        "segments": 2,
        "preemptions": 1,
        "gpu_seconds": 3.0,
        "sizes": [1, 1],
    }
    assert (document["pool_slots"], document["max_slots_used"]) == (2, 1)
    report.write(tmp_path, collected.summary, collected.curves, collected.segments)
    tracker.log_folder(sweep.parent_run_id, tmp_path, "report")
    assert "report/report.html" in tracker.artifacts.files(sweep.parent_run_id)


def test_a_sweep_that_mlflow_does_not_know_is_said_with_the_remedy(tracker: Tracker) -> None:
    with pytest.raises(Refused, match="knows no sweep 'gone'"):
        require_sweep(tracker, "gone")
