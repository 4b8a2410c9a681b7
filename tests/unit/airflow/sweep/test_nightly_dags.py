"""A folder of sweep files as scheduled DAGs."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from airflow.sdk import get_parsing_context
from airflow.sdk.definitions.timetables._cron import CRON_PRESETS
from airflow.sdk.exceptions import AirflowSkipException
from airflow.serialization.serialized_objects import DagSerialization
from airflow.timetables.base import TimeRestriction

from hermes_ops.airflow.sweep import warm_start
from hermes_ops.airflow.sweep.nightly_dags import nightly_dags, refuse_broken
from hermes_ops.airflow.sweep.warm_start import NightlySweeps, with_point
from hermes_ops.config import SweepConfig, parse
from hermes_ops.errors import ConfigError
from tests.unit.airflow.builders import sweep_file

ROOT = Path(__file__).parents[4]


def write(folder: Path, name: str, **changes: Any) -> Path:
    data = sweep_file(**{"schedule": "0 2 * * *", **changes})
    path = folder / name
    path.write_text(json.dumps(data))
    return path


def test_each_file_with_a_schedule_is_a_dag_and_the_others_are_none(tmp_path: Path) -> None:
    write(tmp_path, "a.yaml")
    write(tmp_path, "b.json", pool="a100")
    write(tmp_path, "unscheduled.yaml", schedule=None)
    (tmp_path / "train.py").write_text("print()")
    found = nightly_dags(tmp_path)
    assert sorted(found) == ["nightly_a", "nightly_b"]
    assert found["nightly_b"].get_task("trial").pool == "a100"
    assert not found["nightly_a"].catchup
    assert nightly_dags(tmp_path / "missing") == {}


@pytest.mark.parametrize("preset", CRON_PRESETS)
def test_a_sweep_file_may_have_any_schedule_that_airflow_has_a_name_for(
    tmp_path: Path, preset: str
) -> None:
    write(tmp_path, "a.yaml", schedule=preset)
    timetable = cast("Any", nightly_dags(tmp_path)["nightly_a"].timetable)
    assert timetable.expression == CRON_PRESETS[preset]


def test_a_file_whose_name_is_too_long_for_a_dag_takes_no_other_along(tmp_path: Path) -> None:
    write(tmp_path, "a.yaml")
    write(tmp_path, f"{'n' * 243}.yaml")
    assert list(nightly_dags(tmp_path)) == ["nightly_a"]
    with pytest.raises(ConfigError, match="a name of 243 characters; allowed: at most 242"):
        refuse_broken(tmp_path)


def test_a_broken_file_takes_no_other_down_and_is_an_error_with_its_name(tmp_path: Path) -> None:
    write(tmp_path, "good.yaml")
    write(tmp_path, "bad.yaml", colour="red")
    write(tmp_path, "other.json", colour="red")
    (tmp_path / "torn.yaml").write_text("name: [")
    assert sorted(nightly_dags(tmp_path)) == ["nightly_good"]
    with pytest.raises(ConfigError) as caught:
        refuse_broken(tmp_path)
    assert "bad.yaml:1 colour" in str(caught.value)
    assert "other.json: colour" in str(caught.value)
    assert "torn.yaml" in str(caught.value)
    assert "good.yaml" not in str(caught.value)


def test_two_files_of_one_name_are_one_dag_and_an_error(tmp_path: Path) -> None:
    write(tmp_path, "a.yaml")
    write(tmp_path, "a.json")
    assert sorted(nightly_dags(tmp_path)) == ["nightly_a"]
    with pytest.raises(ConfigError, match=r"second file for the DAG nightly_a"):
        refuse_broken(tmp_path)


def test_a_file_whose_name_is_no_dag_id_is_an_error(tmp_path: Path) -> None:
    write(tmp_path, "a b.yaml")
    assert nightly_dags(tmp_path) == {}
    with pytest.raises(ConfigError, match="rename the file"):
        refuse_broken(tmp_path)


def test_a_task_reads_its_own_file_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "a.yaml")
    write(tmp_path, "b.yaml")
    started = get_parsing_context()._replace(dag_id="nightly_b", task_id="trial")
    module = "hermes_ops.airflow.sweep.nightly_dags"
    monkeypatch.setattr(f"{module}.get_parsing_context", lambda: started)
    assert sorted(nightly_dags(tmp_path)) == ["nightly_b"]


def test_nights_are_counted_in_their_own_time_zone_and_none_is_caught_up(tmp_path: Path) -> None:
    write(tmp_path, "a.yaml", nightly={"timezone": "Asia/Tokyo"})
    dag = DagSerialization.from_dict(DagSerialization.to_dict(nightly_dags(tmp_path)["nightly_a"]))
    restriction = TimeRestriction(earliest=None, latest=None, catchup=False)
    first = dag.timetable.next_dagrun_info(
        last_automated_data_interval=None, restriction=restriction
    )
    assert first is not None
    assert first.run_after.astimezone(UTC).hour == 17  # two at night in Tokyo
    assert first.run_after > datetime.now(UTC)


def test_a_night_that_was_just_missed_is_not_caught_up_either(tmp_path: Path) -> None:
    missed = datetime.now(UTC) - timedelta(minutes=2)
    write(tmp_path, "a.yaml", schedule=f"{missed.minute} {missed.hour} * * *")
    dag = DagSerialization.from_dict(DagSerialization.to_dict(nightly_dags(tmp_path)["nightly_a"]))
    restriction = TimeRestriction(earliest=None, latest=None, catchup=False)
    first = dag.timetable.next_dagrun_info(
        last_automated_data_interval=None, restriction=restriction
    )
    assert first is not None
    assert first.run_after > datetime.now(UTC)


@pytest.mark.parametrize(
    ("overlap", "runs"), [("queue", 1), ("skip", 100_000), ("replace", 100_000)]
)
def test_only_queued_nights_are_held_back_by_airflow(
    tmp_path: Path, overlap: str, runs: int
) -> None:
    write(tmp_path, "a.yaml", nightly={"overlap": overlap})
    assert nightly_dags(tmp_path)["nightly_a"].max_active_runs == runs


def test_the_file_that_comes_along_is_a_dag_and_no_error() -> None:
    folder = ROOT / "dags" / "sweeps"
    assert sorted(nightly_dags(folder)) == ["nightly_example"]
    refuse_broken(folder)


# -- what a night takes from the last one ---------------------------------------------------------


def config(**changes: Any) -> SweepConfig:
    return parse(sweep_file(**changes), "test", None)


MINE = "scheduled__2026-04-02"


def instance(mine: str = MINE, **others: tuple[str, str | None, str | None]) -> Any:
    """A night's task; `others` are the runs of its DAG: their state, their plan's, their report's.

    Neither they nor the night need have a logical date.
    """
    runs = {mine: ("running", "running", None), **others}

    def task_states(*, dag_id: str, task_ids: list[str]) -> Any:
        assert (dag_id, task_ids) == ("n", ["plan", "report"])
        return {run: {"plan": plan, "report": report} for run, (_, plan, report) in runs.items()}

    return SimpleNamespace(
        dag_id="n", run_id=mine, get_task_states=task_states,
        get_dagrun_state=lambda dag_id, run: runs[run][0],
    )  # fmt: skip


def silent(words: str) -> None: ...


@pytest.fixture(autouse=True)
def best(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The last night's best."""
    found = {"rate": 0.05}
    monkeypatch.setattr(warm_start, "last_best_config", lambda *asked: found)
    return found


