"""The files of Pollux' published workloads: read, checked, and kept as frozen tables.

Source: Qiao et al., "Pollux", OSDI 2021, the artefact petuum/adaptdl, branch osdi21-artifact.
`examples/elastic/README.md` describes the files.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hermes_ops.core.sizes import BatchRange
from hermes_ops.core.speed_model import Floats
from hermes_ops.errors import ConfigError
from hermes_ops.simulator.csv_file import CsvFile
from hermes_ops.simulator.workload import Placement

MOST_GPUS = 64
"""The GPUs of the pool for which the workloads were published."""

APPLICATIONS = "pollux_applications.csv"
STEP_TIMES = "pollux_step_times.csv"
TRAINING = "pollux_training.csv"
WORKLOADS = "pollux_workloads.csv"


@dataclass(frozen=True, slots=True)
class StepTable:
    """Measured seconds of a pass: `measured` by placement, `points` for the others.

    `measured` has, for the GPUs on each node, rows of (samples a GPU, seconds, seconds of them that
    are communication), ascending. `points` has rows of (nodes, GPUs, samples a GPU, seconds,
    communication): the means of what was measured, then the rows without a placement.
    """

    application: str
    measured: Mapping[Placement, Floats]
    points: Floats


@dataclass(frozen=True, slots=True)
class Trained:
    """An application trained with one batch: by epoch the values at its end."""

    batch: int
    progress: Floats  # cumulative steps of the initial batch
    iteration: Floats  # cumulative steps
    metric: Floats  # on validation data
    grad_sqr: Floats
    grad_var: Floats


@dataclass(frozen=True, slots=True)
class Application:
    """The recorded data of a kind of job; `trained` is by batch, ascending."""

    name: str
    batches: BatchRange
    epochs: int
    steps: StepTable
    trained: tuple[Trained, ...]


@dataclass(frozen=True, slots=True)
class PolluxJob:
    """A row of a workload: `gpus` and `batch` are its user's request."""

    name: str
    submitted_s: float
    application: str
    gpus: int
    batch: int


@dataclass(frozen=True, slots=True)
class PolluxData:
    """All files of a folder; `workloads` by load and number."""

    applications: Mapping[str, Application]
    workloads: Mapping[tuple[float, int], tuple[PolluxJob, ...]]


def written_ns(folder: Path) -> int:
    """Return when the newest file of the folder was written, in Unix nanoseconds; 0 without files.

    It is the argument by which a cache of the folder's content notices a change.
    """
    return max((path.stat().st_mtime_ns for path in folder.glob("pollux_*.csv")), default=0)


def read_pollux(folder: Path) -> PolluxData:
    """Read the files of the folder.

    Raise ConfigError with file, line, what was found and what is allowed for a file that cannot be
    read, other columns, values that cannot be (an unknown application, a time of 0, a size below
    1), and for holes: an application without step times or epochs, or with epochs missing.
    """
    applications = _applications(folder)
    steps = _step_times(folder, applications)
    trained = _training(folder, applications)
    complete = {
        name: Application(name, batches, epochs, steps[name], trained[name])
        for name, (batches, epochs) in applications.items()
    }
    return PolluxData(complete, _workloads(folder, applications))


def _applications(folder: Path) -> dict[str, tuple[BatchRange, int]]:
    limits = ("init_batch", "max_batch", "min_local_batch", "max_local_batch")
    table = CsvFile(folder / APPLICATIONS, ("application", *limits, "epochs"))
    result: dict[str, tuple[BatchRange, int]] = {}
    for line, row in table.rows():
        values = [table.whole(line, row, column) for column in limits]
        epochs = table.whole(line, row, "epochs")
        try:
            result[row["application"]] = (BatchRange(*values), epochs)
        except ConfigError as error:
            for problem in error.problems:
                table.add(line, f"{problem.where} {problem.found}", problem.allowed)
    if not result and not table.problems:
        table.add("the file", "no application", "at least one", "add a line")
    table.close()
    return result


_STEP_COLUMNS = (
    *("application", "placement", "nodes", "gpus", "local_batch"),
    *("step_s", "sync_s"),
)


def _step_times(folder: Path, applications: Mapping[str, object]) -> dict[str, StepTable]:
    table = CsvFile(folder / STEP_TIMES, _STEP_COLUMNS)
    measured: dict[str, dict[Placement, list[Sequence[float]]]] = {n: {} for n in applications}
    others: dict[str, list[Sequence[float]]] = {name: [] for name in applications}
    for line, row in table.rows():
        if not table.known(line, row["application"], applications):
            continue
        times = [table.above_zero(line, row, "step_s"), table.number(line, row, "sync_s")]
        point = [table.whole(line, row, column) for column in ("nodes", "gpus", "local_batch")]
        if times[1] >= times[0]:
            table.add(line, f"sync_s {row['sync_s']!r}", f"less than step_s {row['step_s']}")
        placement = _placement(table, line, row["placement"], point)
        if placement is None:
            others[row["application"]].append([*point, *times])
        else:
            rows = measured[row["application"]].setdefault(placement, [])
            rows.append([point[2], *times])
    for name in applications:
        if not measured[name] and not table.problems:
            table.add(name, "no step times", "at least one placement", "add its lines")
    table.close()
    return {name: _step_table(name, measured[name], others[name]) for name in applications}


