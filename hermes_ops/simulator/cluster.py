"""The cluster of virtual time: the driver under `loop.run` in a simulation."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from math import ceil, floor, inf

from hermes_ops.core.model import QUEUED_PHASES, Gpu, Grant, JobId, Phase, Plan, Reason, Snapshot
from hermes_ops.core.order import natural
from hermes_ops.core.plan import Action, Resize, Start, Stop
from hermes_ops.errors import ConfigError, PlanError, Problem
from hermes_ops.simulator.event_log import EventLog, Journal
from hermes_ops.simulator.machines import Machines
from hermes_ops.simulator.simulated_job import SimulatedJob
from hermes_ops.simulator.snapshot_builder import SnapshotBuilder
from hermes_ops.simulator.workload import Interference, JobOutcome, NodeFailure, Workload

LEAST_WAIT_S = 1e-6
"""Seconds: an earlier review is postponed until then, so that virtual time always advances."""

MOST_IDLE_REVIEWS = 1_000
"""Stop after this many consecutive reviews without effect, when nothing else can happen."""

MOST_AT_ONE_INSTANT = 1_000
"""The limit of consecutive decisions that move jobs at one instant."""

_Subject = SimulatedJob | Interference | str
_JOB, _RECOVERY, _DISTURBANCE, _OBSERVED = range(4)  # the order of events at one instant


class VirtualCluster:
    """A cluster in virtual time on which jobs arrive, hold GPUs, train and end.

    All events of one instant are handled together. Choices that the interface leaves open:

    * A job that is stopped keeps its GPUs for its `checkpoint_s`, then waits with its progress
      kept exactly. One that has not begun to train in its segment has nothing to write and leaves
      at once, as does one that is ended for good. One within `ending_s` of its end finishes.
    * A job that is granted GPUs which another still occupies is STARTING and begins when they are
      free. One that is moved is stopped, and decided on again once it has left.
    * A job of a failed node falls back to its last checkpoint: its last curve point or stop.
    * When nothing more can happen and the policy starts nothing, the simulation is over.
    """

    def __init__(
        self, workload: Workload, gpus: tuple[Gpu, ...], *, log: EventLog | None = None
    ) -> None:
        self.now_s = 0.0
        self.journal = Journal(log)
        self._observation_delay_s = workload.observation_delay_s
        self._round_s, self._whole_seconds = workload.round_s, workload.whole_seconds
        self._machines = Machines(gpus, dict(workload.spread_speeds))
        works = sorted(workload.jobs, key=lambda w: (w.submitted_s, natural(w.id), w.id))
        reports = workload.speed_reports
        self._jobs = [
            SimulatedJob(work, rank, work.submitted_s, reports) for rank, work in enumerate(works)
        ]
        self._by_id = {job.id: job for job in self._jobs}
        _check(workload, self._machines.nodes(), len(self._by_id))
        self._snapshots = SnapshotBuilder()
        self._drops = workload.drops
        self._arrived = self._decided = 0
        self._open = len(self._jobs)
        self._active: dict[int, SimulatedJob] = {}  # occupies GPUs, by rank
        self._due: dict[
            int, SimulatedJob
        ] = {}  # has been granted GPUs (or a share) that are not free yet
        self._heap: list[tuple[float, int, int, int, Callable[..., None], _Subject]] = []
        self._serial = 0
        self._review_s: float | None = None
        self._decide_again = False
        self._idle_reviews = 0
        self._at_one_instant = 0
        self._disturb(workload)
        first_s = self._next_s()
        if first_s < inf and self._round_s is not None:
            round_end_s = ceil(first_s / self._round_s) * self._round_s
            self._finish_round(max(round_end_s, workload.first_decision_s))
        elif first_s < inf:
            self._advance(first_s)

    @property
    def is_over(self) -> bool:
        """True when all jobs have ended, or no event and no effective review is left."""
        if not self._open:
            return True
        if self._decide_again or self._next_s() < inf:
            return False
        review_s = self._review_s
        has_review = review_s is not None and self.now_s < review_s < inf
        return not has_review or self._idle_reviews >= MOST_IDLE_REVIEWS

    def outcomes(self) -> tuple[JobOutcome, ...]:
        """Return the outcome of each job, in order of submission."""
        return tuple(job.outcome(self.now_s) for job in self._jobs)

    def observe(self) -> Snapshot:
        """Return the pool now. A job without a curve is in one snapshot after its end."""
        return self._snapshots.snapshot(self.now_s, self._machines.pool)

    def apply(
        self,
        snapshot: Snapshot,  # noqa: ARG002  (nothing has changed since)
        plan: Plan,
        actions: Sequence[Action],
    ) -> None:
        """Start the actions at this instant; store the time of the policy's next review."""
        self._review_s = plan.review_at_s
        if actions:
            self._idle_reviews = 0
        for action in actions:
            job = self._by_id[action.job]
            if isinstance(action, Stop):
                self._stop(job, action.reason, action.final)
                self._decide_again |= _is_queued(job) and bool(plan.gpus_of(job.id))
            else:
                self._grant(job, action)
        self._start_due()
        if self._drops:
            self._drop_new()

    def wait(self, until_s: float | None) -> None:
        """Advance to the next event, or to the review if that comes first."""
        if self._decide_again:
            self._decide_again = False
            self._at_one_instant += 1
            if self._at_one_instant > MOST_AT_ONE_INSTANT:
                raise PlanError(f"the policy moves jobs without end at {self.now_s} s")
            return
        self._at_one_instant = 0
        if self._round_s is not None:
            self._wait_for_round(self._round_s, until_s)
            return
        next_s = self._next_s()
        if until_s is not None and until_s > self.now_s:
            until_s = max(until_s, self.now_s + LEAST_WAIT_S)
            if until_s < next_s:
                self._idle_reviews += next_s == inf
                self.now_s = until_s
                return
        if next_s < inf:
            self._advance(next_s)

    def close(self) -> None:
        """Close the journal; jobs that are still paused have no end time."""
        self.journal.closed(self.now_s)

    # -- time

    def _push(
        self,
        at_s: float,
        order: int,
        handle: Callable[..., None],
        subject: _Subject,
        version: int = 0,
    ) -> None:
        self._serial += 1
        heapq.heappush(self._heap, (at_s, order, self._serial, version, handle, subject))

    def _next_s(self) -> float:
        """Return the time of the next event; inf if there is none."""
        heap = self._heap
        while heap and _is_void(heap[0][5], heap[0][3]):
            heapq.heappop(heap)
        next_s = heap[0][0] if heap else inf
        if self._arrived < len(self._jobs):
            next_s = min(next_s, self._jobs[self._arrived].work.submitted_s)
        return next_s

    def _wait_for_round(self, round_s: float, until_s: float | None) -> None:
        """Handle all events until the end of the round, or of the next in which one is due."""
        next_s = self._next_s()
        due_s = self.now_s if self._active else min(next_s, inf if until_s is None else until_s)
        if due_s < inf:
            self._idle_reviews += next_s == inf
            rounds = max(floor(self.now_s / round_s) + 1, ceil(due_s / round_s))
            self._finish_round(rounds * round_s)

    def _finish_round(self, end_s: float) -> None:
        while (next_s := self._next_s()) <= end_s:
            self._advance(next_s)
        self.now_s = end_s
        for job in self._active.values():
            if job.measures_step(end_s):
                self._snapshots.mark_changed(job)

    def _advance(self, to_s: float) -> None:
        """Handle all events at `to_s`: jobs first, then machines, then arrivals."""
        self.now_s = max(self.now_s, to_s)
        heap = self._heap
        while heap and heap[0][0] <= to_s:
            _, _, _, version, handle, subject = heapq.heappop(heap)
            if not _is_void(subject, version):
                handle(subject)
        while (
            self._arrived < len(self._jobs) and self._jobs[self._arrived].work.submitted_s <= to_s
        ):
            job = self._jobs[self._arrived]
            self._arrived += 1
            self.journal.submitted(job.work.submitted_s, job)
            self._snapshots.mark_changed(job)

    # -- jobs

    def _grant(self, job: SimulatedJob, action: Start | Resize) -> None:
        gpus = tuple(sorted(action.gpus))
        if isinstance(action, Resize) and job.gpus and _restarts(job, gpus, action.batch):
            self._stop(job, action.reason, final=False, outcome="resized")
            if job.work.training is None or not _is_queued(job):
                self._decide_again |= _is_queued(job)
                return
        job.grant = Grant(job.id, gpus, action.share, action.batch)
        self.journal.granted(self.now_s, job, job.grant, action.reason)
        if not job.gpus:
            job.phase = Phase.STARTING
            job.begin_s = self.now_s
        self._due[job.rank] = job
        self._snapshots.mark_changed(job)

    def _start_due(self) -> None:
        """Start granted jobs whose GPUs are free; a shrunk share may free more."""
        started = True
        while started and self._due:
            started = False
            for job in tuple(self._due.values()):
                grant = job.grant
                if grant is not None and self._occupy(job, grant):
                    started = True
                    del self._due[job.rank]

    def _occupy(self, job: SimulatedJob, grant: Grant) -> bool:
        added = grant.share - job.share if job.gpus else grant.share
        if not self._machines.has_room(grant.gpus, added):
            return False
        self._machines.occupy(grant.gpus, added)
        if job.gpus:
            job.account_training(self.now_s)
            job.account_service(self.now_s)
            job.share = grant.share
            self.journal.shared(self.now_s, job)
            self._repace(job)
        else:
            job.start_segment(self.now_s, grant.gpus, grant.share)
            self._active[job.rank] = job
            self.journal.started(self.now_s, job)
            resumed = job.trained_s > 0
            begin = job.work.start_of(job.segment, resumed=resumed)
            lead_s = begin.lead_s + job.work.costs.handover_s
            if lead_s > 0:
                self._push(self.now_s + lead_s, _JOB, self._train, job, job.version)
            else:
                self._train(job)
        return True

    def _train(self, job: SimulatedJob) -> None:
        """End the start-up and train."""
        begin = job.work.start_of(job.segment, resumed=job.trained_s > 0)
        job.phase = Phase.RUNNING
        job.startup_s = begin.startup_s
        job.unmeasured_s += begin.lead_s - begin.startup_s - begin.restore_s
        if job.trained_s:
            job.restore_s = begin.restore_s
        job.training_since_s = self.now_s
        self.journal.trains(self.now_s, job)
        self._repace(job)

    def _repace(self, job: SimulatedJob) -> None:
        """Add the training so far; continue at the speed of its share and its GPUs."""
        self._snapshots.mark_changed(job)
        if job.training_since_s is None or job.phase is not Phase.RUNNING:
            return
        job.account_training(self.now_s)
        self._set_pace(job)

    def _set_pace(self, job: SimulatedJob) -> None:
        """Train on from `training_since_s` at the speed of the job's share and GPUs."""
        job.speed = job.share * self._machines.speed(job.gpus, job.work.model_name)
        if job.work.training is not None and job.grant is not None:
            placement = self._machines.placement(job.gpus)
            job.pace = job.work.training.pace(placement, job.seen, job.grant.batch)
            job.speed *= job.pace.rate
        job.version += 1
        since_s = self.now_s if job.training_since_s is None else job.training_since_s
        left_s = (job.milestone_s - job.trained_s) / job.speed
        job.milestone_at_s = since_s + (round(left_s) if self._whole_seconds else left_s)
        self._push(since_s + left_s, _JOB, self._reach, job, job.version)

    def _reach(self, job: SimulatedJob) -> None:
        """Reach the next point of the curve, or the end."""
        job.trained_s = job.milestone_s
        job.measure(job.milestone_at_s)
        job.training_since_s = job.milestone_at_s
        curve = job.work.curve
        while job.seen < len(curve) and curve[job.seen].seconds <= job.trained_s:
            self.journal.seen(self.now_s, job)
            job.reach_point()
            if self._observation_delay_s > 0:
                self._push(self.now_s + self._observation_delay_s, _OBSERVED, self._show, job.id)
            else:
                job.shown = job.seen
            job.save()
        if job.trained_s >= job.work.seconds:
            self._end(job, "finished", job.milestone_at_s)
        else:  # from the rounded time on, which may be before or after this event
            self._snapshots.mark_changed(job)
            self._set_pace(job)

    def _show(self, job_id: str) -> None:
        """Show the next point of the curve to the policy."""
        job = self._by_id[JobId(job_id)]
        job.shown += 1
        self._snapshots.mark_changed(job)

    def _stop(
        self, job: SimulatedJob, reason: Reason, final: bool, outcome: str = "preempted"
    ) -> None:
        self.journal.stopped(self.now_s, job, reason)
        job.account_training(self.now_s)
        job.account_service(self.now_s)
        self._snapshots.mark_changed(job)
        if final:
            self._end(job, "stopped_early")
        elif not job.gpus:
            self._withdraw(job)
        elif job.training_since_s is not None and job.is_finishing:
            job.phase = Phase.STOPPING
        elif job.training_since_s is None or not _leaving_s(job):
            self._pause(job, outcome)
        else:
            job.phase, job.speed = Phase.STOPPING, 0.0
            job.unmeasured_s += _leaving_s(job)
            job.version += 1
            self._due.pop(job.rank, None)
            self._push(self.now_s + _leaving_s(job), _JOB, self._pause, job, job.version)

    def _drop_new(self) -> None:
        """End the jobs that the first decision after their submission gave nothing."""
        for job in self._jobs[self._decided : self._arrived]:
            if job.phase is Phase.PENDING:
                self._end(job, "stopped_early")
        self._decided = self._arrived

    def _withdraw(self, job: SimulatedJob) -> None:
        """Withdraw a grant that has not taken effect."""
        self._due.pop(job.rank, None)
        job.grant = None
        job.phase = Phase.PENDING if job.first_start_s is None else Phase.WAITING

    def _pause(self, job: SimulatedJob, outcome: str = "preempted") -> None:
        """Release the GPUs of a job whose checkpoint is written, and let it wait."""
        if job.training_since_s is not None:
            job.checkpoint_s = job.work.costs.checkpoint_s
            job.save()
        self._leave(job, outcome)
        job.phase = Phase.WAITING
        self._start_due()

    def _leave(self, job: SimulatedJob, outcome: str) -> None:
        self._due.pop(job.rank, None)
        del self._active[job.rank]
        self._machines.occupy(job.gpus, -job.share)
        self.journal.left(job.leave(self.now_s, outcome), job)
        self._snapshots.mark_changed(job)

    def _end(self, job: SimulatedJob, state: str, at_s: float | None = None) -> None:
        self._due.pop(job.rank, None)
        if job.gpus:
            self._leave(job, state)
        job.grant = None
        job.end(self.now_s if at_s is None else at_s, state)
        self._open -= 1
        self.journal.ended(self.now_s, job)
        self._snapshots.mark_changed(job)
        self._start_due()

    # -- machines

    def _disturb(self, workload: Workload) -> None:
        for disturbance in workload.disturbances:
            if isinstance(disturbance, NodeFailure):
                self._push(disturbance.at_s, _DISTURBANCE, self._fail, disturbance.node)
                self._push(disturbance.back_s, _RECOVERY, self._machines.repair, disturbance.node)
            else:
                self._push(disturbance.at_s, _DISTURBANCE, self._slow, disturbance)
                self._push(disturbance.until_s, _RECOVERY, self._recover, disturbance)

    def _fail(self, node: str) -> None:
        self._machines.fail(node)
        for job in sorted(self._active.values(), key=lambda x: x.rank):
            if self._machines.touches(job.gpus, node):
                job.fall_back()
                self._leave(job, "failed")
                job.phase = Phase.WAITING
        for job in tuple(self._due.values()):
            if job.grant is not None and self._machines.touches(job.grant.gpus, node):
                self._withdraw(job)
                self._snapshots.mark_changed(job)
        self._start_due()

    def _slow(self, disturbance: Interference) -> None:
        self._machines.slow(disturbance.node, disturbance.speed)
        self._repace_on(disturbance.node)

    def _recover(self, disturbance: Interference) -> None:
        self._machines.recover(disturbance.node, disturbance.speed)
        self._repace_on(disturbance.node)

    def _repace_on(self, node: str) -> None:
        for job in sorted(self._active.values(), key=lambda x: x.rank):
            if self._machines.touches(job.gpus, node):
                self._repace(job)


