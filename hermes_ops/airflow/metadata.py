"""Airflow's metadata tables: the ONE module that knows them. It selects, and it re-ranks.

Reading is plain SELECT. The only writes are `rerank` and `change_slots`: `UPDATE task_instance SET
priority_weight, pool_slots, queue`, in one transaction under the scheduler's own critical-section
lock, so that the scheduler never sees half a ranking (without the lock its SKIP LOCKED passes over
rows that are being updated and a slot goes to the wrong trial). Everything else is written through
Airflow's public REST interface (`client.py`).
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any
from uuid import UUID

from hermes_ops.airflow.identity import possible_places, sweep_id
from hermes_ops.airflow.metadata_rows import (
    OCCUPYING,
    PastRun,
    PoolRow,
    RunRow,
    StoredKey,
    TaskInstanceRow,
    TaskRank,
)
from hermes_ops.airflow.records import SEGMENT_KEY, SWEEP_KEY
from hermes_ops.airflow.state_store import PIECES, joined, piece_keys
from hermes_ops.errors import Unavailable, Unsupported

if TYPE_CHECKING:
    from datetime import datetime

    from sqlalchemy.engine import Connection, Engine

REQUIRED_COLUMNS = {
    "task_instance": {
        "id", "dag_id", "run_id", "task_id", "map_index", "state", "pool", "pool_slots",
        "priority_weight", "try_number", "queued_dttm", "start_date", "queue",
    },
    "dag_run": {
        "id", "dag_id", "run_id", "state", "start_date", "end_date", "queued_at",
        "triggering_user_name",
    },
    "task_state_store": {
        "dag_run_id", "dag_id", "run_id", "task_id", "map_index", "key", "value", "expires_at",
    },
    "slot_pool": {"pool", "slots", "include_deferred"},
    "dag": {"dag_id", "is_paused", "is_stale", "owners", "max_active_tasks"},
    "task_instance_note": {"ti_id", "content"},
}  # fmt: skip

_PIECES_IN_JSON = f'"{PIECES}"'

RANKED_COLUMNS = ("priority_weight", "pool_slots", "queue")
"""The columns of `task_instance` that are written; the database role may update only these."""


SUPPORTED = ((3, 3, 2), (3, 4, 0))
"""Airflow versions: at least the first, below the second."""


def check_version() -> None:
    """Refuse an Airflow of another version (Unsupported)."""
    from airflow import __version__

    version = tuple(int(p) for p in __version__.split(".")[:3] if p.isdigit())
    if not SUPPORTED[0] <= version < SUPPORTED[1]:
        raise Unsupported(
            f"Airflow {__version__} is not supported: Hermes Ops needs >=3.3.2,<3.4. "
            "Install one of those, or a release of hermes-ops made for yours."
        )


class _SharedConnection(threading.local):
    """The connection by which a thread reads in a block of `single_connection`, if it is in one."""

    connection: Connection | None = None


class Metadata:
    """Reads and re-ranks through one SQLAlchemy engine (SQLite or PostgreSQL)."""

    def __init__(self, engine: Engine) -> None:
        from airflow.models.dag import DagModel
        from airflow.models.dagrun import DagRun
        from airflow.models.pool import Pool
        from airflow.models.task_state_store import TaskStateStoreModel
        from airflow.models.taskinstance import TaskInstance, TaskInstanceNote

        self.engine = engine
        self._ti: Any = TaskInstance.__table__
        self._run: Any = DagRun.__table__
        self._store: Any = TaskStateStoreModel.__table__
        self._pool: Any = Pool.__table__
        self._dag: Any = DagModel.__table__
        self._note: Any = TaskInstanceNote.__table__
        self._shared = _SharedConnection()
        self._joined: dict[int, dict[tuple[tuple[str, int], str], tuple[str, str]]] = {}

    @classmethod
    def from_airflow(cls) -> Metadata:
        """Open the database of Airflow's configuration; raises Unsupported for another version."""
        check_version()  # before its tables are imported: another version may have others
        from airflow.configuration import conf
        from sqlalchemy import create_engine, event

        url = conf.get("database", "sql_alchemy_conn")
        engine = create_engine(url, pool_pre_ping=True)
        if engine.dialect.name == "sqlite":
            event.listen(engine, "connect", _wait_for_sqlite_writers)
        return cls(engine)

    def check(self) -> None:
        """Refuse an Airflow of another version or with other columns (Unsupported)."""
        check_version()
        columns = {table: self._columns(table) for table in REQUIRED_COLUMNS}
        if not any(columns.values()):
            raise Unsupported(self._no_airflow())
        for table, wanted in REQUIRED_COLUMNS.items():
            if missing := sorted(wanted - columns[table]):
                raise Unsupported(
                    f"Airflow's table {table} lacks {', '.join(missing)}: run "
                    "`airflow db migrate`; if it persists, this Airflow is not a supported one."
                )

    def _no_airflow(self) -> str:
        """Say that the database is none of Airflow's: most often it is the wrong one."""
        address = self.engine.url.render_as_string(hide_password=True)
        return (
            f"There are no tables of Airflow in {address}: set AIRFLOW_HOME or "
            "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN as Airflow's scheduler has it, or create them "
            "with `airflow db migrate`."
        )

    def _columns(self, table: str) -> set[str]:
        from sqlalchemy import exc, inspect

        try:
            inspector = inspect(self.engine)
            if not inspector.has_table(table):
                return set()
            return {c["name"] for c in inspector.get_columns(table)}
        except exc.OperationalError as error:
            raise Unavailable(f"Airflow's database did not answer: {error}") from error

    def sweeps(self) -> tuple[RunRow, ...]:
        """Return sweeps whose DAG run is running, oldest first."""
        from sqlalchemy import or_, select

        run, store, dag = self._run.c, self._store.c, self._dag.c
        query = (
            select(run.id, run.dag_id, run.run_id, store.task_id, run.state, run.start_date,
                   store.value, or_(dag.is_paused, dag.is_stale), run.triggering_user_name,
                   dag.owners, dag.max_active_tasks)
            .join(self._store, store.dag_run_id == run.id)
            .outerjoin(self._dag, dag.dag_id == run.dag_id)
            .where(store.key == SWEEP_KEY, run.state == "running")
            .order_by(run.start_date, run.id)
        )  # fmt: skip
        rows, joined = self._all(query), tuple(self._joined.items())  # another thread may add to it
        running = {r[0] for r in rows}
        self._joined = {run: records for run, records in joined if run in running}
        return tuple(
            RunRow(r[0], r[1], r[2], r[3], r[4], _seconds(r[5]),
                   _parsed(self._joined_value(r[0], (r[3], -1), SWEEP_KEY, r[6])), bool(r[7]),
                   r[8] or "", r[9] or "", r[10] or 0)
            for r in rows
        )  # fmt: skip

    def dags_of(self, sweep: str) -> tuple[str, ...]:
        """Return the DAGs that have, or had, a sweep of that id; deleted runs do not count."""
        from sqlalchemy import select, tuple_

        store = self._store.c
        query = select(store.dag_id, store.run_id, store.task_id).where(
            store.key == SWEEP_KEY, tuple_(store.dag_id, store.run_id).in_(_runs_of(sweep))
        )
        return tuple(sorted({r[0] for r in self._all(query) if sweep_id(*r) == sweep}))

    def sweep_dags(self) -> tuple[str, ...]:
        """Return the DAGs that have, or had, a sweep, sorted."""
        from sqlalchemy import exists, select

        dags = select(self._run.c.dag_id).distinct().subquery()  # few: each is then looked up
        store = self._store.c
        has_sweep = exists().where(store.dag_id == dags.c.dag_id, store.key == SWEEP_KEY)
        return tuple(sorted(r[0] for r in self._all(select(dags.c.dag_id).where(has_sweep))))

    def past_sweeps(self, dags: Sequence[str], most: int, skip: int = 0) -> tuple[PastRun, ...]:
        """Return the newest sweeps of these DAGs, at most `most` of them after the first `skip`."""
        from sqlalchemy import exists, select

        run, store = self._run.c, self._store.c
        has_sweep = exists().where(store.dag_run_id == run.id, store.key == SWEEP_KEY)
        newest_first = run.start_date.desc(), run.id.desc()
        newest = (  # they hold enough sweeps: the records of all others are not looked at
            select(run.id).where(run.dag_id.in_(dags), has_sweep)
            .order_by(*newest_first).limit(skip + most).subquery()
        )  # fmt: skip
        query = (
            self._runs_with_sweeps.join(newest, newest.c.id == run.id)
            .order_by(*newest_first, store.task_id)
            .limit(most)
            .offset(skip)
        )
        return tuple(_past_run(tuple(r)) for r in self._all(query))

    def sweeps_since(self, since_s: float, most: int | None) -> tuple[PastRun, ...]:
        """Return the newest sweeps that run or have ended since then, with complete records.

        At most `most` of them; None: all.
        """
        from datetime import UTC, datetime

        from sqlalchemy import or_

        run, moment = self._run.c, datetime.fromtimestamp(since_s, UTC)
        query = (
            self._runs_with_sweeps.where(or_(run.end_date.is_(None), run.end_date >= moment))
            .order_by(run.start_date.desc(), run.id.desc(), self._store.c.task_id)
            .limit(most)
        )
        return tuple(self._complete(tuple(row)) for row in self._all(query))

    def _complete(self, row: tuple[Any, ...]) -> PastRun:
        """Return the sweep in a row of `_runs_with_sweeps`, with its complete record."""
        past = _past_run(row)
        place = (past.run.plan_task, -1)
        record = _parsed(self._joined_value(past.run.run_key, place, SWEEP_KEY, row[-1]))
        return replace(past, run=replace(past.run, sweep=record))

    def sweep(self, sweep: str) -> PastRun | None:
        """Return the sweep of that id, running or ended, with its complete record, or None."""
        from sqlalchemy import tuple_

        run = self._run.c
        query = self._runs_with_sweeps.where(tuple_(run.dag_id, run.run_id).in_(_runs_of(sweep)))
        for row in self._all(query):
            if _past_run(tuple(row)).run.sweep_id == sweep:
                return self._complete(tuple(row))
        return None

    @cached_property
    def _runs_with_sweeps(self) -> Any:  # noqa: ANN401 - a SQLAlchemy select
        from sqlalchemy import select

        run, store, dag = self._run.c, self._store.c, self._dag.c
        columns = (run.id, run.dag_id, run.run_id, store.task_id, run.state, run.start_date)
        owners = (run.triggering_user_name, dag.owners)
        return (
            select(*columns, run.end_date, *owners, store.value)
            .join(self._store, store.dag_run_id == run.id)
            .outerjoin(self._dag, dag.dag_id == run.dag_id)
            .where(store.key == SWEEP_KEY)
        )

    def task_states(
        self, tasks: Sequence[tuple[str, str, str]]
    ) -> dict[tuple[str, str, str], dict[str, int]]:
        """Return how many instances of each (dag, run, task) are in which state; "" for none yet.

        A mapped task that has not been expanded counts as one instance.
        """
        from sqlalchemy import func, select, tuple_

        if not tasks:
            return {}
        ti = self._ti.c
        columns = (ti.dag_id, ti.run_id, ti.task_id)
        query = (
            select(*columns, ti.state, func.count())
            .where(tuple_(*columns).in_(tasks))
            .group_by(*columns, ti.state)
        )
        counts: dict[tuple[str, str, str], dict[str, int]] = {}
        for dag, run, task, state, count in self._all(query):
            counts.setdefault((dag, run, task), {})[state or ""] = count
        return counts

    def trials(self, run: RunRow, task_id: str) -> tuple[TaskInstanceRow, ...]:
        """Return the expanded trials of a sweep, by number; empty before their expansion."""
        of_sweep = {"dag": run.dag_id, "run": run.run_id, "task": task_id}
        rows = self._all(self._trials_of_sweep, of_sweep)
        return tuple(_trial_row(run.run_key, tuple(r)) for r in rows)

    def records(self, run: RunRow) -> dict[tuple[str, int], dict[str, str]]:
        """Return all of a run's state-store records: (task id, map index) -> key -> JSON."""
        records: dict[tuple[str, int], dict[str, str]] = {}
        for task_id, map_index, key, value in self._all(self._records_of_run, {"run": run.run_key}):
            place = (task_id, map_index)
            complete = self._joined_value(run.run_key, place, key, value)
            records.setdefault(place, {})[key] = complete
        return records

    def segments(self, run: RunRow, task_id: str) -> tuple[str, ...]:
        """Return the segment records of a sweep's trials, as JSON, by number."""
        from sqlalchemy import select

        store = self._store.c
        query = (
            select(store.map_index, store.value)
            .where(store.dag_run_id == run.run_key, store.task_id == task_id)
            .where(store.key == SEGMENT_KEY)
            .order_by(store.map_index)
        )
        return tuple(
            self._joined_value(run.run_key, (task_id, number), SEGMENT_KEY, value)
            for number, value in self._all(query)
        )

    def expiring(self, ended_states: Sequence[str], held: int, most: int) -> tuple[StoredKey, ...]:
        """Return the dated records that no task can be writing now, the first to expire first.

        A task may write while its instance is in none of `ended_states`, unless it waits for a
        number of pool slots, `held`, that no pool has.
        """
        from sqlalchemy import and_, or_, select

        store, ti = self._store.c, self._ti.c
        same = (ti.dag_id == store.dag_id, ti.run_id == store.run_id,
                ti.task_id == store.task_id, ti.map_index == store.map_index)  # fmt: skip
        query = (
            select(store.dag_id, store.run_id, store.task_id, store.map_index, store.key)
            .outerjoin(self._ti, and_(*same))
            .where(store.expires_at.is_not(None), store.key.like("hermes\\_%", escape="\\"))
            .where(or_(ti.id.is_(None), ti.state.in_(ended_states), ti.pool_slots == held))
            .order_by(store.expires_at)
            .limit(most)
        )
        return tuple(StoredKey(*row) for row in self._all(query))

    def _joined_value(self, run_key: int, place: tuple[str, int], key: str, head: str) -> str:
        """Return the JSON of a record with the fields stored in pieces; read once for each head."""
        if _PIECES_IN_JSON not in head:
            return head
        of_run = self._joined.setdefault(run_key, {})
        cached = of_run.get((place, key))
        if cached is not None and cached[0] == head:
            return cached[1]
        try:
            record = self._joined_record(run_key, place, key, _parsed(head))
            text = json.dumps(record)
        except RecursionError:  # somebody has written it
            record = None
        if record is None:  # a writer is at work, or somebody has deleted a piece
            return "null"
        of_run[place, key] = (head, text)
        return text

    def _joined_record(
        self, run_key: int, place: tuple[str, int], key: str, head: dict[str, Any]
    ) -> dict[str, Any] | None:
        (task, index), keys = place, sorted(piece_keys(key, head))
        asked = {"run": run_key, "task": task, "index": index, "keys": keys}
        pieces = {name: json.loads(text) for name, text in self._all(self._pieces, asked)}
        return joined(key, head, pieces.get)

    # Made once: with many sweeps, making them takes as long as the database takes to answer.

    @cached_property
    def _trials_of_sweep(self) -> Any:  # noqa: ANN401 - a SQLAlchemy select
        from sqlalchemy import String, bindparam, cast, select

        ti, note = self._ti.c, self._note.c
        return (
            select(cast(ti.id, String), ti.map_index, ti.state, ti.pool, ti.pool_slots,
                   ti.priority_weight, ti.try_number, note.content, ti.queue)
            .outerjoin(self._note, note.ti_id == ti.id)
            .where(ti.dag_id == bindparam("dag"), ti.run_id == bindparam("run"))
            .where(ti.task_id == bindparam("task"), ti.map_index >= 0)
            .order_by(ti.map_index)
        )  # fmt: skip

    @cached_property
    def _records_of_run(self) -> Any:  # noqa: ANN401 - a SQLAlchemy select
        from sqlalchemy import bindparam, select

        store = self._store.c
        return select(store.task_id, store.map_index, store.key, store.value).where(
            store.dag_run_id == bindparam("run"),
            store.key.like("hermes\\_%", escape="\\"),
            store.key.not_like("%.%"),  # those are pieces
        )

    @cached_property
    def _pieces(self) -> Any:  # noqa: ANN401 - a SQLAlchemy select
        from sqlalchemy import bindparam, select

        store = self._store.c
        return select(store.key, store.value).where(
            store.dag_run_id == bindparam("run"),
            store.task_id == bindparam("task"),
            store.map_index == bindparam("index"),
            store.key.in_(bindparam("keys", expanding=True)),
        )

    def pool(self, name: str, trial_tasks: Sequence[tuple[str, str, str]]) -> PoolRow | None:
        """Return the pool; instances of the (dag, run, task) in `trial_tasks` are not foreign."""
        from sqlalchemy import func, select, tuple_

        pool, ti = self._pool.c, self._ti.c
        rows = self._all(select(pool.slots, pool.include_deferred).where(pool.pool == name))
        if not rows:
            return None
        slots, include_deferred = rows[0]
        states = [s for s in OCCUPYING if include_deferred or s != "deferred"]
        query = select(func.coalesce(func.sum(ti.pool_slots), 0)).where(
            ti.pool == name, ti.state.in_(states)
        )
        if trial_tasks:  # not one condition each: SQLite limits the depth of an expression to 1,000
            query = query.where(tuple_(ti.dag_id, ti.run_id, ti.task_id).not_in(trial_tasks))
        return PoolRow(slots, int(self._all(query)[0][0]))

    def rerank(self, ranks: Iterable[TaskRank]) -> int:
        """Write the ranks of task instances that wait, in one transaction; the rows changed.

        A task instance that has been queued or runs meanwhile is left alone: its slots count. One
        that is deferred keeps its slots, and so has its weight changed alone, or gives them up.
        """
        by_kind: dict[bool, list[dict[str, Any]]] = {}  # of those without a queue it is not written
        for r in ranks:
            row = {"b_id": UUID(r.id), "b_weight": r.priority_weight, "b_slots": r.pool_slots}
            routed = {} if r.queue is None else {"b_queue": r.queue}
            by_kind.setdefault(bool(routed), []).append(row | routed)
        if not by_kind:
            return 0
        with self._locked("the ranking") as connection:
            results = [connection.execute(self._rank(k), rows) for k, rows in by_kind.items()]
            return sum(int(result.rowcount) for result in results)

    def _rank(self, is_routed: bool) -> Any:  # noqa: ANN401 - a SQLAlchemy update
        from sqlalchemy import and_, bindparam, column, or_, table, update

        # Not Airflow's own table object: that would set `updated_at` too.
        own: list[Any] = [column("id", self._ti.c.id.type), column("state")]
        ti = table("task_instance", *own, *map(column, RANKED_COLUMNS))
        no_more = or_(ti.c.pool_slots == bindparam("b_slots"), bindparam("b_slots") == 0)
        lighter = and_(ti.c.state == "deferred", no_more)
        names = {"priority_weight": "b_weight", "pool_slots": "b_slots"}
        names |= {"queue": "b_queue"} if is_routed else {}
        values: dict[str, Any] = {own: bindparam(name) for own, name in names.items()}
        return (
            update(ti)
            .where(ti.c.id == bindparam("b_id"))
            .where(ti.c.state.is_(None) | and_(*(ti.c.state != s for s in OCCUPYING)) | lighter)
            .values(values)
        )

    def change_slots(self, row: TaskInstanceRow, slots: int) -> bool:
        """Give a running task instance another number of slots; return whether it has them now.

        Fewer slots are always possible. More are refused unless the pool has them open. On SQLite
        what waits in the pool for slots and fits counts as if it had them: there is no lock against
        a scheduler that has just counted the open slots for it.
        """
        from sqlalchemy import and_, column, func, or_, select, table, update

        columns: list[Any] = [column("id", self._ti.c.id.type), column("state"), column("pool")]
        ti = table("task_instance", *columns, column("pool_slots"))  # as in `rerank`
        other, pool = ti.alias("other"), self._pool.c
        pool_size = select(pool.slots).where(pool.pool == row.pool).scalar_subquery()
        counts: Any = other.c.state.in_(OCCUPYING)
        if self.engine.dialect.name == "sqlite":
            waits = and_(other.c.state == "scheduled", other.c.pool_slots <= pool_size)
            counts = or_(counts, waits)
        total = func.coalesce(func.sum(other.c.pool_slots), 0)
        taken = select(total).where(other.c.pool == row.pool, counts).scalar_subquery()
        is_possible = or_(ti.c.pool_slots >= slots, pool_size - taken >= slots - ti.c.pool_slots)
        is_its = (ti.c.id == UUID(row.id), ti.c.pool == row.pool, ti.c.state == "running")
        statement = update(ti).where(*is_its, is_possible).values(pool_slots=slots)
        with self._locked("the slots") as connection:
            return bool(connection.execute(statement).rowcount)

    @contextmanager
    def _locked(self, written: str) -> Iterator[Connection]:
        """Write in one transaction under the lock of Airflow's scheduler."""
        from airflow.utils.db import DBLocks
        from sqlalchemy import exc, text

        lock_id = DBLocks.SCHEDULER_CRITICAL_SECTION.value
        try:
            with self.engine.begin() as connection:
                if connection.dialect.name == "postgresql":
                    connection.execute(text("SELECT pg_advisory_xact_lock(:id)"), {"id": lock_id})
                yield connection
        except exc.OperationalError as error:
            raise Unavailable(f"Airflow's database did not take {written}: {error}") from error

    @contextmanager
    def single_connection(self) -> Iterator[None]:
        """Let one connection read all that this thread reads in the block."""
        with self._connected() as connection:
            self._shared.connection = connection
            try:
                yield
            finally:
                self._shared.connection = None

    @contextmanager
    def _connected(self) -> Iterator[Connection]:
        from sqlalchemy import exc

        shared = self._shared.connection
        try:
            if shared is not None:
                yield shared
                return
            with self.engine.connect() as connection:
                yield connection
        except exc.SQLAlchemyError as error:
            if shared is not None:  # without a rollback all later reads of the block would fail
                with suppress(exc.SQLAlchemyError):
                    shared.rollback()
            if isinstance(error, exc.OperationalError):
                raise Unavailable(f"Airflow's database did not answer: {error}") from error
            raise

    def _all(self, query: Any, values: Mapping[str, Any] | None = None) -> Sequence[Any]:  # noqa: ANN401 - a SQLAlchemy select
        with self._connected() as connection:
            rows: Sequence[Any] = connection.execute(query, values).all()
        return rows


