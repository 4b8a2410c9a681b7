"""Copies of a trial's checkpoints in an object store: complete, or not there.

Below the trial's place lie `files`, each written once under a name of its own, and `copies`, one
manifest for each copy, written after all files that it names. So whatever ends a writer, what it
leaves is the copy before or the new one. All names begin with the epoch of the writer's lease: a
writer that has lost its lease wins over no later one and deletes nothing of it.

The trial's own files have a snapshot, and a record of what has been copied or fetched.

Nothing but this module imports fsspec; it is needed only by trials that have a store.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import stat
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from hermes_ops.trial.files import Folder, read_json, write_json
from hermes_ops.trial.retention import unfinished

_BLOCK_BYTES = 4_194_304
_FILES, _COPIES = "files", "copies"
_MANIFEST = re.compile(r"(\d{10})-(\d{6,})-([0-9a-f]+)\.json")
_COPY = re.compile(rf"{_FILES}/\d{{10}}-[0-9A-Za-z]+-\d{{6,}}|{_COPIES}/{_MANIFEST.pattern}")
_COPY_OF_TRIAL = re.compile(rf"\d+/(?:{_COPY.pattern})")
_FOLDER = re.compile(rf"|(?:\d+/)?(?:{_FILES}|{_COPIES})|\d+")
_PACKAGES = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "az": "adlfs"}
_PACKAGES.update(abfs="adlfs", abfss="adlfs", sftp="paramiko", ssh="paramiko", smb="smbprotocol")


class StoreError(Exception):
    """The store did not do what was asked of it; another time it may."""


class NotInstalledError(StoreError):
    """A Python package that the store needs is not there."""


class ChangedError(Exception):
    """A file has changed since it was looked at: look again."""


class AbandonedError(Exception):
    """No time is left for a copy."""


class DamagedError(Exception):
    """A copy lacks a file, or a file of it is not what it was."""


class StoredFile(NamedTuple):
    """One file of a checkpoint as it was seen; `path` is relative to the checkpoints' folder."""

    path: str
    size_bytes: int
    mtime_ns: int
    inode: int

    @classmethod
    def from_stat(cls, path: str, seen: os.stat_result) -> StoredFile:
        """Return the file as `stat` describes it."""
        return cls(path, seen.st_size, seen.st_mtime_ns, seen.st_ino)


class ManifestName(NamedTuple):
    """The name of a manifest; those of later copies compare greater."""

    epoch: int
    serial: int
    token: str

    def key(self) -> str:
        """Return the key below the trial's place."""
        return f"{_COPIES}/{self.epoch:010d}-{self.serial:06d}-{self.token}.json"


MOST_NAME = 240
"""The most characters of a folder's name. File systems allow 255 bytes, and names derived from it
are longer. A sweep's id may have up to 750: the ids of its DAG, its group and its run."""


def safe_name(run_id: str) -> str:
    """Return a folder name for a sweep's id: unique, not a path, and of limited length."""
    name = re.sub(r"[^A-Za-z0-9._-]", "_", run_id)
    if name == run_id and name.strip(".") and len(name) <= MOST_NAME:
        return name
    digest = hashlib.sha1(run_id.encode(), usedforsecurity=False)
    return f"{name[: MOST_NAME - 9]}-{digest.hexdigest()[:8]}"


def place(store: str, sweep: str, number: object = None) -> str:
    """Return the URL of a trial's place in the store, or that of the whole sweep."""
    root = f"{store.rstrip('/')}/{safe_name(sweep)}"
    return root if number is None else f"{root}/{number}"


def file_key(epoch: int, token: str, count: int) -> str:
    """Return the key of a writer's file of that number, below the trial's place."""
    return f"{_FILES}/{epoch:010d}-{token}-{count:06d}"