def _is_void(subject: _Subject, version: int) -> bool:
    """Return whether the event belongs to an older version of its job."""
    return isinstance(subject, SimulatedJob) and subject.version != version


def _restarts(job: SimulatedJob, gpus: tuple[int, ...], batch: int | None) -> bool:
    """Return whether the job must restart for these GPUs and this batch."""
    held = job.grant.batch if job.grant is not None else None
    return gpus != job.gpus or batch not in (None, held)


def _leaving_s(job: SimulatedJob) -> float:
    return job.work.costs.checkpoint_s + job.work.costs.leave_s


def _is_queued(job: SimulatedJob) -> bool:
    """Return whether a job was stopped and has already left its GPUs."""
    return job.phase in QUEUED_PHASES


def _check(workload: Workload, nodes: set[str], different: int) -> None:
    """Raise ConfigError for two jobs with one id, or a disturbance of an unknown node."""
    problems = [
        Problem("disturbances", repr(disturbance.node), ", ".join(sorted(nodes)), "name a node")
        for disturbance in workload.disturbances
        if disturbance.node not in nodes
    ]
    if different < len(workload.jobs):
        doubled = len(workload.jobs) - different
        problems.append(Problem("jobs", f"{doubled} ids twice", "each id once", "rename them"))
    if problems:
        raise ConfigError(f"the workload {workload.name!r}", tuple(problems))
