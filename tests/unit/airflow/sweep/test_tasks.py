from __future__ import annotations

import json
import logging
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from airflow.sdk.exceptions import AirflowFailException, AirflowSkipException

from hermes_ops.airflow.control.cleanup.sweep_end import replaced_by_newer
from hermes_ops.airflow.folders import TrialFolder
from hermes_ops.airflow.records import (
    CLOSE_KEY,
    CLOSED_TAG,
    SWEEP_KEY,
    CloseRecord,
    SweepRecord,
    decode,
    encode,
)
from hermes_ops.airflow.sweep import tasks
from hermes_ops.airflow.sweep.dag import sweep_asset, sweep_dag
from hermes_ops.airflow.sweep.source import SweepSource
from hermes_ops.airflow.sweep.tasks import PlanOperator, ReportOperator
from hermes_ops.airflow.sweep.warm_start import NightlySweeps
from hermes_ops.config import parse
from hermes_ops.config.sweep_warnings import from_tag
from hermes_ops.errors import Unavailable
from hermes_ops.tracking import SweepRef
from hermes_ops.tracking.comparison import ComparedSweep, view_key
from tests.unit.airflow.builders import SWEEP, DictStore, sweep_file


class Mlflow:
    """MLflow; keeps which sweeps it was asked to open."""

    opened: list[tuple[str, ...]]
    tags: list[dict[str, str]]
    stored: list[str]
    compared: list[ComparedSweep]
    known: SweepRef | None
    state: str
    begun: tuple[int, ...]

    def __init__(self, uri: str) -> None:
        assert uri == "http://mlflow"
        self.views = self

    def save(self, ref: Any, compared: ComparedSweep, created_ms: int) -> None:
        self.compared.append(compared)

    def find_sweep(self, sweep: str, name: str | None = None) -> SweepRef | None:
        return self.known

    def trials(self, ref: Any) -> tuple[int, ...]:
        return self.begun

    def ensure_sweep(self, name: str, sweep: str, config: str, tags: Any) -> Any:
        self.opened.append((name, sweep))
        self.stored.append(config)
        self.tags.append(tags)
        return SweepRef(sweep, "7", "parent")

    def sweep(self, ref: Any) -> Any:
        return SimpleNamespace(tags={CLOSED_TAG: "stopped by its user"}, state=self.state)

    def reopen(self, run_id: str, drop: Any, tags: Any) -> None:
        self.opened.append((run_id, *drop))


@pytest.fixture(autouse=True)
def mlflow(monkeypatch: pytest.MonkeyPatch) -> type[Mlflow]:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://mlflow")
    monkeypatch.setattr(tasks, "Tracker", Mlflow)
    Mlflow.opened, Mlflow.stored, Mlflow.tags, Mlflow.compared = [], [], [], []
    Mlflow.known, Mlflow.state, Mlflow.begun = None, "running", ()
    return Mlflow


class Pushed(dict[str, Any]):
    """A task instance; keeps the XComs that were pushed."""

    def xcom_push(self, key: str, value: Any) -> None:
        self[key] = value


def context(params: dict[str, Any], ti: Any = None) -> dict[str, Any]:
    own = Pushed() if ti is None else ti
    return {"run_id": SWEEP, "params": params, "task_state_store": DictStore(), "ti": own}


def cleared(given: dict[str, Any], times: int = 1) -> dict[str, Any]:
    """Return the context of the plan's next run, after tasks of the DAG run have been cleared."""
    run = SimpleNamespace(clear_number=times, start_date=None, conf=given["params"])
    return {**given, "dag_run": run}


def test_a_planned_sweep_has_its_record_and_its_trials_numbers(mlflow: type[Mlflow]) -> None:
    given = context(sweep_file())
    operator = PlanOperator(task_id="plan", trial_task="trial")
    assert operator.execute(given) == list(range(8))
    record = decode(SweepRecord, given["task_state_store"][SWEEP_KEY])
    assert record is not None
    assert (record.trials, record.trial_task, record.parent_run_id) == (8, "trial", "parent")
    assert mlflow.opened == [("digits", SWEEP)]
    assert given["ti"]["hermes_mlflow_sweep"] == "http://mlflow/#/experiments/7/runs/parent"
    (view,) = mlflow.compared
    assert (view.metric, view.direction, view.trials) == ("val_loss", "minimize", 8)
    compare = given["ti"]["hermes_mlflow_trials"]
    assert compare == (
        "http://mlflow/#/experiments/7/runs"
        f"?workflowType=machine_learning&viewStateShareKey={view_key(SWEEP)}"
    )
    given["params"] = sweep_file(name="other")
    assert operator.execute(given) == list(range(8))  # a second try changes nothing
    assert decode(SweepRecord, given["task_state_store"][SWEEP_KEY]) == record


