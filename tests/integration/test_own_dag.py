"""Sweeps inside other people's DAGs, through a real scheduler."""

from __future__ import annotations

import contextlib
import json
import uuid
from collections.abc import Iterator
from typing import Any

import pytest

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

DAY = "2026-03-0{}T00:00:00Z"
SECRET = "sw0rdfish-9f2c"


def dag_run(dag: str) -> str:
    return f"/api/v2/dags/{dag}/dagRuns"


def begun(lab: Any, harness: Any, dag: str, day: int) -> str:
    """Have a DAG run for a day and return the run's id."""
    harness.await_(lambda: lab.airflow.get(f"/api/v2/dags/{dag}").status_code == 200)
    unpaused = lab.airflow.patch(f"/api/v2/dags/{dag}", json={"is_paused": False})
    assert unpaused.status_code == 200, unpaused.text
    run = f"run-{uuid.uuid4().hex[:6]}"
    body = {"dag_run_id": run, "logical_date": DAY.format(day)}
    answer = lab.airflow.post(dag_run(dag), json=body)
    assert answer.status_code in (200, 409), answer.text
    return run


def ended(lab: Any, harness: Any, dag: str, run: str) -> None:
    """Wait until the run has succeeded."""

    def state() -> Any:
        found = lab.airflow.get(f"{dag_run(dag)}/{run}").json()["state"]
        return found if found in ("success", "failed") else None

    assert harness.await_(state, timeout_s=240.0) == "success", tasks(lab, dag, run)


def ran(lab: Any, harness: Any, dag: str, day: int) -> str:
    """Run a DAG for a day and return the run's id once it has succeeded."""
    run = begun(lab, harness, dag, day)
    ended(lab, harness, dag, run)
    return run


def tasks(lab: Any, dag: str, run: str) -> dict[tuple[str, int], str]:
    found = lab.airflow.get(f"{dag_run(dag)}/{run}/taskInstances", params={"limit": 100})
    return {(t["task_id"], t["map_index"]): t["state"] for t in found.json()["task_instances"]}


def xcom(lab: Any, dag: str, run: str, task: str, key: str = "return_value") -> Any:
    path = f"{dag_run(dag)}/{run}/taskInstances/{task}/xcomEntries/{key}"
    answer = lab.airflow.get(path)
    assert answer.status_code == 200, answer.text
    value = answer.json()["value"]
    with contextlib.suppress(ValueError, TypeError):
        return json.loads(value)
    return value


@pytest.fixture(scope="module")
def connections(lab: Any) -> None:
    """An MLflow with a log-in and a storage with a key, as an administrator adds them."""
    for body in (
        {"connection_id": "group_mlflow", "conn_type": "http", "host": lab.stack.mlflow_url,
         "login": "me", "password": SECRET},
        {"connection_id": "group_storage", "conn_type": "aws", "login": "key",
         "password": f"{SECRET}-s3", "extra": json.dumps({"region_name": "eu"})},
    ):  # fmt: skip
        answer = lab.airflow.post("/api/v2/connections", json=body)
        assert answer.status_code in (201, 409), answer.text


@pytest.fixture(scope="module")
def groups(lab: Any, harness: Any, connections: None) -> str:
    return ran(lab, harness, "groups", 2)


def sweep_of(lab: Any, harness: Any, dag: str, group: str, run: str) -> Any:
    return harness.Sweep(lab, f"{dag}:{group}:{run}")


def test_two_groups_of_one_run_are_two_sweeps(groups: str, lab: Any, harness: Any) -> None:
    for group in ("probe", "stub"):
        sweep = sweep_of(lab, harness, "groups", group, groups)
        assert sweep.states() == {0: "finished", 1: "finished"}
        assert sweep.parent["info"]["status"] == "FINISHED"
    assert sweep_of(lab, harness, "groups", "stub", groups).curve(0)[-1][0] == 3


def test_what_is_behind_a_group_gets_its_best_by_xcom(groups: str, lab: Any, harness: Any) -> None:
    found = xcom(lab, "groups", groups, "collect")
    sweep = sweep_of(lab, harness, "groups", "stub", groups)
    assert found["config"] == {"rate": 1.0}  # falls faster than the other one
    assert found["run"] == sweep.runs()[1][0]["info"]["run_id"]
    assert found["steps"] == 3
    parent = sweep.parent["info"]["run_id"]
    assert found["model"] == f"runs:/{parent}/model"
    assert lab.artifacts(parent, "model")


def test_the_day_and_the_interval_are_in_command_environment_and_paths(
    groups: str, lab: Any
) -> None:
    facts = json.loads((lab.home / "probe-2026-03-02").read_text())
    assert facts["argv"][1] == "2026-03-02"
    assert facts["environment"]["INTERVAL"] == "2026-03-02 to 2026-03-02"


