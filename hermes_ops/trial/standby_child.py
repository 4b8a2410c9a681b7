"""A standby interpreter: imports done, no GPU touched; then it becomes the script it is given."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import signal
import socket
import sys
import types
from collections.abc import Sequence
from typing import Any

from hermes_ops.trial.process import ordinary_priority
from hermes_ops.trial.standby_client import receive

_IDLE_NICE = 10


def main(handle: int, imports: Sequence[str]) -> None:
    """Import, wait for an order on the keeper's socket, run it."""
    _drop_working_directory()
    keeper = socket.socket(fileno=handle)
    reversible = os.geteuid() == 0  # others could not take a lower priority back
    if reversible:
        os.nice(_IDLE_NICE)
    for name in imports:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    keeper.sendall(b"r")
    try:
        message, handles = receive(keeper)
    except (OSError, ValueError):
        return
    if reversible:
        ordinary_priority(os.getpid())
    _become(message, handles)
    keeper.sendall(b"s")
    keeper.close()
    _run(message["script"])


def _drop_working_directory() -> None:
    if sys.path and sys.path[0] == "":
        sys.path.pop(0)


def _become(message: dict[str, Any], handles: list[int]) -> None:
    """Take over the arguments, environment, folder and output that a fresh start would have."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.dup2(handles[0], 1)
    os.dup2(handles[0], 2)
    os.close(handles[0])
    os.environ.clear()
    os.environ.update(message["environment"])
    os.chdir(message["directory"])
    script = message["script"]
    sys.argv[:] = [script, *message["arguments"]]
    if not getattr(sys.flags, "safe_path", False):
        sys.path.insert(0, os.path.dirname(os.path.realpath(script)))
    if os.environ.get("HERMES_TRIAL_DIR"):
        from hermes_ops.trial.hook import install

        install()


def _run(script: str) -> None:
    """Run the script as __main__, with the exit codes and messages of `python script`."""
    script = os.path.abspath(script)
    module = types.ModuleType("__main__")
    module.__file__ = script
    module.__dict__["__builtins__"] = sys.modules["builtins"]
    sys.modules["__main__"] = module
    try:
        with io.open_code(script) as stream:
            source = stream.read()
    except OSError as error:
        reason = f"[Errno {error.errno}] {error.strerror}"
        sys.stderr.write(f"{sys.executable}: can't open file {script!r}: {reason}\n")
        sys.exit(2)
    try:
        exec(compile(source, script, "exec"), module.__dict__)  # noqa: S102 - it is the script
    except SystemExit:
        raise
    except BaseException as error:
        frames = error.__traceback__
        frames = frames.tb_next if frames is not None else None
        sys.excepthook(type(error), error.with_traceback(frames), frames)
        sys.stderr.flush()
        sys.exit(130 if isinstance(error, KeyboardInterrupt) else 1)
