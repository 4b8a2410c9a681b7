"""Shockwave's canonical trace: 120 jobs of 1, 2 and 4 GPUs on 32 GPUs, in rounds of two minutes."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from math import inf
from pathlib import Path

from hermes_ops.core.model import JobId, Point
from hermes_ops.core.sizes import StepTime
from hermes_ops.errors import ConfigError, Problem
from hermes_ops.simulator.capes_workload import falling_loss
from hermes_ops.simulator.csv_file import opened_csv
from hermes_ops.simulator.workload import Costs, Work, Workload
from hermes_ops.simulator.workload_source import DrawnWorkload

LAYOUT = "8x4"
ROUND_S = 120.0
RESTART_S = 20.0
FILE = "shockwave_jobs.csv"
STEP_S = 60.0
"""Seconds of a step with the first batch. A job reports at each: it has as many as its length."""

FIRST_PART = 0.3
"""The part of its steps that a job trains with its first batch."""

MOST_GAIN = 16.0
"""The later steps of a job are at most this many times faster than the first."""

DURATION = "trace_duration_s"
COLUMNS = ("job", "submitted_s", "gpus", "exclusive_s", "run_s", "kind")


@dataclass(frozen=True, slots=True)
class ShockwaveSource:
    """The trace in a folder with `shockwave_jobs.csv`; the same for every seed.

    A job trains `run_s`, and a job that did not run in the round before loses 20 s of the round.
    It declares its steps and how long one takes with its first batch: together its length in the
    trace, `trace_duration_s` (`run_s` without this column). Then its batch changes, which nobody
    declares: after FIRST_PART of its steps the others take so long that it trains `run_s` in all.
    In the artefact the change comes at epochs that its code lists, after 30 % for the mode
    "accordion", and the time of an epoch with each batch is known from a profile; that a step is
    STEP_S and that there is one change is our reading.

    Source: Zheng et al., "Shockwave", NSDI 2023; its trace with dynamic batch sizes, whose jobs
    have the lengths of the published simulations.
    """

    folder: Path
    name: str = "shockwave"
    varies: bool = False

    def draw(self, seed: int) -> DrawnWorkload:  # noqa: ARG002 - the same for every seed
        """Return the trace, whatever the seed; raise ConfigError if the file is not as it must."""
        return DrawnWorkload(Workload(self.name, _read(self.folder / FILE), round_s=ROUND_S))


def _read(path: Path) -> tuple[Work, ...]:
    with opened_csv(path, "the trace", "name its folder by --data") as file:
        reader = csv.DictReader(file, strict=True)
        rows = list(reader)
        header = tuple(reader.fieldnames or ())
    missing = [column for column in COLUMNS if column not in header]
    if missing:
        found, allowed = ",".join(header) or "nothing", ",".join(COLUMNS)
        raise ConfigError(str(path), (Problem("line 1", found, allowed, "correct the header"),))
    works, problems = [], []
    for line, row in enumerate(rows, start=2):
        try:
            works.append(_work(row))
        except (TypeError, ValueError):
            found = ",".join(str(cell) for cell in row.values())
            allowed = "numbers, at least 1 GPU and over 0 seconds"
            problems.append(Problem(f"line {line}", found, allowed, "correct the line"))
    if problems:
        raise ConfigError(str(path), tuple(problems))
    return tuple(works)


def _work(row: dict[str, str]) -> Work:
    gpus, submitted_s = int(row["gpus"]), float(row["submitted_s"])
    exclusive_s, run_s = float(row["exclusive_s"]), float(row["run_s"])
    declared_s = float(row.get(DURATION) or run_s)
    lengths_s = (exclusive_s, run_s, declared_s)
    if gpus < 1 or not 0 <= submitted_s < inf or not 0 < min(lengths_s) <= max(lengths_s) < inf:
        raise ValueError("out of range")
    steps = max(1, round(declared_s / STEP_S))
    return Work(
        JobId(row["job"]),
        submitted_s,
        run_s,
        gpus,
        model_name=row["kind"],
        total_steps=steps,
        curve=_curve(steps, declared_s, run_s),
        costs=Costs(startup_s=RESTART_S),
        exclusive_s=exclusive_s,
        step_times=(StepTime(gpus, declared_s / steps),),
    )


def _curve(steps: int, declared_s: float, run_s: float) -> tuple[Point, ...]:
    """Return the seconds until each step, as long as declared until the batch changes."""
    quickest = 1 / MOST_GAIN
    first = min(FIRST_PART, max(0.0, run_s / declared_s - quickest) / (1 - quickest))
    early_s = first * declared_s

    def until_s(part: float) -> float:
        if part <= first:
            return part * declared_s
        return early_s + (run_s - early_s) * (part - first) / (1 - first)

    points = (
        Point(step, falling_loss(step / steps), until_s(step / steps)) for step in range(1, steps)
    )
    return (*points, Point(steps, falling_loss(1.0), run_s))
