"""Pollux: the sizes with the greatest fair goodput, by an exact knapsack."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import ceil, inf
from typing import ClassVar

import numpy as np

from hermes_ops.core.goodput import BatchTable
from hermes_ops.core.model import (
    QUEUED_PHASES,
    Grant,
    Job,
    JobId,
    Phase,
    Plan,
    Reason,
    Snapshot,
    Term,
)
from hermes_ops.core.nodes import on_allowed_node
from hermes_ops.core.oracle import GoodputOracle
from hermes_ops.core.order import submission
from hermes_ops.core.sizes import StepTime
from hermes_ops.core.speed_model import Floats, SpeedModel, fit_speed_model
from hermes_ops.policies.toolbox.job_speeds import MeasuredSpeeds, kind_key, packed
from hermes_ops.policies.toolbox.knapsack import knapsack
from hermes_ops.policies.toolbox.parameter_checks import one_of, positive
from hermes_ops.policies.toolbox.sized_grants import PACKED, SizingProblem
from hermes_ops.policies.toolbox.whole_nodes import cleared, packing, packing_sizes

MOST_GPUS = 64
RESTART_S = 30.0
REVIEW_DELAY_S = 1.0
"""Seconds from the moment at which F of a job exceeds 0 until the sizes are decided again."""

WEIGHT = 0.25
FLOOR = 1e-3
PLACEMENTS = ("spread", "packed")
NOISES = ("known", "measured")

KnownRate = Callable[[Job, tuple[int, ...]], float]
"""The rate of a job by the GPUs on each of its nodes."""

_Place = tuple[int, int]


@dataclass(frozen=True, slots=True)
class PolluxMemory:
    """The grants of the last decision and its time: at one instant they are not changed."""

    at_s: float | None = None
    grants: tuple[Grant, ...] = ()


@dataclass(frozen=True, slots=True)
class Pollux:
    """Choose the sizes with the greatest sum of -1 / (0.25 x F x speed-up + 0.001) over all jobs.

    The speed-up of a size is its goodput (steps of the initial batch a second, with the batch that
    is best there) over that of the job's fair size, the largest up to GPUs / jobs, rounded up. F is
    1 for the size that a job holds, else max(age - 30 s x restarts, 0) / (age + 30 s). A job gets
    at most twice the GPUs of the largest size that it has tried, at most 64, and at first its
    least. Sizes of a node and more are whole nodes. Decided again every `interval_s`, and sooner
    for jobs of F = 0 (that of a job just submitted) while GPUs are idle.

    With an oracle step times are known; without one, or with `blind`, they are fitted to what
    jobs have measured: each job's own, or with `shared` those of all jobs of a kind, who then share
    the largest size as well. The noise of the gradients is measured; an oracle knows it at every
    batch, or with `noise="measured"` only speeds. `placement`: a job that fits on no single node
    is spread over several, or ("packed") gets fewer GPUs.

    Source: Qiao et al., "Pollux", OSDI 2021, section 4.2, and its public artefact (petuum/adaptdl,
    commit c793c70) for the numbers. Ours: the objective is maximised exactly, by a multiple-choice
    knapsack over packed placements, instead of the artefact's genetic algorithm, which also
    spreads jobs over nodes. The batch is left to the job.
    """

    oracle: GoodputOracle | None = None
    blind: bool = False
    shared: bool = True
    interval_s: float = 60.0
    placement: str = "spread"
    noise: str = "known"
    name: ClassVar[str] = "pollux"
    preempts: ClassVar[bool] = True
    sizes: ClassVar[bool] = True

    def __post_init__(self) -> None:
        positive("interval_s", self.interval_s)
        one_of("placement", self.placement, PLACEMENTS)
        one_of("noise", self.noise, NOISES)

    def initial(self) -> PolluxMemory:
        """Return the memory without a decision."""
        return PolluxMemory()

    def decide(self, snapshot: Snapshot, memory: PolluxMemory) -> tuple[Plan, PolluxMemory]:
        """Return the plan of the greatest value; the last one again at the same instant."""
        problem = SizingProblem.from_snapshot(snapshot)
        jobs = _by_service(problem.jobs, snapshot.time_s)
        grants = _still_possible(problem, memory.grants) if memory.at_s == snapshot.time_s else None
        if grants is None:
            sizes = problem.solve_sizes(self._sizes)
            placing = packing(problem, jobs) if self.placement == "packed" else PACKED
            grants = problem.grants(sizes, placing=placing, moving=cleared(problem, sizes))
        order = [job for job in jobs if not job.holds_gpus]
        if len(order) < len(snapshot.queue):  # some can never fit
            order = _by_service(sorted(snapshot.queue, key=submission), snapshot.time_s)
        review_s = None
        if problem.jobs:
            review_s = min(snapshot.time_s + self.interval_s, _positive_factor_s(problem, grants))
        plan = problem.plan(grants, _reason(grants), order, review_s)
        return plan, PolluxMemory(snapshot.time_s, grants)

    def _sizes(self, problem: SizingProblem) -> dict[JobId, int]:
        jobs = _by_service(problem.jobs, problem.snapshot.time_s)
        if not jobs:
            return {}
        speeds = GoodputSpeeds(problem, self._known_rate(), shared=self.shared)
        groups = _groups(problem, jobs, speeds)
        width = 1 + max(len(options) for _, options, _ in groups)
        sizes = np.zeros((len(jobs), width), dtype=np.int64)
        values = np.full((len(jobs), width), -np.inf)
        values[:, 0] = -1.0 / FLOOR
        for (_, options, fair), rows in groups.items():
            members = [jobs[row] for row in rows]
            rates = speeds.rates(members, (*options, fair))
            gains = rates[:, :-1] / np.maximum(rates[:, -1:], 1e-12)
            factors = _restart_factors(problem, members, options)
            columns = slice(1, len(options) + 1)
            sizes[rows, columns] = options
            values[rows, columns] = -1.0 / (WEIGHT * factors * gains + FLOOR)
        chosen = knapsack(sizes, values, problem.gpus)
        picked = np.take_along_axis(sizes, chosen[:, None], axis=1)[:, 0].tolist()
        return {job.id: size for job, size in zip(jobs, picked, strict=True)}

    def _known_rate(self) -> KnownRate | None:
        if self.oracle is None or self.blind:
            return None
        return self.oracle.expected_rate if self.noise == "measured" else self.oracle.rate


_Group = tuple[object, tuple[int, ...], int]


def _groups(
    problem: SizingProblem, jobs: Sequence[Job], speeds: GoodputSpeeds
) -> dict[_Group, list[int]]:
    """Return the jobs' rows by what they share: their speeds, their sizes, and the fair one.

    A job gets at most twice what was tried, at first its least, at most MOST_GPUS; the size that it
    holds stays possible, so that nothing that costs a restart takes it away.
    """
    fair, each = ceil(problem.gpus / len(jobs)), problem.gpus_a_node
    groups: dict[_Group, list[int]] = {}
    group_of: dict[tuple[object, ...], _Group] = {}
    held_by = problem.snapshot.held
    for row, job in enumerate(jobs):
        key, held = speeds.key(job), len(held_by.get(job.id, ()))
        facts = (key, job.batch_range, job.min_gpus, job.max_gpus, job.sizes, held)
        if facts not in group_of:
            most = max(job.min_gpus, min(2 * speeds.tried(key), MOST_GPUS))
            able = packing_sizes(job, min(most, problem.gpus), each)
            options = tuple(sorted({*able, *({held} - {0})}))
            smaller = [n for n in packing_sizes(job, fair, each) if n <= fair]
            group_of[facts] = ((key, job.batch_range), options, max(smaller, default=job.min_gpus))
        groups.setdefault(group_of[facts], []).append(row)
    return groups


def _restart_factors(problem: SizingProblem, jobs: Sequence[Job], sizes: tuple[int, ...]) -> Floats:
    """Return F by job (rows) and size (columns)."""
    now_s = problem.snapshot.time_s
    age_s = np.maximum(0.0, now_s - np.array([job.submitted_s for job in jobs]))
    moves = np.array([_moves(job) for job in jobs])
    moved = np.maximum(age_s - RESTART_S * moves, 0.0) / (age_s + RESTART_S)
    held_by = problem.snapshot.held
    held = np.array([len(held_by.get(job.id, ())) for job in jobs])
    return np.where(np.array(sizes) == held[:, None], 1.0, moved[:, None])


def _moves(job: Job) -> int:
    return max(0, job.segments - 1)


def _positive_factor_s(problem: SizingProblem, grants: tuple[Grant, ...]) -> float:
    """Return when F of a waiting job that fits on the idle GPUs first exceeds 0; inf: for none.

    As long as F is 0, no size has a value for the job.
    """
    snapshot, granted = problem.snapshot, {grant.job for grant in grants}
    idle = len(snapshot.gpus) - sum(len(grant.gpus) for grant in grants)
    zero_until_s = (
        job.submitted_s + RESTART_S * _moves(job)
        for job in problem.jobs
        if job.phase in QUEUED_PHASES and job.id not in granted and job.min_gpus <= idle
    )
    due_s = (at_s + REVIEW_DELAY_S for at_s in zero_until_s if at_s >= snapshot.time_s)
    return min(due_s, default=inf)


def _still_possible(problem: SizingProblem, grants: tuple[Grant, ...]) -> tuple[Grant, ...] | None:
    """Return the grants if all jobs with GPUs have theirs, and the others can have them.

    A job that is stopping can have none yet.
    """
    snapshot = problem.snapshot
    granted = {grant.job: grant for grant in grants}
    if any(granted.get(job) != now for job, now in snapshot.retained.items()):
        return None  # it is not that decision whose moves are under way
    able = {job.id: job for job in problem.jobs if job.phase is not Phase.STOPPING}
    pool = set(snapshot.node_of)
    for grant in grants:
        if grant.job in snapshot.retained:
            continue
        job = able.get(grant.job)
        if job is None or not (job.takes(len(grant.gpus)) and pool.issuperset(grant.gpus)):
            return None
        if not on_allowed_node(snapshot, job, grant.gpus):
            return None
    return grants or None


def _by_service(jobs: Sequence[Job], now_s: float) -> list[Job]:
    """Return the jobs, which are by submission, by the service that they have had."""
    return sorted(jobs, key=lambda job: job.attained_gpu_s(now_s))


def _reason(grants: tuple[Grant, ...]) -> Callable[[Job, bool], Reason]:
    sizes = {grant.job: len(grant.gpus) for grant in grants}

    def explain(job: Job, is_granted: bool) -> Reason:
        if is_granted:
            terms = (Term("gpus", sizes.get(job.id, 0)),)
            return Reason("this size adds most to the goodput of all jobs", terms)
        return Reason("waits: the GPUs add more elsewhere", would_change="a job that ends")

    return explain


class GoodputSpeeds:
    """The goodput of jobs by size, up to a factor a job, and the largest sizes tried.

    `known` tells it; without it speeds are fitted to the steps that jobs have measured, those of
    all jobs of a kind together if it is `shared`.
    """

    def __init__(
        self, problem: SizingProblem, known_rate: KnownRate | None, *, shared: bool
    ) -> None:
        self._rate_of, self._by_kind = known_rate, shared and known_rate is None
        self._snapshot = problem.snapshot
        self._placements: dict[int, tuple[int, ...]] = {}
        self._plain = MeasuredSpeeds(problem.snapshot)
        self._extremes: dict[object, dict[_Place, list[StepTime]]] = {}
        self._models: dict[object, SpeedModel | None] = {}
        self._noise: dict[object, float] = {}
        for job in problem.snapshot.jobs:
            if job.step_times:
                _note_extremes(self._extremes.setdefault(self.key(job), {}), job.step_times)
            if job.noise_scale is not None:
                key = self.key(job)
                self._noise[key] = min(self._noise.get(key, job.noise_scale), job.noise_scale)

    def key(self, job: Job) -> object:
        """Return what jobs of equal speed share, apart from their batches and noise."""
        return kind_key(job) if self._by_kind else job.id

    def tried(self, key: object) -> int:
        """Return the largest number of GPUs that the job, or its kind, has measured; 0: none."""
        return max((gpus for gpus, _ in self._extremes.get(key, ())), default=0)

    def rates(self, jobs: Sequence[Job], sizes: Sequence[int]) -> Floats:
        """Return the goodputs of jobs of one key and range of batches, shape (jobs, sizes).

        Sizes are on as few nodes as possible.
        """
        if self._rate_of is not None:
            placements = [self._packed(size) for size in sizes]
            return np.array([[self._rate_of(job, place) for place in placements] for job in jobs])
        first = jobs[0]
        if first.batch_range is None:
            speeds = [self._plain.speed(first, size) for size in sizes]
            return np.tile(np.array(speeds), (len(jobs), 1))
        key = self.key(first)
        model = self._model(key)
        if model is None:
            return np.tile(np.array(sizes, dtype=np.float64), (len(jobs), 1))
        usual = self._noise.get(key, 0.0)
        noise = [usual if job.noise_scale is None else job.noise_scale for job in jobs]
        different, place = np.unique(np.array(noise), return_inverse=True)
        nodes = [len(self._packed(size)) for size in sizes]
        table = BatchTable.from_model(model, first.batch_range, sizes, nodes)
        return np.asarray(table.rates(different)[place])

    def _model(self, key: object) -> SpeedModel | None:
        if key not in self._models:
            places = sorted(self._extremes.get(key, {}).items())
            times = (time for _, extremes in places for time in dict.fromkeys(extremes))
            self._models[key] = _fitted(tuple(times))
        return self._models[key]

    def _packed(self, size: int) -> tuple[int, ...]:
        if size not in self._placements:
            self._placements[size] = packed(self._snapshot, size)
        return self._placements[size]


def _note_extremes(extremes: dict[_Place, list[StepTime]], times: Iterable[StepTime]) -> None:
    """Keep for each number of GPUs and nodes the times with the fewest and the most samples.

    A time between them tells little more, and each new time costs a fit.
    """
    for time in times:
        extreme = extremes.setdefault((time.gpus, time.nodes), [time, time])
        local = time.local_batch or 0
        if local <= (extreme[0].local_batch or 0) and _by_batch(time) < _by_batch(extreme[0]):
            extreme[0] = time
        if local >= (extreme[1].local_batch or 0) and _by_batch(time) > _by_batch(extreme[1]):
            extreme[1] = time


def _by_batch(time: StepTime) -> tuple[float, ...]:
    return time.local_batch or 0, time.seconds, time.compute_s or 0.0


@lru_cache(maxsize=4096)
def _fitted(times: tuple[StepTime, ...]) -> SpeedModel | None:
    """Return the model of the step times; None if none of them tells its samples a GPU."""
    try:
        return fit_speed_model(times).model
    except ValueError:
        return None
