"""The input of a policy (`Snapshot`) and its output (`Plan`), as frozen dataclasses.

Units stand in the names: `_s` seconds, `_gpu_s` GPU-seconds. Times are seconds since the epoch of
the driver's clock (Unix time live, zero-based virtual time in a simulation). A loss is always
"lower is better": a maximised objective enters with its sign turned.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from itertools import chain
from math import inf
from operator import attrgetter
from typing import NewType, Protocol, TypeVar, overload

from hermes_ops.core.order import by_submission, submission
from hermes_ops.core.sizes import BatchRange, StepTime

_INDEX = attrgetter("index")

JobId = NewType("JobId", str)
SweepId = NewType("SweepId", str)
Value = float | int | str | bool


class Phase(Enum):
    """The phase of a job. Only RUNNING and STARTING jobs hold GPUs in a snapshot."""

    PENDING = "pending"  # not begun: no configuration, no checkpoint
    WAITING = "waiting"  # begun, holds no GPU, resumes from its checkpoint
    STARTING = "starting"  # granted its GPUs, not yet seen to run
    RUNNING = "running"
    STOPPING = "stopping"  # must stop, still checkpointing; counts as holding nothing
    ENDED = "ended"  # in a final state; kept in a snapshot for its curve only


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU, by its index in the pool, on a node."""

    index: int
    node: str = "local"


@dataclass(frozen=True, slots=True)
class Point:
    """A point of a learning curve: the loss after `step` steps, `seconds` of training in all."""

    step: int
    loss: float
    seconds: float


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Job:
    """The unit that a policy schedules: a trial of a sweep, or a job of a trace."""

    id: JobId
    sweep: SweepId
    submitted_s: float
    phase: Phase
    gpus_held: tuple[int, ...] = ()
    gpus_to_leave: tuple[int, ...] = ()  # STOPPING: the GPUs that it still occupies
    uses_gpus: bool = True  # False: it has not begun on those it holds, as a pod that waits
    share_held: float = 1.0  # of each of its GPUs, in (0, 1]; less than 1 in a simulation only
    min_gpus: int = 1
    max_gpus: int = 1
    sizes: tuple[int, ...] = ()  # numbers of GPUs it may take, ascending; none: any of its range
    requested_gpus: int | None = None  # by its user; None: `min_gpus`
    batch_range: BatchRange | None = None  # None: its batch is its own affair
    requested_batch: int | None = None  # samples a step, by its user
    batch_held: int | None = None  # samples a step that it was granted; None: as it chooses
    noise_scale: float | None = None  # of its gradients, in samples, as last measured
    weight: float = 1.0
    user: str = ""
    virtual_cluster: str = ""
    priority_class: str = ""  # of the pool's quota; empty: normal
    model_name: str | None = None
    tensor_skew: float | None = None
    total_steps: int | None = None
    deadline_s: float | None = None
    preemptible: bool = True
    resumes: bool = True  # STOPPING: it waits from then on; False: it ends
    nodes: tuple[str, ...] = ()  # its GPUs are all of one of these nodes; none: of any
    service_gpu_s: float = 0.0  # attained over the whole life; survives every stop
    service_at_s: float | None = None  # the instant for which it holds; None: the snapshot's
    configuration: tuple[tuple[str, Value], ...] = ()  # its hyper-parameters, once it has them
    curve: Sequence[Point] = ()  # never changed: a longer one is another object
    step_times: tuple[StepTime, ...] = ()  # as measured, one for each size and batch
    preemptions: int = 0
    segments: int = 0  # begun so far: each stop, and each other size, adds one
    started_s: float | None = None  # begin of the current segment, RUNNING and STARTING only
    waiting_since_s: float | None = None  # last stop (or submission), when it holds nothing
    steps_at_start: int = 0  # step reached when the current segment began
    checkpoint_s: float | None = None  # measured seconds to write a checkpoint
    restore_s: float | None = None  # measured seconds to read it back
    startup_s: float | None = None  # measured seconds until Python and the framework train
    repeat_s: float | None = None  # seconds of training that a stop is expected to repeat

    @property
    def is_open(self) -> bool:
        """True for a job that has begun and has not ended."""
        return self.phase is not Phase.PENDING and self.phase is not Phase.ENDED

    @property
    def may_end(self) -> bool:
        """True for an open job that may be ended early: one that is stopping is judged later."""
        return self.is_open and self.phase is not Phase.STOPPING

    def takes(self, number: int) -> bool:
        """Return whether it may run on that number of GPUs."""
        if self.sizes:
            return number in self.sizes
        return self.min_gpus <= number <= self.max_gpus

    def sizes_up_to(self, limit: int) -> Sequence[int]:
        """Return the numbers of GPUs, ascending and at most `limit`, on which it may run."""
        if self.sizes:
            return [size for size in self.sizes if size <= limit]
        return range(self.min_gpus, min(self.max_gpus, limit) + 1)

    def size_above(self, size: int, limit: int | None = None) -> int | None:
        """Return the least number of GPUs above `size`, at most `limit`; None: it takes none."""
        sizes = self.sizes_up_to(self.max_gpus if limit is None else limit)
        return next((larger for larger in sizes if larger > size), None)

    def as_stopping(self, *, resumes: bool = True) -> Job:
        """Return the job in phase STOPPING: the GPUs that it holds become those that it leaves."""
        return replace(
            self, phase=Phase.STOPPING, gpus_held=(), gpus_to_leave=self.gpus_held, resumes=resumes
        )

    @property
    def gpus_used(self) -> int:
        """The number of GPUs whose time counts for its user and team."""
        return len(self.gpus_held) if self.uses_gpus else 0

    @property
    def holds_gpus(self) -> bool:
        """True for a job that has GPUs now or has been granted them."""
        return self.phase in HOLDING_PHASES

    def attained_gpu_s(self, now_s: float) -> float:
        """Return the service up to `now_s`: it grows by the share held of each GPU, times seconds.

        Source: Tiresias (NSDI 2019), the attained service of 2D-LAS: GPUs times time.
        """
        if self.service_at_s is None or not self.gpus_held:
            return self.service_gpu_s
        held_s = (now_s - self.service_at_s) * self.share_held
        return self.service_gpu_s + held_s * len(self.gpus_held)

    @property
    def last_step(self) -> int:
        """The newest step of the curve; 0 before the first."""
        return self.curve[-1].step if self.curve else 0

    def seconds_a_step(self, gpus: int) -> float | None:
        """Return the measured seconds of a step on that number of GPUs; None before any."""
        return next((time.seconds for time in self.step_times if time.gpus == gpus), None)

    @property
    def has_finished_slice(self) -> bool:
        """True when the running segment has brought something to judge.

        One new step since the segment began; two points when the segment began at step 0, because
        one point shows no drop. A job that reports nothing never finishes a slice. (What makes a
        job PREEMPTIBLE is not recovered from the Hermes paper; this is a choice.)
        """
        if self.steps_at_start == 0:
            return len(self.curve) >= 2
        return self.last_step > self.steps_at_start

    @property
    def switch_s(self) -> float | None:
        """Seconds that one stop and resume cost, None before anything was measured.

        What a script without the hook restores is the training that it repeats: what a stop is
        expected to repeat counts, not what the last one did.
        """
        restore_s = self.restore_s if self.repeat_s is None else self.repeat_s
        if self.startup_s is None and self.checkpoint_s is None and restore_s is None:
            return None
        return (self.checkpoint_s or 0.0) + (restore_s or 0.0) + (self.startup_s or 0.0)


