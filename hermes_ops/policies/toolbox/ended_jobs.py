"""The jobs that have ended since a policy's last decision."""

from __future__ import annotations

from hermes_ops.core.model import Job, JobId, Phase, Snapshot
from hermes_ops.core.order import by_submission


def newly_ended(
    snapshot: Snapshot, counted: tuple[JobId, ...]
) -> tuple[list[Job], tuple[JobId, ...]]:
    """Return the ended jobs that are not `counted`, first submitted first, and the new `counted`.

    An ended job may be in many snapshots (for its curve) or in one; only those that are still in
    the snapshot have to be remembered.
    """
    ended = by_submission(job for job in snapshot.others if job.phase is Phase.ENDED)
    if not ended:
        return [], ()
    before = set(counted)
    return [job for job in ended if job.id not in before], tuple(job.id for job in ended)
