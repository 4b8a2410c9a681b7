"""What a policy sees (`Snapshot`) and what it answers (`Plan`), as frozen facts.

Units stand in the names: `_s` seconds, `_gpu_s` GPU-seconds. Times are seconds since the epoch of
the driver's clock (Unix time live, zero-based virtual time in a simulation). A loss is always
"lower is better": a maximised objective enters with its sign turned.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import NewType, Protocol, TypeVar

JobId = NewType("JobId", str)
SweepId = NewType("SweepId", str)


class Phase(Enum):
    """Where a job stands. Only RUNNING and STARTING jobs hold GPUs in a snapshot."""

    PENDING = "pending"  # not begun: no configuration, no checkpoint
    WAITING = "waiting"  # begun, holds no GPU, resumes from its checkpoint
    STARTING = "starting"  # granted its GPUs, not yet seen to run
    RUNNING = "running"
    STOPPING = "stopping"  # told to stop, still checkpointing; counts as holding nothing
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


@dataclass(frozen=True, slots=True)
class Job:
    """What a policy schedules: a trial of a sweep, or a job of a trace."""

    id: JobId
    sweep: SweepId
    submitted_s: float
    phase: Phase
    gpus_held: tuple[int, ...] = ()
    min_gpus: int = 1
    max_gpus: int = 1
    weight: float = 1.0
    user: str = ""
    virtual_cluster: str = ""
    batch_size_range: tuple[int, int] | None = None
    model_name: str | None = None
    tensor_skew: float | None = None
    total_steps: int | None = None
    deadline_s: float | None = None
    preemptible: bool = True
    service_gpu_s: float = 0.0  # attained over the whole life; survives every stop
    curve: tuple[Point, ...] = ()
    step_seconds: tuple[tuple[int, float], ...] = ()  # (GPUs, seconds a step), as measured
    preemptions: int = 0
    started_s: float | None = None  # begin of the current segment, RUNNING and STARTING only
    waiting_since_s: float | None = None  # last stop (or submission), when it holds nothing
    steps_at_start: int = 0  # step reached when the current segment began
    checkpoint_s: float | None = None  # measured seconds to write a checkpoint
    restore_s: float | None = None  # measured seconds to read it back
    startup_s: float | None = None  # measured seconds until Python and the framework train
    since_checkpoint_s: float | None = None

    @property
    def is_open(self) -> bool:
        """True for a job that has begun and has not ended."""
        return self.phase in OPEN_PHASES

    @property
    def holds_gpus(self) -> bool:
        """True for a job that has GPUs now or has been granted them."""
        return self.phase in (Phase.STARTING, Phase.RUNNING)

    @property
    def last_step(self) -> int:
        """The newest step of the curve; 0 before the first."""
        return self.curve[-1].step if self.curve else 0

    @property
    def switch_s(self) -> float | None:
        """Seconds that one stop and resume cost, None before anything was measured."""
        parts = (self.checkpoint_s, self.restore_s, self.startup_s)
        known = [p for p in parts if p is not None]
        return sum(known) if known else None


OPEN_PHASES = (Phase.WAITING, Phase.STARTING, Phase.RUNNING, Phase.STOPPING)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The pool at one instant. `gpus` are those that jobs may use; `jobs` in no special order."""

    time_s: float
    gpus: tuple[Gpu, ...]
    jobs: tuple[Job, ...]

    def job(self, job_id: JobId) -> Job:
        """The job of that id; KeyError when there is none."""
        for job in self.jobs:
            if job.id == job_id:
                return job
        raise KeyError(job_id)


@dataclass(frozen=True, slots=True)
class Term:
    """One named number in the score of a choice."""

    name: str
    value: float


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a job runs, waits or ends: its score's terms, the runner-up, what would change it."""

    text: str
    terms: tuple[Term, ...] = ()
    runner_up: JobId | None = None
    would_change: str = ""


@dataclass(frozen=True, slots=True)
class Grant:
    """One job holds these GPUs (by index, ascending) from now on."""

    job: JobId
    gpus: tuple[int, ...]
    batch_size: int | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """A policy's answer.

    `grants` is the whole target allocation: a job that runs and has no grant is to be stopped.
    `ends` are jobs to be ended early, for good. `ranking` orders the waiting jobs, first served
    first (shown to users; it need not be complete). `review_at_s`: ask again then even if nothing
    happens. `reasons` holds one entry for each job that the plan speaks of.
    """

    grants: tuple[Grant, ...] = ()
    ends: tuple[JobId, ...] = ()
    ranking: tuple[JobId, ...] = ()
    review_at_s: float | None = None
    reasons: dict[JobId, Reason] = field(default_factory=dict)

    def gpus_of(self, job: JobId) -> tuple[int, ...]:
        """The GPUs that the plan gives to a job; empty when none."""
        return next((g.gpus for g in self.grants if g.job == job), ())


@dataclass(frozen=True, slots=True)
class Stop:
    """Checkpoint and stop the job; `final` ends it for good (stopped early)."""

    job: JobId
    reason: Reason
    final: bool = False


@dataclass(frozen=True, slots=True)
class Start:
    """Open or resume the job on these GPUs."""

    job: JobId
    gpus: tuple[int, ...]
    reason: Reason
    batch_size: int | None = None


@dataclass(frozen=True, slots=True)
class Resize:
    """Checkpoint, stop and restart the job on these GPUs."""

    job: JobId
    gpus: tuple[int, ...]
    reason: Reason
    batch_size: int | None = None


Action = Stop | Start | Resize
M = TypeVar("M")


class Policy(Protocol[M]):
    """`decide(snapshot, memory) -> (plan, memory)`, pure.

    Memory is a frozen, JSON-serialisable-by-`encode` value that the driver keeps for the policy;
    `initial()` is the memory of a policy that has seen nothing. Losing it costs quality only.
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
        """The memory before the first decision."""
        ...

    def decide(self, snapshot: Snapshot, memory: M) -> tuple[Plan, M]:
        """The plan for this snapshot, and the memory for the next."""
        ...
