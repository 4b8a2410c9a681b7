"""Backup, restore to another path and host name, PostgreSQL: by the commands of docs/backup.md."""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import subprocess
import sys
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from bench.postgres import PostgresServer
from hermes_ops.errors import StackError
from hermes_ops.stack import migrations

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

PAGE = (Path(__file__).parents[2] / "docs" / "backup.md").read_text()
PAUSE_S = 0.25
FREE = "--slots 2 --airflow-port 0 --mlflow-port 0"
OTHER_MACHINE = """
hostname elsewhere.example
echo 11111111-2222-3333-4444-555555555555 > "$OTHER_BOOT"
mount --bind "$OTHER_BOOT" /proc/sys/kernel/random/boot_id
"""


def block(heading: str) -> str:
    """The first block of commands below that heading."""
    found = re.search(rf"^## {heading}\n.*?^```sh\n(.*?)^```", PAGE, re.S | re.M)
    assert found is not None
    return found[1]


def typed(
    commands: str, replaced: Mapping[str, str], *, other_host: bool = False, **variables: str
) -> str:
    """What the commands print, with other folders in the place of those of the page."""
    for old, new in replaced.items():
        assert old in commands
        commands = commands.replace(old, new)
    commands = re.sub(r"^hermes up", f"hermes up {FREE}", commands, flags=re.M)
    if other_host:  # of a machine the kernel says a name and an id of its last start
        commands = f"{OTHER_MACHINE}\n{commands}"
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    dropped = ("HERMES_", "PYTHONDONTWRITEBYTECODE")
    own = {k: v for k, v in os.environ.items() if not k.startswith(dropped)}
    shell = ["unshare", "--uts", "--mount"] if other_host else []
    done = subprocess.run(
        [*shell, "bash", "-euo", "pipefail", "-c", commands],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        env={**own, "PATH": path, **variables},
    )
    assert done.returncode == 0, f"{commands}\n{done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture
