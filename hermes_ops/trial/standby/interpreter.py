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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hermes_ops.trial.processes.reaper import serve
from hermes_ops.trial.processes.record import record_of
from hermes_ops.trial.processes.tree import adopt_orphans, die_with_parent, ordinary_priority
from hermes_ops.trial.standby.client import READY, READY_TEMPLATE, STARTED, receive

_IDLE_NICE = 10


def main(handle: int, imports: Sequence[str]) -> None:
    """Import, wait for orders on the server's socket, run one: in this process or in a copy."""
    _drop_working_directory()
    server = socket.socket(fileno=handle)
    reversible = os.geteuid() == 0  # others could not take a lower priority back
    if reversible:
        os.nice(_IDLE_NICE)
    for name in imports:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    if reversible:
        ordinary_priority(os.getpid())
    server.sendall(READY_TEMPLATE if _can_be_forked() else READY)
    try:
        message, handles = _order(server)
    except (OSError, ValueError):  # the server has gone
        return
    _become(message, handles)
    if not message.get("copy"):
        server.sendall(STARTED)
    server.close()
    _run(message["script"])


def _order(server: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Return what this process is to become; where forks are ordered, only in the forks."""
    while True:
        message, handles = receive(server)
        ids = _fork(handles, message, server) if message.get("copy") else b""
        if not ids:
            return message, handles
        for number in handles:
            os.close(number)
        server.sendall(ids)


def _can_be_forked() -> bool:
    """Return whether a fork would lack no thread.

    Besides the main thread only jemalloc's may be there: its allocator starts it again in a copy.
    """
    try:
        threads = os.listdir("/proc/self/task")
        names = [Path(f"/proc/self/task/{t}/comm").read_text().strip() for t in threads]
    except OSError:
        return False
    return sum(name != "jemalloc_bg_thd" for name in names) == 1


def _fork(handles: list[int], message: Mapping[str, Any], server: socket.socket) -> bytes:
    """Fork this process below a new reaper; return the ids of both, nothing in the fork.

    The reaper is made by one that ends at once, so that it becomes a child of the server.
    """
    reader, writer = os.pipe()
    middle = os.fork()
    if middle:
        os.close(writer)
        with open(reader, "rb") as stream:
            ids = stream.read(8)
        os.waitpid(middle, 0)
        return ids
    if os.fork():
        os._exit(0)
    os.close(reader)
    os.setsid()
    adopt_orphans()
    control, reaper = handles.pop(), os.getpid()
    script = os.fork()
    if script:
        os.write(writer, reaper.to_bytes(4, "little") + script.to_bytes(4, "little"))
        os.close(writer)
        os.close(handles.pop())
        server.close()
        serve(socket.socket(fileno=control), script, record_of(message["environment"]))
    os.close(writer)
    os.close(control)
    os.setsid()
    die_with_parent(reaper)
    return b""


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
    tempfile: Any = sys.modules.get("tempfile")
    if tempfile is not None:
        tempfile.tempdir = None  # an import may have looked for it
    os.chdir(message["directory"])
    _begin_relative_paths_here()
    script = message["script"]
    sys.argv[:] = [script, *message["arguments"]]
    if not getattr(sys.flags, "safe_path", False):
        sys.path.insert(0, os.path.dirname(os.path.realpath(script)))
    if os.environ.get("HERMES_TRIAL_DIR"):
        from hermes_ops.trial.hook import install

        install()


def _begin_relative_paths_here() -> None:
    """Resolve relative entries of PYTHONPATH from this folder; Python resolved them from `/`."""
    entries = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    relative = [entry for entry in entries if not os.path.isabs(entry)]
    here = {_below_root(entry): os.path.abspath(entry) for entry in relative}
    sys.path[:] = [here.get(_below_root(path), path) if path else path for path in sys.path]


def _below_root(path: str) -> str:
    return "/" + os.path.normpath(f"/{path}").lstrip("/")  # Python writes `//src`


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
        code = compile(source, script, "exec", dont_inherit=True)  # not the `annotations` of here
        exec(code, module.__dict__)  # noqa: S102 - it is the script
    except SystemExit:
        raise
    except BaseException as error:
        frames = error.__traceback__
        frames = frames.tb_next if frames is not None else None
        sys.excepthook(type(error), error.with_traceback(frames), frames)
        sys.stderr.flush()
        sys.exit(130 if isinstance(error, KeyboardInterrupt) else 1)
