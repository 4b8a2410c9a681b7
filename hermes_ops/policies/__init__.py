"""The scheduling policies: a file or a package each, and the table POLICIES that names them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from hermes_ops.core.model import Policy
from hermes_ops.errors import ConfigError, Problem
from hermes_ops.policies.afs import Afs
from hermes_ops.policies.asha import Asha
from hermes_ops.policies.doubling import Doubling
from hermes_ops.policies.elastic_2d_las import ElasticTwoDLas
from hermes_ops.policies.elastic_fifo import ElasticFifo
from hermes_ops.policies.elastic_frontrunner import ElasticFrontrunner
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
from hermes_ops.policies.ones import Ones
from hermes_ops.policies.optimus import Optimus
from hermes_ops.policies.pollux import Pollux
from hermes_ops.policies.pop import Pop
from hermes_ops.policies.qssf import Qssf
from hermes_ops.policies.saxena import Saxena
from hermes_ops.policies.slaq import Slaq
from hermes_ops.policies.slaq_sized import SlaqSized
from hermes_ops.policies.srsf import Srsf
from hermes_ops.policies.srtf import Srtf
from hermes_ops.policies.successive_halving import SuccessiveHalving
from hermes_ops.policies.themis import Themis
from hermes_ops.policies.throughput import Throughput
from hermes_ops.policies.two_d_gittins import TwoDGittins
from hermes_ops.policies.two_d_las import TwoDLas
from hermes_ops.policies.yarn_cs import YarnCs
from hermes_ops.registry import FactoryRegistry

_BUILTIN: dict[str, Callable[..., Policy[Any]]] = {
    "2d-gittins": TwoDGittins,
    "2d-las": TwoDLas,
    "afs": Afs,
    "asha": Asha,
    "doubling": Doubling,
    "elastic-2d-las": ElasticTwoDLas,
    "elastic-fifo": ElasticFifo,
    "elastic-frontrunner": ElasticFrontrunner,
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
    "ones": Ones,
    "optimus": Optimus,
    "pollux": Pollux,
    "pop": Pop,
    "qssf": Qssf,
    "saxena": Saxena,
    "slaq": Slaq,
    "slaq-sized": SlaqSized,
    "srsf": Srsf,
    "srtf": Srtf,
    "successive-halving": SuccessiveHalving,
    "throughput": Throughput,
    "themis": Themis,
    "yarn-cs": YarnCs,
}

POLICIES: FactoryRegistry[Callable[..., Policy[Any]]] = FactoryRegistry(
    "hermes_ops.policies", _BUILTIN
)

GIVEN = ("oracle", "prior")  # provided by a driver, never by a user


def make_policy(
    name: str, parameters: Mapping[str, object], given: Mapping[str, object] | None = None
) -> Policy[Any]:
    """Create the policy of that name with these parameters, without guards.

    `given` is what a driver can provide: an `oracle` (a simulation only), a `prior` of earlier
    sweeps, `sizes_gpu_s` of past jobs; a policy gets those that it has a field for. A parameter
    that the user has set takes precedence.

    Raises ConfigError for an unknown name, an unknown parameter, a value that is not allowed, or
    an oracle that the policy needs and does not get.
    """
    if name not in POLICIES:
        raise _unknown_policy(name, sorted(POLICIES))
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
    mistyped = tuple(_non_boolean_values(name, parameters))
    if mistyped:
        raise ConfigError("the pool's policy", mistyped)
    try:
        return POLICIES[name](**parameters, **handed)
    except (TypeError, ValueError) as error:
        raise ConfigError("the pool's policy", _refused(name, parameters, handed, error)) from error


def _non_boolean_values(name: str, parameters: Mapping[str, object]) -> Iterator[Problem]:
    """Yield a problem for each boolean parameter that has a value of another kind."""
    from inspect import signature

    declared = signature(POLICIES[name]).parameters
    for p, value in parameters.items():
        if isinstance(declared[p].default, bool) and not isinstance(value, bool):
            yield Problem(f"policy.{name}.{p}", repr(value), "true or false", "correct the value")


def _refused(
    name: str, parameters: Mapping[str, object], handed: Mapping[str, object], error: Exception
) -> tuple[Problem, ...]:
    """Name each parameter that is invalid by itself; all of them if only the combination is."""
    alone = {p: _error_of(name, {p: value}, handed) for p, value in parameters.items()}
    invalid = {p: reason for p, reason in alone.items() if reason is not None}
    if not invalid:
        words = ", ".join(f"{p}={value!r}" for p, value in parameters.items())
        return (Problem(f"policy.{name}", words, str(error), "correct the values"),)
    return tuple(
        Problem(f"policy.{name}.{p}", repr(parameters[p]), reason, "correct the value")
        for p, reason in invalid.items()
    )


def _error_of(
    name: str, parameters: Mapping[str, object], handed: Mapping[str, object]
) -> str | None:
    """Return the error of a policy with these parameters; None if there is none."""
    from inspect import signature

    try:
        POLICIES[name](**parameters, **handed)
    except ValueError as error:
        return str(error)
    except TypeError:  # Python's message tells a user nothing
        (parameter,) = parameters
        default = signature(POLICIES[name]).parameters[parameter].default
        return f"a value like the default, {default!r}"
    return None


def needs_oracle(name: str) -> bool:
    """Return True for a policy that has to know the future: it runs in a simulation only.

    A policy whose `oracle` has a default does without one live.
    """
    from inspect import Parameter, signature

    oracle = signature(POLICIES[name]).parameters.get("oracle")
    return oracle is not None and oracle.default is Parameter.empty


def needs_shares(name: str) -> bool:
    """Return True for a policy that gives fractions of GPUs: it runs in a simulation only."""
    return bool(getattr(POLICIES[name], "shares", False))


def sizes_jobs(name: str) -> bool:
    """Return True for a policy that chooses how many GPUs a job gets; False: unknown."""
    return name in POLICIES and bool(getattr(POLICIES[name], "sizes", False))


def compares_trials(name: str) -> bool:
    """Return True for a policy that ranks a trial among the trials of its sweep; False: unknown."""
    return name in POLICIES and bool(getattr(POLICIES[name], "compares", False))


def takes_prior(name: str) -> bool:
    """Return True for a policy that learns from the trials of earlier sweeps."""
    return "prior" in _parameters(POLICIES[name])


def check_live(name: str) -> None:
    """Raise ConfigError for a policy that is not there, or runs in a simulation only."""
    if name not in POLICIES:
        raise _unknown_policy(name, live_policies())
    if needs_oracle(name):
        raise _only_simulated(name, "it has to know how long each job will still run")
    if needs_shares(name):
        raise _only_simulated(name, "it gives fractions of a GPU to several trials at a time")


def live_policies() -> tuple[str, ...]:
    """Return the names of those that `check_live` lets pass, sorted.

    A policy of an installed package that cannot be imported is left out.
    """
    return tuple(name for name in sorted(POLICIES) if _runs_live(name))


def _runs_live(name: str) -> bool:
    try:
        return not (needs_oracle(name) or needs_shares(name))
    except ConfigError:
        return False


def _unknown_policy(name: str, allowed: Iterable[str]) -> ConfigError:
    problem = Problem("policy", repr(name), ", ".join(allowed), "name one of these")
    return ConfigError("the pool's policy", (problem,))


def _only_simulated(name: str, reason: str) -> ConfigError:
    live = ", ".join(live_policies())
    fact = f"{name!r}, which runs in a simulation only: {reason}"
    problem = Problem("policy", fact, live, "name one of these, or use `hermes simulate`")
    return ConfigError("the pool's policy", (problem,))


def _parameters(factory: Callable[..., Policy[Any]]) -> tuple[str, ...]:
    from inspect import signature

    return tuple(signature(factory).parameters)
