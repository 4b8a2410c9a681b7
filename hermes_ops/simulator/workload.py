"""The input of a simulation (`Workload`) and its result (`SimulationRun`), as frozen facts.

Times are virtual seconds from 0. Losses are "lower is better".
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from hermes_ops.core.model import Gpu, JobId, Point, SweepId, Value
from hermes_ops.core.sizes import BatchRange, StepTime

Placement = tuple[int, ...]
"""The number of GPUs on each node of a job, descending: (4, 4, 2) are ten GPUs on three nodes."""

ExpectedRate = Callable[[Placement, int, int | None], float]
"""The units of work a second by placement, and by the epoch and batch of the last step."""


class Pace(NamedTuple):
    """How fast a job trains: `rate` units of work a second.

    `step` is what the job measures of it, `batch` the samples of a step; None: not measured.
    A step takes so many `passes`.
    """

    rate: float
    step: StepTime | None = None
    batch: int | None = None
    passes: int = 1

    @property
    def step_s(self) -> float:
        """The seconds of a step, all passes; of a unit of work where steps are not measured."""
        if self.step is None:
            return 1.0 / self.rate
        return self.step.seconds + (self.passes - 1) * (self.step.compute_s or 0.0)


class TrainingModel(Protocol):
    """How fast a job does its work, which is counted in units of the model's own.

    `Work.seconds` and the `seconds` of the points of `Work.curve` are such units then.
    """

    @property
    def sizes(self) -> tuple[int, ...]:
        """The numbers of GPUs on which it may run, ascending; at least one."""
        ...

    @property
    def batch_range(self) -> BatchRange | None:
        """The batches that a plan may give it; None: it takes none from a plan."""
        ...

    def pace(self, placement: Placement, epoch: int, batch: int | None) -> Pace:
        """Return its pace on these GPUs, once `epoch` points of its curve have been reached.

        `batch` are the samples of a step; None: as the job itself chooses them.
        """
        ...

    def noise_scale(self, epoch: int) -> float | None:
        """Return the noise scale of its gradients in samples, as it measures it; None: it cannot.

        Source: McCandlish et al., "An Empirical Model of Large-Batch Training", 2018.
        """
        ...


TRACE = SweepId("trace")  # the sweep of jobs that belong to none


@dataclass(frozen=True, slots=True)
class Costs:
    """The costs of a segment beside training, in seconds during which the job holds its GPUs.

    Every segment begins with `handover_s`, `startup_s` and `warm_s`, every resumed one also with
    `restore_s`; one that is stopped ends with `checkpoint_s` and `leave_s`. No job can measure
    handover, warming up and leaving by itself. As in a live pool, a policy takes the end of the
    handover for the segment's start, and warming up and leaving for training: they are in the
    seconds of the points that it sees.

    A job that is stopped after its last point, with at most `ending_s` to go, finishes.

    `repeat_s`: the training that a stop is expected to repeat (`Job.repeat_s`), which a policy sees
    once the job has trained; None: a script with the hook. It is no cost of its own: what a resumed
    segment trains once more is a part of `restore_s`.
    """

    startup_s: float = 0.0
    restore_s: float = 0.0
    checkpoint_s: float = 0.0
    handover_s: float = 0.0
    warm_s: float = 0.0
    leave_s: float = 0.0
    ending_s: float = 0.0
    repeat_s: float | None = None


class SegmentStart(NamedTuple):
    """The start of a segment: `lead_s` seconds from the end of the handover until it trained.

    `startup_s` and `restore_s` are the measured parts of them, which a policy sees from then on.
    """

    lead_s: float
    startup_s: float
    restore_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Work:
    """The truth about one job: it trains `seconds` alone on `gpus` GPUs until its end.

    `curve` holds its whole learning curve (seconds cumulative, the last at most `seconds`), of
    which a policy sees the trained part. `cut_short`: its recording ends with its curve, so nothing
    later is known. `starts`: the starts of its first segments, where they are known.

    With a `training` model the job may take other sizes than the `gpus` that its user requests,
    and `seconds`, those of the curve too, are the model's units of work. `expects` is then the rate
    that the job expects on a placement, with the noise of its gradients as in that epoch with that
    batch (None: its initial one).
    """

    id: JobId
    submitted_s: float
    seconds: float
    gpus: int = 1
    sweep: SweepId = TRACE
    user: str = ""
    virtual_cluster: str = ""
    model_name: str | None = None
    tensor_skew: float | None = None
    weight: float = 1.0
    deadline_s: float | None = None
    preemptible: bool = True
    total_steps: int | None = None
    curve: tuple[Point, ...] = ()
    configuration: tuple[tuple[str, Value], ...] = ()
    costs: Costs = Costs()
    cut_short: bool = False
    starts: tuple[SegmentStart, ...] = ()
    training: TrainingModel | None = None
    batch: int | None = None  # samples a step, as its user requests
    steps: tuple[float, ...] = ()  # with that batch, until each point of its curve
    exclusive_s: float | None = None  # alone on the requested GPUs; None: unknown, or `seconds`
    step_times: tuple[StepTime, ...] = ()  # declared: a policy knows them before the job has run
    expects: ExpectedRate | None = None  # None: the rate of `training`

    @property
    def alone_s(self) -> float | None:
        """The seconds that it takes alone on the requested GPUs; None where they are unknown."""
        if self.exclusive_s is None and self.training is None:
            return self.seconds
        return self.exclusive_s

    def start_of(self, segment: int, *, resumed: bool) -> SegmentStart:
        """Return the start of that segment (from 0)."""
        if segment < len(self.starts):
            return self.starts[segment]
        restore_s = self.costs.restore_s if resumed else 0.0
        lead_s = self.costs.startup_s + restore_s + self.costs.warm_s
        return SegmentStart(lead_s, self.costs.startup_s, restore_s)


@dataclass(frozen=True, slots=True)
class NodeFailure:
    """The node's jobs lose the work since their last checkpoint; it is back at `back_s`."""

    at_s: float
    node: str
    back_s: float


