from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hermes_ops.airflow.control.jobs import job_id
from hermes_ops.airflow.control.reconcile import (
    Command,
    EndIdleTrials,
    MarkTasks,
    RecordEnd,
    RestoreTouched,
    RevokeLease,
    StopSegment,
    SweepFindings,
    end_trials,
    preempt,
    reconcile,
    stop_all,
    withdraw_resizes,
)
from hermes_ops.airflow.control.trial_state import TrialRecords, TrialState
from hermes_ops.airflow.records import CloseRecord
from tests.unit.airflow.builders import row, sweep_with
from tests.unit.airflow.control.trial_records import EXAMPLES, any_records

S = TrialState
CLOSE = CloseRecord("enough")


def example(state: TrialState) -> TrialRecords:
    """Return records of that state."""
    task_state, *records = EXAMPLES[state]
    return TrialRecords(row(0, task_state), *records)  # type: ignore[arg-type]


def names(commands: tuple[Command, ...]) -> list[str]:
    return [type(command).__name__ for command in commands]


RECONCILED: Mapping[TrialState, list[str]] = {
    S.PREEMPTED: ["CloseSegment"],
    S.REVOKED_PREEMPTED: ["CloseSegment"],
    S.REVOKED_RUNNING: ["StopSegment"],
    S.UNMARKED: ["MarkTasks"],
    S.UNREPORTED: ["RecordEnd"],
    S.CLEARED: ["ContinueTrial"],
}

ENDED_BY: Mapping[TrialState, list[str]] = {
    S.PENDING: ["EndIdleTrials"],
    S.GRANTED: ["RevokeLease"],
    S.RUNNING: ["StopSegment"],
    S.STOPPING: ["StopSegment"],
    S.RELEASED: ["StopSegment"],
    S.UNATTENDED: ["RevokeLease"],
    S.RESIZING: ["StopSegment"],
    S.LEAVING: ["EndIdleTrials"],
    S.WAITING: ["EndIdleTrials"],
    S.REVOKED_RUNNING: ["StopSegment"],
    S.REVOKED_STOPPING: ["StopSegment"],
    S.REVOKED_PREEMPTED: ["EndIdleTrials"],
    S.SEGMENT_AHEAD: ["EndIdleTrials"],
}


@pytest.mark.parametrize("state", TrialState)
def test_what_is_written_without_a_policy_follows_from_the_state(state: TrialState) -> None:
    found = reconcile(SweepFindings((example(state),), "here"))
    assert names(found) == RECONCILED.get(state, [])


@pytest.mark.parametrize("state", TrialState)
def test_how_a_trial_is_ended_follows_from_its_state(state: TrialState) -> None:
    assert names(end_trials((example(state),), CLOSE)) == ENDED_BY.get(state, [])


def test_leases_that_have_not_begun_are_revoked_while_airflow_starts_no_task_of_the_dag() -> None:
    trials = (example(S.GRANTED), example(S.UNATTENDED), example(S.RUNNING))
    found = reconcile(SweepFindings(trials, "here", is_paused=True))
    assert [c.trial for c in found if isinstance(c, RevokeLease)] == list(trials[:2])
    assert len(found) == 2


def test_a_trial_that_was_cleared_stays_ended_in_a_sweep_that_ends() -> None:
    found = reconcile(SweepFindings((example(S.CLEARED),), "here", is_closing=True))
    assert names(found) == ["RestoreMark"]


def test_a_note_has_a_running_trial_stopped_and_a_waiting_one_restarted() -> None:
    noted = [
        replace(example(state), row=replace(example(state).row, note="From scratch, please"))
        for state in (S.RUNNING, S.STOPPING, S.WAITING)
    ]
    found = [names(reconcile(SweepFindings((trial,), "here"))) for trial in noted]
    assert found == [["StopSegment"], [], ["RestartFromScratch"]]


def test_a_trial_that_cannot_be_started_is_given_up_and_one_that_has_ended_forgotten() -> None:
    why = {0: "MLflow refuses its run"}
    waiting, ended = example(S.WAITING), example(S.ENDED)
    sweep = SweepFindings((waiting,), "here", failing=frozenset({0}), unstartable=why)
    assert names(reconcile(sweep)) == ["GiveUp"]
    assert names(reconcile(replace(sweep, trials=(ended,)))) == ["ForgetFaults"]
    assert names(reconcile(replace(sweep, unstartable={}))) == []


def test_touched_trials_are_restored_not_marked_once_the_sweep_has_its_new_ones() -> None:
    sweep = SweepFindings((example(S.UNMARKED),), "here", is_complete=False, touched=(0,))
    assert reconcile(sweep) == ()
    (restored,) = reconcile(replace(sweep, is_complete=True))
    assert isinstance(restored, RestoreTouched)
    assert restored.trials == sweep.trials


def test_a_shutdown_stops_what_trains_and_revokes_what_has_not_begun() -> None:
    found = stop_all([example(state) for state in TrialState])
    assert names(found) == ["RevokeLease", "StopSegment", "RevokeLease", "StopSegment"]
    assert not any(command.resize for command in found if isinstance(command, StopSegment))


RECORDS = any_records() | st.sampled_from([example(state) for state in TrialState])
"""Any records, and often enough those of each state: few random ones are of a trial that trains."""


@given(RECORDS)
def test_no_command_ends_a_trial_that_has_ended_or_takes_gpus_from_one_without(
    trial: TrialRecords,
) -> None:
    for command in end_trials((trial,), CLOSE):
        assert not trial.has_ended
        if isinstance(command, StopSegment):
            assert trial.is_under_way or trial.state is S.RESIZING
        elif isinstance(command, RevokeLease):
            assert trial.has_lease_in_force
        else:
            assert isinstance(command, EndIdleTrials)
            assert trial.is_idle
            assert not trial.has_lease_in_force


@given(RECORDS)
def test_a_final_state_is_recorded_only_of_a_trial_without_one_and_marked_only_with_one(
    trial: TrialRecords,
) -> None:
    for command in reconcile(SweepFindings((trial,), "here")):
        if isinstance(command, RecordEnd):
            assert trial.final is None
        if isinstance(command, MarkTasks):
            assert trial.final is not None


@pytest.mark.parametrize(
    ("state", "kind"),
    [(S.GRANTED, RevokeLease), (S.UNATTENDED, RevokeLease), (S.RUNNING, StopSegment)],
)
def test_a_trial_leaves_its_gpus_by_its_stop_flag_once_its_segment_has_begun(
    state: TrialState, kind: type
) -> None:
    assert isinstance(preempt(example(state), "another trial converges faster"), kind)


def test_a_process_that_is_resized_keeps_its_slots_and_a_pod_does_not() -> None:
    process = example(S.RUNNING)
    assert process.lease is not None
    pod = replace(process, lease=replace(process.lease, pod={}))
    for trial, resize, kept in ((process, True, True), (process, False, False), (pod, True, False)):
        command = preempt(trial, "more GPUs are free", resize=resize)
        assert isinstance(command, StopSegment)
        assert command.resize is kept


def test_a_task_that_keeps_its_slots_leaves_unless_it_gets_gpus() -> None:
    sweep = sweep_with(*(example(state) for state in TrialState))
    (withdrawn,) = withdraw_resizes(sweep, set())
    assert isinstance(withdrawn, StopSegment)
    assert (withdrawn.trial.state, withdrawn.resize) == (S.RESIZING, False)
    assert withdraw_resizes(sweep, {job_id(sweep.id, 0)}) == ()
    assert withdraw_resizes(replace(sweep, close=CLOSE), set()) == ()
