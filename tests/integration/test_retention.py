"""Airflow's own clean-up leaves what a sweep needs; `hermes prune` leaves nothing of an old one."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

LONG_AGO = "2020-01-01 00:00:00.000000"
HERMES = Path(sys.executable).parent / "hermes"
AGED = (
    ("dag_run", ("start_date", "end_date", "queued_at", "run_after", "updated_at")),
    ("task_instance", ("start_date", "end_date", "queued_dttm", "updated_at")),
    ("task_state_store", ("updated_at",)),
    ("xcom", ("timestamp",)),
)


def age(lab: Any, sweep: Any) -> None:
    """Set all that Airflow has of a sweep back by years."""
    with sqlite3.connect(lab.home / "airflow" / "airflow.db", timeout=60) as database:
        for table, columns in AGED:
            changes = ", ".join(
                f"{c} = CASE WHEN {c} IS NULL THEN NULL ELSE ? END" for c in columns
            )
            database.execute(
                f"UPDATE {table} SET {changes} WHERE run_id = ?",
                (*[LONG_AGO] * len(columns), sweep.id),
            )


def airflow(lab: Any, *command: str) -> str:
    """Run one of Airflow's own commands as its administrator does."""
    done = subprocess.run(
        [sys.executable, "-P", "-m", "airflow", *command],
        env={**os.environ, **lab.stack.environment},
        cwd=lab.home / "run",
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def clean_xcoms(lab: Any) -> None:
    before = ("--clean-before-timestamp", "2021-01-01", "--skip-archive", "--yes")
    airflow(lab, "db", "clean", "--tables", "xcom", *before)


def xcoms(lab: Any, sweep: Any) -> set[str]:
    path = f"/api/v2/dags/hermes_sweep/dagRuns/{sweep.id}/taskInstances/plan/xcomEntries"
    return {entry["key"] for entry in lab.airflow.get(path).json()["xcom_entries"]}


@pytest.fixture(scope="module")
def old(lab: Any, harness: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A sweep that was stopped years ago, by Airflow's tables, resumed after clean-ups, ended."""
    slow = harness.slow_file(tmp_path_factory.mktemp("aged"))
    content = harness.stub("aged", harness.alike(3), harness.LONG, 0.2, slow_while=slow)
    sweep = lab.start(content)
    harness.await_(lambda: sweep.lines(0) > 3 and sweep.lines(1) > 3, 120.0)
    assert lab.hermes("sweep", "stop", sweep.id).returncode == 0
    sweep.await_end()
    before = {n: sweep.lines(n) for n in (0, 1)}
    age(lab, sweep)
    airflow(lab, "state-store", "clean")
    clean_xcoms(lab)
    assert xcoms(lab, sweep) == set()
    said = lab.hermes("sweep", "resume", sweep.id)
    assert said.returncode == 0, said.stdout + said.stderr
    harness.await_(lambda: all(sweep.lines(n) > before[n] for n in before), 120.0)
    age(lab, sweep)
    clean_xcoms(lab)  # the third trial has not begun: it needs them
    slow.unlink()
    sweep.await_end()
    return sweep, before


def test_a_sweep_stopped_for_years_is_resumed_after_airflows_own_clean_up(
    old: Any, harness: Any
) -> None:
    sweep, before = old
    assert sweep.state == "success"
    assert sweep.states() == dict.fromkeys(range(3), "finished")
    assert {len(runs) for runs in sweep.runs().values()} == {1}
    for number in before:
        assert [step for step, _ in sweep.curve(number)] == list(range(1, harness.LONG + 1))
    assert all(s["outcome"] != "failed" for n in range(3) for s in sweep.segments(n))


def test_xcoms_that_are_deleted_of_a_running_sweep_are_restored(old: Any, lab: Any) -> None:
    assert {"return_value", "hermes_config"} <= xcoms(lab, old[0])
    assert "they are restored" in (lab.home / "logs" / "controller.log").read_text()


def test_no_record_of_any_sweep_has_a_date_of_expiry(old: Any, lab: Any) -> None:
    with sqlite3.connect(lab.home / "airflow" / "airflow.db", timeout=60) as database:
        query = "SELECT count(*), count(expires_at) FROM task_state_store WHERE run_id = ?"
        rows, dated = database.execute(query, (old[0].id,)).fetchone()
    assert (rows > 5, dated) == (True, 0)


def places(lab: Any, sweep: Any) -> list[Path]:
    """The folders of a sweep: its own, those of its MLflow runs, its logs."""
    runs = [Path(r["info"]["experiment_id"]) / r["info"]["run_id"] for r in lab.runs(sweep.id)]
    logs = lab.home / "airflow" / "logs" / "dag_id=hermes_sweep" / f"run_id={sweep.id}"
    found = [sweep.folder, logs, *(lab.home / "artifacts" / run for run in runs)]
    return [path for path in found if path.exists()]


def mlflow_status(lab: Any, run_id: str) -> int:
    return int(lab.mlflow.get("/runs/get", params={"run_id": run_id}).status_code)


def nightly_pruning(lab: Any, harness: Any) -> str:
    """Run the DAG that prunes each night; its state at the end."""
    dag = "/api/v2/dags/hermes_prune"
    assert lab.airflow.get(dag).json()["is_paused"] is True
    assert lab.airflow.patch(dag, json={"is_paused": False}).status_code == 200
    run = f"night-{uuid.uuid4().hex[:6]}"
    body = {"dag_run_id": run, "conf": {"older_than": "90d"}, "logical_date": None}
    assert lab.airflow.post(f"{dag}/dagRuns", json=body).status_code in (200, 409)
    path = f"{dag}/dagRuns/{run}"

    def ended() -> Any:
        state = lab.airflow.get(path).json()["state"]
        return state in ("success", "failed") and state

    state = str(harness.await_(ended, 180.0))
    assert lab.airflow.patch(dag, json={"is_paused": True}).status_code == 200
    return state


def test_a_pruning_that_is_killed_and_repeated_leaves_nothing_of_an_old_sweep_and_all_of_others(
    old: Any, lab: Any, harness: Any
) -> None:
    sweep, young = old[0], lab.run(harness.stub("young", harness.alike(1), 2, 0.0))
    age(lab, sweep)
    gone, stays = places(lab, sweep), places(lab, young)
    assert len(gone) > 2
    runs = [r["info"]["run_id"] for r in lab.runs(sweep.id)]
    trash = lab._mlflow("experiments/create", {"name": f"trash-{uuid.uuid4().hex}"})[
        "experiment_id"
    ]
    lab._mlflow("experiments/delete", {"experiment_id": trash})

    looked = lab.hermes("prune", "--older-than", "90d", "--dry-run", "--json")
    found = json.loads(looked.stdout)
    assert [row["sweep"] for row in found["removed"]] == [sweep.id], looked.stderr
    assert found["removed"][0]["bytes"] > 10_000
    assert found["kept"][young.id] == "it was begun since then"
    assert all(path.exists() for path in gone)

    command = [str(HERMES), "prune", "--older-than", "90d", "--yes"]
    environment = {**os.environ, "HERMES_HOME": str(lab.home)}
    killed = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    path = f"/api/v2/dags/hermes_sweep/dagRuns/{sweep.id}"
    harness.await_(lambda: lab.airflow.get(path).status_code == 404, 120.0, 0.01)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    assert nightly_pruning(lab, harness) == "success"

    assert [path for path in gone if path.exists()] == []
    assert {mlflow_status(lab, run) for run in runs} == {404}
    assert list((lab.home / "prune").glob("*")) == [lab.home / "prune" / "lock"]
    assert all(path.exists() for path in stays)
    assert young.document()["best"] is not None
    view = lab._mlflow("experiments/search", {"max_results": 1000, "view_type": "DELETED_ONLY"})
    assert trash in {e["experiment_id"] for e in view["experiments"]}
    again = json.loads(lab.hermes("prune", "--older-than", "90d", "--dry-run", "--json").stdout)
    assert again["removed"] == []
