"""Which jobs have ended since a policy last looked."""

from __future__ import annotations

from hermes_ops.core.model import Job, JobId, Phase, Snapshot
from hermes_ops.core.order import by_submission


def newly_ended(
    snapshot: Snapshot, counted: tuple[JobId, ...]
) -> tuple[list[Job], tuple[JobId, ...]]:
    """The ended jobs of the snapshot that are not `counted`, and what is counted from now on.

    An ended job may be in many snapshots (for its curve) or in one; only those that are still
    there have to be remembered. First submitted first.
    """
    ended = by_submission(job for job in snapshot.others if job.phase is Phase.ENDED)
    if not ended:
        return [], ()
    before = set(counted)
    return [job for job in ended if job.id not in before], tuple(job.id for job in ended)
