"""The trial's own random seeds: drawn once, the same in each of its segments."""

from __future__ import annotations

import os
from pathlib import Path

from hermes_ops.trial.files import read_json, write_json

_NAMES = ("python", "numpy", "shuffle")


def entropy(folder: Path | None = None) -> dict[str, int]:
    """The seeds, each below 2^31, kept in the trial's folder: $HERMES_TRIAL_DIR by default."""
    path = (folder or Path(os.environ["HERMES_TRIAL_DIR"])) / "entropy.json"
    seeds = read_json(path)
    if seeds is None or set(seeds) != set(_NAMES):
        seeds = {name: int.from_bytes(os.urandom(4), "little") >> 1 for name in _NAMES}
        write_json(path, seeds, durable=True)
    return seeds
