"""An Airflow that was there before: its own environment and commands, PostgreSQL, teams of DAGs.

What it needs of Hermes Ops is taken from docs/existing-airflow.md. Its versions are those of
requirements.lock, or of HERMES_TEST_AIRFLOW_CONSTRAINTS (a file or an address).
"""

from __future__ import annotations

import configparser
import contextlib
import json
import os
import re
import secrets
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psycopg2
import pytest
from cryptography.fernet import Fernet

from bench.measure import child
from bench.postgres import PostgresServer
from hermes_ops.stack.preflight import free_port

pytestmark = [pytest.mark.integration, pytest.mark.heavy, pytest.mark.timeout(1500)]

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "existing-airflow.md").read_text()
BIN = Path(sys.executable).parent
START_S = 240.0
DRIVERS = ("psycopg2-binary", "asyncpg")
USER, ADMINISTRATOR, PASSWORD = "sweeper", "boss", "its-password"
TEAM, TEAM_DAG = "vision-dags", "vision_sweep"
QUOTA = """teams:
  - {name: vision, guaranteed: 1, airflow_team: vision-dags}
  - {name: speech, guaranteed: 1, users: [sweeper]}
"""


def pins(folder: Path) -> str:
    """The versions that everything is installed with."""
    if own := os.environ.get("HERMES_TEST_AIRFLOW_CONSTRAINTS"):
        return own
    lines = re.findall(r"^([a-z0-9._-]+==[^ ;\\]+)", (ROOT / "requirements.lock").read_text(), re.M)
    file = folder / "constraints.txt"
    file.write_text("\n".join(lines))
    return str(file)


