"""The stop flag of a trial whose pod the triggerer holds: a file beside the trial's folder.

The triggerer cannot reach Airflow's task state store.
"""

from __future__ import annotations

import json
import os

from hermes_ops.airflow.folders import TrialFolder
from hermes_ops.airflow.records import StopFlag, decode, encode
from hermes_ops.errors import HermesError


def tell(folder: TrialFolder, flag: StopFlag, *, needed: bool) -> None:
    """Write the stop flag for the triggerer; HermesError if that fails and is needed."""
    fresh = folder.stop_flag.with_suffix(".new")
    try:
        folder.stop_flag.parent.mkdir(parents=True, exist_ok=True)
        fresh.write_text(json.dumps(encode(flag)))
        os.replace(fresh, folder.stop_flag)
    except OSError as error:
        if not needed:
            return
        raise HermesError(f"{folder.stop_flag} cannot be written: {error.strerror}") from error


def told(folder: TrialFolder, epoch: int) -> StopFlag | None:
    """The stop flag of that lease that lies beside the trial's folder."""
    try:
        flag = decode(StopFlag, json.loads(folder.stop_flag.read_text()))
    except (OSError, ValueError):
        return None
    return flag if flag is not None and flag.epoch == epoch else None
