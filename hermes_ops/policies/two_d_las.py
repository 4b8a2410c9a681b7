"""2D-LAS: the job that has had the least GPU time goes first (Tiresias)."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from itertools import islice
from math import floor, inf
from operator import attrgetter
from typing import ClassVar

from hermes_ops.core.model import QUEUED_PHASES, Grant, Job, JobId, Plan, Reason, Snapshot, Term
from hermes_ops.core.order import submission
from hermes_ops.core.plan import LazyReasons
from hermes_ops.policies.toolbox.answer import RANKED, answer, forced_reason
from hermes_ops.policies.toolbox.fill import (
    Chooser,
    bound_first,
    consolidated,
    emptiest_first,
    fill,
    grant,
    lowest,
    soonest_usable,
)
from hermes_ops.policies.toolbox.multilevel_queues import (
    MultilevelQueues,
    QueueService,
    QueuesMemory,
)
from hermes_ops.policies.toolbox.parameter_checks import ascending, one_of, positive_or_none

ORDERS = ("start", "entry")
PLACEMENTS = ("profile", "count", "emptiest")
MANY = 16  # reasons after which all of them are expected to be read
DEMOTIONS = ("exact", "late")
_job = attrgetter("job")


@dataclass(frozen=True, slots=True)
class TwoDLas:
    """Serve queues of attained service (GPUs x seconds) in order; each job that fits runs.

    Queue i holds the jobs whose service is below `limits_gpu_s[i]`, the last all others; a job is
    demoted when it reaches the limit. Every decision reads the queues from the top and gives each
    job its GPUs if so many are left (greedy back-fill); a running job that gets none is preempted.
    `toolbox.multilevel_queues` keeps the queues between decisions, and says why.

    Source: Gu et al., "Tiresias", NSDI 2019, sections 3.2 and 3.3. What it leaves open, or where
    its public simulator (SymbioticLab/Tiresias) says more:

    * The limits: those of the simulator, 3250 and 7200 GPU-s; the paper gives none.
    * `order="start"`: within a queue those that run come first, in the order in which they
      started, then those that wait, in the order in which they came (or were stopped): the
      paper's "start time", as the simulator reads it. `order="entry"`: first come, first served,
      running or not: many more preemptions.
    * `promote_knob`: a job that has waited that many times as long as it has run since it was last
      in the first queue goes back there, and both counts restart at 0; None: never.
    * `placement="profile"`: a job of several GPUs whose largest tensor is more than `pack_limit`
      of its model is consolidated, others go anywhere (0.3 splits the paper's models the same
      way); "count": anywhere; "emptiest": on the nodes with the most free GPUs (Pollux' artefact).
    * `quantum_s`: if given there are no queues: every `quantum_s` those with the least service
      run, ties by submission. The undiscretised form of the paper's three-job example.
    * `demotion="late"`: look for demotions when the simulator does, so that its figures come out:
      its next look is due after (limit - seconds run) / GPUs, rounded down, so jobs of several
      GPUs that were preempted are demoted too late. `demotion="exact"`: at the very limit; on one
      of the traces of `docs/comparison.md` the mean completion is then 4.6 % larger.
    """

    limits_gpu_s: tuple[float, ...] = (3_250.0, 7_200.0)
    order: str = "start"
    promote_knob: float | None = None
    placement: str = "profile"
    pack_limit: float = 0.3
    quantum_s: float | None = None
    demotion: str = "late"
    name: ClassVar[str] = "2d-las"
    preempts: ClassVar[bool] = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "limits_gpu_s", ascending("limits_gpu_s", self.limits_gpu_s))
        one_of("order", self.order, ORDERS)
        one_of("placement", self.placement, PLACEMENTS)
        one_of("demotion", self.demotion, DEMOTIONS)
        positive_or_none("promote_knob", self.promote_knob)
        positive_or_none("quantum_s", self.quantum_s)
        if not 0 <= self.pack_limit <= 1:
            raise ValueError("pack_limit is a share of a model's size, from 0 to 1")

    def initial(self) -> QueuesMemory:
        """Return empty queues."""
        return QueuesMemory()

    def decide(self, snapshot: Snapshot, memory: QueuesMemory) -> tuple[Plan, QueuesMemory]:
        """Bring the queues up to date, serve them, and ask for the next demotion that matters."""
        if self.quantum_s is not None:
            return self._least_first(snapshot, self.quantum_s), memory
        queues = MultilevelQueues(
            snapshot,
            memory,
            self.limits_gpu_s,
            keep_place=self.order == "entry",
            promote_knob=self.promote_knob,
            in_time=self.demotion == "exact",
        )
        return served(queues, self)

    def chooser(self, snapshot: Snapshot) -> Chooser:
        """Return the placement: with "profile" consolidated for skewed models."""
        if self.placement == "emptiest":
            return emptiest_first(snapshot.gpus)
        packed: list[Chooser] = []

        def choose(job: Job, free: set[int] | frozenset[int]) -> tuple[int, ...] | None:
            if job.min_gpus < 2 or job.tensor_skew is None or job.tensor_skew <= self.pack_limit:
                return lowest(job, free)
            if not packed:
                packed.append(consolidated(snapshot.gpus))
            return packed[0](job, free)

        return choose if self.placement == "profile" else lowest  # type: ignore[return-value]

    def review_s(self, queues: MultilevelQueues) -> float | None:
        """Return when the next demotion or promotion is due that can change the plan."""
        if self.demotion == "late":
            at_s = min(_late_s(queues), queues.next_promotion_s())
        elif queues.somebody_waits:
            at_s = min(queues.next_demotion_s(), queues.next_promotion_s())
        else:
            return None
        return at_s if at_s < inf else None

    def _least_first(self, snapshot: Snapshot, quantum_s: float) -> Plan:
        now_s = snapshot.time_s
        jobs = (*snapshot.holding, *snapshot.queue)
        order = sorted(jobs, key=lambda j: (j.attained_gpu_s(now_s), submission(j)))
        grants = fill(snapshot, order, choose=self.chooser(snapshot))

        def explain(job: Job, is_granted: bool) -> Reason:
            terms = (Term("attained_gpu_s", job.attained_gpu_s(now_s)),)
            if is_granted:
                text = "runs: few have had less GPU time, or it fits beside them"
                return Reason(text, terms, None, "a job with less GPU time")
            return Reason("waits: others have had less GPU time", terms, None, "the next quantum")

        review_s = (floor(now_s / quantum_s + 1e-9) + 1) * quantum_s
        return answer(snapshot, grants, order, explain, review_s if jobs else None)


def served(queues: MultilevelQueues, policy: TwoDLas) -> tuple[Plan, QueuesMemory]:
    """Return the plan that serves these queues by the policy's placement, and the new memory."""
    service, grants = assign(queues, policy.chooser(queues.snapshot))
    after = queues.after(service)
    index = queues.snapshot.index
    head = filter(None, map(index.get, islice(queues.waiting_jobs(), RANKED)))
    ranking = tuple([job.id for job in head if job.phase in QUEUED_PHASES])
    reasons = LazyReasons(index, QueueReasons(queues, grants, service))
    review_s = policy.review_s(queues)
    return Plan(grants, ranking=ranking, review_at_s=review_s, reasons=reasons), after


def assign(queues: MultilevelQueues, choose: Chooser) -> tuple[QueueService, tuple[Grant, ...]]:
    """Serve the queues; a job for which the chooser finds no place is passed over."""
    snapshot = queues.snapshot
    unplaceable: frozenset[JobId] = frozenset()
    while True:
        service = queues.serve(unplaceable)
        retained: Collection[Grant] = snapshot.retained.values()
        if service.stopped:
            retained = [stay for stay in retained if stay.job not in service.stopped]
        if not service.starts:
            return service, tuple(retained)
        free = snapshot.free_without(service.stopped)
        starts: list[Grant] = []
        capacity = service.capacity
        begun = [job for _, job in service.starts]
        for job in begun if capacity is None else bound_first(begun):
            gpus = choose(job, free if capacity is None else capacity.usable_for(job, free))
            if gpus is None:
                unplaceable |= {job.id}
                break
            gpus = soonest_usable(snapshot, gpus, free)
            free.difference_update(gpus)
            starts.append(grant(job.id, gpus))
        else:
            return service, (*retained, *starts)


class QueueReasons:
    """The reasons of a decision: each job by its queue."""

    def __init__(
        self, queues: MultilevelQueues, grants: tuple[Grant, ...], service: QueueService
    ) -> None:
        self._queues, self._grants = queues, grants
        self._begun = {job.id: level for level, job in service.starts}
        self._level: dict[JobId, int] = {}
        self._granted: set[JobId] = set()
        self._calls = 0

    def __call__(self, job_id: JobId) -> Reason:
        """Return the reason, with the queue (1 is served first) and the service as terms."""
        snapshot = self._queues.snapshot
        job = snapshot.index[job_id]
        return forced_reason(snapshot, job) or self._by_queue(job)

    def _queue_of(self, job: JobId) -> tuple[int, bool]:
        """Return the job's queue, and whether it has GPUs; a table is built after MANY calls."""
        if job in self._begun:
            return self._begun[job], True
        self._calls += 1
        queues = (*enumerate(self._queues.waiting), *enumerate(self._queues.running))
        if self._calls < MANY:
            level = next((level for level, queue in queues if job in queue), 0)
            return level, job in map(_job, self._grants)
        if not self._level:
            for level, queue in reversed(queues):
                self._level.update(dict.fromkeys(queue, level))
            self._granted.update(grant.job for grant in self._grants)
        return self._level.get(job, 0), job in self._granted

    def _by_queue(self, job: Job) -> Reason:
        level, runs = self._queue_of(job.id)
        attained_gpu_s = self._queues.attained_gpu_s(job)
        terms = (Term("queue", level + 1), Term("attained_gpu_s", attained_gpu_s))
        if runs:
            change = "a job of a higher queue" if level else "its demotion, or its end"
            return Reason(f"runs: its turn in queue {level + 1}", terms, None, change)
        text = f"waits in queue {level + 1}: the GPUs are taken by jobs before it"
        return Reason(text, terms, None, "one of those ending, or being demoted")


def _late_s(queues: MultilevelQueues) -> float:
    """Return when the public simulator would next look for a demotion.

    It is over a second early at the most.
    """
    now_s, limits, index = queues.snapshot.time_s, queues.limits, queues.snapshot.index
    due_s = inf
    for crossing_s, level, job_id in queues.crossings:
        if crossing_s > due_s + 2.0:
            break  # they are in order, and none is looked for over a second before it is due
        if level < len(limits):
            job = index[job_id]
            ran_s = queues.attained_gpu_s(job) / job.min_gpus
            left_s = floor((limits[level] - ran_s) / job.min_gpus)
            due_s = min(due_s, now_s + max(left_s, 1))
    return due_s
