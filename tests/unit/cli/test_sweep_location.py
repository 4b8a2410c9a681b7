"""Sweeps of the command line, of nights and in groups of a DAG, found by their ids."""

from __future__ import annotations

import json
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from hermes_ops.airflow.client import TaskKey
from hermes_ops.airflow.identity import MAIN_DAG, sweep_id
from hermes_ops.cli import assemble
from hermes_ops.cli.inspection_commands import with_address
from hermes_ops.cli.sweep_location import (
    ENDED_AIRFLOW_STATES,
    ListedSweep,
    SweepLocation,
    airflow_state,
    full_id,
    locate,
    locate_or_explain,
    newest,
)
from hermes_ops.errors import HermesError, NotPermitted, Unavailable
from hermes_ops.tracking import SweepRef, SweepRun, Tracker
from tests.unit.cli.airflow_runs import Airflow

NIGHT = "scheduled__2026-04-01T02:00:00+00:00"


def an_airflow() -> Any:
    return Airflow(
        ("mine", "manual:2", "running", {"first.plan": "success", "first.report": "success",
                                         "second.plan": "running", "second.report": None}),
        ("nightly_digits", NIGHT, "success", {"plan": "success", "report": "success"}),
        (MAIN_DAG, "digits-1", "failed", {"plan": "success", "report": "failed"}),
        ("etl", "manual:2", "success", {"load": "success"}),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("sweep", "place"),
    [
        ("digits-1", SweepLocation("digits-1", MAIN_DAG, "digits-1")),
        (
            f"nightly_digits:{NIGHT}",
            SweepLocation(f"nightly_digits:{NIGHT}", "nightly_digits", NIGHT),
        ),
        (
            "mine:second:manual:2",
            SweepLocation("mine:second:manual:2", "mine", "manual:2", "second"),
        ),
    ],
)
def test_a_sweep_is_found_wherever_it_is(sweep: str, place: SweepLocation) -> None:
    assert locate(an_airflow(), sweep) == place


words = st.text("ab.-_", min_size=1, max_size=4)


@given(dag=words, group=st.text("ab", max_size=2), run=st.text("ab:.", min_size=1, max_size=6))
def test_every_sweep_is_found_by_the_id_that_it_has(dag: str, group: str, run: str) -> None:
    prefix = f"{group}." if group else ""
    known: Any = Airflow((dag, run, "success", {f"{prefix}plan": "success"}))
    sweep = sweep_id(dag, run, f"{prefix}plan")
    assert locate(known, sweep) == SweepLocation(sweep, dag, run, group)


@pytest.mark.parametrize("sweep", ["digits-2", "mine:third:manual:2", f"nightly_other:{NIGHT}"])
def test_what_is_not_there_is_said_with_the_command_that_lists(sweep: str) -> None:
    with pytest.raises(HermesError, match=r"there is no sweep .*`hermes sweep list` shows them"):
        locate(an_airflow(), sweep)


def test_who_sees_only_the_dag_of_the_team_finds_its_sweeps() -> None:
    airflow = an_airflow()
    airflow.hidden = {MAIN_DAG, "mine"}
    place = SweepLocation(f"nightly_digits:{NIGHT}", "nightly_digits", NIGHT)
    assert locate(airflow, place.sweep) == place
    assert locate(airflow, "nightly_dig") == place


@pytest.mark.parametrize("sweep", ["digits-1", "mine:first:manual:2"])
def test_the_sweep_of_a_dag_that_airflow_hides_is_refused_not_unknown(sweep: str) -> None:
    airflow = an_airflow()
    airflow.hidden = {MAIN_DAG, "mine"}
    for find in (locate, full_id):
        with pytest.raises(NotPermitted, match="403"):
            find(airflow, sweep)
    reached: Any = SimpleNamespace(airflow=airflow, tracker=None)  # MLflow is not asked
    with pytest.raises(NotPermitted, match="403"):
        locate_or_explain(reached, sweep)


