"""Copies of a trial's checkpoints in an object store: complete, or not there.

Below the trial's place lie `files`, each written once under a name of its own, and `copies`, one
manifest for each copy, written after all files that it names. So whatever ends a writer, what it
leaves is the copy before or the new one. All names begin with the epoch of the writer's lease: a
writer that has lost its lease wins over no later one and deletes nothing of it.

Nothing but this module imports fsspec; it is needed only by trials that have a store.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

ANEW_VARIABLE = "HERMES_BEGAN_ANEW"
"""The epoch at which the trial began from scratch: copies of earlier ones count no more."""
_BLOCK_BYTES = 4_194_304
_FILES, _COPIES = "files", "copies"
_MANIFEST = re.compile(r"(\d{10})-(\d{6})-([0-9a-f]+)\.json")
_PACKAGES = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "az": "adlfs"}
_PACKAGES.update(abfs="adlfs", abfss="adlfs", sftp="paramiko", ssh="paramiko", smb="smbprotocol")


class StoreError(Exception):
    """The store did not do what was asked of it; another time it may."""


class NotInstalledError(StoreError):
    """A Python package that the store needs is not there."""


class ChangedError(Exception):
    """A file has changed since it was looked at: look again."""


class AbandonedError(Exception):
    """There is no more time for a copy."""


class DamagedError(Exception):
    """A copy lacks a file, or a file of it is not what it was."""


class File(NamedTuple):
    """One file of a checkpoint as it was seen; `path` is relative to the checkpoints' folder."""

    path: str
    size_bytes: int
    mtime_ns: int
    inode: int

    @classmethod
    def of(cls, path: str, seen: os.stat_result) -> File:
        """What `stat` says of it."""
        return cls(path, seen.st_size, seen.st_mtime_ns, seen.st_ino)


class Name(NamedTuple):
    """What a manifest is called; later copies are greater."""

    epoch: int
    serial: int
    token: str

    def key(self) -> str:
        """Its place below the trial's."""
        return f"{_COPIES}/{self.epoch:010d}-{self.serial:06d}-{self.token}.json"


def safe_name(run_id: str) -> str:
    """A sweep's id as a folder name: two ids have two names, and none leads elsewhere."""
    name = re.sub(r"[^A-Za-z0-9._-]", "_", run_id)
    if name == run_id and name.strip("."):
        return name
    digest = hashlib.sha1(run_id.encode(), usedforsecurity=False)
    return f"{name}-{digest.hexdigest()[:8]}"


def place(store: str, sweep: str, number: object = None) -> str:
    """The URL of a trial's place in the store, or that of the whole sweep."""
    root = f"{store.rstrip('/')}/{safe_name(sweep)}"
    return root if number is None else f"{root}/{number}"


def file_key(epoch: int, token: str, count: int) -> str:
    """Where the writer of that token puts its file of that number, below the trial's place."""
    return f"{_FILES}/{epoch:010d}-{token}-{count:06d}"


def connect(url: str) -> Copies:
    """The copies at a trial's place; nothing is asked of the store yet.

    Raises: NotInstalledError, with the package to install.
    """
    try:
        from fsspec.core import url_to_fs

        files, root = url_to_fs(url, use_listings_cache=False, skip_instance_cache=True)
    except (ImportError, ValueError) as error:
        protocol = url.partition("://")[0]
        package = _PACKAGES.get(protocol, f"the package of fsspec for {protocol}://")
        raise NotInstalledError(
            f"checkpoints.store {url} cannot be used ({error}): install {package} where "
            "hermes-trial runs (the trial's image, or the Airflow worker), or correct the URL"
        ) from error
    except Exception as error:
        raise StoreError(_said(error)) from error
    return Copies(files, root.rstrip("/"))


