"""Sweep files as plain data with line numbers: YAML by the rules of 1.2's core schema, and JSON.

Core schema means: only true and false are booleans (not yes, no, on, off), 1e-4 is a number, and
a date is text. Tags, duplicate keys, keys that are not text, and files that are too large or too
deep are refused; nothing in a file is ever constructed as an object or evaluated.
"""

from __future__ import annotations

import errno
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from hermes_ops.errors import ConfigError, Problem, file_error_text

LARGEST_FILE_BYTES = 2**20
MOST_VALUES = 200_000  # after aliases are followed
DEEPEST_LEVEL = 32
LONGEST_WORD = 80
KeyPath = tuple[str | int, ...]
TAG = "tag:yaml.org,2002:"
BY_SET, BY_SET_LINE = "--set", 0
"""The option that sets a key from the command line, and the line of such a key."""
EXPLICIT = "written "
"""Prefix of a tag that the file itself gives to a node; other tags follow from the node's value."""


class _TooMuchError(Exception):
    """A file exceeds a limit; the message names it."""


@dataclass(slots=True)
class Document:
    """The content of a file; `lines` maps the path of a value to its line, from 1.

    A value that the command line has set has BY_SET_LINE.
    """

    data: object = None
    lines: dict[KeyPath, int] = field(default_factory=dict)
    problems: list[tuple[KeyPath, Problem]] = field(default_factory=list)

    def refuse(self, path: KeyPath, found: str, allowed: str, fix: str) -> None:
        """Record one problem."""
        self.problems.append((path, Problem(dotted(path), found, allowed, fix)))


def dotted(path: KeyPath) -> str:
    """Return a path as `search.points_to_evaluate[0].units`; the whole file is `(top level)`."""
    parts = (f"[{p}]" if isinstance(p, int) else f".{printable(p)}" for p in path)
    return "".join(parts).removeprefix(".") or "(top level)"


def printable(word: str) -> str:
    """Return a user's word for a message: short, on one line, without control characters."""
    short = word if len(word) <= LONGEST_WORD else word[:LONGEST_WORD] + "..."
    return short if short.isprintable() else repr(short)[1:-1]


def read_document(path: Path) -> Document:
    """Return the file's data; ConfigError if it cannot be read or its syntax is not valid."""
    text = _text(path)
    return read_json(text, str(path)) if path.suffix.lower() == ".json" else read_yaml(text, path)


def _text(path: Path) -> str:
    allowed = "a YAML or JSON file of at most 1 MiB in UTF-8"
    try:
        if not path.exists():
            raise _unreadable(path, "no such file", allowed, "check the path")
        if not path.is_file():
            raise _unreadable(path, "not a regular file", allowed, "name the sweep file itself")
        with path.open("rb") as stream:
            content = stream.read(LARGEST_FILE_BYTES + 1)
        if len(content) > LARGEST_FILE_BYTES:
            raise _unreadable(path, "more than 1 MiB", allowed, "remove what is not the sweep's")
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        fix = "save the file as UTF-8"
        raise _unreadable(path, f"no UTF-8 at byte {error.start}", allowed, fix) from error
    except (OSError, ValueError) as error:
        found = file_error_text(error)
        is_path_wrong = getattr(error, "errno", None) == errno.ENAMETOOLONG
        fix = "check the path" if is_path_wrong else "make the file readable for this user"
        raise _unreadable(path, found, allowed, fix) from error


def _unreadable(path: Path, found: str, allowed: str, fix: str) -> ConfigError:
    return ConfigError(str(path), (Problem(str(path), found, allowed, fix),))


