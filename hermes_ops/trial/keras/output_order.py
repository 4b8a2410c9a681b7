"""What a resumed script prints again, in its order with the event that it trains from here on.

Output and events reach the supervisor in two ways. It counts values that come without a step, and
code between the fits of a script prints those again that are before the checkpoint.
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
    """Send an event once what was printed before is read; go on once the event is read too."""
    if not ends_replay:
        yield
        return
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # closed, or of the user's own kind
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
    """Return the bytes in the pipe of standard output; 0 if it is none."""
    try:
        return int(struct.unpack("i", fcntl.ioctl(1, termios.FIONREAD, b"\0" * 4))[0])
    except OSError:
        return 0