def _placement(table: CsvFile, line: int, text: str, point: Sequence[int]) -> Placement | None:
    """Return the GPUs on each node; None for a row that has none."""
    if not text:
        return None
    placement = tuple(map(int, text)) if text.isdecimal() else ()
    if not placement or 0 in placement or [len(placement), sum(placement)] != list(point[:2]):
        allowed = f"digits from 1 to 9: {point[1]} GPUs on {point[0]} nodes"
        table.add(line, f"placement {text!r}", allowed)
    return placement


def _step_table(
    name: str,
    measured: Mapping[Placement, list[Sequence[float]]],
    others: list[Sequence[float]],
) -> StepTable:
    by_size: dict[tuple[int, int, float], list[Sequence[float]]] = defaultdict(list)
    for placement, rows in measured.items():
        for local, *times in rows:
            by_size[len(placement), sum(placement), local].append(times)
    means = [[*key, *np.mean(by_size[key], axis=0)] for key in sorted(by_size)]
    tables = {
        placement: np.array(sorted(map(tuple, rows)), dtype=np.float64)
        for placement, rows in measured.items()
    }
    return StepTable(name, tables, np.array([*means, *others], dtype=np.float64))


_TRAINING_COLUMNS = (
    *("application", "batch", "epoch", "progress", "iteration"),
    *("metric", "grad_sqr", "grad_var"),
)


def _training(
    folder: Path, applications: Mapping[str, tuple[BatchRange, int]]
) -> dict[str, tuple[Trained, ...]]:
    table = CsvFile(folder / TRAINING, _TRAINING_COLUMNS)
    rows: dict[tuple[str, int], dict[int, tuple[float, ...]]] = defaultdict(dict)
    for line, row in table.rows():
        if not table.known(line, row["application"], applications):
            continue
        batch, epoch = table.whole(line, row, "batch"), table.whole(line, row, "epoch", least=0)
        values = [table.above_zero(line, row, column) for column in ("progress", "iteration")]
        values.append(table.number(line, row, "metric"))
        values.append(table.number(line, row, "grad_sqr"))
        values.append(table.above_zero(line, row, "grad_var"))
        rows[row["application"], batch][epoch] = tuple(values)
    if not table.problems:
        _check_epochs(table, applications, rows)
    table.close()
    return {
        name: tuple(
            _trained(batch, rows[name, batch])
            for batch in sorted(batch for owner, batch in rows if owner == name)
        )
        for name in applications
    }


def _check_epochs(
    table: CsvFile,
    applications: Mapping[str, tuple[BatchRange, int]],
    rows: Mapping[tuple[str, int], Mapping[int, tuple[float, ...]]],
) -> None:
    """Note holes: an application without its least or largest batch, a batch without an epoch."""
    for name, (batches, epochs) in applications.items():
        trained = {batch for owner, batch in rows if owner == name}
        for batch in sorted({batches.initial, batches.most} - trained):
            table.add(f"{name}, batch {batch}", "no line", "its epochs", "add its lines")
        for batch in sorted(trained):
            missing = sorted(set(range(epochs)) - rows[name, batch].keys())
            if missing:
                found = f"no epoch {missing[0]}"
                allowed = f"epochs 0 to {epochs - 1}"
                table.add(f"{name}, batch {batch}", found, allowed, "add the lines")


def _trained(batch: int, epochs: Mapping[int, tuple[float, ...]]) -> Trained:
    columns = np.array([epochs[epoch] for epoch in sorted(epochs)], dtype=np.float64).T
    return Trained(batch, *columns)


def _check_request(table: CsvFile, line: int, job: PolluxJob, batches: BatchRange) -> None:
    """Note a problem if the application does not train with that batch, or not on these GPUs."""
    if job.gpus > MOST_GPUS:
        table.add(line, f"gpus '{job.gpus}'", f"at most {MOST_GPUS}, those of the pool")
    elif not batches.initial <= job.batch <= batches.most:
        allowed = f"{batches.initial} to {batches.most} with {job.application}"
        table.add(line, f"batch '{job.batch}'", allowed)
    elif -(-job.batch // job.gpus) < batches.least_local:
        allowed = f"at least {batches.least_local} samples a GPU with {job.application}"
        table.add(line, f"batch '{job.batch}' on {job.gpus} GPUs", allowed, "use fewer GPUs")


def _workloads(
    folder: Path, applications: Mapping[str, tuple[BatchRange, int]]
) -> dict[tuple[float, int], tuple[PolluxJob, ...]]:
    columns = ("load", "workload", "job", "submitted_s", "application", "gpus", "batch")
    table = CsvFile(folder / WORKLOADS, columns)
    jobs: dict[tuple[float, int], list[PolluxJob]] = defaultdict(list)
    for line, row in table.rows():
        if not table.known(line, row["application"], applications):
            continue
        key = table.above_zero(line, row, "load"), table.whole(line, row, "workload")
        job = PolluxJob(
            row["job"],
            table.number(line, row, "submitted_s"),
            row["application"],
            table.whole(line, row, "gpus"),
            table.whole(line, row, "batch"),
        )
        _check_request(table, line, job, applications[job.application][0])
        jobs[key].append(job)
    table.close()
    return {key: tuple(of_workload) for key, of_workload in jobs.items()}
