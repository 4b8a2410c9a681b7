"""Airflow as `hermes up` runs it: its configuration file, and its REST API as its administrator.

A file rather than `AIRFLOW__*` variables: it holds keys and database passwords, and every trial
inherits the environment of the scheduler that starts it.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from urllib.parse import quote

import httpx

from hermes_ops.database_address import with_driver
from hermes_ops.error_message import response_message
from hermes_ops.errors import StackError
from hermes_ops.retry import BUSY, BUSY_OR_CONFLICT, MANY, backoff_s, send_with_retry
from hermes_ops.stack.credentials import ADMIN_USER, CONTROLLER_USER, Credentials
from hermes_ops.stack.layout import shared_folder
from hermes_ops.stack.settings import Settings

Sections = dict[str, dict[str, str]]

# Room for plan, report and other people's tasks beside the pool's trials: a scheduler whose
# parallelism is the smaller number would itself be the budget.
EXTRA_WORKERS = 8


def database_url(settings: Settings) -> str:
    """Return the SQLAlchemy address of Airflow's metadata."""
    if settings.airflow_db is None:
        return sqlite_url(settings.layout.airflow / "airflow.db")
    return with_driver(settings.airflow_db)


def sqlite_url(file: Path) -> str:
    """Return the SQLAlchemy address of a file, whatever characters its path has."""
    return f"sqlite:///{quote(str(file))}"


def render(settings: Settings, secrets: Credentials, slots: int, airflow_port: int) -> str:
    """Return the text of `airflow.cfg`; the user's own `[airflow.*]` settings come last."""
    sections: Sections = {
        "core": _core(settings, secrets, slots, airflow_port),
        **_api(secrets, airflow_port),
        **_timing(),
        **_quiet(settings),
        "database": {
            "sql_alchemy_conn": database_url(settings),
            "load_default_connections": "False",
        },
        "dag_processor": _dag_processor(settings),
    }
    for section, values in settings.airflow.items():
        sections.setdefault(section, {}).update(values)
    return "".join(_section(name, values) for name, values in sections.items())


def _section(name: str, values: dict[str, str]) -> str:
    # The file is read with interpolation: a percent sign in a password must be doubled.
    lines = [f"{key} = {value.replace('%', '%%')}\n" for key, value in values.items()]
    return f"[{name}]\n{''.join(lines)}\n"


def _core(
    settings: Settings, secrets: Credentials, slots: int, airflow_port: int
) -> dict[str, str]:
    roles = {ADMIN_USER: "admin", CONTROLLER_USER: "user", **settings.people}
    return {
        "executor": "LocalExecutor",
        "dags_folder": str(shared_folder("dags")),
        "plugins_folder": str(shared_folder("plugins")),
        "fernet_key": secrets.fernet_key,
        "load_examples": "False",
        "parallelism": str(2 * slots + EXTRA_WORKERS),
        "max_active_tasks_per_dag": "10000",
        "max_active_runs_per_dag": "1000",
        "max_map_length": "100000",
        # Airflow takes a DAG whose file was not read in time for one that is gone. Where trials
        # use all processors, that takes minutes.
        "dagbag_import_timeout": "240",
        # Workers forked from the scheduler have their imports done: 0.1 s to the task's code.
        "mp_start_method": "fork",
        "execution_api_server_url": f"http://127.0.0.1:{airflow_port}/execution/",
        "hostname_callable": "socket.gethostname",  # no name server is asked
        "xcom_backend": "hermes_ops.airflow.trial.links.StandingXCom",
        "min_serialized_dag_update_interval": "5",
        "simple_auth_manager_users": ",".join(f"{name}:{role}" for name, role in roles.items()),
        "simple_auth_manager_passwords_file": str(settings.layout.airflow_passwords),
    }


def _api(secrets: Credentials, airflow_port: int) -> Sections:
    return {
        "api": {
            "host": "127.0.0.1",
            "port": str(airflow_port),
            "base_url": f"http://127.0.0.1:{airflow_port}",
            "workers": "1",
            "secret_key": secrets.api_secret,
            "maximum_page_limit": "1000",
        },
        "api_auth": {"jwt_secret": secrets.jwt_secret},
    }


def _timing() -> Sections:
    """Return the settings that make a hand-over and a recovery fast; seconds."""
    return {
        "scheduler": {
            "scheduler_idle_sleep_time": "0.1",
            "scheduler_heartbeat_sec": "2",
            "job_heartbeat_sec": "2",
            # After a SIGKILL of everything: how soon lost tasks are noticed.
            "scheduler_health_check_threshold": "15",
            "orphaned_tasks_check_interval": "5",
            "task_instance_heartbeat_timeout": "20",
            "task_instance_heartbeat_timeout_detection_interval": "3",
            "max_dagruns_per_loop_to_schedule": "50",
        },
        "workers": {
            "min_heartbeat_interval": "1",
            # An API server that is away for a minute costs no trial.
            "max_failed_heartbeats": "60",
            "missing_dag_retry_delay": "2",
        },
        # A triggerer that was killed: how soon the next one takes over its triggers.
        "triggerer": {"job_heartbeat_sec": "2", "triggerer_health_check_threshold": "10"},
    }


