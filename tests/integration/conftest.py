"""The real services that integration tests share: one stack, one PostgreSQL server a session."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

HERMES = Path(sys.executable).parent / "hermes"
UP_TIMEOUT_S = 360
DOWN_TIMEOUT_S = 120

# A background job of a shell is started with SIGINT ignored, and so would be all that it starts.
signal.signal(signal.SIGINT, signal.default_int_handler)


@dataclass(frozen=True)
class Stack:
    """A stack that was started by the command line, as a user starts it."""

    home: Path

    @property
    def environment(self) -> dict[str, str]:
        from hermes_ops.stack import client_environment

        return client_environment(self.home)

    @property
    def airflow_url(self) -> str:
        return self.environment["HERMES_AIRFLOW_URL"]

    @property
    def mlflow_url(self) -> str:
        return self.environment["MLFLOW_TRACKING_URI"]

    def hermes(self, *arguments: str, timeout_s: float = 120) -> subprocess.CompletedProcess[str]:
        """Run `hermes ARGUMENTS` against this stack and return its output."""
        return run_hermes(*arguments, home=self.home, timeout_s=timeout_s)

    def up(self, *options: str) -> subprocess.CompletedProcess[str]:
        free = ("--airflow-port", "0", "--mlflow-port", "0")
        return self.hermes("up", "--slots", "2", *free, *options, timeout_s=UP_TIMEOUT_S)

    def down(self) -> subprocess.CompletedProcess[str]:
        return self.hermes("down", timeout_s=DOWN_TIMEOUT_S)


def run_hermes(
    *arguments: str, home: Path, timeout_s: float = 120
) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    return subprocess.run(
        [str(HERMES), *arguments],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
        env={**environment, "HERMES_HOME": str(home)},
    )


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Start one stack with two slots for the whole session; every test may run sweeps in it.

    HERMES_TEST_HOME names one that runs already (with `--slots 2 --dags tests/integration/dags`).
    """
    if running := os.environ.get("HERMES_TEST_HOME"):
        yield Stack(Path(running))
        return
    shared = Stack(tmp_path_factory.mktemp("stack"))
    started = shared.up("--dags", str(Path(__file__).parent / "dags"))
    assert started.returncode == 0, started.stdout + started.stderr
    try:
        yield shared
    finally:
        stopped = shared.down()
    assert stopped.returncode == 0, stopped.stdout + stopped.stderr


@pytest.fixture(scope="session")
def stack_at() -> Callable[[Path], Stack]:
    """Return what makes a stack, not started yet, of a state folder: for fixtures of a module."""
    return Stack


@pytest.fixture
def own_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Return a stack that is not started yet, for tests that kill or configure it."""
    own = Stack(tmp_path_factory.mktemp("own"))
    yield own
    own.down()


@pytest.fixture(scope="session")
def harness() -> ModuleType:
    """Return the module beside this one: test folders are no packages, so it is loaded by path."""
    spec = importlib.util.spec_from_file_location("harness", Path(__file__).parent / "harness.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["harness"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def lab(stack: Stack, harness: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Sweeps on the shared stack, and views of them."""
    shared = harness.Lab(stack, tmp_path_factory.mktemp("sweeps"))
    yield shared
    shared.close()


@dataclass(frozen=True)
class Postgres:
    """A PostgreSQL server on loopback; its password has characters that need escaping."""

    port: int

    def url(self, database: str) -> str:
        """Create `database` and return its address."""
        import psycopg2

        with contextlib.closing(psycopg2.connect(self._address("postgres"))) as connection:
            connection.autocommit = True
            connection.cursor().execute(f'CREATE DATABASE "{database}"')
        return self._address(database)

    def _address(self, database: str) -> str:
        return f"postgresql://hermes:pass%25word@127.0.0.1:{self.port}/{database}"


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    programs = _postgres_programs()
    # PostgreSQL refuses to run as root.
    user = "postgres" if os.getuid() == 0 else pwd.getpwuid(os.getuid()).pw_name
    folder = Path(tempfile.mkdtemp(prefix="hermes-pg-", dir="/tmp"))
    password = folder / "password"
    password.write_text("pass%word")
    for path in (folder, password):
        shutil.chown(path, user)
    port = _free_port()
    _run_as(user, programs / "initdb", *_initdb_options(folder, password))
    with (folder / "log").open("w") as log:
        server = subprocess.Popen(
            [str(programs / "postgres"), *_server_options(folder, port)],
            cwd=folder,
            stdout=subprocess.DEVNULL,
            stderr=log,
            user=user if os.getuid() == 0 else None,
        )
    try:
        _await_postgres(Postgres(port), server)
        yield Postgres(port)
    finally:
        server.terminate()
        server.wait(30)
        shutil.rmtree(folder, ignore_errors=True)


def _postgres_programs() -> Path:
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"))
    on_path = shutil.which("postgres")
    if on_path:
        found.append(Path(on_path).resolve())
    if not found:
        if os.environ.get("CI"):
            pytest.fail("PostgreSQL's server programs are not installed: .ci/run installs them")
        pytest.skip("PostgreSQL's server programs are not installed")
    return found[-1].parent


def _initdb_options(folder: Path, password: Path) -> list[str]:
    data = ["-D", str(folder / "data"), "-U", "hermes", "--encoding=UTF8", "--locale=C"]
    return [*data, "--auth=scram-sha-256", f"--pwfile={password}", "--no-sync"]


def _server_options(folder: Path, port: int) -> list[str]:
    options = {
        "listen_addresses": "127.0.0.1",
        "unix_socket_directories": str(folder),
        "fsync": "off",
        "max_connections": "200",
    }
    flags = [part for k, v in options.items() for part in ("-c", f"{k}={v}")]
    return ["-D", str(folder / "data"), "-p", str(port), *flags]


def _run_as(user: str, *command: object) -> None:
    subprocess.run(
        [str(part) for part in command],
        cwd="/tmp",
        check=True,
        stdout=subprocess.DEVNULL,
        user=user if os.getuid() == 0 else None,
    )


def _await_postgres(server: Postgres, process: subprocess.Popen[bytes]) -> None:
    import psycopg2

    deadline_s = time.monotonic() + 60
    while time.monotonic() < deadline_s and process.poll() is None:
        try:
            psycopg2.connect(server._address("postgres")).close()
        except psycopg2.OperationalError:
            time.sleep(0.1)
        else:
            return
    pytest.fail("PostgreSQL did not start")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
