from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from math import inf
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import structlog
from airflow.sdk.exceptions import (
    AirflowFailException,
    AirflowRescheduleException,
    AirflowRuntimeError,
    AirflowSkipException,
    ErrorType,
)
from airflow.sdk.execution_time.comms import ErrorResponse
from airflow.sdk.execution_time.task_runner import TaskRunnerMarker

from hermes_ops.airflow import plugin
from hermes_ops.airflow.folders import TrialFolder, write_lease, write_notice
from hermes_ops.airflow.hosts import WRONG_HOST
from hermes_ops.airflow.identity import MAIN_DAG
from hermes_ops.airflow.records import (
    LEASE_KEY,
    SEGMENT_KEY,
    STOP_KEY,
    Lease,
    Notice,
    SegmentRecord,
    decode,
    encode,
)
from hermes_ops.airflow.trial import local
from hermes_ops.airflow.trial.links import MlflowRunLink
from hermes_ops.airflow.trial.local import LocalSegment
from hermes_ops.airflow.trial.metrics import TrialOutcome
from hermes_ops.airflow.trial.operator import HermesTrialOperator
from hermes_ops.airflow.trial.running_segment import watch_segment
from hermes_ops.airflow.trial.segment_run import (
    MOST_WITHOUT_SPACE,
    SegmentRun,
    exit_code_of,
    exit_code_reader,
)
from hermes_ops.airflow.trial.trial_task import TrialTask
from hermes_ops.errors import HermesError, NotAllowed
from hermes_ops.trial.locks import lock_file
from hermes_ops.trial.outcome import PREEMPTED
from tests.unit.airflow.builders import SWEEP, DictStore, FakeFeed, flag, lease, segment


class Operator:
    """An operator that starts no segment."""

    number = 0
    mlflow_conn_id = storage_conn_id = None
    connection_templates: tuple[str, ...] = ()
    operator_extra_links: Any = (MlflowRunLink(),)
    run_link = ""
    log = structlog.get_logger("task")

    def segment(self, segment_run: SegmentRun, sweep: str, context: Any) -> Any:
        raise AssertionError("no segment is started here")


def task_of(operator: Any = None) -> TrialTask:
    plain: Any = Operator()
    return TrialTask(operator or plain)


def visit_of(store: DictStore, epoch: int = 1, **result: Any) -> SegmentRun:
    folder = TrialFolder.from_sweep(SWEEP, 0)
    folder.path.mkdir(parents=True, exist_ok=True)
    if result:
        (folder.path / "result.json").write_text(json.dumps({"epoch": epoch, **result}))
    last = decode(SegmentRecord, store.get(SEGMENT_KEY))
    segment_run = SegmentRun.from_lease(store, lease(epoch, max_failures=2), folder, last)
    feed: Any = FakeFeed()
    segment_run.feed = feed
    return segment_run


def said(segment_run: SegmentRun) -> list[Any]:
    feed: Any = segment_run.feed
    return list(feed.said)


def stored(store: DictStore) -> SegmentRecord:
    record = decode(SegmentRecord, store[SEGMENT_KEY])
    assert record is not None
    return record


@pytest.mark.parametrize(
    ("own", "last"),
    [
        (None, None),
        (lease(1), segment(1, running=False)),
        (lease(2, revoked=True), segment(1, running=False)),
    ],
)
def test_a_task_without_a_valid_lease_is_sent_away_on_the_same_try(
    own: Lease | None, last: SegmentRecord | None
) -> None:
    store = DictStore()
    if own is not None:
        store[LEASE_KEY] = encode(own)
    task = task_of()
    with pytest.raises(AirflowRescheduleException) as told:
        task.admit(store, last)
    assert list(task.operator.operator_extra_links) == []
    assert told.value.reschedule_date > datetime.now(UTC) + timedelta(seconds=1)


def test_a_valid_lease_is_admitted() -> None:
    assert task_of().admit(DictStore({LEASE_KEY: encode(lease(3))}), None) == lease(3)


