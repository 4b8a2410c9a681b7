"""Controller, command line and page under Airflow's FAB auth manager: log-in, token, rights.

The roles are those of docs/existing-airflow.md and, of teams, docs/rights.md. Airflow runs from an
environment of its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from bench.measure import child
from hermes_ops.airflow.client import AirflowClient, TaskKey
from hermes_ops.airflow.credentials import AirflowCredentials, LogInRefused, expiry_s
from hermes_ops.airflow.records import CLOSE_KEY, SWEEP_KEY
from hermes_ops.errors import HermesError
from hermes_ops.stack.preflight import free_port
from tests.integration import rights_table
from tests.unit.airflow.builders import sweep_record

pytestmark = [pytest.mark.integration, pytest.mark.heavy, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/existing-airflow.md").read_text()
RIGHTS = rights_table.DOCUMENT.read_text()
HERMES = Path(sys.executable).parent / "hermes"
PYTHON = ROOT / ".venvs/fab/bin/python"
DAG = "hermes_sweep"
PASSWORD = "its-password"
PEOPLE = {
    "anna": "Hermes",
    "vera": "Viewer",
    "uma": "User",
    "olga": "Op",
    "ann": "vision",
    "eve": "speech",
}
START_S = 120.0


@dataclass(frozen=True)
class Fab:
    """An Airflow with FAB: its address and a folder for files."""

    url: str
    folder: Path

    def client(self, user: str, password: str = PASSWORD) -> AirflowClient:
        file = self.folder / f"{user}.password"
        file.write_text(password)
        return AirflowClient(AirflowCredentials(self.url, user, file))

    def rest(self, user: str) -> httpx.Client:
        client = httpx.Client(base_url=self.url, timeout=60, trust_env=False)
        body = {"username": user, "password": PASSWORD}
        token = client.post("/auth/token", json=body).json()["access_token"]
        client.headers["Authorization"] = f"Bearer {token}"
        return client

    def hermes(self, user: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run `hermes ARGUMENTS` as a user of Airflow, with a state folder of its own."""
        file = self.folder / f"{user}.password"
        file.write_text(PASSWORD)
        own = {
            **{k: v for k, v in os.environ.items() if not k.startswith(("AIRFLOW", "HERMES_"))},
            "HERMES_HOME": str(self.folder / f"home-{user}"),
            "HERMES_AIRFLOW_URL": self.url,
            "HERMES_AIRFLOW_USER": user,
            "HERMES_AIRFLOW_PASSWORD_FILE": str(file),
            "MLFLOW_TRACKING_URI": "http://127.0.0.1:9",  # nothing listens there
        }
        return subprocess.run(
            [str(HERMES), *arguments],
            env=own, capture_output=True, text=True, timeout=240, check=False,
        )  # fmt: skip


def environment(folder: Path, port: int) -> dict[str, str]:
    return {
        **{k: v for k, v in os.environ.items() if not k.startswith(("AIRFLOW", "HERMES_"))},
        "AIRFLOW_HOME": str(folder),
        "AIRFLOW__CORE__AUTH_MANAGER": (
            "airflow.providers.fab.auth_manager.fab_auth_manager.FabAuthManager"
        ),
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
        "AIRFLOW__CORE__DAGS_FOLDER": str(folder / "dags"),
        "AIRFLOW__CORE__PLUGINS_FOLDER": str(ROOT / "plugins"),
        "AIRFLOW__API__HOST": "127.0.0.1",
        "AIRFLOW__API__PORT": str(port),
        "AIRFLOW__API__WORKERS": "1",
        "AIRFLOW__API__SECRET_KEY": secrets.token_hex(16),
        "AIRFLOW__API_AUTH__JWT_SECRET": secrets.token_hex(32),
        "HERMES_HOME": str(folder / "hermes"),
        "PYTHONPATH": str(ROOT),
    }


