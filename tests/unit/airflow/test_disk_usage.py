from __future__ import annotations

import json
import os
from pathlib import Path

from hermes_ops.airflow.disk_usage import Counter, SweepUsage, sweep_usages
from hermes_ops.cli.storage_commands import disk_document
from hermes_ops.trial.disk_space import format_bytes

SIZE = 64 * 1024


def fill(path: Path, size: int = SIZE) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(os.urandom(size))
    return path


def usage_of(home: Path, **runs: str) -> dict[str, SweepUsage]:
    return {u.sweep: u for u in sweep_usages(home, runs)}


def about(size_bytes: int, files: int) -> bool:
    """Whether it is what so many files take; folders take a little too."""
    return files * SIZE <= size_bytes < files * SIZE + SIZE


def test_each_part_of_a_sweep_is_counted_and_the_greatest_sweep_is_first(tmp_path: Path) -> None:
    sweeps = tmp_path / "sweeps"
    fill(sweeps / "small-1" / "decisions.jsonl")
    for number in range(2):
        fill(sweeps / "big-1" / "trials" / str(number) / "checkpoints" / "keras-1" / "arrays.bin")
    fill(sweeps / "big-1" / "trials" / "0" / "metrics.jsonl")
    lease = sweeps / "big-1" / "trials" / "0.lease.json"
    lease.write_text(json.dumps({"run_id": "run-0"}))
    fill(tmp_path / "artifacts" / "7" / "run-0" / "artifacts" / "model.keras")
    fill(tmp_path / "artifacts" / "7" / "own" / "artifacts" / "report.html")
    fill(tmp_path / "artifacts" / "7" / "another" / "artifacts" / "x")
    fill(tmp_path / "airflow" / "logs" / "dag_id=hermes_sweep" / "run_id=big-1" / "a.log")
    assert [u.sweep for u in sweep_usages(tmp_path, {})] == ["big-1", "small-1"]
    found = usage_of(tmp_path, own="big-1")["big-1"]
    assert about(found.checkpoints_bytes, 2)
    assert about(found.files_bytes, 1)
    assert about(found.artifacts_bytes, 2)
    assert about(found.logs_bytes, 1)
    assert about(found.total_bytes, 6)


def test_a_sweep_of_another_dag_has_its_id_and_its_logs(tmp_path: Path) -> None:
    sweep = "nightly:scheduled__2026-01-01T00:00:00+00:00"
    from hermes_ops.trial.checkpoint_store.store import safe_name

    fill(tmp_path / "sweeps" / safe_name(sweep) / "decisions.jsonl")
    run = "run_id=scheduled__2026-01-01T00:00:00+00:00"
    fill(tmp_path / "airflow" / "logs" / "dag_id=nightly" / run / "a.log")
    found = usage_of(tmp_path, own=sweep)[sweep]
    assert about(found.logs_bytes, 1)


def test_links_are_not_followed_and_a_file_of_two_names_counts_once(tmp_path: Path) -> None:
    home, outside = tmp_path / "home", fill(tmp_path / "outside" / "huge", 64 * SIZE)
    file = fill(home / "sweeps" / "s" / "trials" / "0" / "data")
    os.link(file, file.with_name("again"))
    (file.parent / "file").symlink_to(outside)
    (file.parent / "folder").symlink_to(outside.parent)
    (file.parent / "loop").symlink_to(file.parent)
    (home / "sweeps" / "linked").symlink_to(outside.parent)
    assert about(usage_of(home)["s"].total_bytes, 1)
    assert usage_of(home).keys() == {"s"}
    assert about(Counter().size_bytes(home), 1)


def test_holes_in_a_file_take_no_room(tmp_path: Path) -> None:
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(1 << 30)
    assert Counter().size_bytes(tmp_path) < SIZE


def test_the_document_has_what_belongs_to_no_sweep_and_what_is_free(tmp_path: Path) -> None:
    fill(tmp_path / "sweeps" / "s" / "decisions.jsonl")
    fill(tmp_path / "mlflow" / "mlflow.db", 3 * SIZE)
    found = disk_document(tmp_path)
    assert [row["sweep"] for row in found["sweeps"]] == ["s"]
    assert about(found["other_bytes"], 3)
    assert about(found["total_bytes"], 4)
    assert found["free_bytes"] > 0


def test_a_state_folder_that_is_not_there_takes_nothing_of_what_is_free_there(
    tmp_path: Path,
) -> None:
    found = disk_document(tmp_path / "none" / "inside")
    assert (found["sweeps"], found["total_bytes"]) == ([], 0)
    assert found["free_bytes"] > 0


def test_sizes_are_in_the_unit_that_a_person_reads() -> None:
    sizes = (0, 999, 1_234, 250_000, 12_340_000_000, 5e15)
    assert [format_bytes(s) for s in sizes] == [
        "0 B",
        "999 B",
        "1.2 KiB",
        "244 KiB",
        "11.5 GiB",
        "4547 TiB",
    ]
