"""The options of the guards around a pool's policy; a user writes them among the policy's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from math import isfinite
from typing import Any, TypeVar

from hermes_ops.core.guards import QUANTA, guarded
from hermes_ops.core.model import Policy
from hermes_ops.core.sweep_limits import PER_GPU
from hermes_ops.errors import ConfigError, Problem

M = TypeVar("M")

PREFIX = "guard_"
SOURCE = "a guard's option"

ALLOWED = {
    "k": (0, "a number from 0"),
    "quanta": (0, "a whole number from 0"),
    "open": (1, "a whole number from 1"),
    "default_switch_s": (0, "seconds, from 0"),
}
"""Of each option the least value, and what it is in words."""


@dataclass(frozen=True, slots=True)
class GuardOptions:
    """`k`, `quanta` and `default_switch_s` of the two guards; `open_per_gpu` of
    `OpenForLearning`, which a user writes as `guard_open`."""

    k: float = 3.0
    quanta: int = QUANTA
    open_per_gpu: int = PER_GPU
    default_switch_s: float = 5.0

    @classmethod
    def parse(cls, options: Mapping[str, Any]) -> GuardOptions:
        """Parse the options that begin with guard_; ConfigError names each invalid one.

        Without a guard_open the `threshold` of Hermes' queues is the bound, if it is given.
        """
        guard_options = {
            name.removeprefix(PREFIX): value
            for name, value in options.items()
            if name.startswith(PREFIX)
        }
        problems = tuple(_problem(name, value) for name, value in guard_options.items()
                         if not _is_allowed(name, value))  # fmt: skip
        if problems:
            raise ConfigError(SOURCE, problems)
        threshold = options.get("threshold")
        if _is_allowed("open", threshold):  # any other is refused as the policy's own
            guard_options = {"open": threshold, **guard_options}
        fields = {
            "k": ("k", float),
            "quanta": ("quanta", int),
            "open": ("open_per_gpu", int),
            "default_switch_s": ("default_switch_s", float),
        }
        named = ((fields[name], value) for name, value in guard_options.items())
        return cls(**{field: as_type(value) for (field, as_type), value in named})

    def around(self, policy: Policy[M]) -> Policy[M]:
        """Wrap the policy in both guards."""
        return guarded(policy, self.k, self.quanta, self.default_switch_s)


def without_guards(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that are the policy's own."""
    return {name: value for name, value in options.items() if not name.startswith(PREFIX)}


def _is_allowed(name: str, value: object) -> bool:
    if name not in ALLOWED or isinstance(value, bool) or not isinstance(value, int | float):
        return False
    least, words = ALLOWED[name]
    is_whole = "whole" not in words or value == value // 1
    return isfinite(value) and value >= least and is_whole


def _problem(name: str, value: object) -> Problem:
    where = f"{PREFIX}{name}"
    written = f"{where}={value!r}"
    if name in ALLOWED:
        return Problem(where, written, ALLOWED[name][1], "correct or remove it")
    similar = get_close_matches(name, ALLOWED, n=1)
    fix = f"did you mean {PREFIX}{similar[0]}?" if similar else "remove it"
    allowed = ", ".join(f"{PREFIX}{option}" for option in ALLOWED)
    return Problem(where, f"{written}, an unknown option", allowed, fix)