def used_folder(*epochs: int) -> TrialFolder:
    """Return a trial's folder with a checkpoint, in which segments of these leases have run."""
    folder = TrialFolder.from_sweep(SWEEP, 0)
    folder.checkpoints.mkdir(parents=True)
    (folder.checkpoints / "last").write_text("w")
    lines = [json.dumps({"epoch": epoch, "start_s": 1.0}) for epoch in epochs]
    (folder.path / "segments.jsonl").write_text("\n".join(lines))
    return folder


LEFT_FOR_ANOTHER_HOST = segment(3, running=False, outcome=WRONG_HOST)


@pytest.mark.parametrize(
    ("anew", "last", "epochs", "machine", "emptied"),
    [
        (0, None, (), "", False),
        (0, segment(2), (1, 2), "", False),
        (3, None, (), "", True),
        (3, segment(2), (1, 2), "", True),
        (3, segment(3), (3,), "", False),
        (3, segment(4), (3, 4), "", False),
        (3, LEFT_FOR_ANOTHER_HOST, (1, 2), "", True),  # no process has seen that lease
        (3, LEFT_FOR_ANOTHER_HOST, (3,), "", False),
        (3, segment(3), (1, 2), "worker-b", True),  # it began from scratch on another machine
        (3, segment(4), (1, 3), "worker-b", False),
    ],
)
def test_a_folder_is_emptied_once_where_a_trial_begins_from_scratch_and_never_else(
    anew: int, last: SegmentRecord | None, epochs: tuple[int, ...], machine: str, emptied: bool
) -> None:
    folder = used_folder(*epochs)
    own = lease(5, anew=anew, machine=machine)
    task_of().restart_from_scratch(folder, own, last)
    assert (folder.checkpoints / "last").exists() is not emptied


def test_a_folder_that_a_process_still_uses_is_not_emptied_and_the_trial_waits() -> None:
    folder = used_folder(1)
    lock = lock_file(folder.path / "lock", 0.0, "the folder")
    with pytest.raises(AirflowRescheduleException):
        task_of().restart_from_scratch(folder, lease(2, anew=2), segment(1, running=False))
    assert (folder.checkpoints / "last").exists()
    os.close(lock)


def test_exit_0_with_its_result_finishes_the_trial() -> None:
    store = DictStore()
    segment_run = visit_of(store, outcome="finished")
    assert task_of().finish_segment(segment_run, None, 0) == {"trial": 0, "state": "finished"}
    assert (stored(store).final, said(segment_run)) == ("finished", [TrialOutcome("finished")])


def test_a_trial_that_finished_as_it_was_stopped_is_finished() -> None:
    segment_run = visit_of(DictStore(), outcome="finished")
    assert task_of().finish_segment(segment_run, flag(1, "cancelled"), 0)["state"] == "finished"


def test_exit_0_without_a_result_is_never_a_success() -> None:
    store = DictStore()
    with pytest.raises(AirflowRescheduleException):
        task_of().finish_segment(visit_of(store), None, 0)
    assert (stored(store).failures, stored(store).final) == (1, None)


@pytest.mark.parametrize("outcome", ["preempted", "interrupted"])
def test_exit_75_gives_the_slot_back_and_counts_no_failure(outcome: str) -> None:
    store = DictStore()
    with pytest.raises(AirflowRescheduleException):
        task_of().finish_segment(visit_of(store, outcome=outcome), flag(), 75)
    found = stored(store)
    assert (found.running, found.outcome, found.failures, found.final) == (False, outcome, 0, None)


@pytest.mark.parametrize("code", [75, 70, 1, -9])
@pytest.mark.parametrize("final", ["cancelled", "stopped_early"])
def test_a_final_stop_flag_skips_the_task_however_the_script_exits(code: int, final: str) -> None:
    store = DictStore()
    with pytest.raises(AirflowSkipException):
        task_of().finish_segment(visit_of(store, outcome="preempted"), flag(1, final), code)
    assert stored(store).final == final


def test_trouble_of_the_infrastructure_is_no_failure_of_the_script() -> None:
    store = DictStore()
    with pytest.raises(AirflowRescheduleException):
        task_of().finish_segment(
            visit_of(store, outcome="failed", reason="GPU 0 is in use"), None, 70
        )
    found = stored(store)
    assert (found.outcome, found.failures, found.final) == ("infrastructure", 0, None)


