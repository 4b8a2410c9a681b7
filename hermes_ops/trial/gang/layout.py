"""Which workers of a trial are on which node, and where the nodes find the first one."""

from __future__ import annotations

import re
from typing import NamedTuple

STORE_PORT = 29400
"""Port of the store on the first node: a pod has a network of its own."""

_MASTER, _FIRST_TASK = 1, 10  # beyond the store's

_NODE = re.compile(r"(?P<host>[A-Za-z0-9][A-Za-z0-9.-]*)=(?P<workers>[1-9][0-9]*)")


class GangNode(NamedTuple):
    """A node: the name by which the others find it, and how many workers it has."""

    host: str
    workers: int


class RankPlace(NamedTuple):
    """Where a worker is: its node, its local rank there, and its cross rank.

    The cross rank is the rank among the workers of all nodes that have the same local rank.
    """

    node: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int


class Gang(NamedTuple):
    """The nodes of a trial, of which this is number `node`; the first one leads.

    Ranks count the workers of the first node, then those of the second, and so on. `port` is that
    of the store on the first node.
    """

    nodes: tuple[GangNode, ...]
    node: int
    port: int = STORE_PORT

    @classmethod
    def parse(cls, text: str, node: int, port: int = STORE_PORT) -> Gang:
        """Return the gang that `HOST=WORKERS,HOST=WORKERS` describes.

        Raises: ValueError for another form, fewer than two nodes, or a node that is not among them.
        """
        matches = [_NODE.fullmatch(part) for part in text.split(",")]
        nodes = tuple(GangNode(m["host"], int(m["workers"])) for m in matches if m is not None)
        if len(nodes) < len(matches) or len(nodes) < 2:
            raise ValueError(f"{text!r} is not HOST=WORKERS,HOST=WORKERS, of two nodes or more")
        if not 0 <= node < len(nodes):
            raise ValueError(f"there is no node {node}: they count from 0 to {len(nodes) - 1}")
        return cls(nodes, node, port)

    @property
    def is_leader(self) -> bool:
        """Tell whether this node leads."""
        return self.node == 0

    @property
    def master_port(self) -> int:
        """Return the port on which rank 0 may listen."""
        return self.port + _MASTER

    def task_port(self, rank: int) -> int:
        """Return the port of a worker on its node, for TF_CONFIG."""
        return self.port + _FIRST_TASK + self.place(rank).local_rank

    @property
    def size(self) -> int:
        """Return the number of workers on all nodes."""
        return sum(node.workers for node in self.nodes)

    def ranks(self, node: int) -> range:
        """Return the ranks of the workers on a node."""
        first = sum(other.workers for other in self.nodes[:node])
        return range(first, first + self.nodes[node].workers)

    def place(self, rank: int) -> RankPlace:
        """Return where the worker of a rank is."""
        node = next(n for n in range(len(self.nodes)) if rank in self.ranks(n))
        local_rank = rank - self.ranks(node).start
        alike = [n for n, other in enumerate(self.nodes) if other.workers > local_rank]
        return RankPlace(node, local_rank, self.nodes[node].workers, alike.index(node), len(alike))

    def scopes(self) -> dict[str, int]:
        """Return how many workers meet in each scope of Horovod's rendezvous."""
        local = {f"local_{scope_name(n)}": node.workers for n, node in enumerate(self.nodes)}
        most = max(node.workers for node in self.nodes)
        cross = {f"cross_{k}": sum(node.workers > k for node in self.nodes) for k in range(most)}
        return {"global": self.size, **local, **cross}


def scope_name(node: int) -> str:
    """Return the name by which Horovod tells the nodes apart; it resolves nothing by it."""
    return f"node-{node}"
