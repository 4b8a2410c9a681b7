"""References to environment variables in a sweep's `trial.environment`: `{env:NAME}`.

The sweep holds the reference alone, wherever it is stored. `hermes-trial` replaces it when a
segment starts, out of what the installation passes to trials. `{{env:NAME}}` is the text itself.
"""

from __future__ import annotations

import re

TYPE_CHECKING = False  # checkers of types know this name
if TYPE_CHECKING:
    from collections.abc import Mapping

VARIABLE = "HERMES_REFERENCES"
"""Variable of hermes-trial: the variables that hold references, as a JSON object."""

RESOLVED_VARIABLE = "HERMES_RESOLVED"
"""Variable of a script: names of the variables that were replaced; their values are secrets."""

RESERVED_PREFIXES = (
    "AIRFLOW",
    "_AIRFLOW",
    "HERMES_",
    "__HERMES",
    "SUPERVISOR_",
    "FLASK_",
    "SQLALCHEMY",
)
"""Variables of the services, which name databases and secrets: no trial is given them."""

_REFERENCE = re.compile(r"\{\{env:([^{}]*)\}\}|\{env:([^{}]*)\}")
_LIKELY = re.compile(r"\$\{env[:.][^{}]*\}|(?<!\{)\{\s*env\s*[:.][^{}]*\}(?!\})", re.IGNORECASE)
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class MissingVariableError(Exception):
    """A reference to a variable that is not set; `name` is the variable's."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


def is_reserved(name: str) -> bool:
    """Return whether a variable is the services' own, which no setting and no sweep may pass on."""
    return name.upper().startswith(RESERVED_PREFIXES)


def refers(value: str) -> bool:
    """Return whether a value holds a reference, or the text of one in double braces."""
    return _REFERENCE.search(value) is not None


def names_in(value: str) -> tuple[str, ...]:
    """Return the names of the variables that a value refers to, in their order."""
    names: list[str | None] = [match.group(2) for match in _REFERENCE.finditer(value)]
    return tuple(dict.fromkeys(name for name in names if name is not None))


def without_references(value: str) -> str:
    """Return the value without its references."""
    return _REFERENCE.sub("", value)


def mistake_in(value: str) -> tuple[str, str, str] | None:
    """Return the mistake in a value's references: found, allowed, fix; None if there is none."""
    allowed = "{env:NAME} with the name of a variable that trials inherit"
    for match in _LIKELY.finditer(value):
        written = match.group()
        if not _REFERENCE.fullmatch(written):
            words: list[str] = _NAME.findall(written)
            fix = f"write {{env:{words[1]}}}" if words[1:] else "write the name of a variable"
            return written, allowed, fix
    for name in names_in(value):
        if not _NAME.fullmatch(name):
            return f"{{env:{name}}}", allowed, "write the name of a variable"
        if is_reserved(name):
            fix = "name another one: the services' own variables reach no trial"
            return f"{{env:{name}}}", allowed, fix
    return None


def resolved(value: str, environment: Mapping[str, str]) -> str:
    """Return the value with its references replaced; MissingVariableError for one that is not set.

    Variables of the services count as not set, whatever the environment holds.
    """

    def replaced(match: re.Match[str]) -> str:
        name = match.group(2)
        if name is None:
            return match.group()[1:-1]
        if is_reserved(name) or name not in environment:
            raise MissingVariableError(name)
        return environment[name]

    return _REFERENCE.sub(replaced, value)
