"""YARN-CS: a capacity queue for each virtual cluster (or user), first in, first out within it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from hermes_ops.core.model import Job, Plan, Reason, Snapshot, Term
from hermes_ops.core.nodes import NodeCapacity
from hermes_ops.core.order import SubmissionKey, submission
from hermes_ops.policies.toolbox.answer import answer
from hermes_ops.policies.toolbox.fill import ever_fits, fill
from hermes_ops.policies.toolbox.parameter_checks import one_of

BY = ("virtual_cluster", "user")


@dataclass(frozen=True, slots=True)
class YarnCs:
    """Serve the queue that uses the least of what it is guaranteed; its first job, or nobody's.

    Each virtual cluster (`by="user"`: each user) has a queue and is guaranteed a part of the GPUs
    by its entry in `capacities` (any positive numbers, their proportions count), or by the
    largest weight among its jobs. Queues without jobs lend their part to the others. Within a
    queue jobs are served by submission, and one that does not fit blocks its own queue only.
    Nothing is stopped, unless `reclaim`: then jobs of queues beyond their guarantee, the last
    started first, give way to a queue that is below its own.

    Source: the capacity scheduler of Hadoop YARN as the baseline of Tiresias (NSDI 2019). Our
    choices: guarantees are shares of the whole pool among the queues that have jobs now.
    """

    capacities: Mapping[str, float] | tuple[tuple[str, float], ...] = ()
    by: str = "virtual_cluster"
    reclaim: bool = False
    name: ClassVar[str] = "yarn-cs"

    def __post_init__(self) -> None:
        pairs = self.capacities.items() if isinstance(self.capacities, Mapping) else self.capacities
        shares = tuple(sorted((str(queue), float(share)) for queue, share in pairs))
        if any(not 0 < share < float("inf") for _, share in shares):
            raise ValueError("capacities are numbers above 0, one for each queue that is named")
        object.__setattr__(self, "capacities", shares)
        one_of("by", self.by, BY)

    @property
    def preempts(self) -> bool:
        """True with `reclaim`."""
        return self.reclaim

    def initial(self) -> None:
        """Return None: the policy has no memory."""
        return

    def decide(self, snapshot: Snapshot, memory: None) -> tuple[Plan, None]:
        """Keep running jobs as far as allowed, then start the first job of the neediest queue."""
        capacity = _Capacity(snapshot, self)
        order = capacity.order()
        grants = fill(snapshot, order, preempt=self.reclaim)

        def explain(job: Job, is_granted: bool) -> Reason:
            queue = self.queue_of(job)
            terms = (
                Term("guaranteed_gpus", capacity.guaranteed[queue]),
                Term("used_gpus", capacity.used[queue]),
            )
            if is_granted:
                return Reason(
                    f"runs: queue {queue or 'default'!s} had its turn", terms, None, "its end"
                )
            change = "a job of its queue, or of one beyond its guarantee, ending"
            return Reason(f"waits in queue {queue or 'default'!s}", terms, None, change)

        return answer(snapshot, grants, snapshot.queue, explain), memory

    def queue_of(self, job: Job) -> str:
        """Return the name of the job's queue."""
        return job.user if self.by == "user" else job.virtual_cluster


class _Capacity:
    """The guaranteed and used GPUs of each queue, as GPUs are given out."""

    def __init__(self, snapshot: Snapshot, policy: YarnCs) -> None:
        self._snapshot, self._policy = snapshot, policy
        given = dict(policy.capacities)
        weights: dict[str, float] = {}
        for job in (*snapshot.holding, *snapshot.queue):
            queue = policy.queue_of(job)
            weights[queue] = given.get(queue, max(weights.get(queue, 0.0), job.weight))
        total = sum(weights.values())
        size = len(snapshot.gpus)
        self.guaranteed = {queue: size * weight / total for queue, weight in weights.items()}
        self.used = dict.fromkeys(weights, 0)
        self._node_capacity = NodeCapacity(snapshot)

    def order(self) -> list[Job]:
        """Order the jobs: running ones within the guarantee or not preemptible, then by need."""
        snapshot, retained = self._snapshot, self._snapshot.retained
        runs = [job for job in snapshot.holding if job.id in retained]
        runs.sort(key=lambda job: (job.preemptible, job.started_s or 0.0, submission(job)))
        order: list[Job] = []
        surplus: list[Job] = []
        for job in runs:
            within = self._after(job) <= self.guaranteed[self._policy.queue_of(job)]
            if within or not (self._policy.reclaim and job.preemptible):
                self._node_capacity.reserve(retained[job.id].gpus)
                self._use(job, order)
            else:
                surplus.append(job)
        self._start(order, surplus)
        return order

    def _start(self, order: list[Job], surplus: list[Job]) -> None:
        """Order the starts within the guarantee, then the surplus, then the other starts."""
        waiting: dict[str, list[Job]] = {}
        for job in reversed(self._snapshot.queue):
            if ever_fits(self._snapshot, job):
                waiting.setdefault(self._policy.queue_of(job), []).append(job)
        left = len(self._snapshot.gpus) - sum(self.used.values())
        left = self._serve(waiting, order, left, within=True)
        for job in surplus:
            size = len(self._snapshot.retained[job.id].gpus)
            if size <= left and self._node_capacity.reserve(self._snapshot.retained[job.id].gpus):
                left -= size
                self._use(job, order)
        self._serve(waiting, order, left, within=False)

    def _serve(
        self, waiting: dict[str, list[Job]], order: list[Job], left: int, *, within: bool
    ) -> int:
        blocked: set[str] = set()

        def usage(queue: str) -> tuple[float, SubmissionKey]:
            return self.used[queue] / self.guaranteed[queue], submission(waiting[queue][-1])

        while left > 0:
            ready = [queue for queue in waiting if queue not in blocked and waiting[queue]]
            if not ready:
                break
            queue = min(ready, key=usage)
            job = waiting[queue][-1]
            beyond = within and self._after(job) > self.guaranteed[queue]
            if beyond or job.min_gpus > left or not self._node_capacity.promise(job):
                blocked.add(queue)
                continue
            left -= job.min_gpus
            waiting[queue].pop()
            self._use(job, order)
        return left

    def _after(self, job: Job) -> float:
        """Return the GPUs that its queue would use with this job."""
        return self.used[self._policy.queue_of(job)] + self._size(job) - 1e-9

    def _size(self, job: Job) -> int:
        stay = self._snapshot.retained.get(job.id)
        return job.min_gpus if stay is None else len(stay.gpus)

    def _use(self, job: Job, order: list[Job]) -> None:
        self.used[self._policy.queue_of(job)] += self._size(job)
        order.append(job)
