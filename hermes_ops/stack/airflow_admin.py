"""What `hermes up` does in Airflow itself: the database's tables, the pool."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import subprocess
import sys

import httpx

from hermes_ops.asking import ask
from hermes_ops.errors import StackError
from hermes_ops.stack.airflow_settings import database_url
from hermes_ops.stack.credentials import ADMIN_USER, Credentials
from hermes_ops.stack.health import tail
from hermes_ops.stack.layout import write_private
from hermes_ops.stack.settings import Settings

MIGRATION_TIMEOUT_S = 600
REQUEST_TIMEOUT_S = 120.0  # the first request of each kind imports a good part of Airflow


def migrate(settings: Settings, environment: dict[str, str]) -> None:
    """Create or upgrade Airflow's tables; raises `StackError` with the end of its output.

    A SQLite file that this Airflow version has migrated already is left as it is: it belongs to
    this home alone, and the command would take longer than the start of everything else.
    """
    marker = settings.layout.airflow / "migrated.json"
    wanted = _migration(settings)
    file = settings.layout.airflow / "airflow.db"
    private = settings.airflow_db is None and file.exists()
    if private and marker.exists() and marker.read_text() == wanted:
        return
    log = settings.layout.log("migrate")
    with log.open("w") as output:
        status = subprocess.run(
            [sys.executable, "-P", "-m", "airflow", "db", "migrate"],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            cwd=settings.layout.run,
            timeout=MIGRATION_TIMEOUT_S,
            check=False,
        ).returncode
    if status:
        last = "\n".join(f"    {line}" for line in tail(log))
        raise StackError(f"Airflow's database could not be prepared. The end of {log}:\n{last}")
    write_private(marker, wanted)


def _migration(settings: Settings) -> str:
    address = hashlib.sha256(database_url(settings).encode()).hexdigest()
    return json.dumps({"airflow": importlib.metadata.version("apache-airflow"), "db": address})


def administrator(airflow_url: str, secrets: Credentials) -> httpx.Client:
    """Return a client that is logged in as Airflow's administrator."""
    remedy = "run `hermes down`, remove the folder secrets/ of the home, and start again"
    return logged_in(airflow_url, ADMIN_USER, secrets.admin_password, remedy)


def logged_in(airflow_url: str, user: str, password: str, remedy: str) -> httpx.Client:
    """Return a client that is logged in as `user`; `StackError` with `remedy` if refused."""
    client = httpx.Client(base_url=airflow_url, timeout=REQUEST_TIMEOUT_S, trust_env=False)
    answer = _send(client, "POST", "/auth/token", {"username": user, "password": password})
    if answer.status_code not in {200, 201}:
        raise StackError(
            f"Airflow refused the log-in of {user} (status {answer.status_code}): {remedy}"
        )
    client.headers["Authorization"] = f"Bearer {answer.json()['access_token']}"
    return client


def set_pool(client: httpx.Client, name: str, slots: int) -> None:
    """Give the pool `name` exactly `slots` slots, creating it if need be."""
    body = {
        "slots": slots,
        "description": "GPU slots shared by sweeps; kept by Hermes",
        "include_deferred": True,
    }
    answer = _send(client, "PATCH", f"/api/v2/pools/{name}", {**body, "pool": name})
    if answer.status_code == 404:
        answer = _send(client, "POST", "/api/v2/pools", {**body, "name": name})
    if answer.status_code not in {200, 201}:
        raise StackError(f"The pool {name} could not be set to {slots} slots: {answer.text}")


def _send(client: httpx.Client, method: str, path: str, body: object) -> httpx.Response:
    try:
        return ask(lambda: client.request(method, path, json=body))
    except httpx.HTTPError as error:
        raise StackError(
            f"Airflow at {client.base_url} did not answer {method} {path} ({error}): "
            "see its log, or try again when the machine is less busy"
        ) from error
