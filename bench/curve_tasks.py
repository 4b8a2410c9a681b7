"""The recorded tasks on which `frontrunner` is learnt, and those that only confirm.

The split is by task, before any result: of each family (the part of the name before the first
underscore) the third with the smallest SHA-256 digests of SALT and the name validates, the others
train. Tasks that were known before the split are in KNOWN and belong to neither side.
"""

from __future__ import annotations

import os
from hashlib import sha256
from itertools import groupby
from math import ceil
from pathlib import Path

from hermes_ops.errors import ConfigError, Problem

SALT = "frontrunner split/"
SHARE = 3
KNOWN = ("lcbench_fashion_mnist", "lcbench_adult", "lcbench_sylvine", "nb301")


def folder() -> Path:
    """Return the folder of the tasks, which HERMES_CURVE_TASKS names: they are not shipped."""
    named = os.environ.get("HERMES_CURVE_TASKS")
    if not named or not Path(named).is_dir():
        fact = "nothing" if not named else f"{named}, which is no folder"
        problem = Problem("HERMES_CURVE_TASKS", fact, "a folder of .npz files", "set the variable")
        raise ConfigError("the recorded tasks", (problem,))
    return Path(named)


def tasks() -> tuple[str, ...]:
    """Return the names of all tasks there, but for the known ones."""
    return tuple(sorted(p.stem for p in folder().glob("*.npz") if p.stem not in KNOWN))


def split(names: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the tasks that train and those that validate, each sorted."""
    validation: list[str] = []
    for _, members in groupby(sorted(names), key=lambda name: name.partition("_")[0]):
        ranked = sorted(members, key=lambda name: sha256(f"{SALT}{name}".encode()).hexdigest())
        validation += ranked[: ceil(len(ranked) / SHARE)]
    training = sorted(set(names) - set(validation))
    return tuple(training), tuple(sorted(validation))
