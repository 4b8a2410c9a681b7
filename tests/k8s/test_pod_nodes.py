"""A pool that knows its nodes: checkpoints on a claim for each, and trials on several of them.

A trial whose checkpoints are on its node's claim goes on where it began. One with a worker on each
GPU grows over two nodes, shrinks, and outlives a node.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from bench import pod_cluster
from tests.integration import harness
from tests.integration.samplers import sampling
from tests.k8s.conftest import (
    Cluster,
    PodLab,
    airflow_beside,
    gpus_of,
    preempted_with_the_same_curve,
)
from tests.k8s.faults import START_S, pods_seen

pytestmark = [pytest.mark.k8s, pytest.mark.timeout(1500)]

RATES = [0.01, 0.02, 0.03, 0.04, 0.6, 0.7, 0.8, 0.9]  # the last ones fall fastest
EPOCHS, PAUSE_S, SWEEP_S = 16, 0.8, 600.0
MOUNT = "/hermes/trial/checkpoints"
START_TIMEOUT_S = 40
CHANGE_S = 180.0
LOST_S = 420.0
"""Until a trial goes on without a node: the cluster notices it, and a pod for it is given up."""


@dataclass
class Places:
    """Where each trial's pods ran, and which claim had their checkpoints, looked at each 0.3 s."""

    cluster: Cluster
    seen: dict[int, set[tuple[str, str]]] = field(default_factory=dict)
    most_gpus: int = 0
    stop: threading.Event = field(default_factory=threading.Event)

    def loop(self) -> None:
        while not self.stop.wait(0.3):
            live = [p for p in self.cluster.pods() if p["status"].get("phase") == "Running"]
            self.most_gpus = max(self.most_gpus, sum(gpus_of(p) for p in live))
            for pod in live:
                number = int(pod["metadata"]["labels"]["hermes-ops/trial"])
                place = (pod["spec"]["nodeName"], claim_of(pod))
                self.seen.setdefault(number, set()).add(place)


def claim_of(pod: dict[str, Any]) -> str:
    """The claim that is mounted where the checkpoints are."""
    mounts = {m["mountPath"]: m["name"] for m in pod["spec"]["containers"][0]["volumeMounts"]}
    volumes = {v["name"]: v for v in pod["spec"]["volumes"]}
    return str(volumes[mounts[MOUNT]]["persistentVolumeClaim"]["claimName"])


@dataclass(frozen=True)
class Disks:
    """A folder for each node of the cluster that has GPUs, and the pool's setting of the nodes."""

    folder: Path
    gpus: dict[str, int]

    @property
    def setting(self) -> str:
        return ",".join(f"{node}={gpus}" for node, gpus in sorted(self.gpus.items()))

    def left(self, sweep: str) -> list[Path]:
        """What lies on all of them of a sweep's checkpoints."""
        return [p for p in self.folder.glob(f"*/{sweep}/trials/*/*") if p.is_file()]


@pytest.fixture(scope="module")
def disks(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Disks]:
    """A ReadWriteOnce claim for each node, `checkpoints-NODE`, whose volume is on that node."""
    nodes = json.loads(cluster.api.list_node(_preload_content=False).data)["items"]
    gpus = {
        n["metadata"]["name"]: int(n["status"]["allocatable"].get("nvidia.com/gpu", 0))
        for n in nodes
    }
    found = Disks(tmp_path_factory.mktemp("disks"), {n: g for n, g in gpus.items() if g})
    with contextlib.ExitStack() as held:
        for node in found.gpus:
            made = found.folder / node
            made.mkdir()
            made.chmod(0o777)
            named, how = f"checkpoints-{node}", {"mode": "ReadWriteOnce", "node": node}
            place = pod_cluster.claimed(cluster.api, cluster.namespace, named, made, **how)
            held.enter_context(place)
        yield found