def test_interruptions_are_counted_until_a_new_step_or_an_end_of_the_scripts_own() -> None:
    store, counted = DictStore(), []
    for epoch, (code, step) in enumerate([(70, 0), (70, 0), (70, 4), (70, 4), (75, 4)], start=1):
        segment_run = visit_of(store, epoch, outcome="preempted", reason="its node is full")
        segment_run.record = replace(segment_run.record, step=step)
        with pytest.raises(AirflowRescheduleException):
            task_of().finish_segment(segment_run, None, code)
        counted.append((stored(store).interruptions, stored(store).reason))
    why = "its node is full"
    assert counted == [(1, why), (2, why), (1, why), (2, why), (0, "")]


def test_a_full_disk_is_no_failure_of_the_script_until_it_has_ended_it_too_often() -> None:
    store, most = DictStore(), MOST_WITHOUT_SPACE
    full = {"outcome": "failed", "cause": "no_space", "reason": "no space left on the device"}
    for epoch in range(1, most + 1):
        with pytest.raises(AirflowRescheduleException):
            task_of().finish_segment(visit_of(store, epoch, **full), None, 1)
        found = stored(store)
        assert (found.outcome, found.failures) == ("infrastructure", 0)
        assert found.without_space == epoch
    with pytest.raises(AirflowRescheduleException):
        task_of().finish_segment(visit_of(store, most + 1, **full), None, 1)
    assert (stored(store).outcome, stored(store).failures) == ("failed", 1)


def test_a_new_step_forgives_the_times_that_the_disk_was_full() -> None:
    store = DictStore()
    full = {"outcome": "failed", "cause": "no_space", "reason": "no space left on the device"}
    for epoch, step in ((1, 0), (2, 0), (3, 4)):
        segment_run = visit_of(store, epoch, **full)
        segment_run.record = replace(segment_run.record, step=step)
        with pytest.raises(AirflowRescheduleException):
            task_of().finish_segment(segment_run, None, 1)
    assert stored(store).without_space == 1


