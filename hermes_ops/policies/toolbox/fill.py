"""Give GPUs to jobs in an order of priority: what most policies do once they have that order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import chain, tee
from operator import attrgetter

from hermes_ops.core.model import Gpu, Grant, Job, JobId, Snapshot
from hermes_ops.core.nodes import NodeCapacity, unplaceable

_GPUS = attrgetter("gpus")

Chooser = Callable[[Job, Collection[int]], tuple[int, ...] | None]
"""Which of the free GPUs (indices) a job gets, ascending; None: it does not fit on these."""


@lru_cache(maxsize=1 << 16)  # a job that stays has the same grant at every decision
def grant(job: JobId, gpus: tuple[int, ...]) -> Grant:
    """Return the grant of these complete GPUs to that job."""
    return Grant(job, gpus)


def lowest(job: Job, free: Collection[int]) -> tuple[int, ...] | None:
    """Choose the free GPUs with the lowest indices, on any node."""
    if job.min_gpus > len(free):
        return None
    return tuple(sorted(free)[: job.min_gpus])


def consolidated(gpus: Iterable[Gpu]) -> Chooser:
    """Choose GPUs on as few nodes as possible, on the fullest node that suffices.

    A job that fits on one node waits for one node; a larger one takes whole nodes and one part.
    Source: Tiresias (NSDI 2019), section 3.3, and the placement "yarn" of its public simulator.
    """
    node_of = {gpu.index: gpu.node for gpu in gpus}
    largest = max(Counter(node_of.values()).values(), default=0)

    def choose(job: Job, free: Collection[int]) -> tuple[int, ...] | None:
        nodes = _by_node(free, node_of)
        enough = [(len(gpus), node) for node, gpus in nodes.items() if len(gpus) >= job.min_gpus]
        if enough:
            return tuple(nodes[min(enough)[1]][: job.min_gpus])
        return None if job.min_gpus <= largest else _over_nodes(job.min_gpus, nodes)

    return choose


def emptiest_first(gpus: Iterable[Gpu]) -> Chooser:
    """Choose GPUs of the node with the most free ones, again and again until there are enough.

    Of equals the node of the lowest index comes first. Source: the placement of Tiresias and
    Optimus in Pollux' public artefact (petuum/adaptdl, commit c793c70).
    """
    node_of = {gpu.index: gpu.node for gpu in gpus}

    def choose(job: Job, free: Collection[int]) -> tuple[int, ...] | None:
        return _over_nodes(job.min_gpus, _by_node(free, node_of))

    return choose


def _by_node(free: Collection[int], node_of: Mapping[int, str]) -> dict[str, list[int]]:
    nodes: dict[str, list[int]] = {}
    for gpu in sorted(free):
        nodes.setdefault(node_of[gpu], []).append(gpu)
    return nodes


def _over_nodes(wanted: int, nodes: Mapping[str, list[int]]) -> tuple[int, ...] | None:
    """Choose GPUs of the nodes with the most free ones, of as few nodes as suffice."""
    chosen: list[int] = []
    for gpus in sorted(nodes.values(), key=lambda gpus: (-len(gpus), gpus)):
        chosen += gpus[: wanted - len(chosen)]
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
    A job that may run on some nodes only starts on those, even if others must be stopped there.
    Of the GPUs of a node, idle ones are taken before those that a stopping job still occupies. A
    job for which `choose` finds no GPUs does not fit: the others are served as if it were absent.
    """
    if choose is lowest:  # it always finds one
        return _filled(snapshot, order, backfill, preempt, choose)[0]
    unplaced: set[JobId] = set()
    while True:
        order, again = tee(order)
        line = _without(again, unplaced, backfill)
        grants, missing = _filled(snapshot, line, backfill, preempt, choose)
        if not missing:
            return grants
        unplaced |= missing  # for good: the others take their GPUs


def _without(order: Iterable[Job], unplaced: Collection[JobId], backfill: bool) -> Iterator[Job]:
    """Yield the order without the `unplaced` jobs; without backfill, stop at the first of them."""
    for job in order:
        if job.id not in unplaced:
            yield job
        elif not backfill:
            return


