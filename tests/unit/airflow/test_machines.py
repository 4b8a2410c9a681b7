"""Pools of several machines with Airflow's own workers: names, queues, leases, who is there."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from airflow.sdk.exceptions import AirflowRescheduleException
from sqlalchemy import create_engine, text

from hermes_ops.airflow.control.machine_watch import (
    RECHECK_S,
    RECONNECT_S,
    SETTLE_S,
    Absence,
    CeleryWorkers,
    EdgeWorkers,
    MachineWatch,
    PoolMachines,
    trouble_of,
)
from hermes_ops.airflow.control.reconcile import rank_of
from hermes_ops.airflow.control.sweep_state import SweepState, usable_gpus
from hermes_ops.airflow.control.trial_state import TrialRecords
from hermes_ops.airflow.explanation import absence_line, away_lines
from hermes_ops.airflow.folders import TrialFolder
from hermes_ops.airflow.hosts import WRONG_HOST
from hermes_ops.airflow.machines import MachineSlots, mismatch, on_this_machine
from hermes_ops.airflow.metadata_rows import PoolRow
from hermes_ops.airflow.records import (
    LEASE_KEY,
    SEGMENT_KEY,
    STOP_KEY,
    SegmentRecord,
    decode,
    encode,
)
from hermes_ops.airflow.trial.local import LocalSegment
from hermes_ops.airflow.trial.operator import HermesTrialOperator
from hermes_ops.core.model import Gpu, Grant, JobId, Phase, Plan, Reason, Snapshot
from hermes_ops.core.plan import Resize, Start
from hermes_ops.errors import HermesError, Unavailable
from tests.unit.airflow.builders import (
    SWEEP,
    DictStore,
    Journal,
    lease,
    pending,
    resizing,
    row,
    running,
    segment,
    sweep_with,
)

PAIR = MachineSlots(("a", "a", "b", "b"))
NOW_S = 200.0


# -- names and GPUs --------------------------------------------------------------------------------


def test_slots_are_the_machines_gpus_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    assert MachineSlots.from_environment().names == ()
    monkeypatch.setenv("HERMES_MACHINES", "b=1, a=2")
    found = MachineSlots.from_environment()
    assert (found.of_slot, found.names) == (("b", "a", "a"), ("b", "a"))
    assert found.slots_of(["a"]) == {1, 2}


@pytest.mark.parametrize(
    ("text", "nodes", "remedy"),
    [
        ("a", "", "NODE=GPUS"),
        ("a=1,b=1,a=1", "", "name each once"),
        ("local=2", "", "another name"),
        ("a=2", "n=2", "Remove one of them"),
    ],
)
def test_a_bad_list_is_refused_with_the_remedy(
    text: str, nodes: str, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HERMES_MACHINES", text)
    monkeypatch.setenv("HERMES_NODES", nodes)
    with pytest.raises(HermesError, match=remedy):
        MachineSlots.from_environment()


def test_a_lease_names_the_machine_and_its_gpus_there() -> None:
    granted = PAIR.granted((3,))
    assert (granted["machine"], granted["local_gpus"], granted["host"]) == ("b", (1,), "")


@pytest.mark.parametrize(
    ("environ", "gpus"), [({}, (0, 1)), ({"CUDA_VISIBLE_DEVICES": "2, 5"}, (2, 5))]
)
def test_the_trial_s_process_gets_the_gpus_by_their_index_on_the_machine(
    environ: Mapping[str, str], gpus: tuple[int, ...]
) -> None:
    given = lease(gpus=(2, 3), machine="b", local_gpus=(0, 1))
    assert on_this_machine(given, environ).gpus == gpus
    assert on_this_machine(lease(gpus=(2, 3)), environ).gpus == (2, 3)


def test_the_process_of_a_segment_sees_the_machine_s_own_gpus(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    given = lease(gpus=(3,), machine="b", local_gpus=(1,))
    segment_process = LocalSegment(given, TrialFolder.from_sweep(SWEEP, 0), SWEEP, 0, "gpus", print)
    assert segment_process.lease.gpus == (1,)


@pytest.mark.parametrize(
    ("environ", "reason"),
    [
        ({}, "no HERMES_MACHINE"),
        ({"HERMES_MACHINE": "a"}, "have the worker of a take the queue gpu-a alone"),
        ({"HERMES_MACHINE": "b", "CUDA_VISIBLE_DEVICES": "4"}, "started for 1"),
        ({"HERMES_MACHINE": "b", "CUDA_VISIBLE_DEVICES": "GPU-1,GPU-2"}, "list indices"),
    ],
)
def test_a_lease_for_another_machine_is_refused_and_its_trial_waits_for_the_next_one(
    environ: Mapping[str, str], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HERMES_MACHINE", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    given = lease(gpus=(3,), machine="b", local_gpus=(1,), host_name="b")
    store = DictStore({LEASE_KEY: encode(given)})
    with pytest.raises(AirflowRescheduleException):
        HermesTrialOperator(task_id="trial", number=0).execute(
            {"task_state_store": store, "run_id": SWEEP, "ti": None}
        )
    record = decode(SegmentRecord, store[SEGMENT_KEY])
    assert record is not None
    assert (record.outcome, record.segments, record.failures) == (WRONG_HOST, 0, 0)
    assert reason in record.reason
    world, outside = sweep_with(TrialRecords(row(0), given, None, record)), Journal()
    outside.applier().settle(world, NOW_S)
    assert world.trials[0].phase is Phase.WAITING
    assert outside.of("mark", "finish") == []


def test_a_lease_is_used_on_its_machine() -> None:
    given = lease(gpus=(3,), machine="b", local_gpus=(1,))
    assert mismatch(given, {"HERMES_MACHINE": "b"}) == ""
    assert mismatch(given, {"HERMES_MACHINE": "b", "CUDA_VISIBLE_DEVICES": "0,7"}) == ""


# -- ranks and leases ------------------------------------------------------------------------------


def test_a_trial_with_a_lease_gets_the_queue_of_its_machine_with_its_rank() -> None:
    given = lease(gpus=(2,), machine="b", local_gpus=(0,))
    trial = TrialRecords(row(0, queue="default"), given, None, None)
    rank = rank_of(trial, given, None)
    assert rank is not None
    assert (rank.pool_slots, rank.queue) == (1, "gpu-b")
    ranked = replace(trial.row, priority_weight=rank.priority_weight, pool_slots=1, queue="gpu-b")
    assert rank_of(replace(trial, row=ranked), given, None) is None
    assert rank_of(replace(trial, row=replace(ranked, queue="gpu-a")), given, None) == rank
    waits = rank_of(TrialRecords(row(1, pool_slots=1, queue="gpu-a"), None, None, None), None, 0)
    assert waits is not None
    assert waits.queue is None


def granted(world: SweepState, gpu: int, outside: Journal) -> dict[str, Any]:
    job = JobId(f"{SWEEP}/0")
    gpus = tuple(Gpu(i, name) for i, name in enumerate(PAIR.of_slot))
    snapshot = Snapshot(NOW_S, gpus, tuple(world.jobs(NOW_S, PAIR.of_slot)))
    applier = outside.applier()
    applier.machines = applier._granting.machines = PAIR
    action = Start(job, (gpu,), Reason("it waits"))
    applier.apply({SWEEP: world}, snapshot, Plan((Grant(job, (gpu,)),)), (action,), {SWEEP: 0.0})
    return next(c[3] for c in outside.of("put") if c[2] == LEASE_KEY)


def test_the_controller_s_lease_is_for_the_machine_of_its_gpus() -> None:
    outside = Journal()
    given = granted(sweep_with(pending(0)), 3, outside)
    assert (given["machine"], given["local_gpus"], given["gpus"]) == ("b", [1], [3])
    assert (given["host"], given["nodes"]) == ("", ["b"])


def test_a_task_that_still_asks_for_another_queue_is_held_back_before_its_lease_is_written() -> (
    None
):
    outside = Journal()
    used_up = lease(1, (0,), machine="a", nodes=("a",))
    ended = segment(1, running=False, segments=0, outcome=WRONG_HOST)
    before = TrialRecords(row(0, pool_slots=1, queue="gpu-a"), used_up, None, ended)
    granted(sweep_with(before), 3, outside)
    kinds = [c[:2] for c in outside.of("rank", "put")]
    assert kinds.index(("rank", 0)) < kinds.index(("put", 0))
    outside.forget()
    granted(sweep_with(before), 1, outside)  # the same machine: it may start at once
    assert outside.of("rank", "put")[0][0] == "put"


def apply_on_machines(trial: TrialRecords, action: Start | Resize) -> Journal:
    outside, gpus = Journal(), tuple(Gpu(i, name) for i, name in enumerate(PAIR.of_slot))
    world = sweep_with(trial, checkpoints={"store": "s3://bucket/prefix"})
    snapshot = Snapshot(NOW_S, gpus, tuple(world.jobs(NOW_S, PAIR.of_slot)))
    applier = outside.applier()
    applier.machines = applier._granting.machines = PAIR
    plan = Plan((Grant(action.job, action.gpus),))
    applier.apply({SWEEP: world}, snapshot, plan, (action,), {SWEEP: 0.0})
    return outside


def on_machine_a(trial: TrialRecords) -> TrialRecords:
    return replace(trial, lease=lease(gpus=(0,), machine="a", local_gpus=(0,), host=""))


@pytest.mark.parametrize(("gpus", "keeps_slots"), [((0, 1), True), ((2, 3), False)])
def test_a_resize_keeps_the_slots_of_its_task_only_where_the_new_gpus_are_on_its_machine(
    gpus: tuple[int, ...], keeps_slots: bool
) -> None:
    job = JobId(f"{SWEEP}/0")
    told = apply_on_machines(on_machine_a(running(0, 0)), Resize(job, gpus, Reason("it grows")))
    (flag,) = (c[3] for c in told.of("put") if c[2] == STOP_KEY)
    assert flag["resize"] is keeps_slots
    waits = on_machine_a(resizing(0, 1, 0))
    outside = apply_on_machines(waits, Start(job, gpus, Reason("it grows")))
    written = [(c[2], c[3].get("resize"), c[3].get("machine")) for c in outside.of("put")]
    assert written == ([(LEASE_KEY, None, "a")] if keeps_slots else [(STOP_KEY, False, None)])


# -- where trials may run --------------------------------------------------------------------------


def machine_jobs(*trials: TrialRecords, **changes: Any) -> list[tuple[str, ...]]:
    world = sweep_with(*trials, **changes)
    world.spec = world.spec.on_machines(PAIR.names)
    return [job.nodes for job in world.jobs(130.0, PAIR.of_slot)]


def test_a_trial_stays_on_the_machine_where_it_began_unless_its_checkpoints_are_in_a_store() -> (
    None
):
    began = lease(gpus=(2,), nodes=("b",), machine="b")
    trials = (
        pending(0),
        TrialRecords(row(1), began, None, segment(running=False, ended_s=110.0)),
        TrialRecords(row(2), began, None, segment(running=False, segments=0, outcome=WRONG_HOST)),
    )
    assert machine_jobs(*trials) == [(), ("b",), ()]
    stored = {"store": "s3://bucket/prefix"}
    assert machine_jobs(*trials, checkpoints=stored) == [(), (), ()]


def test_the_gpus_of_a_trial_are_all_of_one_machine() -> None:
    spec = {"command": ["x"], "directory": "/", "gpus": {"min": 1, "max": 4}}
    world = sweep_with(pending(0), trial=spec)
    world.spec = world.spec.on_machines(PAIR.names)
    (job,) = world.jobs(130.0, PAIR.of_slot)
    assert (job.nodes, job.min_gpus, job.max_gpus) == (("a", "b"), 1, 2)
    three = sweep_with(pending(0), trial={**spec, "gpus": 3})
    three.spec = three.spec.on_machines(PAIR.names)
    (large,) = three.jobs(130.0, PAIR.of_slot)
    assert (large.nodes, large.min_gpus) == (("a", "b"), 3)  # no machine has so many: it waits


def test_only_gpus_of_machines_that_are_there_may_be_granted() -> None:
    pool = PoolRow(slots=4, foreign_slots=0)
    assert [g.index for g in usable_gpus(pool, (), PAIR.of_slot, {2, 3})] == [2, 3]
    assert [g.node for g in usable_gpus(pool, (), PAIR.of_slot, {2, 3})] == ["b", "b"]
    assert [g.index for g in usable_gpus(PoolRow(4, 1), (3,), PAIR.of_slot, {2, 3})] == [3]
    assert [g.index for g in usable_gpus(PoolRow(1, 0), (), PAIR.of_slot, {2, 3})] == [2]
    assert usable_gpus(pool, (0,), PAIR.of_slot, set()) == ()


# -- who is there ----------------------------------------------------------------------------------


@dataclass
class FakeWorkers:
    """The workers of an executor."""

    now_s: float = 100.0
    queues: dict[str, list[str]] = field(default_factory=dict)
    is_away: bool = False

    def takers(self) -> Mapping[str, Sequence[str]]:
        if self.is_away:
            raise Unavailable("the broker did not answer")
        return self.queues


@pytest.fixture
def workers() -> FakeWorkers:
    return FakeWorkers(queues={"gpu-a": ["a@1"], "gpu-b": ["b@1"], "default": ["c@1"]})


@pytest.fixture
def watch(workers: FakeWorkers) -> MachineWatch:
    return MachineWatch(PAIR, workers, clock=lambda: workers.now_s)


def test_nothing_is_decided_before_the_workers_have_answered_once(
    watch: MachineWatch, workers: FakeWorkers
) -> None:
    workers.is_away = True
    watch.look()
    with pytest.raises(Unavailable, match="the broker did not answer"):
        watch.away()


def test_a_machine_without_a_worker_is_away_once_that_has_settled_and_back_at_once(
    watch: MachineWatch, workers: FakeWorkers
) -> None:
    watch.look()
    assert watch.away() == {}
    del workers.queues["gpu-b"]
    workers.now_s += SETTLE_S
    watch.look()
    assert watch.away() == {}
    workers.now_s += 0.1
    watch.look()
    assert watch.away() == {"b": Absence(100.0, "no worker takes its queue gpu-b")}
    workers.queues["gpu-b"] = ["b@1"]
    watch.look()
    assert watch.away() == {}


def test_a_controller_that_has_just_started_takes_no_machine_for_lost_that_answers_late(
    watch: MachineWatch, workers: FakeWorkers
) -> None:
    late = workers.queues.pop("gpu-b")
    watch.look()
    assert watch.away() == {}
    workers.now_s += SETTLE_S + 0.1
    watch.look()
    assert set(watch.away()) == {"b"}
    workers.queues["gpu-b"] = late
    watch.look()
    assert watch.away() == {}


def test_while_the_broker_is_away_the_machines_are_what_they_were(
    watch: MachineWatch, workers: FakeWorkers
) -> None:
    watch.look()
    workers.is_away, workers.now_s = True, workers.now_s + 10 * SETTLE_S
    watch.look()
    assert watch.away() == {}


def test_workers_have_time_to_come_back_to_a_broker_that_was_away(
    watch: MachineWatch, workers: FakeWorkers
) -> None:
    watch.look()
    workers.is_away, workers.now_s = True, workers.now_s + 10 * SETTLE_S
    watch.look()
    workers.is_away, workers.queues = False, {}
    watch.look()
    workers.now_s += RECONNECT_S
    watch.look()
    assert watch.away() == {}
    workers.now_s += 0.1
    watch.look()
    assert set(watch.away()) == {"a", "b"}


def test_two_workers_of_one_machine_s_name_are_none() -> None:
    assert trouble_of("a", ["a@1"]) == ""
    assert "end all but one of a@1, a@2" in trouble_of("a", ["a@2", "a@1"])


def test_celery_s_workers_are_named_by_the_queues_that_they_take() -> None:
    class Inspect:
        def active_queues(self) -> Any:
            return {"a@1": [{"name": "gpu-a"}], "x@1": [{"name": "gpu-a"}, {"name": "default"}]}

    class Away:
        def active_queues(self) -> Any:
            raise OSError("connection refused")

    def app(inspect: Any) -> Any:
        control = type("C", (), {"inspect": lambda self, timeout: inspect})()
        return type("App", (), {"control": control})()

    assert CeleryWorkers(app(Inspect())).takers() == {"gpu-a": ["a@1", "x@1"], "default": ["x@1"]}
    with pytest.raises(Unavailable, match="connection refused"):
        CeleryWorkers(app(Away())).takers()


def test_edge_s_workers_that_take_tasks_are_read_from_its_table() -> None:
    engine = create_engine("sqlite://")
    with pytest.raises(Unavailable, match="edge_worker"):
        EdgeWorkers(engine).takers()
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE edge_worker (worker_name, state, queues)"))
        for name, state in (("a", "idle"), ("b", "running"), ("c", "unknown"), ("d", "offline")):
            values = {"n": name, "s": state, "q": str([f"gpu-{name}"])}
            assert ast.literal_eval(values["q"])
            connection.execute(text("INSERT INTO edge_worker VALUES (:n, :s, :q)"), values)
    assert EdgeWorkers(engine).takers() == {"gpu-a": ["a"], "gpu-b": ["b"]}


# -- the pool's slots ------------------------------------------------------------------------------


@dataclass
class FakePools:
    """Airflow's pools; keeps what they were given."""

    given: list[int] = field(default_factory=list)

    def resize_pool(self, name: str, slots: int) -> None:
        self.given.append(slots)


