"""The scheduling policies: one file each, one line each in POLICIES."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hermes_ops.core.model import Policy
from hermes_ops.errors import ConfigError, Problem
from hermes_ops.policies.fifo import Fifo
from hermes_ops.policies.hermes import Hermes

POLICIES: dict[str, Callable[..., Policy[Any]]] = {
    "fifo": Fifo,
    "hermes": Hermes,
}


def make_policy(name: str, parameters: Mapping[str, object]) -> Policy[Any]:
    """The policy of that name with these parameters, without guards.

    Raises ConfigError for an unknown name, an unknown parameter or a value that is not allowed.
    """
    if name not in POLICIES:
        known = ", ".join(sorted(POLICIES))
        problem = Problem("policy", repr(name), known, "name one of these")
        raise ConfigError("the pool's policy", (problem,))
    allowed = _parameters(POLICIES[name])
    unknown = [p for p in parameters if p not in allowed]
    if unknown:
        names = ", ".join(allowed) or "no parameter at all"
        problems = tuple(
            Problem(f"policy.{name}.{p}", "an unknown parameter", names, "remove or rename it")
            for p in unknown
        )
        raise ConfigError("the pool's policy", problems)
    try:
        return POLICIES[name](**parameters)
    except (TypeError, ValueError) as error:
        problem = Problem(f"policy.{name}", repr(dict(parameters)), str(error), "correct the value")
        raise ConfigError("the pool's policy", (problem,)) from error


def _parameters(factory: Callable[..., Policy[Any]]) -> tuple[str, ...]:
    from inspect import signature

    return tuple(signature(factory).parameters)
