"""A segment's temporary folder: what a stopped or killed script leaves there is removed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hermes_ops.trial.hook import import_variables, without_temporary_folder
from hermes_ops.trial.temporary_folder import TemporaryFolder
from tests.unit.trial.supervised import SupervisedTrial, output_of

SCRIPT = """
import multiprocessing.util, os, tempfile, time
folder, sockets = tempfile.mkdtemp(), multiprocessing.util.get_temp_dir()
open(os.path.join(folder, "shard"), "w").close()
open(os.path.join(os.environ["HERMES_CHECKPOINT_DIR"], "state"), "w").close()
print(folder, os.environ["TMPDIR"], flush=True)
time.sleep(60 if os.environ.get("WAITS") else 0)
print("epoch=1 loss=0.5", flush=True)
os._exit(0)
"""


@pytest.fixture
def trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SupervisedTrial]:
    for name in ("TMPDIR", "TEMP", "TMP"):
        monkeypatch.delenv(name, raising=False)
    trial = SupervisedTrial(tmp_path)
    trial.script.write_text(SCRIPT)
    yield trial
    trial.close()


def start(trial: SupervisedTrial) -> tuple[subprocess.Popen[bytes], Path, Path]:
    """Start a segment; return it with a folder that its script has made, and its TMPDIR."""
    trial.epoch += 1
    options = ["--objective", "loss", "--lock-wait", "30"]
    process = trial.supervise(options, [sys.executable, str(trial.script)])
    made, place = output_of(process).readline().decode().split()
    return process, Path(made), Path(place)


def test_nothing_that_a_script_has_left_in_its_temporary_folder_outlives_its_segment(
    trial: SupervisedTrial, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WAITS", "1")
    process, made, place = start(trial)
    assert made.parent == place
    assert (made / "shard").exists()
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 75
    assert not place.exists()
    process, _, killed = start(trial)
    process.kill()
    process.wait(60)
    monkeypatch.delenv("WAITS")
    process, _, place = start(trial)
    assert process.wait(60) == 0
    assert not killed.exists()
    assert not place.exists()


def test_a_temporary_folder_of_the_user_s_choice_is_left_to_the_script(
    trial: SupervisedTrial, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    process, made, place = start(trial)
    assert process.wait(60) == 0
    assert place == tmp_path
    assert (made / "shard").exists()


def test_what_a_segment_with_a_fit_leaves_goes_at_the_end_of_the_next_one_that_has_a_fit(
    tmp_path: Path,
) -> None:
    def segment(token: str, trial: Path = tmp_path) -> TemporaryFolder:
        folder = TemporaryFolder(trial, token, base=str(tmp_path))
        assert folder.variables({})["TMPDIR"] == str(folder.path)
        (folder.path / "best.keras").touch()
        return folder

    other, first = segment("a", tmp_path / "other"), segment("a")
    first.close(is_last=False, has_fitted=True)
    segment("b").close(is_last=False, has_fitted=False)  # stopped during its imports
    assert set(tmp_path.iterdir()) == {other.path, first.path}
    third = segment("c")
    third.close(is_last=False, has_fitted=True)
    assert set(tmp_path.iterdir()) == {other.path, third.path}
    third.close(is_last=True, has_fitted=True)
    assert set(tmp_path.iterdir()) == {other.path}


def test_an_empty_temporary_folder_goes_at_once(tmp_path: Path) -> None:
    folder = TemporaryFolder(tmp_path, "a", base=str(tmp_path))
    folder.variables({})
    folder.close(is_last=False, has_fitted=True)
    assert list(tmp_path.iterdir()) == []


def test_what_libraries_keep_for_later_segments_is_not_in_the_folder(tmp_path: Path) -> None:
    folder = TemporaryFolder(tmp_path, "a", base="/tmp")
    chosen = {"USER": "ann", "TFHUB_CACHE_DIR": "/models"}
    variables = folder.variables(chosen)
    folder.close(is_last=True, has_fitted=False)
    assert variables["TORCHINDUCTOR_CACHE_DIR"] == "/tmp/torchinductor_ann"
    assert variables["TFHUB_CACHE_DIR"] == "/models"


def test_a_link_in_the_place_of_a_temporary_folder_is_not_followed(tmp_path: Path) -> None:
    folder = TemporaryFolder(tmp_path, "a", base=str(tmp_path))
    (tmp_path / "mine").mkdir()
    folder.path.symlink_to(tmp_path / "mine")
    assert folder.variables({}) == {}
    folder.close(is_last=True, has_fitted=False)
    assert (tmp_path / "mine").exists()


def test_the_path_of_a_socket_in_a_temporary_folder_is_short_enough(tmp_path: Path) -> None:
    place = TemporaryFolder(tmp_path / ("long" * 100), os.urandom(16).hex()).path
    assert len(os.fsencode(place / "pymp-12345678" / "listener-12345678")) < 108


def test_a_standby_interpreter_has_no_segment_s_temporary_folder() -> None:
    own = {"TMPDIR": "/tmp/hermes-1-2", "HERMES_TEMPORARY_DIR": "/tmp/hermes-1-2"}
    assert "TMPDIR" not in without_temporary_folder(own)
    assert import_variables(own) == ()
    assert import_variables({"TMPDIR": "/scratch"}) == (("TMPDIR", "/scratch"),)