@pytest.mark.parametrize(
    ("other", "state"),
    [
        ("manual__2026-04-01", ("running", "success", None)),
        ("zzz", ("running", "success", "up_for_retry")),
        ("manual__2026-04-02", ("running", "queued", None)),
    ],
)
def test_a_night_is_skipped_while_another_sweep_of_its_dag_runs_if_that_is_its_rule(
    other: str, state: Any
) -> None:
    tracker: Any = None
    busy = instance(**{other: state})
    with pytest.raises(AirflowSkipException, match=f"the run {other} of this DAG still runs"):
        NightlySweeps("n").begin(config(), tracker, busy, silent)
    queued = config(nightly={"overlap": "queue"})
    assert NightlySweeps("n").begin(queued, tracker, busy, silent).name == "digits"


@pytest.mark.parametrize(
    ("other", "state"),
    [
        ("manual__2026-04-01", ("success", "success", "success")),
        ("manual__2026-04-01", ("running", "skipped", None)),  # skipped a moment ago
        ("manual__2026-04-01", ("failed", "success", None)),  # somebody has ended its run
        ("manual__2026-04-01", ("queued", None, None)),
        ("scheduled__2026-04-03", ("running", "running", None)),  # of two at once one goes on
    ],
)
def test_a_night_runs_where_no_other_sweep_of_its_dag_does(other: str, state: Any) -> None:
    tracker: Any = None
    idle = instance(**{other: state})
    assert NightlySweeps("n").begin(config(), tracker, idle, silent).name == "digits"


