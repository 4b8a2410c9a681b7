"""Write a backup of a home, stopped or running.

Of a running home the copy is what a crash would leave, so a restored stack goes on as after a
crash. That needs an order, as what is copied later is newer:

1. how much of each trial's metrics MLflow has: what it has more is sent to it again, and kept once;
2. Airflow's database, then MLflow's: a lease names a run of MLflow that must be there;
3. of each trial its result, then its checkpoints, then its metrics: a result needs all metrics, and
   so does a checkpoint, as what came before it is not trained again;
4. everything else.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from hermes_ops.errors import StackError
from hermes_ops.stack import databases, migrations
from hermes_ops.stack.backup_format import (
    DATABASES,
    HOME,
    Checksums,
    Manifest,
    TreeCopy,
    link_tree,
    prepare_folder,
    stamp,
    write_manifest,
)
from hermes_ops.stack.layout import Layout

Say = Callable[[str], None]

LINK_ATTEMPTS = 20
STAGING = ".checkpoints.backup"
AUTH_DATABASE = "mlflow-auth"

# Rewritten by a start, or of processes of this home that a restored one does not have.
_RUN_FILES = re.compile(
    r"(logs|run|processes|gpus|stack\.json|drain|standby\.sock|\.lock|nudge|metrics"
    r"|(airflow/[^/]+\.)?controller-.*\.lock|airflow/airflow\.cfg|airflow/migrated\.json"
    r"|mlflow/upgraded\.json|airflow/logs/dag_processor)"
)
# Leases and stop flags stand in Airflow's database; the epochs seen and the locks fence off
# processes that a restored home does not have.
_SEGMENT_FILES = re.compile(
    r"sweeps/[^/]+/trials/([^/]+\.(lease|stop)\.(json|new)|[^/]+/(lock|epoch|nudge|\.reserve|\.checkpoints\.backup))"
)
_TRIAL = re.compile(r"sweeps/[^/]+/trials/[^/]+")
_SENT = re.compile(r"sweeps/[^/]+/(trials/[^/]+/sent|decisions\.sent)\.json")


def write_backup(layout: Layout, target: Path, say: Say) -> Manifest:
    """Write a backup of the home into `target`, a new or empty folder.

    Raises `StackError` with the remedy; what was written is removed then. A backup that was cut
    has no manifest, which is written last, and is refused by a restore.
    """
    used = databases.in_use(layout)
    prepare_folder(target, layout)
    try:
        return _write(layout, target, used, say)
    except OSError as error:
        _empty(target)
        raise StackError(
            f"The backup in {target} could not be written ({error.strerror or error}); what there "
            "was of it has been removed. Free some space, or give a folder on another disk"
        ) from error
    except BaseException:
        _empty(target)
        raise


def _write(
    layout: Layout, target: Path, used: tuple[databases.Database, ...], say: Say
) -> Manifest:
    begun_s = time.time()
    parts = frozenset(folder.name for folder in layout.folders)
    copy = TreeCopy(layout.home, target / HOME, Checksums(), f"{HOME}/", parts=parts)
    copier = _HomeCopy(layout.home, copy, say)
    (target / HOME).mkdir(mode=0o700)
    (target / DATABASES).mkdir(mode=0o700)
    copier.sent_marks()
    auth = layout.mlflow / "auth.db"
    for database in used:
        say(f"Copying {database.name}'s database …")
        databases.copy_database(database, target / DATABASES)
    if auth.exists():
        databases.copy_sqlite(auth, target / DATABASES / f"{AUTH_DATABASE}.sqlite")
    say("Copying trials, checkpoints and artifacts …")
    copier.trials()
    copier.everything_else([d.file for d in used if d.kind == databases.SQLITE] + [auth])
    sums = copier.copy.sums
    for file in sorted((target / DATABASES).iterdir()):
        sums.digests[f"{DATABASES}/{file.name}"] = _digest(file)
        sums.total_bytes += file.stat().st_size
    kinds = {database.name: database.kind for database in used}
    manifest = Manifest.of_home(layout, migrations.installed_versions(), kinds, sums, begun_s)
    write_manifest(target, manifest, sums)
    return manifest


@dataclass(slots=True)
class _HomeCopy:
    """Copies the files of a home in the order that the module's text explains."""

    home: Path
    copy: TreeCopy
    say: Say

    def sent_marks(self) -> None:
        for pattern in ("*/decisions.sent.json", "*/trials/*/sent.json"):
            for file in (self.home / "sweeps").glob(pattern):
                self.copy.file(file.relative_to(self.home).as_posix())

    def trials(self) -> None:
        for folder in sorted((self.home / "sweeps").glob("*/trials/*")):
            if folder.is_dir() and not folder.is_symlink():
                self._trial(folder.relative_to(self.home).as_posix())

    def _trial(self, name: str) -> None:
        result, checkpoints = f"{name}/result.json", f"{name}/checkpoints"
        self.copy.file(result)
        with _frozen(self.home / checkpoints, self.say) as frozen:
            TreeCopy(
                frozen,
                self.copy.target / checkpoints,
                self.copy.sums,
                f"{self.copy.prefix}{checkpoints}/",
            ).tree()
        self.copy.tree(
            name,
            lambda entry: (
                entry in {result, checkpoints}
                or bool(_SEGMENT_FILES.fullmatch(entry) or _SENT.fullmatch(entry))
            ),
        )

    def everything_else(self, database_files: list[Path]) -> None:
        files = [os.path.relpath(file, self.home) for file in database_files]
        database_names = {
            name + end for name in files for end in ("", *databases.SQLITE_COMPANIONS)
        }
        self.copy.tree(
            leave_out=lambda name: (
                name in database_names
                or self._is_trial(name)
                or any(p.fullmatch(name) for p in (_RUN_FILES, _SEGMENT_FILES, _SENT))
            )
        )

    def _is_trial(self, name: str) -> bool:
        return bool(_TRIAL.fullmatch(name)) and (self.home / name).is_dir()


@contextlib.contextmanager
def _frozen(folder: Path, say: Say) -> Iterator[Path]:
    """Yield a folder with the files as they are at one moment, while a script goes on writing.

    Hard links to all files are made until nothing has changed meanwhile; a checkpoint that is
    written elsewhere and renamed, as it is to be, cannot change after that. Where there are no
    hard links the folder itself is yielded.
    """
    place = folder.with_name(STAGING)  # on the same disk
    for _ in range(LINK_ATTEMPTS):
        shutil.rmtree(place, ignore_errors=True)
        before = stamp(folder)
        try:
            link_tree(folder, place)
        except FileNotFoundError:
            if not folder.exists():
                break
            continue
        except OSError:
            break
        if stamp(folder) == before:
            try:
                yield place
            finally:
                shutil.rmtree(place, ignore_errors=True)
            return
    shutil.rmtree(place, ignore_errors=True)
    if folder.is_dir():
        say(f"{folder} may have changed while it was copied: try again, or stop the stack first")
    yield folder


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _empty(folder: Path) -> None:
    for name in (HOME, DATABASES):
        shutil.rmtree(folder / name, ignore_errors=True)
    for file in folder.glob("*"):
        with contextlib.suppress(OSError):
            file.unlink()