@pytest.mark.parametrize(("kind", "is_night"), [
    ("scheduled", True), ("manual", True), ("backfill", False),
])  # fmt: skip
def test_the_sweep_of_a_backfill_replaces_no_night_and_none_replaces_it(
    mlflow: type[Mlflow], kind: str, is_night: bool
) -> None:
    ti: Any = Pushed()
    ti.dag_id, ti.run_id = "n", SWEEP
    given = context(sweep_file(nightly={"overlap": "replace", "warm_start": False}), ti)
    began = datetime(2026, 11, 29, 2, tzinfo=UTC)
    run = SimpleNamespace(run_type=kind, clear_number=0, start_date=began, run_after=began,
                          conf=given["params"])  # fmt: skip
    plan = PlanOperator(task_id="plan", trial_task="trial", nights=NightlySweeps("n"))
    plan.execute({**given, "dag_run": run})
    record = decode(SweepRecord, given["task_state_store"][SWEEP_KEY])
    assert record is not None
    assert record.nightly is is_night


def test_a_night_by_hand_with_another_budget_is_refused_before_its_sweep_exists(
    mlflow: type[Mlflow],
) -> None:
    given = context({"budget": {"max_epochs": 3}})
    source = SweepSource(sweep_file(), pool="gpus")
    plan = PlanOperator(
        task_id="plan", trial_task="trial", source=source, nights=NightlySweeps("n")
    )
    with pytest.raises(AirflowFailException, match="found budget; allowed: keys that a template"):
        plan.execute({**given, "dag_run": SimpleNamespace(conf={"budget": {"max_epochs": 3}})})
    assert given["task_state_store"] == {}


def test_a_sweep_that_is_planned_again_keeps_its_run_though_its_experiment_was_renamed(
    mlflow: type[Mlflow],
) -> None:
    given = context(sweep_file())
    operator = PlanOperator(task_id="plan", trial_task="trial")
    operator.execute(given)
    mlflow.known = SweepRef(SWEEP, "7", "the first run")
    operator.execute(cleared(given))
    record = decode(SweepRecord, given["task_state_store"][SWEEP_KEY])
    assert record is not None
    assert record.parent_run_id == "the first run"
    assert mlflow.opened == [("digits", SWEEP), ("the first run", CLOSED_TAG)]


