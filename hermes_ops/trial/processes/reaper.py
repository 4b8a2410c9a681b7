"""The reaper: parent of a trial's script and of all that the script leaves behind.

It is the nearest subreaper above the script. Whatever a process of the trial does (a session of its
own, a double fork, another name, an empty environment), it stays below the reaper. The reaper ends
all of it when the script ends, and when the process that started the reaper is gone for any reason.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import json
import os
import select
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from hermes_ops.trial.processes.record import ProcessRecord, record_of
from hermes_ops.trial.processes.stop_signal import StopSignal
from hermes_ops.trial.processes.tree import (
    Descendants,
    adopt_orphans,
    die_with_parent,
    end_descendants,
    kill,
    process_of,
)
from hermes_ops.trial.standby.client import ExitReport, exit_report, receive, send

END_S = 5.0
_ANSWER_S = 5.0
_START_S = 60.0  # of a machine that swaps; a program that is there starts in milliseconds
_FIRST_LOOK_S, _LOOK_S = 0.1, 1.0


class Reaper:
    """The handle of a reaper: start its script, receive its exit code, end everything."""

    def __init__(self, pid: int, control: socket.socket) -> None:
        self.pid = pid
        self._control = control
        self._exit = ExitReport(control)

    def start(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        directory: str | None,
        output: int | None = None,
        keep: Sequence[int] = (),
        *,
        scripts: int = 1,
    ) -> int:
        """Start the script and return its process id; OSError if it cannot be started.

        `scripts`: how many are started below this reaper in all.
        """
        message = {
            "kind": "start",
            "command": list(command),
            "environment": dict(environment),
            "directory": directory,
            "keep": list(keep),
            "scripts": scripts,
        }
        answer = self._ask(message, [] if output is None else [output], _START_S)
        if "pid" not in answer:
            raise OSError(answer["errno"], answer["strerror"], answer.get("filename"))
        return int(answer["pid"])

    def adopt(self, environment: Mapping[str, str]) -> None:
        """Let what the script leaves behind stay below the reaper from now on."""
        self._ask({"kind": "adopt", "environment": dict(environment)}, [], _ANSWER_S)

    def poll(self, pid: int = 0) -> int | None:
        """Return the script's exit code (negative: killed by that signal), None while it lives.

        `pid`: which one, where several have been started.
        """
        return self._exit.poll(pid)

    def ended_s(self, pid: int = 0) -> float:
        """Return when the script ended, on the monotonic clock."""
        return self._exit.ended_s(pid)

    @property
    def is_lost(self) -> bool:
        """Tell whether the reaper was killed, so that the script's end is not known."""
        return self._exit.is_lost

    def release(self) -> None:
        """Release the reaper: nothing of the trial is left."""
        with contextlib.suppress(OSError):
            self._control.settimeout(_ANSWER_S)
            send(self._control, {"kind": "release"}, [])

    def end(self) -> None:
        """Have the reaper end everything, and wait for that."""
        with contextlib.suppress(OSError):
            self._control.shutdown(socket.SHUT_WR)
            self._control.settimeout(2 * END_S)
            while self._control.recv(4096):
                pass
        self._control.close()

    def _ask(
        self, message: Mapping[str, Any], handles: Sequence[int], wait_s: float
    ) -> dict[str, Any]:
        self._control.settimeout(wait_s)
        send(self._control, message, handles)
        while "exit" in (answer := self._answer(wait_s)):
            self._exit.set_report(answer)
            if not answer.get("pid"):
                raise OSError(errno.ESRCH, "the script has ended")
        return answer

    def _answer(self, wait_s: float) -> dict[str, Any]:
        line = b""
        while not line.endswith(b"\n"):
            try:
                data = self._control.recv(1)
            except socket.timeout as error:  # noqa: UP041 - no TimeoutError in Python 3.9
                raise OSError(errno.ETIMEDOUT, f"no answer within {wait_s:g} s") from error
            if not data:
                raise OSError(errno.ESRCH, "the process that starts the script has gone")
            line += data
        answer: dict[str, Any] = json.loads(line)
        return answer


