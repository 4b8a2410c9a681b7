"""A trial's lease and stop flag once more, as files beside its folder, where its pod sees neither.

A task on the same machine, or on the same volume, learns of them before Airflow's store has
answered. The triggerer, which may hold the trial's pod, cannot reach that store at all. A lease
from here lets a process be made ready, no more: it begins once Airflow's record says the same.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import TypeVar

from hermes_ops.airflow.folders import TrialFolder
from hermes_ops.airflow.records import Lease, StopFlag, decode, encode
from hermes_ops.errors import HermesError

R = TypeVar("R", Lease, StopFlag)


def tell(folder: TrialFolder, flag: StopFlag, *, needed: bool) -> bool:
    """Write the stop flag and say whether it is there; HermesError if not, though it is needed."""
    try:
        _write(folder.stop_flag, flag, mode=0o644)
    except OSError as error:
        if needed:
            raise HermesError(f"{folder.stop_flag} cannot be written: {error.strerror}") from error
        return False
    return True


def told(folder: TrialFolder, epoch: int) -> StopFlag | None:
    """The stop flag of that lease that lies beside the trial's folder."""
    flag = _read(StopFlag, folder.stop_flag)
    return flag if flag is not None and flag.epoch == epoch else None


def offer(folder: TrialFolder, lease: Lease) -> None:
    """Write the lease, if that can be done; only the owner may read it, as it holds variables."""
    with contextlib.suppress(OSError):
        _write(folder.lease, lease, mode=0o600)


def offered(folder: TrialFolder) -> Lease | None:
    """The lease that lies beside the trial's folder; it may have been revoked or used up since."""
    return _read(Lease, folder.lease)


def _write(path: Path, record: Lease | StopFlag, *, mode: int) -> None:
    fresh = path.with_suffix(".new")
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(fresh, "w", opener=lambda name, flags: os.open(name, flags, mode)) as stream:
        json.dump(encode(record), stream)
    os.replace(fresh, path)


def _read(kind: type[R], path: Path) -> R | None:
    try:
        return decode(kind, json.loads(path.read_text()))
    except (OSError, ValueError):
        return None
