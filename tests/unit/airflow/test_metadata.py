from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import create_engine, event, insert, select, text
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import Engine

from hermes_ops.airflow.metadata import Metadata
from hermes_ops.airflow.metadata_rows import PoolRow, StoredKey, TaskRank
from hermes_ops.airflow.records import Lease, decode, encode
from hermes_ops.airflow.state_store import divided
from hermes_ops.errors import Unavailable, Unsupported
from tests.unit.airflow.builders import SWEEP, lease, row, sweep_record, ti_id

NOW = datetime(2026, 1, 2, tzinfo=UTC)


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database file with Airflow's own tables, those that we read, all empty."""
    from airflow.models.trigger import Trigger  # task_instance refers to it

    path = tmp_path_factory.mktemp("airflow") / "airflow.db"
    found = create_engine(f"sqlite:///{path}")
    tables: Any = Metadata(found)
    trigger: Any = Trigger
    wanted = [tables._ti, tables._run, tables._store, tables._pool, tables._dag, tables._note]
    trigger.__table__.metadata.create_all(found, tables=wanted)
    found.dispose()
    return path


@pytest.fixture
def engine(template: Path, tmp_path: Path) -> Iterator[Engine]:
    """A database of its own for each test."""
    path = shutil.copy(template, tmp_path / "airflow.db")
    found = create_engine(f"sqlite:///{path}")
    yield found
    found.dispose()


def add(engine: Engine, table: Any, **values: Any) -> None:
    with engine.begin() as connection:
        connection.execute(insert(table).values(**values))


def add_run(
    engine: Engine,
    key: int = 1,
    run_id: str = SWEEP,
    state: str = "running",
    user: str | None = None,
) -> None:
    own: Any = Metadata(engine)
    add(engine, own._run, id=key, dag_id="hermes_sweep", run_id=run_id, run_type="manual",
        state=state, run_after=NOW, start_date=NOW.replace(day=key),
        log_template_id=None, triggering_user_name=user)  # fmt: skip


def add_record(engine: Engine, key: str, value: Any, task: str = "plan", index: int = -1) -> None:
    own: Any = Metadata(engine)
    add(engine, own._store, dag_run_id=1, dag_id="hermes_sweep", run_id=SWEEP, task_id=task,
        map_index=index, key=key, value=json.dumps(value), updated_at=NOW)  # fmt: skip


def add_task(engine: Engine, number: int, state: str | None, **changes: Any) -> None:
    own: Any = Metadata(engine)
    facts: dict[str, Any] = {
        "dag_id": "hermes_sweep",
        "run_id": SWEEP,
        "task_id": "trial",
        "map_index": number,
        "pool": "gpus",
        "pool_slots": 1,
        "priority_weight": 1,
        "try_number": 1,
        "max_tries": 0,
    }
    add(engine, own._ti, id=UUID(ti_id(number)), state=state, **{**facts, **changes})


def add_pool(engine: Engine, slots: int, include_deferred: bool = False) -> None:
    own: Any = Metadata(engine)
    add(engine, own._pool, pool="gpus", slots=slots, include_deferred=include_deferred)


def test_sweeps_are_the_running_runs_that_were_planned(engine: Engine) -> None:
    add_run(engine)
    assert Metadata(engine).sweeps() == ()
    add_record(engine, "hermes_sweep", sweep_record())
    add_run(engine, 2, "ended", "success")
    (found,) = Metadata(engine).sweeps()
    assert (found.run_id, found.plan_task, found.started_s) == (
        SWEEP,
        "plan",
        NOW.replace(day=1).timestamp(),
    )
    assert found.sweep["config"]["name"] == "digits"
    assert not found.paused


def test_the_pool_is_known_however_many_sweeps_run(engine: Engine) -> None:
    add_pool(engine, 4)
    add_run(engine)
    add_task(engine, 0, "running")
    others = [("hermes_sweep", f"run{number}", "trial") for number in range(2_000)]
    assert Metadata(engine).pool("gpus", others) == PoolRow(4, 1)
    assert Metadata(engine).pool("gpus", [*others, ("hermes_sweep", SWEEP, "trial")]) == PoolRow(
        4, 0
    )


