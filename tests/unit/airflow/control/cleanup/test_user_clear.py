"""Tasks that a person has cleared, notes that ask for a new beginning, DAGs that are paused."""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hermes_ops.airflow.client import TaskKey
from hermes_ops.airflow.control.cleanup.sweep_end import service_gpu_s
from hermes_ops.airflow.control.cleanup.user_clear import (
    ClearRequest,
    asks_from_scratch,
    clear_request,
    clear_trial,
)
from hermes_ops.airflow.control.reconcile import END, RecordEnd
from hermes_ops.airflow.control.trial_state import TrialRecords, TrialState
from hermes_ops.airflow.folders import TrialFolder
from hermes_ops.airflow.records import (
    SEGMENT_KEY,
    CloseRecord,
    Lease,
    SegmentRecord,
    decode,
    encode,
)
from hermes_ops.core.model import Phase
from hermes_ops.errors import HermesError
from hermes_ops.trial.locks import lock_file
from tests.unit.airflow.builders import (
    SWEEP,
    Journal,
    flag,
    lease,
    pending,
    row,
    running,
    segment,
    starting,
    sweep_record,
    sweep_with,
    waiting,
)

NOW_S = 200.0
CLOSING = CloseRecord("stopped by its user")
PLAN = TaskKey("dag", SWEEP, "plan")


def ended(final: str, state: str | None = "scheduled", **changes: Any) -> TrialRecords:
    """A trial that ended in a segment of its own; as if its task had been cleared since."""
    record = segment(running=False, final=final, outcome=final, ended_s=150.0, **changes)
    return TrialRecords(row(0, state), lease(), None, record)


def noted(trial: TrialRecords, note: str = "From scratch, please") -> TrialRecords:
    return replace(trial, row=replace(trial.row, note=note))


@pytest.mark.parametrize(
    ("trial", "wish"),
    [
        (waiting(0), ClearRequest.NOTHING),
        (running(0, 0), ClearRequest.NOTHING),
        (pending(0), ClearRequest.NOTHING),
        (noted(pending(0)), ClearRequest.NOTHING),
        (ended("failed"), ClearRequest.CONTINUE),
        (ended("failed", None), ClearRequest.CONTINUE),
        (ended("cancelled"), ClearRequest.CONTINUE),
        (ended("stopped_early"), ClearRequest.CONTINUE),
        (ended("finished"), ClearRequest.STAY_ENDED),
        (ended("failed", "failed"), ClearRequest.NOTHING),
        (ended("failed", "running"), ClearRequest.NOTHING),
        (noted(ended("finished")), ClearRequest.RESTART),
        (noted(ended("finished", None)), ClearRequest.NOTHING),
        (noted(ended("finished", "success")), ClearRequest.NOTHING),
        (noted(waiting(0)), ClearRequest.RESTART),
        (noted(starting(0, 0)), ClearRequest.RESTART),
        (noted(running(0, 0)), ClearRequest.STOP),
        (noted(replace(running(0, 0), stop=flag())), ClearRequest.NOTHING),
    ],
)
def test_what_is_done_follows_from_what_the_person_did(
    trial: TrialRecords, wish: ClearRequest
) -> None:
    assert clear_request(trial, closing=False) is wish


@pytest.mark.parametrize("trial", [ended("failed"), noted(ended("finished"))])
def test_no_trial_of_a_sweep_that_is_closing_goes_on(trial: TrialRecords) -> None:
    assert clear_request(trial, closing=True) is ClearRequest.STAY_ENDED


def test_a_task_that_is_tried_again_was_not_cleared() -> None:
    failed = ended("failed")
    tried_again = replace(failed, row=replace(failed.row, pool_slots=1))
    assert failed.state is TrialState.CLEARED
    assert tried_again.state is not TrialState.CLEARED


def test_a_trial_that_was_ended_while_it_waited_is_skipped_and_not_reopened() -> None:
    journal, trial = Journal(), waiting(0)
    end = RecordEnd(trial, "cancelled", "enough", END)
    journal.applier()._executor.attempt(sweep_with(trial), end, NOW_S)
    written = decode(SegmentRecord, journal.of("put")[0][3])
    assert written is not None
    assert replace(trial, segment=written).state is not TrialState.CLEARED
    cleared_later = replace(trial, row=replace(trial.row, id="another"), segment=written)
    assert cleared_later.state is TrialState.CLEARED


def test_a_cleared_trial_goes_on_in_its_run_with_its_failures_forgiven() -> None:
    journal = Journal(opened={0: {"rate": 0.1}})
    sweep = sweep_with(ended("failed", failures=3, step=7))
    journal.applier().settle(sweep, NOW_S)
    (put,) = journal.of("put")
    record = decode(SegmentRecord, put[3])
    assert record is not None
    assert (put[2], record.final, record.failures, record.step) == ("hermes_segment", None, 0, 7)
    assert journal.of("reopen") == [("reopen", "run-0")]
    assert [t.phase for t in sweep.trials] == [Phase.WAITING]


