"""What is killed, and that its trial still ends once, whole, with at most an epoch done again."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from tests.integration import harness
from tests.k8s.faults import (
    RATE,
    SWEEP_S,
    Recovery,
    check,
    inside,
    program,
    resumed,
    whole,
)

pytestmark = [pytest.mark.k8s, pytest.mark.timeout(900)]

in_both_modes = pytest.mark.parametrize(
    "sweep", [False, True], ids=["worker", "triggerer"], indirect=True
)
in_the_triggerer = pytest.mark.parametrize("sweep", [True], ids=["triggerer"], indirect=True)


@in_both_modes
def test_a_pod_that_is_deleted_checkpoints_and_its_trial_goes_on(sweep: Any, lab: Any) -> None:
    pod = lab.cluster.running(sweep.id)["metadata"]
    with Recovery(sweep, "pod deleted").measured():
        lab.cluster.api.delete_namespaced_pod(pod["name"], pod["namespace"])
        resumed(sweep, pod["uid"], lab)
        check(sweep, lab, ["preempted", "finished"])


@in_both_modes
def test_a_pod_that_is_deleted_by_force_costs_an_epoch_at_most(sweep: Any, lab: Any) -> None:
    pod = lab.cluster.running(sweep.id)["metadata"]
    with Recovery(sweep, "pod deleted by force").measured():
        where = {"name": pod["name"], "namespace": pod["namespace"]}
        lab.cluster.api.delete_namespaced_pod(**where, grace_period_seconds=0)
        resumed(sweep, pod["uid"], lab)
        sweep.await_end(SWEEP_S)
        whole(sweep, lab)
    ends = [s["outcome"] for s in sweep.segments(0)]
    assert ends[-1] == "finished"
    assert set(ends[:-1]) <= {"killed", "preempted"}


@in_both_modes
def test_a_container_that_is_killed_is_a_failure_that_is_tried_again(sweep: Any, lab: Any) -> None:
    pod = lab.cluster.running(sweep.id)["metadata"]
    with Recovery(sweep, "container killed").measured():
        os.kill(inside(sweep), signal.SIGKILL)
        resumed(sweep, pod["uid"], lab)
        check(sweep, lab, ["killed", "finished"])


def test_a_trial_that_runs_out_of_memory_says_so_and_is_tried_again(lab: Any) -> None:
    content = lab.pod_sweep("hungry", [RATE], 4, 0.2, hungry=True)
    sweep = lab.run(content)
    assert sweep.states() == {0: "finished"}
    assert len(sweep.segments(0)) == 2
    said = sweep.log("trial", 0)
    assert "out of memory" in said or "SIGKILL" in said


def test_a_trial_that_writes_more_to_its_disk_than_its_pod_may_fails_and_says_so(lab: Any) -> None:
    content = lab.pod_sweep(
        "greedy", [RATE], 2_000, 0.2, greedy=True,
        pod={"limits": {"ephemeral-storage": "40Mi"}}, trial={"max_failures": 0},
    )  # fmt: skip
    sweep = lab.start(content)
    sweep.await_end(SWEEP_S)
    assert sweep.states() == {0: "failed"}
    assert "exceeds the total limit of containers 40Mi" in sweep.tag(0, "hermes.reason")


@pytest.mark.parametrize("deferrable", [False, True], ids=["worker", "triggerer"])
def test_a_trial_that_writes_a_shorter_segment_is_charged_the_run_of_its_container(
    deferrable: bool, lab: Any
) -> None:
    content = lab.pod_sweep("lying", [RATE], 25, 1.0, lying=True, pod={"deferrable": deferrable})
    sweep = lab.run(content)
    assert sweep.states() == {0: "finished"}
    (segment,) = sweep.segments(0)
    assert segment["end_s"] - segment["start_s"] < 10.0
    assert float(sweep.tag(0, "hermes.gpu_seconds")) >= 25.0


def test_an_image_that_is_missing_fails_the_trial_with_its_name(lab: Any) -> None:
    content = lab.pod_sweep(
        "noimage", [RATE], 2, 0.1,
        pod={"image": "localhost/absent:1", "start_timeout_seconds": 20}, trial={"max_failures": 0},
    )  # fmt: skip
    sweep = lab.start(content)
    sweep.await_end(SWEEP_S)
    assert sweep.states() == {0: "failed"}
    assert "localhost/absent:1" in sweep.tag(0, "hermes.reason")
    assert lab.cluster.pods(sweep=sweep.id) == []


def test_a_drained_nodes_trial_goes_on_on_the_other_node(sweep: Any, lab: Any) -> None:
    pod = lab.cluster.running(sweep.id)
    node, api = pod["spec"]["nodeName"], lab.cluster.api
    api.patch_node(node, {"spec": {"unschedulable": True}})
    try:
        where = pod["metadata"]
        with Recovery(sweep, "node drained").measured():
            api.create_namespaced_pod_eviction(where["name"], where["namespace"],
                                               {"metadata": {"name": where["name"]}})  # fmt: skip
            resumed(sweep, where["uid"], lab)
            assert lab.cluster.running(sweep.id)["spec"]["nodeName"] != node
            check(sweep, lab, ["preempted", "finished"])
    finally:
        api.patch_node(node, {"spec": {"unschedulable": False}})


def test_a_controller_that_is_killed_disturbs_no_pod(sweep: Any, lab: Any) -> None:
    with Recovery(sweep, "controller killed").measured():
        program(lab, "controller").kill()
        check(sweep, lab, ["finished"])


def test_a_scheduler_that_is_killed_costs_no_step_and_never_has_two_pods(
    sweep: Any, lab: Any
) -> None:
    former = lab.cluster.running(sweep.id)["metadata"]["uid"]
    with Recovery(sweep, "scheduler killed").measured():
        program(lab, "scheduler").kill()
        harness.await_(lambda: sweep.tasks()["trial", 0]["try_number"] > 1, 120.0)
        uids = {p["metadata"]["uid"] for p in lab.cluster.pods(sweep=sweep.id)}
        assert uids <= {former}
        # Its worker may live long enough to be told by Airflow to end: then it checkpoints first.
        check(sweep, lab, ["finished"], ["preempted", "finished"])


@in_the_triggerer
def test_a_triggerer_that_is_killed_goes_on_with_the_pod(sweep: Any, lab: Any) -> None:
    assert sweep.tasks()["trial", 0]["state"] == "deferred"
    program(lab, "triggerer").kill()
    check(sweep, lab, ["finished"])
    assert sweep.tasks()["trial", 0]["try_number"] == 1


@in_both_modes
def test_a_trial_that_is_stopped_for_good_leaves_no_pod(sweep: Any, lab: Any) -> None:
    lab.hermes("sweep", "stop", sweep.id)
    sweep.await_end(SWEEP_S)
    assert sweep.states() == {0: "cancelled"}
    harness.await_(lambda: not lab.cluster.pods(sweep=sweep.id), 120.0)


@in_the_triggerer
def test_a_deferred_trial_whose_task_is_cleared_goes_on_in_its_pod_or_in_another(
    sweep: Any, lab: Any
) -> None:
    body = {"dry_run": False, "dag_run_id": sweep.id, "task_ids": [["trial", 0]],
            "only_failed": False}  # fmt: skip
    lab.airflow.post("/api/v2/dags/hermes_sweep/clearTaskInstances", json=body).raise_for_status()
    # Whichever comes first: the next try, which takes the pod over, or the trigger, which ends it.
    check(sweep, lab, ["finished"], ["preempted", "finished"])
    assert sweep.tasks()["trial", 0]["try_number"] == 2