OPEN_PHASES = (Phase.WAITING, Phase.STARTING, Phase.RUNNING, Phase.STOPPING)
QUEUED_PHASES = (Phase.PENDING, Phase.WAITING)
HOLDING_PHASES = (Phase.STARTING, Phase.RUNNING)


class JobGroups(Sequence[Job]):
    """Several groups of jobs as one sequence, without a copy of them."""

    def __init__(self, *groups: Sequence[Job]) -> None:
        self._groups = groups

    def __iter__(self) -> Iterator[Job]:
        return chain.from_iterable(self._groups)

    def __len__(self) -> int:
        return sum(map(len, self._groups))

    @overload
    def __getitem__(self, index: int) -> Job: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Job, ...]: ...
    def __getitem__(self, index: int | slice) -> Job | tuple[Job, ...]:
        return tuple(self)[index]


@dataclass(frozen=True)
class Snapshot:
    """The pool at one instant. `gpus` are those that jobs may use; `jobs` in no special order.

    The views below are computed on first use and cached. A driver that maintains them passes them
    with `prepared`, so that a decision needs no pass over all waiting jobs.
    """

    time_s: float
    gpus: tuple[Gpu, ...]
    jobs: Sequence[Job]

    @classmethod
    def prepared(
        cls,
        time_s: float,
        gpus: tuple[Gpu, ...],
        *,
        holding: Sequence[Job],
        queue: Sequence[Job],
        others: Sequence[Job] = (),
        queue_of: Mapping[str, Sequence[Job]] | None = None,
        index: Mapping[JobId, Job] | None = None,
        retained: Mapping[JobId, Grant] | None = None,
        held: Mapping[JobId, tuple[int, ...]] | None = None,
        free: frozenset[int] | None = None,
    ) -> Snapshot:
        """Return a snapshot whose views are given instead of computed.

        Views may be left out. What is given must not change while the snapshot's `jobs` exist.
        """
        snapshot = cls(time_s, gpus, JobGroups(holding, queue, others))
        views: dict[str, object] = {"holding": holding, "queue": queue, "others": others}
        views |= {"queue_of": queue_of, "index": index}
        views |= {"retained": retained, "held": held, "free": free}
        # This is where a cached_property keeps its value.
        vars(snapshot).update((name, view) for name, view in views.items() if view is not None)
        return snapshot

    def with_stopping(self, jobs: Collection[JobId]) -> Snapshot:
        """Return the snapshot in which these jobs are stopping for good."""
        if not jobs:
            return self  # with its cached views
        shown = (job.as_stopping(resumes=False) if job.id in jobs else job for job in self.jobs)
        return replace(self, jobs=tuple(shown))

    @cached_property
    def index(self) -> Mapping[JobId, Job]:
        """The jobs by id."""
        return {job.id: job for job in self.jobs}

    @cached_property
    def holding(self) -> Sequence[Job]:
        """The RUNNING and STARTING jobs, in order of submission."""
        return tuple(by_submission(self._sorted_out[0]))

    @cached_property
    def queue(self) -> Sequence[Job]:
        """The PENDING and WAITING jobs, in order of submission."""
        return tuple(by_submission(self._sorted_out[1]))

    @cached_property
    def queue_of(self) -> Mapping[str, Sequence[Job]]:
        """The jobs of `queue` by virtual cluster, each in order of submission; none is empty."""
        of_cluster: dict[str, list[Job]] = defaultdict(list)
        for job in self.queue:
            of_cluster[job.virtual_cluster].append(job)
        return of_cluster

    @cached_property
    def others(self) -> Sequence[Job]:
        """The STOPPING and ENDED jobs."""
        return tuple(self._sorted_out[2])

    @cached_property
    def _sorted_out(self) -> tuple[list[Job], list[Job], list[Job]]:
        """The jobs of `holding`, `queue` and `others`, sorted in one pass."""
        holding: list[Job] = []
        queue: list[Job] = []
        others: list[Job] = []
        (pending, waiting), (starting, running) = QUEUED_PHASES, HOLDING_PHASES
        for job in self.jobs:
            phase = job.phase
            if phase is waiting or phase is pending:
                queue.append(job)
            elif phase is running or phase is starting:
                holding.append(job)
            else:
                others.append(job)
        return holding, queue, others

    @cached_property
    def held(self) -> Mapping[JobId, tuple[int, ...]]:
        """The GPUs, ascending, that each RUNNING or STARTING job can keep: those of `retained`."""
        return {job: grant.gpus for job, grant in self.retained.items()}

    @cached_property
    def free(self) -> frozenset[int]:
        """The GPUs of which no job keeps anything."""
        free = set(map(_INDEX, self.gpus))
        free.difference_update(chain.from_iterable(self.held.values()))
        return frozenset(free)

    @cached_property
    def idle(self) -> frozenset[int]:
        """The GPUs of `free` that no stopping job still occupies."""
        leaving = [job.gpus_to_leave for job in self.others if job.phase is Phase.STOPPING]
        return self.free.difference(*leaving) if leaving else self.free

    @cached_property
    def node_of(self) -> Mapping[int, str]:
        """The node of each GPU, by the GPU's index."""
        return {gpu.index: gpu.node for gpu in self.gpus}

    def free_without(self, stopped: Collection[JobId]) -> set[int]:
        """Return the GPUs of which no job keeps anything once these jobs have stopped."""
        free = set(self.free)
        gone = [self.retained[job] for job in stopped if job in self.retained]
        free.update(chain.from_iterable(grant.gpus for grant in gone))
        if any(grant.share < 1 for grant in gone):  # another may keep the rest of its GPU
            retained = (grant for job, grant in self.retained.items() if job not in stopped)
            free.difference_update(chain.from_iterable(grant.gpus for grant in retained))
        return free

    @cached_property
    def retained(self) -> Mapping[JobId, Grant]:
        """The grants by which RUNNING and STARTING jobs keep what they hold.

        A job whose GPUs have left the pool, whose number of GPUs is outside its range, or whose
        GPUs another claims beyond their capacity (a drift that a driver has still to repair) keeps
        nothing: of two claimants the one that must not be stopped wins, then the running one,
        then the first submitted.
        """
        claimed = list(chain.from_iterable(job.gpus_held for job in self.holding))
        if len(set(claimed)) == len(claimed):
            pool = {gpu.index for gpu in self.gpus}
            able = (
                job for job in self.holding if _in_range(job) and pool.issuperset(job.gpus_held)
            )
            return {job.id: _retained_grant(job) for job in able}
        left = {gpu.index: 1.0 for gpu in self.gpus}
        kept: dict[JobId, Grant] = {}
        for job in sorted(self.holding, key=_claim):
            gpus = job.gpus_held
            in_range = _in_range(job) and len(set(gpus)) == len(gpus)
            if in_range and all(left.get(gpu, -inf) >= job.share_held - SHARE_EPS for gpu in gpus):
                for gpu in gpus:
                    left[gpu] -= job.share_held
                kept[job.id] = _retained_grant(job)
        return kept


