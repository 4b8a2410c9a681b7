"""Nodes, GPUs, servers, disks and workers that fail, one by one: what becomes of a trial.

Each case prints how soon the trial was back at work (`pytest -s`). A node that does not come back
takes minutes; those cases are `installation`, the others take four to seven minutes together.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.integration import harness
from tests.k8s.faults import (
    NO_POD_S,
    PAUSE_S,
    Recovery,
    check,
    inside,
    pods_seen,
    program,
    resumed,
    task_process,
    whole,
)

pytestmark = [pytest.mark.k8s, pytest.mark.timeout(900)]

AWAY_S = 30.0
LOST_NODE_S = 240.0
"""Until a pod of a node that does not answer is given up: eviction, its grace, then ours."""


@contextlib.contextmanager
def stopped(cluster: Any, *servers: str) -> Iterator[None]:
    """Servers of the cluster killed for a while."""
    for name in servers:
        cluster.tool("kill", name, "--signal", "SIGKILL")
    try:
        yield
    finally:
        for name in reversed(servers):
            cluster.tool("start", name)


def ready(cluster: Any, node: str) -> bool:
    conditions = cluster.api.read_node(node).status.conditions
    return any(c.type == "Ready" and c.status == "True" for c in conditions)


def gpus(cluster: Any, node: str) -> int:
    return int(cluster.api.read_node(node).status.allocatable["nvidia.com/gpu"])


def test_kubelet_and_containerd_that_come_back_soon_cost_nothing(sweep: Any, lab: Any) -> None:
    node = lab.cluster.running(sweep.id)["spec"]["nodeName"]
    with Recovery(sweep, "kubelet and containerd away for 10 s").measured():
        with stopped(lab.cluster, f"kubelet-{node}", f"containerd-{node}"):
            time.sleep(10.0)
        harness.await_(lambda: ready(lab.cluster, node), 120.0)
        check(sweep, lab, ["finished"])
    harness.await_(lambda: gpus(lab.cluster, node) == 2, 120.0)


def test_a_gpu_that_breaks_is_given_to_no_further_pod(sweep: Any, lab: Any) -> None:
    pod = lab.cluster.running(sweep.id)
    device = devices(sweep)[-1]
    try:
        with Recovery(sweep, "GPU unhealthy, its script killed").measured():
            lab.cluster.tool("gpu", "break", device)
            harness.await_(lambda: gpus(lab.cluster, pod["spec"]["nodeName"]) == 1, 120.0)
            os.kill(inside(sweep), signal.SIGKILL)
            resumed(sweep, pod["metadata"]["uid"], lab)
            check(sweep, lab, ["killed", "finished"])
        assert devices(sweep)[-1] != device
    finally:
        lab.cluster.tool("gpu", "heal", device)
    harness.await_(lambda: gpus(lab.cluster, pod["spec"]["nodeName"]) == 2, 120.0)


def devices(sweep: Any) -> list[str]:
    return [str(fact["devices"]) for fact in pods_seen(sweep, 0)]


def test_an_api_server_that_is_away_stops_no_trial(sweep: Any, lab: Any) -> None:
    with Recovery(sweep, f"API server away for {AWAY_S:g} s").measured():
        with stopped(lab.cluster, "kube-apiserver"):
            time.sleep(AWAY_S)
        sweep.await_end()
        harness.await_(lambda: answers(lab.cluster), 120.0)
        check(sweep, lab, ["finished"])


def answers(cluster: Any) -> bool:
    with contextlib.suppress(Exception):  # whatever the client makes of a server that starts
        return bool(cluster.pods() or True)
    return False


def test_a_worker_that_is_killed_leaves_its_pod_to_the_next_try(sweep: Any, lab: Any) -> None:
    former = lab.cluster.running(sweep.id)["metadata"]["uid"]
    began = time.monotonic()
    with Recovery(sweep, "worker and task killed").measured():
        kill_worker(sweep, 0)
        harness.await_(lambda: sweep.tasks()["trial", 0]["try_number"] > 1, 120.0)
        harness.await_(lambda: sweep.tasks()["trial", 0]["state"] == "running", 120.0)
        print(f"\nthe next try looks after the pod after {time.monotonic() - began:.1f} s")
        assert {p["metadata"]["uid"] for p in lab.cluster.pods(sweep=sweep.id)} <= {former}
        check(sweep, lab, ["finished"])


def kill_worker(sweep: Any, number: int) -> None:
    """SIGKILL to the worker, then to the task that it has forked."""
    task = task_process(sweep, number)
    worker = task.parent()
    assert worker is not None
    worker.kill()
    with contextlib.suppress(psutil.NoSuchProcess):
        task.kill()


def test_a_pod_whose_task_was_killed_and_never_comes_again_is_deleted(lab: Any) -> None:
    sweep = lab.start(lab.pod_sweep("forsaken", harness.alike(2), 400, PAUSE_S))
    harness.await_(lambda: sweep.lines(0) >= 2 and sweep.lines(1) >= 2, 120.0)
    kill_worker(sweep, 0)
    failed = {"new_state": "failed"}
    path = f"{harness.DAG}/{sweep.id}/taskInstances/trial/0"
    assert lab.airflow.patch(path, json=failed).status_code == 200
    began = time.monotonic()
    harness.await_(lambda: not lab.cluster.pods(sweep=sweep.id, trial="0"), NO_POD_S)
    print(f"\nrecovery: task gone for good: its pod is gone after {time.monotonic() - began:.1f} s")
    assert sweep.state == "running"
    assert len(lab.cluster.pods(sweep=sweep.id, trial="1")) == 1
    assert lab.hermes("sweep", "stop", sweep.id).returncode == 0
    sweep.await_end()
    assert sweep.states() == {0: "failed", 1: "cancelled"}
    harness.await_(lambda: not lab.cluster.pods(sweep=sweep.id), NO_POD_S)


def test_a_volume_that_is_full_for_a_while_costs_an_epoch_at_most(sweep: Any, lab: Any) -> None:
    volume = lab.home / "sweeps"
    assert os.path.ismount(volume), "the volume is no disk of its own: this fault cannot be made"
    former = lab.cluster.running(sweep.id)["metadata"]["uid"]
    ballast = volume / "ballast"
    with Recovery(sweep, "volume full for 6 s").measured():
        fill(ballast)
        try:
            time.sleep(6.0)
        finally:
            ballast.unlink()
        resumed(sweep, former, lab)
        sweep.await_end()
        whole(sweep, lab)


def fill(file: Path) -> None:
    with file.open("wb", buffering=0) as stream, contextlib.suppress(OSError):
        while True:
            stream.write(bytes(4096))
    assert shutil.disk_usage(file.parent).free == 0


@pytest.fixture
def second_controller(lab: Any, tmp_path: Path) -> Iterator[Path]:
    """The log of a controller beside the stack's own, as another replica would be."""
    own, log = program(lab, "controller"), tmp_path / "second.log"
    environment = {k: v for k, v in own.environ().items() if k != "HERMES_PROGRAM"}
    command = [*own.cmdline(), "--metrics-port", "0"]
    with log.open("w") as stream:
        second = subprocess.Popen(command, env=environment, stdout=stream, stderr=stream)
        try:
            harness.await_(lambda: "Metrics at" in log.read_text())
            yield log
        finally:
            second.terminate()
            assert second.wait(60.0) == 0