def _runs_of(sweep: str) -> list[tuple[str, str]]:
    """Return the DAGs and run ids of the DAG runs that can hold the sweep of an id."""
    return sorted({(place.dag_id, place.run_id) for place in possible_places(sweep)})


@lru_cache(maxsize=65_536)
def _trial_row(run_key: int, columns: tuple[Any, ...]) -> TaskInstanceRow:
    """Return the row; of a task that has not changed it is the same object in each round."""
    task, number, state, pool, slots, weight, tries, note, queue = columns
    identity = str(UUID(task))  # SQLite has it without hyphens
    return TaskInstanceRow(
        identity, run_key, number, state, pool, slots, weight or 0, tries, note or "", queue or ""
    )


@lru_cache(maxsize=256)
def _parsed(text: str) -> dict[str, Any]:
    """Return the JSON object, the same one for the same text; empty where it is none."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _past_run(columns: tuple[Any, ...]) -> PastRun:
    key, dag, run, task, state, started, ended, user, owners, value = columns
    row = RunRow(key, dag, run, task, state, _seconds(started), _parsed(value),
                 triggered_by=user or "", dag_owners=owners or "")  # fmt: skip
    return PastRun(row, None if ended is None else _seconds(ended))


def _wait_for_sqlite_writers(connection: Any, _: object) -> None:  # noqa: ANN401 - a DB-API connection
    connection.execute("PRAGMA busy_timeout=20000")


def _seconds(moment: datetime | None) -> float:
    return moment.timestamp() if moment is not None else 0.0
