from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from airflow.sdk.exceptions import AirflowRescheduleException, AirflowSkipException

from hermes_ops.airflow.folders import TrialFolder
from hermes_ops.airflow.records import (
    LEASE_KEY,
    SEGMENT_KEY,
    STOP_KEY,
    Lease,
    SegmentRecord,
    StopFlag,
    decode,
    encode,
)
from hermes_ops.airflow.trial import trial_task
from hermes_ops.airflow.trial.operator import HermesTrialOperator
from hermes_ops.airflow.trial.running_segment import RESIZE_WAIT_S, await_lease
from hermes_ops.airflow.trial.segment_run import SegmentRun, run_pending
from hermes_ops.airflow.trial.trial_task import TrialTask
from tests.unit.airflow.builders import SWEEP, DictStore, FakeFeed, flag, lease, segment

Answer = Callable[["ResizingStore"], None]


class ResizingStore(DictStore):
    """A state store whose controller answers at once when a task keeps its slots."""

    def __init__(self, answer: Answer) -> None:
        resized = {LEASE_KEY: encode(lease(1)), STOP_KEY: encode(flag(1, resize=True))}
        super().__init__(resized)
        self.answer = answer

    def set(self, key: str, value: Any, *, retention: Any = None) -> None:
        super().set(key, value)
        if key == SEGMENT_KEY and value["resizing"]:
            self.answer(self)

    @property
    def record(self) -> SegmentRecord:
        record = decode(SegmentRecord, self[SEGMENT_KEY])
        assert record is not None
        return record


class Script:
    """A segment that saves its checkpoint and exits; the last one of the trial finishes it."""

    handed_over, trouble, ran_s = False, "", None

    def __init__(self, own: Lease, folder: TrialFolder) -> None:
        self.own, self.folder, self.looks = own, folder, 3

    def start(self) -> None:
        self.folder.path.mkdir(parents=True, exist_ok=True)

    def stop(self) -> None:
        """It would leave anyway."""

    def wait(self, seconds: float) -> int | None:
        self.looks -= 1
        if self.looks:
            return None
        ended = "finished" if self.own.epoch == 2 else "preempted"
        result = {"epoch": self.own.epoch, "outcome": ended}
        (self.folder.path / "result.json").write_text(json.dumps(result))
        return 0 if ended == "finished" else 75

    def finish(self) -> None:
        """It has ended."""

    release = finish


@pytest.fixture
def feed(monkeypatch: pytest.MonkeyPatch) -> FakeFeed:
    """The one feed of the task's run."""
    made = FakeFeed()
    monkeypatch.setattr("hermes_ops.airflow.trial.segment_run.MetricFeed", lambda *_, **__: made)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:1")
    return made


def execute(store: DictStore, monkeypatch: pytest.MonkeyPatch) -> tuple[list[Lease], Any]:
    """Run the task; return the leases of its segments, and its summary or the exception."""
    started: list[Lease] = []

    def of(_: object, segment_run: SegmentRun, *__: object) -> Script:
        started.append(segment_run.lease)
        return Script(segment_run.lease, segment_run.folder)

    monkeypatch.setattr(HermesTrialOperator, "segment", of)
    ti: Any = type("Ti", (), {"xcom_push": lambda *_: None})()
    context = {"task_state_store": store, "run_id": SWEEP, "ti": ti}
    try:
        return started, HermesTrialOperator(task_id="trial", number=0).execute(context)
    except (AirflowRescheduleException, AirflowSkipException) as error:
        return started, error


def grant(store: ResizingStore) -> None:
    store[LEASE_KEY] = encode(lease(2, gpus=(0, 1)))


def tell(told: StopFlag) -> Answer:
    return lambda store: store.update({STOP_KEY: encode(told)})