def short(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose name is short, as sockets lie below it."""
    return tmp_path_factory.mktemp("b")


@pytest.fixture
def labs(
    stack_at: Callable[[Path], Any], harness: Any, short: Path
) -> Iterator[Callable[[Path], Any]]:
    """What opens the stack of a home; all are stopped at the end."""
    opened: list[Any] = []

    def lab(home: Path) -> Any:
        opened.append(harness.Lab(stack_at(home), short))
        return opened[-1]

    yield lab
    for each in opened:
        each.close()
        each.stack.down()


def project(short: Path, harness: Any) -> Path:
    """A folder with the script, as a user has it."""
    folder = short / "project"
    shutil.copytree(harness.SCRIPTS, folder)
    return folder


TRIALS = 3


def sweep_of(harness: Any, folder: Path, name: str, slow: Path) -> Any:
    rates, own = harness.alike(TRIALS), {"directory": str(folder)}
    content = harness.stub(name, rates, harness.LONG, PAUSE_S, trial=own, slow_while=slow)
    content["trial"]["command"][1] = str(folder / "stub.py")  # a path in the command too
    return content


def check_end(sweep: Any, harness: Any) -> None:
    """Each trial has one run, one final state, and the curve of one that was never stopped."""
    assert sweep.await_end() == "success"
    assert sweep.states() == dict.fromkeys(range(TRIALS), "finished")
    for number, rate in enumerate(harness.alike(TRIALS)):
        sweep.assert_whole(number, rate)


def starts(sweep: Any, number: int) -> list[int]:
    """After which step each segment of the trial began; two may be of one lease, as in a crash."""
    file = sweep.folder / "trials" / str(number) / "segments.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    return [int(line["first_step"]) for line in lines if "first_step" in line]


@pytest.mark.heavy
def test_a_running_stack_is_restored_elsewhere_under_another_host_name_and_goes_on(
    lab: Any, labs: Callable[[Path], Any], harness: Any, short: Path
) -> None:
    before = project(short, harness)
    slow = harness.slow_file(short)
    sweep = lab.start(sweep_of(harness, before, "moved", slow))
    harness.await_(lambda: sweep.lines(0) > 8 and sweep.lines(1) > 8, 120.0)
    folder, home, after = short / "monday", short / "hermes", short / "new"

    typed(block("Back up"), {"/backup/monday": str(folder), "~/.hermes": str(lab.home)})
    reported = {n: sweep.lines(n) for n in (0, 1)}
    assert lab.hermes("sweep", "stop", sweep.id).returncode == 0
    sweep.await_end()
    slow.unlink()
    before.rename(after)  # neither the old script nor the old home is of any use now
    modes = {stat.S_IMODE(p.lstat().st_mode) & 0o077 for p in (folder, *folder.rglob("*"))
             if not p.is_symlink()}  # fmt: skip
    assert modes == {0}
    assert (folder / "home" / "secrets" / "airflow-fernet.key").is_file()

    said = typed(
        block("Restore on another host, or to another path"),
        {
            "/backup/monday": str(folder),
            "/srv/hermes": str(home),
            "/data/ann/project=/srv/project": f"{before}={after}",
        },
        OTHER_BOOT=str(short / "boot_id"),
        other_host=os.geteuid() == 0,  # only root can make one
    )

    assert "Restored to" in said
    restored = harness.Sweep(labs(home), sweep.id)
    check_end(restored, harness)
    for number, lines in reported.items():
        first, resumed, *later = starts(restored, number)
        assert first == 0
        assert 5 < resumed <= lines  # from its checkpoint, not from the beginning
        assert all(step >= resumed for step in later)  # preempted once more, perhaps
    again = lab.hermes("restore", str(folder), "--home", str(home), "--replace")
    assert (again.returncode, "Hermes is running" in again.stderr) == (1, True)
    assert json.loads((home / "versions.json").read_text())["hermes-ops"]


@pytest.mark.heavy
def test_a_sweep_goes_on_through_a_move_to_postgresql_and_a_restore_there(
    postgres: PostgresServer,
    own_stack: Any,
    labs: Callable[[Path], Any],
    harness: Any,
    short: Path,
) -> None:
    home, folder = own_stack.home, project(short, harness)
    started = own_stack.up()
    assert started.returncode == 0, started.stdout + started.stderr
    first = labs(home)
    slow = harness.slow_file(short)
    sweep = first.start(sweep_of(harness, folder, "moving", slow))
    harness.await_(lambda: sweep.lines(0) > 5 and sweep.lines(1) > 5, 120.0)
    server: dict[str, Any] = postgres_environment(postgres)
    addresses: dict[str, Any] = {
        "AIRFLOW_DB": postgres.address("airflow"),
        "MLFLOW_DB": postgres.address("mlflow"),
    }

    typed(
        block("From SQLite to PostgreSQL"),
        {"/backup/sqlite": str(short / "sqlite"), "~/.hermes": str(home)},
        **server,
        **addresses,
    )
    moved = harness.Sweep(labs(home), sweep.id)
    before = sum(moved.lines(n) for n in range(TRIALS))
    harness.await_(lambda: sum(moved.lines(n) for n in range(TRIALS)) > before + 6, 120.0)

    typed(
        block("On PostgreSQL"),
        {"/backup/postgresql": str(short / "postgresql"), "~/.hermes": str(home)},
        **server,
    )
    slow.unlink()
    check_end(harness.Sweep(labs(home), sweep.id), harness)
    assert not (home / "airflow" / "airflow.db").exists()
    assert not (home / "mlflow" / "mlflow.db").exists()


KINDS = sa.MetaData()
sa.Table("alembic_version", KINDS, sa.Column("version_num", sa.String))
PARENT = sa.Table(
    "parent",
    KINDS,
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("uuid", sa.Uuid, unique=True),
    sa.Column("at", sa.DateTime(timezone=True)),
    sa.Column("document", sa.JSON),
    sa.Column("bytes", sa.LargeBinary),
    sa.Column("flag", sa.Boolean),
    sa.Column("span", sa.Interval),
    sa.Column("number", sa.Float),
    sa.Column("kind", sa.Enum("one", "two", name="kind")),
    sa.Column("parent", sa.ForeignKey("parent.id")),
)
CHILD = sa.Table(
    "a_child",
    KINDS,
    sa.Column("of", sa.ForeignKey("parent.uuid"), primary_key=True),
    sa.Column("text", sa.Text),
)


def test_rows_of_every_kind_are_the_same_in_postgresql_and_its_counters_go_on(
    postgres: PostgresServer, tmp_path: Path
) -> None:
    url = sa.make_url(postgres.url("kinds")).set(drivername="postgresql+psycopg2")
    old, new = sa.create_engine(f"sqlite:///{tmp_path / 'a.db'}"), sa.create_engine(url)
    ids = [uuid.UUID(int=n + 1) for n in range(2)]
    row = {
        "id": 1, "uuid": ids[0], "at": datetime(2026, 1, 2, 3, 4, 5, 678901, UTC),
        "document": {"a": [1, None, "é"]}, "bytes": bytes(range(256)), "flag": True,
        "span": timedelta(days=2, seconds=3), "number": 0.1, "kind": "two", "parent": None,
    }  # fmt: skip
    empty = {**dict.fromkeys(row), "id": 7, "uuid": ids[1], "parent": 1, "document": sa.null()}
    for engine in (old, new):
        KINDS.create_all(engine)
        with engine.begin() as open_:
            open_.execute(sa.text("INSERT INTO alembic_version VALUES ('r')"))
    with old.begin() as open_, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for each in (row, empty):
            open_.execute(PARENT.insert(), each)
        open_.execute(CHILD.insert(), [{"of": i, "text": "x\n'"} for i in ids])

    with old.connect() as source, new.begin() as target:
        migrations.copy_rows(source, target, "kinds")

    with new.begin() as open_:
        first, second = open_.execute(PARENT.select().order_by(PARENT.c.id)).mappings()
        assert dict(first) == row
        assert dict(second) == {**dict.fromkeys(row), "id": 7, "uuid": ids[1], "parent": 1}
        assert open_.execute(sa.select(sa.func.count()).select_from(CHILD)).scalar() == 2
        (number,) = open_.execute(PARENT.insert().returning(PARENT.c.id)).scalars()
        assert number == 8
        open_.execute(sa.text("UPDATE alembic_version SET version_num = 's'"))
        with old.connect() as source, pytest.raises(StackError, match="are of revision"):
            migrations.copy_rows(source, open_, "kinds")
    old.dispose()
    new.dispose()


def postgres_environment(postgres: PostgresServer) -> dict[str, str]:
    """What PostgreSQL's own programs need to reach the server."""
    return {
        "PGHOST": "127.0.0.1",
        "PGPORT": str(postgres.port),
        "PGUSER": "hermes",
        "PGPASSWORD": postgres.password,
    }
