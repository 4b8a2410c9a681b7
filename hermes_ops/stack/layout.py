"""The paths of one installation, all below one folder, `HERMES_HOME`."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from hermes_ops.errors import StackError
from hermes_ops.trial.disk_space import write_remedy
from hermes_ops.trial.files import PathBelow, replace_file

DEFAULT_HOME = "~/.hermes"


def default_home() -> Path:
    """Return `$HERMES_HOME`, else `~/.hermes`, as an absolute path."""
    return absolute(os.environ.get("HERMES_HOME") or DEFAULT_HOME)


def absolute(path: str | Path) -> Path:
    """Return `path` expanded and resolved: two spellings of one home must compare as equal.

    StackError for `~name` of a user who is not known.
    """
    expanded = os.path.expanduser(path)
    if expanded.startswith("~"):
        raise StackError(f"{path}: there is no user {expanded.partition('/')[0][1:]!r} here")
    return Path(expanded).resolve()


@dataclass(frozen=True, slots=True)
class Layout:
    """The paths below one `HERMES_HOME`."""

    home: Path

    airflow = PathBelow("airflow", "home")
    """`AIRFLOW_HOME`: configuration, database, task logs."""
    mlflow = PathBelow("mlflow", "home")
    """The tracking server's database and its log-in database."""
    artifacts = PathBelow("artifacts", "home")
    """Artifacts that the tracking server serves."""
    logs = PathBelow("logs", "home")
    """One rotated log a program."""
    run = PathBelow("run", "home")
    """The folder that each start rewrites: configuration, program table, socket."""
    secrets = PathBelow("secrets", "home")
    """Passwords and keys; each file is 0600."""
    airflow_passwords = PathBelow("secrets/airflow-users.json", "home")
    """The user names and passwords that Airflow's log-in reads."""
    admin_password = PathBelow("secrets/admin.password", "home")
    """The password of Airflow's administrator, nothing else."""
    controller_password = PathBelow("secrets/hermes-controller.password", "home")
    """The password of the controller's user of Airflow, nothing else."""
    mlflow_password = PathBelow("secrets/mlflow-admin.password", "home")
    """The password of MLflow's administrator, nothing else."""
    settings_file = PathBelow("hermes.toml", "home")
    """The user's settings; optional."""
    record = PathBelow("stack.json", "home")
    """The addresses of the running stack; absent while it is down."""
    versions = PathBelow("versions.json", "home")
    """The versions that this home was last run with."""
    drain = PathBelow("drain", "home")
    """While this file is there, the controller stops every trial and grants nothing."""
    policy = PathBelow("policy.json", "home")
    """The pool's policy; the controller reads it again whenever it changes."""
    standby_socket = PathBelow("standby.sock", "home")
    """The socket on which `hermes-trial` requests a standby interpreter."""
    supervisor_socket = PathBelow("run/supervisor.sock", "home")
    """The supervisor's own socket."""
    supervisor_config = PathBelow("run/supervisord.conf", "home")
    """The supervisor's configuration, written by `hermes up`."""
    supervisor_pid = PathBelow("run/supervisord.pid", "home")
    """The supervisor's process id."""
    programs = PathBelow("run/programs.json", "home")
    """Command and environment of every program, read by the launcher; 0600."""
    airflow_config = PathBelow("airflow/airflow.cfg", "home")
    """Airflow's configuration, written by `hermes up`; it holds keys, so 0600."""

    @property
    def folders(self) -> tuple[Path, ...]:
        """The home and what is written below it; each may lie on a disk of its own."""
        parts = (self.airflow, self.mlflow, self.artifacts, self.logs, self.run, self.secrets)
        return (self.home, self.home / "sweeps", *parts)

    def person_password(self, name: str) -> Path:
        """Return the file with the password of a further user of Airflow, nothing else."""
        return self.secrets / f"user-{name}.password"

    def log(self, program: str) -> Path:
        """Return the log file of `program`."""
        return self.logs / f"{program}.log"

    def create(self) -> None:
        """Make every folder; the home itself is readable by its owner only."""
        self.home.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.home.chmod(0o700)
        for folder in (self.airflow, self.mlflow, self.artifacts, self.logs, self.run):
            folder.mkdir(exist_ok=True)
        self.secrets.mkdir(exist_ok=True, mode=0o700)


def write_private(path: Path, text: str) -> None:
    """Replace `path` by `text`, readable by its owner only at every instant.

    The whole text or what was there before: a write that fails leaves no other file behind.
    Raises `StackError` with the remedy.
    """
    try:
        replace_file(path, text.encode(), durable=True, mode=0o600)
    except OSError as error:
        message = f"{path} cannot be written ({error.strerror}): {write_remedy(error)}"
        raise StackError(message) from error


def shared_folder(name: str) -> Path:
    """Return the folder `name` ("dags" or "plugins") of this installation.

    A wheel carries both as `hermes_ops/share/<name>`; a checkout has them at its top level.
    """
    package = Path(__file__).resolve().parents[1]
    installed = package / "share" / name
    return installed if installed.is_dir() else package.parent / name