@pytest.fixture(scope="module")
def node_lab(
    cluster: Cluster, image: str, disks: Disks, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[PodLab]:
    """Airflow whose pool knows its nodes, and whose installation has a claim for each."""
    home = Path(tmp_path_factory.mktemp("nodes"))
    (home / "sweeps").mkdir()
    claims = {node: f"checkpoints-{node}" for node in disks.gpus}
    own = {"claim": "node-trials", "checkpoint_claims": claims}
    defaults = pod_cluster.defaults(image, cluster.namespace) | own
    folder, slots = tmp_path_factory.mktemp("sweeps"), sum(disks.gpus.values())
    shared = pod_cluster.claimed(cluster.api, cluster.namespace, "node-trials", home / "sweeps")
    with pytest.MonkeyPatch.context() as patch, shared:
        patch.setenv("HERMES_NODES", disks.setting)
        with airflow_beside(cluster, home, folder, defaults, slots) as made:
            yield made


@pytest.fixture(scope="module")
def told(node_lab: PodLab, disks: Disks) -> Any:
    """The sweep, where its pods were seen, and the most files of its checkpoints on the disks."""
    content = node_lab.pod_sweep("nodes", RATES, EPOCHS, PAUSE_S)
    with (
        node_lab.policy("hermes", guard_k=0),
        sampling(Places(node_lab.cluster)) as places,
    ):
        sweep = node_lab.start(content)
        harness.await_(lambda: disks.left(sweep.id), 120.0)
        sweep.await_end(SWEEP_S)
    return sweep, places


def test_every_trial_with_its_checkpoints_on_a_node_is_finished(told: Any) -> None:
    sweep, _ = told
    assert sweep.state == "success"
    assert sweep.states() == dict.fromkeys(range(len(RATES)), "finished")


def test_a_trial_stays_on_its_node_and_has_that_nodes_claim(told: Any, disks: Disks) -> None:
    _, places = told
    assert set(places.seen) == set(range(len(RATES)))
    for number, seen in places.seen.items():
        ((node, name),) = seen
        assert name == f"checkpoints-{node}", number
    assert {node for seen in places.seen.values() for node, _ in seen} == set(disks.gpus)
    assert places.most_gpus <= sum(disks.gpus.values())


def test_a_trial_preempted_on_its_node_goes_on_with_the_same_curve(told: Any) -> None:
    sweep, _ = told
    for number in preempted_with_the_same_curve(sweep, RATES, EPOCHS):
        parts = sweep.segments(number)
        assert [p["first_step"] for p in parts[1:]] == [p["last_step"] for p in parts[:-1]]
        devices = [fact["devices"] for fact in pods_seen(sweep, number)]
        assert len(devices) == len(parts)


def test_nothing_is_left_on_the_nodes_of_trials_that_have_finished(told: Any, disks: Disks) -> None:
    sweep, _ = told
    assert disks.left(sweep.id) == []
    folders = sweep.folder.glob("trials/*/checkpoints/*")
    assert list(folders) == []  # and none ever lay on the shared claim


def test_a_trial_that_begins_from_scratch_may_begin_anywhere_and_has_no_old_checkpoint(
    node_lab: PodLab, disks: Disks
) -> None:
    rate, epochs = 0.5, 30
    sweep = node_lab.start(node_lab.pod_sweep("anew", [rate], epochs, 0.6))
    harness.await_(lambda: sweep.lines(0) >= 4, 120.0)
    cleared = node_lab.hermes("sweep", "clear", f"{sweep.id}/0", "--from-scratch")
    assert cleared.returncode == 0, cleared.stderr
    begun = time.time()
    harness.await_(lambda: [s for s in sweep.segments(0) if s["start_s"] > begun], 120.0)
    sweep.await_end(SWEEP_S)
    assert sweep.segments(0)[0]["first_step"] == 0
    assert [loss for _, loss in sweep.curve(0)] == pytest.approx(harness.plain_curve(rate, epochs))
    assert disks.left(sweep.id) == []


# -- trials on several nodes -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def gang_service(cluster: Cluster) -> str:
    """The headless Service by which the pods of a trial find each other."""
    spec = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": {"app.kubernetes.io/component": "gang"},
    }
    service = {"metadata": {"name": "gangs"}, "spec": spec}
    cluster.api.create_namespaced_service(cluster.namespace, service)
    return "gangs"


class GangSweep:
    """A sweep of one trial of scripts/workers.py, which trains slowly while a file is there."""

    def __init__(self, lab: PodLab, name: str, service: str, *, deferrable: bool = False) -> None:
        content = harness.workers(name, harness.alike(1), Path("/hermes/trial"), Path("lasts"))
        command = [word if word != "workers.py" else "/scripts/workers.py"
                   for word in content["trial"]["command"]]  # fmt: skip
        command[command.index("lasts")] = "/hermes/trial/lasts"
        command[command.index("--pause") + 1] = "4.0"  # it lasts as long as all that happens to it
        pod = {
            "checkpoint_claims": {},
            "gang_service": service,
            "start_timeout_seconds": START_TIMEOUT_S,
            "deferrable": deferrable,
        }
        content["trial"] |= {
            "command": command, "directory": "/scripts", "run_in": "pod", "pod": pod,
        }  # fmt: skip
        self.sweep = lab.start(content)
        self.folder = self.sweep.folder / "trials" / "0"
        self.folder.mkdir(parents=True, exist_ok=True)
        self.lasts = self.folder / "lasts"
        self.lasts.touch()

    @property
    def sizes(self) -> list[int]:
        return [len(segment["gpus"]) for segment in self.sweep.segments(0)]

    @property
    def starts(self) -> list[dict[str, Any]]:
        """The facts of all workers, in the order in which they have started."""
        facts = [json.loads(f.read_text() or "{}") for f in self.folder.glob("*-*.json")]
        return sorted((f for f in facts if "rank" in f), key=lambda f: float(f["time_s"]))

    def trains(self, size: int) -> bool:
        """Tell whether it trains with so many workers, of which all have started."""
        before = sum(self.sizes[:-1])
        begun = len(self.sizes) and self.sizes[-1] == size
        return bool(begun and len(self.starts) >= before + size)

    def end(self) -> None:
        self.lasts.unlink()
        self.sweep.await_end(CHANGE_S)