def test_a_folder_that_cannot_be_made_is_no_failure_of_the_script(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    store, segment = DictStore(), SimpleNamespace(start=full)
    task = task_of()
    monkeypatch.setattr(task.operator, "segment", lambda *_: segment)
    context: Any = {"ti": None}
    with pytest.raises(AirflowRescheduleException):
        task._run_segment(visit_of(store), "s", context)
    assert (stored(store).outcome, stored(store).failures) == ("infrastructure", 0)


def test_failures_up_to_the_limit_are_tried_again_and_one_more_ends_the_trial() -> None:
    store = DictStore()
    for epoch in (1, 2):
        with pytest.raises(AirflowRescheduleException):
            task_of().finish_segment(
                visit_of(store, epoch, outcome="failed", reason="no data"), None, 1
            )
        assert (stored(store).failures, stored(store).final) == (epoch, None)
    last = visit_of(store, 3, outcome="failed", reason="no data", tail=["a", "b"])
    with pytest.raises(AirflowFailException, match="no data"):
        task_of().finish_segment(last, None, 1)
    assert (stored(store).failures, stored(store).final) == (3, "failed")
    assert said(last)[-1] == TrialOutcome("failed", "no data", ("a", "b"))


def test_what_would_fail_again_in_the_same_way_is_not_tried_again() -> None:
    store = DictStore()
    reason = "loss is NaN at step 2"
    segment_run = visit_of(
        store, outcome="failed", reason=reason, retryable=False, cause="diverged"
    )
    with pytest.raises(AirflowFailException, match=reason):
        task_of().finish_segment(segment_run, None, 1)
    found = stored(store)
    assert (found.failures, found.final) == (1, "failed")
    assert (found.reason, found.cause) == (reason, "diverged")


class Killed(BaseException):
    """SIGKILL: nothing of the task runs on."""


class StoreOfATaskThatIsKilled(DictStore):
    """A state store; the task that writes to it is killed after its first write."""

    def set(self, key: str, value: Any, *, retention: Any = None) -> None:
        super().set(key, value)
        raise Killed


@pytest.mark.parametrize(("failures", "is_retryable"), [(2, True), (0, False)])
def test_a_failure_is_never_on_record_without_the_end_to_which_it_leads(
    failures: int, is_retryable: bool
) -> None:
    record = encode(segment(1, running=False, failures=failures))
    store = StoreOfATaskThatIsKilled({SEGMENT_KEY: record})
    segment_run = visit_of(store, 2, outcome="failed", reason="no", retryable=is_retryable)
    with pytest.raises(Killed):
        task_of().finish_segment(segment_run, None, 1)
    found = stored(store)
    assert (found.failures, found.final, found.reason) == (failures + 1, "failed", "no")


def test_the_first_failure_is_told_with_the_last_one() -> None:
    store = DictStore()
    for epoch, (reason, line) in enumerate([("no data", "a"), ("no disk", "b")], 1):
        with pytest.raises(AirflowRescheduleException):
            task_of().finish_segment(
                visit_of(store, epoch, outcome="failed", reason=reason, tail=[line]), None, 1
            )
        assert stored(store).first_failure == ("no data", "a")
        assert stored(store).reason == reason
    last = visit_of(store, 3, outcome="failed", reason="no GPU", tail=["c"])
    with pytest.raises(AirflowFailException):
        task_of().finish_segment(last, None, 1)
    assert said(last)[-1] == TrialOutcome("failed", "no GPU", ("c",), "no data\na")


def test_what_is_known_of_a_failure_from_outside_is_told_beside_its_own_reason() -> None:
    store = DictStore({SEGMENT_KEY: encode(segment(1, running=False, failures=2))})
    segment_run = visit_of(store, 2, outcome="failed", reason="killed by SIGKILL")
    with pytest.raises(AirflowFailException, match="killed by SIGKILL; out of memory"):
        task_of().finish_segment(segment_run, None, 9, "out of memory")


def test_a_process_that_vanished_is_a_failure_that_says_so() -> None:
    store = DictStore({SEGMENT_KEY: encode(segment(1, running=False, failures=2))})
    with pytest.raises(AirflowFailException, match="ended with -9 and left no result"):
        task_of().finish_segment(visit_of(store, 2), None, -9)


@pytest.mark.parametrize(
    "told",
    [
        {"outcome": "failed", "exit_code": "three"},
        {"outcome": "failed", "exit_code": [1]},
        {"outcome": "failed", "exit_code": inf},
        {"outcome": "failed", "tail": 5},
        {"outcome": "failed", "tail": [1, None], "reason": {"a": 1}, "cause": []},
        {"outcome": ["failed"]},
        {"outcome": "won", "exit_code": 0},
        {"outcome": 7, "tail": ["a"]},
    ],
)
def test_a_trial_whose_script_has_spoilt_its_result_fails_once_with_the_code_of_its_process(
    told: dict[str, Any],
) -> None:
    store = DictStore({SEGMENT_KEY: encode(segment(1, running=False, failures=2))})
    segment_run = visit_of(store, 2, **told)
    with pytest.raises(AirflowFailException, match="trial 0 failed: its process ended with 1"):
        task_of().finish_segment(segment_run, None, exit_code_of(segment_run.result()) or 1)
    assert stored(store).final == "failed"


@pytest.mark.parametrize("name", ["result.json", "status.json", "segments.jsonl"])
def test_a_trial_whose_script_has_put_a_folder_in_place_of_a_record_fails_once(name: str) -> None:
    store = DictStore({SEGMENT_KEY: encode(segment(1, running=False, failures=2))})
    segment_run = visit_of(store, 2)
    (segment_run.folder.path / name).mkdir()
    segment_run.relay()
    code = exit_code_reader(segment_run.folder, 2)()
    with pytest.raises(AirflowFailException, match="trial 0 failed: its process ended with 1"):
        task_of().finish_segment(segment_run, None, code or 1)
    assert stored(store).final == "failed"


@pytest.mark.parametrize(
    ("state", "leaves"),
    [
        ("failed", AirflowFailException),
        ("cancelled", AirflowSkipException),
        ("stopped_early", AirflowSkipException),
    ],
)
def test_a_trial_that_had_ended_before_ends_so_again(state: str, leaves: type[Exception]) -> None:
    store = DictStore({SEGMENT_KEY: encode(segment(1, running=False, final=state))})
    operator = HermesTrialOperator(task_id="trial", number=0)
    with pytest.raises(leaves):
        operator.execute({"task_state_store": store, "run_id": SWEEP, "ti": None})


def test_a_result_that_nobody_saw_is_found_on_entry_and_nothing_runs_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "hermes_ops.airflow.trial.segment_run.MetricFeed", lambda *_, **__: FakeFeed()
    )
    store = DictStore({LEASE_KEY: encode(lease(2)), SEGMENT_KEY: encode(segment(2))})
    visit_of(store, 2, outcome="finished")
    operator = HermesTrialOperator(task_id="trial", number=0)
    context = {"task_state_store": store, "run_id": SWEEP, "ti": None}
    assert operator.execute(context) == {"trial": 0, "state": "finished"}
    assert stored(store).final == "finished"


