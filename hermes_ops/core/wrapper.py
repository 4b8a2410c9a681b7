"""What every policy around a policy shares."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from hermes_ops.core.model import Policy

M = TypeVar("M")


@dataclass(frozen=True, slots=True)
class Wrapper(Generic[M]):
    """Has the inner policy's name, nature and memory; a subclass says what it decides."""

    policy: Policy[M]

    @property
    def name(self) -> str:
        """The inner policy's name."""
        return self.policy.name

    @property
    def preempts(self) -> bool:
        """As the inner policy."""
        return self.policy.preempts

    def initial(self) -> M:
        """The inner policy's."""
        return self.policy.initial()