@pytest.mark.parametrize("facts", [{"is_paused": True}, {"is_stale": True}], ids=str)
def test_a_sweep_whose_dag_is_paused_or_no_longer_in_its_file_says_so(
    engine: Engine, facts: dict[str, bool]
) -> None:
    own: Any = Metadata(engine)
    add_run(engine)
    add_record(engine, "hermes_sweep", sweep_record())
    add(engine, own._dag, dag_id="hermes_sweep", max_active_tasks=1,
        max_consecutive_failed_dag_runs=0, has_task_concurrency_limits=False,
        bundle_name="dags", **{"is_paused": False, "is_stale": False, **facts})  # fmt: skip
    assert [(run.paused, run.most_tasks) for run in own.sweeps()] == [(True, 1)]


def test_a_sweep_has_the_user_who_triggered_it_and_the_owners_of_its_dag(engine: Engine) -> None:
    own: Any = Metadata(engine)
    add_run(engine, user="ann")
    add_record(engine, "hermes_sweep", sweep_record())
    assert [(run.triggered_by, run.dag_owners) for run in own.sweeps()] == [("ann", "")]
    add(engine, own._dag, dag_id="hermes_sweep", is_paused=False, is_stale=False,
        max_active_tasks=1, max_consecutive_failed_dag_runs=0, has_task_concurrency_limits=False,
        bundle_name="dags", owners="eve, bob")  # fmt: skip
    assert [(run.triggered_by, run.dag_owners) for run in own.sweeps()] == [("ann", "eve, bob")]


def test_the_sweeps_since_a_moment_are_those_that_run_or_have_ended_after_it(
    engine: Engine,
) -> None:
    own: Any = Metadata(engine)
    add_run(engine, user="ann")
    add_record(engine, "hermes_sweep", sweep_record())
    since_s = NOW.timestamp()
    assert [past.run.triggered_by for past in own.sweeps_since(since_s, 9)] == ["ann"]
    with engine.begin() as connection:
        connection.execute(own._run.update().values(end_date=NOW, state="success"))
    (past,) = own.sweeps_since(since_s, None)
    assert (past.ended_s, past.run.sweep["config"]["name"]) == (since_s, "digits")
    assert own.sweeps_since(since_s + 1, 9) == own.sweeps_since(since_s, 0) == ()


def test_the_segments_of_a_sweep_are_those_of_its_trials_by_number(engine: Engine) -> None:
    add_run(engine)
    add_record(engine, "hermes_sweep", sweep_record())
    for number in (1, 0):
        add_record(engine, "hermes_segment", {"epoch": number}, task="trial", index=number)
    add_record(engine, "hermes_segment", {"epoch": 9}, task="other.trial", index=0)
    add_record(engine, "hermes_lease", {"epoch": 7}, task="trial", index=0)
    (run,) = Metadata(engine).sweeps()
    found = Metadata(engine).segments(run, "trial")
    assert [json.loads(text) for text in found] == [{"epoch": 0}, {"epoch": 1}]


def test_a_trial_has_the_note_of_its_task(engine: Engine) -> None:
    own: Any = Metadata(engine)
    add_run(engine)
    add_record(engine, "hermes_sweep", sweep_record())
    add_task(engine, 0, "scheduled")
    add_task(engine, 1, "scheduled")
    add(engine, own._note, ti_id=UUID(ti_id(1)), content="From scratch",
        created_at=NOW, updated_at=NOW)  # fmt: skip
    (run,) = own.sweeps()
    assert [t.note for t in own.trials(run, "trial")] == ["", "From scratch"]


def test_trials_are_the_expanded_task_instances_by_number(engine: Engine) -> None:
    add_run(engine)
    add_record(engine, "hermes_sweep", sweep_record())
    for number, state in ((1, "running"), (0, None)):
        add_task(engine, number, state, pool_slots=3, priority_weight=7)
    add_task(engine, 5, "success", map_index=-1, task_id="plan")
    (run,) = Metadata(engine).sweeps()
    found = Metadata(engine).trials(run, "trial")
    assert [(t.id, t.number, t.state) for t in found] == [
        (ti_id(0), 0, None),
        (ti_id(1), 1, "running"),
    ]
    assert (found[0].pool_slots, found[0].priority_weight) == (3, 7)


