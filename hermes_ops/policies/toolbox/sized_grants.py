"""Turn numbers of GPUs into grants: who keeps its size keeps its GPUs, the others are packed."""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from itertools import chain
from operator import attrgetter

from hermes_ops.core.model import Grant, Job, JobId, Phase, Plan, Reason, Snapshot
from hermes_ops.core.nodes import usable
from hermes_ops.core.order import by_submission, submission
from hermes_ops.policies.toolbox.answer import answer
from hermes_ops.policies.toolbox.fill import soonest_usable

Sizes = Mapping[JobId, int]
Batches = Mapping[JobId, int | None]
_NO_BATCHES: Batches = {}
_NO_NODES: Mapping[JobId, int] = {}


@dataclass(frozen=True, slots=True)
class SizingProblem:
    """The problem of a policy that sizes jobs: `jobs`, by submission, on `gpus` GPUs.

    `fixed` are the grants of running jobs that must not be changed; their GPUs are not counted.
    A job that is stopping and will wait (it is resized, for example) gets a size, but no grant yet:
    nobody else grows into its GPUs, only to shrink again when it waits.
    `gpus_a_node` is the number of GPUs of most nodes, of two such numbers the larger; 1
    without any.
    """

    snapshot: Snapshot
    fixed: tuple[Grant, ...]
    jobs: tuple[Job, ...]
    gpus: int
    gpus_a_node: int = 1

    @classmethod
    def from_snapshot(cls, snapshot: Snapshot) -> SizingProblem:
        """Return the problem of this snapshot; jobs that cannot fit now are left out.

        A job that may run on some nodes only has the sizes that fit on one of them.
        """
        retained = snapshot.retained
        pinned = [j.id for j in snapshot.holding if not j.preemptible and j.id in retained]
        fixed = tuple(retained[job] for job in pinned)
        gpus = len(snapshot.gpus) - sum(len(grant.gpus) for grant in fixed)
        without = set(pinned)
        stopping = (j for j in snapshot.others if j.phase is Phase.STOPPING and j.resumes)
        jobs = (j for j in chain(snapshot.holding, snapshot.queue, stopping) if j.id not in without)
        taken = set(chain.from_iterable(grant.gpus for grant in fixed))
        bounded = (_on_its_nodes(snapshot, j, taken) if j.nodes else j for j in jobs)
        fitting = (j for j in bounded if j is not None and j.min_gpus <= gpus)
        ordered = tuple(by_submission(fitting))
        return cls(snapshot, fixed, ordered, gpus, _gpus_a_node(snapshot))

    def held(self, job: Job) -> int:
        """Return the number of GPUs that the job can keep."""
        return len(self.snapshot.held.get(job.id, ()))

    def grants(
        self,
        sizes: Sizes,
        batches: Batches = _NO_BATCHES,
        placing: Placing | None = None,
        moving: Collection[JobId] = (),
        nodes_wanted: Mapping[JobId, int] = _NO_NODES,
    ) -> tuple[Grant, ...]:
        """Return the grants of these sizes, whose sum must not exceed `gpus`; 0 is no grant.

        A job whose size and batch stay keeps its GPUs. The others are placed in the order and by
        the choice of `placing`, PACKED if it is not given, which may be fewer GPUs. A job that may
        run on some nodes only comes first; if it fits on none, it gets nothing. The jobs of
        `moving` are placed as well, although their size stays. One of `nodes_wanted` is spread
        evenly over so many nodes, if these have room. Running jobs without a grant keep GPUs that
        nobody gets.
        """
        placing = PACKED if placing is None else placing
        nodes = FreeNodes(self.snapshot)
        kept: list[Grant] = []
        moved: list[Job] = []
        for job in self.jobs:
            size, now = sizes.get(job.id, 0), self.snapshot.retained.get(job.id)
            stays = now is not None and _stays(now, size, batches.get(job.id))
            if size and now is not None and stays and job.id not in moving:
                kept.append(now)
            elif size and job.phase is not Phase.STOPPING:
                moved.append(job)
        for grant in chain(self.fixed, kept):
            nodes.take(grant.gpus)
        placed = []
        rank = placing.rank
        for job in sorted(moved, key=lambda j: (not j.nodes, rank(j, sizes[j.id]), submission(j))):
            gpus = nodes.evenly(sizes[job.id], nodes_wanted.get(job.id, 1))
            gpus = gpus or placing.choose(nodes, job, sizes[job.id])
            if gpus is not None:
                gpus = nodes.exchange(gpus, self.snapshot.held.get(job.id, ()))
                placed.append(Grant(job.id, gpus, batch=batches.get(job.id)))
        placed += self._idle(nodes, {grant.job for grant in (*kept, *placed)})
        return (*self.fixed, *kept, *placed)

    def solve_sizes(self, solve: Callable[[SizingProblem], dict[JobId, int]]) -> dict[JobId, int]:
        """Return the sizes by `solve` at which each job can be placed.

        A job that is bound to some nodes cannot be placed if others take their GPUs. `solve` is
        then called again for a problem in which such jobs have smaller sizes only (`narrowed`).
        """
        problem: SizingProblem | None = self
        sizes: dict[JobId, int] = {}
        while problem is not None:
            sizes = solve(problem)
            problem = problem.narrowed(sizes)
        return sizes

    def solve_grants(self, solve: Solve) -> tuple[Grant, ...]:
        """Return the grants for the sizes and batches by `solve`, found as in `solve_sizes`."""
        problem: SizingProblem | None = self
        grants: tuple[Grant, ...] = ()
        while problem is not None:
            sizes, batches = solve(problem)
            grants = self.grants(sizes, batches)
            problem = problem.narrowed(sizes, batches)
        return grants

    def narrowed(self, sizes: Sizes, batches: Batches = _NO_BATCHES) -> SizingProblem | None:
        """Return the problem in which jobs that cannot be placed at these sizes have smaller ones.

        Jobs without a smaller size are left out. Return None if all jobs can be placed.
        """
        missing = self._unplaced(sizes, batches)
        if not missing:
            return None
        smaller = (_at_most(j, sizes[j.id] - 1) if j.id in missing else j for j in self.jobs)
        return replace(self, jobs=tuple(job for job in smaller if job is not None))

    def _unplaced(self, sizes: Sizes, batches: Batches) -> set[JobId]:
        """Return the jobs bound to some nodes that cannot be placed there at these sizes."""
        bound = {j.id for j in self.jobs if j.nodes and j.phase is not Phase.STOPPING}
        sized = {job for job in bound if sizes.get(job)}
        return sized - {grant.job for grant in self.grants(sizes, batches)} if sized else set()

    def _idle(self, nodes: FreeNodes, granted: set[JobId]) -> Iterator[Grant]:
        """Yield the grants of running jobs without a new grant whose GPUs no other job gets."""
        for job in self.jobs:
            now = self.snapshot.retained.get(job.id)
            if now is not None and job.id not in granted and nodes.has(now.gpus):
                nodes.take(now.gpus)
                yield now

    def plan(
        self,
        grants: tuple[Grant, ...],
        explain: Callable[[Job, bool], Reason],
        order: Iterable[Job] | None = None,
        review_at_s: float | None = None,
    ) -> Plan:
        """Return the plan; `order` ranks the waiting jobs, by submission if it is not given."""
        ranked = self.snapshot.queue if order is None else order
        return answer(self.snapshot, grants, ranked, explain, review_at_s)


