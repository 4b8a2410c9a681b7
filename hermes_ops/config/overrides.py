"""Keys of a sweep file that the command line sets: `--set search.max_trials=8`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from hermes_ops.config.files import (
    BY_SET,
    BY_SET_LINE,
    Document,
    KeyPath,
    dotted,
    place_of,
    printable,
    read_document,
    read_yaml,
)
from hermes_ops.config.problems import show
from hermes_ops.errors import ConfigError, Problem

_INDEX = re.compile(r"\[(\d{1,6})\]")
_NAME = re.compile(r"[^.\[\]]+")
_VALUE = "value"
FORM = "KEY=VALUE, such as search.max_trials=8"


def read_with_overrides(path: Path, overrides: Sequence[str] = ()) -> Document:
    """Return a file's data in which each `KEY=VALUE` is set, in order.

    KEY is the path of a key as messages name it, VALUE what the file would have behind the key.
    ConfigError for a file or an override that cannot be read.
    """
    document = read_document(path)
    for text in overrides:
        key, separator, value = text.partition("=")
        if not separator or not key:
            found = f"no {'key' if separator else repr('=')} in {printable(text)!r}"
            raise _refusal(key, Problem(BY_SET, found, FORM, f"write {BY_SET} {FORM}"))
        _Override(document, key.strip()).apply(value)
    return document


def places(path: Path, paths: Iterable[KeyPath], overrides: Sequence[str] = ()) -> list[str]:
    """Return where each key is: `FILE:LINE` or `--set`; empty texts if it is not known."""
    lines = read_with_overrides(path, overrides).lines
    return [place_of(lines, key, path.name) for key in paths]


def source_name(path: Path, overrides: Sequence[str]) -> str:
    """Return the name of a file in messages, with the keys that are set."""
    keys = ", ".join(printable(text.partition("=")[0]) for text in overrides)
    return f"{path} with {BY_SET} {keys}" if keys else str(path)


def _refusal(key: str, problem: Problem) -> ConfigError:
    return ConfigError(f"{BY_SET} {printable(key)}".rstrip(), (problem,))


@dataclass(frozen=True, slots=True)
class _Override:
    """Sets one key of a document."""

    document: Document
    key: str

    def apply(self, text: str) -> None:
        """Set the key to the value that the text is in YAML."""
        value = self._read(text)
        self.document.data = self._with(self.document.data, self.key, value, ())

    def _read(self, text: str) -> object:
        """Return the value of the text, as if it stood behind its key in the file."""
        allowed = "a value as the sweep file would have it behind the key, on one line"
        if len(text.splitlines()) > 1:
            fix = "write a list as [a, b] and a mapping as {a: 1, b: 2}"
            self._refuse(self.key, "several lines", allowed, fix)
        try:
            read = read_yaml(f"{_VALUE}: {text}", self.key)
        except ConfigError as error:
            found = error.problems[0]
            fix = "put the value in the shell's quotes, and a text with : { [ # in YAML's too"
            self._refuse(self.key, found.found, allowed, fix)
        if read.problems:
            problem = read.problems[0][1]
            self._refuse(self.key, problem.found, problem.allowed, problem.fix)
        return read.data[_VALUE] if isinstance(read.data, dict) else None

    def _with(self, data: object, rest: str, value: object, path: KeyPath) -> object:
        """Return the data at the path with the value at the rest of the key."""
        if not rest:
            self._mark(path)
            return value
        if (index := _INDEX.match(rest)) is not None:
            return self._with_item(data, int(index[1]), rest[index.end() :], value, path)
        if data is None:
            self._mark(path)
            data = {}
        if not isinstance(data, dict):
            whole = dotted(path)
            fix = f"set it as a whole: {BY_SET} '{whole}={{...}}'"
            self._refuse(whole, show(data), f"a mapping, to set {self.key}", fix)
        name = self._name(data, rest)
        after = rest.removeprefix(name).removeprefix(".")
        inner = self._with(data.get(name), after, value, (*path, name))
        return {**data, name: inner}

    def _with_item(
        self, data: object, index: int, rest: str, value: object, path: KeyPath
    ) -> object:
        if not isinstance(data, list) or index >= len(data):
            length = f"0 to {len(data) - 1}" if isinstance(data, list) and data else "no item"
            fix = f"set the list as a whole: {BY_SET} '{dotted(path)}=[...]'"
            found = f"item {index} of {show(data)}"
            self._refuse(self.key, found, length, fix)
        inner = self._with(data[index], rest.removeprefix("."), value, (*path, index))
        return [*data[:index], inner, *data[index + 1 :]]

    def _name(self, data: dict[str, object], rest: str) -> str:
        """Return the next key of the rest: the longest one that is there, as keys may have dots."""
        there = [key for key in data if key and _continues(rest, key)]
        if there:
            return max(there, key=len)
        if (match := _NAME.match(rest)) is None or not _continues(rest, match[0]):
            fix = f"write {BY_SET} {FORM}"
            self._refuse(self.key, "an empty part", "keys with a dot between them", fix)
        return match[0]

    def _mark(self, path: KeyPath) -> None:
        """Note that what is at the path comes from the command line."""
        lines = self.document.lines
        for below in [other for other in lines if other[: len(path)] == path]:
            del lines[below]
        lines[path] = BY_SET_LINE

    def _refuse(self, where: str, found: str, allowed: str, fix: str) -> NoReturn:
        problem = Problem(f"{BY_SET} {printable(where)}", found, allowed, fix)
        raise _refusal(self.key, problem) from None


def _continues(rest: str, key: str) -> bool:
    """Return whether the key is the next whole part of the rest."""
    behind = rest.removeprefix(key)
    is_whole = not behind or behind[0] == "[" or (behind[0] == "." and len(behind) > 1)
    return rest.startswith(key) and is_whole
