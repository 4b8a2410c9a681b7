from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kubernetes.client.exceptions import ApiException
from urllib3.exceptions import ProtocolError

from hermes_ops.errors import HermesError, Unavailable
from hermes_ops.kubernetes.gpu_nodes import (
    GpuNode,
    SettledSlots,
    _nodes,
    allocatable,
    node_reader,
)
from hermes_ops.kubernetes.template import RESOURCE


def test_only_ready_nodes_that_take_pods_count() -> None:
    nodes = [
        GpuNode("a", 4),
        GpuNode("gone", 8, ready=False),
        GpuNode("cordoned", 8, cordoned=True),
        GpuNode("b", 2),
    ]
    assert allocatable(nodes) == 6
    assert allocatable([]) == 0


def test_the_gpus_of_trials_on_a_cordoned_node_count_until_their_pods_have_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pods = [
        pod("node-a", "Running", "2"),
        pod("node-a", "Succeeded", "1"),
        pod("node-b", "Running", "1"),
        pod(None, "Pending", "1"),
    ]
    outside = api([node("4", unschedulable=True), node("4", name="node-b")], pods)
    monkeypatch.setattr("hermes_ops.kubernetes.gpu_nodes.connect", lambda context: outside)
    read = node_reader(namespace="trials")
    assert allocatable(read()) == 6
    pods[0]["status"]["phase"] = "Failed"
    assert allocatable(read()) == 4
    assert allocatable(node_reader()()) == 4


