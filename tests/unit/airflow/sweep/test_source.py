from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hermes_ops.airflow.sweep.dag import sweep_dag
from hermes_ops.airflow.sweep.source import SweepCall, SweepSource
from hermes_ops.airflow.sweep.tasks import PlanOperator
from hermes_ops.errors import ConfigError
from tests.unit.airflow.builders import SWEEP, sweep_file


class XCom:
    """Another task's result."""

    def resolve(self, context: Any) -> Any:
        return context["results"]


def context(**facts: Any) -> dict[str, Any]:
    return {"run_id": SWEEP, "params": {}, "ds": "2026-01-02", **facts}


def render(text: str) -> str:
    return "today"


def test_without_data_the_sweep_is_the_runs_own_configuration() -> None:
    config = SweepSource().config(context(params=sweep_file(name="mine")), render)
    assert config.name == "mine"


@pytest.mark.parametrize("line", ["weight: 3", "owner: !!str ann", "5: five"])
def test_a_file_of_a_dag_is_refused_for_what_would_be_left_out_of_it(
    tmp_path: Path, line: str
) -> None:
    text = json.dumps(sweep_file(weight=2))[1:-1]
    (tmp_path / "sweep.yaml").write_text(f"{{{text},\n{line}}}\n")
    with pytest.raises(ConfigError, match=r"sweep\.yaml:\d"):
        SweepSource.from_sweep("sweep.yaml", tmp_path, None)


def run_with(conf: Any) -> Any:
    return SimpleNamespace(conf=conf)


@pytest.mark.parametrize("conf", [None, {}, {"name": "mine"}, {"note": 1}])
def test_a_run_without_a_sweep_is_refused_though_the_form_has_examples(conf: Any) -> None:
    given = context(params=sweep_file(), dag_run=run_with(conf))
    with pytest.raises(ConfigError, match=r"hermes sweep run FILE") as refused:
        SweepSource().config(given, render)
    assert "search, trial" in str(refused.value)


def test_a_run_with_a_sweep_or_over_a_dags_own_defaults_is_none_without_one() -> None:
    whole, params = sweep_file(name="mine"), sweep_file(name="mine")
    assert SweepSource().config(context(params=params, dag_run=run_with(whole)), render)
    own = SweepSource(defaults=frozenset(whole))
    nightly = context(params=params, dag_run=run_with(None))
    assert own.config(nightly, render).name == "mine"


def test_a_key_of_a_dags_defaults_that_no_sweep_has_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"weigth: found an unknown key.* did you mean weight\?"):
        sweep_dag("mine", defaults={"name": "x", "weigth": 3})


NIGHT: dict[str, Any] = {
    "name": "digits",
    "trial": {"command": ["python", "t.py", "--rate={{ params.rate }}"]},
}


@pytest.mark.parametrize("template", ["{{ dag_run.conf['day'] }}", "{{ dag_run.conf | tojson }}"])
@pytest.mark.parametrize("conf", [None, {}, {"rate": 0.1}, {"rate": 0.1, "day": 3}])
def test_a_configuration_that_templates_read_is_taken(template: str, conf: Any) -> None:
    night = {**NIGHT, "trial": {**NIGHT["trial"], "environment": {"DAY": template}}}
    assert SweepSource(night).unread_keys(context(dag_run=run_with(conf))) == []


@pytest.mark.parametrize("conf", [{"name": "mine"}, {"rate": 0.1, "day": 3}])
def test_a_configuration_that_no_template_reads_is_refused_with_the_fix(conf: Any) -> None:
    with pytest.raises(ConfigError, match=r"hermes sweep run FILE") as refused:
        SweepSource(NIGHT).refuse_unread_keys(context(dag_run=run_with(conf)))
    assert f"found {sorted(conf)[0]}" in str(refused.value)
    declared = SimpleNamespace(params=dict.fromkeys(conf))
    assert SweepSource(NIGHT).unread_keys(context(dag_run=run_with(conf), dag=declared)) == []