def test_a_run_with_sweeps_in_groups_is_told_their_names() -> None:
    inside = "holds the sweeps mine:first:manual:2, mine:second:manual:2: name one"
    with pytest.raises(HermesError, match=inside):
        locate(an_airflow(), "mine:manual:2")


def test_a_run_without_any_sweep_is_none() -> None:
    with pytest.raises(HermesError, match="there is no sweep 'etl:manual:2'"):
        locate(an_airflow(), "etl:manual:2")


def test_a_sweep_in_a_group_has_ended_when_its_report_has_whatever_its_run_does() -> None:
    airflow = an_airflow()
    assert airflow_state(airflow, locate(airflow, "mine:first:manual:2")) == "success"
    assert airflow_state(airflow, locate(airflow, "mine:second:manual:2")) == "running"
    assert airflow_state(airflow, locate(airflow, "digits-1")) == "failed"


@pytest.mark.parametrize("state", ["failed", "upstream_failed", "skipped", "removed", "success"])
def test_every_last_state_of_a_report_ends_its_sweep(state: str) -> None:
    airflow: Any = Airflow(("mine", "1", "running", {"g.plan": "success", "g.report": state}))
    assert airflow_state(airflow, locate(airflow, "mine:g:1")) in ENDED_AIRFLOW_STATES


@pytest.mark.parametrize(
    "place", [SweepLocation.in_main_dag("gone"), SweepLocation("mine:g:1", "mine", "1", "g")]
)
def test_a_sweep_that_was_deleted_has_no_state(place: SweepLocation) -> None:
    assert airflow_state(an_airflow(), place) is None


def test_the_list_has_the_sweeps_of_all_dags_in_the_order_of_their_runs() -> None:
    rows = [(r.sweep, r.dag_id, r.state, r.start_date, r.end_date) for r in newest(an_airflow())]
    assert rows == [
        ("mine:first:manual:2", "mine", "success", "task began", "task ended"),
        ("mine:second:manual:2", "mine", "running", "task began", None),
        (f"nightly_digits:{NIGHT}", "nightly_digits", "success", "began", "ended"),
        ("digits-1", MAIN_DAG, "failed", "began", "ended"),
    ]


