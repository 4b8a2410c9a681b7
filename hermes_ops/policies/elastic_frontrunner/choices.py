"""The sizes that each job may take now and their values, of many similar jobs at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from hermes_ops.core.model import Job, JobId
from hermes_ops.core.speed_model import Floats
from hermes_ops.policies.elastic_frontrunner.finish_guard import has_one_size
from hermes_ops.policies.elastic_frontrunner.kinds import (
    NO_PLACE,
    Integers,
    Kind,
    Progress,
    Rates,
    SizedGroup,
    expected_work,
)
from hermes_ops.policies.toolbox.job_speeds import KindKey, kind_key
from hermes_ops.policies.toolbox.knapsack import knapsack
from hermes_ops.policies.toolbox.sized_grants import SizingProblem
from hermes_ops.policies.toolbox.whole_nodes import size_options

HOUR_S = 3600.0
LEAST_LEFT_S = 60.0
"""Seconds on one GPU: work that is left counts as at least so much."""

SETTLED = 0.5
"""The part of its whole work that counts as left too, where a job has no range of batches.

Its speed-up stays the same until its end; that of others grows with the noise of their gradients,
which is why these are given most GPUs late.
"""

TRIAL_S = 60.0
"""Seconds of training after which a size counts as tried, though it is not measured yet."""

_NO_PROGRESS = Progress()


class Choice(NamedTuple):
    """The sizes that one job may take now, ascending from 0, and its row in the tables."""

    job: Job
    row: int
    sizes: tuple[int, ...]
    left_s: float  # on one GPU
    alone_s: float | None  # of a job of one size, all of its training there


@dataclass(frozen=True, slots=True)
class Choices:
    """The choices of all jobs; the tables have the shape (jobs, 1 + most sizes of a job).

    `values` of a size are -inf where the job does not take it. `rates` are the expected units of
    work a second on that many `nodes` with these `batches` (0: the job chooses its batch).
    """

    of_jobs: Sequence[Choice]
    sizes: Integers
    values: Floats
    rates: Floats
    nodes: Integers
    batches: Integers
    left_s: Floats  # (jobs,)

    def best(self, choices: Sequence[Choice], gpus: int) -> dict[JobId, int]:
        """Return the size of each of these jobs in the solution of the greatest value."""
        if not choices:
            return {}
        sizes, values = self.sizes, self.values
        if len(choices) < len(self.of_jobs):
            rows = np.array([choice.row for choice in choices])
            sizes, values = sizes[rows], values[rows]
        columns = knapsack(sizes, values, gpus)
        picked = np.take_along_axis(sizes, columns[:, None], axis=1)[:, 0].tolist()
        return {choice.job.id: size for choice, size in zip(choices, picked, strict=True)}

    def by_left(self) -> Iterator[Choice]:
        """Yield the choices, those of the jobs with the least work left first."""
        for row in np.argsort(self.left_s, kind="stable"):
            yield self.of_jobs[row]

    def rate(self, choice: Choice, size: int) -> float:
        """Return the work a second on one of its sizes."""
        return float(self.rates[choice.row, choice.sizes.index(size)])

    def nodes_of(self, choice: Choice, size: int) -> int:
        """Return on how many nodes one of its sizes is to be."""
        return int(self.nodes[choice.row, choice.sizes.index(size)])

    def batch(self, choice: Choice, size: int) -> int:
        """Return the batch on one of its sizes; 0: as the job chooses."""
        return int(self.batches[choice.row, choice.sizes.index(size)])


class _Tables:
    """The tables of `Choices` while they are filled."""

    def __init__(self, jobs: int, most_sizes: int) -> None:
        shape = jobs, 1 + most_sizes
        self.sizes: Integers = np.zeros(shape, dtype=np.int64)
        self.values = np.full(shape, -np.inf)
        self.values[:, 0] = 0.0
        self.rates = np.zeros(shape)
        self.nodes: Integers = np.zeros(shape, dtype=np.int64)
        self.batches: Integers = np.zeros(shape, dtype=np.int64)
        self.left_s = np.zeros(jobs)


@dataclass(frozen=True, slots=True)
class Valuation:
    """How the sizes of jobs are valued at one decision.

    `left_at_one_size`: the seconds that a job of one size still trains there; None: it has several,
    or nothing tells them. `before`: the progress of jobs. The other parameters are those of
    `ElasticFrontrunner`.
    """

    problem: SizingProblem
    kinds: Mapping[KindKey, Kind]
    before: Mapping[JobId, Progress]
    left_at_one_size: Callable[[Job], float | None]
    weight: float
    patience: float
    default_switch_s: float

    def choices(self, jobs: Sequence[Job]) -> Choices:
        """Return the choices of these jobs, in their order."""
        left_s = [self.left_at_one_size(job) if has_one_size(job) else None for job in jobs]
        several = [row for row, seconds in enumerate(left_s) if seconds is None]
        groups = self._groups(jobs, several)
        widest = max([1, *(len(group.sizes) - 1 for group in groups)])
        tables, rates = _Tables(len(jobs), widest), self._rates()
        sizes_of: list[tuple[int, ...]] = [(0,)] * len(jobs)
        for group, rows in groups.items():
            self._fill(tables, rates, group, rows, [jobs[row] for row in rows])
            sizes = (0, *group.sizes[1:])
            for row in rows:
                sizes_of[row] = sizes
        alone_s: list[float | None] = [None] * len(jobs)
        for row, (job, seconds) in enumerate(zip(jobs, left_s, strict=True)):
            if seconds is not None:
                sizes_of[row] = (0, job.min_gpus)
                alone_s[row] = self._fill_one_size(tables, row, job, seconds)
        facts = zip(jobs, range(len(jobs)), sizes_of, tables.left_s.tolist(), alone_s, strict=True)
        return Choices(
            list(map(Choice._make, facts)),
            tables.sizes,
            tables.values,
            tables.rates,
            tables.nodes,
            tables.batches,
            tables.left_s,
        )

    def _rates(self) -> Rates:
        nodes = len(set(self.problem.snapshot.node_of.values()))
        return Rates(self.kinds, self.problem.gpus_a_node, nodes)

    def _groups(self, jobs: Sequence[Job], rows: Sequence[int]) -> dict[SizedGroup, list[int]]:
        """Return the rows of jobs by what they share, their sizes after a first one of 1."""
        snapshot, before = self.problem.snapshot, self.before
        held_by, node_of, now_s = snapshot.held, snapshot.node_of, snapshot.time_s
        groups: dict[SizedGroup, list[int]] = {}
        members_of: dict[tuple[object, ...], list[int]] = {}
        ranges, range_of = dict[object, int](), dict[int, int]()
        for row in rows:
            job, place, tried = jobs[row], NO_PLACE, False
            held = held_by.get(job.id)
            if held:
                place = len(held), len({node_of[gpu] for gpu in held})
                tried = now_s >= before.get(job.id, _NO_PROGRESS).since_s + TRIAL_S
            batches = range_of.get(id(job.batch_range))
            if batches is None:  # a hash of each job's range would cost more than all else here
                batches = ranges.setdefault(job.batch_range, len(ranges))
                range_of[id(job.batch_range)] = batches
            able = job.min_gpus, job.max_gpus, job.sizes, not job.nodes
            facts = kind_key(job), batches, able, place, tried
            members = members_of.get(facts)
            if members is None:
                members = groups.setdefault(self._group(job, place, tried), [])
                members_of[facts] = members
            members.append(row)
        return groups

    def _group(self, job: Job, place: tuple[int, int], tried: bool) -> SizedGroup:
        """Return the group of a job; `tried`: the size that it has now counts as tried."""
        kind, held = kind_key(job), place[0]
        largest = max(self.kinds[kind].largest, held if tried else 0)
        limit = min(self.problem.gpus, max(2 * largest, job.min_gpus, held))
        sizes = size_options(job, limit, self.problem.gpus_a_node, held)
        return SizedGroup(kind, job.batch_range, (1, *sizes), place)

    def _fill(
        self,
        tables: _Tables,
        rates: Rates,
        group: SizedGroup,
        rows: Sequence[int],
        jobs: Sequence[Job],
    ) -> None:
        """Fill in the rows of one group's jobs."""
        steps = [rates.noise_step(job, group.kind) for job in jobs]
        of_sizes = rates.of(group, steps)
        first = of_sizes.rate[:, 0]
        most = of_sizes.rate.max(axis=1)
        alone = np.where(first != 0, first, np.where(most != 0, most, 1.0))
        left_s, weighed_s = self._left(group, jobs, alone)
        default_s = self.default_switch_s
        switches = [switch_seconds(job, default_s) for job in jobs]
        switch_s = self.patience * np.array(switches)[:, None]
        until_end_s = (left_s * alone)[:, None] / np.maximum(of_sizes.rate[:, 1:], 1e-12)
        moves = np.array(group.sizes[1:]) != group.held[0]
        factors = np.where(moves, until_end_s / (until_end_s + switch_s), 1.0)
        hours = (weighed_s / HOUR_S).tolist()
        worth = np.array([left**-self.weight for left in hours])  # a power of NumPy's rounds else
        index, columns = np.array(rows), slice(1, len(group.sizes))
        tables.sizes[index, columns] = group.sizes[1:]
        tables.values[index, columns] = (
            of_sizes.rate[:, 1:] / alone[:, None] * worth[:, None] * factors
        )
        tables.rates[index, columns] = of_sizes.rate[:, 1:]
        tables.nodes[index, columns] = of_sizes.nodes[:, 1:]
        tables.batches[index, columns] = of_sizes.batch[:, 1:]
        tables.left_s[index] = left_s

    def _left(self, group: SizedGroup, jobs: Sequence[Job], alone: Floats) -> tuple[Floats, Floats]:
        """Return the seconds that are left on one GPU, and those by which jobs are weighed.

        `alone`: the work a second there.
        """
        kind, now_s = self.kinds[group.kind], self.problem.snapshot.time_s
        done = [self.before[job.id].until(now_s) if job.id in self.before else 0.0 for job in jobs]
        untold = group.batches is not None and not kind.works  # but for what a job has done itself
        works = [
            None if untold and had <= 0 else expected_work(job, kind, had)
            for job, had in zip(jobs, done, strict=True)
        ]
        is_known = np.array([work is not None for work in works])
        left = [
            job.attained_gpu_s(now_s) if work is None else work - had
            for job, work, had in zip(jobs, works, done, strict=True)
        ]
        left_s = np.maximum(np.array(left) / np.where(is_known, alone, 1.0), LEAST_LEFT_S)
        if group.batches is not None:
            return left_s, left_s
        settled = SETTLED * np.array([work or 0.0 for work in works])
        return left_s, left_s + settled / alone

    def _fill_one_size(self, tables: _Tables, row: int, job: Job, left_s: float) -> float:
        """Fill in the one size of a job; return the seconds of all of its training there.

        Its speed-up is its size.
        """
        size = job.min_gpus
        left_s = max(left_s, LEAST_LEFT_S / size)
        switch_s = self.patience * switch_seconds(job, self.default_switch_s)
        factor = 1.0 if self.problem.held(job) == size else left_s / (left_s + switch_s)
        tables.sizes[row, 1] = size
        tables.values[row, 1] = size * (left_s * size / HOUR_S) ** -self.weight * factor
        tables.rates[row, 1] = float(size)
        tables.nodes[row, 1] = -(-size // self.problem.gpus_a_node)
        tables.left_s[row] = left_s * size
        trained_s = job.curve[-1].seconds if job.curve else 0.0
        return trained_s + left_s


def switch_seconds(job: Job, default_s: float) -> float:
    """Return what one stop and resume of a job costs: as measured, else the default."""
    switch_s = job.switch_s
    return default_s if switch_s is None else switch_s
