from __future__ import annotations

from pathlib import Path

import pytest

from hermes_ops.trial.files import is_first_time
from hermes_ops.trial.keras.runtime import KerasRuntime


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HERMES_TRIAL_DIR", str(tmp_path))
    monkeypatch.setenv("HERMES_METRICS_FILE", str(tmp_path / "metrics.jsonl"))
    return tmp_path


def test_what_is_said_once_is_not_said_again_in_a_later_segment(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(3):  # the processes of three segments
        process = KerasRuntime()
        process.say_once("this fit is resumed at the start of an epoch only")
        process.say_once("this fit is resumed at the start of an epoch only")
    KerasRuntime().say_once("the model has no signature")
    assert capsys.readouterr().out.splitlines() == [
        "hermes: this fit is resumed at the start of an epoch only",
        "hermes: the model has no signature",
    ]


def test_a_folder_that_cannot_be_written_does_not_silence_it(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    assert is_first_time(gone, "a")
    assert is_first_time(gone, "a")


def test_a_line_that_a_crash_has_torn_says_nothing(tmp_path: Path) -> None:
    (tmp_path / "said.jsonl").write_text('{"text": "a"}\n{"text": "b')
    assert [is_first_time(tmp_path, text) for text in "abb"] == [False, True, False]