class Copies:
    """The copies of one trial; `files` is a file system of fsspec, `root` the place in it."""

    def __init__(self, files: Any, root: str) -> None:  # noqa: ANN401 - fsspec has no types
        self._fs = files
        self._root = root

    # -- reading -------------------------------------------------------------------------------

    def names(self) -> list[Name]:
        """The manifests that are there, the newest first."""
        with _translated():
            try:
                found = self._fs.ls(self._path(_COPIES), detail=False)
            except FileNotFoundError:
                return []
        matches = (_MANIFEST.fullmatch(str(path).rpartition("/")[2]) for path in found)
        names = [Name(int(m[1]), int(m[2]), m[3]) for m in matches if m]
        return sorted(names, reverse=True)

    def read(self, name: Name) -> dict[str, Any]:
        """A manifest; DamagedError for a torn one, or one that is gone."""
        with _translated():
            try:
                data = self._fs.cat_file(self._path(name.key()))
            except FileNotFoundError:
                raise DamagedError(f"{name.key()} is gone") from None
        try:
            document = json.loads(data)
        except ValueError:
            raise DamagedError(f"{name.key()} is torn") from None
        if not isinstance(document, dict) or not isinstance(document.get("files"), list):
            raise DamagedError(f"{name.key()} is not a manifest")
        return document

    def download(self, document: dict[str, Any], target: Path) -> None:
        """Write what a manifest names below `target`; DamagedError if any of it is not whole."""
        for folder in document.get("folders", []):
            _inside(target, folder).mkdir(parents=True, exist_ok=True)
        for path, size, mtime_ns, key, checksum in document["files"]:
            goal = _inside(target, path)
            goal.parent.mkdir(parents=True, exist_ok=True)
            if self._fetch(str(key), goal) != (size, checksum):
                raise DamagedError(f"{key} is not what was written")
            os.utime(goal, ns=(mtime_ns, mtime_ns))

    def _fetch(self, key: str, goal: Path) -> tuple[int, str]:
        digest, total = hashlib.sha256(), 0
        with open(goal, "wb") as target, _translated():
            try:
                with self._fs.open(self._path(key), "rb") as source:
                    for block in iter(lambda: source.read(_BLOCK_BYTES), b""):
                        target.write(block)
                        digest.update(block)
                        total += len(block)
            except FileNotFoundError:
                raise DamagedError(f"{key} is gone") from None
        return total, digest.hexdigest()

    # -- writing -------------------------------------------------------------------------------

    def upload(self, folder: Path, file: File, key: str, check: Callable[[], None]) -> str:
        """Write one file and return its SHA-256; ChangedError if it is not that file any more.

        `check` is called for each block; an AbandonedError of it ends the writing.
        """
        digest = hashlib.sha256()
        try:
            source = open(folder / file.path, "rb")  # noqa: SIM115 - closed below
        except OSError as error:
            raise ChangedError(str(error)) from error
        with source:
            _same(source.fileno(), file)
            with _translated(), self._create(key) as target:
                left = file.size_bytes  # no more, should it grow meanwhile
                while block := source.read(min(left, _BLOCK_BYTES)):
                    check()
                    target.write(block)
                    digest.update(block)
                    left -= len(block)
            _same(source.fileno(), file)
        return digest.hexdigest()

    def commit(self, name: Name, document: dict[str, Any]) -> None:
        """Write a copy's manifest; all its files must be there."""
        with _translated(), self._create(name.key()) as target:
            target.write(json.dumps(document).encode())

    def tidy(self, name: Name, document: dict[str, Any]) -> None:
        """Delete all that this copy does not need, but nothing of a later lease."""
        wanted = {name.key(), *(entry[3] for entry in document["files"])}
        old = [k for k in self._keys() if k not in wanted and _epoch(k) <= name.epoch]
        self._remove(old)

    def clear_below(self, epoch: int) -> None:
        """Delete what leases before that epoch have left."""
        self._remove([key for key in self._keys() if _epoch(key) < epoch])

    def clear(self) -> None:
        """Delete everything below this place."""
        with _translated(), contextlib.suppress(FileNotFoundError):
            self._fs.rm(self._root, recursive=True)

    def _keys(self) -> list[str]:
        with _translated():
            return ["/".join(str(p).rsplit("/", 2)[-2:]) for p in self._fs.find(self._root)]

    def _remove(self, keys: list[str]) -> None:
        """Manifests go first, so that none ever names what is not there."""
        for key in sorted(keys, key=lambda k: (not k.startswith(_COPIES), k)):
            with _translated(), contextlib.suppress(FileNotFoundError):
                self._fs.rm_file(self._path(key))

    def _create(self, key: str) -> Any:  # noqa: ANN401 - a file of fsspec
        path = self._path(key)
        try:
            return self._fs.open(path, "wb")
        except FileNotFoundError:  # a store that has real folders
            self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)
            return self._fs.open(path, "wb")

    def _path(self, key: str) -> str:
        return f"{self._root}/{key}"


def _epoch(key: str) -> int:
    """The epoch of the lease that wrote it; beyond all others for what is not ours."""
    digits = key.rpartition("/")[2].partition("-")[0]
    return int(digits) if key.startswith((_FILES, _COPIES)) and digits.isdigit() else 1 << 62


def _same(handle: int, file: File) -> None:
    if File.of(file.path, os.fstat(handle)) != file:
        raise ChangedError(f"{file.path} has changed")


def _inside(target: Path, path: str) -> Path:
    parts = PurePosixPath(path).parts
    if not parts or ".." in parts or parts[0] == "/":
        raise DamagedError(f"{path!r} leads out of the checkpoints' folder")
    return target.joinpath(*parts)


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    """Whatever a store's client raises is a StoreError."""
    try:
        yield
    except (StoreError, ChangedError, AbandonedError, DamagedError):
        raise
    except Exception as error:
        raise StoreError(_said(error)) from error


def _said(error: Exception) -> str:
    text = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
