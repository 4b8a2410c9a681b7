"""Traces of shared clusters: files (CSV, units in the header) and synthetic arrivals."""

from __future__ import annotations

import csv
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf, isfinite
from pathlib import Path

from hermes_ops.core.model import JobId, Value
from hermes_ops.core.sizes import BatchRange, StepTime
from hermes_ops.errors import ConfigError, Problem
from hermes_ops.simulator.csv_file import MOST_PROBLEMS, opened_csv
from hermes_ops.simulator.declared_steps import DeclaredSteps, parse_steps
from hermes_ops.simulator.workload import Costs, Pace, Placement, Work, Workload

REQUIRED = ("job_id", "submit_time_s", "num_gpus", "duration_s")
OPTIONAL = (
    *("model", "vc", "user", "weight", "deadline_s", "iterations"),
    *("checkpoint_s", "restore_s", "startup_s"),
    *("batch_size", "iteration_time_ms", "priority"),
    *("speed_ups", "step_times", "noise_scale"),
)
NOTED = ("batch_size", "iteration_time_ms", "priority")  # numbers that go into `configuration`
MOST_DIGITS = 15  # of a whole number

TENSOR_SKEWS = {
    "vgg19": 0.717,
    "vgg16": 0.744,
    "vgg11": 0.774,
    "alexnet": 0.611,
    "resnet50": 0.112,
    "resnet101": 0.075,
    "resnet152": 0.060,
    "inception3": 0.138,
    "inception4": 0.044,
}
"""Tensor skew by model: the size of the largest tensor over that of all tensors.

Source: computed from the tensor lists of the public simulator SymbioticLab/Tiresias (959f9b0).
"""


def read_trace(path: Path) -> Workload:
    """Read the jobs of a CSV file (`.csv`, or `.csv.gz`); the workload is named after the file.

    Columns: job_id, submit_time_s, num_gpus, duration_s (alone on these GPUs); optional: model,
    vc (virtual cluster), user, weight, deadline_s (as submit_time_s), iterations (its steps),
    checkpoint_s, restore_s, startup_s, and batch_size, iteration_time_ms, priority, which are in
    the job's configuration; speed_ups, as `1:1 2:1.8 4:3`: the numbers of GPUs on which the job may
    run, with its speed on each; in its place step_times, as `1x32:0.1 1x256:0.7`: also the batches,
    with the seconds of a step of each (`parse_steps`); batch_size is then the one that its user
    requests, and noise_scale, in samples, that of its gradients. Optional cells may be empty. A
    known model has its tensor skew.

    Raise ConfigError, with the line numbers of up to 20 problems, for a file that cannot be read,
    for unknown, missing or doubled columns and for bad rows.
    """
    with opened_csv(path, "the trace") as file:
        works = _read(str(path), csv.reader(file, strict=True))
    return Workload(path.name.removesuffix(".gz").removesuffix(".csv"), works)


def poisson(
    jobs: int,
    *,
    mean_gap_s: float,
    seed: int,
    gpus: Sequence[tuple[int, float]] = ((1, 0.6), (2, 0.15), (4, 0.15), (8, 0.1)),
    median_s: float = 600.0,
    spread: float = 1.5,
) -> Workload:
    """Draw `jobs` jobs with exponential gaps between them; equal arguments give equal jobs.

    `gpus` are (number, relative frequency). Durations are log-normal: half of them are shorter
    than `median_s`, and `spread` is the standard deviation of their logarithm (a choice: traces
    have heavy tails).
    """
    chance = random.Random(seed)  # noqa: S311  (no secret)
    numbers, frequencies = zip(*gpus, strict=True)
    works = []
    at_s = 0.0
    for number in range(jobs):
        gpu_count = chance.choices(numbers, frequencies)[0]
        seconds = median_s * chance.lognormvariate(0.0, spread)
        works.append(Work(JobId(f"job/{number}"), at_s, seconds, gpu_count))
        at_s += chance.expovariate(1.0 / mean_gap_s)
    return Workload(f"poisson-{jobs}", tuple(works))


