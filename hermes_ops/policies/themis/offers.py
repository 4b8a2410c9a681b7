"""Offers of the GPUs to apps: the order in which their jobs get them (Themis)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heappush
from math import ceil

from hermes_ops.core.model import Job
from hermes_ops.policies.themis.apps import App


def offered_number(knob: float, number: int) -> int:
    """Return ceil((1 - `knob`) x `number`) without rounding errors: 3 of 10 for a knob of 0.7."""
    return ceil((1 - knob) * number - 1e-9)


def offer_order(
    apps: Sequence[App], knob: float, pool_gpus: int, *, lease_ends: bool
) -> Iterator[Job]:
    """Yield the jobs of all apps in the order in which GPUs are offered to them.

    At a lease's end all GPUs are offered to the ceil((1 - `knob`) x n) of n apps with the largest
    rho; what they leave goes to the others in the same way. In between jobs keep their GPUs, and
    only free ones are offered. Each offer is given job by job to the app whose rho is the largest
    with what it has been given so far; to those with nothing in the order of their rho with all
    GPUs that they can use. Jobs that must not be stopped count as given and come first.
    """
    ranked = sorted(apps, key=lambda app: app.rank(pool_gpus))
    kept = {app.name: _kept(app, lease_ends=lease_ends) for app in ranked}
    for app in ranked:
        yield from kept[app.name]
    few = offered_number(knob, len(ranked))
    for offered in (ranked[:few], ranked[few:]):
        yield from _to_the_largest_rho(offered, kept)


def _kept(app: App, *, lease_ends: bool) -> list[Job]:
    """Return the jobs whose GPUs are not offered."""
    return [job for job in app.jobs if job.holds_gpus and not (lease_ends and job.preemptible)]


def _to_the_largest_rho(apps: Sequence[App], kept: dict[str, list[Job]]) -> Iterator[Job]:
    lines: list[Iterator[Job]] = []
    heap: list[tuple[float, int]] = []
    given: list[int] = []
    for number, app in enumerate(apps):
        over = {job.id for job in kept[app.name]}
        lines.append(iter([job for job in app.jobs if job.id not in over]))
        given.append(sum(len(job.gpus_held) for job in kept[app.name]))
        heap.append((-app.rho(given[number]), number))
    heapify(heap)
    while heap:
        _, number = heappop(heap)
        job = next(lines[number], None)
        if job is None:
            continue
        yield job
        given[number] += len(job.gpus_held) if job.holds_gpus else job.min_gpus
        heappush(heap, (-apps[number].rho(given[number]), number))
