"""Which nodes a pool's slots stand for, from the setting to the lease."""

from __future__ import annotations

from typing import Any

import pytest

from hermes_ops.airflow.control.sweep_state import pool_snapshot, usable_gpus
from hermes_ops.airflow.control.trial_state import TrialRecords
from hermes_ops.airflow.hosts import NODES_VARIABLE, leased_nodes, node_names, node_of_each
from hermes_ops.airflow.metadata_rows import PoolRow
from hermes_ops.core.model import Snapshot
from hermes_ops.errors import HermesError
from tests.unit.airflow.builders import lease, row, running, segment, starting, sweep_with


def test_the_slots_are_the_nodes_gpus_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    assert node_names() == ()
    monkeypatch.setenv(NODES_VARIABLE, "node-a=2, node-b=1")
    assert node_names() == ("node-a", "node-a", "node-b")


@pytest.mark.parametrize("text", ["node-a", "node-a=x", "=2", "a=1;b=2"])
def test_another_form_is_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(NODES_VARIABLE, text)
    with pytest.raises(HermesError, match="NODE=GPUS"):
        node_names()


def test_a_lease_names_the_nodes_of_its_gpus_and_none_on_one_machine() -> None:
    named = Snapshot(0.0, usable_gpus(PoolRow(4, 0), (), ("a", "a", "b")), ())
    assert [g.node for g in named.gpus] == ["a", "a", "b", "local"]
    assert leased_nodes(named, (1, 2)) == ("a", "b")
    assert leased_nodes(named, (0, 1)) == ("a",)
    assert leased_nodes(Snapshot(0.0, usable_gpus(PoolRow(2, 0), ()), ()), (0,)) == ()


def test_a_lease_names_the_node_of_each_gpu_where_all_are_known() -> None:
    named = Snapshot(0.0, usable_gpus(PoolRow(4, 0), (), ("a", "a", "b")), ())
    assert node_of_each(named, (2, 0)) == ("b", "a")
    assert node_of_each(named, (0, 3)) == ()
    spread = lease(gpus=(2, 0, 1), gpu_nodes=("b", "a", "a"))
    assert spread.gpus_by_node == {"a": (0, 1), "b": (2,)}
    assert lease(gpus=(2, 0)).gpus_by_node == {}


def usable(
    slots: int, run_in: str, *trials: TrialRecords, nodes: tuple[str, ...] = ()
) -> list[int]:
    """The GPUs of a pool of that many slots, in which these trials of one sweep hold some."""

    class Pool:
        def pool(self, *_: object) -> PoolRow:
            return PoolRow(slots, 0)

    outside: Any = Pool()
    spec = {"command": ["x"], "directory": "/", "run_in": run_in}
    sweep = sweep_with(*trials, trial=spec)
    found = pool_snapshot("gpus", outside, {sweep.id: sweep}, 130.0, nodes=nodes)
    return [gpu.index for gpu in found.gpus]


def test_no_pod_loses_its_gpu_as_another_one_has_left_its_cordoned_node() -> None:
    trials = (running(0, 0), running(1, 2), running(2, 3))  # the one on GPU 1 has left
    assert usable(3, "pod", *trials) == [0, 2, 3]
    assert usable(3, "process", *trials) == [0, 1, 2]  # a process has the GPU of that number
    assert usable(3, "pod", *trials, nodes=("a", "a", "b", "b")) == [0, 1, 2]


def test_a_pod_that_has_begun_keeps_its_gpu_before_one_that_has_not() -> None:
    assert usable(1, "pod", starting(0, 0), running(1, 1)) == [1]


CLAIMED = {"run_in": "pod", "pod": {"checkpoint_claims": {"node-b": "disk-b", "node-a": "disk-a"}}}


def bound(*trials: TrialRecords, **trial: Any) -> list[tuple[str, ...]]:
    """On which nodes each trial may run, by the state of its sweep."""
    spec = {"command": ["x"], "directory": "/", **trial}
    return [j.nodes for j in sweep_with(*trials, trial=spec).jobs(130.0)]


def test_a_trial_of_claims_for_nodes_may_begin_on_those_and_stays_where_it_ran() -> None:
    begun = lease(nodes=("node-b",))
    ran, waits = segment(), segment(running=False, ended_s=110.0)
    trials = (
        TrialRecords(row(0), None, None, None),
        TrialRecords(row(1), begun, None, None),  # granted, not begun
        TrialRecords(row(2, "running"), begun, None, ran),
        TrialRecords(row(3), begun, None, waits),
        TrialRecords(row(4), lease(2, nodes=("node-b",), revoked=True), None, waits),
    )
    either, there = ("node-a", "node-b"), ("node-b",)
    assert bound(*trials, **CLAIMED) == [either, either, there, there, there]
    assert bound(*trials) == [()] * 5


def test_a_trial_that_begins_from_scratch_is_free_of_its_node() -> None:
    anew = segment(1, running=False, segments=0, ended_s=110.0)
    used_up = lease(nodes=("node-b",), revoked=True, anew=2)
    assert bound(TrialRecords(row(0), used_up, None, anew), **CLAIMED) == [("node-a", "node-b")]


GANG = {"gpus": {"min": 1, "max": 4}, "workers": "one_per_gpu", "run_in": "pod"}


@pytest.mark.parametrize(
    ("trial", "most"),
    [
        ({**GANG, "pod": {"gang_service": "gangs"}}, 4),
        ({**GANG, "pod": {}}, 2),
        ({**GANG, "pod": {"gang_service": "gangs"}, "workers": "one_process"}, 2),
        ({**GANG, "pod": {"gang_service": "gangs", "checkpoint_claims": {"a": "disk"}}}, 2),
    ],
)
def test_only_a_trial_with_a_worker_on_each_gpu_and_a_service_has_gpus_of_several_nodes(
    trial: dict[str, Any], most: int
) -> None:
    spec = {"command": ["x"], "directory": "/", **trial}
    sweep = sweep_with(TrialRecords(row(0), None, None, None), trial=spec)
    (job,) = sweep.jobs(130.0, ("a", "a", "b", "b"))
    assert job.max_gpus == most
    assert bool(job.nodes) == (most == 2)
