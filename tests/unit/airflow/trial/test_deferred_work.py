from __future__ import annotations

import threading
from typing import Any

import pytest
from airflow.sdk.execution_time.task_runner import TaskRunnerMarker

from hermes_ops.airflow import plugin
from hermes_ops.airflow.trial import segment_run


def test_what_a_task_leaves_for_later_is_done_once_when_airflow_says_that_it_has_left() -> None:
    done: list[str] = []
    segment_run.defer(lambda: done.append("sent"))
    assert done == []
    plugin.before_stopping(component=None)
    plugin.before_stopping(component=None)
    assert done == ["sent"]


def test_a_task_that_has_left_makes_way_for_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    niced: list[int] = []
    monkeypatch.setattr("os.nice", niced.append)
    plugin.before_stopping(component=object())  # the scheduler, for instance
    assert niced == []
    plugin.before_stopping(component=TaskRunnerMarker())
    assert niced == [plugin.DEFERRED_WORK_NICE]


def test_work_that_hangs_does_not_keep_the_task(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment_run, "DEFERRED_WORK_S", 0.01)
    released, entered = threading.Event(), threading.Event()

    def hang() -> None:
        entered.set()
        released.wait(30)

    segment_run.defer(hang)
    segment_run.run_pending()
    assert entered.wait(30)
    assert not released.is_set()
    released.set()


def test_a_trial_reads_its_dag_without_the_trigger_form(monkeypatch: pytest.MonkeyPatch) -> None:
    from hermes_ops.airflow.sweep import dag

    def parsed_for(task: str | None) -> set[str]:
        context: Any = type("Context", (), {"dag_id": "d", "task_id": task})()
        monkeypatch.setattr(dag, "get_parsing_context", lambda: context)
        return set(dag.sweep_dag("d").params)

    assert parsed_for("trial") == set()
    assert {"name", "search", "trial"} <= parsed_for("plan") == parsed_for(None)


@pytest.mark.parametrize(("program", "dags"), [("scheduler", 1), ("api-server", 0)])
def test_a_program_that_forks_tasks_has_made_a_sweeps_dag_before(
    program: str, dags: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    monkeypatch.setattr("sys.argv", ["airflow", program])
    monkeypatch.setattr("hermes_ops.airflow.sweep.dag.sweep_dag", made.append)
    plugin.on_starting(component=object())
    assert len(made) == dags


def test_the_scheduler_starts_though_the_start_of_a_task_cannot_be_rehearsed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_: str) -> None:
        raise ValueError("a broken installation")

    monkeypatch.setattr("sys.argv", ["airflow", "scheduler"])
    monkeypatch.setattr("hermes_ops.airflow.sweep.dag.sweep_dag", fail)
    plugin.on_starting(component=object())
    assert "a broken installation" in caplog.text
