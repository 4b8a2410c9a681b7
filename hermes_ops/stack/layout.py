"""Where everything of one installation lies: one folder, `HERMES_HOME`."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

DEFAULT_HOME = "~/.hermes"


def default_home() -> Path:
    """Return `$HERMES_HOME`, else `~/.hermes`, as an absolute path."""
    return absolute(os.environ.get("HERMES_HOME") or DEFAULT_HOME)


def absolute(path: str | Path) -> Path:
    """Return `path` expanded and resolved: two spellings of one home must compare as equal."""
    return Path(path).expanduser().resolve()


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
        """What is rewritten at every start: supervisor configuration, program table, socket."""
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
    def drain(self) -> Path:
        """While this file is there, the controller stops every trial and grants nothing."""
        return self.home / "drain"

    @property
    def policy(self) -> Path:
        """The pool's policy; the controller reads it again whenever it changes."""
        return self.home / "policy.json"

    @property
    def standby_socket(self) -> Path:
        """Where `hermes-trial` asks for an interpreter that has its imports done."""
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
    """Replace `path` by `text`, readable by its owner only at every instant."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
    temporary.replace(path)


def shared_folder(name: str) -> Path:
    """Return the folder `name` ("dags" or "plugins") of this installation.

    A wheel carries both as `hermes_ops/share/<name>`; a checkout has them at its top level.
    """
    package = Path(__file__).resolve().parents[1]
    installed = package / "share" / name
    return installed if installed.is_dir() else package.parent / name
