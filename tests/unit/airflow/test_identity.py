from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from hermes_ops.airflow.identity import sweep_id, sweep_of

RUN = "scheduled__2026-01-01T02:00:00+00:00"


def test_a_sweep_of_the_main_dag_is_called_after_its_run() -> None:
    assert sweep_id("hermes_sweep", RUN, "trial") == RUN


def test_sweeps_of_one_run_id_in_several_dags_and_groups_have_ids_of_their_own() -> None:
    places = [("a", "plan"), ("b", "plan"), ("a", "x.plan"), ("a", "x.y.plan"),
              ("hermes_sweep", "x.plan")]  # fmt: skip
    assert len({sweep_id(dag, RUN, task) for dag, task in places}) == len(places)
    assert sweep_id("a", RUN, "x.y.plan") == f"a:x.y:{RUN}"


def test_the_tasks_of_a_sweep_agree_on_its_id() -> None:
    found = {sweep_id("a", RUN, f"x.{task}") for task in ("plan", "trial", "report")}
    assert found == {f"a:x:{RUN}"}


def test_a_running_task_knows_its_sweep() -> None:
    task: Any = SimpleNamespace(get_dag=lambda: SimpleNamespace(dag_id="a"), task_id="x.trial")
    assert sweep_of(task, {"run_id": RUN}) == f"a:x:{RUN}"
