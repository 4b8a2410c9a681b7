"""Past use of a pool by teams and users, from the records of its sweeps in Airflow."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import NamedTuple

from hermes_ops.airflow.control.sweep_state import owner
from hermes_ops.airflow.dag_teams import dag_teams
from hermes_ops.airflow.metadata import Metadata
from hermes_ops.airflow.metadata_rows import RunRow
from hermes_ops.airflow.records import SegmentRecord, SweepRecord, decode
from hermes_ops.config.pool_quota import PoolQuota
from hermes_ops.core.gpu_time import DecayedUse, GpuTime, month_start_s

HALF_LIVES = 5
"""Sweeps that ended earlier count less than 1 / 32, and are left out."""

MOST_SWEEPS = 1_000
"""The newest sweeps whose use counts for teams; for limits of GPU-hours all of the month count."""


class PastUse(NamedTuple):
    """The decayed use of teams, and the GPU time of users on this day and in this month."""

    teams: DecayedUse
    users: GpuTime


def past_use(metadata: Metadata, pool: str, quota: PoolQuota, now_s: float) -> PastUse:
    """Return what each team and limited user of the quota has used in the pool until `now_s`.

    That is Unix time. Unavailable while Airflow's database does not answer.
    """
    core = quota.quota()
    half_life_s, budgets = core.half_life_s, core.budget_of_user
    since_s = max(0.0, now_s - HALF_LIVES * half_life_s)
    most: int | None = MOST_SWEEPS
    if core.limits_gpu_time:
        since_s, most = min(since_s, month_start_s(now_s)), None
    airflow_team_of = dag_teams(metadata, quota)
    with metadata.single_connection():
        sweeps = metadata.sweeps_since(since_s, most)
        of_runs = [
            (past.run.dag_id, list(_spans(metadata, past.run, pool, now_s))) for past in sweeps
        ]
    spans = [span for _, found in of_runs for span in found]
    by_team = (
        (quota.team_of(user, airflow_team_of.get(dag, "")), start, end, gpus)
        for dag, found in of_runs
        for user, start, end, gpus in found
    )
    return PastUse(
        DecayedUse.from_spans(by_team, half_life_s, now_s),
        GpuTime.from_spans((span for span in spans if span[0] in budgets), now_s),
    )


def _spans(
    metadata: Metadata, run: RunRow, pool: str, now_s: float
) -> Iterator[tuple[str, float, float, int]]:
    """Yield owner, start, end and GPUs of each time for which trials of the sweep held GPUs."""
    record = decode(SweepRecord, run.sweep)
    if record is None or record.config.get("pool", "gpus") != pool:
        return
    user = owner(run, record.config.get("owner"))
    for text in metadata.segments(run, record.trial_task):
        segment = decode(SegmentRecord, text)
        if segment is None:
            continue
        earlier = zip(segment.earlier_spans, segment.earlier_sizes, strict=False)
        own = zip(segment.held_spans, segment.sizes, strict=False)
        for (start_s, end_s), gpus in chain(earlier, own):
            yield user, start_s, end_s, gpus
        if segment.running and segment.began_s is not None:  # a pod that waits holds none
            yield user, segment.began_s, now_s, len(segment.gpus)
