"""How many GPUs a cluster can give to pods, and the number of slots that follows it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from hermes_ops.errors import HermesError, Unavailable
from hermes_ops.kubernetes.access import connect

RESOURCE = "nvidia.com/gpu"
REQUEST_TIMEOUT_S = 20.0


@dataclass(frozen=True, slots=True)
class Node:
    """One node as far as GPUs go; `gpus` is what its device plugin says is healthy."""

    name: str
    gpus: int
    ready: bool = True
    cordoned: bool = False


def allocatable(nodes: Iterable[Node]) -> int:
    """The GPUs of nodes that are ready and take pods."""
    return sum(n.gpus for n in nodes if n.ready and not n.cordoned)


@dataclass(slots=True)
class Slots:
    """The number of slots: up at once, down only when it has stayed lower for `settle_s`.

    A node that is away for a moment would otherwise have trials preempted that run well elsewhere.
    After a wait the pool falls to the greatest number seen meanwhile, not to the last one.
    """

    settle_s: float
    now: int | None = None
    _lower: tuple[float, int] | None = None

    def follow(self, gpus: int, time_s: float) -> int:
        """Return the slots to have at `time_s`, with that many GPUs seen."""
        if self.now is None or gpus >= self.now:
            self.now, self._lower = gpus, None
            return gpus
        since_s, most = self._lower or (time_s, gpus)
        self._lower = (since_s, max(most, gpus))
        if time_s - since_s >= self.settle_s:
            self.now, self._lower = self._lower[1], None
        return self.now


def reader(
    selector: str = "", resource: str = RESOURCE, context: str | None = None
) -> Callable[[], tuple[Node, ...]]:
    """Return what reads the nodes: in a pod by its service account, else by KUBECONFIG.

    Raises HermesError where there is neither; the reader raises Unavailable when the cluster does
    not answer, HermesError when it refuses.
    """
    api = connect(context)
    return lambda: _nodes(api, selector, resource)


def _nodes(api: Any, selector: str, resource: str) -> tuple[Node, ...]:  # noqa: ANN401 - the client's own
    from kubernetes.client.exceptions import ApiException
    from urllib3.exceptions import HTTPError

    try:
        # Version 0: the answer comes from the API server's cache, whatever the size of the cluster.
        found = api.list_node(
            label_selector=selector, resource_version="0", _request_timeout=REQUEST_TIMEOUT_S
        )
    except ApiException as error:
        if error.status in (401, 403):
            raise HermesError(
                f"the cluster does not let us list nodes ({error.reason}): give the service "
                "account `list` on nodes."
            ) from error
        raise Unavailable(f"the cluster did not answer: {error.reason}") from error
    except HTTPError as error:
        raise Unavailable(f"the cluster did not answer: {error}") from error
    return tuple(_node(item, resource) for item in found.items)


def _node(item: Any, resource: str) -> Node:  # noqa: ANN401 - the client's own
    ready = [c.status for c in item.status.conditions or () if c.type == "Ready"]
    gpus = (item.status.allocatable or {}).get(resource, "0")
    return Node(item.metadata.name, int(gpus), ready == ["True"], bool(item.spec.unschedulable))