def test_a_run_that_names_no_pool_is_in_that_of_its_dag() -> None:
    dag = sweep_dag("mine", pool="a100")
    plan = dag.get_task("plan")
    assert isinstance(plan, PlanOperator)
    conf = {key: value for key, value in sweep_file().items() if key != "pool"}
    params = {**{key: dag.params[key] for key in dag.params}, **conf}
    assert plan.source.config(context(params=params, dag_run=run_with(conf)), render).pool == "a100"


def test_a_run_of_another_pool_than_its_dags_is_refused_as_no_controller_would_start_it() -> None:
    conf = sweep_file(pool="gpus")
    given = context(params=conf, dag_run=run_with(conf))
    with pytest.raises(ConfigError, match="a100, the pool that the DAG gives to the trials"):
        SweepSource(pool="a100").config(given, render)


def test_a_dags_defaults_and_params_are_its_own_sweep() -> None:
    dag = sweep_dag("mine", defaults={"name": "x"}, params={"search": {}})
    plan = dag.get_task("plan")
    assert isinstance(plan, PlanOperator)
    assert plan.source.defaults == {"name", "search"}


def test_results_of_other_tasks_may_stand_anywhere() -> None:
    data = sweep_file(budget={"max_epochs": XCom()})
    assert SweepSource(data).config(context(results=3), render).budget.max_epochs == 3


def test_what_another_task_gives_is_rendered_in_the_command_only_as_text() -> None:
    trial = {"command": ["python", XCom()], "directory": "/"}
    config = SweepSource(sweep_file(trial=trial)).config(context(results="train.py"), render)
    assert config.trial.command == ("python", "train.py")


def test_a_function_gets_its_arguments_and_what_else_it_names_of_the_context() -> None:
    def make(epochs: int, *, ds: str | None = None, other: str = "kept") -> dict[str, Any]:
        return sweep_file(name=f"{ds}-{other}", budget={"max_epochs": epochs})

    config = SweepSource(SweepCall(make, (XCom(),))).config(context(results=4), render)
    assert (config.name, config.budget.max_epochs) == ("2026-01-02-kept", 4)


def test_what_a_function_returns_is_not_rendered() -> None:
    trial = {"command": ["python", "{{ ds }}"], "directory": "/"}
    source = SweepSource(SweepCall(lambda: sweep_file(trial=trial)))
    assert source.config(context(), render).trial.command == ("python", "{{ ds }}")


@pytest.mark.parametrize("returned", [None, 3, [1], {"name": 1}])
def test_a_function_that_returns_no_sweep_is_refused(returned: Any) -> None:
    with pytest.raises(ConfigError):
        SweepSource(SweepCall(lambda: returned)).config(context(), render)


def test_a_file_is_read_as_it_stands_with_paths_from_its_folder(tmp_path: Path) -> None:
    (tmp_path / "sweeps").mkdir()
    trial = {"command": ["python", "{{ ds }}"], "directory": "work"}
    data = sweep_file(trial=trial, pool="a100")
    (tmp_path / "sweeps" / "digits.json").write_text(json.dumps(data))
    source = SweepSource.from_sweep("sweeps/digits.json", tmp_path, None)
    assert source.pool == "a100"
    config = source.config(context(), render)
    assert config.trial.command == ("python", "today")
    assert config.trial.directory == str(tmp_path / "sweeps" / "work")


def test_a_file_without_a_sweep_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "list.yaml").write_text("- 1")
    with pytest.raises(ConfigError, match=r"list\.yaml"):
        SweepSource.from_sweep("list.yaml", tmp_path, None)


def test_the_pool_of_the_dag_is_the_sweeps_unless_it_names_another() -> None:
    assert SweepSource(sweep_file(), pool="a100").config(context(), render).pool == "a100"
    with pytest.raises(ConfigError, match="the pool that the DAG gives"):
        SweepSource(sweep_file(pool="b"), pool="a100").config(context(), render)
