"""Copies of checkpoints in a store: complete or not there, whatever ends their writer."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import uuid
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.registry import _registry
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hermes_ops.trial.checkpoint_store import download, store
from hermes_ops.trial.checkpoint_store.download import (
    AWAY,
    READY,
    STOPPED,
    DownloadResult,
    ensure_checkpoints,
    fetch,
)
from hermes_ops.trial.checkpoint_store.store import (
    MARK,
    ChangedError,
    CheckpointStore,
    DamagedError,
    NotInstalledError,
    StoreError,
    StoreMark,
    connect,
    place,
    snapshot,
)
from hermes_ops.trial.checkpoint_store.upload import MOMENT_S, CheckpointUploader
from hermes_ops.trial.files import Folder, read_json, write_json
from hermes_ops.trial.retention import CheckpointRetention

QUIET = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))


class CheckpointFiles:
    """A file system of fsspec that stands still after so many changes, or fails while `away`."""

    CHANGES = ("open", "rm_file", "makedirs", "pipe_file")

    def __init__(self, files: Any, changes: int | None = None) -> None:
        self._files, self._left = files, changes
        self.away = False
        self.changes = 0

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._files, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            if self.away:
                raise ConnectionError("away")
            if name in self.CHANGES and not (name == "open" and args[1] == "rb"):
                if self._left is not None and self.changes >= self._left:
                    raise KeyboardInterrupt
                self.changes += 1
            return method(*args, **kwargs)

        return call if callable(method) else method


def memory() -> tuple[Any, str]:
    return fsspec.filesystem("memory"), f"/{uuid.uuid4().hex}"


def trial(base: Path) -> Folder:
    folder = Folder(base)
    folder.checkpoints.mkdir(parents=True)
    return folder


def write(folder: Folder, files: dict[str, str]) -> None:
    """Make the checkpoints exactly these; unchanged ones are not written again."""
    for old in contents(folder).keys() - files.keys():
        (folder.checkpoints / old).unlink()
    for name, text in files.items():
        path = folder.checkpoints / name
        if not path.exists() or path.read_text() != text:
            path.parent.mkdir(exist_ok=True)
            fresh = path.with_name(f".{path.name}.new")
            fresh.write_text(text)
            os.replace(fresh, path)


def contents(folder: Folder) -> dict[str, str]:
    root = folder.checkpoints
    found = (p for p in root.rglob("*") if p.is_file())
    return {str(p.relative_to(root)): p.read_text() for p in found}


def copier(
    folder: Folder, store: CheckpointStore, epoch: int = 1, token: str = "ab"
) -> CheckpointUploader:
    return CheckpointUploader("store://x", folder, epoch, token, lambda _: store)


def settle(writer: CheckpointUploader, now_s: float = 0.0) -> float | None:
    writer.upload_complete(now_s, final=False)
    return writer.upload_complete(now_s + MOMENT_S, final=False)


def fetched(files: Any, root: str, base: Path, since: int = 0) -> dict[str, str]:
    folder = trial(base)
    fetch(CheckpointStore(files, root), folder, since)
    return contents(folder)


def test_what_was_copied_comes_back_with_its_folders_times_and_hidden_parts(tmp_path: Path) -> None:
    files, root = memory()
    folder = trial(tmp_path / "a")
    write(folder, {"epoch-1": "one", "tree/.meta": "m", "tree/data": "d"})
    (folder.checkpoints / "tree" / "empty").mkdir()
    (folder.checkpoints / "half.tmp").write_text("not yet")
    os.utime(folder.checkpoints / "epoch-1", ns=(10**18, 10**18 + 5))
    assert settle(copier(folder, CheckpointStore(files, root))) is None
    other = trial(tmp_path / "b")
    assert fetch(CheckpointStore(files, root), other, 0)
    assert contents(other) == {"epoch-1": "one", "tree/.meta": "m", "tree/data": "d"}
    assert (other.checkpoints / "tree" / "empty").is_dir()
    assert (other.checkpoints / "epoch-1").stat().st_mtime_ns == 10**18 + 5


def test_links_come_back_as_links_and_content_from_elsewhere_as_content(tmp_path: Path) -> None:
    files, root = memory()
    folder = trial(tmp_path / "a")
    write(folder, {"tree/data": "d", "epoch-1": "one"})
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "big").write_text("b")
    place = folder.checkpoints
    (place / "latest").symlink_to("tree")
    (place / "last").symlink_to(place / "epoch-1")
    (place / "tree" / "up").symlink_to("../epoch-1")
    (place / "tree" / "away").symlink_to(tmp_path / "elsewhere")
    (place / "tree" / "round").symlink_to(".")
    settle(copier(folder, CheckpointStore(files, root)))
    other = trial(tmp_path / "b")
    assert fetch(CheckpointStore(files, root), other, 0)
    links = {p: os.readlink(other.checkpoints / p) for p in ("latest", "last", "tree/up")}
    assert links == {"latest": "tree", "last": "epoch-1", "tree/up": "../epoch-1"}
    assert (other.checkpoints / "tree" / "round").resolve() == other.checkpoints / "tree"
    assert not (other.checkpoints / "tree" / "away").is_symlink()
    assert contents(other)["tree/away/big"] == "b"
    assert len(files.find(root)) == 4  # three files and a manifest: nothing is there twice


def test_what_cannot_be_copied_leaves_the_rest_of_its_checkpoint(tmp_path: Path) -> None:
    files, root = memory()
    folder = trial(tmp_path / "a")
    write(folder, {"tree/data": "d"})
    os.mkfifo(folder.checkpoints / "tree" / "pipe")
    (folder.checkpoints / "tree" / "gone").symlink_to(tmp_path / "nothing")
    (folder.checkpoints / "whole").symlink_to(folder.checkpoints)
    assert settle(copier(folder, CheckpointStore(files, root))) is None
    assert fetched(files, root, tmp_path / "b") == {"tree/data": "d"}


def test_a_file_that_may_not_be_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    files, root = memory()
    folder = trial(tmp_path / "a")
    write(folder, {"state": "1"})
    monkeypatch.setattr(store, "open", refuse, raising=False)
    assert settle(copier(folder, CheckpointStore(files, root))) == 2.0
    assert "state cannot be read: Permission denied" in capsys.readouterr().out


def test_a_checkpoint_is_copied_only_once_it_has_not_changed_for_a_moment(tmp_path: Path) -> None:
    files, root = memory()
    folder, store = trial(tmp_path), CheckpointStore(files, root)
    writer = copier(folder, store)
    write(folder, {"state": "1"})
    assert writer.upload_complete(0.0, final=False) == MOMENT_S
    assert store.names() == []
    write(folder, {"state": "22"})
    assert writer.upload_complete(MOMENT_S, final=False) == MOMENT_S
    assert store.names() == []
    assert writer.upload_complete(2 * MOMENT_S, final=False) is None
    assert len(store.names()) == 1


def test_nothing_is_copied_while_a_part_of_the_last_copy_is_written_anew(tmp_path: Path) -> None:
    files, root = memory()
    folder = trial(tmp_path / "a")
    writer = copier(folder, CheckpointStore(files, root))
    write(folder, {"weights": "1", "optimizer": "1"})
    settle(writer)
    write(folder, {"weights": "22", "optimizer": "1"})
    writer.upload_complete(10.0, final=False)
    write(folder, {"weights": "22", "optimizer": "22"})
    assert writer.upload_complete(10.0 + MOMENT_S, final=False) == MOMENT_S
    assert fetched(files, root, tmp_path / "b") == {"weights": "1", "optimizer": "1"}


def test_at_the_end_what_is_newest_is_copied_at_once(tmp_path: Path) -> None:
    files, root = memory()
    folder = trial(tmp_path / "a")
    writer = copier(folder, CheckpointStore(files, root))
    writer.start()
    write(folder, {"state": "last"})
    assert writer.finish(30.0, lambda: False)
    assert fetched(files, root, tmp_path / "b") == {"state": "last"}


def test_the_store_keeps_what_the_trial_keeps_and_nothing_else(tmp_path: Path) -> None:
    files, root = memory()
    folder = trial(tmp_path / "a")
    writer = copier(folder, CheckpointStore(files, root))
    retention = CheckpointRetention(folder.root, folder.checkpoints, 1, "minimize")
    for epoch, loss in enumerate((0.5, 0.1, 0.9, 0.8)):
        (folder.checkpoints / f"epoch-{epoch}").write_text(str(epoch))
        stamp = 10**18 + epoch * 10**9
        os.utime(folder.checkpoints / f"epoch-{epoch}", ns=(stamp, stamp))
        retention.value(loss, stamp / 1e9)
        retention.checkpointed()
        settle(writer, 10.0 * epoch)
    assert len(files.find(root)) == 3  # two checkpoints and the manifest
    other = trial(tmp_path / "b")
    fetch(CheckpointStore(files, root), other, 0)
    assert set(contents(other)) == {"epoch-1", "epoch-3"}
    assert (read_json(other.root / "kept.json") or {})["best"] == "epoch-1"


STATES = st.lists(
    st.dictionaries(
        st.sampled_from(["weights", "optimizer", "step/a", "step/b"]),
        st.sampled_from(["1", "22", "333"]),
        min_size=1,
    ),
    min_size=1,
    max_size=5,
)


@QUIET
@given(states=STATES, changes=st.integers(0, 40), segments=st.booleans())
def test_after_any_prefix_of_the_writes_a_fetch_gives_one_whole_checkpoint(
    states: list[dict[str, str]], changes: int, segments: bool
) -> None:
    files, root = memory()
    store, done = CheckpointFiles(files, changes), -1
    with tempfile.TemporaryDirectory() as scratch:
        folder = trial(Path(scratch, "a"))
        writer = copier(folder, CheckpointStore(store, root))
        try:
            for at, state in enumerate(states):
                if segments:
                    writer = copier(folder, CheckpointStore(store, root), at + 1, f"a{at}")
                write(folder, state)
                writer.upload_complete(10.0 * at, final=True)
                done = at
        except KeyboardInterrupt:
            pass
        found = fetched(files, root, Path(scratch, "b"))
    possible = states[max(done, 0) : done + 2]
    assert found in possible or (done < 0 and not found)


@QUIET
@given(damage=st.integers(0, 20), cut=st.booleans())
def test_a_copy_that_is_damaged_is_left_out_or_whole_never_mixed(damage: int, cut: bool) -> None:
    files, root = memory()
    with tempfile.TemporaryDirectory() as scratch:
        folder = trial(Path(scratch, "a"))
        writer = copier(folder, CheckpointStore(files, root))
        write(folder, {"a": "1", "b": "1"})
        writer.upload_complete(0.0, final=True)
        saved = {path: files.cat_file(path) for path in files.find(root)}
        write(folder, {"a": "22", "b": "22"})
        writer.upload_complete(1.0, final=True)
        for path, data in saved.items():  # as if the deletion of the older one had been cut off
            files.pipe_file(path, data)
        every = sorted(files.find(root))
        victim = every[damage % len(every)]
        files.pipe_file(victim, files.cat_file(victim)[:-1] if cut else b"xx")
        found = fetched(files, root, Path(scratch, "b"))
    assert found in ({"a": "22", "b": "22"}, {"a": "1", "b": "1"})


def test_an_older_lease_wins_over_no_later_one_and_deletes_nothing_of_it(tmp_path: Path) -> None:
    files, root = memory()
    old, new = trial(tmp_path / "old"), trial(tmp_path / "new")
    late = copier(old, CheckpointStore(files, root), epoch=1, token="aa")
    write(old, {"state": "1"})
    settle(late)
    write(new, {"state": "2"})
    settle(copier(new, CheckpointStore(files, root), epoch=2, token="bb"))
    write(old, {"state": "3"})
    assert settle(late, 10.0) is None
    assert fetched(files, root, tmp_path / "x") == {"state": "2"}


def test_a_store_that_fails_is_said_once_and_tried_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files, root = memory()
    store = CheckpointFiles(files)
    folder = trial(tmp_path / "a")
    writer = copier(folder, CheckpointStore(store, root))
    write(folder, {"state": "1"})
    store.away = True
    writer.upload_complete(0.0, final=False)
    waits = [writer.upload_complete(10.0 * n, final=False) for n in range(1, 9)]
    assert waits == [2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0, 60.0]
    store.away = False
    assert writer.upload_complete(100.0, final=False) is None
    assert fetched(files, root, tmp_path / "b") == {"state": "1"}
    said = capsys.readouterr().out
    assert said.count("hermes-trial") == 1
    assert "store://x" in said
    assert "away" in said


def test_a_store_that_hangs_does_not_hold_up_the_end(tmp_path: Path) -> None:
    release = threading.Event()

    def hanging(_: str) -> CheckpointStore:
        release.wait(30)
        raise StoreError("gone")

    folder = trial(tmp_path)
    writer = CheckpointUploader("store://x", folder, 1, "ab", hanging)
    write(folder, {"state": "1"})
    writer.start()
    assert not writer.finish(30.0, hurried=lambda: True)
    release.set()


def test_the_end_waits_for_the_last_checkpoint_while_a_store_is_slow(tmp_path: Path) -> None:
    files, root = memory()
    release, asked = threading.Event(), list[bool]()

    def slow(_: str) -> CheckpointStore:
        release.wait(30)
        return CheckpointStore(files, root)

    def hurried() -> bool:
        asked.append(False)
        if len(asked) == 3:
            release.set()
        return False

    folder = trial(tmp_path / "a")
    writer = CheckpointUploader("store://x", folder, 1, "ab", slow)
    write(folder, {"state": "last"})
    writer.start()
    assert writer.finish(30.0, hurried)
    assert fetched(files, root, tmp_path / "b") == {"state": "last"}


def test_a_later_segment_of_a_lease_has_the_newest_copy_where_older_ones_were_not_deleted(
    tmp_path: Path,
) -> None:
    files, root = memory()
    folder = trial(tmp_path / "a")
    left: dict[str, bytes] = {}
    for state, token in (("1", "cc"), ("2", "bb"), ("3", "aa")):
        write(folder, {"state": state})
        settle(copier(folder, CheckpointStore(files, root), token=token))
        left.update({path: files.cat_file(path) for path in files.find(root)})
        for path, data in left.items():  # the deletion of older ones was refused
            files.pipe_file(path, data)
    assert fetched(files, root, tmp_path / "b") == {"state": "3"}


def test_what_the_segment_before_has_copied_is_not_copied_again(tmp_path: Path) -> None:
    files, root = memory()
    folder = trial(tmp_path)
    write(folder, {"state": "1"})
    settle(copier(folder, CheckpointStore(files, root)))
    store = CheckpointFiles(files)
    assert settle(copier(folder, CheckpointStore(store, root), epoch=2, token="bb")) is None
    assert store.changes == 0


def test_a_folder_that_is_older_than_the_store_is_replaced_as_a_whole(tmp_path: Path) -> None:
    files, root = memory()
    here, there = trial(tmp_path / "here"), trial(tmp_path / "there")
    write(here, {"epoch-1": "1", "log": "1"})
    StoreMark(epoch=1, tokens=("aa",)).write(here)
    write(there, {"epoch-5": "5"})
    settle(copier(there, CheckpointStore(files, root), epoch=2, token="bb"))
    fetch(CheckpointStore(files, root), here, 0)
    assert contents(here) == {"epoch-5": "5"}
    assert StoreMark.read(here)[:3] == (2, ("bb",), True)


@pytest.mark.parametrize(("epoch", "token"), [(3, "cc"), (2, "bb")])
def test_a_folder_that_is_as_new_as_the_store_stays(tmp_path: Path, epoch: int, token: str) -> None:
    files, root = memory()
    here, there = trial(tmp_path / "here"), trial(tmp_path / "there")
    write(there, {"state": "copied"})
    settle(copier(there, CheckpointStore(files, root), epoch=2, token="bb"))
    write(here, {"state": "own"})
    StoreMark(epoch=epoch, tokens=(token,)).write(here)
    assert fetch(CheckpointStore(files, root), here, 0) == ""
    assert contents(here) == {"state": "own"}


def test_a_fetch_that_was_cut_off_between_old_and_new_is_made_good(tmp_path: Path) -> None:
    files, root = memory()
    here, there = trial(tmp_path / "here"), trial(tmp_path / "there")
    write(there, {"a": "1", "b": "1"})
    settle(copier(there, CheckpointStore(files, root), epoch=1, token="aa"))
    write(here, {"a": "1"})
    write_json(here.root / MARK, {"sound": False})
    fetch(CheckpointStore(files, root), here, 0)
    assert contents(here) == {"a": "1", "b": "1"}


@pytest.mark.parametrize("renames", range(3))
def test_a_fetch_that_is_killed_while_it_puts_files_in_place_is_made_good_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, renames: int
) -> None:
    """Its folder was empty under the newest lease: now it has a part of a checkpoint."""
    files, root = memory()
    here, there = trial(tmp_path / "here"), trial(tmp_path / "there")
    write(there, {"a": "1", "b": "1", "c": "1"})
    settle(copier(there, CheckpointStore(files, root), epoch=1, token="aa"))
    StoreMark(epoch=1, tokens=("aa",)).write(here)
    done, rename = list[str](), os.rename

    def killed(source: str, target: str) -> None:
        if len(done) == renames:
            raise KeyboardInterrupt
        done.append(str(target))
        rename(source, target)

    def in_process(*_: object) -> DownloadResult:
        return DownloadResult(READY, fetch(CheckpointStore(files, root), here, 0))

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", killed)
        with pytest.raises(KeyboardInterrupt):
            fetch(CheckpointStore(files, root), here, 0)
    (here.checkpoints / ".fetched" / "c").mkdir(parents=True)
    monkeypatch.setattr(download, "_download_in_child", in_process)
    answer = ensure_checkpoints("x", here, 2, since=0, token="bb", stopped=lambda: False)
    assert answer.state == READY
    assert contents(here) == {"a": "1", "b": "1", "c": "1"}


def test_copies_from_before_a_beginning_from_scratch_count_no_more(tmp_path: Path) -> None:
    files, root = memory()
    folder = trial(tmp_path / "a")
    write(folder, {"state": "1"})
    settle(copier(folder, CheckpointStore(files, root), epoch=3))
    assert fetched(files, root, tmp_path / "b", since=4) == {}
    assert files.find(root) == []


def test_a_manifest_cannot_write_outside_the_checkpoints(tmp_path: Path) -> None:
    files, root = memory()
    folder = trial(tmp_path / "a")
    write(folder, {"state": "1"})
    settle(copier(folder, CheckpointStore(files, root)))
    (name,) = CheckpointStore(files, root).names()
    document = CheckpointStore(files, root).read(name)
    document["files"][0][0] = "../../outside"
    with pytest.raises(DamagedError, match="leads out"):
        CheckpointStore(files, root).download(document, tmp_path / "b")
    document["files"] = []
    for link in (["../link", "state"], ["link", "../outside"], ["link", "/outside"]):
        with pytest.raises(DamagedError, match="leads out"):
            CheckpointStore(files, root).download({**document, "links": [link]}, tmp_path / "b")


def test_the_supervisor_learns_the_step_of_a_fetched_checkpoint(tmp_path: Path) -> None:
    files, root = memory()
    folder = trial(tmp_path / "a")
    writer = copier(folder, CheckpointStore(files, root))
    write(folder, {"epoch-7": "7"})
    seen_s = (folder.checkpoints / "epoch-7").stat().st_mtime
    for written_s, step in ((seen_s - 5, 6), (seen_s, 7), (seen_s + 5, 8)):
        writer.offer(written_s, step, 2)
    settle(writer)
    other = trial(tmp_path / "b")
    assert "step 7" in fetch(CheckpointStore(files, root), other, 0)
    status = read_json(other.status) or {}
    assert (status["checkpoint_step"], status["step_offset"]) == (7, 2)


def test_no_process_is_started_for_a_folder_that_is_surely_the_newest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download, "_download_in_child", lambda *_: pytest.fail("asked"))
    folder = trial(tmp_path)
    write(folder, {"state": "1"})
    StoreMark(epoch=4, tokens=("aa",)).write(folder)
    answer = ensure_checkpoints("s3://x", folder, 5, since=0, token="bb", stopped=lambda: False)
    assert answer == DownloadResult(READY)
    assert StoreMark.read(folder)[:2] == (5, ("aa", "bb"))


@pytest.mark.parametrize(("epoch", "since", "state"), [(1, 0, READY), (6, 6, READY), (6, 0, AWAY)])
def test_only_a_trial_that_may_have_copies_waits_for_a_store_that_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, epoch: int, since: int, state: str
) -> None:
    monkeypatch.setattr(
        download, "_download_in_child", lambda *_: DownloadResult(AWAY, "it is away")
    )
    folder = trial(tmp_path)
    answer = ensure_checkpoints(
        "s3://x", folder, epoch, since=since, token="bb", stopped=lambda: False
    )
    assert answer.state == state
    assert "it is away" in answer.message


def test_a_stop_ends_the_fetching_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "_START", "import time; time.sleep(60)")
    folder = trial(tmp_path)
    answer = ensure_checkpoints("s3://x", folder, 2, since=0, token="bb", stopped=lambda: True)
    assert answer.state == STOPPED


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    monkeypatch.delitem(_registry, "s3", raising=False)  # it may be there already
    with pytest.raises(NotInstalledError, match="install s3fs where hermes-trial runs"):
        connect("s3://bucket/prefix")
    with pytest.raises(NotInstalledError, match="correct the URL"):
        connect("nonsense://bucket/prefix")


def test_no_two_sweeps_nor_trials_share_a_place() -> None:
    assert place("s3://b/p/", "digits-1", 3) == "s3://b/p/digits-1/3"
    assert place("s3://b/p", "..").startswith("s3://b/p/..-")
    assert place("s3://b/p", "a:b", 1) != place("s3://b/p", "a_b", 1)


def test_the_runtime_does_not_import_fsspec_without_a_store() -> None:
    unwanted = {"fsspec", "hermes_ops.trial.checkpoint_store.store"}
    code = f"import sys, hermes_ops.trial.segment; sys.exit(bool({unwanted} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_store_of_files_works_and_is_cleared_as_a_whole(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/store/sweep/0"
    folder = trial(tmp_path / "a")
    write(folder, {"tree/state": "1"})
    settle(CheckpointUploader(url, folder, 1, "ab"))
    other = trial(tmp_path / "b")
    fetch(connect(url), other, 0)
    assert contents(other) == {"tree/state": "1"}
    connect(url).clear()
    connect(url).clear()
    assert connect(url).names() == []
    assert not (tmp_path / "store/sweep/0").exists()


def test_a_file_that_changes_while_it_is_copied_is_in_no_copy(tmp_path: Path) -> None:
    files, root = memory()
    folder, store = trial(tmp_path), CheckpointStore(files, root)
    state = folder.checkpoints / "state"
    write(folder, {"state": "1"})
    (entry,) = snapshot(folder.checkpoints)["state"].files

    def grow() -> None:
        with state.open("a") as stream:
            stream.write("more")

    with pytest.raises(ChangedError):
        store.upload(folder.checkpoints, entry, "files/x", grow)
    state.unlink()
    with pytest.raises(ChangedError):
        store.upload(folder.checkpoints, entry, "files/x", grow)
