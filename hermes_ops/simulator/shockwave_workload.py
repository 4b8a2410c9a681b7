"""Shockwave's canonical trace: 120 jobs of 1, 2 and 4 GPUs on 32 GPUs, in rounds of two minutes."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from math import inf
from pathlib import Path

from hermes_ops.core.model import JobId
from hermes_ops.errors import ConfigError, Problem
from hermes_ops.simulator.workload import Costs, Work, Workload
from hermes_ops.simulator.workload_source import DrawnWorkload

LAYOUT = "8x4"
ROUND_S = 120.0
RESTART_S = 20.0
FILE = "shockwave_jobs.csv"
COLUMNS = ("job", "submitted_s", "gpus", "exclusive_s", "run_s", "kind")


@dataclass(frozen=True, slots=True)
class ShockwaveSource:
    """The trace in a folder with `shockwave_jobs.csv`; the same for every seed.

    A job trains `run_s`, and a job that did not run in the round before loses 20 s of the round.
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
    try:
        with path.open(encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file, strict=True)
            rows = list(reader)
            header = tuple(reader.fieldnames or ())
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        problem = Problem(str(path), str(error), "a readable CSV file", "name its folder by --data")
        raise ConfigError("the trace", (problem,)) from error
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
    if gpus < 1 or not 0 <= submitted_s < inf or not 0 < min(exclusive_s, run_s) < inf:
        raise ValueError("out of range")
    return Work(
        JobId(row["job"]),
        submitted_s,
        run_s,
        gpus,
        model_name=row["kind"],
        costs=Costs(startup_s=RESTART_S),
        exclusive_s=exclusive_s,
    )
