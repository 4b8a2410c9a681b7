"""What trials have left on the nodes' own claims after their sweep's end, and the pods that go."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from hermes_ops.airflow.folders import TrialFolder
from hermes_ops.airflow.sweep import sweep_report
from hermes_ops.airflow.trial import node_checkpoints
from hermes_ops.config import PodSpec, parse
from hermes_ops.errors import HermesError, Unavailable
from hermes_ops.kubernetes import PodView, Rejected
from tests.unit.airflow.builders import SWEEP, sweep_file

SPEC = PodSpec(
    image="trial:1",
    claim="trials",
    namespace="trials",
    user=7,
    secrets=("token",),
    checkpoint_claims={"node-a": "disk-a", "node-b": "disk-b"},
)


@dataclass
class Nodes:
    """A cluster whose pods have ended, with these codes by name, when they are looked at."""

    codes: dict[str, int | None] = field(default_factory=dict)
    made: list[dict[str, Any]] = field(default_factory=list)
    deleted: list[str] = field(default_factory=list)

    def create(self, pod: dict[str, Any]) -> None:
        self.made.append(pod)

    def fetch(self, name: str) -> PodView | None:
        code = self.codes.get(name, 0)
        return PodView(name, "u", "1", "Succeeded" if code is not None else "Pending", code=code)

    def delete(self, pod: PodView, grace_s: int) -> bool:
        self.deleted.append(pod.name)
        return True


def left(**nodes: str) -> None:
    """Say of trials that they have left checkpoints on a node."""
    for number, node in nodes.items():
        path = TrialFolder.from_sweep(SWEEP, int(number.strip("t"))).path
        path.mkdir(parents=True)
        (path / "apart").write_text(node)


def test_only_trials_that_have_left_something_are_asked_for(home: Path) -> None:
    left(t0="node-a", t1="node-b", t2="node-a", t4="node-a")
    assert node_checkpoints.by_node(SWEEP, [4, 3, 2, 1, 0]) == {"node-a": [0, 2, 4], "node-b": [1]}
    assert node_checkpoints.by_node(SWEEP, []) == {}


def test_the_pod_that_deletes_is_on_the_node_and_sees_its_claim_alone() -> None:
    pod = node_checkpoints.request(SWEEP, SPEC, "node-b", [3, 7])
    (container,) = pod["spec"]["containers"]
    assert container["command"] == ["hermes-trial"]
    assert container["args"] == [
        "--empty", "/hermes/trial/checkpoints/3", "/hermes/trial/checkpoints/7"
    ]  # fmt: skip
    mounts = {m["mountPath"]: m.get("subPath") for m in container["volumeMounts"]}
    assert mounts == {"/tmp": None, "/hermes/trial/checkpoints": f"{SWEEP}/trials"}
    claims = [v.get("persistentVolumeClaim") for v in pod["spec"]["volumes"] if v["name"] != "tmp"]
    assert claims == [{"claimName": "disk-b"}]
    assert "envFrom" not in container
    assert "hermes-ops/sweep" not in pod["metadata"]["labels"]
    metadata = {**pod["metadata"], "uid": "u", "resourceVersion": "1"}
    assert PodView.from_json({"metadata": metadata}).deletes_checkpoints
    assert "required" in str(pod["spec"]["affinity"])
    assert pod["spec"]["securityContext"]["runAsNonRoot"] is True
    with pytest.raises(HermesError, match="node-c"):
        node_checkpoints.request(SWEEP, SPEC, "node-c", [3])


def test_the_pod_that_deletes_finds_room_on_a_node_that_is_full_of_trials() -> None:
    amounts = {"cpu": "16", "memory": "64Gi", "rdma/hca": "1"}
    spec = SPEC.model_copy(update={"requests": amounts, "limits": amounts})
    (container,) = node_checkpoints.request(SWEEP, spec, "node-b", [3])["spec"]["containers"]
    assert container["resources"] == {
        "requests": {"cpu": "10m", "memory": "32Mi"},
        "limits": {"cpu": "16", "memory": "64Gi"},
    }


def test_the_pod_that_deletes_gets_no_secret_of_the_template(tmp_path: Path) -> None:
    file = tmp_path / "pod.yaml"
    secret = {"secretKeyRef": {"name": "s", "key": "k"}}
    container = {"name": "x", "env": [{"name": "A", "valueFrom": secret}]}
    file.write_text(json.dumps({"spec": {"containers": [container]}}))
    spec = SPEC.model_copy(update={"template_file": str(file)})
    assert "secret" not in str(node_checkpoints.request(SWEEP, spec, "node-b", [3]))


def test_the_pod_that_deletes_has_the_labels_of_the_template_that_a_policy_may_require(
    tmp_path: Path,
) -> None:
    file = tmp_path / "pod.yaml"
    file.write_text(json.dumps({"metadata": {"labels": {"cost-center": "7"}}, "spec": {}}))
    spec = SPEC.model_copy(update={"template_file": str(file)})
    labels = node_checkpoints.request(SWEEP, spec, "node-b", [3])["metadata"]["labels"]
    assert labels == {
        "cost-center": "7",
        "app.kubernetes.io/name": "hermes-clearing",
        "app.kubernetes.io/managed-by": "hermes-ops",
    }


def test_the_nodes_whose_pod_has_failed_or_never_came_are_not_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(node_checkpoints, "PATIENCE_S", 0.0)
    requests = {node: {"metadata": {"name": f"p-{node}"}} for node in ("a", "b", "c")}
    nodes: Any = Nodes(codes={"p-b": 1, "p-c": None})
    assert node_checkpoints.run_cleanup_pods(nodes, requests) == {"a"}
    assert sorted(nodes.deleted) == ["p-a", "p-b", "p-c"]
    assert len(nodes.made) == 3


@dataclass
class Shaky(Nodes):
    """Does not answer one look, and changes each pod once before it can be deleted."""

    away: int = 1
    changed: set[str] = field(default_factory=set)

    def create(self, pod: dict[str, Any]) -> None:
        if pod["metadata"]["name"] == "p-refused":
            raise Rejected("exceeds the limits of its namespace")
        super().create(pod)

    def fetch(self, name: str) -> PodView | None:
        if self.away:
            self.away -= 1
            raise Unavailable("refused")
        return None if name in self.deleted else super().fetch(name)

    def delete(self, pod: PodView, grace_s: int) -> bool:
        if pod.name not in self.changed:
            self.changed.add(pod.name)
            return False
        return super().delete(pod, grace_s)


def test_no_pod_is_left_by_a_cluster_that_is_away_for_a_moment_or_refuses_one_of_them(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(node_checkpoints, "LOOK_S", 0.0)
    requests = {node: {"metadata": {"name": f"p-{node}"}} for node in ("refused", "a", "b")}
    nodes: Any = Shaky(codes={"p-b": 1})
    assert node_checkpoints.run_cleanup_pods(nodes, requests) == {"a"}
    assert sorted(nodes.deleted) == ["p-a", "p-b"]
    assert "on refused is deleted: exceeds the limits" in caplog.text


def test_an_earlier_pod_does_not_answer_for_other_trials_of_its_sweep() -> None:
    names = {
        node_checkpoints.request(SWEEP, SPEC, "node-b", numbers)["metadata"]["name"]
        for numbers in ([3, 7], [7, 3], [3])
    }
    assert len(names) == 2


def test_what_is_deleted_is_forgotten_and_what_is_not_stays_noted(
    home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    left(t0="node-a", t1="node-b", t2="node-c")
    nodes = Nodes()
    monkeypatch.setattr(node_checkpoints, "cluster_pods", lambda own: (own, nodes))
    node_checkpoints.clear_disks(SWEEP, SPEC, [0])
    assert node_checkpoints.by_node(SWEEP, [0, 1, 2]) == {"node-b": [1], "node-c": [2]}
    node_checkpoints.clear_disks(SWEEP, SPEC, [1, 2])  # node-c has no claim any more
    assert node_checkpoints.by_node(SWEEP, [0, 1, 2]) == {"node-b": [1], "node-c": [2]}
    assert "stay on node-b, node-c" in caplog.text


@pytest.mark.parametrize(("keep", "over"), [(60, [0, 3]), (0, [0, 1, 2, 3])])
def test_trials_that_can_be_resumed_keep_theirs_as_long_as_the_sweep_keeps_any(
    monkeypatch: pytest.MonkeyPatch, keep: int, over: list[int]
) -> None:
    told: list[Any] = []
    monkeypatch.setattr(node_checkpoints, "clear_disks", lambda *told_now: told.append(told_now))
    data = sweep_file(checkpoints={"keep_seconds": keep})
    states = ("finished", "failed", "cancelled", "stopped_early")
    document = {"trials": [{"number": n, "state": s} for n, s in enumerate(states)]}
    plain = parse(data, "test", None)
    sweep_report.clear_left_disks(plain, SWEEP, document)
    spec = small_spec()
    data["trial"] |= {"run_in": "pod", "pod": spec.model_dump(mode="json", exclude_none=True)}
    sweep_report.clear_left_disks(parse(data, "test", None), SWEEP, document)
    assert told == [(SWEEP, spec, over)]


def small_spec() -> PodSpec:
    return PodSpec(image="a", claim="b", checkpoint_claims={"node-a": "disk-a"})
