"""The interface of search algorithms: pure functions from a trial's number to a configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from hermes_ops.search.space import Config, Value


@dataclass(frozen=True, slots=True)
class Observation:
    """A trial that has a configuration, and its loss.

    `loss` is lower-is-better: final for a finished trial, the loss so far for a running one (or
    one that waits), None while nothing was reported. A NaN or infinite loss counts as a failure.
    """

    number: int
    config: Mapping[str, Value]
    loss: float | None
    state: Literal["running", "finished", "failed"]


class Sampler(Protocol):
    """A search algorithm with ask and tell in one call: every question carries the whole history.

    Pure: the same seed, number and history give the same configuration, in whatever order the
    history is listed. An observation of the trial that is asked for is ignored.
    """

    @property
    def size(self) -> int | None:
        """The number of configurations; None without a limit."""
        ...

    def exhausted(self, number: int) -> bool:
        """Return True when there is no configuration for a trial of that number."""
        ...

    def ask(self, number: int, history: Sequence[Observation]) -> Config:
        """Return the configuration of trial `number` (from 0); IndexError when exhausted."""
        ...
