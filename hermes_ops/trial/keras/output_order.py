"""The order of a resumed script's output and the event that it trains from here on.

Output and events reach the supervisor by different channels. The supervisor counts values that have
no step, and the code between the fits of a resumed script prints again what it printed before the
checkpoint. So the event has to arrive between the repeated values and the new ones.
"""

from __future__ import annotations

import contextlib
import fcntl
import struct
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from hermes_ops.trial.files import Folder, read_json

PATIENCE_S = 2.0
_PAUSE_S = 0.005


@contextlib.contextmanager
def after_replay(folder: Path, ends_replay: bool) -> Iterator[None]:
    """Send the event of this block after earlier output was read; return after the event was read.

    Without `ends_replay` nothing is waited for.
    """
    if not ends_replay:
        yield
        return
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # closed, or replaced by the user
            stream.flush()
    _wait_for(lambda: _unread_bytes() == 0)
    yield
    status = Folder(folder).status
    _wait_for(lambda: bool((read_json(status) or {"training": True}).get("training", True)))


def _wait_for(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition() and time.monotonic() < deadline_s:
        time.sleep(_PAUSE_S)


def _unread_bytes() -> int:
    """Return the unread bytes in the pipe of standard output; 0 if it is not a pipe."""
    try:
        return int(struct.unpack("i", fcntl.ioctl(1, termios.FIONREAD, b"\0" * 4))[0])
    except OSError:
        return 0
