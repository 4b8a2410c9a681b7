"""Gandiva: time slices, jobs packed on one GPU, migration when GPUs become free."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import ClassVar

from hermes_ops.core.answer import answer
from hermes_ops.core.checks import positive
from hermes_ops.core.fill import consolidated, lowest
from hermes_ops.core.model import Grant, Job, JobId, Plan, Reason, Snapshot, Term
from hermes_ops.core.nodes import Rooms, at_home, usable
from hermes_ops.core.packing import Pair, Unit, interfering, renewed, units
from hermes_ops.core.rounds import Quanta, Rounds, Turns

MOST_APART = 256  # pairs that are remembered as interfering


@dataclass(frozen=True, slots=True)
class Slices:
    """The rounds, who shares a GPU with whom, and which pairs did not get on."""

    rounds: Rounds = field(default_factory=Rounds)
    pairs: tuple[Pair, ...] = ()
    apart: tuple[tuple[JobId, JobId], ...] = ()


@dataclass(frozen=True, slots=True)
class Gandiva:
    """Serve jobs in turn, `slice_s` each; pack jobs of one GPU when there are too many.

    The turns are those of `fair`. While jobs of one GPU still wait, each joins another such job,
    half a GPU for each; two that get less done together than one alone are parted for good. When
    nobody waits, one of a pair moves to a free GPU, and a job on more nodes than it needs moves
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
        """The first round, nobody packed."""
        return Slices()

    def decide(self, snapshot: Snapshot, memory: Slices) -> tuple[Plan, Slices]:
        """Serve the turns, pack who is left over, else spread out."""
        quanta = Quanta(self.slice_s)
        turns = Turns(snapshot, memory.rounds, quanta)
        bad = tuple((p.first, p.second) for p in interfering(snapshot, memory.pairs))
        apart = (*memory.apart, *bad)[-MOST_APART:]
        table = _Table(snapshot, turns, frozenset(map(frozenset, apart)))
        table.serve()
        if self.packing:
            table.pack()
        if not table.waiting and self.migration:
            table.spread()
        review_s = quanta.ends_s(snapshot.time_s) if _unfair(table) else None
        explain = _Explainer(table.served, turns)
        plan = answer(snapshot, table.grants(), table.waiting, explain, review_s)
        pairs = renewed(snapshot, memory.pairs, table.served)
        return plan, Slices(turns.memory(), pairs, apart)


class _Table:
    """Who is served while one decision is being made."""

    def __init__(
        self, snapshot: Snapshot, turns: Turns, apart: frozenset[frozenset[JobId]]
    ) -> None:
        self._snapshot, self._apart, self._turns = snapshot, apart, turns
        found = units(snapshot, apart)
        self._units = sorted(found, key=self._turn)
        self.served: list[Unit] = []
        self.waiting: list[Job] = []

    def _turn(self, unit: Unit) -> tuple[object, ...]:
        goes_on = bool(unit.gpus) and any(map(self._turns.in_slice, unit.jobs))
        return (not unit.firm, not goes_on, min(map(self._turns.key, unit.jobs)))

    def serve(self) -> None:
        """Firm ones, those in their slice, then by turn, each that fits; then say where."""
        left = len(self._snapshot.gpus)
        rooms = Rooms(self._snapshot)
        for unit in self._units:
            if unit.size <= left and _has_room(rooms, unit):
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
            free = rooms.of(job, self._free)
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
        return get_on and at_home(self._snapshot, job, unit.gpus)

    def spread(self) -> None:
        """Move one job: the second of a pair to a free GPU, or one on too many nodes to one."""
        for number, unit in enumerate(self.served):
            free = usable(self._snapshot, unit.jobs[-1], self._free)
            if len(unit.jobs) == 2 and free:
                target = (min(free),)
                self.served[number] = Unit(unit.jobs[:1], unit.gpus)
                self.served.append(Unit(unit.jobs[1:], target))
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
        """What those that are served get."""
        return tuple(grant for unit in self.served for grant in unit.grants())


def _has_room(rooms: Rooms, unit: Unit) -> bool:
    return rooms.stay(unit.gpus) if unit.gpus else rooms.promise(unit.jobs[0])


def _unfair(table: _Table) -> bool:
    """True when somebody waits, or has half a GPU only: turns matter."""
    return bool(table.waiting) or any(len(unit.jobs) > 1 for unit in table.served)


class _Explainer:
    def __init__(self, served: Iterable[Unit], turns: Turns) -> None:
        self._turns = turns
        self._partner = {
            job.id: other.id
            for unit in served
            for job in unit.jobs
            for other in unit.jobs
            if other is not job
        }

    def __call__(self, job: Job, runs: bool) -> Reason:
        terms = (Term("rounds", self._turns.rounds[job.id]),)
        partner = self._partner.get(job.id)
        if partner:
            text = f"shares a GPU with {partner}: more jobs than GPUs"
            return Reason(text, terms, partner, "a free GPU, or less done together than alone")
        if runs:
            return Reason("runs: it is its turn", terms, None, "the end of its slice")
        return Reason("waits for its turn", terms, None, "the end of a running job's slice")
