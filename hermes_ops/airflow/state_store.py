"""Airflow's task state store as Hermes needs it: records of any size that last.

Airflow dates what a task stores (`[state_store] default_retention_days`, 30 by default), and
`airflow state-store clean` deletes what is out of date, whether its run has ended or not. Records
of Hermes have no date: a sweep may run, or wait to be resumed, for a year. They go with their DAG
run.

Airflow's REST interface refuses values over 65,535 bytes (`[state_store]
max_value_storage_bytes`). The largest fields of a larger record are stored compressed in pieces,
under keys of their own: `hermes_lease.<digest>.0`, `hermes_lease.<digest>.1` and so on. The record
under its own key, the head, names the digest of each such field. The head is written last, so a
reader finds the whole old record or the whole new one. A field that stays as it is keeps its
pieces.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Protocol

DEFAULT_BACKEND = "airflow.state.metastore.MetastoreBackend"


class TaskStore(Protocol):
    """A task's own state store, as Airflow hands it to the task."""

    def get(self, key: str, default: Any = None) -> Any:  # noqa: ANN401 - JSON
        """Return the stored value."""

    def set(self, key: str, value: Any, *, retention: Any = None) -> None:  # noqa: ANN401 - JSON
        """Store a value."""

    def delete(self, key: str) -> None:
        """Delete a value."""


@dataclass(frozen=True, slots=True)
class LastingStore:
    """A task's own state store, in which everything is kept until the DAG run is deleted."""

    store: TaskStore

    def get(self, key: str, default: Any = None) -> Any:  # noqa: ANN401 - JSON
        """Return the stored value."""
        return self.store.get(key, default)

    def set(self, key: str, value: Any, *, retention: Any = None) -> None:  # noqa: ANN401 - JSON
        """Store a value without a date of expiry, unless a retention is given."""
        from airflow.sdk.execution_time.context import NEVER_EXPIRE

        self.store.set(key, value, retention=NEVER_EXPIRE if retention is None else retention)

    def delete(self, key: str) -> None:
        """Delete a value."""
        self.store.delete(key)


def refused_setting() -> str | None:
    """Return why Airflow's configuration would lose records of Hermes; None where it does not."""
    from airflow.configuration import conf

    if conf.getboolean("state_store", "clear_on_success", fallback=False):
        return (
            "[state_store] clear_on_success is True: Airflow would delete a sweep's records as "
            "soon as its plan has succeeded. Set it to False for the API server, the scheduler "
            "and the workers."
        )
    for section, key, allowed in (
        ("state_store", "backend", DEFAULT_BACKEND),
        ("workers", "state_store_backend", ""),
    ):
        value = conf.get(section, key, fallback=allowed)
        if value and value != allowed:
            return (
                f"[{section}] {key} is {value}: the controller reads a sweep's records from "
                f"Airflow's own database. Remove the setting (allowed: {allowed or 'none'})."
            )
    return None


WHOLE_CHARACTERS = 16_384
"""A record is stored as one value up to this length of its JSON."""

PIECE_CHARACTERS = 60_000
"""The most in one piece."""

MOST_PIECES = 4_000
"""The most pieces of a record that are read: users who may edit a task can write any number."""

MOST_FIELDS = 64
"""The most fields of a record that are read from pieces."""

MOST_BYTES = 256 * 2**20
"""The most that the fields in pieces of a record may be together when they are unpacked."""

PIECES = "pieces"
"""The field of a head that names what lies in pieces: field -> [digest, number of pieces]."""

DIGEST_CHARACTERS = 20

Read = Callable[[str], object]


@dataclass(frozen=True, slots=True)
class KeyValues:
    """A store of JSON values by key; `read` returns None for a key that is not there."""

    read: Read
    write: Callable[[str, object], None]
    delete: Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Divided:
    """A record as it is stored: its head, and its pieces by key."""

    head: dict[str, Any]
    pieces: dict[str, str]