def test_the_pool_s_slots_follow_the_machines_and_are_set_again_now_and_then() -> None:
    pools, machines = FakePools(), PoolMachines(PAIR)
    machines.follow("gpus", pools, (), 0.0)
    machines.follow("gpus", pools, (), 1.0)
    assert pools.given == [4]
    machines.follow("gpus", pools, (), RECHECK_S)
    machines.away = {"a": Absence(0.0, "gone")}
    machines.follow("gpus", pools, (), RECHECK_S)
    assert pools.given == [4, 4, 2]
    PoolMachines().follow("gpus", pools, (), 99.0)
    assert pools.given == [4, 4, 2]


def test_a_task_that_airflow_counts_on_a_machine_that_is_away_takes_no_slot_of_the_others() -> None:
    lost = running(0, 0)
    assert lost.lease is not None
    there = replace(lost, lease=replace(lost.lease, machine="b"))
    lost = replace(
        lost, lease=replace(lost.lease, machine="a"), row=replace(lost.row, pool_slots=1)
    )
    pools, machines = FakePools(), PoolMachines(PAIR, away={"a": Absence(0.0, "gone")})
    machines.follow("gpus", pools, (lost, there, pending(2)), 0.0)
    assert pools.given == [3]


# -- what people see -------------------------------------------------------------------------------


def test_a_trial_whose_machine_is_away_is_explained() -> None:
    machines = PoolMachines(PAIR, away={"b": Absence(0.0, "no worker takes its queue gpu-b")})
    view = {"machines": machines.view()}
    assert "Its machine is away: b since" in absence_line(view, {"nodes": ["b"]})
    assert "no worker takes its queue gpu-b" in absence_line(view, {"nodes": ["b"]})
    for job in ({"nodes": ["a"]}, {"nodes": ["a", "b"]}, {"nodes": ["b"], "phase": "ended"}, None):
        assert absence_line(view, job) == ""
    assert absence_line(None, {"nodes": ["b"]}) == ""
    (line,) = away_lines(view)
    assert line.startswith("The machine is away: b since")
    assert away_lines({}) == []
