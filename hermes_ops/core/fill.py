"""Give GPUs to jobs in an order of priority: what most policies do once they have that order."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from functools import lru_cache

from hermes_ops.core.model import Gpu, Grant, Job, JobId, Snapshot

Chooser = Callable[[Job, Collection[int]], tuple[int, ...] | None]
"""Which of the free GPUs (indices) a job gets, ascending; None: it does not fit on these."""


@lru_cache(maxsize=1 << 16)  # a job that stays has the same grant at every decision
def grant(job: JobId, gpus: tuple[int, ...]) -> Grant:
    """The grant of these GPUs, whole, to that job."""
    return Grant(job, gpus)


def lowest(job: Job, free: Collection[int]) -> tuple[int, ...] | None:
    """The free GPUs with the lowest indices, wherever they are."""
    if job.min_gpus > len(free):
        return None
    return tuple(sorted(free)[: job.min_gpus])


def consolidated(gpus: Iterable[Gpu]) -> Chooser:
    """Choose GPUs on as few nodes as possible, on the fullest node that suffices.

    A job that fits on one node waits for one node; a larger one takes whole nodes and one part.
    Source: Tiresias (NSDI 2019), section 3.3, and the placement "yarn" of its public simulator.
    """
    node_of = {gpu.index: gpu.node for gpu in gpus}
    size: dict[str, int] = {}
    for node in node_of.values():
        size[node] = size.get(node, 0) + 1

    def choose(job: Job, free: Collection[int]) -> tuple[int, ...] | None:
        nodes: dict[str, list[int]] = {}
        for gpu in sorted(free):
            nodes.setdefault(node_of[gpu], []).append(gpu)
        enough = [(len(found), node) for node, found in nodes.items() if len(found) >= job.min_gpus]
        if enough:
            return tuple(nodes[min(enough)[1]][: job.min_gpus])
        if job.min_gpus <= max(size.values(), default=0):
            return None
        return _over_nodes(job.min_gpus, sorted(nodes.values(), key=lambda n: (-len(n), n)))

    return choose


def _over_nodes(wanted: int, nodes: list[list[int]]) -> tuple[int, ...] | None:
    """The largest groups of free GPUs, as few of them as suffice."""
    chosen: list[int] = []
    for found in nodes:
        chosen += found[: wanted - len(chosen)]
        if len(chosen) == wanted:
            return tuple(sorted(chosen))
    return None


def fill(
    snapshot: Snapshot,
    order: Iterable[Job],
    *,
    backfill: bool = True,
    preempt: bool = True,
    choose: Chooser = lowest,
) -> tuple[Grant, ...]:
    """Serve the jobs of `order`, first served first, each with `min_gpus` or with what it holds.

    `order` may name holding and queued jobs in any mixture, and may be lazy: it is read no further
    than GPUs last. With `preempt`, holding jobs that the order serves too late lose their GPUs;
    without, and for jobs that are not preemptible, they keep them. Without `backfill` the first
    job that does not fit blocks all queued ones after it. A job that stays keeps its very GPUs.
    """
    held = snapshot.held
    firm = [j for j in snapshot.holding if j.id in held and not (preempt and j.preemptible)]
    left = len(snapshot.gpus) - sum(len(held[job.id]) for job in firm)
    kept = {job.id: held[job.id] for job in firm}
    starts: list[Job] = []
    for job in order:
        if job.id in kept:
            continue
        wanted = len(held[job.id]) if job.id in held else job.min_gpus
        if wanted > left:
            if not backfill and job.min_gpus <= len(snapshot.gpus):
                break
            continue
        left -= wanted
        if job.id in held:
            kept[job.id] = held[job.id]
        else:
            starts.append(job)
        if left == 0:
            break
    return _granted(snapshot, kept, starts, choose)


def _granted(
    snapshot: Snapshot,
    kept: dict[JobId, tuple[int, ...]],
    starts: list[Job],
    choose: Chooser,
) -> tuple[Grant, ...]:
    """Grants for who stays, then for who starts, if the chooser finds GPUs for it."""
    grants = [grant(job, gpus) for job, gpus in kept.items()]
    if starts:
        free = {gpu.index for gpu in snapshot.gpus}
        for gpus in kept.values():
            free.difference_update(gpus)
        for job in starts:
            gpus_or_none = choose(job, free)
            if gpus_or_none is not None:
                free.difference_update(gpus_or_none)
                grants.append(grant(job.id, gpus_or_none))
    return tuple(grants)