def divided(key: str, record: Mapping[str, Any]) -> Divided:
    """Return the record with its largest fields in pieces, as few fields as necessary."""
    lengths = {name: len(json.dumps(value)) for name, value in record.items()}
    length = sum(lengths.values()) + sum(len(name) + 6 for name in record)
    head, pieces, index = dict(record), dict[str, str](), dict[str, list[Any]]()
    for name in sorted(lengths, key=lambda field: lengths[field], reverse=True):
        if length <= WHOLE_CHARACTERS:
            break
        text = _packed(head.pop(name))
        digest = sha256(text.encode()).hexdigest()[:DIGEST_CHARACTERS]
        parts = [text[i : i + PIECE_CHARACTERS] for i in range(0, len(text), PIECE_CHARACTERS)]
        pieces |= {_piece_key(key, digest, n): part for n, part in enumerate(parts)}
        index[name] = [digest, len(parts)]
        length -= lengths[name]
    return Divided({**head, PIECES: index} if index else head, pieces)


def write_record(store: KeyValues, key: str, record: object) -> None:
    """Store a record under its key: what is new of its pieces, the head, and no old pieces."""
    if not isinstance(record, Mapping) or len(json.dumps(record)) <= WHOLE_CHARACTERS:
        store.write(key, record)
        return
    divided_record, before = divided(key, record), piece_keys(key, store.read(key))
    for name in sorted(divided_record.pieces.keys() - before):
        store.write(name, divided_record.pieces[name])
    store.write(key, divided_record.head)
    for name in sorted(before - divided_record.pieces.keys()):
        store.delete(name)


def read_record(read: Read, key: str) -> object:
    """Return the whole value under the key; None if there is none or a piece of it is missing."""
    head: object = None
    for _ in range(2):  # a writer may remove the pieces of the head that was just read
        head = read(key)
        if not is_head(head):
            return head
        if (record := joined(key, head, read)) is not None:
            return record
    return None


def joined(key: str, head: object, read: Read) -> dict[str, Any] | None:
    """Return the record of a head; None if a piece is missing or damaged."""
    try:
        record: dict[str, Any] = dict(head)  # type: ignore[call-overload]  # it may be anything
        index, left = record.pop(PIECES, {}), MOST_BYTES
        for name, (digest, count) in _confirm(index).items():
            texts = [read(_piece_key(key, digest, n)) for n in range(count)]
            content = _unpacked("".join(texts), left)  # type: ignore[arg-type]  # None: missing
            left -= len(content)
            record[name] = json.loads(content.decode(errors="surrogatepass"))
    except (TypeError, ValueError, AttributeError, RecursionError, zlib.error):
        return None
    return record


def is_head(value: object) -> bool:
    """Return whether a stored value has fields that lie in pieces."""
    return isinstance(value, Mapping) and PIECES in value


def piece_keys(key: str, head: object) -> set[str]:
    """Return the keys of all pieces that a stored value names."""
    if not is_head(head):
        return set()
    try:
        named = _confirm(dict(head)[PIECES]).values()  # type: ignore[call-overload]  # a mapping
        return {_piece_key(key, digest, n) for digest, count in named for n in range(count)}
    except (TypeError, ValueError, AttributeError):  # what a store holds may be anything
        return set()


def _confirm(index: Mapping[str, tuple[str, int]]) -> Mapping[str, tuple[str, int]]:
    """Return digest and number of pieces of each field; ValueError for more than are read."""
    counts = [count for _, count in index.values()]
    if len(counts) > MOST_FIELDS or min(counts, default=1) < 1 or sum(counts) > MOST_PIECES:
        raise ValueError(f"more than {MOST_PIECES} pieces, or none, or of {MOST_FIELDS} fields")
    return index


def _piece_key(key: str, digest: str, number: int) -> str:
    return f"{key}.{digest}.{number}"


def _packed(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return base64.b64encode(zlib.compress(text.encode(errors="surrogatepass"))).decode()


def _unpacked(text: str, most_bytes: int) -> bytes:
    unpacking = zlib.decompressobj()
    content = unpacking.decompress(base64.b64decode(text), max(1, most_bytes))
    if not unpacking.eof:
        raise ValueError("it is cut off, or larger than a record may be")
    return content
