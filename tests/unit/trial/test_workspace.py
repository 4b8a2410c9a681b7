"""A working directory of the trial's own: what is in it, and that no other trial sees it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hermes_ops.trial import workspace
from hermes_ops.trial.standby.__main__ import profile_of
from hermes_ops.trial.standby.client import standby_order
from hermes_ops.trial.workspace import (
    WorkspaceError,
    ensure_workspace,
    survey,
    written_originals,
)
from tests.unit.trial.supervised import output_of

ROOT = Path(__file__).parents[3]

# In the manner of Keras' BackupAndRestore: it goes on from whatever lies in a relative folder.
SCRIPT = """
import os, sys, time
os.makedirs("backup", exist_ok=True)
state = os.path.join("backup", "epoch")
done = int(open(state).read()) if os.path.exists(state) else 0
for epoch in range(done + 1, 4):
    with open(state, "w") as stream:
        stream.write(str(epoch))
    open(os.environ["HERMES_CHECKPOINT_DIR"] + "/there", "w").close()
    print(f"epoch={epoch} loss={1 / epoch}", flush=True)
    if epoch == 2 and sys.argv[1] == "waits" and not done:
        time.sleep(60)
print("began after", done, "in", os.getcwd(), flush=True)
"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "script"
    (folder / "package" / "deep").mkdir(parents=True)
    (folder / "train.py").write_text(SCRIPT)
    (folder / "package" / "deep" / "data.txt").write_text("data")
    return folder


def made(source: Path, tmp_path: Path, **environment: str) -> Path:
    return ensure_workspace(source, tmp_path / "trial", environment)


def test_a_copy_holds_every_file_and_writes_reach_no_original(source: Path, tmp_path: Path) -> None:
    (source / "run.sh").write_text("true")
    (source / "run.sh").chmod(0o750)
    place = made(source, tmp_path)
    for file in (p.relative_to(source) for p in source.rglob("*") if p.is_file()):
        assert (place / file).read_bytes() == (source / file).read_bytes()
        (place / file).write_text("changed")
        assert (source / file).read_text() != "changed"
    assert (place / "run.sh").stat().st_mode & 0o777 == 0o750
    assert (place / "train.py").stat().st_mtime_ns != (source / "train.py").stat().st_mtime_ns


def test_a_copy_is_made_once_and_one_that_was_cut_off_is_made_again(
    source: Path, tmp_path: Path
) -> None:
    torn = tmp_path / "trial" / ".workspace.new"
    torn.mkdir(parents=True)
    (torn / "half").write_text("")
    place = made(source, tmp_path)
    assert not (place / "half").exists()
    (place / "output").write_text("mine")
    (source / "later").write_text("")
    assert made(source, tmp_path) == place
    assert sorted(p.name for p in place.iterdir()) == ["output", "package", "train.py"]


