"""The sizes that pack well, and their placement on as few nodes as possible, moving small jobs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache

from hermes_ops.core.model import Grant, Job, JobId
from hermes_ops.core.order import submission
from hermes_ops.policies.toolbox.sized_grants import FreeNodes, Placing, SizingProblem


def packing_sizes(job: Job, most: int, each: int) -> tuple[int, ...]:
    """Return the job's sizes up to `most` that pack well: below `each` any, then whole nodes.

    All of its sizes if none of them does.
    """
    return _packing_sizes(job.min_gpus, min(most, job.max_gpus), job.sizes, most, each)


@lru_cache(maxsize=1 << 12)  # jobs share their ranges of sizes
def _packing_sizes(
    least: int, largest: int, listed: tuple[int, ...], most: int, each: int
) -> tuple[int, ...]:
    able = [size for size in listed if size <= most] if listed else range(least, largest + 1)
    return tuple(n for n in able if n < each or n % each == 0) or tuple(able)


def cleared(problem: SizingProblem, sizes: Mapping[JobId, int]) -> frozenset[JobId]:
    """Return the jobs that keep their size and have to move, so that larger ones get whole nodes.

    A job of at least a node's GPUs that is to be placed needs whole nodes. While too few are free,
    the node with the fewest busy GPUs is cleared, of two the one with the lowest GPU. A node with
    GPUs of a job on several nodes, or of one that must not be stopped, is not cleared.
    Our own: Pollux' artefact (petuum/adaptdl, commit c793c70) searches placements as well.
    """
    retained = problem.snapshot.retained
    index, each = problem.snapshot.index, problem.gpus_a_node
    staying = {job for job, now in retained.items() if sizes.get(job) == len(now.gpus)}
    kept = [index[job] for job in staying]
    wanted = sum(size // each for job, size in sizes.items() if job not in staying)
    busy = _Busy(problem, kept)
    moved: set[JobId] = set()
    lacking = wanted - busy.free_nodes()
    for node in busy.by_load() if lacking > 0 else ():
        if lacking <= 0:
            break
        moved.update(busy.jobs[node])
        lacking -= 1
    return frozenset(job for job in moved if job in retained)


def packing(problem: SizingProblem, order: Sequence[Job]) -> Placing:
    """Return the placing on as few nodes as possible, or of fewer GPUs; `order` of equal sizes.

    Whole nodes are the first free ones. Fewer GPUs than a node has are of the node with the fewest
    free ones that has room, of two the last. A job for which there is no room gets its largest size
    for which there is, on the node with the most free GPUs, of two the first; none: no GPU. A size
    that cannot be packed in this pool is spread as PACKED does.
    Source: the bin packing is the textbook's best fit; which of equal nodes is our choice.
    """
    each, place = problem.gpus_a_node, {job.id: rank for rank, job in enumerate(order)}
    whole = sum(size >= each for size in Counter(problem.snapshot.node_of.values()).values())

    def choose(nodes: FreeNodes, job: Job, number: int) -> tuple[int, ...] | None:
        if number > each and (number % each or number > whole * each):
            return nodes.pack(number, job.nodes)
        free = {n: gpus for n, gpus in nodes.free.items() if not job.nodes or n in job.nodes}
        if number >= each:
            empty = [node for node, gpus in free.items() if len(gpus) >= each]
            if len(empty) * each >= number:
                return nodes.first(number, empty)
        fitting = [node for node, gpus in free.items() if len(gpus) >= number]
        if fitting:
            return nodes.first(number, [min(fitting, key=lambda n: (len(free[n]), -free[n][0]))])
        room = max(map(len, free.values()), default=0)
        fewer = max((size for size in job.sizes_up_to(min(room, number))), default=0)
        roomy = next((node for node, gpus in free.items() if len(gpus) == room), "")
        return nodes.first(fewer, [roomy]) if fewer else None

    return Placing(lambda job, size: (-size, place.get(job.id, 0)), choose)


class _Busy:
    """The jobs on each node that would stay there."""

    def __init__(self, problem: SizingProblem, kept: Sequence[Job]) -> None:
        snapshot = problem.snapshot
        where = snapshot.node_of
        self.jobs: dict[str, list[JobId]] = {node: [] for node in where.values()}
        self._load: Counter[str] = Counter()
        gpus = sorted(snapshot.gpus, key=lambda gpu: gpu.index, reverse=True)
        self._first = {where[gpu.index]: gpu.index for gpu in gpus}
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
        self._each = each = problem.gpus_a_node
        self._whole_nodes = {node for node, size in Counter(where.values()).items() if size >= each}

    def free_nodes(self) -> int:
        """Return the number of whole nodes on which nothing stays."""
        return sum(not self._load[node] for node in self._whole_nodes)

    def by_load(self) -> list[str]:
        """Return the whole nodes that may be cleared, those with the fewest busy GPUs first."""
        able = (
            node for node in self._whole_nodes - self._fixed if 0 < self._load[node] < self._each
        )
        return sorted(able, key=lambda node: (self._load[node], self._first[node]))

    def _occupy(self, where: Mapping[int, str], grant: Grant) -> None:
        self._load.update(where[gpu] for gpu in grant.gpus)


def size_options(job: Job, limit: int, each: int, held: int) -> tuple[int, ...]:
    """Return the sizes that pack well, the one that is held, and the least one.

    `limit`: at most so many; `each`: the GPUs of a node. Of a job that is bound to a node those
    that fit there.
    """
    most = min(limit, each) if job.nodes else limit
    always = (n for n in (held, job.min_gpus) if 0 < n <= most and job.takes(n))
    return tuple(sorted({*packing_sizes(job, most, each), *always}))
