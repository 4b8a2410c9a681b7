"""Checkpoints on disk: complete or not there, and never more than are needed.

One folder each, named by a serial number: arrays.bin, objects.pickle and manifest.json with the
length and SHA-256 of both. It is written under a hidden name, flushed, and renamed.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_PREFIX = "keras-"
ARRAYS, OBJECTS, MANIFEST = "arrays.bin", "objects.pickle", "manifest.json"


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose checksums have been verified."""

    path: Path
    serial: int
    header: Mapping[str, Any]
    manifest: Mapping[str, Any]

    def objects(self) -> bytes:
        """Return the pickled part."""
        return (self.path / OBJECTS).read_bytes()

    def arrays(self, make: Callable[[bytes, str, Sequence[int]], Any]) -> dict[str, Any]:
        """Return each array by its key; `make(data, dtype name, shape)` makes it of its bytes."""
        result = {}
        with open(self.path / ARRAYS, "rb") as stream:
            for key, dtype, shape, size in self.manifest["arrays"]:
                result[key] = make(stream.read(size), dtype, shape)
        return result


class CheckpointFiles:
    """The checkpoints of one trial; one writer at a time. A reader changes nothing on disk."""

    def __init__(self, directory: Path, is_reader: bool = False) -> None:
        self._directory = directory
        self._is_reader = is_reader
        self._manifests: dict[int, Mapping[str, Any]] = {}  # they never change
        if is_reader:  # what is unfinished is the writer's, which may be writing it
            return
        directory.mkdir(parents=True, exist_ok=True)
        for left in directory.glob(f".{_PREFIX}*"):
            shutil.rmtree(left, ignore_errors=True)

    def newest(
        self, wanted: Callable[[Mapping[str, Any]], bool] | None = None
    ) -> Checkpoint | None:
        """Return the newest valid checkpoint (whose header is wanted); torn ones are skipped."""
        for serial, header in sorted(self.headers().items(), reverse=True):
            if wanted is None or wanted(header):
                checkpoint = self.load(serial)
                if checkpoint is not None:
                    return checkpoint
        return None

    def serials(self) -> list[int]:
        """Return the serial numbers on disk, in no order."""
        names = (p.name[len(_PREFIX) :] for p in self._directory.glob(f"{_PREFIX}*"))
        return [int(name) for name in names if name.isdigit()]

    def has_others(self) -> bool:
        """Tell whether the folder has checkpoints that the script itself has written."""
        names = (path.name for path in self._directory.glob("[!.]*"))
        return any(not name.startswith(_PREFIX) and not name.endswith(".tmp") for name in names)

    def load(self, serial: int) -> Checkpoint | None:
        """Return a checkpoint that is complete by its digests; None if it is torn or gone."""
        path = self._path(serial)
        try:
            manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
            header = manifest["header"]
            whole = all(_matches(path / name, *want) for name, want in manifest["files"].items())
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None
        return Checkpoint(path, serial, header, manifest) if whole else None

    def headers(self) -> dict[int, Mapping[str, Any]]:
        """Return the header of each checkpoint that has one, unverified."""
        return {serial: manifest["header"] for serial, manifest in self._read_manifests().items()}

    def sizes_bytes(self) -> dict[int, int]:
        """Return the size of each checkpoint, according to its manifest."""
        return {
            serial: sum(int(size) for size, _ in manifest["files"].values())
            for serial, manifest in self._read_manifests().items()
        }

    def _read_manifests(self) -> dict[int, Mapping[str, Any]]:
        serials = self.serials()
        for serial in serials:
            if serial not in self._manifests:
                try:
                    text = (self._path(serial) / MANIFEST).read_text(encoding="utf-8")
                    manifest = json.loads(text)
                    self._manifests[serial] = {k: manifest[k] for k in ("header", "files")}
                except (OSError, ValueError, KeyError, TypeError):
                    continue
        return {serial: self._manifests[serial] for serial in serials if serial in self._manifests}

    def write(
        self, header: Mapping[str, Any], arrays: Iterable[tuple[str, Any]], objects: bytes
    ) -> int:
        """Commit a checkpoint and return its serial; an OSError leaves the earlier ones."""
        serial = max(self.serials(), default=0) + 1
        temporary = self._directory / f".{_PREFIX}{serial}"
        shutil.rmtree(temporary, ignore_errors=True)
        try:
            temporary.mkdir()
            index, checksum = _write_arrays(temporary / ARRAYS, arrays)
            files = {ARRAYS: checksum, OBJECTS: _write_file(temporary / OBJECTS, objects)}
            manifest = {"format": 1, "header": dict(header), "files": files, "arrays": index}
            _write_file(temporary / MANIFEST, json.dumps(manifest).encode())
            _flush_folder(temporary)
            os.rename(temporary, self._path(serial))
            _flush_folder(self._directory)
        except OSError:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        return serial

    def keep(self, serials: Iterable[int]) -> None:
        """Remove every checkpoint but these; a reader removes none."""
        if self._is_reader:
            return
        for serial in set(self.serials()) - set(serials):
            self._manifests.pop(serial, None)
            shutil.rmtree(self._path(serial), ignore_errors=True)

    def _path(self, serial: int) -> Path:
        return self._directory / f"{_PREFIX}{serial:06d}"


