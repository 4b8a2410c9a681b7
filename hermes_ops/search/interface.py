"""What every search algorithm is: a pure answer to "which configuration has trial `number`?"."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from hermes_ops.search.space import Config, Value


@dataclass(frozen=True, slots=True)
class Observation:
    """What is known of one trial that has a configuration.

    `loss` is lower-is-better: final for a finished trial, the loss so far for a running one (or
    one that waits), None while nothing was reported. A NaN or infinite loss counts as a failure.
    """

    number: int
    config: Mapping[str, Value]
    loss: float | None
    state: Literal["running", "finished", "failed"]


class Sampler(Protocol):
    """Ask and tell in one call: the history is told anew with every question.

    Pure: the same seed, number and history give the same configuration, in whatever order the
    history is listed. An observation of the trial that is asked for is ignored.
    """

    @property
    def size(self) -> int | None:
        """How many configurations there are; None when there is always another one."""
        ...

    def exhausted(self, number: int) -> bool:
        """True when there is no configuration for a trial of that number."""
        ...

    def ask(self, number: int, history: Sequence[Observation]) -> Config:
        """The configuration of trial `number` (from 0); IndexError when exhausted."""
        ...