def test_a_script_reaches_mlflow_and_storage_by_the_connections(groups: str, lab: Any) -> None:
    own = json.loads((lab.home / "probe-2026-03-02").read_text())["environment"]
    assert own["MLFLOW_TRACKING_URI"] == lab.stack.mlflow_url
    assert (own["MLFLOW_TRACKING_USERNAME"], own["MLFLOW_TRACKING_PASSWORD"]) == ("me", SECRET)
    assert (own["AWS_ACCESS_KEY_ID"], own["AWS_SECRET_ACCESS_KEY"]) == ("key", f"{SECRET}-s3")
    assert own["LICENCE"] == SECRET


def test_no_secret_is_in_logs_xcoms_rendered_templates_or_mlflow(
    groups: str, lab: Any, harness: Any
) -> None:
    base = f"{dag_run('groups')}/{groups}/taskInstances"
    said = lab.airflow.get(base, params={"limit": 100}).text
    for task, index in tasks(lab, "groups", groups):
        where = {"map_index": index}
        said += lab.airflow.get(
            f"{base}/{task}/logs/1", params={**where, "full_content": True}
        ).text
        entries = lab.airflow.get(f"{base}/{task}/xcomEntries", params={"map_index_filter": index})
        for entry in entries.json()["xcom_entries"]:
            path = f"{base}/{task}/xcomEntries/{entry['key']}"
            said += lab.airflow.get(path, params=where).text
        said += lab.airflow.get(f"{base}/{task}/state-store", params=where).text
    sweep = sweep_of(lab, harness, "groups", "probe", groups)
    assert "{{ conn." in said  # what the sweep's record and its leases hold
    said += json.dumps(lab.runs(sweep.id))
    query = {"run_uuid": sweep.parent["info"]["run_id"], "path": "sweep.yaml"}
    said += lab.mlflow.get(f"{lab.stack.mlflow_url}/get-artifact", params=query).text
    said += lab.airflow.get("/api/v2/dagSources/groups").text
    assert "LICENCE: '***'" in said or "LICENCE: ***" in said or '"LICENCE": "***"' in said
    assert SECRET not in said


def test_a_notifier_is_told_of_the_sweeps_end(groups: str, lab: Any, harness: Any) -> None:
    file = lab.home / "told-probe.report"
    harness.await_(lambda: file.exists() and file.read_text(), 120.0)
    assert file.read_text() == "done on 2026-03-02"


def test_tasks_link_to_mlflow_and_runs_link_back(groups: str, lab: Any, harness: Any) -> None:
    sweep = sweep_of(lab, harness, "groups", "stub", groups)
    parent, base = sweep.parent["info"], f"{dag_run('groups')}/{groups}/taskInstances"
    page = f"{lab.stack.mlflow_url}/#/experiments/{parent['experiment_id']}/runs"
    trial = lab.airflow.get(f"{base}/stub.trial/links", params={"map_index": 0}).json()
    assert trial["extra_links"]["MLflow run"] == f"{page}/{sweep.runs()[0][0]['info']['run_id']}"
    report = lab.airflow.get(f"{base}/stub.report/links").json()["extra_links"]
    assert report["Sweep in MLflow"] == f"{page}/{parent['run_id']}"
    assert report["Sweep report"] == f"{page}/{parent['run_id']}/artifacts/report/report.html"
    back = f"{lab.stack.airflow_url}/dags/groups/runs/{groups}"
    assert sweep.parent["tags"]["hermes.airflow_url"] == back
    assert sweep.tag(1, "hermes.airflow_url") == f"{back}/tasks/stub.trial/mapped/1"


@pytest.fixture(scope="module")
def example(lab: Any, harness: Any) -> Iterator[str]:
    """The run of the example, with the DAG behind it unpaused.

    Up to 2:24 UTC its schedule begins a run of the day as well, which must not outlast these tests.
    """
    harness.await_(lambda: lab.airflow.get("/api/v2/dags/own_dag_follows").status_code == 200)
    lab.airflow.patch("/api/v2/dags/own_dag_follows", json={"is_paused": False})
    yield ran(lab, harness, "own_dag", 3)

    def under_way() -> list[str]:
        runs = lab.airflow.get(dag_run("own_dag")).json()["dag_runs"]
        return [run["dag_run_id"] for run in runs if run["state"] in ("queued", "running")]

    harness.await_(lambda: not under_way(), 240.0)
    lab.airflow.patch("/api/v2/dags/own_dag", json={"is_paused": True})


def test_the_example_runs_and_the_dag_that_waits_for_its_asset_follows(
    example: str, lab: Any, harness: Any
) -> None:
    first = sweep_of(lab, harness, "own_dag", "search", example)
    refined = sweep_of(lab, harness, "own_dag", "refine", example)
    assert len(first.states()) == 3
    assert len(refined.states()) == 2
    said = xcom(lab, "own_dag", example, "deploy")
    assert refined.parent["info"]["run_id"] in said

    def followed() -> Any:
        """The run that this sweep's end began; the day's own run may have one as well."""
        path = dag_run("own_dag_follows")
        for run in lab.airflow.get(path).json()["dag_runs"]:
            if run["state"] == "success":  # Airflow cannot show the events of one in the queue
                events = lab.airflow.get(f"{path}/{run['dag_run_id']}/upstreamAssetEvents").json()
                told = [event["extra"] for event in events["asset_events"]]
                if refined.id in {extra["sweep"] for extra in told}:
                    return run["dag_run_id"], told
        return None

    follower, told = harness.await_(followed, timeout_s=120.0)
    assert xcom(lab, "own_dag_follows", follower, "look") in told


