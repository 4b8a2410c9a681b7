"""A lease is for one machine and one state folder; a task elsewhere starts nothing."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from airflow.sdk.exceptions import AirflowRescheduleException

from hermes_ops.airflow import hosts
from hermes_ops.airflow.control.cleanup.sweep_end import cannot_start
from hermes_ops.airflow.control.pool_file import failures
from hermes_ops.airflow.control.sweep_state import SweepState
from hermes_ops.airflow.control.trial_state import TrialRecords, is_on_wrong_host
from hermes_ops.airflow.folders import TrialFolder
from hermes_ops.airflow.hosts import WRONG_HOST, Host, home_id_file, mark_home
from hermes_ops.airflow.records import LEASE_KEY, SEGMENT_KEY, Lease, SegmentRecord, decode, encode
from hermes_ops.airflow.trial.operator import HermesTrialOperator
from hermes_ops.airflow.trial.pod_trigger import HeldPod, hold
from hermes_ops.airflow.trial.trial_task import TrialTask
from hermes_ops.cli import completion
from hermes_ops.core.model import Gpu, Grant, JobId, Phase, Plan, Reason, Snapshot
from hermes_ops.core.plan import Start
from tests.unit.airflow.builders import SWEEP, DictStore, Journal, lease, row, segment, sweep_with
from tests.unit.kubernetes.pods import POD, FakePods

NOW_S = 200.0


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Be on the machine of that name, as a process after any start of it is."""

    def on(name: str) -> Host:
        monkeypatch.setattr(hosts, "_machine", lambda: f"boot-of-{name}")
        monkeypatch.setattr("socket.gethostname", lambda: name)
        return Host.here()

    on("gpu-1")
    mark_home()
    return on


def for_host(host: Host, own: Lease | None = None) -> Lease:
    return replace(own or lease(1), host=host.id, host_name=host.name)


def entered(own: Lease, last: SegmentRecord | None = None) -> SegmentRecord:
    """What a task leaves that comes in with this lease and is sent away."""
    store = DictStore({LEASE_KEY: encode(own)})
    if last is not None:
        store[SEGMENT_KEY] = encode(last)
    with pytest.raises(AirflowRescheduleException):
        HermesTrialOperator(task_id="trial", number=0).execute(
            {"task_state_store": store, "run_id": SWEEP, "ti": None}
        )
    record = decode(SegmentRecord, store[SEGMENT_KEY])
    assert record is not None
    return record


