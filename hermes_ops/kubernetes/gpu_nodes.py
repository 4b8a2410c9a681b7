"""The GPUs of a cluster's nodes, as the slots of a pool."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hermes_ops.errors import HermesError, Unavailable
from hermes_ops.kubernetes.api import (
    Forbidden,
    Plain,
    answer_text,
    connect,
    selector_of,
    translate_errors,
)
from hermes_ops.kubernetes.template import MANAGED, RESOURCE

NODES_TIMEOUT_S = 20.0


LEAVING = frozenset(
    {
        "ToBeDeletedByClusterAutoscaler",
        "karpenter.sh/disrupted",
        "karpenter.sh/disruption",
        "cloud.google.com/impending-node-termination",
        "aws-node-termination-handler/spot-itn",
        "aws-node-termination-handler/scheduled-maintenance",
        "aws-node-termination-handler/asg-lifecycle-termination",
        "aws-node-termination-handler/rebalance-recommendation",
        "node.kubernetes.io/out-of-service",
    }
)
"""Taints of a node that an autoscaler or its provider is about to take away."""

UNDER_PRESSURE = frozenset(
    {
        "node.kubernetes.io/disk-pressure",
        "node.kubernetes.io/pid-pressure",
        "node.kubernetes.io/network-unavailable",
        "node.cloudprovider.kubernetes.io/shutdown",
        "node.cloudprovider.kubernetes.io/uninitialized",
    }
)
"""Taints of a node that takes no pods for a while, as one that is not ready."""

HARD_EFFECTS = ("NoSchedule", "NoExecute")
"""Effects of taints that keep pods away; `PreferNoSchedule` does not."""


@dataclass(frozen=True, slots=True)
class GpuNode:
    """The GPUs of a node: `gpus` counts those that its device plugin reports as healthy.

    `cordoned` is True for a node that a person or an autoscaler is to empty. `held` counts the GPUs
    that trials' pods hold there, of a node that takes no pods.
    """

    name: str
    gpus: int
    ready: bool = True
    cordoned: bool = False
    held: int = 0

    @property
    def takes_pods(self) -> bool:
        """True while new pods may be placed there."""
        return self.ready and not self.cordoned

    @property
    def slots(self) -> int:
        """The slots for its GPUs: those that it can give, or that are still held there.

        A trial on a cordoned node trains on. Without its GPUs the pool would have fewer slots than
        are in use, and trials on other nodes would be preempted for GPUs that nobody could use.
        """
        return self.gpus if self.takes_pods else self.held


def allocatable(nodes: Iterable[GpuNode]) -> int:
    """Return the number of GPUs of the nodes that take pods, and of those held on other nodes."""
    return sum(node.slots for node in nodes)


@dataclass(slots=True)
class SettledSlots:
    """The number of slots: raised at once, lowered when it has stayed lower for `settle_s`.

    Otherwise a node that is away for a moment would preempt trials that run on other nodes.
    After a wait the pool falls to the greatest number seen meanwhile, not to the last one.
    What a cordoned node gives up is gone at once: a trial that got that slot would find no GPU.
    """

    settle_s: float
    now: int | None = None
    _lower: tuple[float, int] | None = None
    _slots: Mapping[str, int] = field(default_factory=dict)  # of each node, as last seen

    def follow(self, nodes: Sequence[GpuNode], time_s: float) -> int:
        """Return the slots to have at `time_s`, with these nodes."""
        gpus, given_up = allocatable(nodes), self._given_up(nodes)
        self._slots = {node.name: node.slots for node in nodes}
        if self.now is None or gpus >= self.now - given_up:
            self.now, self._lower = gpus, None
            return gpus
        self.now -= given_up
        since_s, most = self._lower or (time_s, gpus)
        self._lower = (since_s, max(most - given_up, gpus))
        if time_s - since_s >= self.settle_s:
            self.now, self._lower = self._lower[1], None
        return self.now

    def _given_up(self, nodes: Iterable[GpuNode]) -> int:
        """Return the slots that nodes which are cordoned now had when they were last seen."""
        cordoned = (node for node in nodes if node.cordoned)
        return sum(max(0, self._slots.get(node.name, 0) - node.slots) for node in cordoned)


def node_reader(
    selector: str = "",
    resource: str = RESOURCE,
    context: str | None = None,
    namespace: str | None = None,
) -> Callable[[], tuple[GpuNode, ...]]:
    """Return a function that reads the nodes: in a pod by service account, else by KUBECONFIG.

    With a namespace of trials' pods it counts the GPUs that they hold on nodes that take no pods.
    Raise HermesError where there is no cluster. The function raises Unavailable when the cluster
    does not answer, HermesError when it refuses.
    """
    api = connect(context)

    def read() -> tuple[GpuNode, ...]:
        nodes = _nodes(api, selector, resource)
        if namespace is None or all(node.takes_pods for node in nodes):
            return nodes
        held = _held(api, namespace, resource)
        return tuple(n if n.takes_pods else replace(n, held=held[n.name]) for n in nodes)

    return read


def held_reader(
    namespace: str, resource: str = RESOURCE, context: str | None = None
) -> Callable[[], Mapping[str, int]]:
    """Return a function that reads the GPUs that trials' pods hold, by node; errors as above."""
    api = connect(context)
    return lambda: _held(api, namespace, resource)


