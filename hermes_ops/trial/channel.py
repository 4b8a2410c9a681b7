"""From inside the script to its supervisor: lines in the trial's events file."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hermes_ops.trial.files import append_lines


def send(event: Mapping[str, Any]) -> None:
    """Tell the supervisor; outside Hermes it does nothing. OSError if the disk is full."""
    directory = os.environ.get("HERMES_TRIAL_DIR")
    if directory:
        append_lines(Path(directory) / "events.jsonl", [dict(event, time_s=time.time())])


def bad_values(values: Mapping[str, float], step: int) -> None:
    """Tell of NaN and infinite values, whether or not they are new in the metrics file."""
    for name, value in values.items():
        word = "NaN" if math.isnan(value) else "infinite"
        send({"kind": "bad_value", "name": name, "word": word, "step": step})
