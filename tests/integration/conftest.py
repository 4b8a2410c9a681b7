"""The real services that integration tests share: one stack, one PostgreSQL server a session."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from bench.measure import NotMeasuredError
from bench.postgres import PostgresServer, server
from hermes_ops.stack import processes
from hermes_ops.stack.preflight import free_port

HERMES = Path(sys.executable).parent / "hermes"
UP_TIMEOUT_S = 360
DOWN_TIMEOUT_S = 120
# Airflow's scheduler looks for work ten times a second under `hermes up`, which costs a fifth of a
# core for as long as a stack runs, and a tenth where it looks twice a second. Tests wait for
# events, not for the shortest hand-over: here it looks each second, as Airflow does by default. A
# file of DAGs is read again each half a minute, and at once when it has changed: here only then.
CALM = """\
[airflow.scheduler]
scheduler_idle_sleep_time = "1.0"
[airflow.dag_processor]
min_file_process_interval = "3600"
"""

PEOPLE = '[people]\nvera = "viewer"\numa = "user"\nulf = "user"\nolga = "op"\n'
TESTS = Path(__file__).parent
FOLDERS = (TESTS / "dags", TESTS.parents[1] / "examples" / "own_dag")
DAGS = tuple(part for folder in FOLDERS for part in ("--dags", str(folder)))

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

    def hermes(
        self, *arguments: str, timeout_s: float = 120, folder: Path | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run `hermes ARGUMENTS` against this stack, in the folder, and return its output."""
        return run_hermes(*arguments, home=self.home, timeout_s=timeout_s, folder=folder)

    def up(self, *options: str, slots: int = 2) -> subprocess.CompletedProcess[str]:
        """Start the stack; without settings of its own it has a calm scheduler, and people."""
        with contextlib.suppress(FileExistsError), (self.home / "hermes.toml").open("x") as file:
            file.write(CALM + PEOPLE)
        free = ("--airflow-port", "0", "--mlflow-port", "0")
        arguments = ("up", "--slots", str(slots), *free, *options)
        return self.hermes(*arguments, timeout_s=UP_TIMEOUT_S)

    def down(self) -> subprocess.CompletedProcess[str]:
        return self.hermes("down", timeout_s=DOWN_TIMEOUT_S)

    @contextlib.contextmanager
    def running(self, *options: str) -> Iterator[None]:
        """Start the stack, and stop it with the block."""
        started = self.up(*options)
        assert started.returncode == 0, started.stdout + started.stderr
        try:
            yield
        finally:
            stopped = self.down()
        assert stopped.returncode == 0, stopped.stdout + stopped.stderr


def run_hermes(
    *arguments: str, home: Path, timeout_s: float = 120, folder: Path | None = None
) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    return subprocess.run(
        [str(HERMES), *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
        env={"AWS_SECRET_ACCESS_KEY": "left-behind", **environment, "HERMES_HOME": str(home)},
    )


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Start one stack with two slots for the whole session; every test may run sweeps in it.

    HERMES_TEST_HOME names one that runs already, with `--slots 2 --dags tests/integration/dags
    --dags examples/own_dag`.
    """
    if running := os.environ.get("HERMES_TEST_HOME"):
        yield Stack(Path(running))
        return
    shared = Stack(tmp_path_factory.mktemp("stack"))
    with shared.running(*DAGS):
        yield shared
    assert processes.members(shared.home) == []


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
def shared_lab(
    stack: Stack, harness: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Any]:
    """Sweeps on the shared stack, and views of them: `lab` without its end of each module."""
    shared = harness.Lab(stack, tmp_path_factory.mktemp("sweeps"))
    yield shared
    shared.close()


@pytest.fixture(scope="module")
def lab(shared_lab: Any) -> Iterator[Any]:
    """Sweeps on the shared stack, and views of them.

    What a module leaves behind where one of its tests fails does not hold the GPUs of the next one.
    """
    yield shared_lab
    shared_lab.stop_sweeps()


@pytest.fixture(scope="session")
def second_user(shared_lab: Any) -> Iterator[Any]:
    """Airflow's REST interface as another user than the administrator reaches it.

    It is `hermes-controller`, which each stack has.
    """
    client = shared_lab.logged_in("hermes-controller")
    yield client
    client.close()


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """A PostgreSQL server on loopback; its password has a character that needs escaping."""
    with contextlib.ExitStack() as stack:
        try:
            running = stack.enter_context(server("pass%word", durable=False))
        except NotMeasuredError as error:
            if os.environ.get("CI"):
                pytest.fail(f"{error} (.ci/run installs them)")
            pytest.skip(str(error))
        yield running


@dataclass(frozen=True)
class Ports:
    """Two ports that were free when the stack was first started."""

    airflow: int = field(default_factory=free_port)
    mlflow: int = field(default_factory=free_port)


@dataclass(frozen=True)
class CrashedStack:
    """A stack on PostgreSQL, with fixed ports and MLflow's log-in, that tests kill in turn."""

    stack: Stack
    options: tuple[str, ...]
    ports: Ports

    def up(self) -> None:
        """Start what does not run."""
        started = self.stack.up(*self.options)
        assert started.returncode == 0, started.stderr


@pytest.fixture(scope="session")
def crashed(
    tmp_path_factory: pytest.TempPathFactory, postgres: PostgresServer
) -> Iterator[CrashedStack]:
    """A stack on PostgreSQL that several tests kill; it may not run when one of them begins."""
    stack, ports = Stack(tmp_path_factory.mktemp("crashed")), Ports()
    stack.home.joinpath("hermes.toml").write_text(f"hang_timeout_s = 90\n{CALM}")
    options = ["--airflow-port", str(ports.airflow), "--mlflow-port", str(ports.mlflow)]
    for option, name in (("--airflow-db", "both_airflow"), ("--mlflow-db", "both_mlflow")):
        options += [option, postgres.url(name)]
    yield CrashedStack(stack, (*options, "--mlflow-auth"), ports)
    stack.down()


@pytest.fixture
def killed(crashed: CrashedStack) -> CrashedStack:
    """The same stack, started if the test before has left it down."""
    if crashed.stack.hermes("status").returncode != 0:
        crashed.up()
    return crashed