def test_the_row_of_a_trial_is_the_same_object_until_its_task_changes(engine: Engine) -> None:
    own: Any = Metadata(engine)
    add_run(engine)
    add_record(engine, "hermes_sweep", sweep_record())
    for number in range(2):
        add_task(engine, number, "scheduled", pool_slots=3, priority_weight=7)
    (run,) = own.sweeps()
    before = own.trials(run, "trial")
    own.rerank([TaskRank(ti_id(1), 8, 3)])
    after = own.trials(run, "trial")
    assert after[0] is before[0]
    assert after[1] == replace(before[1], priority_weight=8)


def test_what_is_read_in_one_go_is_read_by_one_connection(engine: Engine) -> None:
    add_run(engine)
    add_record(engine, "hermes_sweep", sweep_record())
    taken: list[object] = []
    event.listen(engine, "checkout", lambda *_: taken.append(None))
    own = Metadata(engine)
    with own.single_connection():
        (run,) = own.sweeps()
        assert (own.trials(run, "trial"), len(own.records(run))) == ((), 1)
        assert len(taken) == 1
    own.sweeps()
    assert len(taken) == 2


def test_a_thread_beside_such_a_block_reads_by_a_connection_of_its_own(engine: Engine) -> None:
    taken: list[object] = []
    event.listen(engine, "checkout", lambda *_: taken.append(None))
    own = Metadata(engine)
    with own.single_connection(), ThreadPoolExecutor(1) as beside:
        assert beside.submit(own.sweeps).result() == ()
        assert len(taken) == 2


def test_a_database_that_goes_away_in_one_go_is_unavailable_then_read_again(
    engine: Engine,
) -> None:
    own = Metadata(engine)
    with engine.begin() as connection:
        connection.execute(text("ALTER TABLE dag_run RENAME TO elsewhere"))
    with own.single_connection(), pytest.raises(Unavailable):
        own.sweeps()
    with engine.begin() as connection:
        connection.execute(text("ALTER TABLE elsewhere RENAME TO dag_run"))
    assert own.sweeps() == ()


def test_records_are_ours_alone_by_task_and_map_index(engine: Engine) -> None:
    add_run(engine)
    add_record(engine, "hermes_sweep", sweep_record())
    add_record(engine, "hermes_lease", {"epoch": 4}, "trial", 2)
    add_record(engine, "hermesXlease", {"epoch": 5}, "trial", 2)
    add_record(engine, "somebody's", {"x": 1}, "trial", 2)
    (run,) = Metadata(engine).sweeps()
    found = Metadata(engine).records(run)
    assert found["trial", 2] == {"hermes_lease": '{"epoch": 4}'}
    assert set(found["plan", -1]) == {"hermes_sweep"}


def test_tasks_of_others_in_the_pool_count_against_it(engine: Engine) -> None:
    own = [("hermes_sweep", SWEEP, "trial")]
    assert Metadata(engine).pool("gpus", own) is None
    add_pool(engine, 4)
    add_run(engine)
    add_task(engine, 0, "running", pool_slots=2)
    for number, (task, state) in enumerate(
        [("a", "running"), ("b", "queued"), ("c", "scheduled"), ("d", "deferred")], start=1
    ):
        add_task(engine, number, state, task_id=task)
    add_task(engine, 9, "running", task_id="e", pool="default_pool")
    assert Metadata(engine).pool("gpus", own) == PoolRow(4, 2)
    assert Metadata(engine).pool("gpus", []) == PoolRow(4, 4)


def test_deferred_tasks_count_where_the_pool_includes_them(engine: Engine) -> None:
    add_pool(engine, 4, include_deferred=True)
    add_run(engine)
    add_task(engine, 1, "deferred", task_id="d")
    assert Metadata(engine).pool("gpus", []) == PoolRow(4, 1)


