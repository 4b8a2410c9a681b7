"""Callbacks whose files trials share, on stand-ins for those of Keras."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hermes_ops.trial.keras.callback_files import shared_files, take_out_backups


def callback(name: str, module: str = "keras.src.callbacks", **attributes: Any) -> Any:
    base = type(name, (), {"__module__": module})
    return type("Mine", (base,), attributes)()


BACKUP = callback("BackupAndRestore", backup_dir="backup")
OTHER = callback("EarlyStopping")


@pytest.mark.parametrize("given", [[BACKUP, OTHER], (OTHER, BACKUP), [[BACKUP], OTHER]])
def test_a_backup_is_taken_out_of_any_list(given: Any) -> None:
    arguments = {"callbacks": given}
    assert "backup" in (take_out_backups(arguments) or "")
    assert arguments["callbacks"] == [OTHER]


def test_a_backup_is_taken_out_of_a_callback_list_and_where_it_is_the_only_one() -> None:
    own = SimpleNamespace(callbacks=[BACKUP, OTHER])
    assert take_out_backups({"callbacks": own})
    assert own.callbacks == [OTHER]
    arguments = {"callbacks": BACKUP}
    assert take_out_backups(arguments)
    assert arguments["callbacks"] == []


@pytest.mark.parametrize("given", [None, [], OTHER, [OTHER]])
def test_what_holds_no_backup_stays_as_it_is(given: Any) -> None:
    arguments = {"callbacks": given}
    assert take_out_backups(arguments) is None
    assert arguments["callbacks"] is given


def test_a_class_of_that_name_that_is_not_of_keras_stays() -> None:
    own = callback("BackupAndRestore", module="train", backup_dir="backup")
    assert take_out_backups({"callbacks": [own]}) is None


def test_files_that_trials_share_are_named_and_others_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    trial = tmp_path / "trial"
    best, whole = callback("A", filepath="best.keras"), callback("B", filename=str(trial / "x.csv"))
    said = shared_files({"callbacks": [best, whole, OTHER]}, trial) or ""
    assert "Mine (best.keras)" in said
    assert "x.csv" not in said
    assert shared_files({"callbacks": [whole, OTHER]}, trial) is None
    assert shared_files({"callbacks": [callback("C", filepath="s3://b/best")]}, trial) is None
    assert shared_files({"callbacks": [best]}, tmp_path) is None  # in a copy of its own