class PlainChild:
    """A freshly started script in a session of its own, below a reaper.

    `scripts`: how many are started below that reaper.
    """

    def __init__(
        self,
        reaper: Reaper,
        command: Sequence[str],
        environment: Mapping[str, str],
        directory: str | None,
        scripts: int = 1,
    ) -> None:
        self._reaper = reaper
        self.output, writer = os.pipe2(os.O_CLOEXEC)
        try:
            self.pid = reaper.start(command, environment, directory, writer, scripts=scripts)
        except OSError:
            os.close(self.output)
            raise
        finally:
            os.close(writer)
        self._process = process_of(self.pid)
        self._stop_signal = StopSignal(self._process)
        self._key = self.pid if scripts > 1 else 0

    def poll(self) -> int | None:
        """Return the exit code, None while it lives; as preempted if its reaper was killed."""
        self._stop_signal.pass_on()
        code = self._reaper.poll(self._key)
        if self._reaper.is_lost:  # what was below it is below us now
            end_descendants(os.getpid(), END_S)
        return code

    @property
    def ended_s(self) -> float:
        """Return when it ended, on the monotonic clock."""
        return self._reaper.ended_s(self._key)

    def stop(self) -> None:
        """Send SIGTERM to the process; where that is a shell, first to what it runs."""
        self._stop_signal.send()

    def expect_stop(self) -> None:
        """Prepare for a stop that it learns of by other means: hold a shell that runs it."""
        self._stop_signal.expect()

    def kill(self) -> None:
        """Send SIGKILL to the process; its reaper then ends all that it has started."""
        if self._process is not None:
            kill(self._process)


def fork_reaper(
    keep: Sequence[int] | None = None,
    subreaper: bool = True,
    at_end: Callable[[], None] | None = None,
) -> Reaper:
    """Fork a reaper, in a process with one thread; `keep`: the only handles that it keeps.

    `at_end` is called when its starter has gone without releasing it, after the script's end too.
    """
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid:
        theirs.close()
        return Reaper(pid, ours)
    try:
        ours.close()
        os.setsid()
        _detach(theirs.fileno(), keep)
        if subreaper:
            adopt_orphans()
        serve(theirs, None, None, at_end)
    finally:
        os._exit(1)


def _detach(control: int, keep: Sequence[int] | None) -> None:
    """Let go of the starter's terminal, output and connections: others wait for their end."""
    null = os.open(os.devnull, os.O_RDWR)
    for handle in (0, 1, 2):
        os.dup2(null, handle)
    if keep is not None:
        wanted = {0, 1, 2, control, *keep}
        for name in os.listdir("/proc/self/fd"):
            if int(name) not in wanted:
                with contextlib.suppress(OSError):
                    os.close(int(name))


def serve(
    control: socket.socket,
    script: int | None,
    record: ProcessRecord | None,
    at_end: Callable[[], None] | None = None,
) -> NoReturn:
    """Run as the reaper until nothing is left; `script`: its process, if it runs already."""
    gc.disable()  # a copy of a large interpreter: its memory stays shared
    code = 1
    try:
        code = _Reaping(control, script, record, at_end).run()
    finally:
        os._exit(code)


class _Message(NamedTuple):
    """A message with the handles that came with it."""

    document: dict[str, Any]
    handles: list[int]


