"""An Airflow whose trials train on several machines: real workers, each with a home of its own.

All of them run on this machine, where a name stands for a machine. The benchmarks and the
integration tests use it.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx
import psutil
from cryptography.fernet import Fernet

from bench.measure import await_, child
from bench.postgres import PostgresServer
from hermes_ops.airflow.machines import queue_of
from hermes_ops.stack.preflight import free_port
from hermes_ops.trial.checkpoint_store.store import safe_name

ROOT = Path(__file__).parents[1]
PYTHON = ROOT / ".venvs" / "workers" / "bin" / "python"
START_S = 300.0
CELERY = "CeleryExecutor"
EDGE = "airflow.providers.edge3.executors.EdgeExecutor"
USER, PASSWORD = "admin", "its-password"
OURS = ("AIRFLOW", "HERMES", "MLFLOW", "PYTHONDONTWRITEBYTECODE", "VIRTUAL_ENV", "CUDA")
NO_OPTIONS: Mapping[str, int] = MappingProxyType({})
DAG_FILE = "from hermes_ops.airflow import sweep_dag\n\nsweep = sweep_dag()\n"
PLUGIN_FILE = "from hermes_ops.airflow import HermesPlugin\n\n__all__ = ['HermesPlugin']\n"


@dataclass(slots=True)
class Worker:
    """The worker of a machine, or of the tasks that need none: it can be killed and started."""

    name: str
    home: Path
    command: list[object]
    environment: dict[str, str]
    _running: contextlib.ExitStack | None = None
    pid: int = 0

    @property
    def is_running(self) -> bool:
        """Return whether it was started, and neither killed nor ended since."""
        return self._running is not None

    def start(self) -> None:
        """Start it."""
        self._running = contextlib.ExitStack()
        self.pid = self._running.enter_context(child(self.command, self.environment)).pid

    def kill(self) -> None:
        """Kill it with its tasks, as a machine does that loses its power.

        An Edge worker gives each task a process group of its own.
        """
        with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
            tasks = psutil.Process(self.pid).children()
            os.killpg(self.pid, signal.SIGKILL)
            for task in tasks:
                with contextlib.suppress(psutil.NoSuchProcess):
                    task.kill()
        self.close()

    def close(self) -> None:
        """End it in order."""
        if self._running is not None:
            self._running.close()
        self._running = None


@dataclass(slots=True)
class MachinesStack:
    """A running Airflow, its controller and its workers, by the names of the machines."""

    folder: Path
    airflow_url: str
    mlflow_url: str
    environment: dict[str, str]
    workers: dict[str, Worker] = field(default_factory=dict)

    @property
    def home(self) -> Path:
        """Return the controller's state folder."""
        return self.folder / "hermes"

    def trial_folder(self, machine: str, sweep: str, number: int) -> Path:
        """Return the folder of a trial on a machine; it exists where the trial has trained."""
        sweeps = self.folder / machine / "hermes" / "sweeps"
        return sweeps / safe_name(sweep) / "trials" / str(number)

    def hermes(self, *arguments: str, timeout_s: float = 120) -> subprocess.CompletedProcess[str]:
        """Run `hermes ARGUMENTS` beside the controller, and return its output."""
        return subprocess.run(
            [str(Path(sys.executable).parent / "hermes"), *arguments],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    def rest(self) -> httpx.Client:
        """Return a client of Airflow that is logged in."""
        client = httpx.Client(base_url=self.airflow_url, timeout=60, trust_env=False)
        login = {"username": USER, "password": PASSWORD}
        token = client.post("/auth/token", json=login).json()["access_token"]
        client.headers["Authorization"] = f"Bearer {token}"
        return client

    def view(self) -> dict[str, Any]:
        """Return the controller's view of the pool; empty before there is one."""
        with contextlib.suppress(OSError, ValueError):
            return dict(json.loads((self.home / "pool-gpus.json").read_text()))
        return {}


def broker(port: int, password: str, folder: Path) -> contextlib.AbstractContextManager[Any]:
    """Return a Redis on loopback that keeps nothing on disk."""
    file = folder / "redis.conf"
    file.write_text(
        f'bind 127.0.0.1\nport {port}\nrequirepass {password}\nsave ""\nappendonly no\n'
    )
    file.chmod(0o600)
    return child(["redis-server", file], dict(os.environ))


@contextlib.contextmanager
def machines_stack(
    folder: Path,
    postgres: PostgresServer,
    machines: dict[str, int],
    executor: str,
    policy: str = "fifo",
    policy_options: Mapping[str, int] = NO_OPTIONS,
) -> Iterator[MachinesStack]:
    """Start everything, the workers too, and end it with the block."""
    with contextlib.ExitStack() as running:
        stack = _prepared(folder, postgres, machines, executor, running)
        stack.environment["HERMES_POLICY"] = policy
        stack.environment["HERMES_POLICY_OPTIONS"] = json.dumps(dict(policy_options))
        airflow = [PYTHON, "-m", "airflow"]
        for service in ("api-server", "scheduler", "dag-processor"):
            running.enter_context(child([*airflow, service], stack.environment))
        store = ["--backend-store-uri", f"sqlite:///{folder}/mlflow.db", "--workers", "1"]
        port = stack.mlflow_url.rpartition(":")[2]
        server = [sys.executable, "-m", "mlflow", "server", "--port", port, *store]
        artifacts = ["--artifacts-destination", folder / "artifacts"]
        without_jobs = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}  # eight processes less
        running.enter_context(
            child([*server, *artifacts], {**_strange_environment(), **without_jobs})
        )
        for page in (f"{stack.mlflow_url}/health", f"{stack.airflow_url}/api/v2/version"):
            await_(partial(_answers, page), START_S, f"{page} answers", 0.3)
        for worker in stack.workers.values():
            running.callback(worker.close)
            worker.start()
        controller = ["-m", "hermes_ops.airflow.control.controller", "--pool", "gpus"]
        running.enter_context(child([PYTHON, *controller], stack.environment))
        with contextlib.closing(stack.rest()) as rest:
            path = "/api/v2/dags/hermes_sweep"
            await_(lambda: rest.get(path).is_success, START_S, "the DAG is there", 0.3)
        yield stack


