"""The order of a script's output and the events that it sends.

Output and events reach the supervisor by different channels. The supervisor counts values that have
no step, and the code between the fits of a resumed script prints again what it printed before the
checkpoint. So the event that a resumed script trains from here on has to arrive between the
repeated values and the new ones. The names of an epoch's values have to arrive before Keras prints
them, with few digits.
"""
# ruff: noqa: ANN401 - the objects of Keras have no types here

from __future__ import annotations

import contextlib
import fcntl
import functools
import struct
import sys
import termios
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from hermes_ops.trial.event_channel import announce
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


def announce_before_printing(callbacks: Any) -> None:
    """Announce all of an epoch's values before Keras prints them: those are not read then.

    Other callbacks may have added some, such as the learning rate: Keras prints after those.
    """
    for callback in getattr(callbacks, "callbacks", ()):
        if type(callback).__name__ == "ProgbarLogger":
            callback.on_epoch_end = _announcing(callback.on_epoch_end)


def _announcing(on_epoch_end: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(on_epoch_end)
    def announced(epoch: int, logs: Mapping[str, Any] | None = None) -> Any:
        announce(logs or ())
        return on_epoch_end(epoch, logs)

    return announced
