"""The format of a backup: copies of files, each with its checksum, and how a damaged one is told.

A folder with `home/` (files), `databases/` (a copy of each), `SHA256SUMS` (of all of them, as
`sha256sum --check` reads it) and `backup.json`, which is written last. Files are copied while other
processes may be writing them. Links are copied as links and never followed; what is neither a file,
a folder nor a link (sockets, pipes) is left out, and so is what vanishes meanwhile.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import socket
import stat
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from hermes_ops.confined_folder import ConfinedFolder, NotConfinedError
from hermes_ops.errors import StackError
from hermes_ops.stack.layout import Layout, write_private

CHUNK_BYTES = 1 << 20
OWNER_BITS = 0o700
_ESCAPED = {b"n": b"\n", b"r": b"\r"}


@dataclass(slots=True)
class Checksums:
    """SHA-256 of files by name, in the format of `sha256sum`; `bytes_` is their size in all."""

    digests: dict[str, str] = field(default_factory=dict)
    total_bytes: int = 0

    def text(self) -> bytes:
        """Return what `sha256sum --check` reads."""
        return b"".join(_line(name, digest) for name, digest in sorted(self.digests.items()))

    @classmethod
    def parse(cls, text: bytes) -> Checksums:
        """Return the sums that `text` made; raises ValueError on anything else."""
        digests = {}
        for line in text.splitlines():
            digest, separator, name = line.lstrip(b"\\").partition(b"  ")
            if not separator:
                raise ValueError(line)
            if line.startswith(b"\\"):
                name = re.sub(rb"\\(.)", lambda escape: _ESCAPED.get(escape[1], escape[1]), name)
            digests[os.fsdecode(name)] = digest.decode("ascii")
        return cls(digests)


def _line(name: str, digest: str) -> bytes:
    raw = os.fsencode(name)
    escaped = raw.replace(b"\\", b"\\\\").replace(b"\n", b"\\n").replace(b"\r", b"\\r")
    mark = b"\\" if escaped != raw else b""
    return mark + digest.encode() + b"  " + escaped + b"\n"


@dataclass(slots=True)
class TreeCopy:
    """Copies from `source` to `target`; names are relative to both, with `/`.

    Files are readable by their owner alone and keep the owner's other permissions and times. Sums
    are kept under `prefix` before the name. `relink` gives a link's new target. A link of the name
    of one of the `parts` leads to a folder that lies on another disk: that is copied itself.
    """

    source: Path
    target: Path
    sums: Checksums
    prefix: str = ""
    relink: Callable[[str], str] = str
    parts: frozenset[str] = frozenset()

    def file(self, name: str) -> None:
        """Copy one file, if there is a regular one of that name."""
        with contextlib.suppress(FileNotFoundError, NotConfinedError):
            place, new = self.source / name, self.target / name
            with ConfinedFolder(place.parent).open(place.name) as stream:
                details = os.fstat(stream.fileno())
                make_private(new.parent)
                handle = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
                digest = hashlib.sha256()
                with os.fdopen(handle, "wb") as copy:
                    while chunk := stream.read(CHUNK_BYTES):
                        digest.update(chunk)
                        copy.write(chunk)
                        self.sums.total_bytes += len(chunk)
            os.chmod(new, stat.S_IMODE(details.st_mode) & OWNER_BITS | 0o600)
            os.utime(new, ns=(details.st_atime_ns, details.st_mtime_ns))
            self.sums.digests[self.prefix + name] = digest.hexdigest()

    def tree(self, folder: str = "", leave_out: Callable[[str], bool] = lambda _: False) -> None:
        """Copy everything below `folder` ("" for all), except names that `leave_out` picks."""
        try:
            with os.scandir(self.source / folder) as entries:
                children = sorted(entries, key=lambda entry: entry.name)
        except FileNotFoundError:
            return
        place = self.target / folder
        make_private(place)
        for entry in children:
            name = f"{folder}/{entry.name}" if folder else entry.name
            if leave_out(name):
                continue
            is_part = name in self.parts
            if entry.is_symlink() and not is_part:
                self._link(name)
            elif entry.is_dir(follow_symlinks=is_part):
                self.tree(name, leave_out)
            elif entry.is_file(follow_symlinks=False):
                self.file(name)
        with contextlib.suppress(OSError):
            details = os.stat(self.source / folder)
            os.utime(place, ns=(details.st_atime_ns, details.st_mtime_ns))

    def _link(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.symlink(self.relink(os.readlink(self.source / name)), self.target / name)


def make_private(folder: Path) -> None:
    """Make a folder and those above it that are missing, each for its owner only."""
    if not folder.is_dir():
        make_private(folder.parent)
        folder.mkdir(mode=OWNER_BITS, exist_ok=True)


def stamp(folder: Path) -> dict[str, tuple[int, int, int]]:
    """Return size, time and inode of each file below `folder`: equal if nothing has changed."""
    stamps = {}
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                details = os.lstat(os.path.join(parent, name))
                stamps[os.path.join(parent, name)] = (
                    details.st_size, details.st_mtime_ns, details.st_ino
                )  # fmt: skip
    return stamps


def link_tree(source: Path, target: Path) -> None:
    """Make a copy of a folder that shares its files' content; links are copied as links.

    Raises OSError where the file system has no hard links, and when a file vanishes meanwhile.
    """
    target.mkdir(mode=OWNER_BITS)
    with os.scandir(source) as entries:
        for entry in entries:
            new = target / entry.name
            if entry.is_dir(follow_symlinks=False):
                link_tree(Path(entry.path), new)
            elif entry.is_file(follow_symlinks=False) or entry.is_symlink():
                os.link(entry.path, new, follow_symlinks=False)


HOME, DATABASES, SUMS, MANIFEST = "home", "databases", "SHA256SUMS", "backup.json"
FORMAT = 1


@dataclass(frozen=True, slots=True)
class Manifest:
    """`backup.json`: where and by what the backup was made, and the digest of `SHA256SUMS`.

    `environment` is the Python environment whose interpreter trials ran; `databases` has the kind
    of each. `created_s` is the Unix time at which the copy began.
    """

    format: int
    created_s: float
    host: str
    home: str
    environment: str
    versions: dict[str, str]
    databases: dict[str, str]
    files: int
    bytes: int
    sums_sha256: str

    @classmethod
    def of_home(
        cls,
        layout: Layout,
        versions: dict[str, str],
        databases: dict[str, str],
        sums: Checksums,
        created_s: float,
    ) -> Manifest:
        """Return the manifest of a backup of that home, made here."""
        return cls(
            format=FORMAT,
            created_s=created_s,
            host=socket.gethostname(),
            home=str(layout.home),
            environment=sys.prefix,
            versions=versions,
            databases=databases,
            files=len(sums.digests),
            bytes=sums.total_bytes,
            sums_sha256=hashlib.sha256(sums.text()).hexdigest(),
        )


def prepare_folder(target: Path, layout: Layout) -> None:
    """Make the folder of a backup, for its owner only; raises `StackError` if it cannot be one."""
    for part in layout.folders:  # a part on another disk is copied too
        if target.is_relative_to(part.resolve()):
            raise StackError(
                f"{target} lies in {part} itself: give a folder outside, on another disk"
            )
    try:
        target.mkdir(parents=True, exist_ok=True, mode=0o700)
        if any(target.iterdir()):
            raise StackError(f"{target} is not empty: give a new folder for each backup")
        target.chmod(0o700)
    except OSError as error:
        raise StackError(
            f"{target} cannot be written ({error.strerror}): give another folder"
        ) from error


def write_manifest(target: Path, manifest: Manifest, sums: Checksums) -> None:
    """Complete the backup, once everything of it is on the disk."""
    (target / SUMS).write_bytes(sums.text())
    (target / SUMS).chmod(0o600)
    os.sync()
    write_private(target / MANIFEST, json.dumps(asdict(manifest), indent=2) + "\n")
    os.sync()


def read_manifest(folder: Path) -> tuple[Manifest, Checksums]:
    """Return the manifest and checksums of a complete backup; raises `StackError` otherwise."""
    if not folder.is_dir():
        raise StackError(f"{folder} is no folder: name the one that `hermes backup` wrote")
    try:
        document = json.loads((folder / MANIFEST).read_text())
    except FileNotFoundError:
        raise StackError(
            f"{folder} is no whole backup: it has no {MANIFEST}, which is written last. "
            "`hermes backup` was cut there, or its copy was: use another backup"
        ) from None
    except (OSError, ValueError) as error:
        raise _damaged(folder, f"{MANIFEST} cannot be read ({error})") from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        form = document.get("format") if isinstance(document, dict) else None
        raise StackError(
            f"{folder} has the format {form!r}; this version reads {FORMAT}: restore it with the "
            "version of hermes-ops that made it"
        )
    try:
        manifest = Manifest(**document)
        text = (folder / SUMS).read_bytes()
        sums = Checksums.parse(text)
    except (OSError, ValueError, TypeError) as error:
        raise _damaged(folder, f"{SUMS} or {MANIFEST} cannot be read ({error})") from error
    if hashlib.sha256(text).hexdigest() != manifest.sums_sha256:
        raise _damaged(folder, f"{SUMS} is not the one that it was made with")
    return manifest, sums


def refuse_differences(folder: Path, wanted: Checksums, actual: Checksums) -> None:
    """Raise `StackError` if a file of the backup is missing, is another, or is new."""
    missing = sorted(set(wanted.digests) - set(actual.digests))
    changed = sorted(n for n, digest in actual.digests.items() if wanted.digests.get(n) != digest)
    for names, what in ((missing, "missing"), (changed, "not as it was")):
        if names:
            more = f" and {len(names) - 1} more files are" if len(names) > 1 else " is"
            raise _damaged(folder, f"{names[0]}{more} {what}")


def _damaged(folder: Path, what: str) -> StackError:
    return StackError(
        f"The backup {folder} is damaged: {what}. Nothing was restored: use another backup"
    )