def test_a_cleared_trial_that_had_failed_may_have_as_many_workers_again() -> None:
    outside = Journal()
    failed = ended("failed", failures=3, failed_size=2)
    outside.applier().settle(sweep_with(failed), NOW_S)
    (again,) = (decode(SegmentRecord, c[3]) for c in outside.of("put") if c[2] == SEGMENT_KEY)
    assert again is not None
    assert (again.failures, again.failed_size) == (0, None)


def test_a_cleared_trial_that_had_finished_gets_its_success_back() -> None:
    journal = Journal()
    journal.applier().settle(sweep_with(ended("finished")), NOW_S)
    assert journal.of("mark", "put", "skip") == [("mark", [0], "success")]


def test_a_trial_that_begins_anew_has_a_new_run_and_an_empty_account() -> None:
    journal = Journal(opened={0: {"rate": 0.1}})
    sweep = sweep_with(noted(ended("finished", step=9, service_gpu_s=50.0)))
    journal.applier().settle(sweep, NOW_S)
    (trial,) = sweep.trials
    assert service_gpu_s(sweep, NOW_S) == 50.0  # its budget's
    assert trial.lease is not None
    assert (trial.lease.config, trial.lease.anew, trial.has_lease_in_force) == (
        {"rate": 0.1},
        2,
        False,
    )
    assert trial.segment is not None
    assert (trial.segment.step, trial.segment.service_gpu_s, trial.has_ended) == (0, 0.0, False)
    written = {key: value for _, _, key, value in journal.of("put")}
    assert decode(Lease, written["hermes_lease"]) == trial.lease
    assert decode(SegmentRecord, written["hermes_segment"]) == trial.segment
    assert not trial.segment.running
    assert journal.of("set aside", "open") == [
        ("set aside", "run-0"),
        ("open", 0, {"rate": 0.1}, False),
    ]
    (note,) = journal.of("note")
    assert "from scratch" in note[2]
    assert not asks_from_scratch(note[2])


def test_what_a_trial_used_before_each_new_beginning_is_kept_for_the_limits() -> None:
    journal = Journal(opened={0: {"rate": 0.1}})
    first: Any = {"earlier_spans": ((1.0, 2.0),), "earlier_sizes": (1,), "earlier_gpu_s": 1.0}
    used: Any = {"spans": ((5.0, 7.0), (8.0, 9.0)), "sizes": (2, 1), "service_gpu_s": 5.0}
    sweep = sweep_with(noted(ended("finished", **first, **used)))
    for _ in range(2):  # each step may be repeated
        journal.applier().settle(sweep, NOW_S)
        (trial,) = sweep.trials
        assert trial.segment is not None
        assert trial.segment.spans == ()
        assert trial.segment.earlier_spans == ((1.0, 2.0), (5.0, 7.0), (8.0, 9.0))
        assert trial.segment.earlier_sizes == (1, 2, 1)
        assert trial.segment.earlier_gpu_s == 6.0
        sweep.trials = (noted(trial),)


def test_while_mlflow_is_away_nothing_is_written_of_a_new_beginning() -> None:
    journal = Journal(mlflow_away=True)
    trial = noted(waiting(0))
    sweep = sweep_with(trial)
    journal.applier().settle(sweep, NOW_S)
    assert sweep.trials == (trial,)
    assert journal.of("put", "note") == []


def test_of_a_paused_dag_only_trials_that_train_are_offered_and_leases_are_taken_back() -> None:
    journal = Journal()
    sweep = sweep_with(running(0, 0), waiting(1), starting(2, 1), pending(3))
    paused = replace(sweep.spec, run=replace(sweep.spec.run, paused=True))
    sweep.spec = paused
    journal.applier().settle(sweep, NOW_S)
    assert [(n, key) for _, n, key, _ in journal.of("put")] == [(2, "hermes_lease")]
    assert [j.id.rpartition("/")[2] for j in sweep.jobs(NOW_S)] == ["0", "2"]


class Client:
    """Airflow with one planned sweep whose trial 3 has begun; keeps what was cleared."""

    def __init__(self, **known: object) -> None:
        self.cleared: list[tuple[Any, ...]] = []
        self.known = known

    def get_state(self, task: TaskKey, key: str) -> object:
        if task.run_id != SWEEP:
            return None
        if key in self.known:
            return self.known[key]
        if key == "hermes_lease":
            return encode(lease()) if task == TaskKey("dag", SWEEP, "trial", 3) else None
        return sweep_record() if task.task_id.endswith("plan") else None

    def clear(self, *asked: Any) -> None:
        self.cleared.append(asked)


@pytest.mark.parametrize(("from_scratch", "note"), [(False, None), (True, "from scratch")])
def test_the_command_clears_the_trial_and_the_report(from_scratch: bool, note: str | None) -> None:
    client: Any = Client()
    clear_trial(client, PLAN, 3, from_scratch=from_scratch)
    assert client.cleared == [("dag", SWEEP, [("trial", 3), "report"], note)]