@pytest.fixture(scope="module")
def fab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fab]:
    if not PYTHON.exists():
        pytest.skip("no environment with FAB: `make setup` makes it")
    folder, port = tmp_path_factory.mktemp("fab"), free_port()
    own = environment(folder, port)

    def airflow(*words: str) -> None:
        command = [str(PYTHON), "-m", "airflow", *words]
        done = subprocess.run(command, env=own, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr

    (folder / "dags").mkdir()
    (dag_file,) = (f for f in _fences(PAGE, "python") if DAG in f)
    (folder / "dags" / "hermes_sweep.py").write_text(dag_file)
    (team_file,) = _fences(RIGHTS, "python")
    (folder / "dags" / "team_sweeps.py").write_text(team_file)
    (roles,), (team_roles,) = _fences(PAGE, "json"), _fences(RIGHTS, "json")
    (folder / "roles.json").write_text(json.dumps([*json.loads(roles), *json.loads(team_roles)]))
    airflow("db", "migrate")
    airflow("roles", "import", str(folder / "roles.json"))
    airflow("dags", "reserialize")
    (folder / "users.py").write_text(ADD_USERS)
    people = [PASSWORD, json.dumps(PEOPLE)]
    subprocess.run([str(PYTHON), str(folder / "users.py"), *people], env=own, check=True)
    with child([PYTHON, "-m", "airflow", "api-server"], own):
        url = f"http://127.0.0.1:{port}"
        _await(url)
        yield Fab(url, folder)


def _fences(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page, re.M | re.S)


ADD_USERS = """
import json
import sys
from airflow.providers.fab.auth_manager.cli_commands.utils import get_application_builder
with get_application_builder() as builder:
    for name, role in json.loads(sys.argv[2]).items():
        person = name, name, name, f"{name}@example.com", builder.sm.find_role(role)
        assert builder.sm.add_user(*person, password=sys.argv[1])
"""


def _await(url: str) -> None:
    deadline_s = time.monotonic() + START_S
    while True:
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(f"{url}/api/v2/version", trust_env=False).is_success:
                return
        assert time.monotonic() < deadline_s, "the API server has not started"
        time.sleep(0.2)


def requests(client: AirflowClient, run: str) -> dict[str, Callable[[], Any]]:
    """Every request that the controller and the command line make, in an order that works."""
    plan = TaskKey(DAG, run, "plan")
    large = {"config": "x" * 70_000}  # in pieces, which a smaller record deletes
    return {
        "read the DAG": lambda: client.dag(DAG)["dag_id"],  # type: ignore[index]  # it is there
        "start a run": lambda: client.trigger(DAG, run, {"name": "a"}),
        "read the run": lambda: client.dag_run(DAG, run)["state"],  # type: ignore[index]  # as above
        "list runs": lambda: client.dag_runs([DAG])[0],
        "list tasks": lambda: client.task_instances(DAG, run)[0],
        "find plans": lambda: client.made_by("_PlanOperator"),
        "write a record": lambda: client.put_state(plan, "hermes_x", large),
        "read a record": lambda: client.get_state(plan, "hermes_x"),
        "write a smaller record": lambda: client.put_state(plan, "hermes_x", {}),
        "mark a task": lambda: client.mark([plan], "success"),
        "clear a task": lambda: client.clear(DAG, run, ["plan"]),
        "add an XCom": lambda: client.add_xcom(plan, "hermes_config", {"name": "a"}),
        "read an XCom": lambda: client.xcom(plan, "hermes_config")["name"],  # type: ignore[index]
        "renew an XCom": lambda: client.renew_xcom(plan, "hermes_config", {"name": "a"}),
        "ask for the right to edit": lambda: client.confirm_edit(plan),
        "write a note": lambda: client.note(plan, "a note"),
        "read the pool": lambda: client.pool("default_pool")["slots"],  # type: ignore[index]
    }


def test_the_role_of_the_page_is_enough_for_every_request(fab: Fab) -> None:
    with contextlib.closing(fab.client("anna")) as client:
        for request in requests(client, "of-anna").values():
            request()
        assert client.get_state(TaskKey(DAG, "of-anna", "plan"), "hermes_x") == {}
        with pytest.raises(HermesError, match="403"):
            client._call("GET", "/api/v2/variables")


def test_a_user_without_the_rights_is_refused_and_changes_nothing(fab: Fab) -> None:
    with contextlib.closing(fab.client("vera")) as client:
        asked = requests(client, "of-vera")
        for name in ("start a run", "write a record", "mark a task", "clear a task"):
            with pytest.raises(HermesError, match=r"refused .* \(403\)"):
                asked[name]()
        assert client.dag_run(DAG, "of-vera") is None


def test_a_wrong_password_is_named(fab: Fab) -> None:
    with (
        contextlib.closing(fab.client("anna", "wrong")) as client,
        pytest.raises(LogInRefused, match="refuses the log-in of 'anna'"),
    ):
        client.dag(DAG)


def test_a_ready_token_works_until_it_is_refused_and_again_once_it_is_written_anew(
    fab: Fab,
) -> None:
    body = {"username": "anna", "password": PASSWORD}
    given = httpx.post(f"{fab.url}/auth/token", json=body, trust_env=False).json()["access_token"]
    assert (expiry_s(given) or 0) > time.time()
    file = fab.folder / "token"
    file.write_text(f"{given}\n")
    with contextlib.closing(AirflowClient(AirflowCredentials(fab.url, token_file=file))) as client:
        assert client.dag(DAG) is not None
        file.write_text(given[:-8] + "AAAAAAAA")
        with pytest.raises(LogInRefused, match=f"the token of {re.escape(str(file))} is refused"):
            client.dag(DAG)
        file.write_text(given)
        assert client.dag(DAG) is not None


COLUMNS = {
    "Viewer": ("vera", DAG),
    "User": ("uma", DAG),
    "Op": ("olga", DAG),
    "team, own DAG": ("ann", "vision_sweep"),
    "team, other DAG": ("ann", "speech_sweep"),
}


def test_airflow_permits_each_role_what_the_table_says(fab: Fab) -> None:
    table = rights_table.table("FAB")
    assert table.keys() == rights_table.REQUESTS.keys()
    permitted: dict[str, dict[str, bool]] = {action: {} for action in table}
    for column, (user, dag) in COLUMNS.items():
        with contextlib.closing(fab.rest(user)) as client:
            for action in table:
                permitted[action][column] = rights_table.is_permitted(client, action, dag)
    assert permitted == table


@pytest.fixture(scope="module")
def of_teams(fab: Fab) -> dict[str, str]:
    """A sweep in the DAG of each team, started with the command line by one of the team."""
    file = fab.folder / "sweep.json"
    file.write_text(json.dumps(sweep_record()["config"]))
    started = {}
    for user, dag in (("ann", "vision_sweep"), ("eve", "speech_sweep")):
        said = fab.hermes(user, "sweep", "run", str(file), "--dag", dag)
        assert said.returncode == 0, said.stderr
        started[user] = said.stdout.split()[1]
        assert started[user].startswith(f"{dag}:")
        with contextlib.closing(fab.client("anna")) as client:
            run = started[user].partition(":")[2]
            client.put_state(TaskKey(dag, run, "plan"), SWEEP_KEY, sweep_record())
    return started


def close_record(fab: Fab, sweep: str) -> object:
    dag, _, run = sweep.partition(":")
    with contextlib.closing(fab.client("anna")) as client:
        return client.get_state(TaskKey(dag, run, "plan"), CLOSE_KEY)


def test_a_team_cannot_stop_the_sweep_of_another_team_with_the_command_line(
    fab: Fab, of_teams: dict[str, str]
) -> None:
    said = fab.hermes("ann", "sweep", "stop", of_teams["eve"])
    assert said.returncode == 1
    assert "(403)" in said.stderr
    assert "ask an administrator of Airflow" in said.stderr
    assert close_record(fab, of_teams["eve"]) is None


def test_a_team_stops_its_own_sweep(fab: Fab, of_teams: dict[str, str]) -> None:
    said = fab.hermes("ann", "sweep", "stop", of_teams["ann"])
    assert said.returncode == 0, said.stderr
    record: Any = close_record(fab, of_teams["ann"])
    assert "Airflow user ann" in record["reason"]


def test_the_page_shows_a_team_its_own_sweeps_alone(fab: Fab, of_teams: dict[str, str]) -> None:
    with contextlib.closing(fab.rest("ann")) as client:
        listed = client.get("/hermes/sweeps")
        assert listed.status_code == 200, listed.text
        assert of_teams["ann"] in listed.text
        assert of_teams["eve"] not in listed.text
        for path, name in (("sweep", "sweep"), ("explain", "trial")):
            asked = of_teams["eve"] + ("/0" if name == "trial" else "")
            answer = client.get(f"/hermes/{path}", params={name: asked})
            assert answer.status_code == 403
            assert of_teams["eve"] not in answer.text


def test_within_one_dag_who_may_edit_it_stops_the_sweep_of_another_user(fab: Fab) -> None:
    plan = TaskKey(DAG, "shared-dag", "plan")
    with contextlib.closing(fab.client("anna")) as owner:
        owner.trigger(DAG, plan.run_id, {"name": "a"})
    with contextlib.closing(fab.client("uma")) as colleague:
        colleague.put_state(plan, CLOSE_KEY, {"reason": "not mine"})
        assert colleague.get_state(plan, CLOSE_KEY) == {"reason": "not mine"}