def fences(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Airflow:
    """An installation, its environment, its address and that of its database."""

    bin: Path
    environment: dict[str, str]
    url: str
    database: str

    def run(
        self, *command: str, timeout_s: float = 300, user: str = USER
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(self.bin / command[0]), *command[1:]],
            env={**self.environment, "HERMES_AIRFLOW_USER": user},
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    def child(self, *command: str) -> contextlib.AbstractContextManager[subprocess.Popen[bytes]]:
        return child([self.bin / command[0], *command[1:]], self.environment)

    def rest(self) -> httpx.Client:
        own = httpx.Client(base_url=self.url, timeout=60, trust_env=False)
        login = {"username": USER, "password": PASSWORD}
        token = own.post("/auth/token", json=login).json()["access_token"]
        own.headers["Authorization"] = f"Bearer {token}"
        return own


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of a fresh environment: first Airflow alone, then Hermes Ops beside it."""
    folder = tmp_path_factory.mktemp("existing")
    programs, constraints = folder / "venv" / "bin", pins(folder)
    uv("venv", folder / "venv", "-p", sys.executable)

    def install(*packages: str) -> None:
        uv("pip", "install", "--python", programs / "python", "-c", constraints, *packages)

    install("apache-airflow>=3.3.2,<3.4", *DRIVERS)
    before = frozen(programs)
    wheel = [str(BIN / "python"), "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(wheel, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    install(str(next(folder.glob("hermes_ops-*.whl"))))
    assert before <= frozen(programs), "Hermes Ops has changed the Airflow that was there"
    return programs


def frozen(programs: Path) -> set[str]:
    return set(uv("pip", "freeze", "--python", programs / "python").splitlines())


def uv(*arguments: object) -> str:
    command = [str(BIN / "uv"), *map(str, arguments)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def write_configuration(home: Path, database: str, port: int) -> None:
    """Write airflow.cfg as its user does, with what the page advises for short hand-overs."""
    (home / "passwords.json").write_text(json.dumps({USER: PASSWORD, ADMINISTRATOR: PASSWORD}))
    bundles = [bundle("dags", home / "dags"), bundle("team", home / "team", TEAM)]
    found = configparser.RawConfigParser()
    found.read_dict(
        {
            "core": {
                "executor": "LocalExecutor",
                "load_examples": "False",
                "mp_start_method": "fork",
                "multi_team": "True",
                "fernet_key": Fernet.generate_key().decode(),
                "execution_api_server_url": f"http://127.0.0.1:{port}/execution/",
                "simple_auth_manager_users": f"{USER}:user:{TEAM},{ADMINISTRATOR}:admin",
                "simple_auth_manager_passwords_file": str(home / "passwords.json"),
            },
            "database": {
                "sql_alchemy_conn": database.replace("://", "+psycopg2://", 1).replace("%", "%%")
            },
            "api": {
                "port": str(port),
                "host": "127.0.0.1",
                "workers": "1",
                "secret_key": secrets.token_hex(16),
            },
            "api_auth": {"jwt_secret": secrets.token_hex(32)},
            "dag_processor": {"dag_bundle_config_list": json.dumps(bundles)},
            "scheduler": {"scheduler_idle_sleep_time": "0.1"},
            "workers": {"min_heartbeat_interval": "1"},
        }
    )
    with (home / "airflow.cfg").open("w") as file:
        found.write(file)


def bundle(name: str, folder: Path, team: str | None = None) -> dict[str, Any]:
    """A folder of DAGs, all of one team."""
    local = "airflow.dag_processing.bundles.local.LocalDagBundle"
    found = {"name": name, "classpath": local, "kwargs": {"path": str(folder)}}
    return {**found, "team_name": team} if team else found


def write_files(home: Path) -> None:
    """Write the DAG and the plugin, as the page has them, and the DAG of a team."""
    for folder, file, mark in (
        ("dags", "hermes_sweep.py", "sweep_dag("),
        ("plugins", "hermes.py", "HermesPlugin"),
    ):
        (home / folder).mkdir()
        text = next(t for t in fences("python") if mark in t)
        (home / folder / file).write_text(text)
    (home / "team").mkdir()
    dag = (home / "dags" / "hermes_sweep.py").read_text().replace("hermes_sweep", TEAM_DAG)
    (home / "team" / "sweep.py").write_text(dag)


def variables(home: Path, url: str, mlflow: str) -> dict[str, str]:
    """The variables of the page's table."""
    (home / "hermes.password").write_text(PASSWORD)
    (home / "hermes").mkdir()
    found = {
        "HERMES_HOME": str(home / "hermes"),
        "MLFLOW_TRACKING_URI": mlflow,
        "HERMES_AIRFLOW_URL": url,
        "HERMES_AIRFLOW_USER": USER,
        "HERMES_AIRFLOW_PASSWORD_FILE": str(home / "hermes.password"),
        "HERMES_POLICY": "hermes",
        "HERMES_POLICY_OPTIONS": json.dumps({"threshold": 3, "guard_k": 0, "guard_quanta": 1000}),
    }
    assert all(f"`{name}`" in PAGE for name in found)
    return {**found, "AIRFLOW_HOME": str(home)}


def strange_environment(installed: Path) -> dict[str, str]:
    """The environment of somebody who has no stack of ours and no checkout."""
    ours = ("AIRFLOW", "HERMES", "MLFLOW", "PYTHONDONTWRITEBYTECODE", "VIRTUAL_ENV")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(ours)}
    return {**kept, "PATH": f"{installed}:/usr/bin:/bin"}


@pytest.fixture(scope="module")
def airflow(
    installed: Path,
    postgres: PostgresServer,
    harness: Any,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Airflow]:
    """Everything of it running, by Airflow's own commands, and an MLflow that was there too."""
    home, port, mlflow_port = tmp_path_factory.mktemp("airflow"), free_port(), free_port()
    database, url = postgres.url("existing"), f"http://127.0.0.1:{port}"
    mlflow = f"http://127.0.0.1:{mlflow_port}"
    kept = strange_environment(installed)
    found = Airflow(installed, {**kept, **variables(home, url, mlflow)}, url, database)
    write_configuration(home, database, port)
    write_files(home)
    pool = next(line for t in fences("sh") for line in t.splitlines() if "pools set" in line)
    team = f"airflow teams create {TEAM}"
    for command in ("airflow db migrate", team, pool.replace(" 4 ", " 2 ")):
        done = found.run(*shlex.split(command))
        assert done.returncode == 0, done.stderr[-3000:]
    store = ["--backend-store-uri", f"sqlite:///{home}/mlflow.db", "--workers", "1"]
    server = [installed / "mlflow", "server", "--port", str(mlflow_port), *store]
    services = [("airflow", s) for s in ("api-server", "scheduler", "dag-processor", "triggerer")]
    without_jobs = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}  # eight processes less
    with contextlib.ExitStack() as stack:
        artifacts = ["--artifacts-destination", home / "artifacts"]
        stack.enter_context(child([*server, *artifacts], {**kept, **without_jobs}))
        running = [stack.enter_context(found.child(*service)) for service in services]
        harness.await_(lambda: answers(f"{url}/api/v2/version"), START_S)
        harness.await_(lambda: answers(f"{mlflow}/health"), START_S)
        running.append(stack.enter_context(found.child("hermes", "controller", "--pool", "gpus")))
        own = stack.enter_context(contextlib.closing(found.rest()))
        for dag in ("hermes_sweep", TEAM_DAG):
            harness.await_(lambda dag=dag: own.get(f"/api/v2/dags/{dag}").is_success, START_S)
        stack.callback(end_at_once, running)
        yield found


