"""The use of GPUs by a segment whose task was killed before it had recorded the segment's end."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from hermes_ops.airflow.control.trial_state import TrialRecords, TrialState
from hermes_ops.airflow.folders import TrialFolder
from hermes_ops.airflow.records import SEGMENT_KEY, CloseRecord, SegmentRecord, decode
from tests.unit.airflow.builders import SWEEP, Journal, lease, row, segment, sweep_with

NOW_S = 900.0
BEFORE = {"epoch": 1, "gpus": ["0"], "start_s": 100.0, "first_step": 0, "end_s": 150.0}
LOST = {"epoch": 2, "gpus": ["0", "1"], "start_s": 200.0, "first_step": 5}
EARLIER: dict[str, Any] = {"spans": ((100.0, 150.0),), "sizes": (1,), "service_gpu_s": 50.0}


def lost(state: str = "scheduled", note: str = "", *, revoked: bool = False) -> TrialRecords:
    """A trial whose task was killed in its second segment; `revoked`: others got its GPUs since."""
    record = segment(2, started_s=199.0, gpus=(0, 1), segments=2, **EARLIER)
    own = lease(2, gpus=(0, 1), revoked=revoked)
    return TrialRecords(row(0, state, note=note), own, None, record)


def write(*lines: dict[str, Any]) -> TrialFolder:
    """Write the trial's segments, and a status of 300 s; nothing has lived later."""
    folder = TrialFolder.from_sweep(SWEEP, 0)
    folder.path.mkdir(parents=True)
    (folder.path / "segments.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    status = folder.path / "status.json"
    status.write_text(json.dumps({"epoch": 2}))
    os.utime(status, (300.0, 300.0))
    return folder


@pytest.fixture(params=["ended", "killed"])
def last_s(request: pytest.FixtureRequest, home: Path) -> float:
    """When the lost segment ended: as hermes-trial has written, or, if it was killed too, when it
    last gave a sign of life."""
    end = [{"epoch": 2, "end_s": 290.0, "outcome": "preempted"}] if request.param == "ended" else []
    write(BEFORE, LOST, *end)
    return 290.0 if end else 300.0


def written(journal: Journal) -> SegmentRecord:
    (record,) = (decode(SegmentRecord, c[3]) for c in journal.of("put") if c[2] == SEGMENT_KEY)
    assert record is not None
    return record


def test_a_sweep_that_ends_counts_the_segment_of_a_task_that_was_killed(last_s: float) -> None:
    journal, trial = Journal(), lost(revoked=True)
    assert trial.state is TrialState.WAITING
    sweep = sweep_with(trial, close=CloseRecord("stopped by its user"))
    journal.applier().settle(sweep, NOW_S)
    record = written(journal)
    assert (record.final, record.running) == ("cancelled", False)
    assert record.spans == ((100.0, 150.0), (200.0, last_s))
    assert (record.sizes, record.service_gpu_s) == ((1, 2), 50.0 + 2 * (last_s - 200.0))
    assert TrialFolder.from_sweep(SWEEP, 0).segments()[-1]["end_s"] == last_s


def test_a_trial_marked_by_a_person_counts_the_segment_of_its_killed_task(last_s: float) -> None:
    journal, trial = Journal(), lost("failed")
    assert trial.state is TrialState.UNREPORTED
    journal.applier().settle(sweep_with(trial), NOW_S)
    record = written(journal)
    assert (record.final, record.service_gpu_s) == ("failed", 50.0 + 2 * (last_s - 200.0))


def test_a_trial_that_begins_from_scratch_keeps_the_use_of_its_killed_task(last_s: float) -> None:
    journal = Journal(opened={0: {"rate": 0.1}})
    journal.applier().settle(sweep_with(lost(note="from scratch")), NOW_S)
    record = written(journal)
    assert (record.spans, record.service_gpu_s) == ((), 0.0)
    assert record.earlier_spans == ((100.0, 150.0), (200.0, last_s))
    assert record.earlier_gpu_s == 50.0 + 2 * (last_s - 200.0)


@pytest.mark.parametrize("lines", [(), (BEFORE,)])
def test_a_folder_on_another_machine_takes_nothing_from_the_record(
    home: Path, lines: tuple[dict[str, Any], ...]
) -> None:
    write(*lines)
    journal = Journal()
    sweep = sweep_with(lost(revoked=True), close=CloseRecord("enough"))
    journal.applier().settle(sweep, NOW_S)
    record = written(journal)
    assert (record.final, record.spans, record.service_gpu_s) == (
        "cancelled",
        EARLIER["spans"],
        EARLIER["service_gpu_s"],
    )