def test_who_may_not_list_the_trials_pods_of_a_cordoned_node_is_told_the_right(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    refused = ApiException(status=403, reason="Forbidden")
    outside = api([node("4", unschedulable=True)], refused)
    monkeypatch.setattr("hermes_ops.kubernetes.gpu_nodes.connect", lambda context: outside)
    with pytest.raises(HermesError, match="`list` on pods in the namespace trials") as caught:
        node_reader(namespace="trials")()
    assert not isinstance(caught.value, Unavailable)


def with_gpus(gpus: int) -> list[GpuNode]:
    return [GpuNode("a", gpus)]


def test_more_gpus_count_at_once_and_fewer_after_they_have_lasted() -> None:
    slots = SettledSlots(30.0)
    assert slots.follow(with_gpus(4), 0.0) == 4
    assert slots.follow(with_gpus(8), 1.0) == 8
    assert slots.follow(with_gpus(4), 2.0) == 8
    assert slots.follow(with_gpus(4), 31.9) == 8
    assert slots.follow(with_gpus(4), 32.0) == 4


def test_a_node_that_is_away_for_a_moment_changes_nothing() -> None:
    slots = SettledSlots(30.0)
    seen = [
        slots.follow(with_gpus(gpus), time)
        for time, gpus in ((0.0, 8), (20.0, 4), (40.0, 8), (60.0, 4))
    ]
    assert seen == [8, 8, 8, 8]
    assert slots.follow(with_gpus(4), 89.0) == 8


def test_a_slot_that_a_cordoned_node_gives_up_is_gone_at_once() -> None:
    slots, free = SettledSlots(30.0), GpuNode("a", 4)
    assert slots.follow([free, GpuNode("b", 4)], 0.0) == 8
    assert slots.follow([free, GpuNode("b", 4, cordoned=True, held=2)], 10.0) == 6
    assert slots.follow([free, GpuNode("b", 4, cordoned=True, held=1)], 20.0) == 5
    assert slots.follow([free], 30.0) == 5  # it may be away for a moment
    assert slots.follow([free], 60.0) == 4


def test_a_cordoned_node_does_not_cut_short_the_wait_for_one_that_is_away() -> None:
    slots, cordoned = SettledSlots(30.0), GpuNode("b", 4, cordoned=True)
    assert slots.follow([GpuNode("a", 4), GpuNode("b", 4)], 0.0) == 8
    away = GpuNode("a", 4, ready=False)
    assert slots.follow([away, cordoned], 10.0) == 4
    assert slots.follow([away, cordoned], 39.0) == 4
    assert slots.follow([away, cordoned], 40.0) == 0


@given(st.lists(st.tuples(st.floats(0.1, 20.0), st.integers(0, 16)), min_size=1, max_size=40))
def test_slots_are_a_number_that_was_seen_lately_and_never_too_few(
    looks: list[tuple[float, int]],
) -> None:
    slots, now, seen = SettledSlots(30.0), 0.0, []
    for step, gpus in looks:
        now += step
        seen.append((now, gpus))
        found = slots.follow(with_gpus(gpus), now)
        assert found in {g for _, g in seen}
        assert found >= gpus


def node(
    gpus: str | None,
    ready: str = "True",
    unschedulable: bool | None = None,
    *,
    name: str = "node-a",
    taint: tuple[str, str] | None = None,
) -> Any:
    taints = None if taint is None else [SimpleNamespace(key=taint[0], effect=taint[1])]
    return SimpleNamespace(
        metadata=SimpleNamespace(name=name),
        spec=SimpleNamespace(unschedulable=unschedulable, taints=taints),
        status=SimpleNamespace(
            conditions=[SimpleNamespace(type="Ready", status=ready)],
            allocatable=None if gpus is None else {RESOURCE: gpus, "cpu": "8"},
        ),
    )


def pod(node_name: str | None, phase: str, gpus: str) -> dict[str, Any]:
    container = {"name": "base", "resources": {"limits": {RESOURCE: gpus}}}
    spec = {"nodeName": node_name, "containers": [container, {"name": "sidecar"}]}
    return {"spec": spec, "status": {"phase": phase}}


def api(answer: Any, pods: Any = ()) -> Any:
    def list_node(**asked: Any) -> Any:
        if isinstance(answer, Exception):
            raise answer
        return SimpleNamespace(items=answer)

    def list_pod(namespace: str, **asked: Any) -> Any:
        if isinstance(pods, Exception):
            raise pods
        return SimpleNamespace(data=json.dumps({"items": list(pods)}))

    return SimpleNamespace(list_node=list_node, list_namespaced_pod=list_pod)


def test_a_node_is_read_as_kubernetes_shows_it() -> None:
    shown = [node("2"), node("2", "Unknown"), node("2", unschedulable=True), node(None)]
    assert _nodes(api(shown), "", RESOURCE) == (
        GpuNode("node-a", 2),
        GpuNode("node-a", 2, ready=False),
        GpuNode("node-a", 2, cordoned=True),
        GpuNode("node-a", 0),
    )


@pytest.mark.parametrize(
    ("taint", "cordoned", "ready"),
    [
        (("ToBeDeletedByClusterAutoscaler", "NoSchedule"), True, True),
        (("karpenter.sh/disrupted", "NoSchedule"), True, True),
        (("cloud.google.com/impending-node-termination", "NoSchedule"), True, True),
        (("aws-node-termination-handler/spot-itn", "NoExecute"), True, True),
        (("node.kubernetes.io/disk-pressure", "NoSchedule"), False, False),
        (("DeletionCandidateOfClusterAutoscaler", "PreferNoSchedule"), False, True),
        (("aws-node-termination-handler/spot-itn", "PreferNoSchedule"), False, True),
        (("nvidia.com/gpu", "NoSchedule"), False, True),
    ],
)
def test_a_node_that_is_about_to_be_taken_away_or_under_pressure_takes_no_pods(
    taint: tuple[str, str], cordoned: bool, ready: bool
) -> None:
    found = _nodes(api([node("2", taint=taint)]), "", RESOURCE)
    assert found == (GpuNode("node-a", 2, ready, cordoned),)


def test_a_resource_that_is_no_device_counts_in_whole_ones() -> None:
    found = _nodes(api([node("7910m"), node("2k")]), "", RESOURCE)
    assert [n.gpus for n in found] == [7, 2_000]


def test_a_selector_that_is_none_is_named() -> None:
    refused = ApiException(status=400, reason="Bad Request")
    refused.body = '{"message": "unable to parse requirement"}'
    with pytest.raises(HermesError, match=r"'a b' of nodes .unable to parse requirement") as caught:
        _nodes(api(refused), "a b", RESOURCE)
    assert not isinstance(caught.value, Unavailable)


@pytest.mark.parametrize(
    "failure", [ApiException(status=500, reason="no leader"), ProtocolError("reset")]
)
def test_a_cluster_that_is_away_is_asked_again_later(failure: Exception) -> None:
    with pytest.raises(Unavailable):
        _nodes(api(failure), "", RESOURCE)


def test_a_cluster_that_refuses_is_no_cluster_that_is_away() -> None:
    with pytest.raises(HermesError, match="`list` on nodes") as caught:
        _nodes(api(ApiException(status=403, reason="Forbidden")), "", RESOURCE)
    assert not isinstance(caught.value, Unavailable)
