"""Facts of a report that no trial has: the sweep's limits, its policy, its replays."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import TYPE_CHECKING

import numpy as np

from hermes_ops.core.summary import Night

if TYPE_CHECKING:
    from hermes_ops.config import SweepConfig

Range = tuple[float, float]  # minimum and maximum; equal when the figure is known
GpuUse = tuple[float, float, int]  # begin and end in seconds since the sweep's start, GPUs


@dataclass(frozen=True, slots=True)
class Improvement:
    """A better value than any before: seconds since the start, GPU-seconds held by then."""

    at_s: float
    gpu_s: float
    value: float


@dataclass(frozen=True, slots=True)
class BestSoFar:
    """The best value so far as a step function of time, in the user's direction."""

    improvements: tuple[Improvement, ...]
    end_s: float
    end_gpu_s: float

    @classmethod
    def from_values(
        cls, seen: Iterable[tuple[float, float]], held: Sequence[GpuUse], *, maximize: bool
    ) -> BestSoFar:
        """Build the function from the values `seen` at their times, while GPUs were `held`."""
        sign = -1.0 if maximize else 1.0
        lowest, bettered = float("inf"), []
        for at_s, value in sorted(seen, key=lambda point: point[0]):
            if isfinite(value) and sign * value < lowest:
                lowest = sign * value
                bettered.append((at_s, value))
        end_s = max([end for _, end, _ in held] + [at_s for at_s, _ in bettered], default=0.0)
        *gpu_s, end_gpu_s = gpu_seconds([*(at_s for at_s, _ in bettered), end_s], held)
        improvements = (
            Improvement(at_s, g, value) for (at_s, value), g in zip(bettered, gpu_s, strict=True)
        )
        return cls(tuple(improvements), end_s, end_gpu_s)


def gpu_seconds(times_s: Sequence[float], held: Sequence[GpuUse]) -> list[float]:
    """Return the GPU-seconds that were held until each of the times."""
    if not held:
        return [0.0] * len(times_s)
    begins, ends, gpus = (np.array(column, dtype=float) for column in zip(*held, strict=True))
    return [float(np.sum(np.clip(at_s - begins, 0.0, ends - begins) * gpus)) for at_s in times_s]


@dataclass(frozen=True, slots=True)
class Alternative:
    """The result of a replay of the same trials under another policy.

    Each figure is the minimum and the maximum over the replay's simulations, None for what never
    happened; `courses` has one entry a simulation. `cut_short`: the trials whose curves were not
    recorded to their ends; `needed`: those of them whose missing part the figures depend on.
    """

    policy: str
    time_to_best_s: Range | None
    gpu_s: Range | None
    preemptions: Range | None
    makespan_s: Range | None
    courses: tuple[BestSoFar, ...] = ()
    cut_short: tuple[int, ...] = ()
    needed: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class TrialEnding:
    """Why a trial ended, and its last lines of output; both may be empty."""

    reason: str = ""
    tail: str = ""


@dataclass(frozen=True, slots=True)
class Background:
    """Facts of a sweep that its trials do not have. The report omits what is missing.

    `started_s`: Unix seconds. `best_finished` with `time_to_best_s`: the finished trial with the
    best value and its end in seconds since the start. `stops`: (trial, Unix seconds) of each
    decision to preempt a trial. `checkpoint_s`: the measured seconds of each trial's checkpoint.
    `no_alternatives`: why there is no replay. `nights`: earlier sweeps of the same schedule,
    newest first.
    """

    config: SweepConfig | None = None
    policy: str = ""
    closed: str = ""
    started_s: float | None = None
    best_finished: int | None = None
    time_to_best_s: float | None = None
    stops: tuple[tuple[int, float], ...] = ()
    checkpoint_s: Mapping[int, float] = field(default_factory=dict)
    endings: Mapping[int, TrialEnding] = field(default_factory=dict)
    alternatives: tuple[Alternative, ...] = ()
    no_alternatives: str = ""
    nights: tuple[Night, ...] = ()