def _read(source: str, rows: Iterator[list[str]]) -> tuple[Work, ...]:
    header = [name.strip() for name in next(rows, [])]
    problems = _header_problems(header)
    if problems:
        raise ConfigError(source, tuple(problems))
    works: list[Work] = []
    lines: dict[JobId, int] = {}
    for number, row in enumerate(rows, start=2):
        if not row:
            continue
        cells = _Cells(header, row)
        work = cells.work()
        if work.id in lines:
            cells.refuse("job_id", f"the id of line {lines[work.id]}", "each id once")
        lines[work.id] = number
        works.append(work)
        problems += [replace(p, where=f"line {number}, {p.where}") for p in cells.problems]
        if len(problems) >= MOST_PROBLEMS:
            break
    if not works:
        problems.append(Problem("line 2", "no job", "at least one", "add the jobs"))
    if problems:
        raise ConfigError(source, tuple(problems[:MOST_PROBLEMS]))
    return tuple(works)


def _header_problems(header: list[str]) -> list[Problem]:
    allowed = (*REQUIRED, *OPTIONAL)
    problems = []
    for at, name in enumerate(header, start=1):
        where = f"line 1, column {at}"
        if name not in allowed:
            fix = "remove or rename the column"
            problems.append(Problem(where, repr(name), ", ".join(allowed), fix))
        elif name in header[: at - 1]:
            problems.append(Problem(where, f"{name} again", "each column once", "remove it"))
    missing = [name for name in REQUIRED if name not in header]
    if missing:
        text = f"no column {', '.join(missing)}"
        problems.append(Problem("line 1", text, ", ".join(REQUIRED), "add the columns"))
    return problems


@dataclass(frozen=True, slots=True)
class DeclaredSpeeds:
    """A training model of declared speeds: (GPUs, speed over that on the requested GPUs).

    Its unit of work is a second on the requested GPUs. Where the GPUs are makes no difference.
    """

    speeds: tuple[tuple[int, float], ...]
    batch_range: BatchRange | None = None

    @property
    def sizes(self) -> tuple[int, ...]:
        """The numbers of GPUs, ascending."""
        return tuple(gpus for gpus, _ in self.speeds)

    @property
    def step_times(self) -> tuple[StepTime, ...]:
        """The seconds of a unit of work on each number of GPUs."""
        return tuple(StepTime(gpus, 1 / speed) for gpus, speed in self.speeds)

    def pace(self, placement: Placement, epoch: int, batch: int | None) -> Pace:  # noqa: ARG002 - interface
        """Return the declared pace."""
        gpus = sum(placement)
        speed = dict(self.speeds)[gpus]
        return Pace(speed, StepTime(gpus, 1 / speed, len(placement)))

    def noise_scale(self, epoch: int) -> float | None:  # noqa: ARG002 - interface
        """Return None: a trace does not tell it."""
        return None


