"""Files that callbacks write, after a process was killed between a line and its checkpoint."""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hermes_ops.trial.keras.callback_files import CallbackFiles, path_attributes, renamed_paths


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


class Keep(SimpleNamespace):
    """A callback of the user's."""


class Segment:
    """The callbacks of a segment, in a folder that is named for its time."""

    def __init__(self, time: str, before: Segment | None = None) -> None:
        folder = Path("runs", time)
        folder.mkdir(parents=True)
        self.folder = folder
        self.callbacks = [
            ModelCheckpoint(filepath=str(folder / "best.keras")),
            ModelCheckpoint(filepath=str(folder / "{epoch:02d}-{val_loss:.2f}.keras")),
            CSVLogger(filename=str(folder / "log.csv"), append=False),
            Keep(path=folder / "own.h5", logs=str(folder / "logs"), text=time),
            TensorBoard(log_dir=str(folder), write_graph=True),
        ]
        saved = before.saved if before else {}
        self.files = CallbackFiles(
            self.callbacks, saved.get("files") or {}, Path(), 0, {}, later={}
        )
        self.files.follow(renamed_paths(self.callbacks, saved.get("texts")))
        self.files.prepare()
        self.texts = path_attributes(self.callbacks)

    @property
    def saved(self) -> dict[str, Any]:
        return {"files": self.files.read(), "texts": self.texts}

    def write(self, name: str, text: str) -> None:
        path = self.folder / name
        path.parent.mkdir(exist_ok=True)
        with self.files.watch(), open(path, "a") as stream:
            stream.write(text)

    def content(self) -> dict[str, str]:
        files = (path for path in self.folder.rglob("*") if path.is_file())
        return {str(path.relative_to(self.folder)): path.read_text() for path in files}


def test_the_files_of_a_dated_folder_are_in_that_of_the_next_segment() -> None:
    first = Segment("10-30")
    first.write("best.keras", "model")
    first.write("log.csv", "epoch,loss\n0,1\n")
    first.write("logs/notes.txt", "one\n")
    for name in ("01-0.50.keras", "own.h5"):  # by a library that does not open files in Python
        (first.folder / name).write_text(name)
    (first.folder / "events.out.tfevents.1").write_text("event")
    saved = first.saved
    first.write("log.csv", "1,1\n")
    (first.folder / "best.keras").unlink()  # its disk is gone
    second = Segment("11-45", SimpleNamespace(saved=saved))  # type: ignore[arg-type]
    expected = {
        "best.keras": "model",
        "log.csv": "epoch,loss\n0,1\n",
        "logs/notes.txt": "one\n",
        "01-0.50.keras": "01-0.50.keras",
        "own.h5": "own.h5",
    }
    assert second.content() == expected
    assert second.callbacks[2].append
    second.write("log.csv", "1,1\n")
    third = Segment("12-50", second)
    assert third.content() == {**expected, "log.csv": "epoch,loss\n0,1\n1,1\n"}


def test_a_file_that_is_there_under_the_new_name_is_not_replaced_by_an_unknown_one() -> None:
    first = Segment("10-30")
    (first.folder / "own.h5").write_text("old")
    saved = first.saved
    Path("runs", "11-45").mkdir()
    Path("runs", "11-45", "own.h5").write_text("new")
    Path("runs", "11-45").rename("kept")
    second = Segment("11-45", SimpleNamespace(saved=saved))  # type: ignore[arg-type]
    assert second.content() == {"own.h5": "old"}
    second.files.follow({"runs/10-30/own.h5": "kept/own.h5"})
    assert Path("kept", "own.h5").read_text() == "new"


def test_paths_that_have_not_changed_and_texts_that_are_no_paths_move_nothing() -> None:
    callbacks = [Keep(path="best.h5", text="one", number=3)]
    saved = path_attributes(callbacks)
    assert renamed_paths(callbacks, saved) == {}
    assert renamed_paths(callbacks, None) == {}
    moved = renamed_paths([Keep(path="best.h5", text="two", number=4)], saved)
    assert moved == {"one": "two"}
    files = CallbackFiles(callbacks, {}, Path(), 0, {}, later={})
    files.follow(moved)
    assert not list(Path().iterdir())
