"""Who may do what, with Airflow's simple auth manager: over REST, by the command line, on the page.

The users are `PEOPLE` of the shared stack; the table is that of docs/rights.md.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.integration import rights_table as rights

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

HERMES = Path(sys.executable).parent / "hermes"
ROLES = {"viewer": "vera", "user": "uma", "op": "olga", "admin": "admin"}


@dataclass(frozen=True)
class Person:
    """A user of Airflow: how it is reached over REST, and by the command line."""

    name: str
    rest: httpx.Client
    environment: dict[str, str]

    def hermes(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run `hermes ARGUMENTS` as a person does who has no access to the state folder."""
        return subprocess.run(
            [str(HERMES), *arguments],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )


@pytest.fixture(scope="module")
def person(lab: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Person]]:
    """Return what logs a person in with the password of the state folder."""
    url, people = lab.stack.airflow_url, {}
    with contextlib.ExitStack() as clients:

        def of(name: str) -> Person:
            if name not in people:
                own = "admin" if name == "admin" else f"user-{name}"
                password = lab.home / "secrets" / f"{own}.password"
                rest = clients.enter_context(
                    httpx.Client(base_url=url, timeout=60, trust_env=False)
                )
                body = {"username": name, "password": password.read_text()}
                token = rest.post("/auth/token", json=body).json()["access_token"]
                rest.headers["Authorization"] = f"Bearer {token}"
                keep = {k: v for k, v in os.environ.items() if not k.startswith("HERMES_")}
                environment = keep | {
                    "HERMES_HOME": str(tmp_path_factory.mktemp(name)),
                    "HERMES_AIRFLOW_URL": url,
                    "HERMES_AIRFLOW_USER": name,
                    "HERMES_AIRFLOW_PASSWORD_FILE": str(password),
                    "MLFLOW_TRACKING_URI": lab.stack.mlflow_url,
                }
                people[name] = Person(name, rest, environment)
            return people[name]

        yield of


def test_airflow_permits_each_role_what_the_table_says(person: Any) -> None:
    table = rights.table("Simple auth manager")
    assert table.keys() == rights.REQUESTS.keys() | {rights.PAGE}
    permitted = {
        action: {
            role: rights.is_permitted(person(name).rest, action, "hermes_sweep")
            for role, name in ROLES.items()
        }
        for action in table
    }
    assert permitted == table


def test_without_a_log_in_airflow_permits_nothing(lab: Any) -> None:
    with httpx.Client(base_url=lab.stack.airflow_url, timeout=60, trust_env=False) as nobody:
        for action in (*rights.REQUESTS, rights.PAGE):
            assert rights.send(nobody, action, "hermes_sweep").status_code == 401


@pytest.mark.parametrize("path", ["", "sweeps", "sweep", "explain", "what-if", "usage"])
@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE"])
def test_no_address_of_the_page_takes_a_change(person: Any, method: str, path: str) -> None:
    answer = person("admin").rest.request(method, f"/hermes/{path}")
    assert answer.status_code == 405


@pytest.fixture(scope="module")
def tried(lab: Any, harness: Any, person: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A sweep of uma's, what the viewer tried on it, and how ulf, another user, has stopped it."""
    vera, uma, ulf = person("vera"), person("uma"), person("ulf")
    slow = harness.slow_file(tmp_path_factory.mktemp("rights"))
    content = harness.stub("of-uma", harness.alike(2), harness.LONG, 0.5, slow_while=slow)
    started = uma.hermes("sweep", "run", str(lab.file({**content, "owner": "olga"})))
    assert started.returncode == 0, started.stderr
    sweep = harness.Sweep(lab, started.stdout.split()[1])
    harness.await_(lambda: sweep.lines(0) > 1)
    said = {
        "stop": vera.hermes("sweep", "stop", sweep.id),
        "clear": vera.hermes("sweep", "clear", f"{sweep.id}/0", "--from-scratch"),
        "run": vera.hermes("sweep", "run", str(lab.file(content))),
        "policy": uma.hermes("policy", "fifo"),
        "page": vera.rest.get("/hermes/sweep", params={"sweep": sweep.id}),
        "show": vera.hermes("sweep", "show", sweep.id, "--json"),
    }
    before = sweep.lines(0)
    harness.await_(lambda: sweep.lines(0) > before)  # it goes on
    said["stopped"] = ulf.hermes("sweep", "stop", sweep.id)
    sweep.await_end()
    tags = dict(sweep.parent["tags"])
    said["resume"] = vera.hermes("sweep", "resume", sweep.id)
    said["prune"] = vera.hermes("prune", "--older-than", "0h", "--sweep", sweep.id, "--yes")
    return sweep, said, tags


@pytest.mark.parametrize("command", ["stop", "clear", "run", "resume"])
def test_the_command_of_a_viewer_is_refused_with_who_can_help(tried: Any, command: str) -> None:
    _, said, _ = tried
    assert said[command].returncode == 1
    assert "(403)" in said[command].stderr
    assert "ask an administrator of Airflow" in said[command].stderr
    assert "Traceback" not in said[command].stderr


def test_what_was_refused_has_changed_nothing(tried: Any) -> None:
    sweep, said, tags = tried
    assert json.loads(said["show"].stdout)["actions"] == []
    assert [len(runs) for runs in sweep.runs().values()] == [1, 1]
    assert {k: v for k, v in sweep.parent["tags"].items() if k != "hermes.actions"} == {
        k: v for k, v in tags.items() if k != "hermes.actions"
    }
    assert sweep.state in ("success", "failed")
    assert said["prune"].returncode == 0, said["prune"].stderr
    assert "does not let this user delete runs of the DAG hermes_sweep" in said["prune"].stdout


def test_the_owner_is_who_has_triggered_it_whatever_the_configuration_names(
    tried: Any, lab: Any
) -> None:
    sweep, said, _ = tried
    assert json.loads(said["show"].stdout)["started_by"] == "uma"
    usage = json.loads(lab.hermes("usage", "--since", "2020-01-01", "--json").stdout)["usage"]
    owners = {row["key"] for row in usage}
    assert "uma" in owners
    assert "olga" not in owners
    assert "vera" not in owners
    run = lab.airflow.get(f"/api/v2/dags/hermes_sweep/dagRuns/{sweep.id}").json()
    assert run["conf"]["owner"] == "olga"


def test_another_user_may_stop_it_as_airflow_permits_and_is_named(tried: Any) -> None:
    sweep, said, tags = tried
    assert said["stopped"].returncode == 0, said["stopped"].stderr
    assert "Airflow user ulf" in tags["hermes.closed"]
    assert set(sweep.states().values()) == {"cancelled"}


def test_a_user_changes_no_policy_and_a_viewer_reads_the_page(tried: Any, lab: Any) -> None:
    sweep, said, _ = tried
    assert said["policy"].returncode == 1
    assert "The Airflow user uma may not edit the pool gpus, so neither its policy" in (
        said["policy"].stderr
    )
    assert lab.hermes("policy").stdout.startswith("frontrunner")
    assert said["page"].status_code == 200
    assert sweep.id in said["page"].text
