"""Controller and command line under Airflow's FAB auth manager: log-in, token, rights.

The role is that of docs/existing-airflow.md. Airflow runs from an environment of its own.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import subprocess
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
from hermes_ops.errors import HermesError
from hermes_ops.stack.preflight import free_port

pytestmark = [pytest.mark.integration, pytest.mark.heavy, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/existing-airflow.md").read_text()
PYTHON = ROOT / ".venvs/fab/bin/python"
DAG = "hermes_sweep"
PASSWORD = "its-password"
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


def environment(folder: Path, port: int) -> dict[str, str]:
    return {
        **{k: v for k, v in os.environ.items() if not k.startswith(("AIRFLOW", "HERMES_"))},
        "AIRFLOW_HOME": str(folder),
        "AIRFLOW__CORE__AUTH_MANAGER": (
            "airflow.providers.fab.auth_manager.fab_auth_manager.FabAuthManager"
        ),
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
        "AIRFLOW__CORE__DAGS_FOLDER": str(folder / "dags"),
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
    (fence,) = (f for f in re.findall(r"^```python\n(.*?)^```", PAGE, re.M | re.S) if DAG in f)
    (folder / "dags" / "hermes_sweep.py").write_text(fence)
    (roles,) = re.findall(r"^```json\n(.*?)^```", PAGE, re.M | re.S)
    (folder / "roles.json").write_text(roles)
    airflow("db", "migrate")
    airflow("dags", "reserialize")
    airflow("roles", "import", str(folder / "roles.json"))
    (folder / "users.py").write_text(ADD_USERS)
    subprocess.run([str(PYTHON), str(folder / "users.py"), PASSWORD], env=own, check=True)
    with child([PYTHON, "-m", "airflow", "api-server"], own):
        url = f"http://127.0.0.1:{port}"
        _await(url)
        yield Fab(url, folder)


ADD_USERS = """
import sys
from airflow.providers.fab.auth_manager.cli_commands.utils import get_application_builder
with get_application_builder() as builder:
    for name, role in (("anna", "Hermes"), ("vera", "Viewer")):
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