@dataclass(frozen=True, slots=True)
class Interference:
    """Jobs with a GPU on the node train at `speed` (in (0, 1]) of their pace until `until_s`."""

    at_s: float
    node: str
    until_s: float
    speed: float


@dataclass(frozen=True, slots=True)
class Workload:
    """Jobs and disturbances, with a name for reports.

    `spread_speeds`: by model name, the part in (0, 1] of its speed at which a job trains on more
    nodes than its GPUs need; a model that is not named is not slowed down.
    `observation_delay_s`: seconds from when a point of a curve is reached until a policy sees it.
    `speed_reports`: points of its curve that a segment reaches before a policy sees the step time
    on its GPUs; in a pool two, as what comes before the first one is start-up too.
    `round_s`: decisions are made at its multiples alone; a job that ends in between keeps its GPUs
    until then. None: whenever something happens. `first_decision_s`: with rounds, none is made
    before. `whole_seconds`: the time to each point of a curve and to a job's end is rounded to
    seconds, half to even. `window_s`: jobs that end until then count as completed in time; None:
    all. `drops`: a job that gets no GPUs at the first decision after its submission leaves.
    """

    name: str
    jobs: tuple[Work, ...]
    disturbances: tuple[NodeFailure | Interference, ...] = ()
    spread_speeds: tuple[tuple[str, float], ...] = ()
    observation_delay_s: float = 0.0
    speed_reports: int = 0
    round_s: float | None = None
    first_decision_s: float = 0.0
    whole_seconds: bool = False
    window_s: float | None = None
    drops: bool = False

    @property
    def is_elastic(self) -> bool:
        """True when some job may take several sizes or batches."""
        return any(work.training is not None for work in self.jobs)


@dataclass(frozen=True, slots=True)
class SimulatedSegment:
    """A stretch in which a job held GPUs, its costs included; `lost_s` of it were not training."""

    job: JobId
    gpus: tuple[int, ...]
    begin_s: float
    end_s: float
    lost_s: float
    outcome: str  # "finished" | "preempted" | "resized" | "stopped_early" | "failed" (its node)


@dataclass(frozen=True, slots=True)
class JobOutcome:
    """The outcome of one job. `ended_s` is None for a job that was still paused at the end."""

    work: Work
    state: str  # "finished" | "stopped_early"
    first_start_s: float | None
    ended_s: float | None
    trained_s: float  # of `work.seconds`
    service_gpu_s: float
    lost_gpu_s: float  # GPU-seconds held but not trained, repeated work included
    preemptions: int
    waited_s: float  # without GPUs, between submission and end
    resizes: int = 0  # restarts on other GPUs or with another batch, without waiting

    @property
    def completion_s(self) -> float | None:
        """Submission to end; None when it has not finished."""
        if self.ended_s is None or self.state != "finished":
            return None
        return self.ended_s - self.work.submitted_s


@dataclass(frozen=True, slots=True)
class LossObservation:
    """A loss and the virtual time at which it was reached."""

    job: JobId
    step: int
    loss: float
    at_s: float


@dataclass(frozen=True, slots=True)
class SimulationRun:
    """One simulation: `outcomes` by submission, `segments` and `observations` in time order.

    `decision_s` are the measured (real) seconds of all decisions, in order.
    """

    workload: Workload
    gpus: tuple[Gpu, ...]
    policy: str
    outcomes: tuple[JobOutcome, ...]
    segments: tuple[SimulatedSegment, ...]
    observations: tuple[LossObservation, ...] = ()
    decisions: int = 0
    decision_s: tuple[float, ...] = field(default=(), compare=False)