def _write_arrays(
    path: Path, arrays: Iterable[tuple[str, Any]]
) -> tuple[list[list[Any]], list[Any]]:
    index: list[list[Any]] = []
    digest, total = hashlib.sha256(), 0
    with open(path, "wb") as stream:
        for key, array in arrays:
            data = memoryview(array.reshape(-1).view("uint8")) if array.size else memoryview(b"")
            stream.write(data)
            digest.update(data)
            total += len(data)
            index.append([key, array.dtype.name, list(array.shape), len(data)])
        stream.flush()
        os.fsync(stream.fileno())
    return index, [total, digest.hexdigest()]


def _write_file(path: Path, data: bytes) -> list[Any]:
    with open(path, "wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())
    return [len(data), hashlib.sha256(data).hexdigest()]


def _flush_folder(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _matches(path: Path, size: int, checksum: str) -> bool:
    if path.stat().st_size != size:
        return False
    digest = hashlib.sha256()
    with open(path, "rb") as stream:
        while True:
            block = stream.read(1 << 20)
            if not block:
                return digest.hexdigest() == checksum
            digest.update(block)


# -- which checkpoints are kept: the states after completed calls of fit --------------------------
# The state after each completed call is kept, so that a resumed script can be replayed exactly. The
# states have a budget; a trial that needs more cannot be resumed.

BUDGET_VARIABLE = "HERMES_FIT_STATES_BYTES"
BUDGET_BYTES = 4 << 30
ALWAYS_KEPT = 16
"""The states that are kept whatever their size: for a large model that is fit a few times."""

Headers = Mapping[int, Mapping[str, Any]]

RAISED = "raised"
"""Key in the record of a fit that ended with an error, which the script has caught."""


def retained(headers: Headers, newest: int) -> set[int]:
    """Return the serials to keep: the newest ones, the best of the running fit, the ends of fits.

    A call of `fit` has one end, the newest: one before it comes from a process that was killed.
    """
    newest_first = sorted(headers, reverse=True)
    best = [serial for serial in newest_first if headers[serial].get("best")]
    return {*newest_first[:newest], *best[:1], *final_states(headers).values()}


def final_states(headers: Headers) -> dict[int, int]:
    """Return the serial of the state after each completed fit, by the number of the fit."""
    return {
        int(headers[serial]["fit"]): serial
        for serial in sorted(headers)
        if headers[serial].get("final")
    }


def is_complete(headers: Headers, records: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether the states after the fits of these records are all there.

    A fit that raised an error has none: it is run again.
    """
    returned = {number for number, record in enumerate(records) if not record.get(RAISED)}
    return returned <= set(final_states(headers))


def exceeds(sizes_bytes: Mapping[int, int], budget_bytes: int) -> bool:
    """Return whether states of these sizes are more than may be kept."""
    return len(sizes_bytes) > ALWAYS_KEPT and sum(sizes_bytes.values()) > budget_bytes


def why_not_resumable(fits: int, budget_bytes: int) -> str:
    """Return what is said of a trial whose states need more room than there is."""
    return (
        f"the states after its {fits} fit calls need more than {budget_bytes / (1 << 30):.3g} GiB: "
        "if it is stopped it starts from the beginning"
    )
