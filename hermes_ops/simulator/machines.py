"""The GPUs of a simulation: which are up, the occupied share of each, the speed of its node."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import accumulate
from math import prod

from hermes_ops.core.model import SHARE_EPS, Gpu


class Machines:
    """Nodes and their GPUs. A failed node keeps its jobs until they are removed.

    `spread_speeds`: by model, the speed of a job on more nodes than its GPUs need.
    """

    def __init__(self, gpus: tuple[Gpu, ...], spread_speeds: Mapping[str, float]) -> None:
        self._gpus = gpus
        self._node = {gpu.index: gpu.node for gpu in gpus}
        self._used = {gpu.index: 0.0 for gpu in gpus}
        self._down: Counter[str] = Counter()
        self._slow: dict[str, list[float]] = {}
        self._spread_speeds = spread_speeds
        sizes = Counter(self._node.values())
        self._most = list(accumulate(sorted(sizes.values(), reverse=True)))  # on the largest nodes
        self.pool = gpus
        """The GPUs that are up."""

    def nodes(self) -> set[str]:
        """Return the names of all nodes."""
        return set(self._node.values())

    def has_room(self, gpus: Iterable[int], share: float) -> bool:
        """Return whether that share of each GPU is free, and each is up."""
        used, node, down = self._used, self._node, self._down
        return all(used[g] + share <= 1.0 + SHARE_EPS and not down[node[g]] for g in gpus)

    def occupy(self, gpus: Iterable[int], share: float) -> None:
        """Occupy that share of each GPU; a negative share releases it."""
        for gpu in gpus:
            self._used[gpu] += share
            if abs(self._used[gpu]) < SHARE_EPS:
                self._used[gpu] = 0.0

    def touches(self, gpus: Iterable[int], node: str) -> bool:
        """Return whether one of the GPUs is on the node."""
        return any(self._node[gpu] == node for gpu in gpus)

    def fail(self, node: str) -> None:
        """Remove the node's GPUs from the pool; failures of one node may overlap."""
        self._down[node] += 1
        self._rebuild()

    def repair(self, node: str) -> None:
        """End one failure of the node."""
        self._down[node] -= 1
        self._rebuild()

    def slow(self, node: str, speed: float) -> None:
        """Slow jobs on the node down to `speed` of their pace; several disturbances multiply."""
        self._slow.setdefault(node, []).append(speed)

    def recover(self, node: str, speed: float) -> None:
        """End one such disturbance."""
        self._slow[node].remove(speed)
        if not self._slow[node]:
            del self._slow[node]

    def placement(self, gpus: Iterable[int]) -> tuple[int, ...]:
        """Return how many of these GPUs are on each node, descending."""
        return tuple(sorted(Counter(self._node[gpu] for gpu in gpus).values(), reverse=True))

    def speed(self, gpus: tuple[int, ...], model: str | None) -> float:
        """Return the speed, in (0, 1], of a job on these GPUs: by slowest node and by placement."""
        if not self._slow and not self._spread_speeds:
            return 1.0
        nodes = {self._node[gpu] for gpu in gpus}
        pace = min((prod(self._slow.get(node, ()), start=1.0) for node in nodes), default=1.0)
        if (
            model is not None
            and model in self._spread_speeds
            and len(nodes) > self._fewest(len(gpus))
        ):
            pace *= self._spread_speeds[model]
        return pace

    def _fewest(self, gpus: int) -> int:
        """Return the least number of nodes that have that many GPUs."""
        return min(bisect_left(self._most, gpus) + 1, len(self._most))

    def _rebuild(self) -> None:
        self.pool = tuple(gpu for gpu in self._gpus if not self._down[gpu.node])
