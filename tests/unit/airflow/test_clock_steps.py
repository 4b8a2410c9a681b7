"""A clock that is set, or a machine that was suspended: what is counted from times on record."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hermes_ops.airflow.clock_steps import SETTLED_S, ClockSteps
from hermes_ops.airflow.control.faults import OPEN, Subject
from hermes_ops.airflow.control.jobs import DeferredTrials
from hermes_ops.airflow.control.trial_state import TrialRecords
from hermes_ops.airflow.folders import TrialFolder, read_start
from hermes_ops.airflow.records import CLOSE_KEY, SEGMENT_KEY, SegmentRecord, decode
from hermes_ops.airflow.trial.pod_trigger import HeldTrial
from hermes_ops.airflow.trial.segment_run import SegmentRun
from hermes_ops.errors import Unavailable
from tests.unit.airflow.builders import (
    SWEEP,
    DictStore,
    FakeFeed,
    Journal,
    lease,
    pending,
    row,
    running,
    sweep_with,
)

HOURS_S = 8 * 3_600.0


class Clocks:
    """The time of day, and the machine's uptime."""

    def __init__(self) -> None:
        self.now_s, self.uptime_s = 1_000_000.0, 50.0

    def go_on(self, seconds: float, set_by_s: float = 0.0) -> None:
        self.uptime_s += seconds
        self.now_s += seconds + set_by_s

    def steps(self) -> ClockSteps:
        return ClockSteps(lambda: self.now_s, lambda: self.uptime_s)


@pytest.mark.parametrize("set_by_s", [HOURS_S, -HOURS_S])
def test_a_running_trial_has_used_its_gpus_as_long_as_before_the_clock_was_set(
    set_by_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    clocks, store = Clocks(), DictStore()
    monkeypatch.setattr("time.time", lambda: clocks.now_s)
    run = SegmentRun.from_lease(store, lease(gpus=(0,)), TrialFolder.from_sweep(SWEEP, 0), None)
    outside: Any = FakeFeed()
    run.feed, run.clock_steps = outside, clocks.steps()
    run.opened()
    for seconds, step_s in ((60.0, 0.0), (0.5, set_by_s), (9.5, 0.0)):
        clocks.go_on(seconds, step_s)
        run.relay()
    record = decode(SegmentRecord, store[SEGMENT_KEY])
    assert record is not None
    assert clocks.now_s - record.started_s == pytest.approx(70.0)


def test_a_trial_that_the_triggerer_holds_has_used_its_gpus_as_long_as_before_the_clock_was_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The triggerer is restarted between two steps of the clock, the controller is not."""
    clocks, folder = Clocks(), TrialFolder.from_sweep(SWEEP, 0)
    monkeypatch.setattr("time.time", lambda: clocks.now_s)
    run = SegmentRun.from_lease(DictStore(), lease(pod={}), folder, None)
    own = TrialRecords(row(0, "deferred", pool_slots=1), run.lease, None, run.record)
    controller = DeferredTrials(lambda: clocks.uptime_s)
    folder.path.mkdir(parents=True)
    (folder.path / "status.json").write_text('{"epoch": 1, "step": 3}')
    run.record_start()
    for set_by_s in (HOURS_S, -3 * HOURS_S):
        held = HeldTrial(folder, 1, clocks.steps())
        for seconds, step_s in ((60.0, 0.0), (0.5, set_by_s), (9.5, 0.0)):
            clocks.go_on(seconds, step_s)
            held.relay()
            seen = controller.with_folder(own, SWEEP)
    assert seen.service_gpu_s(clocks.now_s) == pytest.approx(140.0)
    assert controller.with_folder(own, SWEEP) is seen
    again = SegmentRun.from_lease(DictStore(), run.lease, folder, run.record)
    assert clocks.now_s - again.record.started_s == pytest.approx(140.0)
    again.record_start()  # it defers again, and nothing is corrected twice
    clocks.go_on(10.0)
    taken_over = replace(own, segment=again.record)
    seen = controller.with_folder(taken_over, SWEEP)
    assert seen.service_gpu_s(clocks.now_s) == pytest.approx(150.0)


def test_a_start_that_a_full_disk_does_not_take_is_corrected_once_there_is_space(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clocks, folder = Clocks(), TrialFolder.from_sweep(SWEEP, 0)
    SegmentRun.from_lease(DictStore(), lease(pod={}), folder, None).record_start()
    held, before = HeldTrial(folder, 1, clocks.steps()), read_start(folder, 1)
    with monkeypatch.context() as full:
        full.setattr("hermes_ops.airflow.trial.pod_trigger.write_start", lambda *_: False)
        clocks.go_on(0.5, HOURS_S)
        held.relay()
    held.relay()
    held.relay()
    after = read_start(folder, 1)
    assert before is not None
    assert after is not None
    assert after.started_s - before.started_s == pytest.approx(HOURS_S)


def test_no_budget_is_spent_before_the_trials_of_a_suspended_machine_correct_their_times() -> None:
    clocks, outside = Clocks(), Journal()
    applier = outside.applier()
    applier.clock_steps = clocks.steps()
    sweep = sweep_with(running(0, 0), budget={"max_epochs": 20, "gpu_seconds": 3_600.0})
    clocks.go_on(0.5, HOURS_S)
    for _ in range(int(SETTLED_S)):
        applier.settle(sweep, clocks.now_s)
        clocks.go_on(1.0)
    assert outside.of("put") == []
    applier.settle(sweep, clocks.now_s)  # it has used them, for all that is known
    assert outside.of("put")[0][2] == CLOSE_KEY


def test_no_trial_is_given_up_for_an_outage_that_only_seems_to_have_lasted() -> None:
    """MLflow did not answer for one trial just before the machine was suspended."""
    clocks, outside = Clocks(), Journal()
    applier = outside.applier()
    applier.clock_steps, applier.faults.clock = clocks.steps(), lambda: clocks.now_s
    sweep, subject = sweep_with(pending(0), pending(1)), Subject(SWEEP, 0)
    applier.faults.note(subject, OPEN, Unavailable("MLflow did not answer"))
    clocks.go_on(1.0)
    applier.faults.clear(Subject(SWEEP, 1), OPEN)
    clocks.go_on(1.0, HOURS_S)
    applier.settle(sweep, clocks.now_s)
    assert outside.of("put") == []
    applier.faults.clear(subject, OPEN)  # it answers
    clocks.go_on(SETTLED_S)
    applier.settle(sweep, clocks.now_s)
    assert outside.of("put") == []


def test_a_clock_that_drifts_takes_no_steps() -> None:
    clocks = Clocks()
    steps = clocks.steps()
    for _ in range(100):
        clocks.go_on(60.0, 0.001)
        assert steps.step_s() == 0.0
        assert steps.is_settled()