class _Cells:
    """Parses the cells of one row to a job; collects their problems."""

    def __init__(self, header: list[str], row: list[str]) -> None:
        self.problems: list[Problem] = []
        if len(row) != len(header):
            self.refuse("row", f"{len(row)} cells", f"{len(header)}, as in the header")
            row = [*row, *[""] * len(header)]
        self._cells = {n: cell.strip() for n, cell in zip(header, row, strict=False)}
        self._is_valid = len(self.problems) == 0

    def refuse(self, where: str, found: str, allowed: str, fix: str = "correct the line") -> None:
        """Add a problem."""
        self.problems.append(Problem(where, found, allowed, fix))

    def work(self) -> Work:
        """Return the job, with default values for cells with problems."""
        model = self._cells.get("model") or None
        if self._is_valid and not self._cells["job_id"]:
            self.refuse("job_id", "nothing", "any text")
        submitted_s, seconds = self._number("submit_time_s"), self._number("duration_s")
        gpus = self._whole_number("num_gpus")
        training = self._training(gpus)
        return Work(
            id=JobId(self._cells["job_id"]),
            submitted_s=submitted_s,
            seconds=seconds,
            gpus=gpus or 1,
            training=training,
            batch=training.batch if isinstance(training, DeclaredSteps) else None,
            step_times=() if training is None else training.step_times,
            exclusive_s=None if training is None else seconds,
            user=self._cells.get("user", ""),
            virtual_cluster=self._cells.get("vc", ""),
            model_name=model,
            tensor_skew=TENSOR_SKEWS.get(model.lower()) if model else None,
            weight=self._optional("weight", 1.0) or self._refused("weight", 1.0),
            deadline_s=self._number("deadline_s") if self._cells.get("deadline_s") else None,
            total_steps=self._whole_number("iterations"),
            configuration=self._noted(),
            costs=self._costs(),
        )

    def _number(self, name: str) -> float:
        """Parse the cell as a finite number, 0 or more."""
        text = self._cells[name]
        try:
            value = float(text)
        except ValueError:
            value = -1.0
        if isfinite(value) and value >= 0:
            return value
        return self._refused(name, 0.0)

    def _refused(self, name: str, stand_in: float) -> float:
        if self._is_valid:
            allowed = "a number above 0" if stand_in else "a number of at least 0"
            self.refuse(name, repr(self._cells[name]), allowed)
        return stand_in

    def _optional(self, name: str, otherwise: float) -> float:
        return self._number(name) if self._cells.get(name) else otherwise

    def _whole_number(self, name: str) -> int | None:
        """Parse the cell as a whole number above 0; None for an optional one that is empty."""
        text = self._cells.get(name, "")
        if not text and name not in REQUIRED:
            return None
        number = _is_valid(text)
        if number is None and self._is_valid:
            self.refuse(name, repr(text), "a whole number of at least 1")
        return number

    def _training(self, gpus: int | None) -> DeclaredSpeeds | DeclaredSteps | None:
        """Parse how fast the job is on other GPUs and with other batches; None: it has no range.

        `gpus`: those that its user requests; None: that cell has a problem.
        """
        if not self._is_valid:
            return None
        noise = self._cells.get("noise_scale")
        if not self._cells.get("step_times"):
            if noise:
                fix = "add step_times, or remove it"
                self.refuse("noise_scale", repr(noise), "nothing without step_times", fix)
            return None if gpus is None else self._speed_ups(gpus)
        if self._cells.get("speed_ups"):
            found, fix = "a cell beside step_times", "remove one of them"
            self.refuse("speed_ups", found, "one of the two", fix)
        return self._steps(gpus, self._number("noise_scale") if noise else None)

    def _steps(self, gpus: int | None, noise: float | None) -> DeclaredSteps | None:
        """Parse the seconds of a step by GPUs and batch."""
        try:
            steps = parse_steps(self._cells["step_times"])
        except ConfigError as error:
            self.problems += error.problems
            return None
        first = steps[0]
        training = DeclaredSteps(steps, gpus or first.gpus, first.batch, noise)
        if training.gpus not in training.sizes:
            fix = "add its entries, or correct num_gpus"
            self.refuse("step_times", f"no entry of {gpus} GPUs", "one of num_gpus", fix)
            return None
        limits, text = training.batch_range, self._cells.get("batch_size", "")
        batch = _is_valid(text) or 0
        if not limits.initial <= batch <= limits.most:
            allowed = f"a whole number from {limits.initial} to {limits.most}, as in step_times"
            self.refuse("batch_size", repr(text), allowed, "name the batch that its user requests")
            return None
        return replace(training, batch=batch)

    def _speed_ups(self, gpus: int) -> DeclaredSpeeds | None:
        """Parse the speeds by number of GPUs; None without any."""
        text = self._cells.get("speed_ups", "")
        if not text:
            return None
        try:
            pairs = [part.split(":") for part in text.split()]
            speeds = {int(number): float(speed) for number, speed in pairs}
        except ValueError:
            speeds, pairs = {}, []
        is_sound = all(number >= 1 and 0 < speed < inf for number, speed in speeds.items())
        if not speeds or not is_sound or len(speeds) < len(pairs):
            allowed = "numbers of GPUs from 1, each once, with speeds above 0, as 1:1 2:1.8 4:3"
            self.refuse("speed_ups", repr(text), allowed)
            return None
        if gpus not in speeds:
            self.refuse("speed_ups", repr(text), f"one of num_gpus, {gpus}, too")
            return None
        return DeclaredSpeeds(tuple(sorted((n, s / speeds[gpus]) for n, s in speeds.items())))

    def _noted(self) -> tuple[tuple[str, Value], ...]:
        """Parse the numbers of the configuration; a batch that may be chosen is none of them."""
        free = {"batch_size"} if self._cells.get("step_times") else set[str]()
        names = [name for name in NOTED if self._cells.get(name) and name not in free]
        return tuple((name, self._number(name)) for name in names)

    def _costs(self) -> Costs:
        names = ("startup_s", "restore_s", "checkpoint_s")
        return Costs(**{name: self._optional(name, 0.0) for name in names})


def _is_valid(text: str) -> int | None:
    """Return the whole number above 0, of at most MOST_DIGITS, that the text is; else None."""
    number = int(text) if text.isdecimal() and len(text) <= MOST_DIGITS else 0
    return number or None