def test_a_script_that_cannot_be_started_is_a_failure_of_the_sweep(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "hermes_ops.airflow.trial.segment_run.MetricFeed", lambda *_, **__: FakeFeed()
    )
    own = lease(1, directory="/does/not/exist", max_failures=0)
    store = DictStore({LEASE_KEY: encode(own)})
    operator = HermesTrialOperator(task_id="trial", number=0)
    with pytest.raises(AirflowFailException, match=r"correct trial\.directory"):
        operator.execute({"task_state_store": store, "run_id": SWEEP, "ti": None})
    assert stored(store).final == "failed"


class Process:
    """A segment's process: still there for so many looks, then it exits with a code."""

    handed_over = False
    ran_s = None

    def __init__(self, looks: int, code: int, on_look: Any = None) -> None:
        self.looks, self.code, self.on_look = looks, code, on_look
        self.stops = 0
        self.hurries = 0
        self.ends: list[str] = []
        self.trouble = ""

    def wait(self, seconds: float) -> int | None:
        self.looks -= 1
        if self.on_look is not None:
            self.on_look(self.looks)
        return None if self.looks > 0 else self.code

    def stop(self) -> None:
        self.stops += 1

    def hurry(self) -> None:
        self.hurries += 1

    def start(self) -> None:
        """It runs."""

    def finish(self) -> None:
        self.ends.append("finish")

    def release(self) -> None:
        self.ends.append("release")


@pytest.mark.parametrize("part", ["looks", "is_over"])
def test_a_task_that_breaks_off_releases_its_segment_and_one_that_ends_leaves_nothing(
    part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "hermes_ops.airflow.trial.segment_run.MetricFeed", lambda *_, **__: FakeFeed()
    )
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:1")

    def broken(left: int) -> None:
        if part == "looks" and left == 1:
            raise RuntimeError("this worker's own trouble")

    process: Any = Process(3, 75, broken)
    monkeypatch.setattr(HermesTrialOperator, "segment", lambda *_: process)
    store = DictStore({LEASE_KEY: encode(lease(1))})
    ti: Any = type("Ti", (), {"xcom_push": lambda *_: None})()
    context = {"task_state_store": store, "run_id": SWEEP, "ti": ti}
    with pytest.raises(RuntimeError if part == "looks" else AirflowRescheduleException):
        HermesTrialOperator(task_id="trial", number=0).execute(context)
    assert process.ends[0] == ("release" if part == "looks" else "finish")
    assert stored(store).running is (part == "looks")


def test_a_stop_flag_reaches_the_process_once_and_a_final_one_after_it_counts() -> None:
    store = DictStore()
    segment_run = visit_of(store)
    wake_file = segment_run.folder.wake_file()

    def controller(left: int) -> None:
        if left == 8:
            store[STOP_KEY] = encode(flag(1))
            wake_file.wake()
        if left == 4:
            store[STOP_KEY] = encode(flag(1, "cancelled"))
            wake_file.wake()

    process: Any = Process(10, 75, controller)
    assert watch_segment(process, segment_run, print) == (flag(1, "cancelled"), 75)
    assert (process.stops, process.hurries) == (1, 1)


