"""The one loop: observe, decide, check, diff, apply."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from hermes_ops.core.model import Plan, Policy, Snapshot
from hermes_ops.core.plan import Action, check, diff

M = TypeVar("M")


class Cluster(Protocol):
    """Where jobs run (virtual time, processes, pods); the loop never knows which."""

    def observe(self) -> Snapshot:
        """Return the pool now; a job with a stop flag is STOPPING until it has left its GPUs."""
        ...

    def apply(self, snapshot: Snapshot, plan: Plan, actions: Sequence[Action]) -> None:
        """Start the actions, in order; a Start takes effect once its GPUs are free.

        The plan is given for its ranking and reasons. There may be no action at all.
        """
        ...

    def wait(self, until_s: float | None) -> None:
        """Return when something happened, or at `until_s` (the driver's clock), None: no limit."""
        ...

    def close(self) -> None:
        """Release what the driver holds; jobs continue as the driver documents."""
        ...


def tick(policy: Policy[M], cluster: Cluster, memory: M) -> tuple[Snapshot, Plan, M]:
    """Make one round; return the snapshot, the plan, and the memory for the next round.

    Raises PlanError, before anything is applied, when the policy's plan is impossible.
    """
    snapshot = cluster.observe()
    plan, memory = policy.decide(snapshot, memory)
    changes = check(snapshot, plan)
    cluster.apply(snapshot, plan, diff(snapshot, plan, changes))
    return snapshot, plan, memory


def run(policy: Policy[M], cluster: Cluster, memory: M, until: Callable[[Snapshot], bool]) -> M:
    """Tick, waiting in between, until `until(snapshot)` holds; return the last memory."""
    try:
        while True:
            snapshot, plan, memory = tick(policy, cluster, memory)
            if until(snapshot):
                return memory
            review_at_s = plan.review_at_s
            del snapshot, plan  # so that a driver may reuse their containers
            cluster.wait(review_at_s)
    finally:
        cluster.close()