def places(cluster: Cluster, sweep: str) -> list[tuple[str, int]]:
    """The node and the GPUs of each pod of a sweep that runs."""
    up = [p for p in cluster.pods(sweep=sweep) if p["status"].get("phase") == "Running"]
    return sorted((p["spec"]["nodeName"], gpus_of(p)) for p in up)


@contextlib.contextmanager
def without(cluster: Cluster, node: str) -> Iterator[None]:
    """A node that answers nobody while the block lasts."""
    cluster.tool("kill", f"kubelet-{node}")
    try:
        yield
    finally:
        cluster.tool("start", f"kubelet-{node}")


def test_a_trial_grows_over_two_nodes_shrinks_for_another_and_outlives_a_node(
    node_lab: PodLab, gang_service: str
) -> None:
    cluster = node_lab.cluster
    with node_lab.policy("doubling", guard_k=0), node_lab.sampled_pods() as sampler:
        first = GangSweep(node_lab, "gang", gang_service)
        harness.await_(lambda: first.trains(4) and first.sweep.lines(0) > 3, START_S)
        assert places(cluster, first.sweep.id) == [("node-a", 2), ("node-b", 2)]
        assert sorted(f["rank"] for f in first.starts) == [0, 1, 2, 3]
        assert {(f["size"], f["gpus"]) for f in first.starts} == {(4, "0,1")}
        second = GangSweep(node_lab, "other", gang_service)
        harness.await_(lambda: first.trains(2) and second.trains(2), CHANGE_S)
        second.end()
        harness.await_(lambda: first.trains(4), CHANGE_S)
        assert first.sizes == [4, 2, 4]
        with without(cluster, "node-b"):
            harness.await_(lambda: first.sizes[-1] == 2, LOST_S)
            harness.await_(lambda: ("node-a", 2) in places(cluster, first.sweep.id), CHANGE_S)
            first.end()
    assert first.sweep.states() == second.sweep.states() == {0: "finished"}
    outcomes = [segment["outcome"] for segment in first.sweep.segments(0)]
    assert "failed" not in outcomes
    assert outcomes[-1] == "finished"
    assert sampler.most_gpus <= 4
    first.sweep.assert_whole(0, harness.alike(1)[0])


def test_the_triggerer_follows_a_trial_on_two_nodes_and_it_outlives_a_pod(
    node_lab: PodLab, gang_service: str
) -> None:
    cluster = node_lab.cluster
    with node_lab.policy("doubling", guard_k=0), node_lab.sampled_pods() as sampler:
        trial = GangSweep(node_lab, "held", gang_service, deferrable=True)
        harness.await_(lambda: trial.trains(4) and trial.sweep.lines(0) > 3, START_S)
        assert places(cluster, trial.sweep.id) == [("node-a", 2), ("node-b", 2)]
        assert trial.sweep.tasks()["trial", 0]["state"] == "deferred"
        lost = next(
            p for p in cluster.pods(sweep=trial.sweep.id) if p["spec"]["nodeName"] == "node-b"
        )
        cluster.api.delete_namespaced_pod(lost["metadata"]["name"], cluster.namespace)
        harness.await_(lambda: trial.sizes == [4, 4] and trial.trains(4), CHANGE_S)
        trial.end()
    assert trial.sweep.states() == {0: "finished"}
    assert [s["outcome"] for s in trial.sweep.segments(0)] == ["preempted", "finished"]
    assert [step for step, _ in trial.sweep.curve(0)] == list(range(1, harness.LONG + 1))
    assert sampler.most_gpus <= 4
    assert cluster.pods(sweep=trial.sweep.id) == []
