"""The records of a trial's processes where its workers have reapers of their own."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from hermes_ops.trial.processes.record import ProcessRecord, record_of
from hermes_ops.trial.processes.tree import Process, is_alive, process_of


@pytest.fixture
def sleepers() -> Iterator[list[Process]]:
    started = [subprocess.Popen(["sleep", "600"]) for _ in range(3)]
    yield [process for p in started if (process := process_of(p.pid)) is not None]
    for p in started:
        p.kill()
        p.wait()


def record(folder: Path, rank: str | None) -> ProcessRecord:
    environment = {"HERMES_TRIAL_DIR": str(folder), "HERMES_TRIAL": "7"}
    if rank is not None:
        environment["HERMES_RANK"] = rank
    found = record_of(environment)
    assert found is not None
    return found


def test_the_first_worker_has_the_record_of_a_trial_and_the_others_one_each(
    tmp_path: Path,
) -> None:
    names = [record(tmp_path, rank).path.name for rank in (None, "0", "1", "12")]
    assert names == ["processes.json", "processes.json", "processes-1.json", "processes-12.json"]


def test_ending_a_trial_by_its_record_ends_the_processes_of_all_its_workers(
    tmp_path: Path, sleepers: list[Process]
) -> None:
    for rank, process in enumerate(sleepers):
        record(tmp_path, str(rank)).write([process])
    whole = record(tmp_path, None)
    assert sorted(whole.alive()) == sorted(sleepers)
    assert record(tmp_path, "1").alive() == [sleepers[1]]
    assert whole.end(30.0) == []
    assert not any(map(is_alive, sleepers))
    assert os.listdir(tmp_path) == []


def test_a_reaper_that_is_done_removes_its_own_record_alone(
    tmp_path: Path, sleepers: list[Process]
) -> None:
    for rank, process in enumerate(sleepers):
        record(tmp_path, str(rank)).write([process])
    record(tmp_path, "0").remove()
    assert sorted(record(tmp_path, None).alive()) == sorted(sleepers[1:])