def test_a_rank_is_written_to_waiting_rows_and_never_to_occupying_ones(engine: Engine) -> None:
    add_run(engine)
    states = ["scheduled", None, "up_for_reschedule", "queued", "running"]
    for number, state in enumerate(states):
        add_task(engine, number, state)
    metadata: Any = Metadata(engine)
    assert metadata.rerank(TaskRank(ti_id(n), 100 + n, 10_000) for n in range(5)) == 3
    with engine.connect() as connection:
        ti = metadata._ti.c
        rows = connection.execute(
            select(ti.priority_weight, ti.pool_slots).order_by(ti.map_index)
        ).all()
    assert [tuple(r) for r in rows] == [
        (100, 10_000), (101, 10_000), (102, 10_000), (1, 1), (1, 1)
    ]  # fmt: skip


def test_a_deferred_task_may_change_its_weight_or_give_up_its_slots_and_have_no_others(
    engine: Engine,
) -> None:
    add_run(engine)
    for number in range(4):
        add_task(engine, number, "deferred" if number < 3 else "running", pool_slots=2)
    metadata: Any = Metadata(engine)
    wanted = [(7, 2), (7, 10_000), (7, 0), (7, 0)]
    assert metadata.rerank([TaskRank(ti_id(n), *rank) for n, rank in enumerate(wanted)]) == 2
    with engine.connect() as connection:
        ti = metadata._ti.c
        rows = connection.execute(
            select(ti.priority_weight, ti.pool_slots).order_by(ti.map_index)
        ).all()
    assert [tuple(r) for r in rows] == [(7, 2), (1, 2), (7, 0), (1, 2)]


class RecordingEngine:
    """A database of that kind; keeps the statements, with their values."""

    def __init__(self, name: str) -> None:
        self.dialect: Any = postgresql.dialect() if name == "postgresql" else sqlite.dialect()
        self.executed: list[tuple[str, list[Any]]] = []

    @contextmanager
    def begin(self) -> Iterator[RecordingEngine]:
        yield self

    def execute(self, statement: Any, _: object = None) -> Any:
        compiled = statement.compile(dialect=self.dialect)
        self.executed.append((str(compiled), list(compiled.params.values())))
        return SimpleNamespace(rowcount=1)


def slots_of(engine: Engine) -> dict[int, int]:
    own: Any = Metadata(engine)
    with engine.connect() as connection:
        rows = connection.execute(select(own._ti.c.map_index, own._ti.c.pool_slots)).all()
    return {number: slots for number, slots in rows}


@pytest.mark.parametrize(
    ("others", "asked", "granted"),
    [
        ((), 4, True),
        ((), 5, False),  # than the pool has
        ((("running", 1), ("queued", 1)), 2, True),
        ((("running", 1), ("queued", 1)), 3, False),
        ((("deferred", 3),), 2, False),
        ((("scheduled", 2),), 3, False),  # it may be queued at this very moment
        ((("scheduled", 10_000), ("up_for_reschedule", 3), ("success", 3)), 4, True),
        ((("running", 4),), 1, True),  # fewer or as many are always possible
        ((("running", 4),), 0, True),
    ],
)
def test_a_running_task_gets_more_slots_only_if_the_pool_has_them_open(
    engine: Engine, others: tuple[tuple[str, int], ...], asked: int, granted: bool
) -> None:
    add_pool(engine, 4)
    add_run(engine)
    add_task(engine, 0, "running", pool_slots=1)
    for number, (state, slots) in enumerate(others, start=1):
        add_task(engine, number, state, pool_slots=slots)
    add_task(engine, 9, "running", pool_slots=4, pool="another")
    before = slots_of(engine)
    assert Metadata(engine).change_slots(row(0, "running", pool="gpus"), asked) is granted
    assert slots_of(engine) == {**before, 0: asked if granted else 1}


@pytest.mark.parametrize("name", ["postgresql", "sqlite"])
def test_what_waits_counts_against_a_growing_task_only_where_the_scheduler_cannot_be_locked_out(
    name: str,
) -> None:
    engine = RecordingEngine(name)
    database: Any = engine
    assert Metadata(database).change_slots(row(0, "running", pool="gpus"), 2)
    can_lock = name == "postgresql"
    assert ["advisory" in words for words, _ in engine.executed] == [True, False][not can_lock :]
    assert ("scheduled" in engine.executed[-1][1]) is not can_lock


