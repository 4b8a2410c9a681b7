"""The numbers of GPUs between which the policy chooses for one job."""

from __future__ import annotations

from hermes_ops.core.model import Job
from hermes_ops.policies.toolbox.whole_nodes import packing_sizes


def size_options(job: Job, limit: int, each: int, held: int) -> tuple[int, ...]:
    """Return the sizes that pack well, the one that is held, and the least one.

    `limit`: at most so many; `each`: the GPUs of a node. Of a job that is bound to a node those
    that fit there.
    """
    most = min(limit, each) if job.nodes else limit
    always = (n for n in (held, job.min_gpus) if 0 < n <= most and job.takes(n))
    return tuple(sorted({*packing_sizes(job, most, each), *always}))