def test_a_sweep_that_is_stopped_while_its_plan_waits_for_mlflow_is_skipped_and_may_be_cleared(
    mlflow: type[Mlflow], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = context(sweep_file())
    operator = PlanOperator(task_id="plan", trial_task="trial")
    with monkeypatch.context() as patch:
        patch.setattr(Mlflow, "find_sweep", away)
        with pytest.raises(Unavailable):
            operator.execute(given)
        given["task_state_store"][CLOSE_KEY] = encode(CloseRecord("stopped by its user"))
        with pytest.raises(AirflowSkipException, match="stopped by its user"):
            operator.execute(given)
    assert operator.execute(cleared(given)) == list(range(8))
    assert decode(CloseRecord, given["task_state_store"][CLOSE_KEY]) is None


@pytest.mark.parametrize("left", ["an ended sweep", "a trial", "a segment"])
def test_a_new_run_with_the_id_of_a_deleted_one_does_not_take_its_results(
    mlflow: type[Mlflow], left: str
) -> None:
    if left == "a segment":
        folder = TrialFolder.from_sweep(SWEEP, 0).path
        folder.mkdir(parents=True)
        (folder / "segments.jsonl").touch()
    else:
        mlflow.known = SweepRef(SWEEP, "7", "the earlier run")
        mlflow.state = "cancelled" if left == "an ended sweep" else "running"
        mlflow.begun = (0,) if left == "a trial" else ()
    given = context(sweep_file())
    with pytest.raises(AirflowFailException, match=r"earlier sweep 'digits-1'.*hermes prune"):
        PlanOperator(task_id="plan", trial_task="trial").execute(given)
    assert SWEEP_KEY not in given["task_state_store"]
    assert mlflow.opened == []


def test_a_plan_that_was_killed_when_it_had_opened_its_run_goes_on(mlflow: type[Mlflow]) -> None:
    mlflow.known = SweepRef(SWEEP, "7", "parent")
    given = context(sweep_file())
    PlanOperator(task_id="plan", trial_task="trial").execute(given)
    assert SWEEP_KEY in given["task_state_store"]


@pytest.mark.parametrize(
    ("dag_id", "run_id", "refused"),
    [
        ("hermes_sweep", "team:digits-1", True),
        ("hermes_sweep", "team_digits-1-8a2b3c4d", True),
        ("team", "team_digits-1-8a2b3c4d", False),
        ("hermes_sweep", "manual__2026-01-01T02:00:00+00:00", False),
        ("team", "team:digits-1", False),
    ],
)
def test_a_run_of_the_main_dag_that_takes_id_or_folder_of_anothers_sweep_is_not_planned(
    mlflow: type[Mlflow], dag_id: str, run_id: str, *, refused: bool
) -> None:
    operator: Any = sweep_dag(dag_id).get_task("plan")
    given = {**context(sweep_file()), "run_id": run_id}
    if refused:
        with pytest.raises(AirflowFailException, match=r"a sweep (of the DAG|with another)"):
            operator.execute(given)
    else:
        operator.execute(given)
    assert (SWEEP_KEY in given["task_state_store"], bool(mlflow.opened)) == (not refused,) * 2


def test_a_plan_that_was_cleared_opens_a_sweep_again_that_had_been_stopped(
    mlflow: type[Mlflow],
) -> None:
    given = context(sweep_file())
    operator = PlanOperator(task_id="plan", trial_task="trial")
    given["task_state_store"][CLOSE_KEY] = encode(CloseRecord("stopped by its user"))
    operator.execute(given)  # stopped before it was planned: it stays so
    assert decode(CloseRecord, given["task_state_store"][CLOSE_KEY]) is not None
    operator.execute(cleared(given))
    assert decode(CloseRecord, given["task_state_store"][CLOSE_KEY]) is None
    assert mlflow.opened[-1] == ("parent", CLOSED_TAG)


class Killed(BaseException):
    """SIGKILL: nothing of the plan's task runs on."""


def kill(*_: Any) -> None:
    raise Killed


def kill_at(stage: str, operator: PlanOperator, given: Any) -> None:
    """Run the plan until it is killed where it calls that function."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tasks, stage, kill)
        with pytest.raises(Killed):
            operator.execute(given)


def away(*_: Any) -> Any:
    raise Unavailable("MLflow did not answer")


def test_a_stop_between_the_plans_kill_and_its_next_try_still_ends_the_sweep(
    mlflow: type[Mlflow],
) -> None:
    given = context(sweep_file())
    operator = PlanOperator(task_id="plan", trial_task="trial")
    kill_at("_push_addresses", operator, given)  # right behind the sweep's record
    given["task_state_store"][CLOSE_KEY] = encode(CloseRecord("stopped by its user"))
    assert operator.execute(given) == list(range(8))
    close = decode(CloseRecord, given["task_state_store"][CLOSE_KEY])
    assert close is not None
    assert close.reason == "stopped by its user"
    assert mlflow.opened[-1] == ("parent",)


def test_a_stop_after_an_extension_ends_the_sweep_though_the_plan_was_cleared_for_it(
    mlflow: type[Mlflow],
) -> None:
    given = context(sweep_file())
    operator = PlanOperator(task_id="plan", trial_task="trial")
    operator.execute(given)
    store = given["task_state_store"]
    store[SWEEP_KEY] = {**store[SWEEP_KEY], "touched": [7]}
    store[CLOSE_KEY] = encode(CloseRecord("stopped by its user"))
    operator.execute(cleared(given))
    assert decode(CloseRecord, store[CLOSE_KEY]) is not None


def test_a_cleared_plan_that_is_killed_at_any_write_removes_the_old_end_on_its_next_try(
    mlflow: type[Mlflow],
) -> None:
    given = context(sweep_file())
    operator = PlanOperator(task_id="plan", trial_task="trial")
    operator.execute(given)
    store = given["task_state_store"]
    for stage in ("_clears", "write_record", "_push_addresses"):
        store[CLOSE_KEY] = encode(CloseRecord("stopped by its user"))
        again = cleared(given, int(store[SWEEP_KEY]["clears"]) + 1)
        kill_at(stage, operator, again)
        operator.execute(again)
        assert decode(CloseRecord, store[CLOSE_KEY]) is None


@pytest.mark.parametrize("source", [None, "a file"])
def test_a_sweep_with_a_secret_is_refused_and_stored_nowhere(
    mlflow: type[Mlflow], source: str | None
) -> None:
    trial = {"command": ["x"], "directory": "/work", "environment": {"HF_TOKEN": "swordfish"}}
    content = sweep_file(trial=trial)
    given = context({} if source else content)
    operator = PlanOperator(
        task_id="plan", trial_task="trial", source=SweepSource(content if source else None)
    )
    with pytest.raises(AirflowFailException, match=r"HF_TOKEN.*\{env:HF_TOKEN\}") as refused:
        operator.execute(given)
    assert mlflow.opened == []
    assert "swordfish" not in f"{refused.value} {given['task_state_store']} {given['ti']}"


def test_a_connections_variable_is_planned_as_its_template_which_trials_render(
    mlflow: type[Mlflow],
) -> None:
    own = {"DB_PASSWORD": "{{ conn.db.password }}", "DAY": "{{ ds }}"}
    trial = {"command": ["x"], "directory": "/work", "environment": own}
    operator = PlanOperator(
        task_id="plan", trial_task="trial", source=SweepSource(sweep_file(trial=trial))
    )
    given = {**context({}), "ds": "2026-01-02"}
    operator.execute(given)
    record = decode(SweepRecord, given["task_state_store"][SWEEP_KEY])
    assert record is not None
    assert record.templated == ("DB_PASSWORD",)
    assert record.config["trial"]["environment"] == {**own, "DAY": "2026-01-02"}
    operator.execute(given)  # planned again, it stays so
    assert decode(SweepRecord, given["task_state_store"][SWEEP_KEY]) == record


def test_the_configuration_of_a_run_names_no_connection(mlflow: type[Mlflow]) -> None:
    trial = {"command": ["x"], "directory": "/work", "environment": {"A": "{{ conn.db.login }}"}}
    given = context(sweep_file(trial=trial))
    PlanOperator(task_id="plan", trial_task="trial").execute(given)
    record = decode(SweepRecord, given["task_state_store"][SWEEP_KEY])
    assert record is not None
    assert record.templated == ()  # so it is passed on as it stands


def test_the_configuration_in_mlflow_holds_no_secret(mlflow: type[Mlflow]) -> None:
    trial = {
        "command": ["python", "train.py", "--token=swordfish"],
        "directory": "/work",
        "environment": {"HF_TOKEN": "swordfish", "LICENCE": "salmon", "DATA": "/data"},
        "secrets": ["LICENCE"],
    }
    config = json.loads(parse(sweep_file(trial=trial), "test", None).to_json())
    before = SweepRecord(config, 8, "trial", "parent", "7", "digits")  # of an earlier version
    given = context({})
    given["task_state_store"][SWEEP_KEY] = encode(before)
    PlanOperator(task_id="plan", trial_task="trial").execute(given)
    assert "swordfish" not in mlflow.stored[0]
    assert "salmon" not in mlflow.stored[0]
    assert "--token=***" in mlflow.stored[0]
    assert "DATA: /data" in mlflow.stored[0]
    record = decode(SweepRecord, given["task_state_store"][SWEEP_KEY])
    assert record is not None
    assert record.config["trial"]["environment"]["HF_TOKEN"] == "swordfish"
    assert "swordfish" not in str(given["ti"])
    assert "salmon" not in str(given["ti"])


def test_what_is_likely_a_mistake_is_a_tag_of_the_sweep_and_in_the_plans_log(
    mlflow: type[Mlflow], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trial = {"command": ["python", "gone.py", "{rate}"], "directory": str(tmp_path)}
    operator = PlanOperator(task_id="plan", trial_task="trial")
    logging.getLogger(operator.log.name).propagate = True
    with caplog.at_level("WARNING"):
        assert operator.execute(context(sweep_file(trial=trial))) == list(range(8))
    (seen,) = from_tag(mlflow.tags[0]["hermes.warnings"])
    assert (seen["where"], seen["leads_to"]) == (
        "trial.command[1]", "every trial fails before it begins"
    )  # fmt: skip
    (tmp_path / "gone.py").write_text("")
    assert operator.execute(context(sweep_file(trial=trial))) == list(range(8))
    assert "hermes.warnings" not in mlflow.tags[1]


def relative() -> dict[str, Any]:
    return sweep_file(trial={"command": ["python", "train.py"], "directory": "work"})


@pytest.mark.parametrize(
    ("params", "fact"),
    [
        (sweep_file(colour="red"), "colour"),
        (sweep_file(budget={"max_epochs": 0}), "max_epochs"),
        (relative(), "trial.directory"),
    ],
)
def test_a_bad_configuration_fails_the_plan_for_good_and_opens_nothing(
    mlflow: type[Mlflow], params: dict[str, Any], fact: str
) -> None:
    given = context(params)
    with pytest.raises(AirflowFailException, match=fact):
        PlanOperator(task_id="plan", trial_task="trial").execute(given)
    assert (mlflow.opened, given["task_state_store"]) == ([], {})


class Instance(Pushed):
    """The report's task instance: what the plan left, how the tasks ended."""

    dag_id, run_id = "hermes_sweep", SWEEP

    def __init__(self, numbers: list[int] | None, **states: str) -> None:
        super().__init__()
        self.numbers, self.states = numbers, states

    def xcom_pull(self, task_ids: str, key: str = "return_value") -> Any:
        return self.numbers if key == "return_value" else sweep_file()

    def get_task_states(self, dag_id: str, task_ids: list[str], run_ids: list[str]) -> Any:
        known = {n: s for n, s in self.states.items() if n.startswith(task_ids[0])}
        return {self.run_id: known}


BEST = {"number": 1, "config": {"rate": 0.1}, "best": 0.5}


def report() -> ReportOperator:
    return ReportOperator(task_id="report", plan_task="plan", trial_task="trial")


@pytest.fixture
def closed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What sweeps were closed with."""
    found: list[Any] = []

    def close(tracker: Any, sweep: str, config: Any, finals: dict[int, str]) -> dict[str, Any]:
        found.append((sweep, config.name, finals))
        return {"sweep": sweep, "best": BEST}

    def best(tracker: Any, experiment: str, document: Any) -> tuple[SweepRef, dict[str, Any]]:
        return SweepRef(document["sweep"], "7", "parent"), {**document["best"], "model_uri": "m"}

    monkeypatch.setattr("hermes_ops.airflow.sweep.sweep_report.close_sweep", close)
    monkeypatch.setattr("hermes_ops.airflow.sweep.sweep_report.best_of", best)
    return found


def test_a_report_closes_the_sweep_with_what_each_trials_task_ended_as(closed: list[Any]) -> None:
    states = {"trial_0": "success", "trial_1": "failed", "trial_2": "skipped",
              "trial_3": "upstream_failed"}  # fmt: skip
    given = context({}, Instance([0, 1, 2, 3], **states))
    assert report().execute(given) == {**BEST, "model_uri": "m"}
    finals = {0: "finished", 1: "failed", 2: "cancelled", 3: "failed"}
    assert closed == [(SWEEP, "digits", finals)]
    page = "http://mlflow/#/experiments/7/runs/parent"
    assert given["ti"]["hermes_report"] == f"{page}/artifacts/report/report.html"
    assert given["ti"]["hermes_mlflow_sweep"] == page
    assert view_key(SWEEP) in given["ti"]["hermes_mlflow_trials"]


def test_the_event_of_a_sweeps_asset_says_what_came_out(closed: list[Any]) -> None:
    asset = sweep_asset("mine", "digits")
    event = SimpleNamespace(extra={})
    given = {**context({}, Instance([0], trial_0="success")), "outlet_events": {asset: event}}
    operator = report()
    operator.outlets = [asset]
    operator.execute(given)
    assert event.extra["config"] == {"rate": 0.1}
    assert event.extra["report"].endswith("report.html")


def test_a_sweep_without_any_result_fails_its_report(monkeypatch: pytest.MonkeyPatch) -> None:
    document = {"best": None, "trials": [{"number": 0, "state": "failed", "best": None}]}
    monkeypatch.setattr("hermes_ops.airflow.sweep.sweep_report.close_sweep", lambda *_: document)
    with pytest.raises(AirflowFailException, match="has reported val_loss"):
        report().execute(context({}, Instance([0], trial_0="failed")))


def test_a_night_that_is_replaced_before_it_has_a_value_is_skipped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cut_off = {"number": 0, "state": "cancelled", "best": None}
    document = {"best": None, "trials": [cut_off], "reason": replaced_by_newer(0.0).reason}
    monkeypatch.setattr("hermes_ops.airflow.sweep.sweep_report.close_sweep", lambda *_: document)
    with pytest.raises(AirflowSkipException, match="replaced by the next night's sweep"):
        report().execute(context({}, Instance([0], trial_0="skipped")))


def test_a_sweep_that_was_not_planned_has_no_report() -> None:
    with pytest.raises(AirflowFailException, match="was not planned"):
        report().execute(context({}, Instance(None, plan="failed")))


def test_a_sweep_that_a_task_before_it_has_kept_from_its_plan_says_so() -> None:
    with pytest.raises(AirflowFailException, match="not planned: a task before it has failed"):
        report().execute(context({}, Instance(None, plan="upstream_failed")))


def test_a_sweep_that_was_skipped_has_its_report_skipped() -> None:
    with pytest.raises(AirflowSkipException):
        report().execute(context({}, Instance(None, plan="skipped")))


def test_a_template_that_is_wrong_fails_the_plan_and_opens_nothing(mlflow: type[Mlflow]) -> None:
    trial = {"command": ["python", "{{ ds | nonsense }}"], "directory": "/"}
    source = SweepSource(sweep_file(trial=trial))
    operator = PlanOperator(task_id="plan", trial_task="trial", source=source)
    with pytest.raises(AirflowFailException, match="a template of the sweep is wrong"):
        operator.execute(context({}))
    assert mlflow.opened == []


def test_a_process_is_refused_where_pods_are_required_however_the_sweep_comes_in(
    mlflow: type[Mlflow], monkeypatch: pytest.MonkeyPatch
) -> None:
    trial = {"command": ["python", "train.py"], "directory": "/work", "run_in": "process"}
    sweep = sweep_file(trial=trial)
    old = context(sweep)
    plan = PlanOperator(task_id="plan", trial_task="trial")
    plan.execute(old)
    monkeypatch.setenv("HERMES_RUN_IN", "pod")
    mlflow.opened.clear()
    own = PlanOperator(task_id="plan", trial_task="trial", source=SweepSource(sweep))
    for operator, given in ((plan, context(sweep)), (own, context({})), (plan, old)):
        with pytest.raises(
            AirflowFailException, match=r"trial\.run_in: found process; allowed: pod"
        ):
            operator.execute(given)
    assert mlflow.opened == []


def test_a_secret_that_is_not_allowed_is_refused_when_the_sweep_is_planned(
    mlflow: type[Mlflow], monkeypatch: pytest.MonkeyPatch, home: Path
) -> None:
    (home / "pod.yaml").write_text("image: a\nclaim: trials\n")
    (home / "rules.yaml").write_text("{}")
    monkeypatch.setenv("HERMES_POD_RULES", str(home / "rules.yaml"))
    monkeypatch.setenv("HERMES_RUN_IN", "pod")
    trial = {"command": ["python", "train.py"], "pod": {"secrets": ["db"]}}
    with pytest.raises(AirflowFailException, match=r"trial\.pod\.secrets: found db"):
        PlanOperator(task_id="plan", trial_task="trial").execute(context(sweep_file(trial=trial)))
    trial["pod"] = {"requests": {"cpu": "1"}}
    given = context(sweep_file(trial=trial))
    PlanOperator(task_id="plan", trial_task="trial").execute(given)
    record = decode(SweepRecord, given["task_state_store"][SWEEP_KEY])
    assert record is not None
    assert record.config["trial"]["run_in"] == "pod"


def test_a_duration_counts_from_the_first_plan_or_a_later_start_of_the_run(
    mlflow: type[Mlflow], monkeypatch: pytest.MonkeyPatch
) -> None:
    operator = PlanOperator(task_id="plan", trial_task="trial")
    given = context(sweep_file(deadline="8h"))
    ends_s = []
    for now_s, started_s in ((1_000.0, 990.0), (5_000.0, 990.0), (9_000.0, 8_999.0)):
        monkeypatch.setattr("time.time", lambda now_s=now_s: now_s)
        start = datetime.fromtimestamp(started_s, UTC)
        operator.execute(
            {**given, "dag_run": SimpleNamespace(start_date=start, conf=given["params"])}
        )
        ends_s.append(float(mlflow.tags[-1]["hermes.deadline"]) - 8 * 3_600)
    assert ends_s == [1_000.0, 1_000.0, 8_999.0]
