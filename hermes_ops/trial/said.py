"""What is said once in a trial's output is kept in its folder, for its later segments."""

from __future__ import annotations

import contextlib
from pathlib import Path

from hermes_ops.trial.files import Follower, append_lines

_FILE = "said.jsonl"
_MOST = 500  # characters of a text that are compared


def is_first_time(folder: Path, text: str) -> bool:
    """Return whether the trial of that folder has not said this yet, and note that it has.

    A folder that cannot be written has it said once more.
    """
    path, key = folder / _FILE, text[:_MOST]
    if any(document.get("text") == key for document in Follower(path).new()):
        return False
    with contextlib.suppress(OSError):
        append_lines(path, [{"text": key}])
    return True