@pytest.mark.parametrize("state", ["queued", "scheduled", "up_for_reschedule", "success"])
def test_the_slots_of_a_task_that_does_not_run_are_left_alone(engine: Engine, state: str) -> None:
    add_pool(engine, 4)
    add_run(engine)
    add_task(engine, 0, state, pool_slots=2)
    assert not Metadata(engine).change_slots(row(0, "running", pool="gpus"), 1)
    assert slots_of(engine) == {0: 2}


def test_no_rank_asks_nothing_of_the_database(tmp_path: Path) -> None:
    assert Metadata(create_engine(f"sqlite:///{tmp_path}/no/such/file")).rerank([]) == 0


def test_a_database_that_is_away_is_unavailable(tmp_path: Path) -> None:
    away = Metadata(create_engine(f"sqlite:///{tmp_path}/no/such/file"))
    rerank = partial(away.rerank, [TaskRank(ti_id(0), 1, 1)])
    for ask in (away.sweeps, away.check, rerank, partial(away.change_slots, row(0), 1)):
        with pytest.raises(Unavailable):
            ask()


def test_the_check_passes_on_airflows_own_tables(engine: Engine) -> None:
    Metadata(engine).check()


def test_a_missing_column_is_refused_by_name(engine: Engine) -> None:
    with engine.begin() as connection:
        connection.execute(text("ALTER TABLE slot_pool DROP COLUMN include_deferred"))
    with pytest.raises(Unsupported, match="table slot_pool lacks include_deferred: run `airflow"):
        Metadata(engine).check()


def test_a_missing_table_is_refused_by_name(engine: Engine) -> None:
    with engine.begin() as connection:
        connection.execute(text("DROP TABLE task_state_store"))
    with pytest.raises(Unsupported, match="task_state_store lacks dag_id"):
        Metadata(engine).check()


def test_a_database_without_airflows_tables_is_named_with_the_setting_that_leads_to_it(
    tmp_path: Path,
) -> None:
    other = f"sqlite:///{tmp_path}/airflow.db"
    with pytest.raises(Unsupported, match=rf"no tables of Airflow in {other}: set AIRFLOW_HOME"):
        Metadata(create_engine(other)).check()