def end_at_once(running: list[subprocess.Popen[bytes]]) -> None:
    for process in running:
        process.terminate()


def answers(url: str) -> bool:
    with contextlib.suppress(httpx.HTTPError):
        return httpx.get(url, trust_env=False).is_success
    return False


def test_a_sweep_shares_the_pool_and_runs_to_its_end(
    airflow: Airflow, harness: Any, tmp_path: Path
) -> None:
    file = tmp_path / "sweep.json"
    # long enough for a busy machine to see two losses of a trial and to preempt it
    file.write_text(json.dumps(harness.stub("existing", [0.001, 0.002, 0.1, 2.0], 60, 0.4)))
    said = airflow.run("hermes", "sweep", "run", str(file), "--json", timeout_s=600)
    assert said.returncode == 0, said.stderr[-3000:]
    document = json.loads(said.stdout)
    assert document["state"] == "finished"
    assert [t["state"] for t in document["trials"]] == ["finished"] * 4
    assert sum(t["preemptions"] for t in document["trials"]) > 0
    assert document["max_slots_used"] == document["pool_slots"] == 2
    run = f"/api/v2/dags/hermes_sweep/dagRuns/{document['sweep']}/taskInstances/report/links"
    (listed,) = json.loads(airflow.run("hermes", "sweep", "list", "--json").stdout)
    assert (listed["sweep"], listed["state"]) == (document["sweep"], "finished")
    with contextlib.closing(airflow.rest()) as own:
        links = own.get(run).json()["extra_links"]
    assert links["Sweep report"].endswith("/artifacts/report/report.html")


def test_sweeps_of_a_teams_dag_are_the_teams_and_others_that_of_their_owner(
    airflow: Airflow, harness: Any, tmp_path: Path
) -> None:
    quota, file, slow = tmp_path / "quota.yaml", tmp_path / "sweep.json", tmp_path / "slow"
    quota.write_text(QUOTA)
    slow.touch()
    file.write_text(json.dumps(harness.stub("both", [1.0], 1000, 0.4, slow_while=slow)))
    refused = airflow.run("hermes", "pool", "quota", str(quota))
    assert refused.returncode == 1, refused.stdout
    chosen = airflow.run("hermes", "pool", "quota", str(quota), user=ADMINISTRATOR)
    assert chosen.returncode == 0, chosen.stderr
    sweeps = []
    for options in ([], ["--dag", TEAM_DAG]):
        begun = airflow.run("hermes", "sweep", "run", str(file), *options)
        assert begun.returncode == 0, begun.stderr[-3000:]
        sweeps.append(begun.stdout.split()[1])

    def explained(sweep: str) -> str:
        return airflow.run("hermes", "explain", f"{sweep}/0").stdout

    for sweep, team in zip(sweeps, ("speech", "vision"), strict=True):
        harness.await_(lambda s=sweep, t=team: f"of user {USER}, team {t}\n" in explained(s))
    slow.unlink()
    for sweep in sweeps:
        ended = airflow.run("hermes", "sweep", "watch", sweep, timeout_s=600)
        assert ended.returncode == 0, ended.stderr[-3000:]


def test_other_columns_are_refused_in_one_line(airflow: Airflow) -> None:
    with contextlib.closing(psycopg2.connect(airflow.database)) as connection:
        connection.autocommit = True
        cursor = connection.cursor()
        cursor.execute("ALTER TABLE task_state_store RENAME COLUMN value TO contents")
        try:
            said = airflow.run("hermes", "controller", "--pool", "other")
        finally:
            cursor.execute("ALTER TABLE task_state_store RENAME COLUMN contents TO value")
    assert said.returncode == 2
    told = [line for line in said.stderr.splitlines() if "task_state_store lacks value" in line]
    assert len(told) == 1
    assert "run `airflow db migrate`" in told[0]
    assert "Traceback" not in said.stderr