def test_in_a_group_the_report_of_that_group_is_cleared() -> None:
    client: Any = Client()
    clear_trial(client, replace(PLAN, task_id="group.plan"), 3, from_scratch=False)
    assert client.cleared == [("dag", SWEEP, [("trial", 3), "group.report"], None)]


@pytest.mark.parametrize(("sweep", "number"), [("gone", 3), (SWEEP, 4)])
def test_a_trial_that_is_not_there_or_has_not_begun_is_not_cleared(sweep: str, number: int) -> None:
    client: Any = Client()
    with pytest.raises(HermesError, match=rf"dag:{sweep}' (has no trials|has not begun)"):
        clear_trial(client, replace(PLAN, run_id=sweep), number, from_scratch=False)
    assert client.cleared == []


FINISHED = encode(segment(running=False, final="finished", outcome="finished"))
ENDED = encode(CloseRecord("its deadline has passed"))


@pytest.mark.parametrize("from_scratch", [False, True])
def test_a_trial_of_a_sweep_that_was_ended_is_not_said_to_go_on(from_scratch: bool) -> None:
    client: Any = Client(hermes_close=ENDED)
    with pytest.raises(HermesError, match=r"its deadline has passed.*hermes sweep resume"):
        clear_trial(client, PLAN, 3, from_scratch=from_scratch)
    assert client.cleared == []


def test_a_trial_that_has_finished_is_restarted_from_scratch_only() -> None:
    client: Any = Client(hermes_segment=FINISHED, hermes_close={})
    with pytest.raises(HermesError, match=r"has finished.*--from-scratch"):
        clear_trial(client, PLAN, 3, from_scratch=False)
    assert client.cleared == []
    clear_trial(client, PLAN, 3, from_scratch=True)
    assert len(client.cleared) == 1


def test_a_folder_is_emptied_unless_a_process_holds_it(tmp_path: Any) -> None:
    folder = TrialFolder(tmp_path / "3")
    folder.checkpoints.mkdir(parents=True)
    held = lock_file(folder.path / "lock", 0.0, "it")
    assert not folder.empty()
    assert folder.checkpoints.exists()
    os.close(held)
    assert folder.empty()
    assert not folder.path.exists()


def test_of_a_folder_with_files_of_another_user_nothing_is_used_again_and_the_fence_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*asked: object) -> int:
        raise PermissionError(errno.EACCES, "Permission denied")

    folder = TrialFolder(tmp_path / "3")
    folder.checkpoints.mkdir(parents=True)
    (folder.checkpoints / "epoch-9").touch()
    for name in ("lock", "epoch", "result.json", "segments.jsonl", "metrics.jsonl", "apart"):
        (folder.path / name).touch()
    (folder.path / "link").symlink_to(tmp_path)
    monkeypatch.setattr("hermes_ops.airflow.folders.lock_file", refuse)
    assert folder.empty()
    assert {p.name for p in folder.path.iterdir() if not p.is_dir()} == {"lock", "epoch"}
    assert not folder.checkpoints.exists()
    folder.checkpoints.mkdir()  # by a hermes-trial that does not delete what it finds
    assert folder.empty()
    aside = [p for p in folder.path.iterdir() if p.is_dir()]
    assert all(p.name.startswith(".before-scratch.checkpoints.") for p in aside)
    assert sorted(len(list(p.iterdir())) for p in aside) == [0, 1]


def test_a_trial_that_could_not_be_started_is_started_once_its_task_is_cleared() -> None:
    over = segment(0, running=False, final="failed", segments=0, ended_s=9.0, task=row(0).id)
    given_up = TrialRecords(row(0), None, None, over)
    assert clear_request(given_up, closing=False) is ClearRequest.NOTHING
    cleared = TrialRecords(row(0, id=row(1).id), None, None, over)
    assert clear_request(cleared, closing=True) is ClearRequest.STAY_ENDED
    outside = Journal()
    world = sweep_with(cleared)
    outside.applier().settle(world, 200.0)
    ((_, _, key, record),) = outside.of("put")
    assert (key, record["final"]) == ("hermes_segment", None)
    assert [j.phase for j in world.jobs(200.0)] == [Phase.PENDING]


def test_a_stopped_sweep_whose_whole_run_is_cleared_stays_as_it_is_until_its_plan_has_run() -> None:
    """The plan removes the sweep's end; Airflow schedules the trials after it."""
    journal, close = Journal(), CloseRecord("stopped by its user")
    stopped, unbegun = ended("cancelled", None), TrialRecords(row(1, None), None, None, None)
    applier = journal.applier()
    applier.settle(sweep_with(stopped, unbegun, close=close), NOW_S)
    assert journal.of("put", "mark", "skip") == []
    applier.settle(sweep_with(ended("cancelled"), pending(1)), NOW_S)
    assert [call[1:3] for call in journal.of("put")] == [(0, "hermes_segment")]
    assert journal.of("mark", "skip") == []
