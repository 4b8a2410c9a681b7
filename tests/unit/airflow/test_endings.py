"""How a trial has ended is on disk before anything else says so, whatever is killed then."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from hermes_ops.airflow.client import TaskKey
from hermes_ops.airflow.folders import TrialFolder, read_ending
from hermes_ops.airflow.records import CloseRecord, Ending
from hermes_ops.airflow.trial.metrics import TrialOutcome
from hermes_ops.airflow.trial.segment_run import SegmentFailure, SegmentRun
from tests.unit.airflow.builders import SWEEP, DictStore, Journal, lease, sweep_with, waiting


class Killed(BaseException):
    """SIGKILL: nothing of the process runs on."""


class KilledTask(DictStore):
    """The store of a task that is killed before its next write."""

    def set(self, key: str, value: Any, *, retention: Any = None) -> None:
        raise Killed


class KilledController(Journal):
    """The Airflow of a controller that is killed before its next write."""

    def put_state(self, task: TaskKey, key: str, value: Mapping[str, Any]) -> None:
        raise Killed


def left(number: int) -> Ending:
    ending = read_ending(TrialFolder.from_sweep(SWEEP, number))
    assert ending is not None
    return ending


def test_a_task_that_is_killed_as_it_records_the_end_of_its_trial_has_left_why() -> None:
    folder = TrialFolder.from_sweep(SWEEP, 3)
    segment_run = SegmentRun.from_lease(KilledTask(), lease(), folder, None)
    failure = SegmentFailure("no data", ("a", "b"), "other")
    with pytest.raises(Killed):
        segment_run.end(TrialOutcome("failed", "no data", failure.tail), failure)
    tags = left(3).tags
    assert left(3).state == "failed"
    assert (tags["hermes.reason"], tags["hermes.output_tail"]) == ("no data", "a\nb")
    assert tags["hermes.cause"] == "other"


def test_a_controller_that_is_killed_as_it_records_the_end_of_a_trial_has_left_why() -> None:
    close = CloseRecord("its budget is spent", "stopped_early")
    with pytest.raises(Killed):
        KilledController().applier().settle(sweep_with(waiting(0), close=close), 200.0)
    assert (left(0).state, left(0).tags["hermes.reason"]) == ("stopped_early", close.reason)