def _held(api: Any, namespace: str, resource: str) -> Counter[str]:  # noqa: ANN401 - the client's own
    """Return the GPUs that trials' pods hold, by node: until their containers have ended."""
    try:
        with translate_errors("list pods"):
            answer = api.list_namespaced_pod(
                namespace,
                label_selector=selector_of(MANAGED),
                resource_version="0",
                _preload_content=False,
                _request_timeout=NODES_TIMEOUT_S,
            )
    except Forbidden as error:
        raise HermesError(
            f"{error}. Give the service account `list` on pods in the namespace {namespace}."
        ) from None
    held: Counter[str] = Counter()
    for pod in json.loads(answer.data)["items"]:
        if (pod.get("status") or {}).get("phase") not in ("Succeeded", "Failed"):
            held[pod["spec"].get("nodeName") or ""] += _gpus_of(pod["spec"], resource)
    return held


def _gpus_of(spec: Plain, resource: str) -> int:
    limits = ((c.get("resources") or {}).get("limits") or {} for c in spec["containers"])
    return sum(_whole(of_container.get(resource)) for of_container in limits)


def _whole(quantity: str | None) -> int:
    """Return a number of devices; a resource that is no device may have thousandths."""
    from kubernetes.utils.quantity import parse_quantity

    return int(parse_quantity(quantity or "0"))


def _nodes(api: Any, selector: str, resource: str) -> tuple[GpuNode, ...]:  # noqa: ANN401 - the client's own
    from kubernetes.client.exceptions import ApiException
    from urllib3.exceptions import HTTPError

    try:
        # Version 0: the answer comes from the API server's cache, whatever the size of the cluster.
        answer = api.list_node(
            label_selector=selector, resource_version="0", _request_timeout=NODES_TIMEOUT_S
        )
    except ApiException as error:
        if error.status in (401, 403):
            raise HermesError(
                f"the cluster does not let us list nodes ({error.reason}): give the service "
                "account `list` on nodes."
            ) from None
        if error.status == 400:
            raise HermesError(
                f"the cluster does not understand the selector {selector!r} of nodes "
                f"({answer_text(error, tuple)}): write labels, such as gpu=a100."
            ) from None
        raise Unavailable(f"the cluster did not answer: {error.reason}") from None
    except HTTPError as error:
        raise Unavailable(f"the cluster did not answer: {error}") from error
    return tuple(_node(item, resource) for item in answer.items)


def _node(item: Any, resource: str) -> GpuNode:  # noqa: ANN401 - the client's own
    ready = [c.status for c in item.status.conditions or () if c.type == "Ready"]
    gpus = _whole((item.status.allocatable or {}).get(resource))
    taints = {taint.key for taint in item.spec.taints or () if taint.effect in HARD_EFFECTS}
    return GpuNode(
        item.metadata.name,
        gpus,
        ready == ["True"] and not taints & UNDER_PRESSURE,
        bool(item.spec.unschedulable or taints & LEAVING),
    )