def run(kind: str, late_s: float, cleared: int = 0) -> Any:
    due = datetime(2026, 11, 29, 1, 30, tzinfo=UTC)
    kinds = {"run_type": SimpleNamespace(value=kind), "clear_number": cleared}
    return SimpleNamespace(run_after=due, start_date=due + timedelta(seconds=late_s), **kinds)


@pytest.mark.parametrize(("night", "nights", "overlap", "is_skipped"), [
    (run("scheduled", 4_000), NightlySweeps("n"), "skip", True),
    (run("scheduled", 4_000), NightlySweeps("n"), "replace", True),
    (run("scheduled", 3_000), NightlySweeps("n"), "skip", False),
    (run("scheduled", 4_000), NightlySweeps("n"), "queue", False),
    (run("scheduled", 4_000), NightlySweeps("n", catches_up=True), "skip", False),
    (run("scheduled", 4_000, cleared=1), NightlySweeps("n"), "skip", False),
    (run("manual", 4_000), NightlySweeps("n"), "skip", False),
    (run("backfill", 4_000), NightlySweeps("n"), "skip", False),
])  # fmt: skip
def test_a_missed_night_is_not_caught_up_when_its_dag_is_unpaused(
    night: Any, nights: NightlySweeps, overlap: str, is_skipped: bool
) -> None:
    tracker: Any = None
    given = config(nightly={"overlap": overlap})
    if not is_skipped:
        assert nights.begin(given, tracker, instance(), silent, night).name == "digits"
        return
    with pytest.raises(AirflowSkipException, match="the night of 2026-11-29 01:30 UTC was missed"):
        nights.begin(given, tracker, instance(), silent, night)


def test_the_runs_of_a_backfill_do_not_wait_for_one_another() -> None:
    tracker: Any = None
    other: Any = {"backfill__2026-04-01": ("running", "success", None)}
    busy = instance(**other)
    begun = NightlySweeps("n").begin(config(), tracker, busy, silent, run("backfill", 9_000))
    assert begun.name == "digits"


def test_the_last_nights_best_is_tried_first_unless_the_file_says_no(best: Any) -> None:
    tracker: Any = None
    warm = NightlySweeps("n").begin(config(), tracker, instance(), silent)
    assert [dict(p) for p in warm.search.points_to_evaluate] == [best]
    cold = config(nightly={"warm_start": False})
    assert NightlySweeps("n").begin(cold, tracker, instance(), silent) == cold


@pytest.mark.parametrize("algorithm", ["random", "tpe"])
def test_each_night_draws_other_configurations_unless_the_file_has_a_seed(algorithm: str) -> None:
    def drawn(run_id: str, dag_id: str = "n", **seed: int) -> list[Any]:
        night = SimpleNamespace(dag_id=dag_id, run_id=run_id, get_task_states=lambda **_: {})
        search = {k: v for k, v in sweep_file()["search"].items() if k != "seed"}
        given = config(search={**search, "algorithm": algorithm, **seed})
        tonight = NightlySweeps("n").begin(given, cast(Any, None), night, silent)
        return [tonight.search.to_sampler().ask(number, ()) for number in (1, 2)]

    assert drawn("scheduled__2026-11-29") != drawn("scheduled__2026-11-30")
    assert drawn("scheduled__2026-11-29") != drawn("scheduled__2026-11-29", "another")
    assert drawn("scheduled__2026-11-29") == drawn("scheduled__2026-11-29")
    assert drawn("scheduled__2026-11-29", seed=7) == drawn("scheduled__2026-11-30", seed=7)


def test_a_point_that_the_space_no_longer_has_is_left_out_and_said() -> None:
    said: list[str] = []
    given = config()
    assert with_point(given, {"rate": 7.0}, said.append) == given
    assert with_point(given, {"other": 1}, said.append) == given
    assert len(said) == 2


def test_a_known_point_is_not_tried_twice_and_no_trial_is_added(best: Any) -> None:
    search = {**sweep_file()["search"], "max_trials": 2,
              "points_to_evaluate": [{"rate": 0.01}, {"rate": 0.02}]}  # fmt: skip
    given = config(search=search)
    assert with_point(given, {"rate": 0.01}, silent) == given
    warm = with_point(given, best, silent)
    assert [dict(p) for p in warm.search.points_to_evaluate] == [best, {"rate": 0.01}]


def test_a_grid_needs_no_point() -> None:
    space = {"rate": {"type": "choice", "values": [0.05, 0.1]}}
    given = config(search={"algorithm": "grid", "max_trials": 2, "space": space})
    assert with_point(given, {"rate": 0.05}, silent) == given
