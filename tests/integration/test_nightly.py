"""Sweeps that a schedule repeats, run by hand for a night each, on a real scheduler."""

from __future__ import annotations

import json
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]


DAGS = Path(__file__).parent / "dags"


def runs(dag: str) -> str:
    return f"/api/v2/dags/{dag}/dagRuns"


class Nights:
    """The nights of one DAG."""

    def __init__(self, lab: Any, harness: Any, dag: str) -> None:
        self.lab, self.harness, self.dag = lab, harness, dag
        harness.await_(lambda: lab.airflow.get(f"/api/v2/dags/{dag}").status_code == 200)
        lab.airflow.patch(f"/api/v2/dags/{dag}", json={"is_paused": False})

    def start(self, day: int, **params: Any) -> str:
        run = f"night-{day}-{uuid.uuid4().hex[:4]}"
        body = {"dag_run_id": run, "logical_date": f"2026-04-{day:02}T02:00:00Z", "conf": params}
        answer = self.lab.airflow.post(runs(self.dag), json=body)
        assert answer.status_code in (200, 409), answer.text
        return run

    def state(self, run: str) -> str:
        return str(self.lab.airflow.get(f"{runs(self.dag)}/{run}").json()["state"])

    def ended(self, run: str) -> str:
        over = ("success", "failed")
        return str(self.harness.await_(lambda: (s := self.state(run)) in over and s, 240.0))

    def tasks(self, run: str) -> dict[tuple[str, int], str]:
        found = self.lab.airflow.get(f"{runs(self.dag)}/{run}/taskInstances").json()
        return {(t["task_id"], t["map_index"]): t["state"] for t in found["task_instances"]}

    def sweep(self, run: str) -> Any:
        return self.harness.Sweep(self.lab, f"{self.dag}:{run}")


@pytest.fixture
def files(lab: Any) -> Iterator[Path]:
    """The folder of sweep files that the DAGs of tests read; removed at the end."""
    folder = lab.home / "night-files"
    folder.mkdir()
    yield folder
    shutil.rmtree(folder)


def test_a_broken_file_is_an_import_error_that_names_it_and_takes_no_other_down(
    lab: Any, harness: Any, files: Path
) -> None:
    good = harness.stub("night-good", [0.1, 0.2], 2, 0.1, schedule="0 2 * * *")
    (files / "good.json").write_text(json.dumps(good))
    (files / "broken.json").write_text(json.dumps({**good, "colour": "red"}))

    def errors() -> Any:
        (DAGS / "nightly_check.py").touch()  # read again by the DAG processor, as it has changed
        found = lab.airflow.get("/api/v2/importErrors").json()["import_errors"]
        return [e["stack_trace"] for e in found if e["filename"] == "nightly_check.py"]

    (error,) = harness.await_(errors, timeout_s=120.0, period_s=1.0)
    assert "colour" in error
    assert "broken.json" in error

    def is_there(dag: str) -> bool:
        (DAGS / "nightly.py").touch()
        return bool(lab.airflow.get(f"/api/v2/dags/{dag}").status_code == 200)

    for dag in ("nightly_good", "nightly_skip", "nightly_replace", "nightly_example"):
        harness.await_(lambda dag=dag: is_there(dag), period_s=1.0)
    assert lab.airflow.get("/api/v2/dags/nightly_example").json()["is_paused"]
    assert lab.airflow.get("/api/v2/dags/nightly_broken").status_code == 404
    (files / "broken.json").unlink()
    harness.await_(lambda: not errors(), timeout_s=120.0, period_s=1.0)


def test_a_night_begins_with_the_best_of_the_last_one_and_reports_it(
    lab: Any, harness: Any, tmp_path: Path
) -> None:
    nights = Nights(lab, harness, "nightly_skip")
    first = nights.start(1)
    assert nights.ended(first) == "success", nights.tasks(first)
    slow = harness.slow_file(tmp_path)
    second = nights.start(2, epochs=harness.LONG, slow_while=str(slow))
    harness.await_(lambda: nights.sweep(second).runs().get(0), 120.0)
    third = nights.start(3)  # while the second one runs
    assert nights.ended(third) == "success"
    assert set(nights.tasks(third).values()) == {"skipped"}
    slow.unlink()
    assert nights.ended(second) == "success", nights.tasks(second)

    before, after = nights.sweep(first), nights.sweep(second)
    assert before.document()["state"] == "finished"  # known to the commands by `DAG:RUN`
    best = before.parent["tags"]["hermes.best_trial"]
    known = before.runs()[int(best)][0]["params"]["rate"]
    assert after.runs()[0][0]["params"]["rate"] == known
    parent = after.parent["info"]["run_id"]
    query = {"run_uuid": parent, "path": "report/report.html"}
    page = lab.mlflow.get(f"{lab.stack.mlflow_url}/get-artifact", params=query).text
    assert "The last nights" in page


def test_a_night_that_replaces_ends_the_last_one_in_order(lab: Any, harness: Any) -> None:
    nights = Nights(lab, harness, "nightly_replace")
    old = nights.start(1, epochs=1000, slow_while=str(lab.home))  # which is there
    harness.await_(lambda: nights.sweep(old).lines(0), 120.0)
    new = nights.start(2)
    assert nights.ended(old) == "success", nights.tasks(old)
    assert "replaced" in nights.sweep(old).parent["tags"]["hermes.closed"]
    assert nights.ended(new) == "success", nights.tasks(new)
    assert set(nights.sweep(new).states().values()) == {"finished"}
    assert set(nights.sweep(old).states().values()) == {"cancelled"}
