"""A trial's folder may hold anything: nothing outside of it is read, written or made."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hermes_ops.airflow.folders import StatusFile, TrialFolder
from hermes_ops.airflow.trial.node_checkpoints import by_node
from hermes_ops.airflow.trial.pods import prepare
from hermes_ops.confined_folder import DOCUMENT_BYTES, ConfinedFolder, NotConfinedError
from hermes_ops.errors import HermesError
from hermes_ops.tracking.artifacts import MLMODEL, SIGNATURE_FILE, package_model
from hermes_ops.tracking.sender import load_offset, read_lines, save_offset
from hermes_ops.trial.locks import BusyError, lock_file
from hermes_ops.trial.node_checkpoints import MARK

SECRET = json.dumps({"step": 7, "offset": 7, "start_s": 7.0, "name": "secret", "value": 7.0})


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    """A file of somebody else, in every form that a reader takes."""
    file = tmp_path / "elsewhere" / "secret"
    file.parent.mkdir()
    file.write_text(f"{SECRET}\n")
    return file


@pytest.fixture
def trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TrialFolder:
    monkeypatch.setenv("HERMES_HOME", str(tmp_path / "home"))
    folder = TrialFolder.from_sweep("sweep", 0)
    folder.path.mkdir(parents=True)
    return folder


READERS: dict[str, tuple[str, Callable[[TrialFolder], Any]]] = {
    "status": ("status.json", TrialFolder.status),
    "result": ("result.json", TrialFolder.result),
    "segments": ("segments.jsonl", TrialFolder.segments),
    "status file": ("status.json", lambda t: StatusFile.from_folder(t).read()),
    "metrics": ("metrics.jsonl", lambda t: list(read_lines(t.metrics, 0))),
    "node": (MARK, lambda t: by_node("sweep", [0])),
    "offset": ("sent.json", lambda t: load_offset(t.sent)),
    "model": (f"model/{SIGNATURE_FILE}", lambda t: package_model(t.model, "run")),
}


def linked(name: str, trial: TrialFolder, secret: Path) -> None:
    (trial.path / name).symlink_to(secret)


def through_a_folder(name: str, trial: TrialFolder, secret: Path) -> None:
    aim = secret.parent / Path(name).name
    aim.write_text(secret.read_text())
    (trial.path / Path(name).parts[0]).symlink_to(secret.parent, target_is_directory=True)


def piped(name: str, trial: TrialFolder, secret: Path) -> None:
    os.mkfifo(trial.path / name)


@pytest.mark.parametrize("leave", [linked, piped])
@pytest.mark.parametrize("reader", READERS)
def test_no_reader_follows_a_link_or_waits_for_a_pipe(
    reader: str, leave: Callable[..., None], trial: TrialFolder, secret: Path
) -> None:
    name, read = READERS[reader]
    (trial.path / name).parent.mkdir(exist_ok=True)
    leave(name, trial, secret)
    found = None
    with contextlib.suppress(NotConfinedError):
        found = read(trial)
    assert not found


def test_a_folder_that_is_a_link_is_no_model(trial: TrialFolder, secret: Path) -> None:
    through_a_folder(f"model/{SIGNATURE_FILE}", trial, secret)
    assert not package_model(trial.model, "run")


@pytest.mark.parametrize("name", ["status.json", "result.json", "segments.jsonl"])
def test_a_document_without_end_is_not_read_into_memory(name: str, trial: TrialFolder) -> None:
    with (trial.path / name).open("wb") as stream:
        stream.truncate(DOCUMENT_BYTES + 1)
    with pytest.raises(NotConfinedError, match="bytes"):
        ConfinedFolder(trial.path).read(name)


WRITERS: dict[str, tuple[str, Callable[[TrialFolder], Any]]] = {
    "offset": ("sent.json", lambda t: save_offset(t.sent, 3)),
    "its temporary file": (f".sent.json.{os.getpid()}.tmp", lambda t: save_offset(t.sent, 3)),
    "nudge": ("nudge", lambda t: t.wake_file().wake()),
    "lock": ("lock", lambda t: t.empty()),
    "pod": ("checkpoints", lambda t: prepare(t.checkpoints, os.getuid())),
}


@pytest.mark.parametrize("exists", [True, False])
@pytest.mark.parametrize("writer", WRITERS)
def test_no_writer_changes_or_makes_what_a_link_names(
    writer: str, exists: bool, trial: TrialFolder, secret: Path
) -> None:
    name, write = WRITERS[writer]
    aim = secret if exists else secret.with_name("absent")
    if exists:
        os.utime(secret, (1.0, 1.0))
    linked(name, trial, aim)
    with contextlib.suppress(HermesError, BusyError, OSError):
        write(trial)
    assert aim.exists() == exists
    if exists:
        assert aim.read_text() == f"{SECRET}\n"
        assert aim.stat().st_mtime == 1.0


def test_a_description_of_a_model_is_not_written_through_a_link(
    trial: TrialFolder, secret: Path
) -> None:
    trial.model.mkdir()
    (trial.model / "model.keras").write_bytes(b"weights")
    tensor = {"name": "x", "dtype": "float32", "shape": [-1, 2]}
    told = {"keras": "3.12.0", "inputs": [tensor], "outputs": [tensor], "requirements": []}
    (trial.model / SIGNATURE_FILE).write_text(json.dumps(told))
    (trial.model / "requirements.txt").symlink_to(secret)
    (trial.model / MLMODEL).symlink_to(secret.with_name("absent"))
    assert package_model(trial.model, "run")
    assert secret.read_text() == f"{SECRET}\n"
    assert not secret.with_name("absent").exists()
    assert not (trial.model / MLMODEL).is_symlink()


def test_only_regular_files_inside_are_listed_for_an_upload(
    trial: TrialFolder, secret: Path
) -> None:
    inside = trial.path / "model" / "variables"
    inside.mkdir(parents=True)
    (inside / "weights.bin").write_bytes(b"weights")
    linked("model/stolen", trial, secret)
    (trial.path / "model" / "folder").symlink_to(secret.parent, target_is_directory=True)
    os.mkfifo(trial.path / "model" / "pipe")
    found = ConfinedFolder(trial.model)
    assert list(found.files()) == ["variables/weights.bin"]
    assert sorted(found.left_out()) == ["folder", "pipe", "stolen"]
    assert found.read("variables/weights.bin") == b"weights"
    with pytest.raises(NotConfinedError, match="stolen"):
        found.read("stolen")
    with pytest.raises(NotConfinedError, match="folder/secret"):
        found.read("folder/secret")


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "a/../../b", "", "."])
def test_no_name_leads_out_of_the_folder(name: str, trial: TrialFolder) -> None:
    with pytest.raises(ValueError, match="no path inside"):
        ConfinedFolder(trial.path).open(name)


def test_a_lock_that_is_a_link_is_said_to_be_one(trial: TrialFolder, secret: Path) -> None:
    linked("lock", trial, secret)
    with pytest.raises(BusyError, match="is a link, remove it"):
        lock_file(trial.path / "lock", 0.0, "the trial's folder")
