"""Jobs that may run on some nodes only, because their checkpoints are on those nodes' disks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable

from hermes_ops.core.model import Grant, Job, JobId, Snapshot


def on_allowed_node(snapshot: Snapshot, job: Job, gpus: Iterable[int]) -> bool:
    """Return whether these GPUs are all of one node on which the job may run."""
    if not job.nodes:
        return True
    nodes = {snapshot.node_of.get(gpu, "") for gpu in gpus}
    return len(nodes) == 1 and nodes.issubset(job.nodes)


def usable(snapshot: Snapshot, job: Job, free: Collection[int]) -> Collection[int]:
    """Return the free GPUs that the job may take together: all, or those of one of its nodes.

    That is the node with the most of them; ties go to the first by name.
    """
    if not job.nodes:
        return free
    groups: dict[str, set[int]] = {node: set() for node in sorted(job.nodes)}
    where = snapshot.node_of
    for gpu in free:
        if where[gpu] in groups:
            groups[where[gpu]].add(gpu)
    return max(groups.values(), key=len)


def unplaceable(snapshot: Snapshot, job: Job) -> bool:
    """Return whether no node on which the job may run has as many GPUs as it needs."""
    return bool(job.nodes) and job.min_gpus > len(usable(snapshot, job, snapshot.node_of.keys()))


class NodeCapacity:
    """The number of GPUs left on each node while jobs are served one after the other.

    A job that may run on some nodes only is promised GPUs of one of them. A promise moves to
    another of the job's nodes where that makes room, so no job of one GPU is refused if some
    distribution over the nodes serves it. Jobs that may run anywhere are not counted: they fit on
    what is left as long as the pool has enough GPUs.
    """

    def __init__(self, snapshot: Snapshot, kept: Iterable[Grant] = ()) -> None:
        self._node_of = snapshot.node_of
        self._left = Counter(self._node_of.values())
        self._promised: dict[JobId, str] = {}
        self._movable: dict[str, dict[JobId, Job]] = {node: {} for node in self._left}
        for grant in kept:
            self._left.subtract(self._node_of[gpu] for gpu in grant.gpus)

    def reserve(self, gpus: Iterable[int]) -> bool:
        """Reserve these GPUs for the job that holds them; False if they are promised to others."""
        wanted = Counter(self._node_of[gpu] for gpu in gpus)
        seen = set(wanted)
        for node, number in wanted.items():
            self._make_room(node, number, seen)
        if any(self._left[node] < number for node, number in wanted.items()):
            return False
        self._left.subtract(wanted)
        return True

    def promise(self, job: Job) -> bool:
        """Promise GPUs to a job that starts; return False if none of its nodes has enough."""
        if not job.nodes:
            return True
        allowed = self._movable.keys() & set(job.nodes)
        for node in sorted(allowed, key=lambda n: (-self._left[n], n)):
            if self._make_room(node, job.min_gpus, {node}):
                self._put(job, node)
                return True
        return False

    def usable_for(self, job: Job, free: Collection[int]) -> Collection[int]:
        """Return the free GPUs on which a job with a promise may start."""
        if not job.nodes:
            return free
        node = self._promised[job.id]
        return {gpu for gpu in free if self._node_of[gpu] == node}

    def _put(self, job: Job, node: str) -> None:
        self._left[node] -= job.min_gpus
        self._promised[job.id] = node
        if len(job.nodes) > 1:
            self._movable[node][job.id] = job

    def _make_room(self, node: str, number: int, seen: set[str]) -> bool:
        """Move promises off the node until `number` GPUs are left there; False if that fails."""
        for job in list(self._movable[node].values()):
            if self._left[node] >= number:
                break
            self._move(job, node, seen)
        return self._left[node] >= number

    def _move(self, job: Job, node: str, seen: set[str]) -> None:
        for other in sorted(self._movable.keys() & set(job.nodes) - seen):
            seen.add(other)
            if self._make_room(other, job.min_gpus, seen):
                del self._movable[node][job.id]
                self._left[node] += job.min_gpus
                self._put(job, other)
                return
