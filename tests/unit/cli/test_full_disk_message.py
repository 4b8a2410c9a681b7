"""Commands on a disk that takes nothing any more."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path

import pytest

from hermes_ops import cli
from hermes_ops.airflow.client import AirflowClient
from hermes_ops.stack.layout import Layout
from hermes_ops.stack.record import StackRecord, save


@pytest.mark.parametrize(
    ("number", "remedy"), [(errno.ENOSPC, "free some space"), (errno.EROFS, "read-only")]
)
def test_a_file_that_cannot_be_written_is_one_line_with_its_place_and_the_remedy(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    number: int,
    remedy: str,
) -> None:
    file = tmp_path / "policy.json"
    file.write_text("{}")

    urls = ("http://127.0.0.1:8080", "http://127.0.0.1:5000")
    running = StackRecord(str(tmp_path), *urls, "gpus", 1, "fifo", {}, False, 0, 0.0)
    save(Layout(tmp_path), running)
    before = {path.name for path in tmp_path.iterdir()}

    def fails(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setenv("HERMES_HOME", str(tmp_path))
    monkeypatch.setattr("hermes_ops.trial.files.os.replace", fails)
    monkeypatch.setattr(AirflowClient, "confirm_pool_edit", lambda *_: None)
    monkeypatch.setattr(sys, "argv", ["hermes", "policy", "fifo"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert str(file) in line
    assert remedy in line
    assert {path.name for path in tmp_path.iterdir()} == before
