"""What is killed, and that its trial still ends once, whole, with at most an epoch done again."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from hermes_ops.stack import processes
from tests.integration import harness

pytestmark = [pytest.mark.k8s, pytest.mark.timeout(900)]

RATE, EPOCHS, PAUSE_S = 0.5, 30, 0.6
SWEEP_S = 300.0


@pytest.fixture
def sweep(lab: Any, request: pytest.FixtureRequest) -> Any:
    """A sweep of one trial that has trained for some epochs."""
    name = request.node.name.removeprefix("test_")[:24].strip("_").replace("_", "-")
    begun = lab.start(lab.pod_sweep(name, [RATE], EPOCHS, PAUSE_S))
    harness.await_(lambda: begun.lines(0) >= 4, 120.0)
    return begun


def check(sweep: Any, lab: Any, tmp_path: Path, *outcomes: list[str]) -> None:
    """It ends finished in one of these ways, with the curve of a run that nothing disturbed."""
    sweep.await_end(SWEEP_S)
    assert sweep.states() == {0: "finished"}, sweep.log("trial", 0)
    alone = harness.plain_curve(tmp_path / "alone", RATE, EPOCHS)
    curve = sweep.curve(0)
    assert [step for step, _ in curve] == list(range(1, EPOCHS + 1))
    assert [loss for _, loss in curve] == pytest.approx(alone, abs=1e-9)
    assert [s["outcome"] for s in sweep.segments(0)] in outcomes
    harness.await_(lambda: not lab.cluster.pods(sweep=sweep.id), 60.0)


def resumed(sweep: Any, former: str, lab: Any) -> float:
    """Seconds until another pod of the trial runs."""
    started = time.monotonic()

    def fresh() -> bool:
        pods = lab.cluster.pods(sweep=sweep.id)
        return any(
            p["metadata"]["uid"] != former and p["status"]["phase"] == "Running" for p in pods
        )

    harness.await_(fresh, 120.0)
    took_s = time.monotonic() - started
    print(f"resumed after {took_s:.1f} s")
    return took_s


def inside(sweep: Any) -> int:
    """The host's process id of the guard in the pod's container."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if "hermes_ops.trial" not in process.cmdline():
                continue
            status = Path(f"/proc/{process.pid}/status").read_text()
            within = next(n for n in status.splitlines() if n.startswith("NSpid:")).split()
            if within[-1] == "1" and process.environ().get("HERMES_SWEEP") == sweep.id:
                return int(process.pid)
    pytest.fail("the pod's process is not on this machine: this fault cannot be made here")


def test_a_pod_that_is_deleted_checkpoints_and_its_trial_goes_on(
    sweep: Any, lab: Any, tmp_path: Path
) -> None:
    pod = lab.cluster.running(sweep.id)["metadata"]
    lab.cluster.api.delete_namespaced_pod(pod["name"], pod["namespace"])
    resumed(sweep, pod["uid"], lab)
    check(sweep, lab, tmp_path, ["preempted", "finished"])


def test_a_pod_that_is_deleted_by_force_costs_an_epoch_at_most(
    sweep: Any, lab: Any, tmp_path: Path
) -> None:
    pod = lab.cluster.running(sweep.id)["metadata"]
    lab.cluster.api.delete_namespaced_pod(pod["name"], pod["namespace"], grace_period_seconds=0)
    resumed(sweep, pod["uid"], lab)
    sweep.await_end(SWEEP_S)
    ends = [s["outcome"] for s in sweep.segments(0)]
    assert ends[-1] == "finished"
    assert set(ends[:-1]) <= {"killed", "preempted"}
    check(sweep, lab, tmp_path, ends)


def test_a_container_that_is_killed_is_a_failure_that_is_tried_again(
    sweep: Any, lab: Any, tmp_path: Path
) -> None:
    pod = lab.cluster.running(sweep.id)["metadata"]
    os.kill(inside(sweep), signal.SIGKILL)
    resumed(sweep, pod["uid"], lab)
    check(sweep, lab, tmp_path, ["killed", "finished"])


def test_a_trial_that_runs_out_of_memory_says_so_and_is_tried_again(lab: Any) -> None:
    content = lab.pod_sweep("hungry", [RATE], 4, 0.2, hungry=True)
    sweep = lab.run(content)
    assert sweep.states() == {0: "finished"}
    assert len(sweep.segments(0)) == 2
    said = sweep.log("trial", 0)
    assert "out of memory" in said or "SIGKILL" in said


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


def test_a_drained_nodes_trial_goes_on_on_the_other_node(
    sweep: Any, lab: Any, tmp_path: Path
) -> None:
    pod = lab.cluster.running(sweep.id)
    node, api = pod["spec"]["nodeName"], lab.cluster.api
    api.patch_node(node, {"spec": {"unschedulable": True}})
    try:
        where = pod["metadata"]
        api.create_namespaced_pod_eviction(where["name"], where["namespace"],
                                           {"metadata": {"name": where["name"]}})  # fmt: skip
        resumed(sweep, where["uid"], lab)
        assert lab.cluster.running(sweep.id)["spec"]["nodeName"] != node
        check(sweep, lab, tmp_path, ["preempted", "finished"])
    finally:
        api.patch_node(node, {"spec": {"unschedulable": False}})


def program(lab: Any, name: str) -> psutil.Process:
    """The main process of one of the stack's programs."""
    own = [m.process for m in processes.members(lab.home) if m.program == name]
    pids = {p.pid for p in own}
    return next(p for p in own if p.ppid() not in pids)


def test_a_controller_that_is_killed_disturbs_no_pod(sweep: Any, lab: Any, tmp_path: Path) -> None:
    program(lab, "controller").kill()
    check(sweep, lab, tmp_path, ["finished"])


def test_a_scheduler_that_is_killed_costs_no_step_and_never_has_two_pods(
    sweep: Any, lab: Any, tmp_path: Path
) -> None:
    former = lab.cluster.running(sweep.id)["metadata"]["uid"]
    program(lab, "scheduler").kill()
    harness.await_(lambda: sweep.tasks()["trial", 0]["try_number"] > 1, 120.0)
    uids = {p["metadata"]["uid"] for p in lab.cluster.pods(sweep=sweep.id)}
    assert uids <= {former}
    # Its worker may live long enough to be told by Airflow to end: then it checkpoints first.
    check(sweep, lab, tmp_path, ["finished"], ["preempted", "finished"])