def _prepared(
    folder: Path,
    postgres: PostgresServer,
    machines: dict[str, int],
    executor: str,
    running: contextlib.ExitStack,
) -> MachinesStack:
    """Write the files, migrate the database, start the broker."""
    port, mlflow_port, redis_port = free_port(), free_port(), free_port()
    for name, file, text in (("dags", "s.py", DAG_FILE), ("plugins", "h.py", PLUGIN_FILE)):
        (folder / name).mkdir(parents=True)
        (folder / name / file).write_text(text)
    (folder / "passwords.json").write_text(json.dumps({USER: PASSWORD}))
    login = folder / "hermes" / "secrets" / "admin.password"
    login.parent.mkdir(parents=True)
    login.write_text(PASSWORD)
    login.chmod(0o600)
    password = secrets.token_hex(8)
    running.enter_context(broker(redis_port, password, folder))
    database = postgres.url(f"machines-{secrets.token_hex(3)}").replace("://", "+psycopg2://", 1)
    url, mlflow = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{mlflow_port}"
    named = ",".join(f"{name}={gpus}" for name, gpus in machines.items())
    environment = {
        **_strange_environment(),
        **_airflow(folder, url, database, executor, f"redis://:{password}@127.0.0.1:{redis_port}"),
        "HERMES_HOME": str(folder / "hermes"),
        "HERMES_MACHINES": named,
        "HERMES_AIRFLOW_URL": url,
        "HERMES_AIRFLOW_USER": USER,
        "HERMES_AIRFLOW_PASSWORD_FILE": str(login),
        "MLFLOW_TRACKING_URI": mlflow,
    }
    stack = MachinesStack(folder, url, mlflow, environment)
    airflow = [PYTHON, "-m", "airflow"]
    for command in (["db", "migrate"], ["pools", "set", "gpus", str(sum(machines.values())), "-"]):
        with child([*airflow, *command], environment) as process:
            assert process.wait(START_S) == 0, command
    stack.workers["default"] = _worker(stack, "default", "default", 4, {}, executor)
    for name, gpus in machines.items():
        own = {"HERMES_MACHINE": name, "HERMES_HOME": str(folder / name / "hermes")}
        stack.workers[name] = _worker(stack, name, queue_of(name), gpus + 1, own, executor)
    return stack


