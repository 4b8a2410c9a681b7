"""A real MLflow server, read by a page in bounded parts; the view that compares trials."""

from __future__ import annotations

import json

import pytest

from hermes_ops.core.secondary_metrics import SecondaryMetric
from hermes_ops.tracking import SweepRef, Tracker
from hermes_ops.tracking.comparison import VIEW_TAG, ComparedSweep, view_key
from hermes_ops.tracking.rest import legal_name


def log(tracker: Tracker, run: str, values: list[float], metric: str = "loss") -> None:
    for begin in range(0, len(values), 1_000):
        tracker.log_metrics(run, [
            {"key": metric, "value": value, "timestamp": 1_000 + step, "step": step}
            for step, value in enumerate(values[begin : begin + 1_000], start=begin + 1)
        ])  # fmt: skip


def best(tracker: Tracker, run: str, value: float) -> None:
    metric = {"key": "hermes.best", "value": value, "timestamp": 1, "step": 0}
    tracker.log_metrics(run, [metric])


def test_a_long_curve_comes_in_few_points_with_its_last_one(
    tracker: Tracker, sweep: SweepRef
) -> None:
    long, short = (tracker.open_trial(sweep, n, {"rate": n}) for n in range(2))
    log(tracker, long, [1 / step for step in range(1, 3_001)])
    log(tracker, short, [0.5, 0.25])
    found = tracker.overview.curves([long, short], "loss", 100)
    assert [(step, value) for step, value, _ in found[short]] == [(1, 0.5), (2, 0.25)]
    assert 50 <= len(found[long]) <= 210
    assert found[long][-1][:2] == (3_000, 1 / 3_000)
    steps = [step for step, _, _ in found[long]]
    assert steps == sorted(set(steps))
    assert tracker.overview.curves([], "loss", 100) == {}


def test_the_trials_of_one_sweep_are_read_up_to_a_number(tracker: Tracker, sweep: SweepRef) -> None:
    for number in range(4):
        tracker.open_trial(sweep, number, {"rate": number})
    assert [t.number for t in tracker.overview.trials(sweep, 10)] == [0, 1, 2, 3]
    assert len(tracker.overview.trials(sweep, 3)) == 3


def test_the_best_so_far_is_that_of_a_trial_which_has_not_failed(
    tracker: Tracker, sweep: SweepRef
) -> None:
    assert tracker.overview.best(sweep, maximize=False) is None
    for number, value in enumerate((0.5, 0.25, 0.125)):
        best(tracker, tracker.open_trial(sweep, number, {}), value)
    tracker.finish(tracker.trials(sweep)[2].run_id, "failed")
    assert tracker.overview.best(sweep, maximize=False) == 0.25
    assert tracker.overview.best(sweep, maximize=True) == 0.5


def test_the_best_so_far_keeps_the_bounds_by_the_last_values(
    tracker: Tracker, sweep: SweepRef
) -> None:
    sizes: tuple[list[str], ...] = (["9"], ["NaN"], [], ["Infinity"], ["9", "-3.5"], ["1e-7"])
    for number, reported in enumerate(sizes):
        run = tracker.open_trial(sweep, number, {})
        best(tracker, run, 0.1 * (number + 1))
        tracker.log_metrics(run, [
            {"key": legal_name("size %"), "value": size, "timestamp": step, "step": step}
            for step, size in enumerate(reported)
        ])  # fmt: skip
    small = [SecondaryMetric("size %", at_most=5.0, at_least=-1e25)]
    positive = [SecondaryMetric("size %", at_most=5.0, at_least=1e-9)]
    never = [SecondaryMetric("size %", at_most=-1e2)]
    many = [*small, *(SecondaryMetric("size %", at_most=5.0 + n) for n in range(49))]
    found = [
        tracker.overview.best(sweep, maximize=False, bounded=bounded)
        for bounded in ((), small, positive, never, many)
    ]
    assert found == pytest.approx([0.1, 0.5, 0.6, None, 0.5])


def test_sweeps_are_found_by_their_runs(tracker: Tracker, sweep: SweepRef) -> None:
    other = tracker.ensure_sweep("another", sweep.sweep_id, "name: another\n")
    refs = (sweep, other)
    found = tracker.overview.sweeps(
        [r.experiment_id for r in refs], [r.parent_run_id for r in refs]
    )
    assert {r.parent_run_id: found[r.parent_run_id].ref.sweep_id for r in refs} == {
        sweep.parent_run_id: sweep.sweep_id,
        other.parent_run_id: sweep.sweep_id,
    }
    assert tracker.overview.sweeps([], []) == {}


def test_the_view_that_compares_trials_is_a_tag_of_the_experiment(
    tracker: Tracker, sweep: SweepRef
) -> None:
    for moment in (1, 2):  # a plan that is tried again writes it again
        tracker.views.save(sweep, ComparedSweep("loss", "minimize", ("rate",), 4), moment)
    tags = tracker.views._tags(sweep.experiment_id)
    (key,) = (k for k in tags if k == f"{VIEW_TAG}{view_key(sweep.sweep_id)}")
    envelope = json.loads(tags[key])
    assert (envelope["name"], envelope["createdAt"]) == (sweep.sweep_id, 2)