# The second controller is there before the sweep, which may end while one starts on a busy machine.
def test_of_two_controllers_the_other_one_leads_when_the_leader_is_killed(
    second_controller: Path, sweep: Any, lab: Any
) -> None:
    pod, log = lab.cluster.running(sweep.id)["metadata"], second_controller
    with Recovery(sweep, "leader and pod killed").measured():
        assert "Leading" not in log.read_text()
        program(lab, "controller").kill()
        lab.cluster.api.delete_namespaced_pod(pod["name"], pod["namespace"])
        harness.await_(lambda: "Leading" in log.read_text(), 120.0)
        resumed(sweep, pod["uid"], lab)
        check(sweep, lab, ["preempted", "finished"])


@pytest.mark.installation
def test_a_trial_that_ends_on_a_node_that_does_not_answer_counts_and_its_pod_goes(
    sweep: Any, lab: Any
) -> None:
    node, began = lab.cluster.running(sweep.id)["spec"]["nodeName"], time.monotonic()
    with stopped(lab.cluster, f"kubelet-{node}"):
        harness.await_(lambda: not ready(lab.cluster, node), 120.0)
        sweep.await_end(LOST_NODE_S)
        check(sweep, lab, ["finished"])
        print(f"\nrecovery: kubelet gone: its pod is gone after {time.monotonic() - began:.1f} s")
    harness.await_(lambda: ready(lab.cluster, node), 120.0)


@pytest.mark.installation
def test_a_node_that_has_died_loses_its_trial_to_another_node(sweep: Any, lab: Any) -> None:
    pod = lab.cluster.running(sweep.id)
    node = pod["spec"]["nodeName"]
    with Recovery(sweep, "node dead").measured():
        with stopped(lab.cluster, f"kubelet-{node}", f"containerd-{node}"):
            os.kill(inside(sweep), signal.SIGKILL)
            resumed(sweep, pod["metadata"]["uid"], lab, LOST_NODE_S)
            assert lab.cluster.running(sweep.id)["spec"]["nodeName"] != node
        check(sweep, lab, ["killed", "finished"])
    harness.await_(lambda: ready(lab.cluster, node), 120.0)