Solve = Callable[[SizingProblem], tuple[Sizes, Batches]]
"""Return the sizes and batches of the jobs of a problem, each a size that the job has in it."""


def _on_its_nodes(snapshot: Snapshot, job: Job, taken: Collection[int]) -> Job | None:
    """Return the job with the sizes that fit on one of its nodes; None if no size fits.

    `taken` GPUs are not counted. The job may keep the number of GPUs that it holds.
    """
    free = snapshot.node_of.keys() - taken
    return _at_most(job, max(len(usable(snapshot, job, free)), len(snapshot.held.get(job.id, ()))))


def _at_most(job: Job, most: int) -> Job | None:
    """Return the job without the sizes above `most`; None if no size is left."""
    sizes = job.sizes_up_to(most)
    if not sizes or sizes[-1] == job.max_gpus:
        return job if sizes else None
    return replace(job, max_gpus=sizes[-1], sizes=tuple(sizes) if job.sizes else ())


def _gpus_a_node(snapshot: Snapshot) -> int:
    frequent = Counter(Counter(snapshot.node_of.values()).values())
    return max(frequent, key=lambda size: (frequent[size], size), default=1)


def _stays(now: Grant, size: int, batch: int | None) -> bool:
    return len(now.gpus) == size and batch in (None, now.batch)