def test_a_notice_and_its_end_are_lines_of_the_log_and_nothing_is_stopped() -> None:
    segment_run, lines = visit_of(DictStore()), list[str]()

    def controller(left: int) -> None:
        if left == 8:
            write_notice(segment_run.folder, Notice(1, "keeps its GPUs until 12:00:05 UTC", 9.0))
        if left == 4:
            write_notice(segment_run.folder, None)

    process: Any = Process(10, 0, controller)
    assert watch_segment(process, segment_run, lines.append) == (None, 0)
    assert lines == [
        "Notice: it keeps its GPUs until 12:00:05 UTC",
        "It keeps its GPUs: nobody wants them back any more.",
    ]
    assert process.stops == 0


def test_a_notice_of_an_earlier_lease_is_none() -> None:
    segment_run = visit_of(DictStore(), epoch=2)
    write_notice(segment_run.folder, Notice(1, "keeps its GPUs", 9.0))
    assert segment_run.notice() == ""


class AwayStore(DictStore):
    """A state store behind an API server that does not answer for a while."""

    away = True

    def get(self, key: str, default: Any = None) -> Any:
        if self.away:
            raise AirflowRuntimeError(ErrorResponse(error=ErrorType.GENERIC_ERROR))
        return super().get(key, default)

    def set(self, key: str, value: Any, *, retention: Any = None) -> None:
        self.get(key)
        super().set(key, value)


def visit_away(store: AwayStore) -> SegmentRun:
    store.away = False
    segment_run = visit_of(store)
    store.away = True
    return segment_run


def test_while_airflow_does_not_answer_the_trial_trains_on_and_its_flag_is_seen_after() -> None:
    store, lines = AwayStore(), list[str]()
    segment_run = visit_away(store)
    wake_file = segment_run.folder.wake_file()

    def controller(left: int) -> None:
        if left == 8:
            wake_file.wake()
        if left == 4:
            assert process.stops == 0
            store.away = False
            store[STOP_KEY] = encode(flag(1))
            wake_file.wake()

    process: Any = Process(10, 75, controller)
    assert watch_segment(process, segment_run, lines.append) == (flag(1), 75)
    assert process.stops == 1
    assert "Airflow does not answer now" in lines[0]


def test_what_a_trial_said_while_airflow_was_away_is_written_when_it_is_back() -> None:
    store = AwayStore()
    segment_run = visit_away(store)
    (segment_run.folder.path / "status.json").write_text(json.dumps({"epoch": 1, "step": 3}))
    with pytest.raises(AirflowRuntimeError):
        segment_run.relay()
    store.away = False
    segment_run.relay()
    assert store[SEGMENT_KEY]["step"] == 3


def test_without_a_flag_of_its_lease_the_process_is_left_alone() -> None:
    store = DictStore({STOP_KEY: encode(flag(1))})
    process: Any = Process(3, 0)
    assert watch_segment(process, visit_of(store, epoch=2), print) == (None, 0)
    assert process.stops == 0


def test_a_task_that_airflow_kills_checkpoints_its_trial() -> None:
    operator = HermesTrialOperator(task_id="trial", number=0)
    operator.on_kill()
    process: Any = Process(1, 75)
    operator.trial_task._segment = process
    operator.on_kill()
    assert process.stops == 1


TASK = {"dag_id": MAIN_DAG, "run_id": SWEEP, "task_id": "trial", "map_index": 0}


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[LocalSegment]:
    """Each process that a task has started, in order; none is left at the end."""
    found: list[LocalSegment] = []
    launch = LocalSegment._launch

    def noted(segment: LocalSegment) -> None:
        launch(segment)
        found.append(segment)

    monkeypatch.setattr(LocalSegment, "_launch", noted)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:1")
    return found


