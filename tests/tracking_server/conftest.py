from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

from hermes_ops.stack.preflight import free_port
from hermes_ops.tracking import SweepRef, Tracker


class Server:
    """A real MLflow server on loopback, SQLite behind it; can be killed and started again."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._port = free_port()
        self.uri = f"http://127.0.0.1:{self._port}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [
            str(Path(sys.executable).with_name("mlflow")),
            "server",
            *("--backend-store-uri", f"sqlite:///{self._folder}/mlflow.db"),
            *("--artifacts-destination", str(self._folder / "artifacts")),
            *("--host", "127.0.0.1", "--port", str(self._port), "--workers", "1"),
        ]
        with (self._folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                command,
                cwd=self._folder,
                stdout=log,
                stderr=log,
                env={
                    **os.environ,
                    "MLFLOW_DISABLE_TELEMETRY": "true",
                    "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",  # seven workers of 237 MB each
                },
                start_new_session=True,
            )
        deadline = time.monotonic() + 240  # the first start migrates the database
        while not self._is_healthy():
            if time.monotonic() > deadline or self._process.poll() is not None:
                raise RuntimeError((self._folder / "server.log").read_text()[-3_000:])
            time.sleep(0.2)

    def kill(self) -> None:
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    def _is_healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.uri}/health", timeout=2) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("mlflow"))
    try:
        server.start()
        yield server
    finally:
        server.kill()


@pytest.fixture
def tracker(server: Server) -> Iterator[Tracker]:
    tracker = Tracker(server.uri)
    yield tracker
    tracker.close()


_serial = count()


@pytest.fixture
def sweep(tracker: Tracker) -> SweepRef:
    return tracker.ensure_sweep("digits", f"manual__{next(_serial)}", "name: digits\n")