def test_histories_and_environments_are_linked_and_links_lead_where_they_did(
    source: Path, tmp_path: Path
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    for name in (".git", "env"):
        (source / name).mkdir()
        (source / name / "pyvenv.cfg").write_text("")
    (source / "data").symlink_to("../outside")
    (source / "package" / "same").symlink_to(source / "train.py")
    (source / "broken").symlink_to("nowhere")
    os.mkfifo(source / "pipe")
    place = made(source, tmp_path)
    assert (place / ".git").resolve() == source / ".git"
    assert (place / "env").resolve() == source / "env"
    assert (place / "data").resolve() == outside
    assert (place / "package" / "same").resolve() == place / "train.py"
    assert (place / "broken").readlink() == Path("nowhere")
    assert not (place / "pipe").exists()


def test_a_large_file_is_no_copy_of_its_own_and_a_write_to_it_is_noticed_once(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workspace, "LINKED_BYTES", 3)
    monkeypatch.setattr(workspace, "_FICLONE", 0)  # as on a file system without it
    place = made(source, tmp_path)
    data = place / "package" / "deep" / "data.txt"
    assert data.is_symlink()
    assert written_originals(tmp_path / "trial") == []
    data.write_text("written through")
    assert written_originals(tmp_path / "trial") == [str(data.resolve())]
    assert written_originals(tmp_path / "trial") == []


def test_a_folder_that_holds_too_much_is_refused_with_the_remedy(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("MOST_FILES", 3), ("MOST_BYTES", 10)):
        with monkeypatch.context() as patched:
            patched.setattr(workspace, name, value)
            with pytest.raises(WorkspaceError, match="put data and environments elsewhere"):
                made(source, tmp_path)
        assert not (tmp_path / "trial" / "workspace").exists()
    with pytest.raises(WorkspaceError, match=r"correct trial\.directory"):
        survey(source / "nowhere")


def test_a_state_folder_inside_the_scripts_folder_is_left_out(source: Path, tmp_path: Path) -> None:
    home = source / "state" / ".hermes"
    root = home / "sweeps" / "s" / "trials" / "0"
    root.mkdir(parents=True)
    (source / "state" / "keep").write_text("")
    place = ensure_workspace(source, root, {"HERMES_HOME": str(home)})
    assert [p.name for p in (place / "state").iterdir()] == ["keep"]
    own = source / "trial"
    assert not (ensure_workspace(source, own, {}) / "trial").exists()


def test_one_standby_interpreter_serves_the_copies_of_all_trials(source: Path) -> None:
    def profile(directory: str, copied_from: str | None) -> object:
        command = (sys.executable, "train.py")
        wanted = standby_order(command, directory, copied_from, dict(os.environ))
        assert wanted is not None
        return profile_of(wanted.document("start"))

    first = profile("/trials/0/workspace", str(source))
    assert first == profile("/trials/1/workspace", str(source)) == profile(str(source), None)
    assert first != profile("/trials/0/workspace", None)


def start(source: Path, folder: Path, word: str, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "hermes_ops.trial", "--dir", str(folder), "--epoch", "1"]
    command += ["--objective", "loss", "--directory", str(source), *options]
    return subprocess.Popen(
        [*command, "--", sys.executable, "train.py", word],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
    )


def test_no_trial_goes_on_from_what_another_has_left(source: Path, tmp_path: Path) -> None:
    first, second, copy = tmp_path / "0", tmp_path / "1", ("--workspace", "copy")
    with start(source, first, "waits", *copy) as process:
        while "epoch=2" not in output_of(process).readline():
            pass
        with start(source, second, "ends", *copy) as other:
            assert f"began after 0 in {second / 'workspace'}" in output_of(other).read()
        assert other.returncode == 0
        process.terminate()
    assert process.returncode == 75
    with start(source, first, "waits", *copy) as process:
        assert f"began after 2 in {first / 'workspace'}" in output_of(process).read()
    assert process.returncode == 0
    assert not (source / "backup").exists()


def test_a_trial_that_begins_with_a_later_step_is_pointed_out_once(
    source: Path, tmp_path: Path
) -> None:
    with start(source, tmp_path / "0", "ends") as process:
        assert "the first value" not in output_of(process).read()
    (source / "backup" / "epoch").write_text("1")
    with start(source, tmp_path / "1", "waits") as process:
        lines = output_of(process).read().splitlines()
    said = [line for line in lines if "the first value of loss came at step 2" in line]
    assert len(said) == 1
    assert "trial.directory: copy" in said[0]


def test_a_copy_that_cannot_be_made_fails_the_trial_with_the_reason(
    source: Path, tmp_path: Path
) -> None:
    for number in range(workspace.MOST_FILES + 1):
        os.symlink("x", source / f"link{number}")
    with start(source, tmp_path / "0", "ends", "--workspace", "copy") as process:
        said = output_of(process).read()
    assert process.returncode == 127
    assert "holds too much to be copied for each trial" in said
