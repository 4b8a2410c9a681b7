"""How the sweeps of a pool and its other jobs share the GPUs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from hermes_ops.core.model import Job, SweepId


@dataclass(frozen=True, slots=True)
class GpuClaim:
    """What the open jobs of one sweep could use.

    `fixed` GPUs are held by jobs that must not be changed: they count, but are not shared out.
    `pinned` ones it keeps in any case.
    """

    jobs: Sequence[Job]
    fixed: int = 0
    pinned: int = 0

    @property
    def weight(self) -> float:
        """The weight of the first job."""
        return self.jobs[0].weight if self.jobs else 1.0

    def units(self) -> Iterator[int]:
        """Yield by how many GPUs it grows, in turn: by the least size of each job, then one by one.

        The least sizes that make up the pinned GPUs are left out.
        """
        covered = self.pinned
        for job in self.jobs:
            if covered >= job.min_gpus:
                covered -= job.min_gpus
            else:
                yield job.min_gpus
        more = sum(job.max_gpus - job.min_gpus for job in self.jobs)
        yield from (1 for _ in range(more - covered))


def divide(claims: Mapping[SweepId, GpuClaim], gpus: int) -> dict[SweepId, int]:
    """Return the number of GPUs of each claim, its pinned ones among them: at most `gpus` in all.

    By turns: the claim with the smallest (GPUs + 1) / weight takes its next unit, of equals the
    first one; a unit that does not fit is passed over. So `frontrunner` shares GPUs as well.
    """
    share = {sweep: claim.pinned for sweep, claim in claims.items()}
    left = gpus - sum(share.values())
    units = {sweep: claim.units() for sweep, claim in claims.items()}
    while left > 0 and units:
        sweep = min(units, key=lambda s: (share[s] + claims[s].fixed + 1) / claims[s].weight)
        unit = next(units[sweep], None)
        if unit is None:
            del units[sweep]
        elif unit <= left:
            share[sweep] += unit
            left -= unit
    return share
