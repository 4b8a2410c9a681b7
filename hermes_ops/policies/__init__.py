"""The scheduling policies: one file each, one line each in POLICIES."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hermes_ops.core.model import Policy
from hermes_ops.errors import ConfigError, Problem
from hermes_ops.policies.asha import Asha
from hermes_ops.policies.fair import Fair
from hermes_ops.policies.fifo import Fifo
from hermes_ops.policies.fifo_backfill import FifoBackfill
from hermes_ops.policies.flowcon import FlowCon
from hermes_ops.policies.frontrunner import Frontrunner
from hermes_ops.policies.gandiva import Gandiva
from hermes_ops.policies.hermes import Hermes
from hermes_ops.policies.hyperband import Hyperband
from hermes_ops.policies.hypersched import HyperSched
from hermes_ops.policies.median import Median
from hermes_ops.policies.pop import Pop
from hermes_ops.policies.qssf import Qssf
from hermes_ops.policies.slaq import Slaq
from hermes_ops.policies.srsf import Srsf
from hermes_ops.policies.srtf import Srtf
from hermes_ops.policies.successive_halving import SuccessiveHalving
from hermes_ops.policies.two_d_gittins import TwoDGittins
from hermes_ops.policies.two_d_las import TwoDLas
from hermes_ops.policies.yarn_cs import YarnCs

POLICIES: dict[str, Callable[..., Policy[Any]]] = {
    "2d-gittins": TwoDGittins,
    "2d-las": TwoDLas,
    "asha": Asha,
    "fair": Fair,
    "fifo": Fifo,
    "fifo-backfill": FifoBackfill,
    "flowcon": FlowCon,
    "frontrunner": Frontrunner,
    "gandiva": Gandiva,
    "hermes": Hermes,
    "hyperband": Hyperband,
    "hypersched": HyperSched,
    "median": Median,
    "pop": Pop,
    "qssf": Qssf,
    "slaq": Slaq,
    "srsf": Srsf,
    "srtf": Srtf,
    "successive-halving": SuccessiveHalving,
    "yarn-cs": YarnCs,
}

GIVEN = ("oracle", "prior")  # handed over by a driver, never by a user


def make_policy(
    name: str, parameters: Mapping[str, object], given: Mapping[str, object] | None = None
) -> Policy[Any]:
    """The policy of that name with these parameters, without guards.

    `given` is what a driver can hand over: an `oracle` (a simulation only), a `prior` of earlier
    sweeps, `sizes_gpu_s` of past jobs; a policy takes those that it has a field for. What a user
    may set as well is taken from the parameters if it is there.

    Raises ConfigError for an unknown name, an unknown parameter, a value that is not allowed, or
    an oracle that the policy needs and does not get.
    """
    if name not in POLICIES:
        known = ", ".join(sorted(POLICIES))
        problem = Problem("policy", repr(name), known, "name one of these")
        raise ConfigError("the pool's policy", (problem,))
    fields = _parameters(POLICIES[name])
    allowed = tuple(field for field in fields if field not in GIVEN)
    fitting = {key: value for key, value in (given or {}).items() if key in fields}
    handed = {key: value for key, value in fitting.items() if key not in parameters}
    if needs_oracle(name) and "oracle" not in handed:
        raise _only_simulated(name, "it has to know how long each job will still run")
    unknown = [p for p in parameters if p not in allowed]
    if unknown:
        names = ", ".join(allowed) or "no parameter at all"
        problems = tuple(
            Problem(f"policy.{name}.{p}", "an unknown parameter", names, "remove or rename it")
            for p in unknown
        )
        raise ConfigError("the pool's policy", problems)
    try:
        return POLICIES[name](**parameters, **handed)
    except (TypeError, ValueError) as error:
        raise ConfigError("the pool's policy", _refused(name, parameters, handed, error)) from error


def _refused(
    name: str, parameters: Mapping[str, object], handed: Mapping[str, object], error: Exception
) -> tuple[Problem, ...]:
    """Name each parameter that is refused by itself; all of them where only their sum is."""
    alone = {p: _error_of(name, {p: value}, handed) for p, value in parameters.items()}
    found = {p: reason for p, reason in alone.items() if reason is not None}
    if not found:
        words = ", ".join(f"{p}={value!r}" for p, value in parameters.items())
        return (Problem(f"policy.{name}", words, str(error), "correct the values"),)
    return tuple(
        Problem(f"policy.{name}.{p}", repr(parameters[p]), reason, "correct the value")
        for p, reason in found.items()
    )


def _error_of(
    name: str, parameters: Mapping[str, object], handed: Mapping[str, object]
) -> str | None:
    """What a policy says against these parameters; None if nothing."""
    from inspect import signature

    try:
        POLICIES[name](**parameters, **handed)
    except ValueError as error:
        return str(error)
    except TypeError:  # Python's words, which tell a user nothing
        (parameter,) = parameters
        default = signature(POLICIES[name]).parameters[parameter].default
        return f"a value like the default, {default!r}"
    return None


def needs_oracle(name: str) -> bool:
    """True for a policy that knows the future: it runs in a simulation only."""
    return "oracle" in _parameters(POLICIES[name])


def needs_shares(name: str) -> bool:
    """True for a policy that gives fractions of GPUs: it runs in a simulation only."""
    return bool(getattr(POLICIES[name], "shares", False))


def takes_prior(name: str) -> bool:
    """True for a policy that has a use for what earlier sweeps have shown."""
    return "prior" in _parameters(POLICIES[name])


def check_live(name: str) -> None:
    """Raise ConfigError, with the reason, for a policy that runs in a simulation only."""
    if name in POLICIES and needs_oracle(name):
        raise _only_simulated(name, "it has to know how long each job will still run")
    if name in POLICIES and needs_shares(name):
        raise _only_simulated(name, "it gives fractions of a GPU to several trials at a time")


def live_policies() -> tuple[str, ...]:
    """The names of those that `check_live` lets pass, sorted."""
    return tuple(n for n in sorted(POLICIES) if not (needs_oracle(n) or needs_shares(n)))


def _only_simulated(name: str, reason: str) -> ConfigError:
    live = ", ".join(live_policies())
    fact = f"{name!r}, which runs in a simulation only: {reason}"
    problem = Problem("policy", fact, live, "name one of these, or use `hermes simulate`")
    return ConfigError("the pool's policy", (problem,))


def _parameters(factory: Callable[..., Policy[Any]]) -> tuple[str, ...]:
    from inspect import signature

    return tuple(signature(factory).parameters)
