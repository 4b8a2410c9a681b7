"""Files of callbacks whose paths a script names anew at each start, such as a dated folder."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hermes_ops.trial.keras.callback_files import CallbackFiles, path_attributes, renamed_paths


class CSVLogger(SimpleNamespace):
    pass


class ModelCheckpoint(SimpleNamespace):
    pass


class TensorBoard(SimpleNamespace):
    pass


class Keep(SimpleNamespace):
    """A callback of the user's."""


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


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
