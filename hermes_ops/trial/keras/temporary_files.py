"""Remove the temporary files of a script that leaves at once, without Python's own clean-up.

A preempted script leaves by `os._exit`: the code that it has registered for its exit may take any
time, and a GPU waits for it. Two kinds of files are known to be of no further use: what TensorFlow
has generated from the script's functions, and the folders of `tempfile.TemporaryDirectory`.
"""

from __future__ import annotations

import _thread
import contextlib
import os
import sys
import weakref
from collections.abc import Mapping
from typing import Any

WAIT_S = 1.0
"""Seconds that the removal may take; files that are left then stay."""

_GENERATED = "__autograph_generated_file"


def remove_temporary_files(wait_s: float = WAIT_S) -> None:
    """Remove the temporary files of this process, for at most `wait_s` seconds.

    Nothing is removed in a process that multiprocessing started: the files may be its parent's, and
    Python removes none there either.
    """
    processes: Any = sys.modules.get("multiprocessing.process")
    if processes is not None and processes.parent_process() is not None:
        return
    done = _thread.allocate_lock()
    done.acquire()

    def remove() -> None:
        try:
            _remove_generated()
            _remove_folders()
        finally:
            done.release()

    # Not a `threading.Thread`: a signal may have come while the locks of that module are held.
    with contextlib.suppress(RuntimeError):  # the interpreter is being torn down: it removes them
        _thread.start_new_thread(remove, ())
        done.acquire(timeout=wait_s)


def _remove_generated() -> None:
    """Remove the modules that TensorFlow has generated, with their bytecode."""
    for name, module in list(sys.modules.items()):
        if name.startswith(_GENERATED):
            for path in (getattr(module, "__file__", None), getattr(module, "__cached__", None)):
                with contextlib.suppress(OSError):
                    os.remove(path or "")


def _remove_folders() -> None:
    """Remove the folders of `TemporaryDirectory`, as Python does at its end."""
    registry: Mapping[Any, Any] = getattr(weakref.finalize, "_registry", {})
    for finalizer in list(registry):
        finalized = finalizer.peek()
        if finalized is not None and getattr(finalized[1], "__module__", "") == "tempfile":
            with contextlib.suppress(Exception):
                finalizer()