SHARE_EPS = 1e-9  # shares of a GPU that add up to 1 in floating point


def _in_range(job: Job) -> bool:
    return job.takes(len(job.gpus_held))


def _retained_grant(job: Job) -> Grant:
    return Grant(job.id, tuple(sorted(job.gpus_held)), job.share_held, job.batch_held)


def _claim(job: Job) -> tuple[object, ...]:
    return (job.preemptible, job.phase is not Phase.RUNNING, submission(job))


@dataclass(frozen=True, slots=True)
class Term:
    """One named number in the score of a choice."""

    name: str
    value: float

    @classmethod
    def several(cls, **values: float) -> tuple[Term, ...]:
        """Return a term for each of these named numbers."""
        return tuple(cls(name, float(value)) for name, value in values.items())


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a job runs, waits or ends: its score's terms, the runner-up, what would change it."""

    text: str
    terms: tuple[Term, ...] = ()
    runner_up: JobId | None = None
    would_change: str = ""


@dataclass(frozen=True, slots=True)
class Grant:
    """One job holds these GPUs (by index, ascending) from now on.

    `share` is the part of each GPU that it gets, in (0, 1]; only a simulation grants less than 1.
    `batch` is the samples of a step; None: as the job chooses.
    """

    job: JobId
    gpus: tuple[int, ...]
    share: float = 1.0
    batch: int | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """A policy's answer.

    `grants` is the whole target allocation: a job that runs and has no grant is to be stopped.
    `ends` are jobs to be ended early, for good. `ranking` orders the waiting jobs, first served
    first (shown to users; its head is enough). `review_at_s`: ask again then even if nothing
    happens. `reasons` holds one entry for each job that the plan speaks of. `notices` are granted
    jobs that lose their GPUs soon, each with the time.
    """

    grants: tuple[Grant, ...] = ()
    ends: tuple[JobId, ...] = ()
    ranking: tuple[JobId, ...] = ()
    review_at_s: float | None = None
    reasons: Mapping[JobId, Reason] = field(default_factory=dict)
    notices: tuple[tuple[JobId, float], ...] = ()

    def gpus_of(self, job: JobId) -> tuple[int, ...]:
        """Return the GPUs that the plan gives to a job; empty when none."""
        return next((g.gpus for g in self.grants if g.job == job), ())

    def reviewed_by(self, at_s: float | None) -> Plan:
        """Return the plan with a review at that time at the latest; None and inf are no time."""
        times_s = [t for t in (at_s, self.review_at_s) if t is not None and t < inf]
        return replace(self, review_at_s=min(times_s, default=None))


M = TypeVar("M")


class Policy(Protocol[M]):
    """`decide(snapshot, memory) -> (plan, memory)`, pure.

    Memory is a frozen value that the driver keeps for the policy from decision to decision. It is
    not stored: a restarted driver begins with `initial()`, the memory of a policy that has seen
    nothing. Losing it costs quality only.
    """

    @property
    def name(self) -> str:
        """The name in POLICIES."""
        ...

    @property
    def preempts(self) -> bool:
        """False: it never stops a job, and promises no bound on waiting."""
        ...

    def initial(self) -> M:
        """Return the memory before the first decision."""
        ...

    def decide(self, snapshot: Snapshot, memory: M) -> tuple[Plan, M]:
        """Return the plan for this snapshot, and the memory for the next."""
        ...


@dataclass(frozen=True, slots=True)
class PastTrial:
    """One trial of an earlier sweep: its hyper-parameters and its curve up to `total_steps`.

    Losses are "lower is better"; `seconds` of the points are cumulative training seconds alone on
    its GPUs. A trial that was ended early has a curve shorter than `total_steps`.
    """

    configuration: tuple[tuple[str, Value], ...]
    curve: Sequence[Point]
    total_steps: int | None = None