def enter(
    store: DictStore,
    beside: Lease | None,
    xcom_push: Callable[..., None] = lambda *_: None,
    **options: Any,
) -> TrialFolder:
    """Run a task whose trial has that lease beside its folder; it leaves by being rescheduled."""
    folder = TrialFolder.from_sweep(SWEEP, 0)
    if beside is not None:
        write_lease(folder, beside)
        local.start_process(TASK)
    task = HermesTrialOperator(task_id="trial", number=0, pool="gpus", **options)
    ti: Any = type("Ti", (), {"xcom_push": xcom_push})()
    with pytest.raises(AirflowRescheduleException):
        task.execute({"task_state_store": store, "run_id": SWEEP, "ti": ti})
    return folder


def granted(tmp_path: Path, epoch: int = 1) -> Lease:
    command = ("sh", "-c", "echo loss=1; exit 3")
    return lease(epoch, gpus=(), command=command, directory=str(tmp_path), pool="gpus")


def test_the_process_that_was_made_ready_for_the_lease_is_the_one_that_runs(
    tmp_path: Path, launched: list[LocalSegment]
) -> None:
    own = granted(tmp_path)
    store = DictStore({LEASE_KEY: encode(own)})
    folder = enter(store, own)
    (only,) = launched
    assert only.lease == own
    assert (stored(store).failures, folder.result()["exit_code"]) == (1, 3)


def test_the_batch_of_a_lease_is_on_record_with_its_segment(
    tmp_path: Path, launched: list[LocalSegment]
) -> None:
    own = replace(granted(tmp_path), batch=96, samples=100)
    folder = enter(DictStore({LEASE_KEY: encode(own)}), own)
    assert len(launched) == 1
    assert [s.get("batch") for s in folder.segments()] == [100]


def test_a_lease_that_airflow_has_not_on_record_begins_nothing(
    tmp_path: Path, launched: list[LocalSegment]
) -> None:
    folder = enter(DictStore(), granted(tmp_path))
    (only,) = launched
    assert only.wait(0.0) is not None
    assert not folder.path.exists()


def test_a_process_of_an_older_lease_gives_way_to_that_of_the_lease_on_record(
    tmp_path: Path, launched: list[LocalSegment]
) -> None:
    store = DictStore({LEASE_KEY: encode(granted(tmp_path, 2))})
    folder = enter(store, granted(tmp_path, 1))
    assert [s.lease.epoch for s in launched] == [1, 2]
    assert launched[0].wait(0.0) is not None
    assert [s["epoch"] for s in folder.segments()] == [2]


def test_a_trial_whose_process_cannot_be_made_ready_fails_with_the_reason(
    tmp_path: Path, launched: list[LocalSegment], capsys: pytest.CaptureFixture[str]
) -> None:
    own = granted(tmp_path / "gone")
    store = DictStore({LEASE_KEY: encode(own)})
    enter(store, own)
    assert (launched, stored(store).failures) == ([], 1)
    assert "does not exist: correct trial.directory" in capsys.readouterr().out


