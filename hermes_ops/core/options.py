"""Options of policies as people write them: NAME=VALUE."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable

from hermes_ops.errors import ConfigError, Problem

Scalar = str | int | float | bool | None
OptionValue = Scalar | tuple[Scalar, ...] | dict[str, Scalar]

_PARTING = re.compile(r",(?![^\[{]*[\]}])")  # a comma that stands in no list and no object


def parse_options(pairs: Iterable[str] | None) -> dict[str, OptionValue]:
    """Turn `["k=3", "mode=fast", "limits=[1, 2]"]` into `{"k": 3, "mode": "fast", ...}`.

    A value is JSON; a list becomes a tuple. True and False in any case, `.5` and `inf` are what
    they look like, and anything else is text. None: no option was given. ConfigError for what is
    no pair.
    """
    parsed: dict[str, OptionValue] = {}
    for pair in pairs or ():
        name, separator, text = pair.partition("=")
        if not separator or not name:
            problem = Problem("an option", repr(pair), "NAME=VALUE", "write NAME=VALUE")
            raise ConfigError("the policy's options", (problem,))
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
    if text.lower() in {"true", "false"}:
        return text.lower() == "true"
    try:
        return float(text)
    except ValueError:
        return text