def _filled(
    snapshot: Snapshot, order: Iterable[Job], backfill: bool, preempt: bool, choose: Chooser
) -> tuple[tuple[Grant, ...], set[JobId]]:
    """Return the grants, and the jobs that fit by number but for which `choose` finds no GPUs."""
    retained = snapshot.retained
    kept = dict(retained) if not preempt else _pinned(snapshot)
    left = len(snapshot.gpus) - sum(map(len, map(_GPUS, kept.values())))
    starts: list[Job] = []
    capacity: NodeCapacity | None = None
    for job in order if left > 0 else ():
        job_id = job.id
        if job_id in kept:
            continue
        stay = retained.get(job_id)
        wanted = job.min_gpus if stay is None else len(stay.gpus)
        if job.nodes and capacity is None:
            capacity = NodeCapacity(snapshot, kept.values())
        if wanted > left or (capacity is not None and not _reserve(capacity, job, stay)):
            if not backfill and ever_fits(snapshot, job):
                break
            continue
        left -= wanted
        if stay is not None:
            kept[job_id] = stay
        else:
            starts.append(job)
        if left == 0:
            break
    started, missing = _started(snapshot, kept, starts, choose, capacity)
    return (*kept.values(), *started), missing


def bound_first(starts: Iterable[Job]) -> list[Job]:
    """Return the jobs bound to some nodes, then the others: these fit on what is left."""
    return sorted(starts, key=lambda job: not job.nodes)


def _pinned(snapshot: Snapshot) -> dict[JobId, Grant]:
    """Return the grants of the jobs that must not be stopped."""
    retained = snapshot.retained
    pinned = [job.id for job in snapshot.holding if not job.preemptible]
    return {job: retained[job] for job in pinned if job in retained}


def _reserve(capacity: NodeCapacity, job: Job, stay: Grant | None) -> bool:
    return capacity.promise(job) if stay is None else capacity.reserve(stay.gpus)


def ever_fits(snapshot: Snapshot, job: Job) -> bool:
    """Return whether the job would fit into the empty pool."""
    return job.min_gpus <= len(snapshot.gpus) and not unplaceable(snapshot, job)


def _started(
    snapshot: Snapshot,
    kept: dict[JobId, Grant],
    starts: list[Job],
    choose: Chooser,
    capacity: NodeCapacity | None,
) -> tuple[list[Grant], set[JobId]]:
    """Return grants for the jobs that start, and the jobs for which the chooser finds no GPUs.

    Where jobs are bound to nodes, only the first of the latter is returned: the GPUs that were
    promised to it may serve the next ones.
    """
    if not starts:
        return [], set()
    free = {gpu.index for gpu in snapshot.gpus}
    free.difference_update(chain.from_iterable(map(_GPUS, kept.values())))
    grants: list[Grant] = []
    unplaced: set[JobId] = set()
    if capacity is not None:
        starts = bound_first(starts)
    for job in starts:
        gpus = choose(job, free if capacity is None else capacity.usable_for(job, free))
        if gpus is None:
            if capacity is None or not unplaced:
                unplaced.add(job.id)
            continue
        gpus = soonest_usable(snapshot, gpus, free)
        free.difference_update(gpus)
        grants.append(grant(job.id, gpus))
    return grants, unplaced


def soonest_usable(
    snapshot: Snapshot,
    chosen: Sequence[int],
    free: Collection[int],
    own: Collection[int] = (),
) -> tuple[int, ...]:
    """Return, ascending, as many GPUs of each node as `chosen` has there, those usable soonest.

    The job's `own` GPUs are preferred: it has to leave them anyway before it can start again. Idle
    GPUs come next, then those that a stopping job still occupies. `free` are the other GPUs that
    may be taken. If all are equally soon, `chosen` is returned.
    """
    idle = snapshot.idle
    if not own and idle.issuperset(chosen):
        return tuple(chosen)
    where, mine = snapshot.node_of, frozenset(own)
    rank = {gpu: (gpu not in mine, gpu not in idle, gpu) for gpu in chain(chosen, free)}
    picked: list[int] = []
    for node, number in Counter(where[gpu] for gpu in chosen).items():
        on_node = [gpu for gpu in rank if where[gpu] == node]
        picked += sorted(on_node, key=rank.__getitem__)[:number]
    return tuple(sorted(picked))