def _worker(
    stack: MachinesStack, name: str, queue: str, tasks: int, own: dict[str, str], executor: str
) -> Worker:
    home = stack.folder / name
    home.mkdir(exist_ok=True)
    environment = {**stack.environment, "AIRFLOW_HOME": str(home), **own}
    if executor == CELERY:
        command = ["celery", "worker", "--queues", queue, "--concurrency", tasks]
        command += ["--celery-hostname", f"{name}@machine", "--skip-serve-logs"]
        command += ["--pid", home / "worker.pid", "--without-mingle", "--without-gossip"]
    else:
        command = ["edge", "worker", "--edge-hostname", name, "--queues", queue]
        command += ["--concurrency", tasks, "--pid", home / "worker.pid"]
    return Worker(name, home, [PYTHON, "-m", "airflow", *command], environment)


def _airflow(
    folder: Path, url: str, database: str, executor: str, broker_url: str
) -> dict[str, str]:
    """Return Airflow's configuration, as its own variables have it."""
    settings = {
        "core": {
            "executor": executor,
            "load_examples": "False",
            "fernet_key": Fernet.generate_key().decode(),
            "execution_api_server_url": f"{url}/execution/",
            "simple_auth_manager_users": f"{USER}:op",
            "simple_auth_manager_passwords_file": str(folder / "passwords.json"),
            "dags_folder": str(folder / "dags"),
            "plugins_folder": str(folder / "plugins"),
            "mp_start_method": "fork",
        },
        "database": {"sql_alchemy_conn": database},
        "celery": {
            "broker_url": f"{broker_url}/0",
            "result_backend": f"db+{database}",
            "celery_config_options": "hermes_ops.airflow.celery_options.CELERY_CONFIG",
        },
        "edge": {
            "api_enabled": "True",
            "api_url": f"{url}/edge_worker/v1/rpcapi",
            "heartbeat_interval": "2",
            "job_poll_interval": "1",
        },
        "api": {"port": url.rpartition(":")[2], "host": "127.0.0.1", "workers": "1",
                "base_url": url, "secret_key": secrets.token_hex(16)},
        "api_auth": {"jwt_secret": secrets.token_hex(32)},
        "scheduler": {
            "scheduler_idle_sleep_time": "0.2",
            "task_instance_heartbeat_timeout": "20",
            "task_instance_heartbeat_timeout_detection_interval": "3",
            "task_queued_timeout": "60",
            "task_queued_timeout_check_interval": "10",
            "enable_health_check": "False",
        },
        "workers": {"min_heartbeat_interval": "1", "max_failed_heartbeats": "60"},
        "logging": {"worker_log_server_port": "0"},
    }  # fmt: skip
    found = {
        f"AIRFLOW__{section.upper()}__{key.upper()}": value
        for section, values in settings.items()
        for key, value in values.items()
    }
    return {"AIRFLOW_HOME": str(folder), **found}


def _strange_environment() -> dict[str, str]:
    """Return this process's environment without what a stack of ours has set."""
    return {k: v for k, v in os.environ.items() if not k.startswith(OURS)}


def _answers(url: str) -> bool:
    with contextlib.suppress(httpx.HTTPError):
        return httpx.get(url, trust_env=False).is_success
    return False
