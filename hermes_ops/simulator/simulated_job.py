"""The state of a simulated job, and the job as a policy sees it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import inf

from hermes_ops.core.curves import LearningCurve
from hermes_ops.core.model import Grant, Job, JobId, Phase, Point
from hermes_ops.core.sizes import StepTime
from hermes_ops.simulator.workload import JobOutcome, Pace, SimulatedSegment, Work

LONG = 256
"""Points from which a curve is kept in arrays, whose versions share memory. Below, tuples are
faster; all versions of a longer one as tuples, with what policies compute of them, take gigabytes.
"""


@dataclass(frozen=True, slots=True)
class OracleJob(Job):
    """A job as a policy sees it, with its progress, which only an oracle reads.

    It had trained `trained_s` at `trained_at_s`, and since then trains at `speed` (0: not at all).
    `batch_trained` is the batch of its last step; None: it had none, or its batch is not known.
    """

    trained_s: float = 0.0
    trained_at_s: float = 0.0
    speed: float = 0.0
    batch_trained: int | None = None

    def progress_s(self, now_s: float) -> float:
        """Return the seconds trained up to `now_s`."""
        return self.trained_s + self.speed * max(0.0, now_s - self.trained_at_s)


@dataclass(slots=True, eq=False)
class SimulatedJob:
    """The mutable state of one job. `rank`: its index in the order of submission."""

    work: Work
    rank: int
    waiting_since_s: float
    speed_reports: int = 0  # of a segment, before its step time counts as measured
    phase: Phase = Phase.PENDING
    grant: Grant | None = None  # by the policy; perhaps not occupied yet
    gpus: tuple[int, ...] = ()  # occupied
    share: float = 1.0
    version: int = 0  # events of older versions are void
    state: str = ""
    ended_s: float | None = None
    # training
    trained_s: float = 0.0
    saved_s: float = 0.0  # trained at the last checkpoint
    training_since_s: float | None = None  # `trained_s` holds for this instant
    speed: float = 0.0  # of its work a second, in seconds or units of its training model
    milestone_at_s: float = 0.0  # when the next point is reached, at this speed
    pace: Pace | None = None  # of its training model, on its GPUs
    useful_gpu_s: float | None = None  # GPU-seconds of training, where work is not in seconds
    saved_useful_gpu_s: float = 0.0
    measured_s: float = 0.0  # seconds of training, where work is not in seconds
    step_times: dict[tuple[int, int, int | None], StepTime] = field(default_factory=dict)
    batch_trained: int | None = None  # of the last step
    seen: int = 0  # points of the curve that have been reached
    unmeasured_s: float = 0.0  # of warming up and leaving, which a policy takes for training
    ahead_s: list[float] = field(default_factory=list)  # `unmeasured_s` at each point reached
    shown: int = 0  # points that a policy sees by now
    observed: Sequence[Point] = ()  # those points; the same object while no more are shown
    # the current segment
    segment: int = -1  # its index
    begin_s: float = 0.0
    held_since_s: float = 0.0  # service is settled up to here
    held_s: float = 0.0  # in this segment, times the share
    trained_before_s: float = 0.0
    useful_before_gpu_s: float = 0.0
    steps_at_start: int = 0
    seen_at_start: int = 0
    # all segments
    service_gpu_s: float = 0.0
    first_start_s: float | None = None
    preemptions: int = 0
    resizes: int = 0
    waited_s: float = 0.0
    checkpoint_s: float | None = None  # None until it was measured
    restore_s: float | None = None
    startup_s: float | None = None

    @property
    def id(self) -> JobId:
        """The job's id."""
        return self.work.id

    @property
    def milestone_s(self) -> float:
        """Seconds of training at which the next point is reached, or the job ends."""
        curve = self.work.curve
        reached_s = curve[self.seen].seconds if self.seen < len(curve) else inf
        return min(reached_s, self.work.seconds)

    @property
    def is_finishing(self) -> bool:
        """True when a stop no longer prevents the job from finishing: it is in its last lines."""
        curve, left_s = self.work.curve, self.work.seconds - self.trained_s
        return 0 < len(curve) == self.seen and left_s <= self.work.costs.ending_s

    def start_segment(self, now_s: float, gpus: tuple[int, ...], share: float) -> None:
        """Occupy the GPUs and start a segment."""
        self.waited_s += now_s - self.waiting_since_s
        if self.first_start_s is None:
            self.first_start_s = now_s
        self.gpus, self.share = gpus, share
        self.segment += 1
        self.begin_s = self.held_since_s = now_s
        self.held_s = 0.0
        self.trained_before_s = self.trained_s
        self.useful_before_gpu_s = self.useful_gpu_s or 0.0
        self.steps_at_start = self.work.curve[self.seen - 1].step if self.seen else 0
        self.seen_at_start = self.seen

    def reach_point(self) -> None:
        """Reach the next point of the curve."""
        point = self.work.curve[self.seen]
        ahead_s = 0.0 if self.work.training is None else self.measured_s - point.seconds
        self.ahead_s.append(ahead_s + self.unmeasured_s)
        self.seen += 1
        self._note_step()

    def account_training(self, now_s: float) -> None:
        """Add the training up to now."""
        if self.training_since_s is not None and now_s > self.training_since_s:
            gained_s = (now_s - self.training_since_s) * self.speed
            self.trained_s = min(self.trained_s + gained_s, self.milestone_s)
            self.measure(now_s)
            self.training_since_s = now_s

    def measure(self, now_s: float) -> None:
        """Measure the training up to now on the current GPUs, where work is not in seconds."""
        if self.pace is None or self.training_since_s is None:
            return
        seconds = now_s - self.training_since_s
        self.measured_s += seconds
        self.useful_gpu_s = (self.useful_gpu_s or 0.0) + seconds * self.share * len(self.gpus)
        if seconds > 0:
            self._note_step()

    def measures_step(self, now_s: float) -> bool:
        """Note the step time of the current GPUs and batch; return whether either is a new one."""
        since_s, measured_before = self.training_since_s, (len(self.step_times), self.batch_trained)
        if since_s is not None and now_s > since_s:
            self._note_step()
        return (len(self.step_times), self.batch_trained) != measured_before

    def _note_step(self) -> None:
        if self.seen - self.seen_at_start < self.speed_reports:
            return
        step = None if self.pace is None else self.pace.step
        if step is not None:
            self.step_times[step.gpus, step.nodes, step.local_batch] = step
        if self.pace is not None:
            self.batch_trained = self.pace.batch

    def save(self) -> None:
        """Take the present progress as what the last checkpoint has."""
        self.saved_s = self.trained_s
        self.saved_useful_gpu_s = self.useful_gpu_s or 0.0

    def fall_back(self) -> None:
        """Lose the work since the last checkpoint."""
        self.trained_s = self.saved_s
        if self.useful_gpu_s is not None:
            self.useful_gpu_s = self.saved_useful_gpu_s

    def account_service(self, now_s: float) -> None:
        """Add the service up to now; nothing without GPUs."""
        if not self.gpus:
            return
        held_s = (now_s - self.held_since_s) * self.share
        self.held_s += held_s
        self.service_gpu_s += held_s * len(self.gpus)
        self.held_since_s = now_s

    def leave(self, now_s: float, outcome: str) -> SimulatedSegment:
        """Release the GPUs and end the segment; invalidate the job's pending events."""
        self.account_service(now_s)
        trained_s = self.trained_s - self.trained_before_s
        if self.useful_gpu_s is not None:
            trained_s = (self.useful_gpu_s - self.useful_before_gpu_s) / len(self.gpus)
        lost_s = self.held_s - trained_s
        segment = SimulatedSegment(self.id, self.gpus, self.begin_s, now_s, lost_s, outcome)
        self.preemptions += outcome == "preempted"
        self.resizes += outcome == "resized"
        self.gpus, self.grant, self.training_since_s, self.pace = (), None, None, None
        self.speed = 0.0
        self.waiting_since_s = now_s
        self.version += 1
        return segment

    def end(self, now_s: float, state: str) -> None:
        """Enter the final state, without GPUs."""
        self.waited_s += now_s - self.waiting_since_s  # nothing if it has just left its GPUs
        self.phase, self.state, self.ended_s = Phase.ENDED, state, now_s

    def outcome(self, closed_s: float) -> JobOutcome:
        """Return the outcome; a job that has not ended was paused until `closed_s`."""
        ended_s = self.ended_s
        waited_s = self.waited_s
        if ended_s is None:
            waited_s += max(0.0, closed_s - self.waiting_since_s)
        return JobOutcome(
            work=self.work,
            state=self.state or "stopped_early",
            first_start_s=self.first_start_s,
            ended_s=ended_s,
            trained_s=self.trained_s,
            service_gpu_s=self.service_gpu_s,
            lost_gpu_s=self.service_gpu_s - self._useful_gpu_s(),
            preemptions=self.preemptions,
            waited_s=waited_s,
            resizes=self.resizes,
        )

    def _useful_gpu_s(self) -> float:
        if self.useful_gpu_s is not None:
            return self.useful_gpu_s
        return self.trained_s * self.work.gpus if self.work.training is None else 0.0

    def to_job(self) -> OracleJob:
        """Return the job as a policy sees it now."""
        work, holds = self.work, self.phase in (Phase.STARTING, Phase.RUNNING)
        queued = self.phase in (Phase.PENDING, Phase.WAITING)
        training = self.training_since_s is not None and holds
        grant = self.grant if holds else None
        left = self.grant if self.phase is Phase.STOPPING else None
        sizes = (work.gpus,) if work.training is None else work.training.sizes
        self._update_observed()
        return OracleJob(
            id=work.id,
            sweep=work.sweep,
            submitted_s=work.submitted_s,
            phase=self.phase,
            gpus_held=grant.gpus if grant is not None else (),
            gpus_to_leave=left.gpus if left is not None else (),
            share_held=grant.share if grant is not None else 1.0,
            min_gpus=sizes[0],
            max_gpus=sizes[-1],
            sizes=sizes if work.training is not None else (),
            requested_gpus=work.gpus,
            batch_range=work.training.batch_range if work.training is not None else None,
            requested_batch=work.batch,
            batch_held=grant.batch if grant is not None else None,
            noise_scale=self._noise_scale(),
            weight=work.weight,
            user=work.user,
            virtual_cluster=work.virtual_cluster,
            model_name=work.model_name,
            tensor_skew=work.tensor_skew,
            total_steps=work.total_steps,
            deadline_s=work.deadline_s,
            preemptible=work.preemptible,
            service_gpu_s=self.service_gpu_s,
            service_at_s=self.held_since_s if self.gpus and holds else None,
            configuration=work.configuration,
            curve=self.observed,
            step_times=self._step_times(),
            preemptions=self.preemptions,
            segments=self.segment + 1,
            started_s=self.begin_s + work.costs.handover_s if holds else None,
            waiting_since_s=self.waiting_since_s if queued else None,
            steps_at_start=self.steps_at_start,
            checkpoint_s=self.checkpoint_s,
            restore_s=self.restore_s,
            startup_s=self.startup_s,
            repeat_s=None if self.startup_s is None else work.costs.repeat_s,
            trained_s=self.trained_s,
            trained_at_s=self.training_since_s or 0.0,
            speed=self.speed if training else 0.0,
            batch_trained=self.batch_trained,
        )

    def _update_observed(self) -> None:
        if len(self.observed) >= self.shown:
            return
        new = self._next_observations()
        if self.shown < LONG:
            self.observed = (*self.observed, *new)
        else:
            self.observed = LearningCurve.from_rows(self.observed).extended(new)

    def _next_observations(self) -> Iterator[Point]:
        """Yield the points that are shown by now and not yet in `observed`."""
        new = slice(len(self.observed), self.shown)
        least_s = self.observed[-1].seconds if self.observed else 0.0
        for point, ahead_s in zip(self.work.curve[new], self.ahead_s[new], strict=True):
            least_s = max(least_s, point.seconds + ahead_s)
            yield replace(point, seconds=least_s) if ahead_s else point

    def _noise_scale(self) -> float | None:
        model = self.work.training
        return model.noise_scale(self.seen) if model is not None and self.segment >= 0 else None

    def _step_times(self) -> tuple[StepTime, ...]:
        if self.work.training is not None:
            measured = tuple(self.step_times.values())
            return (*self.work.step_times, *measured) if self.work.step_times else measured
        if not self.seen:
            return self.work.step_times
        point = self.work.curve[self.seen - 1]
        if point.step <= 0:
            return ()
        return (StepTime(self.work.gpus, point.seconds / point.step),)
