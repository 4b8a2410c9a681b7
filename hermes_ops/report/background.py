"""What the report tells beside the trials: the sweep's limits, its policy, its replays."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import TYPE_CHECKING

import numpy as np

from hermes_ops.core.summary import Night

if TYPE_CHECKING:
    from hermes_ops.config import SweepConfig

Range = tuple[float, float]  # the least and the most; equal when the figure is known
Held = tuple[float, float, int]  # begin and end in seconds since the sweep's start, GPUs


@dataclass(frozen=True, slots=True)
class Fall:
    """A better value than any before: seconds since the sweep's start, GPU-seconds held by then."""

    at_s: float
    gpu_s: float
    value: float


@dataclass(frozen=True, slots=True)
class Course:
    """How the best value so far came about, in the user's own direction, until the last end."""

    falls: tuple[Fall, ...]
    end_s: float
    end_gpu_s: float

    @classmethod
    def of(
        cls, seen: Iterable[tuple[float, float]], held: Sequence[Held], *, maximize: bool
    ) -> Course:
        """The course of the values `seen` at their times, while GPUs were `held`."""
        sign = -1.0 if maximize else 1.0
        lowest, bettered = float("inf"), []
        for at_s, value in sorted(seen, key=lambda found: found[0]):
            if isfinite(value) and sign * value < lowest:
                lowest = sign * value
                bettered.append((at_s, value))
        end_s = max([end for _, end, _ in held] + [at_s for at_s, _ in bettered], default=0.0)
        *gpu_s, end_gpu_s = gpu_seconds([*(at_s for at_s, _ in bettered), end_s], held)
        falls = (Fall(at_s, g, value) for (at_s, value), g in zip(bettered, gpu_s, strict=True))
        return cls(tuple(falls), end_s, end_gpu_s)


def gpu_seconds(times_s: Sequence[float], held: Sequence[Held]) -> list[float]:
    """GPU-seconds that were held until each of the times."""
    if not held:
        return [0.0] * len(times_s)
    begins, ends, gpus = (np.array(column, dtype=float) for column in zip(*held, strict=True))
    return [float(np.sum(np.clip(at_s - begins, 0.0, ends - begins) * gpus)) for at_s in times_s]


@dataclass(frozen=True, slots=True)
class Alternative:
    """What a replay of the same trials under another policy came to.

    Each figure is the least and the most over the replay's simulations, None for what never came
    about; `courses` has one for each of them. `cut_short`: the trials whose curves have no end on
    record; `needed`: those of them of whose missing part the figures depend.
    """

    policy: str
    time_to_best_s: Range | None
    gpu_s: Range | None
    preemptions: Range | None
    makespan_s: Range | None
    courses: tuple[Course, ...] = ()
    cut_short: tuple[int, ...] = ()
    needed: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Ending:
    """How a trial ended, in words, and its last lines of output; both may be empty."""

    reason: str = ""
    tail: str = ""


@dataclass(frozen=True, slots=True)
class Background:
    """Facts of a sweep that its trials do not have. Whatever is missing is left out of the report.

    `started_s`: Unix seconds. `best_finished` with `time_to_best_s`: the finished trial with the
    best value and when it had ended, seconds since the start. `stops`: (trial, Unix seconds) of
    each decision to stop a trial that was to go on. `checkpoint_s`: what a trial's checkpoints
    take, as it measured them. `no_alternatives`: why there is no replay. `nights`: earlier sweeps
    of the same schedule, newest first.
    """

    config: SweepConfig | None = None
    policy: str = ""
    closed: str = ""
    started_s: float | None = None
    best_finished: int | None = None
    time_to_best_s: float | None = None
    stops: tuple[tuple[int, float], ...] = ()
    checkpoint_s: Mapping[int, float] = field(default_factory=dict)
    endings: Mapping[int, Ending] = field(default_factory=dict)
    alternatives: tuple[Alternative, ...] = ()
    no_alternatives: str = ""
    nights: tuple[Night, ...] = ()