def test_the_commands_know_a_sweep_in_a_group_and_add_trials_to_it(
    example: str, lab: Any, harness: Any
) -> None:
    sweep = sweep_of(lab, harness, "own_dag", "search", example)
    listed = json.loads(lab.hermes("sweep", "list", "--json").stdout)
    assert {row["sweep"]: row["state"] for row in listed}[sweep.id] == "finished"
    assert "already ended" in lab.hermes("sweep", "stop", sweep.id).stdout
    assert "holds the sweeps" in lab.hermes("sweep", "watch", f"own_dag:{example}").stderr
    extended = lab.hermes("sweep", "extend", sweep.id, "--trials", "1")
    assert extended.returncode == 0, extended.stderr
    document = sweep.document()
    assert [t["state"] for t in document["trials"]] == ["finished"] * 4
    assert document["max_slots_used"] in (1, 2)
    refined = sweep_of(lab, harness, "own_dag", "refine", example)
    assert len(refined.document()["trials"]) == 2  # behind it, and not run again


def began(lab: Any, run: str, task: str) -> Any:
    """When a task of that run of the DAG `halted` began, last."""
    return lab.airflow.get(f"{dag_run('halted')}/{run}/taskInstances/{task}").json()["start_date"]


def goes_on(lab: Any, harness: Any, run: str, *command: str) -> str:
    """What a command says that has the ended run go on, once that has ended again."""
    report = began(lab, run, "search.report")
    said = lab.hermes("sweep", *command)
    assert said.returncode == 0, said.stdout + said.stderr
    harness.await_(lambda: began(lab, run, "search.report") not in (None, report), 240.0)
    ended(lab, harness, "halted", run)
    return str(said.stdout)


@pytest.fixture(scope="module")
def halted(lab: Any, harness: Any) -> Any:
    """A sweep in a group that was stopped and resumed, its run, what was before, what was said."""
    slow = lab.home / "halted-slow"
    slow.touch()
    run = begun(lab, harness, "halted", 4)
    sweep = sweep_of(lab, harness, "halted", "search", run)
    harness.await_(lambda: sweep.lines(0) > 5 and sweep.lines(1) > 5, 120.0)
    assert lab.hermes("sweep", "stop", sweep.id).returncode == 0
    ended(lab, harness, "halted", run)
    slow.unlink()
    before = sweep.states(), began(lab, run, "behind")
    said = goes_on(lab, harness, run, "resume", sweep.id)
    return sweep, run, before, said


def test_a_stopped_sweep_in_a_group_is_resumed_and_what_is_behind_it_is_not_run_again(
    halted: Any, lab: Any, harness: Any
) -> None:
    sweep, run, (states, behind), said = halted
    assert set(states.values()) == {"cancelled"}
    assert f"Sweep {sweep.id} goes on with 2 trials: 0, 1" in said
    assert "What is behind search in the DAG halted does not run again" in said
    assert sweep.states() == {0: "finished", 1: "finished"}
    for number in (0, 1):
        assert len(sweep.runs()[number]) == 1
        *stopped, last = [segment["outcome"] for segment in sweep.segments(number)]
        assert (set(stopped), last) == ({"preempted"}, "finished")
        assert [step for step, _ in sweep.curve(number)] == list(range(1, harness.LONG + 1))
    assert began(lab, run, "behind") == behind
    assert sweep.document()["state"] == "finished"


def test_a_trial_in_a_group_that_is_cleared_begins_from_scratch_and_its_sweep_ends_again(
    halted: Any, lab: Any, harness: Any
) -> None:
    sweep, run, _, _ = halted
    before = {n: runs[0]["info"]["run_id"] for n, runs in sweep.runs().items()}
    said = goes_on(lab, harness, run, "clear", f"{sweep.id}/1", "--from-scratch")
    assert f"Trial 1 of {sweep.id} begins from scratch" in said
    document = sweep.document()
    assert [t["state"] for t in document["trials"]] == ["finished", "finished"]
    kept = {r["info"]["run_id"] for r in sweep.runs()[1] if r["tags"]["hermes.kind"] == "trial"}
    assert before[1] not in kept
    assert len(kept) == 1
    assert [step for step, _ in lab.history(*kept)] == list(range(1, harness.LONG + 1))
    assert sweep.runs()[0][0]["info"]["run_id"] == before[0]
    assert len(sweep.segments(0)) == 2
