"""What is simulated (`Workload`) and what came of it (`Run`), as frozen facts.

Times are virtual seconds from 0. Losses are "lower is better".
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from hermes_ops.core.model import Gpu, JobId, Point, SweepId, Value

TRACE = SweepId("trace")  # the sweep of jobs that belong to none


@dataclass(frozen=True, slots=True)
class Costs:
    """What a segment costs beside training, in seconds during which the job holds its GPUs.

    Every segment begins with `handover_s`, `startup_s` and `warm_s`, every resumed one also with
    `restore_s`; one that is stopped ends with `checkpoint_s` and `leave_s`. Handover, warming up
    and leaving are what no job measures by itself. As it does live, a policy takes the end of the
    handover for the segment's begin, and warming up and leaving for training: they are in the
    seconds of the points that it sees.

    A job that is stopped after its last point, with at most `ending_s` to go, comes to its own end.
    """

    startup_s: float = 0.0
    restore_s: float = 0.0
    checkpoint_s: float = 0.0
    handover_s: float = 0.0
    warm_s: float = 0.0
    leave_s: float = 0.0
    ending_s: float = 0.0


class Begin(NamedTuple):
    """How a segment began: seconds from the end of the handover until it trained.

    `startup_s` and `restore_s` are what of them it measured, as a policy sees it from then on.
    """

    lead_s: float
    startup_s: float
    restore_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Work:
    """One job as the world knows it: `seconds` of training alone on `gpus` GPUs until its end.

    `curve` holds its whole learning curve (seconds cumulative, the last at most `seconds`); a
    policy sees of it what has been trained. `cut_short`: it was recorded no further than its
    curve, so nothing is known of what would have come after. `starts`: how its first segments
    began, where that is known of each.
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
    starts: tuple[Begin, ...] = ()

    def start_of(self, segment: int, *, resumed: bool) -> Begin:
        """How that segment (from 0) begins."""
        if segment < len(self.starts):
            return self.starts[segment]
        restore_s = self.costs.restore_s if resumed else 0.0
        lead_s = self.costs.startup_s + restore_s + self.costs.warm_s
        return Begin(lead_s, self.costs.startup_s, restore_s)


@dataclass(frozen=True, slots=True)
class NodeFailure:
    """The node's jobs lose what they did since their last checkpoint; it is back at `back_s`."""

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

    `spread_speeds`: by model name, the part in (0, 1] of its pace at which a job trains on more
    nodes than its GPUs need; a model that is not named is not slowed down. `sight_s`: how much
    later than it is reached a policy sees a point of a curve.
    """

    name: str
    jobs: tuple[Work, ...]
    disturbances: tuple[NodeFailure | Interference, ...] = ()
    spread_speeds: tuple[tuple[str, float], ...] = ()
    sight_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch in which a job held GPUs, its costs included; `lost_s` of it were not training."""

    job: JobId
    gpus: tuple[int, ...]
    begin_s: float
    end_s: float
    lost_s: float
    outcome: str  # "finished" | "preempted" | "stopped_early" | "failed" (its node failed)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of one job. `ended_s` is None for a job that was still paused at the end."""

    work: Work
    state: str  # "finished" | "stopped_early"
    first_start_s: float | None
    ended_s: float | None
    trained_s: float  # of `work.seconds`
    service_gpu_s: float
    lost_gpu_s: float  # GPU-seconds held but not trained, repeated work included
    preemptions: int
    waited_s: float  # without GPUs, between submission and end

    @property
    def completion_s(self) -> float | None:
        """Submission to end; None when it has not finished."""
        if self.ended_s is None or self.state != "finished":
            return None
        return self.ended_s - self.work.submitted_s


@dataclass(frozen=True, slots=True)
class Sight:
    """A loss as it was first seen: job, step, loss, virtual time."""

    job: JobId
    step: int
    loss: float
    at_s: float


@dataclass(frozen=True, slots=True)
class Run:
    """One simulation. `outcomes` in order of submission, `segments` and `sights` in time order.

    `decision_s` are the measured (real) seconds of all decisions, in order.
    """

    workload: Workload
    gpus: tuple[Gpu, ...]
    policy: str
    outcomes: tuple[Outcome, ...]
    segments: tuple[Segment, ...]
    sights: tuple[Sight, ...] = ()
    decisions: int = 0
    decision_s: tuple[float, ...] = field(default=(), compare=False)