class _Reaping:
    """The loop of the reaper.

    Of several scripts the end of each is reported at once, but that of the last one only when
    nothing is left of any.
    """

    def __init__(
        self,
        control: socket.socket,
        script: int | None,
        record: ProcessRecord | None,
        at_end: Callable[[], None] | None,
    ) -> None:
        self._control = control
        self._running = {script} if script is not None else set()
        self._expected = self._left = 1
        self._record = record
        self._at_end = at_end
        self._report = b""  # of the last script
        self._released = False
        self._watched = Descendants(os.getpid())
        self._written: list[Any] = []
        self._look_s = _FIRST_LOOK_S
        self._look_at_s = time.monotonic()
        self._wake = _listen_to_children()

    def run(self) -> int:
        """Serve until all scripts have ended or the starter has gone; end everything; report."""
        hung_up = False
        while self._left and not hung_up:
            self._reap()
            if self._left:
                hung_up = not self._wait()
        if self._released:
            return 0
        left = end_descendants(os.getpid(), END_S)
        self._reap()
        if hung_up and self._at_end is not None:
            self._at_end()
        if self._record is not None and not left:
            self._record.remove()
        if self._report:
            self._send(self._report)
        if not hung_up and self._at_end is not None:
            self._outlive_starter(self._at_end)
        return 0

    def _outlive_starter(self, at_end: Callable[[], None]) -> None:
        """Wait until the starter, which has the report, releases the reaper or has gone."""
        self._record = None
        while self._wait():
            pass
        if not self._released:
            at_end()

    def _send(self, data: bytes) -> None:
        with contextlib.suppress(OSError):
            self._control.settimeout(_ANSWER_S)
            self._control.sendall(data)

    def _wait(self) -> bool:
        """Wait for a message or the end of a child; False once the starter has gone."""
        left_s = None
        if self._record is not None:
            left_s = max(0.0, self._look_at_s - time.monotonic())
        sources: list[Any] = [self._control, self._wake]
        readable, _, _ = select.select(sources, [], [], left_s)
        if self._wake in readable:
            os.read(self._wake, 4096)
        if self._record is not None and time.monotonic() >= self._look_at_s:
            self._note(self._record)
        return self._control not in readable or self._handle_message()

    def _reap(self) -> None:
        """Collect every child that has ended, adopted orphans included."""
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if not pid:
                    return
                if pid in self._running:
                    self._running.remove(pid)
                    self._end_script(pid, os.waitstatus_to_exitcode(status))

    def _end_script(self, pid: int, code: int) -> None:
        self._left -= 1
        report = exit_report(code, pid if self._expected > 1 else 0)
        if self._left:
            self._send(report)
        else:
            self._report = report

    def _note(self, record: ProcessRecord) -> None:
        """Write down who is there, if that has changed."""
        self._look_at_s = time.monotonic() + self._look_s
        self._look_s = min(_LOOK_S, 2 * self._look_s)
        me = process_of(os.getpid())
        present = sorted(self._watched.find_live()) + ([me] if me else [])
        if present != self._written:
            self._written = present
            record.write(present)

    def _handle_message(self) -> bool:
        try:
            self._control.settimeout(_ANSWER_S)
            message = _Message(*receive(self._control))
        except (OSError, ValueError):
            return False
        kind = message.document.get("kind")
        if kind == "release":
            self._released = True
            return False
        answer = self._start(message) if kind == "start" else self._adopt(message)
        self._send(json.dumps(answer).encode() + b"\n")
        return True

    def _adopt(self, message: _Message) -> dict[str, Any]:
        adopt_orphans()
        self._record = record_of(message.document["environment"])
        self._look_s, self._look_at_s = _FIRST_LOOK_S, time.monotonic()
        return {"adopted": True}

    def _start(self, message: _Message) -> dict[str, Any]:
        wanted, handles = message
        if not self._running and self._left == self._expected:
            self._expected = self._left = wanted["scripts"]
        try:
            script = _spawn(wanted, handles[0] if handles else subprocess.DEVNULL)
        except OSError as error:
            return {"errno": error.errno, "strerror": error.strerror, "filename": error.filename}
        finally:
            for handle in (*handles, *wanted["keep"]):
                os.close(handle)
        self._running.add(script)
        self._record = self._record or record_of(wanted["environment"])
        self._look_at_s = time.monotonic()
        return {"pid": script}


def _spawn(wanted: Mapping[str, Any], output: int) -> int:
    reaper = os.getpid()
    process = subprocess.Popen(
        wanted["command"],
        env=wanted["environment"],
        cwd=wanted["directory"],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        pass_fds=wanted["keep"],
        start_new_session=True,
        # One thread here, so the code between fork and exec is safe.
        preexec_fn=lambda: die_with_parent(reaper),  # noqa: PLW1509
    )
    process.returncode = 0  # it is waited for here, with all the others
    return process.pid


def _listen_to_children() -> int:
    """Return a handle that becomes readable when a child has ended; other signals do nothing."""
    wake, waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)  # not SIG_IGN, which the script would inherit
    return wake
