from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from hermes_ops.airflow.identity import (
    may_be_of_another_dag,
    may_have_folder_of_another,
    sweep_id,
    sweep_of,
)
from hermes_ops.trial.checkpoint_store.store import safe_name

RUN = "scheduled__2026-01-01T02:00:00+00:00"


def test_a_sweep_of_the_main_dag_is_called_after_its_run() -> None:
    assert sweep_id("hermes_sweep", RUN, "trial") == RUN


def test_sweeps_of_one_run_id_in_several_dags_and_groups_have_ids_of_their_own() -> None:
    places = [("a", "plan"), ("b", "plan"), ("a", "x.plan"), ("a", "x.y.plan"),
              ("hermes_sweep", "x.plan")]  # fmt: skip
    assert len({sweep_id(dag, RUN, task) for dag, task in places}) == len(places)
    assert sweep_id("a", RUN, "x.y.plan") == f"a:x.y:{RUN}"


@pytest.mark.parametrize("run", [RUN, "manual__2026-01-01T02:00:00+00:00_a1", "digits-1", "a"])
def test_ids_of_runs_that_airflow_or_the_command_line_make_are_no_sweeps_of_other_dags(
    run: str,
) -> None:
    assert not may_be_of_another_dag(run)


@pytest.mark.parametrize("run", ["team:digits-1", "team:group:digits-1", f"team:{RUN}", ":"])
def test_a_run_of_the_main_dag_may_not_take_the_id_of_another_dags_sweep(run: str) -> None:
    assert may_be_of_another_dag(run)


@pytest.mark.parametrize("sweep", ["vision:a-1", f"team:group:{RUN}", RUN, "a+b", f"v:{'x' * 300}"])
def test_no_run_of_the_main_dag_takes_the_folder_of_a_sweep_with_another_id(sweep: str) -> None:
    assert may_have_folder_of_another(safe_name(sweep))
    assert not may_have_folder_of_another(sweep)


@pytest.mark.parametrize(
    "run",
    [RUN, "digits_2-20261126-080000-a1b2", "train-1a2b3c4d", "my_train-1a2b3c4", "a_-123456g"],
)
def test_ids_of_runs_that_are_like_no_folder_of_another_sweep_are_taken(run: str) -> None:
    assert not may_have_folder_of_another(run)


def test_the_tasks_of_a_sweep_agree_on_its_id() -> None:
    found = {sweep_id("a", RUN, f"x.{task}") for task in ("plan", "trial", "report")}
    assert found == {f"a:x:{RUN}"}


def test_a_running_task_knows_its_sweep() -> None:
    task: Any = SimpleNamespace(get_dag=lambda: SimpleNamespace(dag_id="a"), task_id="x.trial")
    assert sweep_of(task, {"run_id": RUN}) == f"a:x:{RUN}"
