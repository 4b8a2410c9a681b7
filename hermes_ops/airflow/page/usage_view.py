"""The usage of a pool, read in the background, for the sweeps that a reader may see.

The segments come from MLflow, the sweeps and their owners from Airflow. A request waits for a
reading a moment at most; until there is one, the page says that it is being read.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hermes_ops.airflow.control.quota_settings import QuotaSettings
from hermes_ops.airflow.control.sweep_state import owner
from hermes_ops.airflow.dag_teams import dag_teams
from hermes_ops.airflow.records import SweepRecord, decode
from hermes_ops.airflow.sweep.source import DEFAULT_POOL
from hermes_ops.config.pool_quota import WITHOUT_TEAMS
from hermes_ops.core.usage import COLUMNS, PRICE, WHOLE_POOL_COLUMNS, Figures, TrialUse, usage
from hermes_ops.errors import HermesError
from hermes_ops.tracking import SweepRef
from hermes_ops.tracking.trial_timelines import fetch_trial_timelines

if TYPE_CHECKING:
    from hermes_ops.airflow.metadata import Metadata
    from hermes_ops.airflow.metadata_rows import PastRun
    from hermes_ops.config.pool_quota import PoolQuota
    from hermes_ops.tracking import Tracker
    from hermes_ops.tracking.trial_timelines import TrialTimeline

log = logging.getLogger(__name__)

MOST_SWEEPS = 1_000
DAY_S = 86_400.0
FRESH_S, FRESH_SHARE = 60.0, 20.0
"""A table is shown for a minute, or for this many times the seconds that its reading took."""
PATIENCE_S = 1.0
"""Seconds that a request waits for a first reading."""
MOST_TABLES = 64
MOST_UNDER_WAY = 8
"""Readings that may be under way or wait for their turn."""

Timelines = tuple["TrialTimeline", ...]


@dataclass(frozen=True, slots=True)
class UsageQuery:
    """The scope of a table: a pool, the last `days`, a grouping, and the DAGs that are counted.

    `is_whole`: those are all DAGs that have sweeps.
    """

    pool: str
    days: int
    by: str
    dags: frozenset[str]
    is_whole: bool = True


@dataclass(frozen=True, slots=True)
class UsageTable:
    """The rows of a query at `read_s` (Unix seconds); `columns` are their figures with heads.

    `is_cut`: there were more sweeps than are counted.
    """

    query: UsageQuery
    read_s: float
    columns: Mapping[str, str]
    rows: Sequence[Figures]
    is_cut: bool = False


@dataclass(slots=True)
class UsageReader:
    """Reads tables in the background, one at a time, and keeps the newest of each query."""

    metadata: Metadata
    tracker: Callable[[], Tracker]
    clock: Callable[[], float] = time.time
    _busy: threading.Lock = field(default_factory=threading.Lock)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _tables: dict[UsageQuery, tuple[UsageTable, float]] = field(default_factory=dict)
    _under_way: dict[UsageQuery, threading.Event] = field(default_factory=dict)
    _troubles: dict[UsageQuery, str] = field(default_factory=dict)
    # Of ended sweeps, by MLflow run and the time of the end: a sweep may be resumed.
    _ended: dict[tuple[str, float], Timelines] = field(default_factory=dict)

    def get(self, query: UsageQuery) -> tuple[UsageTable | None, str]:
        """Return the newest table, None while there is none, and why the last reading failed.

        A table that is older than it may be is read again in the background.
        """
        with self._lock:
            table, until_s = self._tables.get(query, (None, 0.0))
            reading = self._under_way.get(query)
            # A reading in the future: the clock has been set back since.
            if reading is None and not (table and table.read_s <= self.clock() <= until_s):
                if len(self._under_way) >= MOST_UNDER_WAY:
                    return table, "Too much is being read now: ask again in a minute."
                reading = self._under_way[query] = threading.Event()
                threading.Thread(target=self._read, args=(query, reading), daemon=True).start()
        if table is None and reading is not None:
            reading.wait(PATIENCE_S)
        with self._lock:
            return self._tables.get(query, (table, 0.0))[0], self._troubles.get(query, "")

    def _read(self, query: UsageQuery, is_read: threading.Event) -> None:
        table, trouble = None, ""
        with self._busy:
            began_s = time.monotonic()
            try:
                table = self._table(query)
            except HermesError as error:
                log.warning("The use of the pool %s cannot be read: %s", query.pool, error)
                trouble = "Airflow's database or MLflow did not answer."
            except Exception:  # of any kind: the next reading may succeed
                log.exception("The use of the pool %s cannot be read", query.pool)
                trouble = "It could not be read; the API server's log says why."
        fresh_s = max(FRESH_S, FRESH_SHARE * (time.monotonic() - began_s))
        with self._lock:
            self._troubles[query] = trouble
            if table is not None:
                self._tables.pop(query, None)
                self._tables[query] = table, self.clock() + fresh_s
            for kept in (self._tables, self._troubles):
                while len(kept) > MOST_TABLES:
                    del kept[next(iter(kept))]
            self._under_way.pop(query, None)
        is_read.set()

    def _table(self, query: UsageQuery) -> UsageTable:
        now_s = self.clock()
        since_s = now_s - query.days * DAY_S
        settings = _settings(query.pool)
        spec = WITHOUT_TEAMS if settings is None else settings.quota
        airflow_team_of = dag_teams(self.metadata, spec)
        past = self.metadata.sweeps_since(since_s, MOST_SWEEPS)
        uses = [
            use
            for each in past
            if each.run.dag_id in query.dags
            for use in self._uses(each, query.pool, spec, airflow_team_of)
        ]
        quota = spec.quota() if settings is not None and query.is_whole else None
        rate = spec.rate
        rows = [row.document(rate) for row in usage(uses, query.by, since_s, now_s, quota)]
        columns = COLUMNS if rate is None else COLUMNS | PRICE
        if not query.is_whole:  # what others borrowed, lent and caused is not known then
            columns = {
                name: head for name, head in columns.items() if name not in WHOLE_POOL_COLUMNS
            }
        return UsageTable(query, now_s, columns, rows, len(past) >= MOST_SWEEPS)

    def _uses(
        self, past: PastRun, pool: str, quota: PoolQuota, airflow_team_of: Mapping[str, str]
    ) -> list[TrialUse]:
        """Return the use of each trial of a sweep, if it is one of that pool."""
        run, record = past.run, decode(SweepRecord, past.run.sweep)
        if record is None or str(record.config.get("pool", DEFAULT_POOL)) != pool:
            return []
        user = owner(run, record.config.get("owner"))
        ref = SweepRef(run.sweep_id, record.experiment_id, record.parent_run_id)
        team = quota.team_of(user, airflow_team_of.get(run.dag_id, ""))
        return [
            timeline.to_use(run.sweep_id, user, team, pool)
            for timeline in self._timelines(ref, past.ended_s)
        ]

    def _timelines(self, ref: SweepRef, ended_s: float | None) -> Timelines:
        """Return the timeline of each trial; those of an ended sweep are read once for its end."""
        key = None if ended_s is None else (ref.parent_run_id, ended_s)
        if key is not None and key in self._ended:
            return self._ended[key]
        timelines = fetch_trial_timelines(self.tracker(), ref)
        if key is not None and all(s.end_s is not None for t in timelines for s in t.segments):
            self._ended[key] = timelines
            while len(self._ended) > MOST_SWEEPS:
                del self._ended[next(iter(self._ended))]
        return timelines


def _settings(pool: str) -> QuotaSettings | None:
    """Return the quota of the pool; None without one, and while its file is malformed."""
    try:
        return QuotaSettings.of_pool(pool)
    except HermesError:
        return None
