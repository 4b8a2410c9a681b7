"""ONES: an evolutionary search over schedules, with job sizes that double as jobs make progress.

`evolution` has the operators on the genes, `schedules` the search of one decision, `history` what
is remembered of jobs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from hermes_ops.core.amounts import figure
from hermes_ops.core.model import Grant, Job, JobId, Phase, Plan, Reason, Snapshot, Term
from hermes_ops.core.nodes import usable
from hermes_ops.policies.ones.evolution import Operators
from hermes_ops.policies.ones.history import (
    HistoryReader,
    JobHistory,
    JobState,
    Lengths,
    measured_speeds,
    overtime_limits,
)
from hermes_ops.policies.ones.schedules import Schedule, ScheduleSearch, SearchedJob
from hermes_ops.policies.toolbox.ended_jobs import newly_ended
from hermes_ops.policies.toolbox.job_speeds import (
    KindKey,
    MeasuredSpeeds,
    kept_kinds,
    kind_key,
)
from hermes_ops.policies.toolbox.parameter_checks import positive, whole
from hermes_ops.policies.toolbox.sized_grants import Batches, Sizes, SizingProblem

REMEMBERED = 64
"""The ended jobs of a kind whose epochs are remembered."""


@dataclass(frozen=True, slots=True)
class OnesMemory:
    """The population, the number of generations so far, and the past of jobs.

    `lengths`: the epochs that ended jobs of each kind have done; `counted`: ended jobs among them.
    """

    generation: int = 0
    population: tuple[Schedule, ...] = ()
    jobs: tuple[JobHistory, ...] = ()
    lengths: tuple[tuple[KindKey, tuple[float, ...]], ...] = ()
    counted: tuple[JobId, ...] = ()


@dataclass(frozen=True, slots=True)
class Ones:
    """Evolve schedules towards the least GPU time that their jobs have left.

    A schedule names the job of each GPU. Each decision evolves a population of them: uniform
    crossover (a GPU swaps its job with chance `crossover`), mutation (a job that has done two
    epochs leaves with chance `mutation`), padding (waiting jobs get their least size, new ones
    first, then jobs grow to their limits, always the least left first), selection of `population`
    schedules by score. The score, less is better, is the sum over the jobs of a schedule of
    Y (1 / rho - 1) n / X(n): Y samples done, progress rho, n GPUs, X(n) samples a second. A job
    begins on its least size; the limit of its size doubles for every two epochs at it, to at most
    four times its GPUs, and falls for a job that holds half of the GPUs for longer than others have
    run. A job keeps its GPUs until it has done an epoch on them; free GPUs are given at once.

    Source: Bian et al., "ONES", SC 2021 (arXiv 2108.03645), and its prototype
    (kurisusnowdeng/ones_sc21, commit 8535358) for the numbers and the limits. We chose:

    * rho is drawn from Beta(a, b), a the epochs done, as published. b is predicted by a small
      network there; here it is what the declared steps leave, else the mean of what ended jobs of
      the kind (`model_name`, else the sweep) did beyond a, else the fit of the loss curve, else a.
      A draw holds for all schedules of a generation, and the schedule that is taken is the best at
      the mean progress: no schedule wins by its luck.
    * An epoch is a report of a job, or `epoch_s` of training if that comes first: the published
      jobs end after minutes. The paper waits with a whole schedule until all jobs that it changes
      have done an epoch; here every schedule has the other jobs as they are.
    * A restart counts `patience` times its seconds, on the GPUs that change, in the score; and a
      job grows only where that saves more time, or to a size that its kind has not tried. The
      paper counts no restarts.
    * New jobs begin at once: where no GPU is free, jobs with the most left make room.
    * A limit grows from half of it on, so that one slow size does not end the growth. It falls only
      while a job waits.
    * The search stops after `generations`, not by a clock: the prototype makes one a second. The
      chances follow from `seed` and the number of generations so far.
    * Each GPU has the samples of the least size, so the batch grows with the GPUs, within its
      range; a job that measures its noise scale chooses its batch itself.
    """

    population: int = 16
    crossover: float = 0.5
    mutation: float = 0.3
    generations: int = 4
    seed: int = 0
    epoch_s: float = 120.0
    interval_s: float = 60.0
    patience: float = 8.0
    default_switch_s: float = 30.0
    name: ClassVar[str] = "ones"
    preempts: ClassVar[bool] = True
    sizes: ClassVar[bool] = True

    def __post_init__(self) -> None:
        whole("population", self.population, 2)
        whole("generations", self.generations, 1)
        whole("seed", self.seed, 0)
        positive("epoch_s", self.epoch_s)
        positive("interval_s", self.interval_s)
        for name in ("crossover", "mutation"):
            value = getattr(self, name)
            if isinstance(value, bool) or not 0 <= value <= 1:
                raise ValueError(f"{name} is a number from 0 to 1")
        if not (self.patience >= 0 and self.default_switch_s >= 0):
            raise ValueError("patience and default_switch_s are from 0")

    def initial(self) -> OnesMemory:
        """Return an empty memory."""
        return OnesMemory()

    def decide(self, snapshot: Snapshot, memory: OnesMemory) -> tuple[Plan, OnesMemory]:
        """Return the plan of the best schedule of the evolved population."""
        problem = SizingProblem.from_snapshot(snapshot)
        before = {past.job: past for past in memory.jobs}
        reader = HistoryReader(snapshot, measured_speeds(snapshot), before, self.epoch_s)
        lengths, counted = _learnt(snapshot, reader, memory)
        states = _states(problem, reader, lengths)
        population, grants = self._searched(problem, reader.speeds, states, memory)
        review_s = snapshot.time_s + self.interval_s if states else None
        plan = problem.plan(grants, _ScheduleReasons(states).explain, None, review_s)
        after = OnesMemory(
            memory.generation + self.generations,
            population,
            _remembered(snapshot, states, grants, before),
            tuple(sorted(lengths.items())),
            counted,
        )
        return plan, after

    def _searched(
        self,
        problem: SizingProblem,
        speeds: MeasuredSpeeds,
        states: Sequence[JobState],
        memory: OnesMemory,
    ) -> tuple[tuple[Schedule, ...], tuple[Grant, ...]]:
        """Return the evolved population, and the grants of its best schedule."""
        if not states:
            return (), problem.fixed
        jobs = [
            SearchedJob(state, _most(problem.snapshot, state), self._restart_s(state.job))
            for state in states
        ]
        search = ScheduleSearch(jobs, problem.gpus, speeds)
        starts = search.starts(memory.population, self.population)
        rng = np.random.default_rng((self.seed, memory.generation))
        operators = Operators(self.crossover, self.mutation)
        survivors = search.evolve(starts, self.population, self.generations, operators, rng)
        population = tuple(map(search.schedule, survivors))
        return population, _placed(problem, search, dict(population[0]))

    def _restart_s(self, job: Job) -> float:
        return self.patience * (self.default_switch_s if job.switch_s is None else job.switch_s)


def _states(problem: SizingProblem, reader: HistoryReader, lengths: Lengths) -> list[JobState]:
    """Return the states of the jobs; of those that have not begun as many as could start."""
    gpus = problem.gpus
    states = [reader.state(job, problem.held(job), lengths, gpus) for job in _candidates(problem)]
    limits = overtime_limits(states, gpus)
    return [replace(s, limit=limits.get(s.job.id, s.limit)) for s in states]


def _candidates(problem: SizingProblem) -> Iterator[Job]:
    """Yield the jobs that can start or run, at most as many new ones as could fill the pool.

    A new job is left out if earlier new ones of the same least size would take all GPUs.
    """
    requested = Counter[int]()  # GPUs of the new jobs so far, by their least size
    for job in problem.jobs:
        if job.phase is Phase.PENDING:
            requested[job.min_gpus] += job.min_gpus
            if requested[job.min_gpus] > problem.gpus:
                continue
        yield job


def _most(snapshot: Snapshot, state: JobState) -> int:
    """Return the limit of a job, and not more than one of its nodes has if it is bound to some."""
    if not state.job.nodes:
        return state.limit
    return min(state.limit, len(usable(snapshot, state.job, snapshot.node_of.keys())))


def _placed(
    problem: SizingProblem, search: ScheduleSearch, schedule: Mapping[JobId, int]
) -> tuple[Grant, ...]:
    """Return the grants; where a job cannot be placed, the others are served without it."""
    index = problem.snapshot.index

    def solve(subproblem: SizingProblem) -> tuple[Sizes, Batches]:
        job_of = {job.id: job for job in subproblem.jobs}
        # The schedule has one size for each job: a job with narrowed sizes is left out.
        without = {job.id for job in problem.jobs if job_of.get(job.id) is not job}
        sizes = search.filled(schedule, without)
        resized = {job: size for job, size in sizes.items() if size != problem.held(index[job])}
        return sizes, {job: _batch(index[job], size) for job, size in resized.items()}

    return problem.solve_grants(solve)


def _batch(job: Job, size: int) -> int | None:
    """Return the batch on that size: each GPU has as many samples as on the least size.

    None where the job chooses: on its least size, and if it adapts its batch to its noise scale.
    """
    limits = job.batch_range
    if limits is None or size == job.min_gpus or job.noise_scale is not None:
        return None
    batch = min(limits.most, limits.initial * size // job.min_gpus)
    return batch if limits.allows(batch, size) else None


def _learnt(
    snapshot: Snapshot, reader: HistoryReader, memory: OnesMemory
) -> tuple[dict[KindKey, tuple[float, ...]], tuple[JobId, ...]]:
    """Return the epochs of ended jobs by kind, and the ended jobs that are counted."""
    ended, counted = newly_ended(snapshot, memory.counted)
    lengths = kept_kinds(dict(memory.lengths), snapshot)
    for job in ended:
        epochs = reader.epochs(job, reader.samples(job))
        if epochs > 0:
            kind = kind_key(job)
            lengths[kind] = (*lengths.get(kind, ()), epochs)[-REMEMBERED:]
    return lengths, counted


def _remembered(
    snapshot: Snapshot,
    states: Iterable[JobState],
    grants: Iterable[Grant],
    before: Mapping[JobId, JobHistory],
) -> tuple[JobHistory, ...]:
    """Return the past of all jobs that have not ended, by id."""
    sizes = {grant.job: len(grant.gpus) for grant in grants}
    past = {
        job.id: before[job.id]
        for job in snapshot.jobs
        if job.id in before and job.phase is not Phase.ENDED
    }
    past |= {s.job.id: s.remembered(snapshot.time_s, sizes.get(s.job.id, 0)) for s in states}
    return tuple(past[job] for job in sorted(past))


class _ScheduleReasons:
    """The reasons of one decision."""

    def __init__(self, states: Iterable[JobState]) -> None:
        self._states = {state.job.id: state for state in states}

    def explain(self, job: Job, is_granted: bool) -> Reason:
        """Return the reason, with the job's progress and its limit."""
        state = self._states.get(job.id)
        if state is None:
            text = (
                "runs: nobody else gets its GPUs"
                if is_granted
                else "waits: earlier jobs have not begun"
            )
            return Reason(text, would_change="one of them beginning")
        terms = (
            Term("epochs_done", state.epochs),
            Term("epochs_left", state.left_epochs),
            Term("limit_gpus", state.limit),
        )
        left = f"about {figure(state.left_epochs)} epochs left, at most {state.limit} GPUs"
        if is_granted and not state.is_ready:
            return Reason(f"runs until an epoch is done: {left}", terms, None, "the epoch's end")
        text = "runs: part of" if is_granted else "waits: not in"
        text = f"{text} the schedule with the least GPU time left: {left}"
        return Reason(text, terms, None, "another schedule that has less left")
