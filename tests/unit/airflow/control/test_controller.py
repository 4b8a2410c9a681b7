from __future__ import annotations

import json
import os
import weakref
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import create_engine
from sqlalchemy.engine import Engine
from sqlalchemy.exc import OperationalError
from threadpoolctl import threadpool_info, threadpool_limits

from hermes_ops.airflow.control.apply import Applier
from hermes_ops.airflow.control.cluster import AirflowCluster
from hermes_ops.airflow.control.controller import Controller, _node_names, main
from hermes_ops.airflow.control.leadership import Leadership
from hermes_ops.airflow.control.policy_settings import PolicySettings
from hermes_ops.airflow.control.pool_file import read_view
from hermes_ops.airflow.control.sweep_state import RunningSweeps, usable_gpus
from hermes_ops.airflow.explanation import problem_lines
from hermes_ops.airflow.metadata_rows import PoolRow, RunRow
from hermes_ops.airflow.records import LEASE_KEY, SEGMENT_KEY, STOP_KEY, CloseRecord, encode
from hermes_ops.core.model import Phase, Plan, Snapshot
from hermes_ops.errors import ConfigError, HermesError
from hermes_ops.trial.disk_space import DiskSpace
from tests.unit.airflow.builders import SWEEP, run_row, running
from tests.unit.airflow.control.controllers import Database, controller_of


def indices(slots: int, foreign: int, *held: int) -> list[int]:
    return [g.index for g in usable_gpus(PoolRow(slots, foreign), held)]


def test_tasks_of_others_take_gpus_that_no_trial_holds() -> None:
    assert indices(4, 0) == [0, 1, 2, 3]
    assert indices(4, 2, 3) == [0, 3]
    assert indices(4, 4, 3) == []
    assert indices(4, 9) == []


def test_an_index_beyond_a_pool_that_shrank_is_not_usable() -> None:
    assert indices(2, 0, 3, 1) == [0, 1]


def test_a_pool_that_shrank_keeps_as_many_gpus_of_pods_as_it_has_slots_whatever_their_numbers() -> (
    None
):
    def kept(slots: int, *held: int) -> list[int]:
        return [g.index for g in usable_gpus(PoolRow(slots, 0), held, of_pods=held)]

    assert kept(3, 0, 2, 3) == [0, 2, 3]  # the trial with number 1 has left its cordoned node
    assert kept(3, 0, 3, 2, 1) == [0, 2, 3]
    assert kept(4, 2, 3) == [0, 1, 2, 3]


@given(
    slots=st.integers(0, 16),
    foreign=st.integers(0, 20),
    held=st.lists(st.integers(0, 20), max_size=16),
)
def test_usable_gpus_never_exceed_the_pool_and_keep_what_is_held(
    slots: int, foreign: int, held: list[int]
) -> None:
    found = indices(slots, foreign, *held)
    mine = {g for g in held if g < slots}
    assert len(found) == len(set(found)) == max(0, slots - foreign)
    assert set(found) <= set(range(slots))
    assert mine <= set(found) or set(found) <= mine


def test_without_a_file_the_environment_chooses_the_policy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert PolicySettings.load(PolicySettings.file()) == PolicySettings("frontrunner", {})
    monkeypatch.setenv("HERMES_POLICY", "fifo")
    monkeypatch.setenv("HERMES_POLICY_OPTIONS", '{"guard_k": 2}')
    assert PolicySettings.load(PolicySettings.file()) == PolicySettings("fifo", {"guard_k": 2})


def test_the_file_goes_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HERMES_POLICY", "fifo")
    monkeypatch.setenv("HERMES_POLICY_OPTIONS", '{"guard_k": 2}')
    PolicySettings("hermes", {"guard_quanta": 4}).write(PolicySettings.file())
    assert PolicySettings.load(PolicySettings.file()) == PolicySettings(
        "hermes", {"guard_quanta": 4}
    )
    assert not list(PolicySettings.file().parent.glob("*.new"))


@pytest.mark.parametrize("text", ["", "{", "[]", '"fifo"', '{"options": [1]}'])
def test_a_bad_policy_file_is_named(text: str) -> None:
    PolicySettings.file().write_text(text)
    with pytest.raises(HermesError, match=r"policy\.json.*correct it"):
        PolicySettings.load(PolicySettings.file())