@pytest.mark.parametrize("version", ["3.3.1", "3.4.0", "2.11.0", "4.0.0"])
def test_another_version_of_airflow_is_refused(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    monkeypatch.setattr("airflow.__version__", version)
    with pytest.raises(Unsupported, match=f"{version} is not supported"):
        Metadata(engine).check()


def test_another_version_is_refused_before_its_tables_are_looked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("airflow.__version__", "3.2.1")
    monkeypatch.setitem(sys.modules, "airflow.models.task_state_store", None)
    with pytest.raises(Unsupported, match=r"3\.2\.1 is not supported"):
        Metadata.from_airflow()


def test_a_sweep_belongs_to_the_dags_whose_runs_have_its_id_ended_ones_too(engine: Engine) -> None:
    add_run(engine, state="success")
    add_record(engine, "hermes_sweep", sweep_record())
    add_record(engine, "hermes_lease", {}, "trial", 0)
    own: Any = Metadata(engine)
    add(engine, own._store, dag_run_id=2, dag_id="nightly", run_id="at:2026", task_id="grp.plan",
        map_index=-1, key="hermes_sweep", value="{}", updated_at=NOW)  # fmt: skip
    assert Metadata(engine).dags_of(SWEEP) == ("hermes_sweep",)
    assert Metadata(engine).dags_of("nightly:grp:at:2026") == ("nightly",)
    for unknown in ("at:2026", "nightly:at:2026", f"other:{SWEEP}", "", "x"):
        assert Metadata(engine).dags_of(unknown) == ()


def add_in_pieces(engine: Engine, key: str, record: Any, **place: Any) -> None:
    made = divided(key, record)
    assert made.pieces
    add_record(engine, key, made.head, **place)
    for name, piece in made.pieces.items():
        add_record(engine, name, piece, **place)


def test_records_in_pieces_are_read_as_one(engine: Engine) -> None:
    add_run(engine)
    record, config = sweep_record(), {f"p{n}": "語" * 1_000 for n in range(60)}
    add_in_pieces(engine, "hermes_sweep", {**record, "config": {**record["config"], **config}})
    own = encode(lease(config=config))
    add_in_pieces(engine, "hermes_lease", own, task="trial", index=3)
    metadata = Metadata(engine)
    (run,) = metadata.sweeps()
    assert run.sweep["config"]["p59"] == config["p59"]
    for _ in range(2):
        found = metadata.records(run)["trial", 3]
        assert list(found) == ["hermes_lease"]
        assert decode(Lease, found["hermes_lease"]) == lease(config=config)


def test_pieces_are_read_once_for_each_head(engine: Engine) -> None:
    add_run(engine)
    add_record(engine, "hermes_sweep", sweep_record())
    own = encode(lease(config={f"p{n}": "語" * 1_000 for n in range(60)}))
    add_in_pieces(engine, "hermes_lease", own, task="trial", index=3)
    metadata = Metadata(engine)
    (run,) = metadata.sweeps()
    asked: list[object] = []
    event.listen(engine, "before_cursor_execute", lambda *_: asked.append(None))
    metadata.records(run)
    assert len(asked) == 2
    metadata.records(run)
    assert len(asked) == 3


def test_another_thread_may_read_records_in_pieces_while_those_of_ended_sweeps_are_forgotten(
    engine: Engine,
) -> None:
    metadata = Metadata(engine)

    class Run(int):
        def __hash__(self) -> int:
            metadata._joined.setdefault(len(metadata._joined) + 10, {})
            return super().__hash__()

    metadata._joined = {Run(run): {} for run in (1, 2)}
    add_run(engine)
    add_record(engine, "hermes_sweep", sweep_record())
    assert len(metadata.sweeps()) == 1


def test_a_record_without_its_pieces_is_none_until_they_are_there(engine: Engine) -> None:
    add_run(engine)
    add_record(engine, "hermes_sweep", sweep_record())
    own = encode(lease(config={f"p{n}": "語" * 1_000 for n in range(60)}))
    made = divided("hermes_lease", own)
    add_record(engine, "hermes_lease", made.head, task="trial", index=3)
    metadata = Metadata(engine)
    (run,) = metadata.sweeps()
    assert decode(Lease, metadata.records(run)["trial", 3]["hermes_lease"]) is None
    for name, piece in made.pieces.items():
        add_record(engine, name, piece, task="trial", index=3)
    assert decode(Lease, metadata.records(run)["trial", 3]["hermes_lease"]) is not None


def test_a_sweep_whose_record_is_no_json_hides_no_other(engine: Engine) -> None:
    add_run(engine)
    add_record(engine, "hermes_sweep", sweep_record())
    add_record(engine, "hermes_sweep", [], task="other.plan")
    assert sorted([r.sweep for r in Metadata(engine).sweeps()], key=len) == [{}, sweep_record()]


def test_sweeps_that_have_ended_are_listed_newest_first_a_page_at_a_time(engine: Engine) -> None:
    own: Any = Metadata(engine)
    for key, state in ((1, "success"), (2, "failed"), (3, "running")):
        add_run(engine, key, f"run-{key}", state)
        add(engine, own._store, dag_run_id=key, dag_id="hermes_sweep", run_id=f"run-{key}",
            task_id="plan", map_index=-1, key="hermes_sweep", value=json.dumps(sweep_record()),
            updated_at=NOW)  # fmt: skip
    with engine.begin() as connection:
        connection.execute(own._run.update().where(own._run.c.id == 2).values(end_date=NOW))
    assert own.sweep_dags() == ("hermes_sweep",)
    newest = own.past_sweeps(["hermes_sweep"], 2)
    assert [(p.run.run_id, p.run.state, p.ended_s) for p in newest] == [
        ("run-3", "running", None),
        ("run-2", "failed", NOW.replace(tzinfo=None).timestamp()),
    ]
    assert [p.run.run_id for p in own.past_sweeps(["hermes_sweep"], 2, skip=2)] == ["run-1"]
    assert own.past_sweeps(["another"], 2) == ()
    assert own.past_sweeps([], 2) == ()


def test_what_a_page_asks_of_all_sweeps_reads_no_record_of_their_trials(engine: Engine) -> None:
    own: Any = Metadata(engine)
    runs, records = [], []
    for key in range(1, 201):
        where = {"dag_id": "hermes_sweep", "run_id": f"run-{key}"}
        runs.append({"id": key, **where, "run_type": "manual", "state": "success",
                     "run_after": NOW, "start_date": NOW + timedelta(hours=key),
                     "log_template_id": None})  # fmt: skip
        kept = {"dag_run_id": key, **where, "value": "{}", "updated_at": NOW}
        records.append({**kept, "task_id": "plan", "map_index": -1, "key": "hermes_sweep"})
        records += [{**kept, "task_id": "trial", "map_index": n, "key": "hermes_lease"}
                    for n in range(20)]  # fmt: skip
    with engine.begin() as connection:
        connection.execute(insert(own._run), runs)
        connection.execute(insert(own._store), records)
    asked: list[tuple[str, Any]] = []
    event.listen(engine, "before_cursor_execute", lambda *a: asked.append((a[2], a[3])))
    assert own.sweep_dags() == ("hermes_sweep",)
    assert own.dags_of("run-7") == ("hermes_sweep",)
    assert own.sweep("run-7").run.run_id == "run-7"
    assert [p.run.run_id for p in own.past_sweeps(["hermes_sweep"], 2)] == ["run-200", "run-199"]
    plans = [plan_of(engine, *query) for query in asked]
    assert len(plans) == 4
    for plan in plans:
        assert not [step for step in plan if step.startswith("SCAN task_state_store")], plan
    assert "MATERIALIZE" in " ".join(plans[-1])  # the newest runs, before their records


def plan_of(engine: Engine, query: str, values: Any) -> list[str]:
    """Return the steps by which SQLite answers a query."""
    with engine.connect() as connection:
        driver: Any = connection.connection.driver_connection
        return [row[-1] for row in driver.execute(f"EXPLAIN QUERY PLAN {query}", values)]


def test_a_sweep_is_found_by_its_id_with_its_whole_record(engine: Engine) -> None:
    add_run(engine, state="success")
    record = sweep_record(trial={"command": ["python", "x" * 30_000], "directory": "/"})
    stored = divided("hermes_sweep", record)
    assert stored.pieces
    add_record(engine, "hermes_sweep", stored.head)
    for key, piece in stored.pieces.items():
        add_record(engine, key, piece)
    own = Metadata(engine)
    found = own.sweep(SWEEP)
    assert found is not None
    assert (found.run.sweep_id, found.run.sweep) == (SWEEP, record)
    assert own.sweep(f"other:{SWEEP}") is None
    assert own.sweep("nothing") is None


def test_tasks_are_counted_by_their_states(engine: Engine) -> None:
    add_run(engine)
    for number, state in enumerate(("success", "success", "failed", None)):
        add_task(engine, number, state)
    place = ("hermes_sweep", SWEEP, "trial")
    own = Metadata(engine)
    assert own.task_states([place, ("hermes_sweep", SWEEP, "report")]) == {
        place: {"success": 2, "failed": 1, "": 1}
    }
    assert own.task_states([]) == {}


def test_dated_records_that_no_task_can_be_writing_are_found_the_first_to_go_first(
    engine: Engine,
) -> None:
    own: Any = Metadata(engine)
    add_run(engine)
    states = ("success", "running", "scheduled", "scheduled", "queued", "failed", "failed")
    for number, state in enumerate(states):
        add_task(engine, number, state, pool_slots=10_000 if number == 3 else 1)
    for number in range(7):
        key = "another" if number == 6 else "hermes_segment"
        add(engine, own._store, dag_run_id=1, dag_id="hermes_sweep", run_id=SWEEP, task_id="trial",
            map_index=number, key=key, value="{}", updated_at=NOW,
            expires_at=NOW.replace(day=20 - number))  # fmt: skip
    add_record(engine, "hermes_sweep", {})
    found = own.expiring(("success", "failed"), 10_000, 10)
    assert [key.map_index for key in found] == [5, 3, 0]
    assert found[0] == StoredKey("hermes_sweep", SWEEP, "trial", 5, "hermes_segment")
    assert own.expiring(("success", "failed"), 10_000, 2) == found[:2]