def test_a_task_on_another_machine_starts_nothing_and_says_why(
    machine: Any, home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    given = for_host(Host.here())
    there = machine("gpu-2")
    logging.getLogger("airflow.task.operators").propagate = True
    with caplog.at_level("INFO"):
        record = entered(given)
    assert (record.epoch, record.running, record.outcome) == (1, False, WRONG_HOST)
    assert (record.host, record.segments, record.failures) == (there.id, 0, 0)
    for fact in ("gpu-1", "gpu-2", "LocalExecutor, one host", "`run_in: pod`"):
        assert fact in record.reason
    assert not (home / "sweeps" / SWEEP).exists()


def test_a_task_that_sees_another_state_folder_starts_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    given = for_host(Host.here())
    monkeypatch.setenv("HERMES_HOME", str(tmp_path / "own-disk"))
    record = entered(given)
    assert record.outcome == WRONG_HOST
    assert f"HERMES_HOME is {tmp_path}/own-disk there" in record.reason
    assert not (tmp_path / "own-disk").exists()


def test_what_a_trial_had_done_before_is_kept() -> None:
    given = replace(for_host(Host.here()), host="another/", epoch=3)
    before = segment(2, running=False, step=7, segments=2, service_gpu_s=9.0, failures=1)
    record = entered(given, before)
    assert (record.epoch, record.step, record.segments) == (3, 7, 2)
    assert (record.service_gpu_s, record.failures) == (9.0, 1)


@pytest.mark.parametrize("refused", [0, 1, 2])
@pytest.mark.parametrize("trained", [False, True])
def test_a_trial_begins_from_scratch_once_however_many_leases_were_refused(
    refused: int, trained: bool
) -> None:
    """The machine was rebooted between the grant and the task: a lease is for one boot."""
    folder = TrialFolder.from_sweep(SWEEP, 0)
    folder.checkpoints.mkdir(parents=True)
    epochs = (5, 6) if trained else (5,)
    lines = [{"epoch": epoch, "start_s": 1.0, "end_s": 2.0} for epoch in epochs]
    (folder.path / "segments.jsonl").write_text("".join(f"{json.dumps(x)}\n" for x in lines))
    (folder.path / "result.json").write_text(json.dumps({"epoch": 5, "outcome": "finished"}))
    given = replace(for_host(Host.here()), anew=6)
    last = segment(max(epochs), running=False, segments=0)
    for epoch in range(last.epoch + 1, last.epoch + 1 + refused):
        last = entered(replace(given, host="another/", epoch=epoch), last)
    task = TrialTask(HermesTrialOperator(task_id="trial", number=0))
    task.restart_from_scratch(folder, replace(given, epoch=last.epoch + 1), last)
    assert folder.checkpoints.exists() is trained


@pytest.mark.parametrize("own", [lease(1), for_host(Host("m", "gpu-1", ""))])
def test_leases_of_earlier_versions_and_of_this_host_are_used(own: Lease) -> None:
    here = Host("m", "gpu-1", "")
    assert here.mismatch(own.host, own.host_name, is_pod=False) == ""


def test_the_task_of_a_pod_may_be_on_any_machine_that_sees_the_state_folder(
    machine: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    given = for_host(Host.here())
    there = machine("gpu-2")
    assert there.mismatch(given.host, given.host_name, is_pod=True) == ""
    monkeypatch.setenv("HERMES_HOME", str(tmp_path / "own-disk"))
    reason = Host.here().mismatch(given.host, given.host_name, is_pod=True)
    assert "does not see the state folder" in reason


def test_a_triggerer_that_sees_another_state_folder_ends_the_pod_and_says_why(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pods, said, told = FakePods({POD.name: POD}), list[str](), list[Any]()
    monkeypatch.setattr(HeldPod, "pods", lambda held: pods)
    controllers = Host.here()
    held = HeldPod(SWEEP, 0, 1, "run-0", POD.name, "trials", POD.owner, 600.0, {},
                   host=controllers.id, host_name=controllers.name)  # fmt: skip
    monkeypatch.setenv("HERMES_HOME", str(tmp_path / "own-disk"))
    hold(held, said.append, lambda: False, told.append)
    ((event,), (line,)) = told, said
    assert "does not see the state folder" in line
    assert [name for name, _ in pods.deleted] == [POD.name]
    given = replace(for_host(controllers), pod={})
    store = DictStore({LEASE_KEY: encode(given), SEGMENT_KEY: encode(segment(1))})
    task = HermesTrialOperator(task_id="trial", number=0)
    with pytest.raises(AirflowRescheduleException):
        task.resume({"task_state_store": store, "run_id": SWEEP, "ti": None}, event)
    record = decode(SegmentRecord, store[SEGMENT_KEY])
    assert record is not None
    assert (record.running, record.outcome, record.failures) == (False, WRONG_HOST, 0)
    monkeypatch.undo()
    world = sweep_with(TrialRecords(row(0, "up_for_reschedule"), given, None, record))
    applier = Journal().applier()
    applier.host = controllers
    applier.settle(world, NOW_S)
    settled_segment = world.trials[0].segment
    assert settled_segment is not None
    assert settled_segment.final == "failed"


# -- the controller's side -------------------------------------------------------------------------


def left(given: Lease, there: Host, state: str = "up_for_reschedule") -> TrialRecords:
    """A trial whose task, on `there`, has left."""
    reason = there.mismatch(given.host, given.host_name, is_pod=False)
    record = segment(
        given.epoch, running=False, outcome=WRONG_HOST, host=there.id, reason=reason, segments=0
    )
    return TrialRecords(row(0, state), given, None, record)


def settled(world: SweepState, outside: Journal) -> TrialRecords:
    outside.applier().settle(world, NOW_S)
    return world.trials[0]


def test_the_trial_ends_once_as_failed_with_the_reason_and_gives_its_gpu_back(
    machine: Any,
) -> None:
    controllers = Host.here()
    world, outside = sweep_with(left(for_host(controllers), machine("gpu-2"))), Journal()
    machine("gpu-1")
    assert world.jobs(NOW_S)[0].gpus_held == ()
    trial = settled(world, outside)
    assert trial.segment is not None
    assert (trial.segment.final, trial.phase) == ("failed", Phase.ENDED)
    assert "those of gpu-1" in trial.segment.reason
    assert ("finish", "run-0", "failed") in outside.calls
    assert any("gpu-2" in line for line in failures(world))
    assert cannot_start(world, NOW_S) is not None
    outside.forget()
    settled(world, outside)  # the next round marks its task, and does nothing else of it
    assert outside.of("mark") == [("mark", [0], "failed")]
    assert [c for c in outside.of("put") if c[1] == 0] == []


def test_a_task_that_still_leaves_is_waited_for(machine: Any) -> None:
    world = sweep_with(left(for_host(Host.here()), Host("m", "gpu-2", ""), state="running"))
    assert settled(world, Journal()).segment == world.trials[0].segment


def test_a_controller_that_has_moved_or_was_started_after_a_reboot_grants_anew(
    machine: Any,
) -> None:
    """Scheduler and controller are on the new machine; the lease is for the former one."""
    former = for_host(Host.here())
    moved = machine("gpu-9")
    trial = left(former, moved, state="scheduled")
    world, outside = sweep_with(trial), Journal()
    assert settled(world, outside).phase is Phase.WAITING
    outside.forget()
    job = JobId(f"{SWEEP}/0")
    action = Start(job, (0,), Reason("it waits"))
    snapshot = Snapshot(NOW_S, (Gpu(0),), tuple(world.jobs(NOW_S)))
    plan = Plan((Grant(job, (0,)),))
    outside.applier().apply({SWEEP: world}, snapshot, plan, (action,), {SWEEP: 0.0})
    granted = next(c[3] for c in outside.of("put") if c[2] == LEASE_KEY)
    assert (granted["host"], granted["host_name"], granted["epoch"]) == (moved.id, "gpu-9", 2)


def test_a_trial_that_is_resumed_is_not_judged_by_where_its_task_was_once(machine: Any) -> None:
    controllers, there = Host.here(), Host("m", "gpu-2", "")
    world = sweep_with(left(for_host(controllers), there))
    trial = settled(world, Journal())
    assert trial.segment is not None
    resumed = replace(trial.segment, final=None, failures=0, task="")
    assert not is_on_wrong_host(replace(trial, segment=resumed), controllers.id)


# -- who is where ----------------------------------------------------------------------------------


def test_containers_of_one_machine_are_one_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their host names differ; the kernel is the same."""
    monkeypatch.undo()
    names = iter(["container-1", "container-2"])
    monkeypatch.setattr("socket.gethostname", lambda: next(names))
    assert hosts._machine() == hosts._machine() == hosts.BOOT_ID.read_text().strip()


def test_a_machine_may_be_named_and_one_without_a_kernels_name_has_its_host_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(hosts, "BOOT_ID", tmp_path / "none")
    monkeypatch.setattr("socket.gethostname", lambda: "gpu-1")
    assert hosts._machine() == "gpu-1"
    monkeypatch.setenv("HERMES_HOST", "rack/7")
    assert hosts._machine() == "rack-7"


def test_machines_of_one_name_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = Host("11111111-a", "vm", "h"), Host("22222222-b", "vm", "h")
    said = here.mismatch(there.id, there.name, is_pod=False)
    assert "vm (11111111)" in said
    assert "vm (22222222), the controller's" in said
    monkeypatch.setenv("HERMES_HOST", "gpu-7")
    assert Host.here().name == "gpu-7"


def test_a_state_folder_keeps_its_id_and_a_torn_one_is_written_again() -> None:
    first = mark_home()
    assert first.home_id
    assert mark_home() == first
    home_id_file().write_text("")
    assert mark_home().home_id not in ("", first.home_id)
    assert [p.name for p in home_id_file().parent.iterdir()] == [".home-id"]
    assert completion.complete_sweeps("") == []