def test_a_night_that_was_skipped_is_not_listed_as_finished(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tasks = {"plan": "skipped", "report": "skipped"}
    airflow: Any = Airflow(("nightly_digits", NIGHT, "success", tasks))
    (row,) = json.loads(said(airflow, monkeypatch, "list", "--json").stdout)
    assert (row["state"], row["end_date"]) == ("skipped", "ended")


class Away:
    """An MLflow that does not answer."""

    def newest_sweeps(self) -> Any:
        raise Unavailable("MLflow does not answer")

    def find_sweep(self, *_: Any) -> Any:
        raise Unavailable("MLflow does not answer")


def said(airflow: Any, monkeypatch: pytest.MonkeyPatch, *words: str) -> Any:
    reached = SimpleNamespace(airflow=airflow, tracker=Away(), pool="gpus")
    monkeypatch.setattr("hermes_ops.cli.connection.Connection.from_home", lambda home: reached)
    return CliRunner().invoke(assemble(), ["sweep", *words])


def test_the_list_as_json_names_dag_and_run(monkeypatch: pytest.MonkeyPatch) -> None:
    first, *_ = json.loads(said(an_airflow(), monkeypatch, "list", "--json").stdout)
    assert first == {
        "sweep": "mine:first:manual:2", "dag_id": "mine", "dag_run_id": "manual:2",
        "state": "finished", "start_date": "task began", "end_date": "task ended",
        "reason": None, "compare": None,
    }  # fmt: skip


def test_the_list_shows_whole_ids_that_can_be_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    shown = said(an_airflow(), monkeypatch, "list").stdout
    assert f"nightly_digits:{NIGHT}" in shown
    assert "mine:second:manual:2" in shown


def test_a_sweep_in_a_group_is_stopped_by_its_own_plan_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    airflow = an_airflow()
    assert "ends" in said(airflow, monkeypatch, "stop", "mine:second:manual:2").output
    ((task, key, _),) = airflow.put
    assert (task, key) == (TaskKey("mine", "manual:2", "second.plan"), "hermes_close")
    ends = said(airflow, monkeypatch, "stop", "mine:second:manual:2").output
    assert ends.startswith("Sweep mine:second:manual:2 ends already: stopped by ")
    again = said(airflow, monkeypatch, "stop", "mine:first:manual:2").output
    assert "has already ended (finished)" in again
    assert len(airflow.put) == 1


@pytest.mark.parametrize("command", [("extend", "--trials", "2"), ("resume",)])
def test_a_run_that_goes_on_cannot_be_continued(
    monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    name, *options = command
    result = said(an_airflow(), monkeypatch, name, "mine:first:manual:2", *options)
    assert isinstance(result.exception, HermesError)
    assert "run 'manual:2' of the DAG 'mine'" in str(result.exception)
    assert "wait for it" in str(result.exception)


def test_a_trial_of_a_sweep_without_a_plan_is_not_cleared(monkeypatch: pytest.MonkeyPatch) -> None:
    airflow = an_airflow()
    result = said(airflow, monkeypatch, "clear", f"nightly_digits:{NIGHT}/0")
    assert isinstance(result.exception, HermesError)
    assert "it was not planned" in str(result.exception)
    assert airflow.cleared == []


def test_the_list_says_where_trials_are_compared_once_mlflow_knows_the_sweep() -> None:
    row = ListedSweep("digits-1", "hermes_sweep", "digits-1", "running", None, None)
    ref = SweepRef("digits-1", "7", "parent")
    run = SweepRun(ref, "digits-1", "running", "RUNNING", {}, 0, None)
    with closing(Tracker("http://mlflow:5000")) as tracker:
        address = with_address(row, {"digits-1": run}, tracker).document()["compare"]
        assert address == tracker.comparison_url(ref)
        assert with_address(row, {}, tracker) == row


class Mlflow:
    """MLflow with one sweep, or away."""

    def __init__(self, sweep: str = "", *, away: bool = False) -> None:
        self.sweep, self.away = sweep, away

    def find_sweep(self, sweep: str) -> SweepRef | None:
        if self.away:
            raise Unavailable("MLflow does not answer")
        return SweepRef(sweep, "7", "parent") if sweep == self.sweep else None

    def run_url(self, experiment: str, run: str) -> str:
        return f"http://mlflow/{experiment}/{run}"


class AwayAirflow(Airflow):
    """Airflow that is being started again."""

    def _refuse(self, dag: str) -> None:
        raise Unavailable("Airflow did not answer")


def connection(mlflow: Mlflow, *runs: Any) -> Any:
    return SimpleNamespace(airflow=Airflow(*runs), tracker=mlflow)


def test_a_sweep_that_airflow_has_deleted_is_told_with_the_place_of_its_results() -> None:
    with pytest.raises(HermesError, match=r"lost the sweep 'gone'.*http://mlflow/7/parent"):
        locate_or_explain(connection(Mlflow("gone")), "gone")


@pytest.mark.parametrize("sweep", ["digits-1", "mine:second:manual:2"])
def test_a_sweep_is_not_lost_while_airflow_does_not_answer(sweep: str) -> None:
    reached: Any = SimpleNamespace(airflow=AwayAirflow(), tracker=Mlflow(sweep))
    with pytest.raises(Unavailable, match="did not answer"):
        locate_or_explain(reached, sweep)


@pytest.mark.parametrize("mlflow", [Mlflow(), Mlflow(away=True)])
def test_a_sweep_that_nobody_knows_is_told_as_such(mlflow: Mlflow) -> None:
    with pytest.raises(HermesError, match="there is no sweep 'gone'"):
        locate_or_explain(connection(mlflow), "gone")


def test_a_sweep_that_airflow_has_is_located_without_mlflow() -> None:
    run = (MAIN_DAG, "digits-1", "success", {"plan": "success"})
    assert locate_or_explain(
        connection(Mlflow(away=True), run), "digits-1"
    ) == SweepLocation.in_main_dag("digits-1")
