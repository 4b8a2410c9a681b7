"""The worst policies: what guards must bound all the same."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from hermes_ops.core.model import OPEN_PHASES, Grant, Phase, Plan, Snapshot
from hermes_ops.policies.toolbox.fill import fill


@dataclass(frozen=True, slots=True)
class Contrary:
    """The worst policy: every round it gives all GPUs to whoever has not got them."""

    name: ClassVar[str] = "contrary"
    preempts: ClassVar[bool] = True

    def initial(self) -> None:
        return

    def decide(self, snapshot: Snapshot, memory: None) -> tuple[Plan, None]:
        """It respects nobody: not those that must not be stopped by its own choice of victims."""
        stay = [j for j in snapshot.jobs if j.holds_gpus and not j.preemptible]
        line = [j for j in snapshot.jobs if j.phase in (Phase.PENDING, Phase.WAITING)]
        line += [j for j in snapshot.jobs if j.holds_gpus and j.preemptible]
        free = {g.index for g in snapshot.gpus} - {g for j in stay for g in j.gpus_held}
        grants = [Grant(j.id, j.gpus_held) for j in stay]
        for job in sorted(line, key=lambda j: (j.holds_gpus, j.id)):
            if job.min_gpus <= len(free):
                gpus = tuple(sorted(free)[: job.min_gpus])
                free -= set(gpus)
                grants.append(Grant(job.id, gpus))
        return Plan(tuple(grants)), memory


@dataclass(frozen=True, slots=True)
class Deaf(Contrary):
    """Contrary, and blind to what must not be stopped."""

    def decide(self, snapshot: Snapshot, memory: None) -> tuple[Plan, None]:
        blind = tuple(replace(j, preemptible=True) for j in snapshot.jobs)
        return Contrary().decide(replace(snapshot, jobs=blind), memory)


@dataclass(frozen=True, slots=True)
class Partial(Contrary):
    """It gives all GPUs to the first jobs by their ids, whatever happens to the others."""

    def decide(self, snapshot: Snapshot, memory: None) -> tuple[Plan, None]:
        order = sorted((j for j in snapshot.jobs if j.phase in OPEN_PHASES), key=lambda j: j.id)
        return Plan(fill(snapshot, order, backfill=True, preempt=True)), memory


@dataclass(frozen=True, slots=True)
class Restless(Contrary):
    """It gives each job another size than it has at every decision."""

    sizes: ClassVar[bool] = True

    def decide(self, snapshot: Snapshot, memory: None) -> tuple[Plan, None]:
        free, grants = [g.index for g in snapshot.gpus], []
        queued = (Phase.PENDING, Phase.WAITING)
        line = [j for j in snapshot.jobs if j.phase in queued or j.holds_gpus]
        for job in sorted(line, key=lambda j: j.id):
            others = range(job.min_gpus, min(job.max_gpus, len(free)) + 1)
            size = max((n for n in others if n != len(job.gpus_held)), default=0)
            if size:
                grants.append(Grant(job.id, tuple(free[:size])))
                free = free[size:]
        return Plan(tuple(grants)), memory
