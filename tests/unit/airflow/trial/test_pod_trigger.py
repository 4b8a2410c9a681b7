"""A pod that the triggerer holds: its trigger, its task's way back, the controller's part."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import Any

import pytest
import structlog
from airflow.sdk.exceptions import AirflowRescheduleException, AirflowSkipException, TaskDeferred
from airflow.sdk.serde import deserialize, serialize

from hermes_ops.airflow.control.executor import closed_segment
from hermes_ops.airflow.control.jobs import DeferredTrials
from hermes_ops.airflow.control.reconcile import (
    ENDED_WEIGHT,
    LEASED_WEIGHT,
    WAITING_WEIGHT,
    rank_of,
)
from hermes_ops.airflow.control.trial_state import TrialRecords
from hermes_ops.airflow.folders import (
    TrialFolder,
    controller_wake_file,
    read_stop_flag,
    write_start,
    write_stop_flag,
)
from hermes_ops.airflow.records import (
    HELD_POOL_SLOTS,
    LEASE_KEY,
    SEGMENT_KEY,
    STOP_KEY,
    CorrectedStart,
    SegmentRecord,
    decode,
    encode,
)
from hermes_ops.airflow.trial import pod_trigger
from hermes_ops.airflow.trial.pod_trigger import HeldPod, HeldTrial, PodTrigger, end, hold
from hermes_ops.airflow.trial.running_segment import TaskLogCopy, pop_log_copies
from hermes_ops.airflow.trial.segment_run import SegmentRun, with_status
from hermes_ops.airflow.trial.trial_task import TrialTask
from hermes_ops.core.guards import Quantum
from hermes_ops.core.model import Gpu, Phase, Snapshot
from hermes_ops.errors import HermesError
from hermes_ops.kubernetes import PodSegment
from tests.unit.airflow.builders import (
    SWEEP,
    DictStore,
    FakeFeed,
    Journal,
    flag,
    lease,
    row,
    segment,
    sweep_with,
)
from tests.unit.kubernetes.pods import POD, FakePods

HELD = HeldPod(SWEEP, 0, 1, "run-0", POD.name, "trials", "1", 600.0, {"in_cluster": True})
OTHER = "p-1-1"
GANG = replace(HELD, others=(OTHER,))
UNDER_WAY = replace(POD, phase="Running", started=True)


def trial(state: str, **changes: Any) -> TrialRecords:
    """A trial as a pod, whose segment of lease 1 was begun."""
    facts: dict[str, Any] = {
        "row": row(0, state, pool_slots=1),
        "lease": lease(pod={}),
        "stop": None,
    }
    return TrialRecords(**{**facts, "segment": segment(), **changes})


def left(outcome: str, epoch: int = 1) -> TrialFolder:
    """The folder of the trial after a segment that ended so."""
    folder = TrialFolder.from_sweep(SWEEP, 0)
    folder.path.mkdir(parents=True, exist_ok=True)
    (folder.path / "result.json").write_text(json.dumps({"epoch": epoch, "outcome": outcome}))
    ends = [{"epoch": epoch, "gpus": [0], "start_s": 100.0}, {"end_s": 104.0, "outcome": outcome}]
    (folder.path / "segments.jsonl").write_text("\n".join(map(json.dumps, ends)))
    return folder


# The trigger


@pytest.mark.parametrize("held", [HELD, GANG])
def test_a_trigger_is_made_again_from_what_airflow_stores(held: HeldPod) -> None:
    path, arguments = PodTrigger(**asdict(held)).serialize()
    assert path == "hermes_ops.airflow.trial.pod_trigger.PodTrigger"
    stored_arguments: Any = deserialize(json.loads(json.dumps(serialize(arguments))))
    assert PodTrigger(**stored_arguments).held == held


@pytest.fixture
def pods(monkeypatch: pytest.MonkeyPatch) -> FakePods:
    """A cluster in which the pod runs, and an MLflow that takes everything."""
    found = FakePods({POD.name: UNDER_WAY})
    monkeypatch.setattr(HeldPod, "pods", lambda held: found)
    monkeypatch.setattr(pod_trigger, "tracker", lambda conn_id: None)
    monkeypatch.setattr(pod_trigger, "MetricFeed", lambda *known: FakeFeed())
    monkeypatch.setattr(pod_trigger, "SOONEST_S", 0.01)
    return found


def ended(held: HeldPod = HELD) -> dict[str, Any]:
    """How the pods ended that the trigger holds."""
    told: list[Any] = []
    hold(held, print, never, told.append)
    (event,) = told
    return dict(event)


def never() -> bool:
    return False


def test_a_pod_that_has_ended_fires_with_its_trials_own_word(pods: FakePods) -> None:
    left("finished")
    del pods.pods[POD.name]
    assert ended() == {"epoch": 1, "code": 0, "trouble": ""}


def test_a_pod_that_is_gone_without_a_word_is_trouble_and_is_not_made_again(pods: FakePods) -> None:
    del pods.pods[POD.name]
    event = ended()
    assert (event["code"], pods.made) == (70, [])
    assert "deleted" in event["trouble"]


def test_a_pod_that_another_try_looks_after_is_left_alone(pods: FakePods) -> None:
    pods.change(POD.name, owner="2")
    event = ended()
    assert event["code"] == 70
    end(HELD)
    assert (pods.deleted, pods.pods[POD.name].owner) == ([], "2")


def test_the_controller_believes_what_the_triggerer_saw_of_a_pod_before_its_files(
    pods: FakePods,
) -> None:
    folder = left("preempted")  # after four seconds, say its files
    write_start(folder, CorrectedStart(1, 100.0, 100.0))
    pods.change(POD.name, phase="Failed", code=75, ran_s=60.0)
    pods.delete = lambda pod, grace_s: pods.pods.pop(POD.name) is not None  # type: ignore[method-assign]
    assert ended()["code"] == 75
    over = replace(trial("scheduled"), left="preempted")
    record = closed_segment(over, folder)
    assert record is not None
    assert record.service_gpu_s == 60.0


def test_the_log_of_a_pod_that_another_try_takes_over_is_followed_no_more(
    pods: FakePods, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pod_trigger, "LOOK_S", 0.01)
    before = set(threading.enumerate())
    fetch = pods.fetch

    def taken_over(name: str) -> Any:
        if pods.fetches == 2:
            pods.change(POD.name, owner="2")
        return fetch(name)

    monkeypatch.setattr(pods, "fetch", taken_over)
    assert ended()["code"] == 70
    followers = set(threading.enumerate()) - before
    for follower in followers:
        follower.join(20.0)
    assert not any(follower.is_alive() for follower in followers)


def test_a_stop_flag_beside_the_folder_ends_the_pod(
    pods: FakePods, monkeypatch: pytest.MonkeyPatch
) -> None:
    def delete(pod: Any, grace_s: int) -> bool:
        pods.deleted.append((pod.name, grace_s))
        left("preempted")
        pods.pods.clear()
        return True

    monkeypatch.setattr(pods, "delete", delete)
    write_stop_flag(HELD.folder, flag(1), needed=True)
    event = ended()
    assert (event["code"], pods.deleted) == (75, [(POD.name, 45)])


@pytest.fixture
def gang(pods: FakePods, monkeypatch: pytest.MonkeyPatch) -> FakePods:
    """The same with a pod on each of two nodes; each is gone once it is deleted."""
    pods.pods[OTHER] = replace(UNDER_WAY, name=OTHER, uid="u-2")

    def delete(pod: Any, grace_s: int) -> bool:
        pods.deleted.append((pod.name, grace_s))
        del pods.pods[pod.name]
        return True

    monkeypatch.setattr(pods, "delete", delete)
    return pods


def test_the_end_of_the_first_of_several_pods_is_the_trials_and_the_others_are_ended(
    gang: FakePods,
) -> None:
    left("finished")
    gang.change(POD.name, phase="Succeeded", code=0)
    assert ended(GANG) == {"epoch": 1, "code": 0, "trouble": ""}
    assert {name for name, _ in gang.deleted} == {POD.name, OTHER}


def test_a_trial_that_had_begun_on_all_its_nodes_is_not_held_for_one_that_never_did(
    gang: FakePods,
) -> None:
    """Its pods are gone when the next triggerer first looks: it trains on as many GPUs again."""
    left("")
    gang.pods.clear()
    assert ended(GANG)["code"] == 70


def test_pods_that_have_never_all_started_are_told_as_incomplete(gang: FakePods) -> None:
    gang.pods.clear()
    event = ended(GANG)
    assert (event["code"], "not all of its 2 pods" in event["trouble"]) == (256, True)


def test_all_pods_are_ended_but_those_of_another_try(gang: FakePods) -> None:
    gang.pods["p-1-2"] = replace(UNDER_WAY, name="p-1-2", uid="u-3", owner="2")
    end(replace(GANG, others=(OTHER, "p-1-2")))
    assert list(gang.pods) == ["p-1-2"]


def test_the_end_is_told_before_the_last_metrics_are_sent(
    pods: FakePods, monkeypatch: pytest.MonkeyPatch
) -> None:
    feed = FakeFeed()
    monkeypatch.setattr(pod_trigger, "MetricFeed", lambda *known: feed)
    left("finished")
    del pods.pods[POD.name]
    hold(HELD, print, never, feed.said.append)
    assert feed.said == ["start", {"epoch": 1, "code": 0, "trouble": ""}, "close", "pump"]


def test_an_unknown_address_of_mlflow_is_trouble_and_leaves_the_pod(
    pods: FakePods, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(conn_id: str | None) -> None:
        raise HermesError("MLFLOW_TRACKING_URI is not set")

    monkeypatch.setattr(pod_trigger, "tracker", unknown)
    assert ended() == {"epoch": 1, "code": 70, "trouble": "MLFLOW_TRACKING_URI is not set"}
    assert pods.deleted == []


@pytest.mark.parametrize("broken", ["tracker", "cluster", "folder"])
def test_a_triggerer_that_lacks_something_tells_its_task_so(
    pods: FakePods, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    def fail(*_: Any) -> None:
        raise ValueError("it is not here")

    if broken == "tracker":
        monkeypatch.setattr(pod_trigger, "tracker", fail)
    elif broken == "cluster":
        monkeypatch.setattr(HeldPod, "pods", fail)
    else:
        monkeypatch.setattr(HeldTrial, "stop_flag", fail)
    event = ended()
    assert (event["epoch"], event["code"], pods.deleted) == (1, 70, [])
    assert event["trouble"] == "ValueError: it is not here"


def test_a_pod_that_is_given_up_sends_nothing_more(
    pods: FakePods, monkeypatch: pytest.MonkeyPatch
) -> None:
    feed = FakeFeed()
    monkeypatch.setattr(pod_trigger, "MetricFeed", lambda *known: feed)
    hold(HELD, print, lambda: True, feed.said.append)
    assert feed.said == ["start", None, "close"]


def test_the_end_of_a_pods_log_wakes_the_controller(
    pods: FakePods, home: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    wake_file = controller_wake_file()
    seen: list[Any] = []
    leave = PodSegment.release

    def release(segment: PodSegment) -> None:
        seen.append(wake_file.woken())
        leave(segment)

    monkeypatch.setattr(PodSegment, "release", release)
    until_s = time.monotonic() + 60.0
    hold(HELD, print, lambda: wake_file.path.exists() or time.monotonic() > until_s, seen.append)
    assert seen == [True, None]


def test_many_pods_are_looked_at_less_often_than_few(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for count in (1, 100, 400, 1_000, 100_000):
        monkeypatch.setattr(pod_trigger, "_HELD", set(range(count)))
        found.append(pod_trigger._poll_s())
    assert found == [0.05, 0.05, 0.2, 0.5, 0.5]


def test_a_trigger_that_is_cancelled_leaves_its_pod_unless_a_person_ended_the_task(
    pods: FakePods,
) -> None:
    async def cancelled() -> None:
        trigger = PodTrigger(**asdict(HELD))
        work = asyncio.ensure_future(anext(trigger.run()))
        await asyncio.sleep(0)
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work
        assert pods.deleted == []
        await trigger.on_kill()
        assert pods.deleted == [(POD.name, 45)]

    asyncio.run(cancelled())
    for thread in threading.enumerate():
        if thread.name == POD.name:
            thread.join(60.0)


def test_a_flag_of_an_older_lease_stops_nobody() -> None:
    write_stop_flag(HELD.folder, flag(1), needed=True)
    assert read_stop_flag(HELD.folder, 1) == flag(1)
    assert read_stop_flag(HELD.folder, 2) is None
    assert not HELD.folder.path.exists()  # it lies where the pod cannot see it


def test_a_flag_that_cannot_be_written_is_an_error_where_it_is_needed(home: Any) -> None:
    (home / "sweeps").write_text("no folder")
    write_stop_flag(HELD.folder, flag(1), needed=False)
    with pytest.raises(HermesError, match="cannot be written"):
        write_stop_flag(HELD.folder, flag(1), needed=True)


def test_what_was_said_of_earlier_segments_is_taken_once_and_in_order() -> None:
    HELD.folder.path.mkdir(parents=True)
    said: list[str] = []
    for epoch in (2, 10):
        log = TaskLogCopy.from_segment(HELD.folder, epoch, said.append)
        log(f"epoch {epoch}")
        log("the rest")
        log.close()
    assert said == ["epoch 2", "the rest", "epoch 10", "the rest"]
    write_stop_flag(HELD.folder, flag(1), needed=True)
    assert list(pop_log_copies(HELD.folder)) == said
    assert list(pop_log_copies(HELD.folder)) == []
    assert read_stop_flag(HELD.folder, 1) == flag(1)


def test_a_segment_that_is_followed_anew_is_kept_once() -> None:
    HELD.folder.path.mkdir(parents=True)
    for _ in range(2):
        TaskLogCopy.from_segment(HELD.folder, 1, print)("epoch 1")
    assert list(pop_log_copies(HELD.folder)) == ["epoch 1"]


# The task


class Segmented:
    """A segment that is handed over at once."""

    trouble = ""
    ran_s = None
    holder = PodTrigger(**asdict(HELD))
    handed_over = True
    finished = False

    def start(self) -> None:
        """Nothing to do."""

    def wait(self, seconds: float) -> int | None:
        return None

    def finish(self) -> None:
        self.finished = True


class Operator:
    number = 0
    task_id = "trial"
    mlflow_conn_id = storage_conn_id = None
    connection_templates = ()
    operator_extra_links = ()
    run_link = ""
    log = structlog.get_logger("task")
    made = Segmented()

    def get_dag(self) -> Any:
        return None

    def segment(self, segment_run: SegmentRun, sweep: str, context: Any) -> Any:
        segment_run.feed = FakeFeed()  # type: ignore[assignment]
        return self.made


def task_of() -> Any:
    operator: Any = Operator()
    return TrialTask(operator)


def context(store: DictStore) -> dict[str, Any]:
    ti = SimpleNamespace(xcom_push=lambda key, value: None)
    return {"task_state_store": store, "run_id": SWEEP, "ti": ti}


def stored(store: DictStore) -> SegmentRecord:
    record = decode(SegmentRecord, store[SEGMENT_KEY])
    assert record is not None
    return record


@pytest.fixture(autouse=True)
def _mlflow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:1")


def test_a_task_whose_pod_is_made_defers_and_leaves_the_pod() -> None:
    store, task = DictStore({LEASE_KEY: encode(lease(pod={}))}), task_of()
    with pytest.raises(TaskDeferred) as deferred:
        task.run(context(store))
    assert deferred.value.trigger is task.operator.made.holder
    assert deferred.value.method_name == "resume"
    task.stop()
    assert (task.operator.made.finished, stored(store).running) == (False, True)


def came_back(outcome: str, code: int, **records: Any) -> DictStore:
    own = {LEASE_KEY: encode(lease(pod={})), SEGMENT_KEY: encode(segment())}
    store = DictStore({**own, **records})
    left(outcome)
    task_of().resume(context(store), {"epoch": 1, "code": code, "trouble": ""})
    return store


def test_a_task_that_comes_back_concludes_the_segment_of_its_pod() -> None:
    assert stored(came_back("finished", 0)).final == "finished"
    final = encode(flag(1, "cancelled"))
    with pytest.raises(AirflowSkipException):
        came_back("preempted", 75, **{STOP_KEY: final})


def test_a_preempted_task_that_comes_back_before_its_segment_was_closed_closes_it() -> None:
    store = DictStore({LEASE_KEY: encode(lease(pod={})), SEGMENT_KEY: encode(segment())})
    left("preempted")
    with pytest.raises(AirflowRescheduleException):
        task_of().resume(context(store), {"epoch": 1, "code": 75, "trouble": ""})
    assert (stored(store).running, stored(store).preemptions) == (False, 1)


def test_a_task_with_a_new_lease_starts_the_next_pod_and_concludes_nothing_twice() -> None:
    again, ended = lease(2, pod={}), segment(running=False, outcome="preempted", preemptions=1)
    records = {LEASE_KEY: encode(again), SEGMENT_KEY: encode(ended)}
    store = DictStore(records)
    left("preempted")
    with pytest.raises(TaskDeferred):
        task_of().resume(context(store), {"epoch": 1, "code": 75, "trouble": ""})
    assert (stored(store).epoch, stored(store).running) == (2, True)


def test_the_lines_of_earlier_segments_come_before_the_head_of_the_next_one() -> None:
    store = DictStore({LEASE_KEY: encode(lease(pod={}))})
    HELD.folder.path.mkdir(parents=True, exist_ok=True)
    TaskLogCopy.from_segment(HELD.folder, 7, lambda _: None)("of segment 1")
    task = task_of()
    with structlog.testing.capture_logs() as messages:
        task.operator.log = structlog.get_logger("task")
        with pytest.raises(TaskDeferred):
            task.run(context(store))
    shown = [entry["event"] for entry in messages]
    assert shown[:2] == ["of segment 1", "Segment 1 begins on GPU 0"]
    assert (messages[1]["segment"], messages[1]["lease_epoch"]) == (1, 1)


# The controller


def test_a_deferred_trial_runs_and_says_how_far_it_is() -> None:
    folder = TrialFolder.from_sweep(SWEEP, 0)
    folder.path.mkdir(parents=True)
    (folder.path / "status.json").write_text(json.dumps({"epoch": 1, "step": 7}))
    seen = DeferredTrials().with_folder(trial("deferred"), SWEEP)
    assert (seen.phase, seen.segment and seen.segment.step) == (Phase.RUNNING, 7)
    assert not seen.is_idle


@pytest.mark.parametrize("state", ["running", "deferred"])
def test_a_pod_that_waits_for_a_node_uses_no_gpu_time_and_trains_from_its_start_on(
    state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, store = TrialFolder.from_sweep(SWEEP, 0), DictStore()
    run = SegmentRun.from_lease(store, lease(gpus=(0, 1), pod={}), folder, None)
    run.opened()
    task_s = run.record.started_s

    def seen() -> TrialRecords:
        record = decode(SegmentRecord, store[SEGMENT_KEY])
        own = trial(state, segment=record)
        return DeferredTrials().with_folder(own, SWEEP)

    assert seen().service_gpu_s(task_s + 600.0) == 0.0
    folder.path.mkdir(parents=True)
    status = {"epoch": 1, "step": 0, "started_s": task_s + 600.0, "timings": {"startup_s": 5.0}}
    (folder.path / "status.json").write_text(json.dumps(status))
    with monkeypatch.context() as later:
        later.setattr("hermes_ops.airflow.trial.segment_run.time.time", lambda: task_s + 601.0)
        if state == "running":
            run.relay()
        begun = seen()
    assert begun.service_gpu_s(task_s + 610.0) == pytest.approx(20.0)
    assert begun.segment is not None
    assert begun.segment.trains_since_s == pytest.approx(task_s + 605.0)


def test_a_deferred_pod_uses_gpu_time_from_its_container_on_though_its_status_is_gone() -> None:
    folder, store = TrialFolder.from_sweep(SWEEP, 0), DictStore()
    folder.path.mkdir(parents=True)
    run = SegmentRun.from_lease(store, lease(gpus=(0, 1), pod={}), folder, None)
    run.record = replace(run.record, started_s=run.record.started_s - 100.0)
    run.opened()
    run.record_start()
    held, task_s = HeldTrial(folder, 1), run.record.started_s

    def used_gpu_s() -> float:
        own = trial("deferred", segment=run.record)
        return DeferredTrials().with_folder(own, SWEEP).service_gpu_s(task_s + 600.0)

    held.relay(2.0)
    assert used_gpu_s() == 0.0
    held.relay(60.0)
    assert used_gpu_s() == pytest.approx(2 * 560.0, abs=20.0)


def test_a_pod_that_was_long_in_the_making_may_not_be_stopped_before_it_has_trained() -> None:
    quantum = Quantum(k=3.0, default_switch_s=5.0)
    waited = segment(started_s=100.0, waited_s=600.0, gpus=(0,))
    own = sweep_with(trial("deferred", segment=waited))

    def protected_until_s(now_s: float) -> list[float]:
        snapshot = Snapshot(now_s, (Gpu(0),), tuple(own.jobs(now_s)))
        return list(quantum.ends_s(snapshot).values())

    assert protected_until_s(705.0) == [pytest.approx(720.0)]
    assert protected_until_s(721.0) == []


@pytest.mark.parametrize("began_s", ["soon", float("nan"), None, 0.0, 10**400, 1e9])
def test_a_pod_that_says_no_possible_start_uses_gpus_from_its_tasks_start_on(
    began_s: object,
) -> None:
    record = segment(waited_s=None)
    assert with_status(record, {"epoch": 1, "started_s": began_s}).began_s == record.started_s


@pytest.mark.parametrize(
    ("outcome", "slots"),
    [("preempted", 0), ("interrupted", 0), ("finished", 1), ("failed", 1), ("", 1)],
)
def test_a_deferred_trial_that_says_it_is_preempted_frees_its_slots_while_its_pod_goes(
    outcome: str, slots: int
) -> None:
    outside = Journal()
    if outcome:
        left(outcome)
    before = trial("deferred", stop=flag(1))
    seen = sweep_with(DeferredTrials().with_folder(before, SWEEP))
    outside.applier().settle(seen, 130.0)
    after = seen.trials[0]
    assert after.phase is Phase.STOPPING
    assert outside.of("put") == []  # its segment is closed once its pod is gone
    rank = rank_of(after, after.lease, None)
    assert rank is not None
    assert (rank.priority_weight, rank.pool_slots) == (WAITING_WEIGHT, slots)


def test_a_deferred_trial_that_nobody_told_to_stop_keeps_its_slots() -> None:
    left("preempted")
    seen = DeferredTrials().with_folder(trial("deferred"), SWEEP)
    assert (seen.left, rank_of(seen, seen.lease, None)) == ("", None)


@pytest.mark.parametrize(
    ("outcome", "phase"),
    [("preempted", Phase.WAITING), ("finished", Phase.STOPPING), ("failed", Phase.STOPPING)],
)
def test_a_preempted_segment_is_closed_here_and_every_other_end_by_its_task(
    outcome: str, phase: Phase
) -> None:
    outside = Journal()
    left(outcome)
    seen = sweep_with(DeferredTrials().with_folder(trial("scheduled"), SWEEP))
    outside.applier().settle(seen, 130.0)
    after = seen.trials[0]
    assert after.phase is phase
    written = [c for c in outside.of("put") if c[2] == SEGMENT_KEY]
    assert [c[3]["running"] for c in written] == ([False] if phase is Phase.WAITING else [])
    assert after.segment is not None
    assert after.segment.preemptions == (phase is Phase.WAITING)


def test_what_an_earlier_lease_left_is_not_taken_for_this_ones() -> None:
    newer = trial("scheduled", lease=lease(2, pod={}), segment=segment(2))
    folder = left("preempted")
    assert DeferredTrials().with_folder(newer, SWEEP).left == ""
    assert closed_segment(DeferredTrials().with_folder(trial("queued"), SWEEP), folder) is None


def test_a_sweep_that_ends_lets_a_trial_say_that_it_has_finished() -> None:
    from hermes_ops.airflow.records import CloseRecord

    outside = Journal()
    left("finished")
    seen = DeferredTrials().with_folder(trial("scheduled"), SWEEP)
    outside.applier().settle(sweep_with(seen, close=CloseRecord("enough")), 130.0)
    assert outside.of("put", "skip", "rank") == []


def test_a_stopped_trials_flag_reaches_the_triggerer() -> None:
    from hermes_ops.airflow.records import CloseRecord

    outside = Journal()
    outside.applier().settle(sweep_with(trial("deferred"), close=CloseRecord("enough")), 130.0)
    found = read_stop_flag(TrialFolder.from_sweep(SWEEP, 0), 1)
    assert found is not None
    assert (found.final, found.reason) == ("cancelled", "enough")


def test_a_deferred_trial_keeps_its_slots_and_makes_way_once_it_was_told() -> None:
    ranks: Callable[..., Any] = rank_of
    own = lease(pod={})
    assert ranks(trial("deferred"), own, 0) is None
    making_way = ranks(trial("deferred", stop=flag(1)), own, 0)
    assert (making_way.priority_weight, making_way.pool_slots) == (WAITING_WEIGHT, 1)
    back = ranks(trial("scheduled", left="finished"), own, 0)
    assert (back.priority_weight, back.pool_slots) == (ENDED_WEIGHT, 1)
    assert ranks(trial("scheduled"), own, 0).priority_weight == LEASED_WEIGHT < ENDED_WEIGHT
    waits = ranks(trial("scheduled", segment=segment(running=False)), None, 3)
    assert waits.pool_slots == HELD_POOL_SLOTS
