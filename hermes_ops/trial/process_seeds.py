"""Seeds for random numbers that a script leaves unseeded: the same in each segment of the trial.

Without Hermes such numbers come from the operating system's entropy, and differ in each process. So
each process that the script starts gets seeds of its own.
"""
# ruff: noqa: ANN401 - the modules of other packages have no types here

from __future__ import annotations

import functools
import itertools
import os
import sys
from typing import Any

from hermes_ops.trial.files import trial_seeds
from hermes_ops.trial.group import RANK_VARIABLE, rank_seed

_KEY = "hermes_process"
_GENERATORS = 0x9E3779B9  # sets the entropy of generators apart from NumPy's global seed


class _Place:
    """The path of this process among those that the script starts; empty for the script itself.

    Each part is the module that started the process and its number: `.multiprocessing.spawn.2`.
    """

    name = ""


def seed_random(random: Any) -> None:
    """Seed Python's global random numbers."""
    random.seed(_process_seed("python"))


def seed_numpy(numpy: Any) -> None:
    """Seed NumPy's global random numbers, and generators that are created without a seed.

    `numpy` itself may not show its submodules yet: wandb imports it in a module of its own kind.
    """
    import importlib

    importlib.import_module(f"{numpy.__name__}.random").seed(_process_seed("numpy"))
    bits = sys.modules.get("numpy.random.bit_generator")
    if hasattr(bits, "randbits"):
        _seed_entropy(bits)


def _seed_entropy(bits: Any) -> None:
    """Replace the entropy of NumPy's SeedSequence; forked processes keep the system's."""
    import random

    pid, seeded = os.getpid(), random.Random(_process_seed("numpy") ^ _GENERATORS)  # noqa: S311
    original = getattr(bits.randbits, "__wrapped__", bits.randbits)

    @functools.wraps(original)
    def randbits(count: int) -> Any:
        return seeded.getrandbits(count) if os.getpid() == pid else original(count)

    bits.randbits = randbits


def _process_seed(kind: str) -> int:
    """Return the trial's seed of that kind for this process: each process has another one."""
    rank = os.environ.get(RANK_VARIABLE, "0")
    seed = trial_seeds()[kind]
    if rank.isdecimal():
        seed = rank_seed(seed, int(rank))
    if not _Place.name:
        return seed
    import zlib

    return (seed ^ zlib.crc32(_Place.name.encode())) % 2**31


# -- processes that the script starts: `spawn` and `forkserver`, of joblib (loky) too -------------


def patch_spawn(spawn: Any) -> None:
    """Give a path to each process that a module such as `multiprocessing.spawn` starts."""
    describe, prepare = spawn.get_preparation_data, spawn.prepare
    numbers = itertools.count(1)

    @functools.wraps(describe)
    def get_preparation_data(*args: Any, **kwargs: Any) -> Any:
        data = describe(*args, **kwargs)
        data[_KEY] = f"{_Place.name}.{spawn.__name__}.{next(numbers)}"
        return data

    @functools.wraps(prepare)
    def prepare_process(data: Any, *args: Any, **kwargs: Any) -> Any:
        _begin_process(data.get(_KEY, ""))
        return prepare(data, *args, **kwargs)

    spawn.get_preparation_data, spawn.prepare = get_preparation_data, prepare_process


def _begin_process(place: str) -> None:
    """Seed this process by its path, before the script's module is imported."""
    _Place.name = place
    for name, seed in (("random", seed_random), ("numpy", seed_numpy)):
        if name in sys.modules:
            seed(sys.modules[name])