def test_a_resized_trial_has_its_next_segment_in_the_same_run_of_its_task(
    feed: FakeFeed, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = ResizingStore(grant)
    started, summary = execute(store, monkeypatch)
    assert summary == {"trial": 0, "state": "finished"}
    assert [(own.epoch, own.gpus) for own in started] == [(1, (0,)), (2, (0, 1))]
    assert (store.record.epoch, store.record.gpus, store.record.resizing) == (2, (0, 1), False)
    assert feed.said[:3] == ["start", "end segment", "start"]
    assert feed.said.count("close") == 1


def test_a_task_that_is_told_so_gives_its_slots_back(
    feed: FakeFeed, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = ResizingStore(tell(flag(1)))
    started, left = execute(store, monkeypatch)
    assert isinstance(left, AirflowRescheduleException)
    assert (len(started), store.record.resizing, store.record.final) == (1, False, None)
    assert "pump" not in feed.said
    run_pending()
    assert feed.said.count("pump") == 1


def test_a_task_that_waits_in_its_slots_ends_with_its_sweep(
    feed: FakeFeed, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = ResizingStore(tell(flag(1, "cancelled")))
    _, left = execute(store, monkeypatch)
    assert isinstance(left, AirflowSkipException)
    assert (store.record.resizing, store.record.final) == (False, "cancelled")


@pytest.mark.parametrize("granted", [False, True])
def test_a_task_that_has_waited_too_long_leaves_unless_its_lease_came_with_the_last_moment(
    granted: bool, feed: FakeFeed, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = ResizingStore(lambda _: None)

    def too_long(*_: object) -> None:
        if granted:
            grant(store)

    monkeypatch.setattr(trial_task, "await_lease", too_long)
    started, left = execute(store, monkeypatch)
    assert (len(started), isinstance(left, dict)) == ((2, True) if granted else (1, False))
    assert store.record.resizing is False


def test_a_task_that_airflow_ends_as_its_next_segment_starts_stops_that_segment(
    feed: FakeFeed, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped: list[int] = []

    class Starting(Script):
        def start(self) -> None:
            super().start()
            if self.own.epoch == 2:
                operators[0].on_kill()

        def stop(self) -> None:
            stopped.append(self.own.epoch)

    def of(operator: HermesTrialOperator, run: SegmentRun, *_: object) -> Script:
        operators.append(operator)
        return Starting(run.lease, run.folder)

    operators: list[HermesTrialOperator] = []
    monkeypatch.setattr(HermesTrialOperator, "segment", of)
    ti: Any = type("Ti", (), {"xcom_push": lambda *_: None})()
    context = {"task_state_store": ResizingStore(grant), "run_id": SWEEP, "ti": ti}
    HermesTrialOperator(task_id="trial", number=0).execute(context)
    assert stopped[-1] == 2


def test_a_task_that_airflow_ends_does_not_wait_for_a_lease(
    feed: FakeFeed, monkeypatch: pytest.MonkeyPatch
) -> None:
    def end_task(operator: HermesTrialOperator, *_: object) -> Any:
        operator.on_kill()
        return Script(lease(1), TrialFolder.from_sweep(SWEEP, 0))

    store = ResizingStore(grant)
    monkeypatch.setattr(HermesTrialOperator, "segment", end_task)
    ti: Any = type("Ti", (), {"xcom_push": lambda *_: None})()
    with pytest.raises(AirflowRescheduleException):
        HermesTrialOperator(task_id="trial", number=0).execute(
            {"task_state_store": store, "run_id": SWEEP, "ti": ti}
        )
    assert store.record.resizing is False


@pytest.mark.parametrize(
    ("told", "pod", "kept"),
    [
        (flag(1, resize=True), None, True),
        (flag(1), None, False),
        (None, None, False),
        (StopFlag(1, "enough", 1.0, "cancelled", resize=True), None, False),
        (flag(1, resize=True), {}, False),
    ],
)
def test_slots_are_kept_for_the_resize_of_a_process_alone(
    told: StopFlag | None, pod: Any, kept: bool
) -> None:
    folder = TrialFolder.from_sweep(SWEEP, 0)
    segment_run = SegmentRun.from_lease(DictStore(), lease(1, pod=pod), folder, None)
    operator: Any = None
    assert TrialTask(operator)._may_keep_slots(segment_run, told) is kept


@pytest.mark.parametrize(
    ("own", "fits"),
    [
        (lease(2), True),
        (lease(1), False),
        (lease(2, revoked=True), False),
        (lease(2, run_id="another", anew=2), False),  # it begins from scratch
    ],
)
def test_the_next_lease_is_in_force_and_of_the_same_run(own: Lease, fits: bool) -> None:
    store = DictStore({LEASE_KEY: encode(own)})
    folder = TrialFolder.from_sweep(SWEEP, 0)
    ended = segment(1, running=False, resizing=True)
    segment_run = SegmentRun.from_lease(store, lease(1), folder, None)
    segment_run.record = ended
    assert segment_run.next_lease() == (own if fits else None)


def test_a_task_waits_for_its_lease_no_longer_than_its_time() -> None:
    now_s = [0.0]
    asked: list[float] = []

    def never() -> None:
        asked.append(now_s[0])

    def sleep(seconds: float) -> None:
        now_s[0] += seconds

    folder = TrialFolder.from_sweep(SWEEP, 0)
    trial: Any = type("Trial", (), {})()
    trial.wake_file, trial.next_lease, trial.stop_flag = folder.wake_file, never, lambda: None
    found = await_lease(trial, print, lambda: False, lambda: now_s[0], sleep)
    assert found is None
    assert RESIZE_WAIT_S <= now_s[0] < RESIZE_WAIT_S + 1.0
    assert len(asked) == RESIZE_WAIT_S  # once a second, as nothing wakes it
