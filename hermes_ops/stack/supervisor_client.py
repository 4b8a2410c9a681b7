"""The client of one home's process supervisor (supervisord), over its UNIX socket."""

from __future__ import annotations

import contextlib
import http.client
import socket
import subprocess
import sys
import time
import xmlrpc.client
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

from hermes_ops.errors import StackError
from hermes_ops.stack.layout import Layout
from hermes_ops.stack.programs import PROGRAM_VARIABLE, inherited_variables

START_WAIT_S = 15.0
SHUTDOWN_WAIT_S = 15.0
# A supervisor that is stopped or hangs must not hang its clients.
ANSWER_WAIT_S = 30.0
POLL_S = 0.1
_AWAY = (OSError, xmlrpc.client.Error, http.client.HTTPException)
RUNNING, STOPPED_STATES = "RUNNING", frozenset({"STOPPED", "EXITED", "FATAL"})


@dataclass(frozen=True, slots=True)
class ProgramState:
    """The supervisor's state of one program; `pid` is 0 and `uptime_s` 0 if it is not up."""

    name: str
    state: str
    pid: int
    uptime_s: float
    started_s: float


class _UnixConnection(http.client.HTTPConnection):
    """A connection to the supervisor's socket with a timeout."""

    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=ANSWER_WAIT_S)
        self._path = path

    def connect(self) -> None:
        """Connect to the socket."""
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


class SupervisorClient:
    """A client of the supervisor of one home."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout

    @contextlib.contextmanager
    def _rpc(self) -> Iterator[xmlrpc.client.ServerProxy]:
        from supervisor.xmlrpc import SupervisorTransport

        transport = SupervisorTransport(None, None, f"unix://{self._layout.supervisor_socket}")
        transport._get_connection = lambda: _UnixConnection(str(self._layout.supervisor_socket))
        with xmlrpc.client.ServerProxy("http://127.0.0.1", transport=transport) as proxy:
            yield cast("xmlrpc.client.ServerProxy", proxy.supervisor)

    def is_alive(self) -> bool:
        """Tell whether a supervisor answers in this home."""
        try:
            with self._rpc() as rpc:
                return bool(rpc.getState())
        except _AWAY:
            return False

    def start(self) -> None:
        """Start the supervisor in a new session; raises `StackError` if it does not answer."""
        self._layout.supervisor_socket.unlink(missing_ok=True)
        self._layout.supervisor_pid.unlink(missing_ok=True)
        environment = {
            **inherited_variables(()),
            "HERMES_HOME": str(self._layout.home),
            PROGRAM_VARIABLE: "supervisor",
        }
        config = str(self._layout.supervisor_config)
        with self._layout.log("supervisor-output").open("w") as output:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "hermes_ops.stack.process_supervisor", "-c", config],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=self._layout.run,
                env=environment,
                start_new_session=True,
            )
        self._await_answer(process)
        process.returncode = 0  # it outlives us: nobody waits for it

    def _await_answer(self, process: subprocess.Popen[bytes]) -> None:
        deadline_s = time.monotonic() + START_WAIT_S
        while not self.is_alive():
            if process.poll() is not None or time.monotonic() > deadline_s:
                tail = self._layout.log("supervisor-output").read_text()[-2000:]
                raise StackError(f"The process supervisor did not start: {tail.strip()}")
            time.sleep(POLL_S)

    def start_program(self, name: str) -> None:
        """Start a program without waiting for it."""
        try:
            with self._rpc() as rpc:
                rpc.startProcess(name, False)
        except xmlrpc.client.Fault as fault:
            raise StackError(f"{name} could not be started: {fault.faultString}") from fault

    def stop_programs(self, names: list[str]) -> None:
        """Stop programs concurrently and return when all have ended (each within its bound)."""
        for name in names:
            # A fault says that it was not running.
            with contextlib.suppress(xmlrpc.client.Fault), self._rpc() as rpc:
                rpc.stopProcess(name, False)
        while any(s.state not in STOPPED_STATES for s in self.states() if s.name in names):
            time.sleep(POLL_S)

    def kill_program(self, name: str) -> None:
        """Kill a program that hangs; the supervisor starts it again, as after any crash."""
        # A fault says that it has ended meanwhile.
        with contextlib.suppress(*_AWAY), self._rpc() as rpc:
            rpc.signalProcess(name, "KILL")

    def states(self) -> list[ProgramState]:
        """Return the state of every program, in the order of the configuration."""
        try:
            with self._rpc() as rpc:
                rows = rpc.getAllProcessInfo()
        except _AWAY as error:
            raise StackError(f"The process supervisor does not answer: {error}") from error
        return [_state(row) for row in cast("list[dict[str, Any]]", rows)]

    def shutdown(self) -> None:
        """End the supervisor and whatever it still runs."""
        with contextlib.suppress(*_AWAY), self._rpc() as rpc:
            rpc.shutdown()
        deadline_s = time.monotonic() + SHUTDOWN_WAIT_S
        while self.is_alive() and time.monotonic() < deadline_s:
            time.sleep(POLL_S)


def _state(row: dict[str, Any]) -> ProgramState:
    running = row["statename"] == RUNNING
    return ProgramState(
        name=row["name"],
        state=row["statename"],
        pid=int(row["pid"]),
        uptime_s=float(row["now"] - row["start"]) if running else 0.0,
        started_s=float(row["start"]),
    )
