"""Files that callbacks write, after a process was killed between a line and its checkpoint."""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hermes_ops.trial.keras.callback_files import CallbackFiles


class TensorBoard(SimpleNamespace):
    pass


class CSVLogger(SimpleNamespace):
    pass


class ModelCheckpoint(SimpleNamespace):
    pass


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def files(
    *callbacks: Any,
    saved: dict[str, Any] | None = None,
    fit: int = 0,
    later: dict[str, bytes] | None = None,
) -> CallbackFiles:
    later = {} if later is None else later
    return CallbackFiles(callbacks, saved or {}, Path(), fit, {}, later=later)


def append(path: str, text: str) -> None:
    with open(path, "a") as stream:
        stream.write(text)


def test_lines_after_the_checkpoint_are_taken_away_and_a_lost_file_comes_back(
    tmp_path: Path,
) -> None:
    watched = files()
    with watched.watch():
        append("log", "one\n")
        (tmp_path / "other").open("a").close()
    saved = watched.read()
    assert set(saved) == {"log", "other"}
    append("log", "two\n")
    files(saved=saved).prepare()
    assert Path("log").read_text() == "one\n"
    Path("log").unlink()
    files(saved=saved).prepare()
    assert Path("log").read_text() == "one\n"


def test_what_a_later_fit_wrote_into_a_file_of_a_complete_one_is_there_again() -> None:
    first = files()
    with first.watch():
        append("log", "first\n")
    saved = first.read()
    append("log", "second\n")  # by batch: nobody watches that
    later: dict[str, bytes] = {}
    for _ in range(2):
        files(saved=saved, later=later).put_back_end()
        assert Path("log").read_text() == "first\n"
    stopped = files(fit=1, later=later)
    stopped.put_forward()
    stopped.prepare()
    assert Path("log").read_text() == "first\nsecond\n"


def test_a_large_file_is_not_cut_at_the_end_of_a_complete_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("hermes_ops.trial.keras.callback_files._MOST_BYTES", 4)
    first = files()
    with first.watch():
        append("log", "first\n")
    saved = first.read()
    append("log", "second\n")
    files(saved=saved).put_back_end()
    assert Path("log").read_text() == "first\nsecond\n"


def test_a_file_that_a_callback_empties_when_it_begins_is_whole_again() -> None:
    watched = files()
    with watched.watch():
        append("log", "head\none\n")
    saved = watched.read()
    again = files(saved=saved)
    again.prepare()
    Path("log").write_text("head\n")
    again.put_back()
    assert Path("log").read_text() == "head\none\n"


def test_a_large_log_is_cut_and_a_large_model_is_left() -> None:
    size = (4 << 20) + 1
    checkpoint = ModelCheckpoint(filepath="best.keras")
    watched = files(checkpoint)
    with watched.watch():
        append("log", "x" * size)
    Path("best.keras").write_bytes(b"m" * (33 << 20))
    saved = watched.read()
    assert saved["log"]["content"] is None
    append("log", "more")
    append("best.keras", "more")
    again = files(checkpoint, saved=saved)
    again.prepare()
    assert Path("log").stat().st_size == size
    assert Path("best.keras").stat().st_size == (33 << 20) + 4
    Path("log").unlink()
    assert again.missing() == ["log"]


def test_files_of_an_epoch_each_are_not_kept_with_every_checkpoint() -> None:
    watched = files()
    with watched.watch():
        for name in ("epoch-1", "epoch-2", "best", "best"):
            Path(name).write_text(name)
    saved = watched.read()
    assert {name for name, entry in saved.items() if entry["content"]} == {"best"}


def test_what_other_threads_write_meanwhile_is_not_a_callbacks() -> None:
    watched, opened = files(), open
    with watched.watch():
        thread = threading.Thread(target=append, args=("checkpoint", "data"))
        thread.start()
        thread.join()
    assert watched.read() == {}
    assert open is opened


def test_a_csv_logger_goes_on_in_its_file_and_writes_no_second_header() -> None:
    logger = CSVLogger(filename="log.csv", append=False)
    Path("log.csv").write_text("epoch,loss\n0,1\n")
    saved = files(logger).read()
    append("log.csv", "1,1\n")
    files(logger, saved=saved).prepare()
    assert logger.append
    assert Path("log.csv").read_text() == "epoch,loss\n0,1\n"


def test_event_files_of_a_killed_process_go_and_those_of_others_stay() -> None:
    board = TensorBoard(log_dir="board", write_graph=True)
    own = f"events.out.tfevents.1.{socket.gethostname()}.{os.getpid()}.0.v2"
    other = f"events.out.tfevents.1.{socket.gethostname()}.1{os.getpid()}.0.v2"
    Path("board").mkdir()
    for name in (own + ".earlier-fit", other):
        append(f"board/{name}", "event")
    killed = files(board)
    killed.prepare()
    append(f"board/{own}", "event")
    saved = killed.read()
    assert set(saved) == {f"board/{own}"}
    append(f"board/{own}.late", "event")
    files(board, saved=saved).prepare()
    left = {path.name for path in Path("board").iterdir()}
    assert left == {own, own + ".earlier-fit", other}
    files(board, fit=1).prepare()
    assert {path.name for path in Path("board").iterdir()} == left
    files(board).prepare()
    assert {path.name for path in Path("board").iterdir()} == left - {own}
