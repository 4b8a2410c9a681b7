"""The programs of a stack: command, environment and stop of each."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote

import httpx

from hermes_ops.database_address import with_driver
from hermes_ops.stack import airflow_service
from hermes_ops.stack.credentials import Credentials
from hermes_ops.stack.layout import Layout, write_private
from hermes_ops.stack.record import MLFLOW_USER, StackRecord, environment_of
from hermes_ops.stack.settings import Settings
from hermes_ops.trial.environment import InheritanceRule

# Present in the environment of every process that a program starts, and of nothing else:
# a user's shell may well have HERMES_HOME, so that alone never marks a process as ours.
PROGRAM_VARIABLE = "HERMES_PROGRAM"

API_LOCK_WAIT_S = 1.0

LIVENESS = "liveness"

AIRFLOW_PROGRAMS = ("api-server", "scheduler", "dag-processor", "triggerer")

BACKGROUND_NICE = 5

_STACK_PREFIXES = ("AIRFLOW_", "MLFLOW_", "HERMES_", "SUPERVISOR_")

# Relative to the supervisor's folder, in which programs run: MLflow takes a path both as it stands
# and with %xx decoded.
_MLFLOW_SQLITE = "sqlite:///../mlflow/{}"


@dataclass(frozen=True, slots=True)
class Program:
    """One supervised program.

    `stop_wait_s` bounds the time between SIGTERM and SIGKILL. `signal_group` sends the SIGTERM to
    its children too; the scheduler tells its own workers. `nice` lowers the priority of those that
    no start of a trial waits for. `gets_named`: whether it has the variables that the setting
    `trial_environment` names.
    """

    name: str
    command: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)
    stop_wait_s: int = 10
    signal_group: bool = True
    nice: int = 0
    gets_named: bool = True


def programs_of(settings: Settings, secrets: Credentials, record: StackRecord) -> list[Program]:
    """Return every program of the stack in the order of their start."""
    programs = [_mlflow(settings, secrets, record), *_airflow(settings)]
    programs.append(_controller(settings, record))
    if record.standby:
        programs.append(_standby(settings, record))
    if settings.hang_timeout_s:
        programs.append(_liveness(settings))
    return programs


def _python(*arguments: str) -> tuple[str, ...]:
    # -P: the working directory never shadows a package.
    return (sys.executable, "-P", "-m", *arguments)


def _airflow(settings: Settings) -> list[Program]:
    return [
        Program("api-server", _python("airflow", "api-server"), _short_lock_wait(settings)),
        Program(
            "scheduler", _python("airflow", "scheduler", "--skip-serve-logs"), signal_group=False
        ),
        Program("dag-processor", _python("airflow", "dag-processor"), nice=BACKGROUND_NICE),
        Program("triggerer", _python("airflow", "triggerer", "--skip-serve-logs")),
    ]


def _short_lock_wait(settings: Settings) -> dict[str, str]:
    """Return the variable that makes the API server give up SQLite's write lock early (5 s before).

    Its audit log is written on the event loop: when another of its requests holds the lock and
    has its commit in the loop's queue, each waits for the other until the first gives up, and
    every other writer with them. All its clients repeat what it refuses.
    """
    url = airflow_service.database_url(settings)
    if not url.startswith("sqlite:"):
        return {}
    return {"AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": f"{url}?timeout={API_LOCK_WAIT_S}"}


def _controller(settings: Settings, record: StackRecord) -> Program:
    command = _python("hermes_ops.airflow.control.controller", "--pool", settings.pool)
    command += ("--home", str(settings.home))
    if record.metrics_url:
        command += ("--metrics-port", str(httpx.URL(record.metrics_url).port))
    return Program("controller", command, signal_group=False)


def _standby(settings: Settings, record: StackRecord) -> Program:
    socket = str(settings.layout.standby_socket)
    command = _python("hermes_ops.trial.standby", "--socket", socket)
    command += ("--slots", str(record.standby))
    return Program("standby", command, signal_group=False, gets_named=False)


def _liveness(settings: Settings) -> Program:
    command = _python("hermes_ops.stack.liveness", "--home", str(settings.home))
    command += ("--hang-timeout-s", str(settings.hang_timeout_s))
    command += ("--start-timeout-s", str(settings.start_timeout_s))
    return Program(LIVENESS, command, gets_named=False)


def _mlflow(settings: Settings, secrets: Credentials, record: StackRecord) -> Program:
    layout = settings.layout
    port = record.mlflow_url.rpartition(":")[2]
    options = ["server", "--host", "127.0.0.1", "--port", port, "--workers", "1"]
    options += [
        "--serve-artifacts",
        "--artifacts-destination",
        f"file://{quote(str(layout.artifacts))}",
    ]
    environment = {
        # By environment: the address may hold a password.
        "MLFLOW_BACKEND_STORE_URI": mlflow_database_url(settings),
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
    }
    if settings.mlflow_auth:
        options += ["--app-name", "basic-auth"]
        environment["MLFLOW_AUTH_CONFIG_PATH"] = str(_auth_config(layout, secrets))
        environment["MLFLOW_FLASK_SERVER_SECRET_KEY"] = secrets.mlflow_session_key
    command = _python("mlflow", *options)
    return Program("mlflow", command, environment, nice=BACKGROUND_NICE, gets_named=False)


def mlflow_database_url(settings: Settings) -> str:
    """Return the SQLAlchemy address of MLflow's tracking store."""
    if settings.mlflow_db is None:
        return _MLFLOW_SQLITE.format("mlflow.db")
    return with_driver(settings.mlflow_db)


