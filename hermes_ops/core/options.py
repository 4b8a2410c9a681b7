"""Options of policies and of the guards around them as people write them: NAME=VALUE."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from math import isfinite
from typing import Any, TypeVar

from hermes_ops.core.guards import QUANTA, guarded
from hermes_ops.core.model import Policy
from hermes_ops.core.sweep_limits import PER_GPU
from hermes_ops.errors import ConfigError, Problem

Scalar = str | int | float | bool | None
OptionValue = Scalar | tuple[Scalar, ...] | dict[str, Scalar]

_PARTING = re.compile(r",(?![^\[{]*[\]}])")  # a comma that stands in no list and no object


_BOOLEANS = {"true": True, "yes": True, "false": False, "no": False}

M = TypeVar("M")

_GUARD_PREFIX = "guard_"
_GUARD_SOURCE = "a guard's option"

GUARD_VALUES = {
    "k": (0, "a number from 0"),
    "quanta": (0, "a whole number from 0"),
    "open": (1, "a whole number from 1"),
    "default_switch_s": (0, "seconds, from 0"),
}
"""The least allowed value of each option, and how a message describes it."""


def parse_options(pairs: Iterable[str] | None) -> dict[str, OptionValue]:
    """Turn `["k=3", "mode=fast", "limits=[1, 2]"]` into `{"k": 3, "mode": "fast", ...}`.

    A value is JSON; a list becomes a tuple. `true`, `false`, `yes` and `no` in any case are
    booleans, `.5` and `inf` numbers, and anything else is text. None means that no option was
    given. Raise ConfigError for a text that is not NAME=VALUE.
    """
    parsed: dict[str, OptionValue] = {}
    for pair in pairs or ():
        name, separator, text = pair.partition("=")
        if not separator or not name:
            problem = Problem("an option", repr(pair), "NAME=VALUE", "write NAME=VALUE")
            raise ConfigError("an option of the policy", (problem,))
        parsed[name] = _value(text)
    return parsed


def split_options(text: str) -> list[str]:
    """Part `k=3,limits=[1,2]` into its pairs; a comma inside a list or an object parts nothing."""
    return [pair.strip() for pair in _PARTING.split(text) if pair.strip()]


def _value(text: str) -> OptionValue:
    try:
        value = json.loads(text)
    except ValueError:
        return _loose(text)
    return tuple(value) if isinstance(value, list) else value


def _loose(text: str) -> OptionValue:
    if text.lower() in _BOOLEANS:
        return _BOOLEANS[text.lower()]
    try:
        return float(text)
    except ValueError:
        return text


@dataclass(frozen=True, slots=True)
class GuardOptions:
    """`k`, `quanta` and `default_switch_s` of the two guards; `open_per_gpu` of
    `MaxUnreported`, which a user writes as `guard_open`."""

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
            name.removeprefix(_GUARD_PREFIX): value
            for name, value in options.items()
            if name.startswith(_GUARD_PREFIX)
        }
        problems = tuple(_guard_problem(name, value) for name, value in guard_options.items()
                         if not _is_allowed(name, value))  # fmt: skip
        if problems:
            raise ConfigError(_GUARD_SOURCE, problems)
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
    return {name: value for name, value in options.items() if not name.startswith(_GUARD_PREFIX)}


def _is_allowed(name: str, value: object) -> bool:
    if name not in GUARD_VALUES or isinstance(value, bool) or not isinstance(value, int | float):
        return False
    least, words = GUARD_VALUES[name]
    is_whole = "whole" not in words or value == value // 1
    return isfinite(value) and value >= least and is_whole


def _guard_problem(name: str, value: object) -> Problem:
    where = f"{_GUARD_PREFIX}{name}"
    written = f"{where}={value!r}"
    if name in GUARD_VALUES:
        return Problem(where, written, GUARD_VALUES[name][1], "correct or remove it")
    similar = get_close_matches(name, GUARD_VALUES, n=1)
    fix = f"did you mean {_GUARD_PREFIX}{similar[0]}?" if similar else "remove it"
    allowed = ", ".join(f"{_GUARD_PREFIX}{option}" for option in GUARD_VALUES)
    return Problem(where, f"{written}, an unknown option", allowed, fix)
