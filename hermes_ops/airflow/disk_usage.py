"""Disk usage of each sweep below the state folder.

Blocks are counted, as `du` does, files of several names once, and no link is followed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from hermes_ops.airflow.identity import MAIN_DAG
from hermes_ops.trial.checkpoint_store.store import safe_name

BLOCK_BYTES = 512
CHECKPOINTS = "checkpoints"


@dataclass(frozen=True, slots=True)
class SweepUsage:
    """The bytes that a sweep takes; `sweep` is its id, or its folder's name where that is all."""

    sweep: str
    checkpoints_bytes: int = 0
    files_bytes: int = 0
    artifacts_bytes: int = 0
    logs_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """All of it."""
        return self.checkpoints_bytes + self.files_bytes + self.artifacts_bytes + self.logs_bytes


@dataclass(slots=True)
class Counter:
    """Adds up what files take, each one once however many names it has."""

    _seen: set[tuple[int, int]] = field(default_factory=set)

    def size_bytes(self, folder: Path | str) -> int:
        """Return what lies in a folder takes; what vanishes meanwhile counts nothing."""
        return sum(size for _, size in self.entries(folder))

    def entries(self, folder: Path | str) -> Iterator[tuple[str, int]]:
        """Yield the path of all that is in a folder, folders too, with the bytes of each."""
        stack = [os.fspath(folder)]
        while stack:
            with suppress(OSError), os.scandir(stack.pop()) as scan:
                for entry in scan:
                    with suppress(OSError):
                        seen = entry.stat(follow_symlinks=False)
                        if entry.is_dir(follow_symlinks=False):
                            stack.append(entry.path)
                        yield entry.path, self._once(seen)

    def _once(self, seen: os.stat_result) -> int:
        if seen.st_nlink > 1:
            place = (seen.st_dev, seen.st_ino)
            if place in self._seen:
                return 0
            self._seen.add(place)
        return seen.st_blocks * BLOCK_BYTES


def sweep_usages(home: Path, runs: Mapping[str, str]) -> tuple[SweepUsage, ...]:
    """Return what each sweep of a state folder takes, the greatest first.

    :param runs: the sweep of each MLflow run, by the run's id, beyond those of trials' leases
    """
    counter = Counter()
    ids = {safe_name(sweep): sweep for sweep in runs.values()}
    parts: dict[str, dict[str, int]] = {}

    def add(name: str, part: str, size: int) -> None:
        of_sweep = parts.setdefault(name, {})
        of_sweep[part] = of_sweep.get(part, 0) + size

    owners = {run: safe_name(sweep) for run, sweep in runs.items()}
    for folder in _folders(home / "sweeps"):
        add(folder.name, "files", 0)
        _count_folder(counter, folder, add)
        owners |= dict.fromkeys(_leased_runs(folder), folder.name)
    for run, artifacts in artifact_folders(home).items():
        if run in owners:
            add(owners[run], "artifacts", counter.size_bytes(artifacts))
    for name, logs in _log_folders(home / "airflow" / "logs"):
        if name in parts or name in ids:
            add(name, "logs", counter.size_bytes(logs))
    usages = (
        SweepUsage(ids.get(name, name), **{f"{part}_bytes": n for part, n in sizes.items()})
        for name, sizes in parts.items()
    )
    return tuple(sorted(usages, key=lambda usage: (-usage.total_bytes, usage.sweep)))


def artifact_folders(home: Path) -> dict[str, Path]:
    """Return where each MLflow run's artifacts lie, by the run's id, as far as they lie here."""
    return {run.name: run for exp in _folders(home / "artifacts") for run in _folders(exp)}


def sum_bytes(folders: Iterable[Path]) -> int:
    """Return what lies in several folders takes, each file once."""
    counter = Counter()
    return sum(counter.size_bytes(folder) for folder in folders)


def _count_folder(counter: Counter, folder: Path, add: Callable[[str, str, int], None]) -> None:
    start = len(os.fspath(folder)) + 1
    for path, size in counter.entries(folder):
        steps = path[start:].split(os.sep, 3)
        is_checkpoint = len(steps) > 2 and steps[0] == "trials" and steps[2] == CHECKPOINTS
        part = "checkpoints" if is_checkpoint else "files"
        add(folder.name, part, size)


def _leased_runs(folder: Path) -> Iterator[str]:
    """Yield the MLflow runs of a sweep's trials, by the local records of their leases."""
    for lease in folder.glob("trials/*.lease.json"):
        with suppress(OSError, ValueError, AttributeError):
            if run := json.loads(lease.read_text()).get("run_id"):
                yield str(run)


def _log_folders(logs: Path) -> Iterator[tuple[str, Path]]:
    """Yield the folders of Airflow's task logs with the folder's name of the sweep that may be."""
    for dag in _folders(logs):
        dag_id = dag.name.removeprefix("dag_id=")
        for run in _folders(dag):
            run_id = run.name.removeprefix("run_id=")
            yield safe_name(run_id if dag_id == MAIN_DAG else f"{dag_id}:{run_id}"), run


def _folders(parent: Path) -> list[Path]:
    with suppress(OSError), os.scandir(parent) as entries:
        return [Path(e.path) for e in entries if e.is_dir(follow_symlinks=False)]
    return []
