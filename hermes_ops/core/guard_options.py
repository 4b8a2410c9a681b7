"""The options of what stands around a pool's policy; a user writes them among the policy's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from hermes_ops.core.guards import QUANTA, guarded
from hermes_ops.core.learning import PER_GPU
from hermes_ops.core.model import Policy
from hermes_ops.errors import ConfigError, Problem

M = TypeVar("M")

PREFIX = "guard_"


@dataclass(frozen=True, slots=True)
class GuardOptions:
    """`k` and `quanta` of the two guards; `open`: of `OpenForLearning`, trials for each GPU."""

    k: float = 3.0
    quanta: int = QUANTA
    open: int = PER_GPU

    def __post_init__(self) -> None:
        if self.open < 1:
            raise ValueError("guard_open is at least 1")

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> GuardOptions:
        """Those named guard_k, guard_quanta and guard_open; ConfigError for any other guard_*.

        Without a guard_open the `threshold` of Hermes' queues is the bound, should there be one.
        """
        given = {k.removeprefix(PREFIX): v for k, v in options.items() if k.startswith(PREFIX)}
        given = {"open": options.get("threshold", PER_GPU), **given}
        try:
            types = {"k": float, "quanta": int, "open": int}
            return cls(**{name: types[name](value) for name, value in given.items()})
        except (KeyError, TypeError, ValueError) as error:
            raise _refused(given, error) from None

    def around(self, policy: Policy[M]) -> Policy[M]:
        """The policy within both guards; ConfigError for a k or quanta that cannot be."""
        try:
            return guarded(policy, self.k, self.quanta)
        except (TypeError, ValueError) as error:
            raise _refused({"k": self.k, "quanta": self.quanta}, error) from None


def without_guards(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that are the policy's own."""
    return {name: value for name, value in options.items() if not name.startswith(PREFIX)}


def _refused(given: Mapping[str, Any], error: Exception) -> ConfigError:
    found = ", ".join(f"{PREFIX}{name}={value!r}" for name, value in given.items())
    allowed = "guard_k and guard_quanta from 0, guard_open from 1"
    problem = Problem("options", f"{found} ({error})", allowed, "correct or remove it")
    return ConfigError("The guards around the policy", (problem,))
