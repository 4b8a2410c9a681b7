"""A standby server that a test starts: the interpreters that it holds, and when one is ready."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[1]
PATIENCE_S = 120.0


def wait_for(condition: Callable[[], object]) -> None:
    """Wait until the condition is true; fail after two minutes."""
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline_s, "it did not happen"
        time.sleep(0.02)


class StandbyServer:
    """The process `python -m hermes_ops.trial.standby` with one slot, listening on a socket."""

    def __init__(self, path: Path, environment: Mapping[str, str]) -> None:
        self.socket = path
        options = ["--socket", str(path), "--slots", "1"]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "hermes_ops.trial.standby", *options],
            cwd=ROOT,
            env=dict(environment),
        )
        wait_for(self.socket.exists)

    def interpreters(self) -> list[int]:
        """Return the process ids of the interpreters: each is below a reaper of its own."""
        with contextlib.suppress(psutil.NoSuchProcess):
            reapers = psutil.Process(self.process.pid).children()
            return [child.pid for reaper in reapers for child in reaper.children()]
        return []

    def await_ready(self) -> None:
        """Wait until one interpreter has done its imports and the server knows of it."""
        wait_for(lambda: [_waits_for_order(pid) for pid in self.interpreters()] == [True])
        self._await_turn()

    def _await_turn(self) -> None:
        """Wait until the server has handled all that came before: it takes events in order."""
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(PATIENCE_S)
            client.connect(str(self.socket))
            client.sendall(b"%16d" % 5 + b"rubbi")  # no message: it closes the connection
            with contextlib.suppress(ConnectionResetError):
                assert client.recv(1) == b""

    def close(self) -> None:
        """Kill the server; its interpreters end with it."""
        self.process.kill()
        self.process.wait()


@dataclass(frozen=True)
class Taught:
    """A folder with a standby server whose interpreter has done the imports of a script.

    `script` is the one place that it serves: a test writes there what it runs.
    """

    place: Path

    @property
    def options(self) -> list[str]:
        """The options of hermes-trial that let it use the server."""
        return ["--standby", str(self.place / "s.sock")]

    @property
    def script(self) -> Path:
        """Where a script has to lie."""
        return self.place / "train.py"

    def teach(self, python: str, imports: str, variables: Mapping[str, str]) -> StandbyServer:
        """Start the server and have it learn the imports, by one trial."""
        environment = {**os.environ, **variables}
        server = StandbyServer(self.place / "s.sock", environment)
        self.script.write_text(f"import {imports}\nprint('loss=1')\n")
        command = [sys.executable, "-m", "hermes_ops.trial", "--dir", str(self.place / "teacher")]
        command += ["--epoch", "1", *self.options, "--", python, str(self.script)]
        try:
            subprocess.run(command, env=environment, cwd=ROOT, check=True, capture_output=True)
            server.await_ready()
        except BaseException:  # nobody else knows of the server yet
            server.close()
            raise
        return server


def _waits_for_order(pid: int) -> bool:
    """Return whether the process sleeps on a socket; False for one that has ended."""
    try:
        place = Path(f"/proc/{pid}/wchan").read_text()
    except OSError:
        return False
    return "unix_stream" in place or "recv" in place
