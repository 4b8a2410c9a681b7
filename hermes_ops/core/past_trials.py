"""Trials of earlier sweeps of the same space, for a policy with a field `prior`."""

from __future__ import annotations

from dataclasses import dataclass

from hermes_ops.core.model import Point, Value


@dataclass(frozen=True, slots=True)
class PastTrial:
    """One trial of an earlier sweep: its hyper-parameters and its curve up to `total_steps`.

    Losses are "lower is better"; `seconds` of the points are cumulative training seconds alone on
    its GPUs. A trial that was ended early has a curve shorter than `total_steps`.
    """

    configuration: tuple[tuple[str, Value], ...]
    curve: tuple[Point, ...]
    total_steps: int | None = None
