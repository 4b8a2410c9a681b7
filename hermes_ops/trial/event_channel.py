"""Events from inside the script to its supervisor: lines in the trial's events file."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from hermes_ops.trial.files import append_lines
from hermes_ops.trial.group import is_follower

RUN_VARIABLE, URI_VARIABLE = "HERMES_MLFLOW_RUN_ID", "HERMES_MLFLOW_URI"
"""The trial's run and its server; MLflow and scripts change the variables that MLflow reads."""

announced: set[str] = set()
"""The metrics that this process has reported, by `report()` or the Keras hook."""


def send(event: Mapping[str, Any]) -> None:
    """Tell the supervisor; outside Hermes it does nothing. OSError if the disk is full.

    Of a trial in several processes rank 0 alone speaks.
    """
    directory = os.environ.get("HERMES_TRIAL_DIR")
    if directory and not is_follower():
        append_lines(Path(directory) / "events.jsonl", [dict(event, time_s=time.time())])


def announce(names: Iterable[str]) -> None:
    """Tell the supervisor once of each metric that it will be reported by this process."""
    fresh = sorted(set(names) - announced)
    if fresh:
        send({"kind": "report", "names": fresh})
        announced.update(fresh)


def bad_values(values: Mapping[str, float], step: int) -> None:
    """Tell of NaN and infinite values, whether or not they are new in the metrics file."""
    for name, value in values.items():
        word = "NaN" if math.isnan(value) else "infinite"
        send({"kind": "bad_value", "name": name, "word": word, "step": step})