def _auth_config(layout: Layout, secrets: Credentials) -> Path:
    file = layout.secrets / "mlflow-auth.ini"
    lines = [
        "[mlflow]",
        "default_permission = READ",
        f"database_uri = {_MLFLOW_SQLITE.format('auth.db')}",
        f"admin_username = {MLFLOW_USER}",
        f"admin_password = {secrets.mlflow_password}",
        "authorization_function = mlflow.server.auth:authenticate_request_basic_auth",
        # Log-ins are checked for every logged batch; a cached check is three times as fast.
        "auth_cache_ttl_seconds = 60",
    ]
    write_private(file, "\n".join(lines) + "\n")
    return file


def base_environment(record: StackRecord, *, named: bool = True) -> dict[str, str]:
    """Return the environment that all programs share.

    Of the caller's variables it has those that are listed (`hermes_ops.trial.environment`), and
    what the setting `trial_environment` names where `named` says so. Airflow's and MLflow's are
    left out: the stack is what its settings say, whatever shell started it.
    """
    return {
        **inherited_variables(record.trial_environment if named else ()),
        **environment_of(record),
        # Process titles would otherwise overwrite the environment by which we know our processes.
        "SPT_NOENV": "1",
        "PYTHONUNBUFFERED": "1",
    }


def inherited_variables(named: Sequence[str]) -> dict[str, str]:
    """Return the variables of the caller's environment that the services inherit.

    HERMES_NODES is one of them: no setting names the nodes.
    """
    rule = InheritanceRule(named)
    kept = {
        k: v
        for k, v in os.environ.items()
        if k == "HERMES_NODES"
        or (rule.reaches_services(k) and (rule.covers(k) or not k.startswith(_STACK_PREFIXES)))
    }
    kept.pop("PYTHONDONTWRITEBYTECODE", None)  # it makes every process compile every package
    return kept


def passed_to_trials(named: Sequence[str]) -> tuple[str, ...]:
    """Return the names of the caller's variables that trials inherit, sorted."""
    return tuple(sorted(filter(InheritanceRule(named).reaches_trials, inherited_variables(named))))


def write_configuration(layout: Layout, programs: list[Program], record: StackRecord) -> None:
    """Write the launcher's program table and the supervisor's configuration."""
    base = {named: base_environment(record, named=named) for named in (True, False)}
    table = {
        program.name: {
            "command": program.command,
            "environment": {
                **base[program.gets_named],
                **program.environment,
                PROGRAM_VARIABLE: program.name,
            },
            "nice": program.nice,
        }
        for program in programs
    }
    write_private(layout.programs, json.dumps(table))
    sections = [_supervisor_section(), *(_program_section(p) for p in programs)]
    write_private(layout.supervisor_config, "\n".join(sections))


def _supervisor_section() -> str:
    """Return the supervisor's own section.

    Paths are relative to the folder that it runs in: it expands the path of a log twice, so that a
    % in it cannot be escaped, and takes what follows " ;" for a comment.
    """
    return """[unix_http_server]
file=supervisor.sock
chmod=0700

[supervisord]
logfile=../logs/supervisor.log
logfile_maxbytes=10MB
logfile_backups=2
pidfile=supervisord.pid
nodaemon=true
silent=true
nocleanup=true

[rpcinterface:supervisor]
supervisor.rpcinterface_factory=supervisor.rpcinterface:make_main_rpcinterface
"""


def _program_section(program: Program) -> str:
    launcher = [sys.executable, "-P", "-m", "hermes_ops.stack.launch"]
    command = shlex.join([*launcher, "--home", "..", program.name])
    return f"""[program:{program.name}]
command={_escape(command)}
autostart=false
autorestart=true
startsecs=1
startretries=1000
stopsignal=TERM
stopwaitsecs={program.stop_wait_s}
stopasgroup={str(program.signal_group).lower()}
killasgroup=true
redirect_stderr=true
stdout_logfile=../logs/{program.name}.log
stdout_logfile_maxbytes=10MB
stdout_logfile_backups=2
"""


def _escape(text: object) -> str:
    return str(text).replace("%", "%%")