@pytest.mark.parametrize("options", [{"mlflow_conn_id": "mlflow"}, {"storage_conn_id": "s3"}])
def test_a_process_made_ready_without_the_variables_of_connections_gives_way(
    options: dict[str, Any],
    tmp_path: Path,
    launched: list[LocalSegment],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("hermes_ops.airflow.trial.trial_task.Connections.enter", lambda _: None)
    own = granted(tmp_path)
    folder = enter(DictStore({LEASE_KEY: encode(own)}), own, **options)
    first, second = launched
    assert (first.wait(0.0), second.wait(0.0)) == (PREEMPTED, 3)
    assert len(folder.segments()) == 1


@pytest.mark.parametrize("is_prestarted", [False, True])
def test_a_process_locks_gpus_of_the_leases_pool_though_that_of_the_dag_was_edited(
    is_prestarted: bool, tmp_path: Path, launched: list[LocalSegment]
) -> None:
    own = replace(granted(tmp_path), pool="others")
    enter(DictStore({LEASE_KEY: encode(own)}), own if is_prestarted else None)
    assert [segment.pool for segment in launched] == ["others"]


class StoreThatRefusesTheFirst(DictStore):
    """A state store whose server is away when a segment begins."""

    refused = False

    def set(self, key: str, value: Any, *, retention: Any = None) -> None:
        if not self.refused:
            self.refused = True
            raise AirflowRuntimeError(ErrorResponse(error=ErrorType.GENERIC_ERROR))
        super().set(key, value)


def test_a_segment_that_has_begun_goes_on_where_airflow_takes_no_word_of_it(
    tmp_path: Path, launched: list[LocalSegment], capsys: pytest.CaptureFixture[str]
) -> None:
    def away(*_: object) -> None:
        raise AirflowRuntimeError(ErrorResponse(error=ErrorType.GENERIC_ERROR))

    own = granted(tmp_path)
    store = StoreThatRefusesTheFirst({LEASE_KEY: encode(own)})
    folder = enter(store, own, away)
    assert len(launched) == 1
    assert folder.result()["exit_code"] == 3  # its own exit, and nobody stopped it
    assert (stored(store).epoch, stored(store).running, stored(store).failures) == (1, False, 1)
    assert capsys.readouterr().out.count("Airflow does not answer now") == 2


@pytest.mark.parametrize(
    "other",
    [{"map_index": -1}, {"map_index": 1}, {"run_id": "another"}, {"map_index": None}],
)
def test_a_task_without_a_lease_of_its_own_makes_nothing_ready(
    other: dict[str, Any],
    tmp_path: Path,
    launched: list[LocalSegment],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write_lease(TrialFolder.from_sweep(SWEEP, 0), granted(tmp_path))
    monkeypatch.setattr(plugin, "get_contextvars", lambda: {**TASK, **other})
    plugin.on_starting(component=TaskRunnerMarker())
    assert launched == []
    assert local.take_process() is None


def test_airflow_has_a_trials_process_made_ready_before_it_reads_the_dag(
    tmp_path: Path, launched: list[LocalSegment], monkeypatch: pytest.MonkeyPatch
) -> None:
    own = granted(tmp_path)
    write_lease(TrialFolder.from_sweep(SWEEP, 0), own)
    monkeypatch.setattr(plugin, "get_contextvars", lambda: TASK)
    plugin.on_starting(component=TaskRunnerMarker())
    (only,) = launched
    assert local.take_process() is only
    only.finish()
    assert not TrialFolder.from_sweep(SWEEP, 0).path.exists()


def test_a_lease_takes_no_connection_into_a_sweep_that_is_not_in_the_dags_file() -> None:
    segment_run = visit_of(DictStore())
    own = {"MINE": "{{ conn.of_another_team.password }}"}
    segment_run.lease = replace(segment_run.lease, environment=own, templated=("MINE",))
    with pytest.raises(NotAllowed, match="MINE from connections"):  # nothing renders it
        task_of(Operator())._render_variables(segment_run, {})

    class OfAnother(Operator):
        connection_templates = ("{{ conn.our_own.password }}",)

    with pytest.raises(NotAllowed, match="MINE from connections"):
        task_of(OfAnother())._render_variables(segment_run, {})


def test_a_trial_renders_what_comes_from_a_connection_and_no_record_has_it() -> None:
    class Renders(Operator):
        connection_templates = ("{{ conn.db.password }}",)

        def render_template(self, text: str, context: dict[str, str]) -> str:
            return context[text]

    store = DictStore()
    segment_run = visit_of(store)
    own = {"DB": "me:{{ conn.db.password }}", "OTHER": "{{ conn.db.password }}"}
    segment_run.lease = replace(segment_run.lease, environment=own, templated=("DB",))
    shown = task_of(Renders())._render_variables(
        segment_run, {"{{ conn.db.password }}": "swordfish"}
    )
    assert shown.lease.environment == {**own, "DB": "me:swordfish"}
    assert segment_run.lease.environment == own
    assert "swordfish" not in str(store)
    with pytest.raises(HermesError, match=r"trial\.environment\.DB.*cannot be rendered"):
        task_of(Renders())._render_variables(segment_run, {})
