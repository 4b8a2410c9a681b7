"""One job while it is simulated: what it has had, where it stands, what a policy sees of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from math import inf

from hermes_ops.core.model import Grant, Job, JobId, Phase, Point
from hermes_ops.simulator.workload import Outcome, Segment, Work


@dataclass(frozen=True, slots=True)
class VirtualJob(Job):
    """A job of a simulation, with what only an oracle reads: how much of it has been trained.

    It had trained `trained_s` at `trained_at_s`, and since then trains at `speed` (0: not at all).
    """

    trained_s: float = 0.0
    trained_at_s: float = 0.0
    speed: float = 0.0

    def progress_s(self, now_s: float) -> float:
        """Seconds trained up to `now_s`."""
        return self.trained_s + self.speed * max(0.0, now_s - self.trained_at_s)


@dataclass(slots=True, eq=False)
class Life:
    """The mutable state of one job. `rank` is its place in the order of submission."""

    work: Work
    rank: int
    waiting_since_s: float
    phase: Phase = Phase.PENDING
    grant: Grant | None = None  # what the policy gave; it may not occupy it yet
    gpus: tuple[int, ...] = ()  # occupied
    share: float = 1.0
    version: int = 0  # events of older versions are void
    state: str = ""
    ended_s: float | None = None
    # training
    trained_s: float = 0.0
    saved_s: float = 0.0  # trained at the last checkpoint
    training_since_s: float | None = None  # `trained_s` holds for this instant
    speed: float = 0.0
    seen: int = 0  # points of the curve that have been reached
    unmeasured_s: float = 0.0  # of warming up and leaving: no job tells it from training
    ahead_s: list[float] = field(default_factory=list)  # of it, before each point reached
    shown: int = 0  # those of them that a policy sees by now
    sight: tuple[Point, ...] = ()  # these points: one object while no more are shown
    # the current segment
    segment: int = -1  # how many came before it
    begin_s: float = 0.0
    held_since_s: float = 0.0  # service is settled up to here
    held_s: float = 0.0  # of this segment, times the share
    trained_before_s: float = 0.0
    steps_at_start: int = 0
    # the whole life
    service_gpu_s: float = 0.0
    first_start_s: float | None = None
    preemptions: int = 0
    waited_s: float = 0.0
    checkpoint_s: float | None = None  # as far as it has been seen
    restore_s: float | None = None
    startup_s: float | None = None

    @property
    def id(self) -> JobId:
        """The job's id."""
        return self.work.id

    @property
    def milestone_s(self) -> float:
        """The seconds of training at which the next point is reached, or the job ends."""
        curve = self.work.curve
        reached_s = curve[self.seen].seconds if self.seen < len(curve) else inf
        return min(reached_s, self.work.seconds)

    @property
    def ends_by_itself(self) -> bool:
        """True when only its last lines are left: told to stop, it comes to its end as well."""
        curve, left_s = self.work.curve, self.work.seconds - self.trained_s
        return 0 < len(curve) == self.seen and left_s <= self.work.costs.ending_s

    def begin(self, now_s: float, gpus: tuple[int, ...], share: float) -> None:
        """Occupy the GPUs: a segment begins."""
        self.waited_s += now_s - self.waiting_since_s
        if self.first_start_s is None:
            self.first_start_s = now_s
        self.gpus, self.share = gpus, share
        self.segment += 1
        self.begin_s = self.held_since_s = now_s
        self.held_s = 0.0
        self.trained_before_s = self.trained_s
        self.steps_at_start = self.work.curve[self.seen - 1].step if self.seen else 0

    def see(self) -> None:
        """Reach the next point of the curve."""
        self.ahead_s.append(self.unmeasured_s)
        self.seen += 1

    def settle(self, now_s: float) -> None:
        """Account the training up to now."""
        if self.training_since_s is not None:
            gained_s = (now_s - self.training_since_s) * self.speed
            self.trained_s = min(self.trained_s + gained_s, self.milestone_s)
            self.training_since_s = now_s

    def account(self, now_s: float) -> None:
        """Account the service up to now; nothing without GPUs."""
        if not self.gpus:
            return
        held_s = (now_s - self.held_since_s) * self.share
        self.held_s += held_s
        self.service_gpu_s += held_s * len(self.gpus)
        self.held_since_s = now_s

    def leave(self, now_s: float, outcome: str) -> Segment:
        """Give the GPUs back: the segment is over; void the events that are under way."""
        self.account(now_s)
        lost_s = self.held_s - (self.trained_s - self.trained_before_s)
        segment = Segment(self.id, self.gpus, self.begin_s, now_s, lost_s, outcome)
        self.preemptions += outcome == "preempted"
        self.gpus, self.grant, self.training_since_s = (), None, None
        self.speed = 0.0
        self.waiting_since_s = now_s
        self.version += 1
        return segment

    def end(self, now_s: float, state: str) -> None:
        """Reach the final state; it holds no GPU any more."""
        self.waited_s += now_s - self.waiting_since_s  # nothing if it has just left its GPUs
        self.phase, self.state, self.ended_s = Phase.ENDED, state, now_s

    def outcome(self, closed_s: float) -> Outcome:
        """What came of it; a job that has not ended was paused until `closed_s`."""
        ended_s = self.ended_s
        waited_s = self.waited_s
        if ended_s is None:
            waited_s += max(0.0, closed_s - self.waiting_since_s)
        return Outcome(
            work=self.work,
            state=self.state or "stopped_early",
            first_start_s=self.first_start_s,
            ended_s=ended_s,
            trained_s=self.trained_s,
            service_gpu_s=self.service_gpu_s,
            lost_gpu_s=self.service_gpu_s - self.trained_s * self.work.gpus,
            preemptions=self.preemptions,
            waited_s=waited_s,
        )

    def fact(self) -> VirtualJob:
        """What a policy sees of it now."""
        work, grant, occupied = self.work, self.grant, bool(self.gpus)
        holds = self.phase in (Phase.STARTING, Phase.RUNNING)
        queued = self.phase in (Phase.PENDING, Phase.WAITING)
        training = self.training_since_s is not None and holds
        if len(self.sight) < self.shown:
            self.sight += tuple(self._next_sights())
        return VirtualJob(
            id=work.id,
            sweep=work.sweep,
            submitted_s=work.submitted_s,
            phase=self.phase,
            gpus_held=grant.gpus if grant is not None and holds else (),
            share_held=grant.share if grant is not None and holds else 1.0,
            min_gpus=work.gpus,
            max_gpus=work.gpus,
            weight=work.weight,
            user=work.user,
            virtual_cluster=work.virtual_cluster,
            model_name=work.model_name,
            tensor_skew=work.tensor_skew,
            total_steps=work.total_steps,
            deadline_s=work.deadline_s,
            preemptible=work.preemptible,
            service_gpu_s=self.service_gpu_s,
            service_at_s=self.held_since_s if occupied and holds else None,
            configuration=work.configuration,
            curve=self.sight,
            step_seconds=self._step_seconds(),
            preemptions=self.preemptions,
            started_s=self.begin_s + work.costs.handover_s if holds else None,
            waiting_since_s=self.waiting_since_s if queued else None,
            steps_at_start=self.steps_at_start,
            checkpoint_s=self.checkpoint_s,
            restore_s=self.restore_s,
            startup_s=self.startup_s,
            trained_s=self.trained_s,
            trained_at_s=self.training_since_s or 0.0,
            speed=self.speed if training else 0.0,
        )

    def _next_sights(self) -> Iterator[Point]:
        """The points that are shown by now and are not in sight yet."""
        new = slice(len(self.sight), self.shown)
        least_s = self.sight[-1].seconds if self.sight else 0.0
        for point, ahead_s in zip(self.work.curve[new], self.ahead_s[new], strict=True):
            least_s = max(least_s, point.seconds + ahead_s)
            yield replace(point, seconds=least_s) if ahead_s else point

    def _step_seconds(self) -> tuple[tuple[int, float], ...]:
        if not self.seen:
            return ()
        point = self.work.curve[self.seen - 1]
        return ((self.work.gpus, point.seconds / point.step),) if point.step > 0 else ()
