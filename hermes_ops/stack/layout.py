"""The paths of one installation, all below one folder, `HERMES_HOME`."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from hermes_ops.errors import StackError
from hermes_ops.trial.disk_space import write_remedy
from hermes_ops.trial.files import replace_file

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

    @property
    def airflow(self) -> Path:
        """`AIRFLOW_HOME`: configuration, database, task logs."""
        return self.home / "airflow"

    @property
    def mlflow(self) -> Path:
        """The tracking server's database and its log-in database."""
        return self.home / "mlflow"

    @property
    def artifacts(self) -> Path:
        """Artifacts that the tracking server serves."""
        return self.home / "artifacts"

    @property
    def logs(self) -> Path:
        """One rotated log a program."""
        return self.home / "logs"

    @property
    def run(self) -> Path:
        """Return the folder that each start rewrites: configuration, program table, socket."""
        return self.home / "run"

    @property
    def secrets(self) -> Path:
        """Passwords and keys; each file is 0600."""
        return self.home / "secrets"

    @property
    def settings_file(self) -> Path:
        """The user's settings; optional."""
        return self.home / "hermes.toml"

    @property
    def record(self) -> Path:
        """The addresses of the running stack; absent while it is down."""
        return self.home / "stack.json"

    @property
    def versions(self) -> Path:
        """The versions that this home was last run with."""
        return self.home / "versions.json"

    @property
    def drain(self) -> Path:
        """While this file is there, the controller stops every trial and grants nothing."""
        return self.home / "drain"

    @property
    def policy(self) -> Path:
        """The pool's policy; the controller reads it again whenever it changes."""
        return self.home / "policy.json"

    @property
    def standby_socket(self) -> Path:
        """The socket on which `hermes-trial` requests a standby interpreter."""
        return self.home / "standby.sock"

    @property
    def supervisor_socket(self) -> Path:
        """The supervisor's own socket."""
        return self.run / "supervisor.sock"

    @property
    def supervisor_config(self) -> Path:
        """The supervisor's configuration, written by `hermes up`."""
        return self.run / "supervisord.conf"

    @property
    def supervisor_pid(self) -> Path:
        """The supervisor's process id."""
        return self.run / "supervisord.pid"

    @property
    def programs(self) -> Path:
        """Command and environment of every program, read by the launcher; 0600."""
        return self.run / "programs.json"

    @property
    def airflow_config(self) -> Path:
        """Airflow's configuration, written by `hermes up`; it holds keys, so 0600."""
        return self.airflow / "airflow.cfg"

    @property
    def folders(self) -> tuple[Path, ...]:
        """The home and what is written below it; each may lie on a disk of its own."""
        parts = (self.airflow, self.mlflow, self.artifacts, self.logs, self.run, self.secrets)
        return (self.home, self.home / "sweeps", *parts)

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