def connect(url: str) -> CheckpointStore:
    """Return the store of a trial's copies at this URL, without a request to it yet.

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
        raise StoreError(_error_text(error)) from error
    return CheckpointStore(files, root.rstrip("/"))


class CheckpointStore:
    """The copies of one trial; `files` is a file system of fsspec, `root` the place in it."""

    def __init__(self, files: Any, root: str) -> None:  # noqa: ANN401 - fsspec has no types
        self._fs = files
        self._root = root

    # -- reading -------------------------------------------------------------------------------

    def names(self) -> list[ManifestName]:
        """Return the names of the manifests in the store, newest first."""
        with _translated():
            try:
                paths = self._fs.ls(self._path(_COPIES), detail=False)
            except FileNotFoundError:
                return []
        matches = (_MANIFEST.fullmatch(str(path).rpartition("/")[2]) for path in paths)
        names = [ManifestName(int(m[1]), int(m[2]), m[3]) for m in matches if m]
        return sorted(names, reverse=True)

    def read(self, name: ManifestName) -> dict[str, Any]:
        """Return a manifest; DamagedError for a torn one, or one that is gone."""
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
        for path, aim in document.get("links", []):
            goal = _inside(target, path)
            _inside(target, os.path.normpath(os.path.join(os.path.dirname(path), aim)))
            goal.parent.mkdir(parents=True, exist_ok=True)
            goal.symlink_to(aim)

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

    def upload(self, folder: Path, file: StoredFile, key: str, check: Callable[[], None]) -> str:
        """Write one file and return its SHA-256; ChangedError if it is not that file any more.

        `check` is called for each block; an AbandonedError of it ends the writing.
        """
        digest = hashlib.sha256()
        try:
            source = open(folder / file.path, "rb")  # noqa: SIM115 - closed below
        except FileNotFoundError as error:
            raise ChangedError(str(error)) from error
        except OSError as error:
            raise StoreError(f"{file.path} cannot be read: {error.strerror}") from error
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

    def commit(self, name: ManifestName, document: dict[str, Any]) -> None:
        """Write a copy's manifest; all its files must be there."""
        with _translated(), self._create(name.key()) as target:
            target.write(json.dumps(document).encode())

    def tidy(self, name: ManifestName, document: dict[str, Any]) -> None:
        """Delete all that this copy does not need, but nothing of a later lease."""
        wanted = {name.key(), *(entry[3] for entry in document["files"])}
        old = [k for k in self._keys() if k not in wanted and _epoch(k) <= name.epoch]
        self._remove(old)

    def clear_below(self, epoch: int) -> None:
        """Delete what leases before that epoch have left."""
        self._remove([key for key in self._keys() if _epoch(key) < epoch])

    def clear(self) -> None:
        """Delete the copies of this trial, and nothing else that lies at its place.

        A sweep's author chooses the place: what deletes there may have more rights than he.
        """
        self._clear(_COPY)

    def clear_sweep(self) -> None:
        """Delete the copies of all trials where this is the place of their sweep."""
        self._clear(_COPY_OF_TRIAL)

    def _clear(self, ours: re.Pattern[str]) -> None:
        with _translated():
            keys = [key for key in self._below() if ours.fullmatch(key)]
        self._remove(keys)
        if keys:
            with _translated():
                self._remove_empty_folders()

    def _below(self, **options: bool) -> list[str]:
        """Return what lies below this place, as keys."""
        root = self._root.strip("/")
        try:
            paths = self._fs.find(self._root, **options)
        except FileNotFoundError:
            return []
        return [str(path).strip("/").removeprefix(root).strip("/") for path in paths]

    def _remove_empty_folders(self) -> None:
        """Remove what is left in a store that has real folders."""
        left = [key for key in self._below(withdirs=True) if _FOLDER.fullmatch(key)]
        for key in sorted({*left, ""} if left else (), key=len, reverse=True):
            with contextlib.suppress(OSError):  # not empty, or no folder
                self._fs.rmdir(self._path(key).rstrip("/"))

    def _keys(self) -> list[str]:
        with _translated():
            return ["/".join(str(p).rsplit("/", 2)[-2:]) for p in self._fs.find(self._root)]

    def _remove(self, keys: list[str]) -> None:
        """Delete manifests first, so that none ever names what is not there."""
        manifests = [key for key in keys if f"/{_COPIES}/" in f"/{key}"]
        files = sorted({*keys}.difference(manifests))
        for group in (sorted(manifests), files):
            if group and self._fs.async_impl:  # many in one request
                with _translated(), contextlib.suppress(FileNotFoundError):
                    self._fs.rm([self._path(key) for key in group])
                continue
            for key in group:
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
    """Return the epoch of the lease that wrote a key; beyond all others for a foreign key."""
    digits = key.rpartition("/")[2].partition("-")[0]
    return int(digits) if key.startswith((_FILES, _COPIES)) and digits.isdigit() else 1 << 62


def _same(handle: int, file: StoredFile) -> None:
    if StoredFile.from_stat(file.path, os.fstat(handle)) != file:
        raise ChangedError(f"{file.path} has changed")