def test_a_policy_file_that_cannot_be_read_leaves_the_policy_in_force() -> None:
    file = PolicySettings.file()
    PolicySettings("fifo").write(file)
    controller = controller_of(Database(), file)
    before = controller._current_policy()
    file.write_bytes(b'{"policy": "\xff"}')
    assert controller._current_policy() is before
    file.unlink()
    file.mkdir()
    assert controller._current_policy() is before
    with pytest.raises(HermesError, match=r"policy\.json cannot be read"):
        PolicySettings.load(file)


@pytest.mark.parametrize("at_s", ["NaN", "-1", "1" + 400 * "0", "true", '"today"'])
def test_a_policy_file_with_a_time_that_is_none_is_read_without_it(at_s: str) -> None:
    PolicySettings.file().write_text(f'{{"policy": "fifo", "by": "ann", "at_s": {at_s}}}')
    assert PolicySettings.load(PolicySettings.file()).at_s in (0.0, 1.0)


@pytest.mark.parametrize("text", ["{", "[1]", "fifo"])
def test_bad_options_in_the_environment_are_named(
    monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setenv("HERMES_POLICY_OPTIONS", text)
    with pytest.raises(HermesError, match=r"HERMES_POLICY_OPTIONS.*correct it"):
        PolicySettings.load(PolicySettings.file())


def test_an_unknown_policy_or_option_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(ConfigError, match=r"fifo, .*hermes"):
        PolicySettings("fastest").build()
    with pytest.raises(ConfigError, match="colour"):
        PolicySettings("hermes", {"colour": "red"}).build()


@pytest.mark.parametrize(
    ("name", "reason"), [("srtf", "how long each job"), ("flowcon", "fractions of a GPU")]
)
def test_a_policy_that_only_a_simulation_can_run_is_refused_with_the_reason(
    name: str, reason: str
) -> None:
    with pytest.raises(ConfigError, match=rf"simulation only.*{reason}.*hermes simulate"):
        PolicySettings(name).build()


@pytest.mark.parametrize(
    "options",
    [
        {"guard_k": "x"},
        {"guard_k": -1},
        {"guard_quanta": "x"},
        {"guard_quanta": None},
        {"guard_open": 0},
        {"guard_colour": 1},
    ],
)
def test_a_bad_option_of_the_guards_is_refused_by_its_name(options: dict[str, Any]) -> None:
    (name,) = options
    with pytest.raises(ConfigError, match=rf"{name}=.*allowed"):
        PolicySettings("fifo", options).build()


@pytest.mark.parametrize(
    ("options", "opened"),
    [
        ({}, 2),
        ({"threshold": 5}, 5),
        ({"guard_open": 3}, 3),
        ({"threshold": 5, "guard_open": 1}, 1),
    ],
)
def test_the_threshold_of_hermes_bounds_open_trials_unless_an_option_of_its_own_does(
    options: dict[str, int], opened: int
) -> None:
    assert PolicySettings("hermes", options).guards.open_per_gpu == opened


@pytest.fixture
def sqlite(tmp_path: Path) -> Iterator[Engine]:
    engine = create_engine(f"sqlite:///{tmp_path}/x.db")
    yield engine
    engine.dispose()


def test_a_second_controller_of_a_pool_waits_until_the_first_has_gone(sqlite: Engine) -> None:
    first, second = Leadership(sqlite, "gpus"), Leadership(sqlite, "gpus")
    other = Leadership(sqlite, "other")
    assert not first.holds()
    assert first.acquire(lambda: False)
    assert first.holds()
    assert other.acquire(lambda: False)
    assert not second.acquire(lambda: False)
    assert not second.holds()
    waits: list[int] = []

    def the_first_goes() -> bool:
        waits.append(1)
        if len(waits) == 2:
            first.release()
        return True

    assert second.acquire(the_first_goes)
    assert (len(waits), second.holds()) == (2, True)
    for leader in (second, other):
        leader.release()


def test_a_controller_with_another_state_folder_does_not_lead_the_same_pool_too(
    sqlite: Engine, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    first, second = Leadership(sqlite, "gpus"), Leadership(sqlite, "gpus")
    assert first.acquire(lambda: False)
    monkeypatch.setenv("HERMES_HOME", str(tmp_path / "another"))
    assert not second.acquire(lambda: False)
    (line,) = caplog.messages
    assert f"process {os.getpid()}, state folder {home}. This one has {tmp_path}/another" in line
    first.release()
    assert second.acquire(lambda: False)
    second.release()


def test_one_state_folder_has_one_controller_of_a_pool_whatever_its_database(
    sqlite: Engine, tmp_path: Path
) -> None:
    first = Leadership(sqlite, "gpus")
    another = create_engine(f"sqlite:///{tmp_path}/y.db")
    second = Leadership(another, "gpus")
    assert first.acquire(lambda: False)
    assert not second.acquire(lambda: False)
    first.release()
    assert second.acquire(lambda: False)
    second.release()


@pytest.mark.parametrize(("slots", "named"), [(3, ["slot 2"]), (2, []), (1, [])])
def test_a_pool_with_more_slots_than_its_nodes_have_is_named_in_its_view(
    slots: int, named: list[str]
) -> None:
    database = Database()
    database.pool_row = PoolRow(slots, 0)
    controller = controller_of(database, PolicySettings.file())
    controller.cluster.nodes = ("node-a", "node-b")
    controller._round()
    lines = problem_lines(read_view("gpus"))
    assert [text for text in ["slot 2"] if any(text in line for line in lines)] == named
    assert all("HERMES_NODES is node-a=1,node-b=1, 2 slots" in line for line in lines)


@pytest.mark.parametrize(("slots", "is_said"), [(3, False), (2, False), (1, True)])
def test_a_pool_with_fewer_slots_than_its_nodes_have_is_named_in_the_log_at_the_start(
    slots: int, is_said: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("HERMES_NODES", "node-a=1,node-b=1")
    database: Any = Database()
    database.pool_row = PoolRow(slots, 0)
    assert _node_names(database, "gpus") == ("node-a", "node-b")
    assert any("HERMES_NODES names 2 slots" in line for line in caplog.messages) is is_said


class Postgres:
    """A PostgreSQL whose connections break as often as it is told; another holds the lock once."""

    dialect = SimpleNamespace(name="postgresql")

    def __init__(self, *answers: bool | None) -> None:
        self.answers = list(answers)
        self.connections = 0

    def connect(self) -> Postgres:
        self.connections += 1
        return self

    def execute(self, *_: object) -> Any:
        answer = self.answers.pop(0)
        if answer is None:
            raise OperationalError("SELECT", {}, Exception("the server closed the connection"))
        return SimpleNamespace(scalar=lambda: answer)

    def commit(self) -> None:
        pass


def test_a_database_that_goes_away_is_waited_for_with_a_new_connection() -> None:
    engine: Any = Postgres(False, None, True, True, None)
    leader = Leadership(engine, "gpus")
    assert leader.acquire(lambda: True)
    assert engine.connections == 2
    assert leader.holds()
    assert not leader.holds()  # the connection is lost, and the lock with it


def test_a_bad_policy_file_leaves_the_policy_in_force_and_is_said_once(
    home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = PolicySettings.file()
    PolicySettings("fifo").write(file)
    controller = controller_of(Database(), file)
    before = controller._current_policy()
    file.write_text('{"policy": "fastest"}')
    for _ in range(3):
        assert controller._current_policy() is before
    said = [r for r in caplog.records if "stays as it is" in r.message]
    assert len(said) == 1
    PolicySettings("hermes").write(file)
    assert controller._current_policy().name == "hermes"
    assert controller.cluster.applier.policy_name == "hermes"


@pytest.mark.parametrize(
    ("round_s", "rested_s"),
    [(0.1, 0.4), (0.01, 0.05), (0.9, 1.0)],  # once the round is a fifth of the time, or the period
)
@pytest.mark.parametrize("reason", ["", "a changed curve", "slots"])
def test_a_changed_curve_or_slots_that_are_not_open_end_the_wait_when_the_round_was_short(
    round_s: float, rested_s: float, reason: str
) -> None:
    cluster, now_s = controller_of(Database(), PolicySettings.file()).cluster, 100.0

    def wait(pause_s: float) -> bool:
        nonlocal now_s
        now_s += pause_s
        return False

    event: Any = SimpleNamespace(wait=wait, clear=list)
    curves: Any = SimpleNamespace(has_news=lambda: reason == "a changed curve")
    cluster.applier.waits_for_slots = reason == "slots"
    cluster._wake, cluster.curves, cluster.clock = event, curves, lambda: now_s
    cluster._observed_s = now_s - round_s
    cluster.wait(None)
    assert now_s - 100.0 == pytest.approx(rested_s if reason else 1.0, abs=0.051)


def test_the_first_policy_must_be_a_good_one() -> None:
    PolicySettings.file().write_text('{"policy": "fastest"}')
    with pytest.raises(ConfigError):
        controller_of(Database(), PolicySettings.file())._current_policy()


def test_sweeps_of_another_pool_are_not_ours_and_are_read_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from hermes_ops.airflow.control.sweep_state import SweepSpec

    parsed: list[str] = []
    of = SweepSpec.from_run

    def counted(run: RunRow) -> SweepSpec | None:
        parsed.append(run.run_id)
        return of(run)

    monkeypatch.setattr(SweepSpec, "from_run", counted)
    controller = controller_of(Database(run_row(pool="other")), PolicySettings.file())
    for _ in range(3):
        assert controller.cluster.observe().jobs == ()
    assert (controller.cluster.sweeps, parsed) == ({}, [SWEEP])


class Record(dict[str, Any]):
    """A sweep's record whose end can be seen."""


def test_of_a_sweep_of_another_pool_nothing_is_held_after_its_end() -> None:
    record = Record(run_row(pool="other").sweep)
    runs = [RunRow(1, "hermes_sweep", "other", "plan", "running", 1.0, record)]
    held, sweeps = weakref.ref(record), RunningSweeps("gpus")
    metadata: Any = SimpleNamespace(sweeps=lambda: list(runs))
    del record
    sweeps.refresh(metadata)
    assert held() is not None
    runs.clear()
    sweeps.refresh(metadata)
    assert held() is None


def test_a_sweep_that_cannot_be_read_hinders_no_other(caplog: pytest.LogCaptureFixture) -> None:
    broken = RunRow(2, "hermes_sweep", "broken", "plan", "running", 1.0,
                    {**run_row().sweep, "config": {"name": 1}})  # fmt: skip
    strange = RunRow(3, "hermes_sweep", "strange", "plan", "running", 1.0, {"x": 1})
    controller = controller_of(Database(broken, strange, run_row()), PolicySettings.file())
    for _ in range(3):
        controller.cluster.observe()
    assert set(controller.cluster.sweeps) == {SWEEP}
    assert sum("broken cannot be scheduled" in r.message for r in caplog.records) == 1


def test_a_missing_pool_is_named_with_its_remedy() -> None:
    database = Database()
    database.pool_row = None
    with pytest.raises(HermesError, match="no pool 'gpus': create it"):
        controller_of(database, PolicySettings.file()).cluster.observe()


def test_a_pool_without_a_number_of_slots_is_named_with_its_remedy() -> None:
    database = Database(run_row())
    database.pool_row = PoolRow(-1, 0)
    with pytest.raises(HermesError, match=r"'gpus' has no limit .-1 slots.*give it as many"):
        controller_of(database, PolicySettings.file()).cluster.observe()


def test_a_shutdown_stops_the_trials_of_a_pool_that_was_deleted(home: Path) -> None:
    database = Database(run_row())
    database.trials = lambda run, task: (running(0, 0).row,)  # type: ignore[method-assign]
    records = {LEASE_KEY: running(0, 0).lease, SEGMENT_KEY: running(0, 0).segment}
    stored = {key: json.dumps(encode(record)) for key, record in records.items()}
    database.records = lambda run: {("trial", 0): stored}  # type: ignore[method-assign]
    database.pool_row = None
    controller = controller_of(database, home / "policy.json")
    (home / "drain").touch()
    controller._round()
    outside: Any = controller.cluster.applier.client
    assert [call[:3] for call in outside.calls if call[0] == "put"] == [("put", 0, STOP_KEY)]


def test_while_draining_there_is_no_gpu_and_no_job(home: Path) -> None:
    cluster = controller_of(Database(run_row()), PolicySettings.file()).cluster
    assert len(cluster.observe().gpus) == 2
    (home / "drain").touch()
    assert (cluster.observe().gpus, cluster.observe().jobs) == ((), ())


def test_a_round_that_fails_does_not_end_the_controller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hermes_ops.airflow.control.controller.RETRY_S", 0.0)
    database = Database()
    controller = controller_of(database, PolicySettings.file())
    database.away = True
    controller._tick()
    database.away, database.pool_row = False, None
    controller._tick()
    failing = json.loads((PolicySettings.file().parent / "pool-gpus.json").read_text())["trouble"]
    assert (failing["rounds"], "no pool" in failing["reason"]) == (2, True)
    database.pool_row = PoolRow(2, 0)
    monkeypatch.setattr(AirflowCluster, "wait", lambda self, until: controller.end())
    controller._tick()
    assert controller.stop.is_set()
    view = json.loads((PolicySettings.file().parent / "pool-gpus.json").read_text())
    assert (view["gpus"], view.get("trouble")) == ([0, 1], None)
    (decisions,) = (
        sample.value
        for family in controller.monitor.registry.collect()
        for sample in family.samples
        if sample.name == "hermes_decision_seconds_count"
    )
    assert decisions == 1


def test_rounds_that_fail_alike_are_logged_once_a_minute_and_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("hermes_ops.airflow.control.controller.RETRY_S", 0.0)
    database, now = Database(), [0.0]
    database.pool_row = None
    controller = controller_of(database, PolicySettings.file())
    controller.clock = lambda: now[0]
    for now[0] in (0.0, 1.0, 59.0, 61.0):
        controller._tick()
    said = [r for r in caplog.records if "This round" in r.message]
    assert ["no pool 'gpus': create it" in r.message for r in said] == [True, True]
    assert not any(r.exc_info for r in said)
    database.pool_row = PoolRow(2, 0)
    controller._tick()
    assert controller.monitor.trouble is None
    database.pool_row = None
    controller._tick()
    assert "no pool 'gpus'" in caplog.records[-1].message  # at once: it is another time
    database.away = True
    controller._tick()
    assert "is skipped" in caplog.records[-1].message


@pytest.mark.parametrize(("took_s", "written"), [(0.01, 4), (0.2, 1), (0.1, 2)])
def test_a_view_that_takes_long_is_written_seldom(
    monkeypatch: pytest.MonkeyPatch, took_s: float, written: int
) -> None:
    now, views = [100.0], []

    def publish(*_: Any, **__: Any) -> None:
        views.append(now[0])
        now[0] += took_s

    monkeypatch.setattr("hermes_ops.airflow.control.cluster.publish", publish)
    cluster = controller_of(Database(run_row()), PolicySettings.file()).cluster
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    for _ in range(4):
        cluster.apply(Snapshot(now[0], (), ()), Plan(()), ())
        now[0] += 0.8
    assert len(views) == written


def test_the_command_says_in_one_line_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "hermes_ops.airflow.control.controller.Metadata.from_airflow",
            lambda: (_ for _ in ()).throw(HermesError("no database: set it")),
        )
        assert main(["--pool", "gpus"]) == 2
    assert capsys.readouterr().err == "no database: set it\n"


def test_the_controller_decides_in_one_thread_and_leaves_the_cores_to_the_trials(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = "hermes_ops.airflow.control.controller"
    controller = controller_of(Database(run_row()), PolicySettings.file())
    threads: list[int] = []

    def run(_: Controller) -> int:
        threads.extend(one["num_threads"] for one in threadpool_info() if one["user_api"] == "blas")
        return 0

    monkeypatch.setattr(f"{module}.build", lambda _: controller)
    monkeypatch.setattr(AirflowCluster, "close", lambda _: None)
    monkeypatch.setattr(f"{module}.serve", lambda *_: None)
    monkeypatch.setattr(f"{module}.signal.signal", lambda *_: None)
    monkeypatch.setattr(Controller, "run", run)
    with threadpool_limits(limits=2, user_api="blas"):
        assert main([]) == 0
    assert threads
    assert set(threads) == {1}


def test_a_closing_sweep_offers_nothing_but_shows_who_has_yet_to_leave() -> None:
    from tests.unit.airflow.builders import pending, running, sweep_with

    trials = (running(0, 0), pending(1))
    assert len(sweep_with(*trials).jobs(1.0)) == 2
    (leaving,) = sweep_with(*trials, close=CloseRecord("over")).jobs(1.0)
    assert (leaving.phase, leaving.resumes) == (Phase.STOPPING, False)


def test_nothing_is_started_while_a_disk_of_the_sweeps_is_full_and_it_goes_on_by_itself(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = controller_of(Database(), PolicySettings.file()).cluster
    carried_out: list[Any] = []
    monkeypatch.setattr(Applier, "apply", lambda *given: carried_out.append(list(given[4])))
    start: Any = object()
    snapshot, plan = Snapshot(0.0, (), ()), Plan(())
    problems = []
    for free_bytes in (10**9, 0, 0, 10**9):
        disk = DiskSpace(home / "sweeps", free_bytes, 10**11, None)
        cluster.disks = partial(list[DiskSpace], [disk])
        cluster.apply(snapshot, plan, [start])
        problems.append([str(fault.reason) for fault in cluster.faults.faults])
    full = [f"the disk of {home / 'sweeps'} is full: free some space"]
    assert problems == [[], full, full, []]
    assert carried_out == [[start], [], [], [start]]
