"""Backup and restore of a home without its services: what is copied, verified and refused."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
import signal
import sqlite3
import stat
import subprocess
import sys
import threading
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hermes_ops.errors import StackError
from hermes_ops.moved_paths import MovedPaths
from hermes_ops.stack import backup as backups
from hermes_ops.stack import databases, lifecycle, migrations
from hermes_ops.stack.airflow_service import sqlite_url
from hermes_ops.stack.backup import write_backup
from hermes_ops.stack.backup_format import Checksums, TreeCopy
from hermes_ops.stack.layout import Layout
from hermes_ops.stack.restore import RestoreTarget, restore, with_setting
from hermes_ops.stack.settings import Settings

TRIAL = "sweeps/s/trials/0"
OF_THE_TRIAL = {
    "result.json": '{"outcome": "preempted"}',
    "metrics.jsonl": "{}\n",
    "sent.json": "{}",
    "checkpoints/state.json": "[1]",
    "checkpoints/deep/er/weights": "w",
}
LEFT = ("lock", "epoch", "nudge", ".reserve")


def quiet(_: str) -> None:
    pass


def write(path: Path, text: str = "x") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def database(file: Path, rows: int) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.closing(sqlite3.connect(file)) as connection, connection:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("CREATE TABLE t (n INTEGER)")
        connection.executemany("INSERT INTO t VALUES (?)", [(n,) for n in range(rows)])


def rows(file: Path) -> int:
    with contextlib.closing(sqlite3.connect(file)) as connection:
        return int(connection.execute("SELECT count(*) FROM t").fetchone()[0])


@pytest.fixture
def home(tmp_path: Path) -> Path:
    layout = Layout(tmp_path / "old %41 home")
    layout.create()
    database(layout.airflow / "airflow.db", 3)
    database(layout.mlflow / "mlflow.db", 4)
    database(layout.mlflow / "auth.db", 5)
    address = sqlite_url(layout.airflow / "airflow.db").replace("%", "%%")
    write(layout.airflow_config, f"[database]\nsql_alchemy_conn = {address}\n")
    environment = {"MLFLOW_BACKEND_STORE_URI": "sqlite:///../mlflow/mlflow.db"}
    write(layout.programs, json.dumps({"mlflow": {"environment": environment}}))
    write(layout.secrets / "admin.password", "secret")
    write(layout.settings_file, 'pool = "mine"\n\n[airflow.core]\nparallelism = "9"\n')
    write(layout.home / "artifacts/1/a/model.bin")
    write(layout.home / "airflow/logs/task.log")
    for name, text in OF_THE_TRIAL.items():
        write(layout.home / TRIAL / name, text)
    for name in LEFT:
        write(layout.home / TRIAL / name)
    for name in (f"{TRIAL}.lease.json", f"{TRIAL}.stop.json", "stack.json", "drain", "nudge"):
        write(layout.home / name)
    os.chmod(layout.home / TRIAL / "metrics.jsonl", 0o664)
    os.utime(layout.home / TRIAL / "metrics.jsonl", (1_000, 1_000))
    os.symlink("/old/data/big.bin", layout.home / TRIAL / "big.bin")
    os.mkfifo(layout.home / TRIAL / "pipe")
    return layout.home


@pytest.fixture
def backup(home: Path, tmp_path: Path) -> Path:
    write_backup(Layout(home), tmp_path / "backup", quiet)
    return tmp_path / "backup"


def files(folder: Path) -> set[str]:
    return {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()}


def test_a_backup_has_what_a_home_needs_and_nothing_of_its_processes(backup: Path) -> None:
    kept = {"hermes.toml", "secrets/admin.password", "artifacts/1/a/model.bin"}
    kept |= {"airflow/logs/task.log", *(f"{TRIAL}/{name}" for name in OF_THE_TRIAL)}
    assert files(backup / "home") == kept
    assert {f.name for f in (backup / "databases").iterdir()} == {
        "airflow.sqlite",
        "mlflow.sqlite",
        "mlflow-auth.sqlite",
    }


def test_a_backup_into_a_part_of_the_home_on_another_disk_is_refused(
    home: Path, tmp_path: Path
) -> None:
    elsewhere = tmp_path / "disk"
    shutil.move(home / "artifacts", elsewhere)
    (home / "artifacts").symlink_to(elsewhere)
    with pytest.raises(StackError, match="give a folder outside, on another disk"):
        write_backup(Layout(home), elsewhere / "backup", quiet)
    assert not (elsewhere / "backup").exists()


def test_a_backup_is_readable_by_its_owner_only_and_keeps_times(backup: Path) -> None:
    paths = [backup, *(p for p in backup.rglob("*") if not p.is_symlink())]
    assert {stat.S_IMODE(p.stat().st_mode) & 0o077 for p in paths} == {0}
    assert (backup / "home" / TRIAL / "metrics.jsonl").stat().st_mtime == 1_000


def test_sha256sum_finds_a_backup_whole(backup: Path) -> None:
    done = subprocess.run(["sha256sum", "--check", "--strict", "SHA256SUMS"], cwd=backup,
                          capture_output=True, check=False)  # fmt: skip
    assert done.returncode == 0, done.stdout


def test_a_database_in_use_is_copied_as_of_one_moment(home: Path, tmp_path: Path) -> None:
    source = Layout(home).airflow / "airflow.db"
    with contextlib.closing(sqlite3.connect(source)) as writer:
        writer.execute("INSERT INTO t VALUES (99)")
        writer.commit()  # in the write-ahead log only
        writer.execute("INSERT INTO t VALUES (100)")  # not committed
        write_backup(Layout(home), tmp_path / "b", quiet)
    assert rows(tmp_path / "b" / "databases" / "airflow.sqlite") == 4


def test_what_mlflow_has_is_noted_before_its_database_and_metrics_are_copied_after_checkpoints(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied: list[str] = []
    whole_file, whole_database = TreeCopy.file, databases.copy_database

    def file(self: Any, name: str) -> None:
        copied.append((self.prefix + name).removeprefix("home/"))
        whole_file(self, name)

    def one(database: databases.Database, folder: Path) -> None:
        copied.append(database.name)
        whole_database(database, folder)

    monkeypatch.setattr(TreeCopy, "file", file)
    monkeypatch.setattr(databases, "copy_database", one)
    write_backup(Layout(home), tmp_path / "b", quiet)

    order = ["sent.json", "airflow", "mlflow", "result.json", "checkpoints/state.json"]
    order.append("metrics.jsonl")
    places = [copied.index(name if name in ("airflow", "mlflow") else f"{TRIAL}/{name}")
              for name in order]  # fmt: skip
    assert places == sorted(places)
    assert len(copied) == len(set(copied))


def test_checkpoints_that_a_script_writes_meanwhile_are_those_of_one_moment(
    home: Path, tmp_path: Path
) -> None:
    folder, over = home / TRIAL / "checkpoints", threading.Event()

    def script() -> None:
        number = 0
        while not over.wait(0.001):
            number += 1
            for part in ("a", "b"):
                write(folder / f"{part}.tmp", str(number))
            fresh = folder / f"step-{number}.tmp"
            fresh.mkdir()
            for part in ("a", "b"):
                (folder / f"{part}.tmp").rename(fresh / part)
            fresh.rename(folder / f"step-{number}")
            old = folder / f"step-{number - 3}"
            if old.exists():
                for file in old.iterdir():
                    file.unlink()
                old.rmdir()

    writer = threading.Thread(target=script)
    writer.start()
    try:
        write_backup(Layout(home), tmp_path / "b", quiet)
    finally:
        over.set()
        writer.join()
    copied = tmp_path / "b" / "home" / TRIAL / "checkpoints"
    for step in copied.glob("step-*[0-9]"):
        assert {f.name: f.read_text() for f in step.iterdir()} == dict.fromkeys(
            "ab", step.name.removeprefix("step-")
        )
    assert not list(home.rglob(f"{backups.STAGING}*"))


def test_a_part_of_the_home_on_another_disk_is_in_the_backup(home: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "big disk"
    (home / "sweeps").rename(elsewhere)
    (home / "sweeps").symlink_to(elsewhere)
    write_backup(Layout(home), tmp_path / "b", quiet)
    assert (tmp_path / "b" / "home" / TRIAL / "checkpoints" / "state.json").read_text() == "[1]"
    assert (tmp_path / "b" / "home" / "sweeps").is_dir()


@pytest.mark.parametrize("place", ["home", "full"])
def test_a_folder_that_cannot_take_a_backup_is_refused(
    place: str, home: Path, tmp_path: Path
) -> None:
    write(tmp_path / "full" / "file")
    target = home / "b" if place == "home" else tmp_path / "full"
    with pytest.raises(StackError, match="outside" if place == "home" else "not empty"):
        write_backup(Layout(home), target, quiet)
    assert (tmp_path / "full" / "file").exists()


def test_a_home_that_was_never_started_has_no_backup(tmp_path: Path) -> None:
    with pytest.raises(StackError, match="has never started there"):
        write_backup(Layout(tmp_path), tmp_path.with_name("b"), quiet)


def test_a_full_disk_leaves_no_part_of_a_backup(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(backups, "write_manifest", full)
    with pytest.raises(StackError, match=r"No space left on device.*removed"):
        write_backup(Layout(home), tmp_path / "b", quiet)
    assert list((tmp_path / "b").iterdir()) == []


def test_a_backup_that_was_killed_is_refused(home: Path, tmp_path: Path) -> None:
    code = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from hermes_ops.stack.backup import write_backup\n"
        "from hermes_ops.stack.layout import Layout\n"
        "def say(text):\n"
        "    if 'artifacts' in text: os.kill(os.getpid(), signal.SIGKILL)\n"
        "write_backup(Layout(Path(sys.argv[1])), Path(sys.argv[2]), say)\n"
    )
    killed = subprocess.run([sys.executable, "-c", code, str(home), str(tmp_path / "b")],
                            check=False)  # fmt: skip
    assert killed.returncode == -signal.SIGKILL
    assert files(tmp_path / "b")
    with pytest.raises(StackError, match=r"no whole backup: it has no backup\.json.*was cut"):
        restore(tmp_path / "b", RestoreTarget(tmp_path / "new", {}), quiet)
    assert not (tmp_path / "new").exists()


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (lambda b: (b / "home/secrets/admin.password").unlink(), "is missing"),
        (lambda b: flip(b / "home/artifacts/1/a/model.bin"), "is not as it was"),
        (lambda b: flip(b / "databases/airflow.sqlite"), "is not as it was"),
        (lambda b: write(b / "home/new"), "is not as it was"),
        (lambda b: flip(b / "SHA256SUMS"), "SHA256SUMS"),
        (lambda b: write(b / "backup.json", "{"), "cannot be read"),
        (lambda b: write(b / "backup.json", '{"format": 7}'), "format 7"),
    ],
)
def test_a_damaged_backup_is_refused_and_nothing_is_left_of_it(
    harm: Callable[[Path], object], said: str, backup: Path, tmp_path: Path
) -> None:
    harm(backup)
    with pytest.raises(StackError, match=said):
        restore(backup, RestoreTarget(tmp_path / "new", {}), quiet)
    assert not list(tmp_path.glob("new*"))


def test_a_backup_is_restored_elsewhere_with_its_databases(backup: Path, tmp_path: Path) -> None:
    new = tmp_path / "deep" / "new"
    done = restore(backup, RestoreTarget(new, {}, (("/old/data", "/new/data"),)), quiet)
    assert done.before is None
    assert [rows(new / name) for name in ("airflow/airflow.db", "mlflow/mlflow.db",
                                          "mlflow/auth.db")] == [3, 4, 5]  # fmt: skip
    assert (new / "secrets" / "admin.password").read_text() == "secret"
    assert os.readlink(new / TRIAL / "big.bin") == "/new/data/big.bin"
    assert stat.S_IMODE(new.stat().st_mode) == 0o700
    moved = MovedPaths.load(new)
    assert moved.apply(f"{done.manifest.home}/x") == f"{new}/x"
    assert not list(tmp_path.glob("**/*.restoring"))


def test_a_home_with_something_in_it_is_moved_aside_when_asked(
    backup: Path, home: Path, tmp_path: Path
) -> None:
    write(home / "newer")
    with pytest.raises(StackError, match=r"is not empty: give another folder.*--replace"):
        restore(backup, RestoreTarget(home, {}), quiet)
    done = restore(backup, RestoreTarget(home, {}, replace=True), quiet)
    assert done.before is not None
    assert (done.before / "newer").exists()
    assert not (home / "newer").exists()
    assert rows(home / "airflow" / "airflow.db") == 3


def test_a_home_that_lives_is_not_restored(backup: Path, home: Path) -> None:
    variables = {**os.environ, "HERMES_HOME": str(home), "HERMES_PROGRAM": "controller"}
    living = subprocess.Popen(["sleep", "60"], env=variables)
    try:
        with pytest.raises(StackError, match=r"is running.*hermes down"):
            restore(backup, RestoreTarget(home, {}, replace=True), quiet)
    finally:
        living.kill()
        living.wait()
    assert (home / "stack.json").exists()


def test_a_restore_beside_another_one_leaves_it_its_folder(backup: Path, tmp_path: Path) -> None:
    place = tmp_path / "new.restoring"
    (place / "home").mkdir(parents=True)
    handle = os.open(place, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    try:
        with pytest.raises(StackError, match="Another restore works"):
            restore(backup, RestoreTarget(tmp_path / "new", {}), quiet)
        assert (place / "home").is_dir()
    finally:
        os.close(handle)


def test_what_a_cut_restore_left_is_no_hindrance(backup: Path, tmp_path: Path) -> None:
    write(tmp_path / "new.restoring" / "home" / "half")
    restore(backup, RestoreTarget(tmp_path / "new", {}), quiet)
    assert not (tmp_path / "new" / "half").exists()
    assert not (tmp_path / "new.restoring").exists()


@pytest.fixture
def older(monkeypatch: pytest.MonkeyPatch) -> None:
    older = {**migrations.installed_versions(), "mlflow": "3.0.0"}
    monkeypatch.setattr(migrations, "installed_versions", lambda: older)


def test_a_backup_of_a_newer_version_is_refused(backup: Path, tmp_path: Path, older: None) -> None:
    with pytest.raises(StackError, match=r"last run with mlflow .*installed here: 3\.0\.0"):
        restore(backup, RestoreTarget(tmp_path / "new", {}), quiet)


def test_a_home_of_a_newer_version_is_refused_and_one_of_an_older_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = Layout(tmp_path)
    assert migrations.recorded_versions(layout) == {}
    migrations.record_versions(layout)
    migrations.refuse_newer(migrations.recorded_versions(layout), "It")
    newer = {**migrations.installed_versions(), "hermes-ops": "99.0.dev1"}
    monkeypatch.setattr(migrations, "installed_versions", lambda: newer)
    migrations.refuse_newer(migrations.recorded_versions(layout), "It")
    migrations.record_versions(layout)
    monkeypatch.undo()
    with pytest.raises(StackError, match=r"It was last run with hermes-ops 99\.0\.dev1"):
        migrations.refuse_newer(migrations.recorded_versions(layout), "It")


def test_a_dump_goes_into_postgresql_only(backup: Path, tmp_path: Path) -> None:
    manifest = json.loads((backup / "backup.json").read_text())
    manifest["databases"]["airflow"] = "postgresql"
    write(backup / "backup.json", json.dumps(manifest))
    with pytest.raises(StackError, match="--airflow-db postgresql"):
        restore(backup, RestoreTarget(tmp_path / "new", {}), quiet)


def test_a_setting_is_written_before_the_tables_of_the_file() -> None:
    text = 'pool = "mine"\nairflow_db = "old"\n\n[airflow.core]\nparallelism = "9"\n'
    found = tomllib.loads(with_setting(text, "airflow_db", 'postgresql://a:"\\@h/d'))
    assert found == {
        "airflow_db": 'postgresql://a:"\\@h/d',
        "pool": "mine",
        "airflow": {"core": {"parallelism": "9"}},
    }


@pytest.mark.parametrize("key", ['"airflow_db"', "'airflow_db'", " airflow_db "])
def test_a_setting_is_replaced_however_the_file_writes_its_key(key: str) -> None:
    assert tomllib.loads(with_setting(f'{key} = "old"\n', "airflow_db", "new")) == {
        "airflow_db": "new"
    }


@given(st.dictionaries(st.text("a\\\n\rn é", min_size=1), st.just("0" * 64)))
def test_sums_are_read_as_they_were_written(names: dict[str, str]) -> None:
    assert Checksums.parse(Checksums(names).text()).digests == names


def test_up_refuses_a_home_of_a_newer_version_before_it_does_anything(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    newer = {**migrations.installed_versions(), "apache-airflow": "99.0"}
    Layout(home).versions.write_text(json.dumps(newer))
    (home / "airflow" / "airflow.cfg").write_text("as it was")
    with pytest.raises(StackError, match=r"last run with apache-airflow 99\.0"):
        lifecycle.up(Settings(home=home, slots=1), quiet)
    assert (home / "airflow" / "airflow.cfg").read_text() == "as it was"


def test_mlflows_tables_are_upgraded_when_mlflow_or_its_database_is_another(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []
    monkeypatch.setattr(
        migrations, "_run", lambda *args: ran.append(args[-1]["MLFLOW_BACKEND_STORE_URI"])
    )
    settings = Settings(home=home, slots=1)
    steps: list[Callable[[], object]] = [
        lambda: None,
        lambda: None,
        lambda: (home / "mlflow" / "upgraded.json").write_text("of an earlier version"),
        (home / "mlflow" / "mlflow.db").unlink,  # the server makes a new one
    ]
    count = []
    for step in steps:
        step()
        migrations.upgrade_mlflow(settings, {})
        count.append(len(ran))
    elsewhere = settings.model_copy(update={"mlflow_db": "postgresql://a@h/d"})
    migrations.upgrade_mlflow(elsewhere, {})
    assert count == [1, 1, 2, 2]
    assert ran[-1] == "postgresql+psycopg2://a@h/d"
