"""What Airflow's scheduler sees of a trial's task: its weight, and the slots that it asks for."""

from __future__ import annotations

from hermes_ops.airflow.control.pool import Trial
from hermes_ops.airflow.metadata import OCCUPYING, Rank
from hermes_ops.airflow.records import HELD_POOL_SLOTS, Lease

ENDED_WEIGHT = 1_000_001
LEASED_WEIGHT = 1_000_000
WAITING_WEIGHT = 100_000
UNOPENED_WEIGHT = 1


def rank_of(trial: Trial, lease: Lease | None, place: int | None) -> Rank | None:
    """The rank of a trial under that lease, in the policy's order; None: as it is.

    One that holds slots keeps them. A deferred one that was told to stop is scheduled with its
    slots once more when its pod has ended: those for whom it makes room then come before it. Once
    it has said that it is preempted it needs none any more: nobody waits for the rest of its pod.
    One that has ended for another reason says so first.
    """
    row = trial.row
    if row.state == "deferred" and trial.told:
        weight, slots = WAITING_WEIGHT, 0 if trial.left else row.pool_slots
    elif row.state in OCCUPYING:
        return None
    elif lease is not None:
        weight, slots = ENDED_WEIGHT if trial.left else LEASED_WEIGHT, max(1, len(lease.gpus))
    elif trial.lease is None:
        weight, slots = UNOPENED_WEIGHT, HELD_POOL_SLOTS
    else:
        behind = place if place is not None else WAITING_WEIGHT // 2
        weight, slots = WAITING_WEIGHT - behind, HELD_POOL_SLOTS
    same = weight == row.priority_weight and slots == row.pool_slots
    return None if same else Rank(row.id, weight, slots)
