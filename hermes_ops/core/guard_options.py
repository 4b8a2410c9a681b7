"""The options of what stands around a pool's policy; a user writes them among the policy's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from math import isfinite
from typing import Any, TypeVar

from hermes_ops.core.guards import QUANTA, guarded
from hermes_ops.core.learning import PER_GPU
from hermes_ops.core.model import Policy
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
    """`k`, `quanta` and `default_switch_s` of the two guards; `open`: of `OpenForLearning`."""

    k: float = 3.0
    quanta: int = QUANTA
    open: int = PER_GPU
    default_switch_s: float = 5.0

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> GuardOptions:
        """Those whose names begin with guard_; ConfigError names each one that cannot be.

        Without a guard_open the `threshold` of Hermes' queues is the bound, should there be one.
        """
        given = {k.removeprefix(PREFIX): v for k, v in options.items() if k.startswith(PREFIX)}
        problems = tuple(_problem(name, value) for name, value in given.items()
                         if not _is_allowed(name, value))  # fmt: skip
        if problems:
            raise ConfigError(SOURCE, problems)
        threshold = options.get("threshold")
        if _is_allowed("open", threshold):  # any other is refused as the policy's own
            given = {"open": threshold, **given}
        types = {"k": float, "quanta": int, "open": int, "default_switch_s": float}
        return cls(**{name: types[name](value) for name, value in given.items()})

    def around(self, policy: Policy[M]) -> Policy[M]:
        """The policy within both guards."""
        return guarded(policy, self.k, self.quanta, self.default_switch_s)


def without_guards(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that are the policy's own."""
    return {name: value for name, value in options.items() if not name.startswith(PREFIX)}


def _is_allowed(name: str, value: object) -> bool:
    if name not in ALLOWED or isinstance(value, bool) or not isinstance(value, int | float):
        return False
    least, words = ALLOWED[name]
    is_whole = "whole" not in words or value == value // 1
    return isfinite(value) and value >= least and is_whole


def _problem(name: str, value: object) -> Problem:
    where = f"{PREFIX}{name}"
    found = f"{where}={value!r}"
    if name in ALLOWED:
        return Problem(where, found, ALLOWED[name][1], "correct or remove it")
    meant = get_close_matches(name, ALLOWED, n=1)
    fix = f"did you mean {PREFIX}{meant[0]}?" if meant else "remove it"
    allowed = ", ".join(f"{PREFIX}{known}" for known in ALLOWED)
    return Problem(where, f"{found}, an unknown option", allowed, fix)
