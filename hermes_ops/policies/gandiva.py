"""Gandiva: time slices, jobs packed on one GPU, migration when GPUs become free."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from hermes_ops.core.model import Grant, Job, JobId, Plan, Reason, Snapshot, Term
from hermes_ops.core.nodes import NodeCapacity, on_allowed_node, usable
from hermes_ops.policies.toolbox.answer import answer
from hermes_ops.policies.toolbox.fill import consolidated, lowest
from hermes_ops.policies.toolbox.parameter_checks import positive
from hermes_ops.policies.toolbox.rounds import JoinedRounds, RoundOrder, TimeSlices

MOST_APART = 256  # interfering pairs that are remembered
HALF = 0.5  # of a GPU, for each of two
FEWEST_STEPS = 3  # of each, before a pair is judged


@dataclass(frozen=True, slots=True)
class PackedPair:
    """Two jobs that share a GPU since `since_s`, with the steps that they had done by then."""

    first: JobId
    second: JobId
    since_s: float
    steps: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Slices:
    """The rounds, the pairs that share a GPU, and the pairs that interfered (`apart`)."""

    rounds: JoinedRounds = field(default_factory=JoinedRounds)
    pairs: tuple[PackedPair, ...] = ()
    apart: tuple[tuple[JobId, JobId], ...] = ()


@dataclass(frozen=True, slots=True)
class Gandiva:
    """Serve jobs in turn, `slice_s` each; pack jobs of one GPU when there are too many.

    The turns are those of `fair`. While jobs of one GPU still wait, each joins another such job,
    half a GPU for each; two that get less done together than one alone are separated for good. When
    no job waits, one of a pair moves to a free GPU, and a job on more nodes than it needs moves
    to a node that has become free enough (by checkpoint, one job a decision).

    Source: Xiao et al., "Gandiva", OSDI 2018; the rule for interference is that of Gavel (OSDI
    2020). Ours: at most two jobs a GPU, in the order of their turns, joining those that have had
    the most; the paper measures the memory and utilisation of each job, which a snapshot does not
    have, and looks for better pairs by trial and error.
    """

    slice_s: float = 60.0
    packing: bool = True
    migration: bool = True
    name: ClassVar[str] = "gandiva"
    preempts: ClassVar[bool] = True
    shares: ClassVar[bool] = True  # it gives fractions of GPUs: a simulation only

    def __post_init__(self) -> None:
        positive("slice_s", self.slice_s)

    def initial(self) -> Slices:
        """Return the first round without pairs."""
        return Slices()

    def decide(self, snapshot: Snapshot, memory: Slices) -> tuple[Plan, Slices]:
        """Serve the jobs in round order, pack the jobs that are left, else spread pairs out."""
        quanta = TimeSlices(self.slice_s)
        turns = RoundOrder(snapshot, memory.rounds, quanta)
        bad = tuple((p.first, p.second) for p in interfering(snapshot, memory.pairs))
        apart = (*memory.apart, *bad)[-MOST_APART:]
        packed = PackedService(snapshot, turns, frozenset(map(frozenset, apart)))
        packed.serve()
        if self.packing:
            packed.pack()
        if not packed.waiting and self.migration:
            packed.spread()
        review_s = quanta.ends_s(snapshot.time_s) if _rounds_matter(packed) else None
        explain = _Explainer(packed.served, turns)
        plan = answer(snapshot, packed.grants(), packed.waiting, explain, review_s)
        pairs = renewed(snapshot, memory.pairs, packed.served)
        return plan, Slices(turns.memory(), pairs, apart)


@dataclass(frozen=True, slots=True)
class Unit:
    """Jobs that are served together: one, or two that share a GPU. `gpus` is what they hold."""

    jobs: tuple[Job, ...]
    gpus: tuple[int, ...] = ()

    @property
    def size(self) -> int:
        """GPUs that it takes."""
        return len(self.gpus) or self.jobs[0].min_gpus

    @property
    def is_pinned(self) -> bool:
        """True when one of the jobs runs and must not be stopped."""
        return bool(self.gpus) and not all(job.preemptible for job in self.jobs)

    @property
    def may_share(self) -> bool:
        """True for one job of one GPU that may be slowed down."""
        return len(self.jobs) == 1 and self.size == 1 and self.jobs[0].preemptible

    def joined(self, job: Job) -> Unit:
        """Return the unit with a second job on its GPU."""
        return Unit((*self.jobs, job), self.gpus)

    def grants(self) -> list[Grant]:
        """Return the grants of its jobs."""
        share = 1.0 if len(self.jobs) == 1 else HALF
        return [Grant(job.id, self.gpus, share=share) for job in self.jobs]


class PackedService:
    """The units that are served, as one decision is made."""

    def __init__(
        self, snapshot: Snapshot, turns: RoundOrder, apart: frozenset[frozenset[JobId]]
    ) -> None:
        self._snapshot, self._apart, self._turns = snapshot, apart, turns
        all_units = units(snapshot, apart)
        self._units = sorted(all_units, key=self._turn)
        self.served: list[Unit] = []
        self.waiting: list[Job] = []

    def _turn(self, unit: Unit) -> tuple[object, ...]:
        goes_on = bool(unit.gpus) and any(map(self._turns.in_slice, unit.jobs))
        return (not unit.is_pinned, not goes_on, min(map(self._turns.key, unit.jobs)))

    def serve(self) -> None:
        """Serve each unit that fits: pinned, in its slice, then by round; assign the GPUs."""
        left = len(self._snapshot.gpus)
        capacity = NodeCapacity(self._snapshot)
        for unit in self._units:
            if unit.size <= left and _reserve(capacity, unit):
                left -= unit.size
                self.served.append(unit)
            else:
                self.waiting += [job for job in unit.jobs if not job.holds_gpus]
        self._free = {gpu.index for gpu in self._snapshot.gpus}
        for unit in self.served:
            self._free.difference_update(unit.gpus)
        together = consolidated(self._snapshot.gpus)
        fresh = [(n, unit.jobs[0]) for n, unit in enumerate(self.served) if not unit.gpus]
        for number, job in sorted(fresh, key=lambda entry: not entry[1].nodes):
            free = capacity.usable_for(job, self._free)
            gpus = together(job, free) or lowest(job, free) or ()
            self._free.difference_update(gpus)
            self.served[number] = Unit((job,), gpus)

    def pack(self) -> None:
        """Let jobs of one GPU that wait join one that is served, those first with most rounds."""
        hosts = [n for n, unit in enumerate(self.served) if unit.may_share]
        hosts.sort(key=lambda n: self._turns.key(self.served[n].jobs[0]))
        waiting = self.waiting
        self.waiting = []
        for job in waiting:
            host = next((n for n in reversed(hosts) if self._may_join(self.served[n], job)), None)
            if host is None or job.min_gpus > 1 or not job.preemptible:
                self.waiting.append(job)
                continue
            hosts.remove(host)
            self.served[host] = self.served[host].joined(job)

    def _may_join(self, unit: Unit, job: Job) -> bool:
        get_on = frozenset((unit.jobs[0].id, job.id)) not in self._apart
        return get_on and on_allowed_node(self._snapshot, job, unit.gpus)

    def spread(self) -> None:
        """Move one job: one of a pair to a free GPU, or one on too many nodes to one.

        Of a pair that is the second one, if it may be stopped.
        """
        for number, unit in enumerate(self.served):
            *_, moved = sorted(unit.jobs, key=lambda job: job.preemptible)
            free = usable(self._snapshot, moved, self._free)
            if len(unit.jobs) == 2 and moved.preemptible and free:
                stays = tuple(job for job in unit.jobs if job is not moved)
                self.served[number] = Unit(stays, unit.gpus)
                self.served.append(Unit((moved,), (min(free),)))
                return
        self._defragment()

    def _defragment(self) -> None:
        together = consolidated(self._snapshot.gpus)
        node = {gpu.index: gpu.node for gpu in self._snapshot.gpus}
        for number, unit in enumerate(self.served):
            job = unit.jobs[0]
            nodes = len({node[gpu] for gpu in unit.gpus})
            if nodes == 1 or not job.holds_gpus or not job.preemptible:
                continue
            free = usable(self._snapshot, job, self._free)
            better = together(job, free) if len(unit.gpus) == job.min_gpus else None
            if better and len({node[gpu] for gpu in better}) < nodes:
                self.served[number] = Unit(unit.jobs, better)
                return

    def grants(self) -> tuple[Grant, ...]:
        """Return the grants of the units that are served."""
        return tuple(grant for unit in self.served for grant in unit.grants())


def _reserve(capacity: NodeCapacity, unit: Unit) -> bool:
    return capacity.reserve(unit.gpus) if unit.gpus else capacity.promise(unit.jobs[0])


def _rounds_matter(packed: PackedService) -> bool:
    """Return True when the rounds matter: a job waits, or two share a GPU."""
    return bool(packed.waiting) or any(len(unit.jobs) > 1 for unit in packed.served)


class _Explainer:
    def __init__(self, served: Iterable[Unit], turns: RoundOrder) -> None:
        self._turns = turns
        self._partner = {
            job.id: other.id
            for unit in served
            for job in unit.jobs
            for other in unit.jobs
            if other is not job
        }

    def __call__(self, job: Job, is_granted: bool) -> Reason:
        terms = (Term("rounds", self._turns.rounds[job.id]),)
        partner = self._partner.get(job.id)
        if partner:
            text = f"shares a GPU with {partner}: more jobs than GPUs"
            return Reason(text, terms, partner, "a free GPU, or less done together than alone")
        if is_granted:
            return Reason("runs: it is its turn", terms, None, "the end of its slice")
        return Reason("waits for its turn", terms, None, "the end of a running job's slice")


def units(snapshot: Snapshot, apart: frozenset[frozenset[JobId]]) -> list[Unit]:
    """Return the units: running jobs, together where they share a GPU, and each waiting job.

    Of a pair in `apart` the first job keeps the GPU, the second waits (it is stopped), if one of
    them may be stopped.
    """
    together: dict[tuple[int, ...], list[Job]] = {}
    for job in snapshot.holding:
        if job.id in snapshot.retained:
            together.setdefault(snapshot.retained[job.id].gpus, []).append(job)
    merged: list[Unit] = []
    taken: set[int] = set()
    for gpus, jobs in together.items():
        if len(jobs) > 2 or not taken.isdisjoint(gpus):
            continue  # another policy's shares: these jobs are placed again
        taken.update(gpus)
        if frozenset(job.id for job in jobs) in apart and any(job.preemptible for job in jobs):
            jobs.sort(key=lambda job: job.preemptible)
            merged.append(Unit((jobs[0],), gpus))
        else:
            merged.append(Unit(tuple(jobs), gpus))
    return merged + [Unit((job,)) for job in snapshot.queue]


def interfering(snapshot: Snapshot, pairs: Iterable[PackedPair]) -> list[PackedPair]:
    """Return the pairs that get less done together than one of them alone.

    That is so when the steps a second that both make, each divided by its pace alone, add up to
    less than 1 (Gavel's simplification of Gandiva). A pair of which too little is known is kept.
    """
    return [pair for pair in pairs if _throughput(snapshot, pair) < 1]


def _throughput(snapshot: Snapshot, pair: PackedPair) -> float:
    """Return the normalised steps per second of both; 1 if unknown.

    One step in progress is counted for each.
    """
    seconds = snapshot.time_s - pair.since_s
    total = 0.0
    for job_id, steps in zip((pair.first, pair.second), pair.steps, strict=True):
        job = snapshot.index.get(job_id)
        alone_s = job.seconds_a_step(1) if job else None
        done = job.last_step - steps if job else 0
        if alone_s is None or done < FEWEST_STEPS or seconds <= 0:
            return 1.0
        total += (done + 1) * alone_s / seconds
    return total


def renewed(
    snapshot: Snapshot, before: Sequence[PackedPair], served: Iterable[Unit]
) -> tuple[PackedPair, ...]:
    """Return the pairs from now on: continuing ones with their start, and new ones."""
    renewable = {frozenset((pair.first, pair.second)): pair for pair in before}
    pairs: list[PackedPair] = []
    for unit in served:
        if len(unit.jobs) == 2:
            first, second = unit.jobs
            steps = (first.last_step, second.last_step)
            fresh = PackedPair(first.id, second.id, snapshot.time_s, steps)
            pairs.append(renewable.get(frozenset((first.id, second.id)), fresh))
    return tuple(sorted(pairs, key=lambda pair: (pair.first, pair.second)))