class _Core:
    """Resolvers of YAML 1.2's core schema, shared by reading and writing."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012


_FLOAT = r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)"
_SCALARS = (
    ("null", r"~|null|Null|NULL|", "~nN\0"),
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", "-+0123456789"),
    ("float", rf"{_FLOAT}|\.(nan|NaN|NAN)", "-+.0123456789"),
)
for _kind, _pattern, _first in _SCALARS:
    for _letter in _first.replace("\0", ""):
        _Core.yaml_implicit_resolvers.setdefault(_letter, []).append(
            (TAG + _kind, re.compile(rf"(?:{_pattern})\Z"))
        )
_Core.yaml_implicit_resolvers[""] = [(TAG + "null", re.compile(r"\Z"))]


class _SweepFileLoader(_Core, yaml.SafeLoader):
    """Composes nodes only; values are made by `_Reader`."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """Mark a node whose tag the file gives: no such tag is allowed, not even `!!bool yes`."""
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]
        node = super().compose_node(parent, index)
        if node is not None and getattr(event, "tag", None) is not None:
            node.tag = EXPLICIT + node.tag
        return node


class _Dumper(yaml.SafeDumper):
    """Quotes every text that a reader of YAML 1.1 or 1.2 would not read back as text."""

    yaml_implicit_resolvers = {  # noqa: RUF012
        first: yaml.SafeDumper.yaml_implicit_resolvers.get(first, [])
        + _Core.yaml_implicit_resolvers.get(first, [])
        for first in {*yaml.SafeDumper.yaml_implicit_resolvers, *_Core.yaml_implicit_resolvers}
    }

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ANN401, ARG002 - PyYAML's signature
        """Return True: everything is written in full."""
        return True


def to_yaml(data: object) -> str:
    """Return plain data as YAML that `read_yaml` reads back to equal data."""
    text: str = yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=10**6)
    return text


def read_yaml(text: str, source: object) -> Document:
    """Return one YAML document; ConfigError with the line for a syntax error."""
    document = Document()
    try:
        root = yaml.compose(text, Loader=_SweepFileLoader)
        document.data = None if root is None else _Reader(document).value(root, ())
    except (RecursionError, _TooMuchError) as error:
        found = str(error) if isinstance(error, _TooMuchError) else "nested too deeply"
        raise _syntax(source, "", found, "remove what is not the sweep's") from error
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        mark = getattr(error, "problem_mark", None)
        line = "" if mark is None else f":{mark.line + 1}"
        found = getattr(error, "problem", None) or str(error).splitlines()[0]
        found = found.removeprefix("found ")
        fix = "correct the syntax at that place (indentation, quotes, colons)"
        if "but got '{'" in found:
            fix = 'put a text with braces in it in quotes: "--rate={rate}"'
        elif "cannot start any token" in found:
            fix = "put the text in quotes, and indent with blanks, not tabs"
        raise _syntax(source, line, found, fix) from error
    return document


def _syntax(source: object, line: str, found: str, fix: str) -> ConfigError:
    name = Path(str(source)).name
    return ConfigError(str(source), (Problem(f"{name}{line}", found, "one valid document", fix),))


class _Reader:
    """Turns nodes into plain data, noting lines and problems, within fixed limits."""

    def __init__(self, document: Document) -> None:
        self._document = document
        self._left = MOST_VALUES

    def value(self, node: yaml.Node, path: KeyPath) -> object:
        """Return the data of one node."""
        self._document.lines.setdefault(path, node.start_mark.line + 1)
        self._left -= 1
        if self._left < 0:
            raise _TooMuchError(f"more than {MOST_VALUES:,} values")
        if len(path) > DEEPEST_LEVEL:
            raise _TooMuchError(f"nested deeper than {DEEPEST_LEVEL} levels")
        if isinstance(node, yaml.MappingNode) and node.tag == TAG + "map":
            return self._mapping(node, path)
        if isinstance(node, yaml.SequenceNode) and node.tag == TAG + "seq":
            return [self.value(item, (*path, index)) for index, item in enumerate(node.value)]
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node, path)
        self._refuse_tag(node, path)
        return None

    def _mapping(self, node: yaml.MappingNode, path: KeyPath) -> dict[str, object]:
        data: dict[str, object] = {}
        for key_node, value_node in node.value:
            key = key_node.value
            if key_node.tag != TAG + "str":
                self._refuse_key(key if isinstance(key, str) else "?", _line(key_node), path)
                continue
            where = (*path, key)
            if key in data:
                first, second = self._document.lines[where], _line(key_node)
                found = f"the key {key!r} on line {first} and again on line {second}"
                self._document.refuse(where, found, "each key once", "remove or rename one")
                continue
            self._document.lines[where] = _line(key_node)
            data[key] = self.value(value_node, where)
        return data

    def _refuse_key(self, key: str, line: int, path: KeyPath) -> None:
        where = (*path, key[:50])
        self._document.lines.setdefault(where, line)
        fix = "put the key in quotes or rename it"
        self._document.refuse(where, f"the key {key[:50]}, no text", "keys that are text", fix)

    def _scalar(self, node: yaml.ScalarNode, path: KeyPath) -> object:
        text: str = node.value
        match node.tag.removeprefix(TAG):
            case "str":
                return text
            case "null":
                return None
            case "bool":
                return text.lower() == "true"
            case "int":
                return _integer(text)
            case "float":
                return _float(text)
        self._refuse_tag(node, path)
        return None

    def _refuse_tag(self, node: yaml.Node, path: KeyPath) -> None:
        fix = "remove the tag and write a plain value"
        tag = node.tag.removeprefix(EXPLICIT)[:100]
        self._document.refuse(path, f"the tag {tag!r}", "plain YAML without tags", fix)


def _line(node: yaml.Node) -> int:
    line: int = node.start_mark.line
    return line + 1


def _integer(text: str) -> int:
    prefix = text[:2].lower()
    return int(text, {"0o": 8, "0x": 16}.get(prefix, 10))


def _float(text: str) -> float:
    word = text.lower().lstrip("+-")
    if word == ".nan":
        return math.nan
    return float(text.replace(".", "", 1)) if word == ".inf" else float(text)


def read_json(text: str, source: object) -> Document:
    """Return one JSON document; ConfigError with the line for a syntax error."""
    document = Document()
    try:
        pairs = json.loads(text, object_pairs_hook=_Pairs)
        document.data = _unpair(pairs, (), document)
    except (RecursionError, _TooMuchError) as error:
        found = str(error) if isinstance(error, _TooMuchError) else "nested too deeply"
        raise _syntax(source, "", found, "remove what is not the sweep's") from error
    except ValueError as error:
        line = getattr(error, "lineno", None)
        place = "" if line is None else f":{line}"
        fix = "correct the syntax at that place (commas, quotes, brackets)"
        raise _syntax(source, place, getattr(error, "msg", str(error)), fix) from error
    return document


class _Pairs(list[tuple[str, object]]):
    """A JSON object with its keys as they stand, the repeated ones included."""


def _unpair(data: object, path: KeyPath, document: Document) -> object:
    if len(path) > DEEPEST_LEVEL:
        raise _TooMuchError(f"nested deeper than {DEEPEST_LEVEL} levels")
    if isinstance(data, _Pairs):
        mapping: dict[str, object] = {}
        for key, value in data:
            if key in mapping:
                fix = "remove or rename one"
                document.refuse((*path, key), f"the key {key!r} twice", "each key once", fix)
                continue
            mapping[key] = _unpair(value, (*path, key), document)
        return mapping
    if isinstance(data, list):
        return [_unpair(item, (*path, index), document) for index, item in enumerate(data)]
    return data


def line_of(lines: Mapping[KeyPath, int], path: KeyPath) -> int | None:
    """Return the line of a path, or of the nearest part of the file that holds it."""
    for length in range(len(path), 0, -1):
        if path[:length] in lines:
            return lines[path[:length]]
    return lines.get(())


def place_of(lines: Mapping[KeyPath, int], path: KeyPath, name: str) -> str:
    """Return `NAME:LINE` of a key in the file of that name, or `--set`; empty if not known."""
    line = line_of(lines, path)
    if line is None:
        return ""
    return BY_SET if line == BY_SET_LINE else f"{name}:{line}"