def _inside(target: Path, path: str) -> Path:
    parts = PurePosixPath(path).parts
    if not parts or ".." in parts or parts[0] == "/":
        raise DamagedError(f"{path!r} leads out of the checkpoints' folder")
    return target.joinpath(*parts)


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    """Translate what a store's client raises into a StoreError."""
    try:
        yield
    except (StoreError, ChangedError, AbandonedError, DamagedError):
        raise
    except Exception as error:
        raise StoreError(_error_text(error)) from error


def _error_text(error: Exception) -> str:
    text = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


MARK = "stored.json"


class CheckpointEntry(NamedTuple):
    """One file or folder directly in the checkpoints' folder; paths are relative to that."""

    files: tuple[StoredFile, ...]
    folders: tuple[str, ...] = ()
    links: tuple[tuple[str, str], ...] = ()  # path, and target relative to it


Snapshot = dict[str, CheckpointEntry]
"""The committed entries by name."""


def snapshot(checkpoints: Path) -> Snapshot:
    """Return what is committed there now, without what vanishes meanwhile."""
    entries: Snapshot = {}
    with contextlib.suppress(OSError):
        for name in sorted(os.listdir(checkpoints)):
            if not unfinished(name):
                with contextlib.suppress(OSError):
                    entries[name] = _entry(checkpoints, name)
    return entries


class _EntryListing:
    """The files, folders and links of an entry of the checkpoints' folder.

    A link to something inside that folder is kept as a link; a link that leads out of it is
    replaced by its target's content. Left out are sockets and pipes, links that lead out to
    nothing, and links to the folder itself.
    """

    def __init__(self, checkpoints: Path) -> None:
        self._root = os.path.realpath(checkpoints)
        self.files: list[StoredFile] = []
        self.folders: list[str] = []
        self.links: list[tuple[str, str]] = []

    def add(self, path: str, above: tuple[str, ...] = ()) -> None:
        """Add the file, folder or link at a path; `above`: the real paths of its parent folders."""
        whole = os.path.join(self._root, path)
        if os.path.islink(whole) and self._add_link(path, whole):
            return
        details = os.stat(whole)
        if stat.S_ISREG(details.st_mode):
            self.files.append(StoredFile.from_stat(path, details))
        elif stat.S_ISDIR(details.st_mode) and (real := os.path.realpath(whole)) not in above:
            self.folders.append(path)
            for name in os.listdir(whole):
                self.add(os.path.join(path, name), (*above, real))

    def _add_link(self, path: str, whole: str) -> bool:
        """Add a link as a link; return False if its target's content is to be added instead."""
        inside = os.path.relpath(os.path.realpath(whole), self._root)
        first = inside.split(os.sep)[0]
        if first == os.curdir:
            return True
        if unfinished(first):  # as `..` is
            return not os.path.exists(whole)
        self.links.append((path, os.path.relpath(inside, os.path.dirname(path) or os.curdir)))
        return True


def _entry(checkpoints: Path, name: str) -> CheckpointEntry:
    listing = _EntryListing(checkpoints)
    listing.add(name)
    files, folders = tuple(sorted(listing.files)), tuple(sorted(listing.folders))
    return CheckpointEntry(files, folders, tuple(sorted(listing.links)))


def digest(entries: Snapshot) -> str:
    """Return a digest that identifies exactly these files."""
    text = repr([entries[name] for name in sorted(entries)])
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


class StoreMark(NamedTuple):
    """Whose checkpoints lie in the folder: the last segment's that trained on them.

    `tokens` are of the writers, at that epoch, whose copies are no newer than the folder; `copied`
    is the digest of what was copied or fetched last; not `sound`: a fetch was cut off in between.
    """

    epoch: int = -1
    tokens: tuple[str, ...] = ()
    sound: bool = True
    copied: str = ""

    @classmethod
    def read(cls, folder: Folder) -> StoreMark:
        """Read the folder's mark; without one, the default: its origin is unknown."""
        document = read_json(folder.root / MARK) or {}
        tokens = document.get("tokens")
        return cls(
            int(document.get("epoch", -1)),
            tuple(str(t) for t in tokens) if isinstance(tokens, list) else (),
            bool(document.get("sound", True)),
            str(document.get("copied", "")),
        )

    def write(self, folder: Folder) -> None:
        """Write the mark into the folder."""
        write_json(folder.root / MARK, self._asdict(), durable=True)
