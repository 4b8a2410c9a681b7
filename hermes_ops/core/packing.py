"""Two jobs on one GPU: who shares with whom, and whether that is worth it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hermes_ops.core.model import Grant, Job, JobId, Snapshot

HALF = 0.5  # of a GPU, for each of two
FEWEST_STEPS = 3  # of each, before a pair is judged


@dataclass(frozen=True, slots=True)
class Pair:
    """Two jobs on one GPU since then, with the steps that they had done."""

    first: JobId
    second: JobId
    since_s: float
    steps: tuple[int, int]


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
    def firm(self) -> bool:
        """True when one of the jobs runs and must not be stopped."""
        return bool(self.gpus) and not all(job.preemptible for job in self.jobs)

    @property
    def may_share(self) -> bool:
        """True for one job of one GPU that may be slowed down."""
        return len(self.jobs) == 1 and self.size == 1 and self.jobs[0].preemptible

    def joined(self, job: Job) -> Unit:
        """The unit, with a second job on its GPU."""
        return Unit((*self.jobs, job), self.gpus)

    def grants(self) -> list[Grant]:
        """What the jobs get of its GPUs."""
        share = 1.0 if len(self.jobs) == 1 else HALF
        return [Grant(job.id, self.gpus, share=share) for job in self.jobs]


def units(snapshot: Snapshot, apart: frozenset[frozenset[JobId]]) -> list[Unit]:
    """The running jobs, together where they share a GPU, and each waiting one by itself.

    Of a pair in `apart` the first job keeps the GPU, the second waits (it is stopped).
    """
    together: dict[tuple[int, ...], list[Job]] = {}
    for job in snapshot.holding:
        if job.id in snapshot.stays:
            together.setdefault(snapshot.stays[job.id].gpus, []).append(job)
    found: list[Unit] = []
    taken: set[int] = set()
    for gpus, jobs in together.items():
        if len(jobs) > 2 or not taken.isdisjoint(gpus):
            continue  # another policy's shares: they start anew
        taken.update(gpus)
        if frozenset(job.id for job in jobs) in apart:
            jobs.sort(key=lambda job: job.preemptible)
            found.append(Unit((jobs[0],), gpus))
        else:
            found.append(Unit(tuple(jobs), gpus))
    return found + [Unit((job,)) for job in snapshot.queue]


def interfering(snapshot: Snapshot, pairs: Iterable[Pair]) -> list[Pair]:
    """The pairs that get less done together than one of them alone.

    That is so when the steps a second that both make, each divided by its pace alone, add up to
    less than 1 (Gavel's simplification of Gandiva). A pair of which too little is known is kept.
    """
    return [pair for pair in pairs if _throughput(snapshot, pair) < 1]


def _throughput(snapshot: Snapshot, pair: Pair) -> float:
    """Normalised steps a second of both, one step in progress counted for each; 1 if unknown."""
    seconds = snapshot.time_s - pair.since_s
    total = 0.0
    for job_id, steps in zip((pair.first, pair.second), pair.steps, strict=True):
        job = snapshot.index.get(job_id)
        alone_s = dict(job.step_seconds).get(1) if job else None
        done = job.last_step - steps if job else 0
        if alone_s is None or done < FEWEST_STEPS or seconds <= 0:
            return 1.0
        total += (done + 1) * alone_s / seconds
    return total


def renewed(snapshot: Snapshot, before: Sequence[Pair], served: Iterable[Unit]) -> tuple[Pair, ...]:
    """The pairs from now on: those that go on, with their beginning, and new ones."""
    known = {frozenset((pair.first, pair.second)): pair for pair in before}
    pairs: list[Pair] = []
    for unit in served:
        if len(unit.jobs) == 2:
            first, second = unit.jobs
            steps = (first.last_step, second.last_step)
            fresh = Pair(first.id, second.id, snapshot.time_s, steps)
            pairs.append(known.get(frozenset((first.id, second.id)), fresh))
    return tuple(sorted(pairs, key=lambda pair: (pair.first, pair.second)))