@dataclass(slots=True)
class FreeNodes:
    """The free GPUs of each node, ascending."""

    snapshot: Snapshot
    free: dict[str, list[int]] = field(init=False)
    _with_room: list[list[str]] = field(init=False)  # heaps by number of free GPUs, some outdated

    def __post_init__(self) -> None:
        self.free, self._with_room = {}, []
        for gpu in sorted(self.snapshot.gpus, key=attrgetter("index")):
            self.free.setdefault(gpu.node, []).append(gpu.index)

    def has(self, gpus: Sequence[int]) -> bool:
        """Return whether all of these GPUs are free."""
        where = self.snapshot.node_of
        return all(gpu in self.free[where[gpu]] for gpu in gpus)

    def take(self, gpus: Sequence[int]) -> None:
        """Take these GPUs."""
        where = self.snapshot.node_of
        for gpu in gpus:
            self.free[where[gpu]].remove(gpu)
        if self._with_room:
            for node in {where[gpu] for gpu in gpus}:
                self._note_room(node)

    def exchange(self, taken: Sequence[int], own: Sequence[int]) -> tuple[int, ...]:
        """Replace the GPUs just `taken` by the `soonest_usable` ones, and return those."""
        where = self.snapshot.node_of
        free = chain.from_iterable(self.free[node] for node in {where[gpu] for gpu in taken})
        better = soonest_usable(self.snapshot, taken, tuple(free), own)
        for gpu in set(taken).difference(better):
            insort(self.free[where[gpu]], gpu)
        for gpu in set(better).difference(taken):
            self.free[where[gpu]].remove(gpu)
        return better

    def pack(self, number: int, allowed: Sequence[str] = ()) -> tuple[int, ...] | None:
        """Take that many GPUs on the fullest node with room, else on as few nodes as possible.

        They are all of one of the allowed nodes if any are named. None: too few are free.
        """
        if allowed:
            fitting = [(len(gpus), node) for node, gpus in self.free.items() if node in allowed]
            _, fullest = min((place for place in fitting if place[0] >= number), default=(0, ""))
        else:
            fullest = self._fullest(number)
        if fullest:
            return self.first(number, [fullest])
        return None if allowed else self.spread(number)

    def _fullest(self, number: int) -> str:
        """Return the first node by name of those with the fewest free GPUs that suffice, or ""."""
        if not self._with_room:
            most = max(map(len, self.free.values()), default=0)
            self._with_room = [[] for _ in range(most + 1)]
            for node in self.free:
                self._note_room(node)
        for room in range(number, len(self._with_room)):
            nodes = self._with_room[room]
            while nodes and len(self.free[nodes[0]]) != room:
                heappop(nodes)
            if nodes:
                return nodes[0]
        return ""

    def _note_room(self, node: str) -> None:
        """Note how many GPUs of the node are free now: never more than before."""
        heappush(self._with_room[len(self.free[node])], node)

    def spread(self, number: int, allowed: Sequence[str] = ()) -> tuple[int, ...] | None:
        """Take that many GPUs on the nodes with the most free ones, one after the other.

        Of equals the node with the lowest GPU comes first. Allowed nodes and None as in `pack`.
        """
        if allowed:
            return self.pack(number, allowed)
        if sum(map(len, self.free.values())) < number:
            return None
        nodes = sorted(self.free, key=lambda node: (-len(self.free[node]), self.free[node]))
        return self.first(number, nodes)

    def evenly(self, number: int, nodes: int) -> tuple[int, ...] | None:
        """Take that many GPUs evenly from the nodes with the most; None: one node, or no room."""
        if nodes < 2 or len(self.free) < nodes:
            return None
        emptiest = sorted(self.free, key=lambda n: (-len(self.free[n]), n))[:nodes]
        parts = [number // nodes + (place < number % nodes) for place in range(nodes)]
        pairs = list(zip(emptiest, parts, strict=True))
        if any(len(self.free[node]) < part for node, part in pairs):
            return None
        return tuple(sorted(chain(*(self.first(part, [node]) for node, part in pairs))))

    def first(self, number: int, nodes: Iterable[str]) -> tuple[int, ...]:
        """Take that many GPUs of these nodes, one node after the other; fewer if they run out."""
        chosen: list[int] = []
        for node in nodes:
            part = self.free[node][: number - len(chosen)]
            chosen += part
            del self.free[node][: len(part)]
            if part and self._with_room:
                self._note_room(node)
            if len(chosen) == number:
                break
        return tuple(sorted(chosen))


@dataclass(frozen=True, slots=True)
class Placing:
    """The order in which jobs are placed, by a rank of job and size, and the choice of GPUs."""

    rank: Callable[[Job, int], tuple[int, ...]]
    choose: Callable[[FreeNodes, Job, int], tuple[int, ...] | None]


PACKED = Placing(lambda _, size: (-size,), lambda nodes, job, n: nodes.pack(n, job.nodes))
"""Largest first, on the fullest node with room, else on as few nodes as possible."""

EMPTIEST = Placing(lambda _, size: (size,), lambda nodes, job, n: nodes.spread(n, job.nodes))
"""Smallest first, on the nodes with the most free GPUs: as Optimus in Pollux' artefact does."""
