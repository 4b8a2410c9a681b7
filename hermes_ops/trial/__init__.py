"""The trial runtime, and what a script may call: `report`, `checkpoint_dir`.

Standard library only: this package is loaded in the user's interpreter, whatever that holds. What
starts with every segment imports little: no dataclasses, for instance, which import `inspect`; and
what the user's interpreter loads before the script (this module and the hook) next to nothing: not
even `pathlib` and `typing`, which would double the time that Python takes to start.
"""

from __future__ import annotations

import math
import os

TYPE_CHECKING = False  # checkers of types know this name
if TYPE_CHECKING:
    from pathlib import Path

    from hermes_ops.trial.metrics import MetricsFile

__all__ = ["checkpoint_dir", "report"]

_files: dict[str, MetricsFile] = {}  # each knows how far it has read its file


def report(step: int, **metrics: float) -> None:
    """Report metrics of a completed step, 0 before the first; outside Hermes it does nothing.

    A (name, step) that has been reported before, by an earlier segment too, is not stored again.
    Of several workers only the first one (rank 0) reports.
    NaN and infinities are stored; as the objective they end the trial as failed. With the objective
    at a step beyond `budget.max_epochs` nothing is stored, and the trial is ended as finished.

    Raises: ValueError if `step` is not a whole number from 0 or a value is not a number.
    """
    if isinstance(step, bool) or int(step) != step or step < 0:
        raise ValueError(f"step must be a whole number from 0, not {step!r}")
    values = {name: float(value) for name, value in metrics.items()}
    path = os.environ.get("HERMES_METRICS_FILE")
    if not path or not values or os.environ.get("HERMES_RANK", "0") != "0":
        return
    from pathlib import Path

    from hermes_ops.trial.event_channel import announce, bad_values, send
    from hermes_ops.trial.metrics import Metric, MetricsFile

    announce(values)
    limit = os.environ.get("HERMES_MAX_EPOCHS")
    if limit and step > int(limit) and os.environ.get("HERMES_OBJECTIVE") in values:
        send({"kind": "beyond", "step": int(step)})
        return
    file = _files.setdefault(path, MetricsFile(Path(path)))
    file.append(Metric(n, v, int(step)) for n, v in values.items())
    bad_values({n: v for n, v in values.items() if not math.isfinite(v)}, int(step))


def checkpoint_dir() -> Path | None:
    """Return the script's folder for checkpoints, kept as long as the trial; None outside Hermes.

    Write to a hidden or *.tmp name there, then rename: what is complete counts as a checkpoint.
    """
    from pathlib import Path

    path = os.environ.get("HERMES_CHECKPOINT_DIR")
    return Path(path) if path else None
