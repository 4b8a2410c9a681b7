"""Place sizes so that each job is on as few nodes as possible, moving small jobs if need be."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from hermes_ops.core.model import Gpu, Grant, Job, JobId
from hermes_ops.core.order import submission
from hermes_ops.policies.toolbox.sized_grants import SizingProblem


def node_size(problem: SizingProblem) -> int:
    """Return the number of GPUs of most nodes, of two such numbers the larger; 1 without any."""
    per_node = Counter(problem.snapshot.node_of.values())
    frequent = Counter(per_node.values())
    return max(frequent, key=lambda size: (frequent[size], size), default=1)


def packing_sizes(job: Job, most: int, each: int) -> tuple[int, ...]:
    """Return the job's sizes up to `most` that pack well: below `each` any, then whole nodes.

    All of its sizes if none of them does.
    """
    sizes = job.sizes_up_to(most)
    return tuple(n for n in sizes if n < each or n % each == 0) or tuple(sizes)


def cleared(problem: SizingProblem, sizes: Mapping[JobId, int]) -> frozenset[JobId]:
    """Return the jobs that keep their size and have to move, so that larger ones get whole nodes.

    A job of at least a node's GPUs that is to be placed needs whole nodes. While too few are free,
    the node with the fewest busy GPUs is cleared, of two the one with the lowest GPU. A node with
    GPUs of a job on several nodes, or of one that must not be stopped, is not cleared.
    Our own: Pollux' artefact (petuum/adaptdl, commit c793c70) searches placements as well.
    """
    retained = problem.snapshot.retained
    kept = [job for job in problem.jobs if _keeps(problem, job, sizes)]
    each = node_size(problem)
    staying = {job.id for job in kept}
    placed = (sizes.get(job.id, 0) for job in problem.jobs if job.id not in staying)
    wanted = sum(size // each for size in placed)
    busy = _Busy(problem, kept)
    moved: set[JobId] = set()
    lacking = wanted - busy.free_nodes()
    for node in busy.by_load() if lacking > 0 else ():
        if lacking <= 0:
            break
        moved.update(busy.jobs[node])
        lacking -= 1
    return frozenset(job for job in moved if job in retained)


def _keeps(problem: SizingProblem, job: Job, sizes: Mapping[JobId, int]) -> bool:
    held = problem.held(job)
    return held > 0 and held == sizes.get(job.id, 0)


class _Busy:
    """The jobs on each node that would stay there."""

    def __init__(self, problem: SizingProblem, kept: Sequence[Job]) -> None:
        snapshot = problem.snapshot
        where = snapshot.node_of
        self.jobs: dict[str, list[JobId]] = {node: [] for node in where.values()}
        self._load: Counter[str] = Counter()
        self._first = {where[gpu.index]: gpu.index for gpu in reversed(_by_index(problem))}
        self._fixed: set[str] = set()
        for grant in problem.fixed:
            self._occupy(where, grant)
            self._fixed.update(where[gpu] for gpu in grant.gpus)
        for job in sorted(kept, key=submission):
            grant = snapshot.retained[job.id]
            self._occupy(where, grant)
            nodes = {where[gpu] for gpu in grant.gpus}
            if len(nodes) > 1:
                self._fixed.update(nodes)
            for node in nodes:
                self.jobs[node].append(job.id)
        each = node_size(problem)
        sizes = Counter(where.values())
        self._whole = {node for node, size in sizes.items() if size >= each}
        self._each = each

    def free_nodes(self) -> int:
        """Return the number of whole nodes on which nothing stays."""
        return sum(not self._load[node] for node in self._whole)

    def by_load(self) -> list[str]:
        """Return the whole nodes that may be cleared, those with the fewest busy GPUs first."""
        able = (node for node in self._whole - self._fixed if 0 < self._load[node] < self._each)
        return sorted(able, key=lambda node: (self._load[node], self._first[node]))

    def _occupy(self, where: Mapping[int, str], grant: Grant) -> None:
        self._load.update(where[gpu] for gpu in grant.gpus)


def _by_index(problem: SizingProblem) -> list[Gpu]:
    return sorted(problem.snapshot.gpus, key=lambda gpu: gpu.index)
