"""Tasks that a person has cleared, notes that ask for a new beginning, DAGs that are paused."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest

from hermes_ops.airflow.client import TaskKey
from hermes_ops.airflow.control.clearing import Wish, asks_anew, clear_trial, is_cleared, wish_of
from hermes_ops.airflow.control.pool import Trial
from hermes_ops.airflow.folders import TrialFolder
from hermes_ops.airflow.records import CloseRecord, Lease, Segment, decode, encode
from hermes_ops.core.model import Phase
from hermes_ops.errors import HermesError
from hermes_ops.trial.locks import take
from tests.unit.airflow.worlds import (
    SWEEP,
    Journal,
    book,
    flag,
    lease,
    pending,
    row,
    running,
    segment,
    starting,
    sweep_record,
    waiting,
)

NOW_S = 200.0
CLOSING = CloseRecord("stopped by its user")
PLAN = TaskKey("dag", SWEEP, "plan")


def ended(final: str, state: str | None = "scheduled", **changes: Any) -> Trial:
    """A trial that ended in a segment of its own; as if its task had been cleared since."""
    record = segment(running=False, final=final, outcome=final, ended_s=150.0, **changes)
    return Trial(row(0, state), lease(), None, record)


def noted(trial: Trial, note: str = "From scratch, please") -> Trial:
    return replace(trial, row=replace(trial.row, note=note))


@pytest.mark.parametrize(
    ("trial", "wish"),
    [
        (waiting(0), Wish.NOTHING),
        (running(0, 0), Wish.NOTHING),
        (pending(0), Wish.NOTHING),
        (noted(pending(0)), Wish.NOTHING),
        (ended("failed"), Wish.GO_ON),
        (ended("failed", None), Wish.GO_ON),
        (ended("cancelled"), Wish.GO_ON),
        (ended("stopped_early"), Wish.GO_ON),
        (ended("finished"), Wish.STAY_ENDED),
        (ended("failed", "failed"), Wish.NOTHING),
        (ended("failed", "running"), Wish.NOTHING),
        (noted(ended("finished")), Wish.BEGIN_ANEW),
        (noted(ended("finished", None)), Wish.NOTHING),
        (noted(ended("finished", "success")), Wish.NOTHING),
        (noted(waiting(0)), Wish.BEGIN_ANEW),
        (noted(starting(0, 0)), Wish.BEGIN_ANEW),
        (noted(running(0, 0)), Wish.STOP),
        (noted(replace(running(0, 0), stop=flag())), Wish.NOTHING),
    ],
)
def test_what_is_done_follows_from_what_the_person_did(trial: Trial, wish: Wish) -> None:
    assert wish_of(trial, closing=False) is wish


@pytest.mark.parametrize("trial", [ended("failed"), noted(ended("finished"))])
def test_no_trial_of_a_sweep_that_is_closing_goes_on(trial: Trial) -> None:
    assert wish_of(trial, closing=True) is Wish.STAY_ENDED


def test_a_task_that_is_tried_again_was_not_cleared() -> None:
    failed = ended("failed")
    tried_again = replace(failed, row=replace(failed.row, pool_slots=1))
    assert is_cleared(failed)
    assert not is_cleared(tried_again)


def test_a_trial_that_was_ended_while_it_waited_is_skipped_and_not_reopened() -> None:
    journal, trial = Journal(), waiting(0)
    journal.applier()._finish(book(trial), trial, "cancelled", "enough", NOW_S)
    written = decode(Segment, journal.of("put")[0][3])
    assert written is not None
    assert not is_cleared(replace(trial, segment=written))
    cleared_later = replace(trial, row=replace(trial.row, id="another"), segment=written)
    assert is_cleared(cleared_later)


def test_a_cleared_trial_goes_on_in_its_run_with_its_failures_forgiven() -> None:
    journal = Journal(opened={0: {"rate": 0.1}})
    sweep = book(ended("failed", failures=3, step=7))
    journal.applier().settle(sweep, NOW_S)
    (put,) = journal.of("put")
    record = decode(Segment, put[3])
    assert record is not None
    assert (put[2], record.final, record.failures, record.step) == ("hermes_segment", None, 0, 7)
    assert journal.of("reopen") == [("reopen", "run-0")]
    assert [t.phase for t in sweep.trials] == [Phase.WAITING]


def test_a_cleared_trial_that_had_finished_gets_its_success_back() -> None:
    journal = Journal()
    journal.applier().settle(book(ended("finished")), NOW_S)
    assert journal.of("mark", "put", "skip") == [("mark", [0], "success")]


def test_a_trial_that_begins_anew_has_a_new_run_and_an_empty_account() -> None:
    journal = Journal(opened={0: {"rate": 0.1}})
    sweep = book(noted(ended("finished", step=9, service_gpu_s=50.0)))
    journal.applier().settle(sweep, NOW_S)
    (trial,) = sweep.trials
    assert trial.lease is not None
    assert (trial.lease.config, trial.lease.anew, trial.active) == ({"rate": 0.1}, 2, False)
    assert trial.segment is not None
    assert (trial.segment.step, trial.segment.service_gpu_s, trial.ended) == (0, 0.0, False)
    written = {key: value for _, _, key, value in journal.of("put")}
    assert decode(Lease, written["hermes_lease"]) == trial.lease
    assert journal.of("set aside", "open") == [
        ("set aside", "run-0"),
        ("open", 0, {"rate": 0.1}, False),
    ]
    (note,) = journal.of("note")
    assert "from scratch" in note[2]
    assert not asks_anew(note[2])


def test_while_mlflow_is_away_nothing_is_written_of_a_new_beginning() -> None:
    journal = Journal(mlflow_away=True)
    trial = noted(waiting(0))
    sweep = book(trial)
    journal.applier().settle(sweep, NOW_S)
    assert sweep.trials == (trial,)
    assert journal.of("put", "note") == []


def test_of_a_paused_dag_only_trials_that_train_are_offered_and_leases_are_taken_back() -> None:
    journal = Journal()
    sweep = book(running(0, 0), waiting(1), starting(2, 1), pending(3))
    paused = replace(sweep.plan, run=replace(sweep.plan.run, paused=True))
    sweep.plan = paused
    journal.applier().settle(sweep, NOW_S)
    assert [(n, key) for _, n, key, _ in journal.of("put")] == [(2, "hermes_lease")]
    assert [j.id.rpartition("/")[2] for j in sweep.jobs(NOW_S)] == ["0", "2"]


class Client:
    """Airflow with one planned sweep whose trial 3 has begun; keeps what was cleared."""

    def __init__(self) -> None:
        self.cleared: list[tuple[Any, ...]] = []

    def get_state(self, task: TaskKey, key: str) -> object:
        if task.run_id != SWEEP:
            return None
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


def test_a_folder_is_emptied_unless_a_process_holds_it(tmp_path: Any) -> None:
    folder = TrialFolder(tmp_path / "3")
    folder.checkpoints.mkdir(parents=True)
    held = take(folder.path / "lock", 0.0, "it")
    assert not folder.empty()
    assert folder.checkpoints.exists()
    os.close(held)
    assert folder.empty()
    assert not folder.path.exists()


def test_a_trial_that_could_not_be_started_is_started_once_its_task_is_cleared() -> None:
    over = segment(0, running=False, final="failed", segments=0, ended_s=9.0, task=row(0).id)
    given_up = Trial(row(0), None, None, over)
    assert wish_of(given_up, closing=False) is Wish.NOTHING
    cleared = Trial(row(0, id=row(1).id), None, None, over)
    assert wish_of(cleared, closing=True) is Wish.STAY_ENDED
    outside = Journal()
    world = book(cleared)
    outside.applier().settle(world, 200.0)
    ((_, _, key, record),) = outside.of("put")
    assert (key, record["final"]) == ("hermes_segment", None)
    assert [j.phase for j in world.jobs(200.0)] == [Phase.PENDING]
