"""The base of policies that wrap a policy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from hermes_ops.core.model import Policy

M = TypeVar("M")


@dataclass(frozen=True, slots=True)
class Wrapper(Generic[M]):
    """A policy around a policy, with its name, preemption and memory; a subclass decides."""

    policy: Policy[M]

    @property
    def name(self) -> str:
        """The inner policy's name."""
        return self.policy.name

    @property
    def preempts(self) -> bool:
        """Whether the inner policy stops jobs."""
        return self.policy.preempts

    def initial(self) -> M:
        """Return the inner policy's memory before the first decision."""
        return self.policy.initial()