def _quiet(settings: Settings) -> Sections:
    return {
        "logging": {
            "base_log_folder": str(settings.layout.airflow / "logs"),
            "dag_processor_child_process_log_directory": str(
                settings.layout.airflow / "logs" / "dag_processor"
            ),
            "colored_console_log": "False",
            "uvicorn_logging_level": "WARNING",
            # A line for every request of every task would bury the rest.
            "namespace_levels": "http.access=WARNING",
        }
    }


def _dag_processor(settings: Settings) -> dict[str, str]:
    folders = {"hermes": shared_folder("dags")}
    folders.update({f"extra-{n}": folder for n, folder in enumerate(settings.dags, start=1)})
    bundles = [
        {
            "name": name,
            "classpath": "airflow.dag_processing.bundles.local.LocalDagBundle",
            "kwargs": {"path": str(folder), "refresh_interval": 5},
        }
        for name, folder in folders.items()
    ]
    return {
        "dag_bundle_config_list": json.dumps(bundles),
        "refresh_interval": "5",
        "bundle_refresh_check_interval": "2",
        "min_file_process_interval": "30",
        "parsing_processes": "1",
        "dag_file_processor_timeout": "300",  # above dagbag_import_timeout
    }


REQUEST_TIMEOUT_S = 120.0  # the first request of each kind imports a good part of Airflow


def administrator(airflow_url: str, secrets: Credentials) -> httpx.Client:
    """Return a client that is logged in as Airflow's administrator."""
    remedy = "run `hermes down`, remove the folder secrets/ of the home, and start again"
    return log_in(airflow_url, ADMIN_USER, secrets.admin_password, remedy)


def log_in(airflow_url: str, user: str, password: str, remedy: str) -> httpx.Client:
    """Return a client that is logged in as `user`; `StackError` with `remedy` if refused."""
    client = _client(airflow_url)
    response = _send(client, "POST", "/auth/token", {"username": user, "password": password})
    if response.status_code not in {200, 201}:
        raise StackError(
            f"Airflow refused the log-in of {user} (status {response.status_code}): {remedy}"
        )
    client.headers["Authorization"] = f"Bearer {response.json()['access_token']}"
    return client


def client_with_token(airflow_url: str, token: str) -> httpx.Client:
    """Return a client that uses a token that was made elsewhere."""
    client = _client(airflow_url)
    client.headers["Authorization"] = f"Bearer {token}"
    return client


def _client(airflow_url: str) -> httpx.Client:
    return httpx.Client(base_url=airflow_url, timeout=REQUEST_TIMEOUT_S, trust_env=False)


def set_pool(client: httpx.Client, name: str, slots: int) -> None:
    """Give the pool `name` exactly `slots` slots, creating it if need be."""
    body = {
        "slots": slots,
        "description": "GPU slots shared by sweeps; kept by Hermes",
        "include_deferred": True,
    }
    response = _send(client, "PATCH", f"/api/v2/pools/{name}", {**body, "pool": name})
    if response.status_code == 404:
        response = _send(client, "POST", "/api/v2/pools", {**body, "name": name})
    if response.status_code == 409:  # made in the meantime, or by a request whose answer was lost
        response = _send(client, "PATCH", f"/api/v2/pools/{name}", {**body, "pool": name})
    if response.status_code not in {200, 201}:
        reason = response_message(response.content) or response.reason_phrase
        raise StackError(f"The pool {name} could not be set to {slots} slots: {reason}")


def pool_slots(client: httpx.Client, name: str) -> int | None:
    """Return the slots of the pool; None if there is none, or this user may not read it."""
    response = _send(client, "GET", f"/api/v2/pools/{name}", None)
    return int(response.json()["slots"]) if response.status_code == 200 else None


def _send(client: httpx.Client, method: str, path: str, body: object) -> httpx.Response:
    try:
        response = send_with_retry(
            lambda: client.request(method, path, json=body),
            backoff_s(random.random, MANY),
            busy=BUSY if method == "POST" else BUSY_OR_CONFLICT,
        )
    except httpx.HTTPError as error:
        raise StackError(
            f"Airflow at {client.base_url} did not answer {method} {path} ({error}): "
            "see its log, or try again when the machine is less busy"
        ) from error
    if response is None:  # nothing here asks whether it is done
        raise StackError(f"Airflow at {client.base_url} did not answer {method} {path}")
    return response
