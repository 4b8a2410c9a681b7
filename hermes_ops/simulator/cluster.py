"""The cluster of virtual time: the driver under `loop.run` in a simulation."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from math import inf

from hermes_ops.core.model import (
    QUEUED_PHASES,
    Action,
    Gpu,
    Grant,
    JobId,
    Phase,
    Plan,
    Reason,
    Resize,
    Snapshot,
    Start,
    Stop,
)
from hermes_ops.core.order import natural
from hermes_ops.errors import ConfigError, PlanError, Problem
from hermes_ops.simulator.event_log import EventLog
from hermes_ops.simulator.journal import Journal
from hermes_ops.simulator.lives import Life
from hermes_ops.simulator.machines import Machines
from hermes_ops.simulator.view import View
from hermes_ops.simulator.workload import Interference, NodeFailure, Outcome, Workload

LEAST_WAIT_S = 1e-6
"""A review that is due sooner than this is put off so far: virtual time always advances."""

MOST_IDLE_REVIEWS = 1_000
"""So many reviews on end may change nothing while nothing else can happen; then it is over."""

MOST_AT_ONE_INSTANT = 1_000
"""So many decisions on end may move jobs without any time passing."""

_What = Life | Interference | str
_JOB, _CALM, _TROUBLE, _SIGHT = range(4)  # the order of events at one instant


class VirtualCluster:
    """Jobs that arrive, hold GPUs, train and end, in virtual time; all of one instant at once.

    What the interface leaves open:

    * A job that is stopped keeps its GPUs for its `checkpoint_s`, then waits with its progress
      kept exactly. One that has not begun to train in its segment has nothing to write and leaves
      at once, as does one that is ended for good. One in its last lines (`ending_s`) ends.
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
        self._sight_s = workload.sight_s
        self._machines = Machines(gpus, dict(workload.spread_speeds))
        works = sorted(workload.jobs, key=lambda w: (w.submitted_s, natural(w.id), w.id))
        self._lives = [Life(work, rank, work.submitted_s) for rank, work in enumerate(works)]
        self._by_id = {life.id: life for life in self._lives}
        _check(workload, self._machines.nodes(), len(self._by_id))
        self._view = View()
        self._arrived = 0
        self._open = len(self._lives)
        self._active: dict[int, Life] = {}  # occupies GPUs, by rank
        self._due: dict[int, Life] = {}  # has been granted GPUs (or a share) that are not free yet
        self._heap: list[tuple[float, int, int, int, Callable[..., None], _What]] = []
        self._serial = 0
        self._review_s: float | None = None
        self._again = False
        self._idle_reviews = 0
        self._at_one_instant = 0
        self._disturb(workload)
        if self._next_s() < inf:
            self._advance(self._next_s())

    @property
    def is_over(self) -> bool:
        """True when all jobs have ended, or nothing more can happen."""
        if not self._open:
            return True
        if self._again or self._next_s() < inf:
            return False
        review_s = self._review_s
        reviews = review_s is not None and self.now_s < review_s < inf
        return not reviews or self._idle_reviews >= MOST_IDLE_REVIEWS

    def outcomes(self) -> tuple[Outcome, ...]:
        """What has come of each job, in order of submission."""
        return tuple(life.outcome(self.now_s) for life in self._lives)

    def observe(self) -> Snapshot:
        """The pool now. A job without a curve is seen once after its end, then no more."""
        return self._view.snapshot(self.now_s, self._machines.pool)

    def apply(
        self,
        snapshot: Snapshot,  # noqa: ARG002  (nothing has changed since)
        plan: Plan,
        actions: Sequence[Action],
    ) -> None:
        """Begin the actions at this very instant; remember when the policy wants to be asked."""
        self._review_s = plan.review_at_s
        if actions:
            self._idle_reviews = 0
        for action in actions:
            life = self._by_id[action.job]
            if isinstance(action, Stop):
                self._stop(life, action.reason, action.final)
                self._again |= _rests(life) and bool(plan.gpus_of(life.id))
            else:
                self._grant(life, action)
        self._begin_due()

    def wait(self, until_s: float | None) -> None:
        """Go on to the next event, or to the review if that comes first."""
        if self._again:
            self._again = False
            self._at_one_instant += 1
            if self._at_one_instant > MOST_AT_ONE_INSTANT:
                raise PlanError(f"the policy moves jobs without end at {self.now_s} s")
            return
        self._at_one_instant = 0
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
        """Close the journal: jobs that are still paused have no time of their end."""
        self.journal.closed(self.now_s)

    # -- time

    def _push(
        self, at_s: float, order: int, handle: Callable[..., None], what: _What, version: int = 0
    ) -> None:
        self._serial += 1
        heapq.heappush(self._heap, (at_s, order, self._serial, version, handle, what))

    def _next_s(self) -> float:
        """When something happens next; inf if nothing will."""
        heap = self._heap
        while heap and _is_void(heap[0][5], heap[0][3]):
            heapq.heappop(heap)
        next_s = heap[0][0] if heap else inf
        if self._arrived < len(self._lives):
            next_s = min(next_s, self._lives[self._arrived].work.submitted_s)
        return next_s

    def _advance(self, to_s: float) -> None:
        """Handle all that happens at `to_s`: jobs first, then machines, then arrivals."""
        self.now_s = max(self.now_s, to_s)
        heap = self._heap
        while heap and heap[0][0] <= to_s:
            _, _, _, version, handle, what = heapq.heappop(heap)
            if not _is_void(what, version):
                handle(what)
        while (
            self._arrived < len(self._lives) and self._lives[self._arrived].work.submitted_s <= to_s
        ):
            life = self._lives[self._arrived]
            self._arrived += 1
            self.journal.submitted(life.work.submitted_s, life)
            self._view.changed(life)

    # -- jobs

    def _grant(self, life: Life, action: Start | Resize) -> None:
        gpus = tuple(sorted(action.gpus))
        if isinstance(action, Resize) and gpus != life.gpus and life.gpus:
            self._stop(life, action.reason, final=False)
            self._again |= _rests(life)
            return
        life.grant = Grant(life.id, gpus, action.share)
        self.journal.granted(self.now_s, life, life.grant, action.reason)
        if not life.gpus:
            life.phase = Phase.STARTING
            life.begin_s = self.now_s
        self._due[life.rank] = life
        self._view.changed(life)

    def _begin_due(self) -> None:
        """Begin what was granted, as far as the GPUs are free; a shrunk share may free more."""
        began = True
        while began and self._due:
            began = False
            for life in tuple(self._due.values()):
                grant = life.grant
                if grant is not None and self._take(life, grant):
                    began = True
                    del self._due[life.rank]

    def _take(self, life: Life, grant: Grant) -> bool:
        more = grant.share - life.share if life.gpus else grant.share
        if not self._machines.has_room(grant.gpus, more):
            return False
        self._machines.occupy(grant.gpus, more)
        if life.gpus:
            life.account(self.now_s)
            life.share = grant.share
            self.journal.shared(self.now_s, life)
            self._repace(life)
        else:
            life.begin(self.now_s, grant.gpus, grant.share)
            self._active[life.rank] = life
            self.journal.began(self.now_s, life)
            resumed = life.trained_s > 0
            begin = life.work.start_of(life.segment, resumed=resumed)
            lead_s = begin.lead_s + life.work.costs.handover_s
            if lead_s > 0:
                self._push(self.now_s + lead_s, _JOB, self._train, life, life.version)
            else:
                self._train(life)
        return True

    def _train(self, life: Life) -> None:
        """The start-up is over."""
        begin = life.work.start_of(life.segment, resumed=life.trained_s > 0)
        life.phase = Phase.RUNNING
        life.startup_s = begin.startup_s
        life.unmeasured_s += begin.lead_s - begin.startup_s - begin.restore_s
        if life.trained_s:
            life.restore_s = begin.restore_s
        life.training_since_s = self.now_s
        self.journal.trains(self.now_s, life)
        self._repace(life)

    def _repace(self, life: Life) -> None:
        """Account the training so far; go on at the pace of its share and of its GPUs."""
        self._view.changed(life)
        if life.training_since_s is None or life.phase is not Phase.RUNNING:
            return
        life.settle(self.now_s)
        life.speed = life.share * self._machines.speed(life.gpus, life.work.model_name)
        life.version += 1
        due_s = self.now_s + (life.milestone_s - life.trained_s) / life.speed
        self._push(due_s, _JOB, self._reach, life, life.version)

    def _reach(self, life: Life) -> None:
        """The next point of the curve is reached, or the end."""
        life.trained_s = life.milestone_s
        life.training_since_s = self.now_s
        curve = life.work.curve
        while life.seen < len(curve) and curve[life.seen].seconds <= life.trained_s:
            self.journal.seen(self.now_s, life)
            life.see()
            if self._sight_s > 0:
                self._push(self.now_s + self._sight_s, _SIGHT, self._show, life.id)
            else:
                life.shown = life.seen
            life.saved_s = life.trained_s
        if life.trained_s >= life.work.seconds:
            self._end(life, "finished")
        else:
            self._repace(life)

    def _show(self, job: str) -> None:
        """A policy sees the next point of the curve."""
        life = self._by_id[JobId(job)]
        life.shown += 1
        self._view.changed(life)

    def _stop(self, life: Life, reason: Reason, final: bool) -> None:
        self.journal.told(self.now_s, life, reason)
        life.settle(self.now_s)
        life.account(self.now_s)
        self._view.changed(life)
        if final:
            self._end(life, "stopped_early")
        elif not life.gpus:
            self._withdraw(life)
        elif life.training_since_s is not None and life.ends_by_itself:
            life.phase = Phase.STOPPING
        elif life.training_since_s is None or not _leaving_s(life):
            self._pause(life)
        else:
            life.phase, life.speed = Phase.STOPPING, 0.0
            life.unmeasured_s += _leaving_s(life)
            life.version += 1
            self._due.pop(life.rank, None)
            self._push(self.now_s + _leaving_s(life), _JOB, self._pause, life, life.version)

    def _withdraw(self, life: Life) -> None:
        """Take back a grant that has not taken effect."""
        self._due.pop(life.rank, None)
        life.grant = None
        life.phase = Phase.PENDING if life.first_start_s is None else Phase.WAITING

    def _pause(self, life: Life) -> None:
        """The checkpoint is written: the job leaves its GPUs and waits."""
        if life.training_since_s is not None:
            life.checkpoint_s = life.work.costs.checkpoint_s
            life.saved_s = life.trained_s
        self._leave(life, "preempted")
        life.phase = Phase.WAITING
        self._begin_due()

    def _leave(self, life: Life, outcome: str) -> None:
        self._due.pop(life.rank, None)
        del self._active[life.rank]
        self._machines.occupy(life.gpus, -life.share)
        self.journal.left(life.leave(self.now_s, outcome), life)
        self._view.changed(life)

    def _end(self, life: Life, state: str) -> None:
        self._due.pop(life.rank, None)
        if life.gpus:
            self._leave(life, state)
        life.grant = None
        life.end(self.now_s, state)
        self._open -= 1
        self.journal.ended(self.now_s, life)
        self._view.changed(life)
        self._begin_due()

    # -- machines

    def _disturb(self, workload: Workload) -> None:
        for trouble in workload.disturbances:
            if isinstance(trouble, NodeFailure):
                self._push(trouble.at_s, _TROUBLE, self._fail, trouble.node)
                self._push(trouble.back_s, _CALM, self._repair, trouble.node)
            else:
                self._push(trouble.at_s, _TROUBLE, self._slow, trouble)
                self._push(trouble.until_s, _CALM, self._recover, trouble)

    def _fail(self, node: str) -> None:
        self._machines.fail(node)
        for life in sorted(self._active.values(), key=lambda x: x.rank):
            if self._machines.touches(life.gpus, node):
                life.trained_s = life.saved_s
                self._leave(life, "failed")
                life.phase = Phase.WAITING
        for life in tuple(self._due.values()):
            if life.grant is not None and self._machines.touches(life.grant.gpus, node):
                self._withdraw(life)
                self._view.changed(life)
        self._begin_due()

    def _repair(self, node: str) -> None:
        self._machines.repair(node)

    def _slow(self, trouble: Interference) -> None:
        self._machines.slow(trouble.node, trouble.speed)
        self._repace_on(trouble.node)

    def _recover(self, trouble: Interference) -> None:
        self._machines.recover(trouble.node, trouble.speed)
        self._repace_on(trouble.node)

    def _repace_on(self, node: str) -> None:
        for life in sorted(self._active.values(), key=lambda x: x.rank):
            if self._machines.touches(life.gpus, node):
                self._repace(life)


def _is_void(what: _What, version: int) -> bool:
    """True for an event of a job that has gone another way since."""
    return isinstance(what, Life) and what.version != version


def _leaving_s(life: Life) -> float:
    return life.work.costs.checkpoint_s + life.work.costs.leave_s


def _rests(life: Life) -> bool:
    """True for a job that was stopped and has already left."""
    return life.phase in QUEUED_PHASES


def _check(workload: Workload, nodes: set[str], different: int) -> None:
    """Raise ConfigError for two jobs of one id, or a disturbance of a node that is not there."""
    problems = [
        Problem("disturbances", repr(trouble.node), ", ".join(sorted(nodes)), "name a node")
        for trouble in workload.disturbances
        if trouble.node not in nodes
    ]
    if different < len(workload.jobs):
        doubled = len(workload.jobs) - different
        problems.append(Problem("jobs", f"{doubled} ids twice", "each id once", "rename them"))
    if problems:
        raise ConfigError(f"the workload {workload.name!r}", tuple(problems))
