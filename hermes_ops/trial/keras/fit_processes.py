"""Processes of a script that call `fit` one after the other: each goes on counting the calls.

A shell script may run one fold after the other, or a script each fold in a process of its own, so
that the memory of the GPU is free again. What they have counted is in the file that the one process
locks whose calls are watched.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from typing import Any

from hermes_ops.trial.files import parse_object
from hermes_ops.trial.processes.tree import SEGMENT_VARIABLE

_MOST_BYTES = 1 << 16


def calls_before(handle: int, complete: int) -> int | None:
    """Return how many calls earlier processes of this segment have made; None if that is not known.

    `handle`: the locked file. `complete`: the calls whose end is in the checkpoints. A process that
    has ended with an error is followed by one with the same arguments where something starts it
    again: that one makes all calls again.
    """
    state = parse_object(os.pread(handle, _MOST_BYTES, 0)) or {}
    if not state or state.get("segment") != os.environ.get(SEGMENT_VARIABLE):
        return 0
    if not state.get("has_ended"):
        return 0 if state.get("arguments") == _arguments() else None
    calls = int(state.get("calls") or 0)
    return calls if calls <= complete else None


def note_calls(handle: int, calls: int, *, has_ended: bool = False) -> None:
    """Record how many calls this process and those before it have made."""
    state = {
        "segment": os.environ.get(SEGMENT_VARIABLE),
        "arguments": _arguments(),
        "calls": calls,
        "has_ended": has_ended or _is_child(),
    }
    data = json.dumps(state).encode()
    with contextlib.suppress(OSError):
        os.ftruncate(handle, 0)
        os.pwrite(handle, data, 0)


def has_failed() -> bool:
    """Tell whether an error that nobody has caught ends this process."""
    return hasattr(sys, "last_type")


def _arguments() -> list[str]:
    return [text[:200] for text in sys.argv[:100]]


def _is_child() -> bool:
    """Tell whether multiprocessing started this process: it may leave without Python's own end."""
    processes: Any = sys.modules.get("multiprocessing.process")
    return processes is not None and processes.parent_process() is not None
