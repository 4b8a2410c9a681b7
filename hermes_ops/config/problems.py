"""pydantic's errors as Problems: path in the file, what was found, what is allowed, the fix."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Sequence
from typing import get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from hermes_ops.config import keeping, metrics, model, nightly, pod
from hermes_ops.config.fields import NAME_PATTERN, PARAMETER_PATTERN
from hermes_ops.config.files import KeyPath, dotted, printable
from hermes_ops.config.parameters import OptionSpec, ParameterSpec
from hermes_ops.errors import Problem
from hermes_ops.search.space import text

SECTIONS: dict[KeyPath, type[BaseModel]] = {
    (): model.SweepConfig,
    ("objective",): model.Objective,
    ("metrics",): metrics.MetricSpec,
    ("search",): model.Search,
    ("trial",): model.TrialSpec,
    ("trial", "pod"): pod.PodSpec,
    ("trial", "pod", "tolerations"): pod.Toleration,
    ("trial", "pod", "volumes"): pod.Volume,
    ("budget",): model.Budget,
    ("nightly",): nightly.Nightly,
    ("checkpoints",): keeping.Checkpoints,
    ("model",): keeping.BestModel,
}
PARAMETERS: dict[str, type[BaseModel]] = {
    get_args(spec.model_fields["type"].annotation)[0]: spec
    for spec in get_args(get_args(ParameterSpec)[0])
}
SPACE: KeyPath = ("search", "space")
SECRETS: tuple[KeyPath, ...] = (("trial", "environment"), ("trial", "pod", "environment"))
NAMES = {
    PARAMETER_PATTERN: "a name of up to 64 letters, digits, '.', '_' and '-' after a letter or '_'",
    NAME_PATTERN: "a name of up to 64 letters, digits, '.', '_' and '-', neither '.' nor '-' first",
    pod.KUBERNETES_NAME: "a name of small letters, digits, '-' and '.', as Kubernetes has them",
    pod.QUANTITY: "a quantity in quotes, such as '500m', '2' or '4Gi'",
    pod.LABEL_KEY: "a label of letters, digits, '-', '_', '.' and '/'",
    pod.MOUNT_PATH: "a whole path without ':'",
}


def show(value: object) -> str:
    """A value for a message: one short line, never deep, never slow."""
    match value:
        case dict():
            keys = ", ".join(printable(str(key)[:20]) for key in list(value)[:5])
            shown = f"a mapping ({keys})" if value else "an empty mapping"
        case list() | tuple():
            shown = f"a list of {len(value)}" if value else "an empty list"
        case str():
            shown = f"the text '{printable(value)}'" if value else "an empty text"
        case None | bool() | float():
            shown = text(value) or "null"
        case int():
            shown = str(value) if value.bit_length() < 256 else "a whole number of many digits"
        case _:
            shown = f"a {type(value).__name__}"
    return shown


def nearest(word: str, words: Iterable[str]) -> str:
    """The word that was probably meant, or nothing."""
    close = difflib.get_close_matches(word[:100], list(words)[:200], n=1)
    return printable(close[0]) if close else ""


def listed(words: Iterable[str]) -> str:
    """The words with commas, the first twenty of many."""
    several = [printable(word) for word in words]
    rest = f" and {len(several) - 20} more" if len(several) > 20 else ""
    return ", ".join(several[:20]) + rest or "none"


def path_of(error: ErrorDetails) -> KeyPath:
    """Where in the file an error stands, without pydantic's own additions to the path."""
    path, _ = _placed(tuple(part for part in error["loc"] if part != "[key]"))
    return (*path, "type") if error["type"].startswith("union_tag") else path


def _placed(loc: KeyPath) -> tuple[KeyPath, type[BaseModel] | None]:
    """A location without the names of pydantic's unions, and the model that holds its last key."""
    if loc[:2] != SPACE or len(loc) == 2:
        return loc, SECTIONS.get(tuple(part for part in loc[:-1] if not isinstance(part, int)))
    path, rest = loc[:2], loc[2:]
    while rest:  # a parameter: its name, its type, a key; of a choice the index and form of a value
        kind = PARAMETERS.get(str(rest[1])) if len(rest) > 1 else None
        path, rest = path + rest[:1], rest[2:]
        holder = kind if len(rest) == 1 else None
        if rest[:1] != ("values",) or len(rest) < 3:
            return path + rest, holder
        path, form, rest = path + rest[:2], rest[2], rest[3:]
        if rest[:1] != ("space",) or len(rest) == 1:
            return path + rest, OptionSpec if form == "option" and len(rest) == 1 else None
        path, rest = path + rest[:1], rest[1:]
    return path, None


def problem_of(error: ErrorDetails) -> Problem:
    """One error of pydantic's, translated."""
    path = path_of(error)
    match error["type"]:
        case "extra_forbidden":
            return _unknown(path, _placed(error["loc"])[1])
        case "missing":
            return _missing(path, _field(error))
        case "union_tag_invalid" | "union_tag_not_found":
            return _tag(path, error["input"])
        case "refused":
            parts = error["ctx"]
            found = parts["found"] or _found(path, error)
            return Problem(dotted(path), found, parts["allowed"], parts["fix"])
    field = _field(error)
    return Problem(dotted(path), _found(path, error), _allowed(error, field), _fix(path, field))


def translated(errors: Sequence[ErrorDetails]) -> list[tuple[KeyPath, Problem]]:
    """All errors with their paths; a list is not called too short when its items are to blame.

    A default that follows from a key with an error is no error of its own.
    """
    errors = [error for error in errors if error["type"] != "default_factory_not_called"]
    paths = [path_of(error) for error in errors]
    return [
        (path, problem_of(error))
        for path, error in zip(paths, errors, strict=True)
        if error["type"] != "too_short"
        or not any(p[: len(path)] == path and len(p) > len(path) for p in paths)
    ]


def _found(path: KeyPath, error: ErrorDetails) -> str:
    secret = any(path[:-1] == holder for holder in SECRETS)
    if secret and error["loc"][-1] != "[key]":
        return f"a value of type {type(error['input']).__name__} (not shown)"
    return show(error["input"])


def _field(error: ErrorDetails) -> FieldInfo | None:
    section = _placed(error["loc"])[1] if error["loc"] else None
    return None if section is None else section.model_fields.get(str(error["loc"][-1]))


def _unknown(path: KeyPath, section: type[BaseModel] | None) -> Problem:
    keys = () if section is None else tuple(section.model_fields)
    meant = nearest(str(path[-1]), keys)
    fix = f"did you mean {meant}?" if meant else "remove the key"
    found = f"the unknown key '{printable(str(path[-1]))}'"
    return Problem(dotted(path), found, ", ".join(keys), fix)


def _missing(path: KeyPath, field: FieldInfo | None) -> Problem:
    return Problem(dotted(path), "nothing", _meaning(field) or "a value", _fix(path, field))


def _tag(path: KeyPath, given: object) -> Problem:
    kind = given.get("type") if isinstance(given, dict) else None
    meant = nearest(kind, PARAMETERS) if isinstance(kind, str) else ""
    fix = f"did you mean {meant}?" if meant else "write one of these types"
    found = "nothing" if kind is None else show(kind)
    return Problem(dotted(path), found, ", ".join(PARAMETERS), fix)


def _allowed(error: ErrorDetails, field: FieldInfo | None) -> str:
    rule = re.sub(r"^\w+ should (be |have )?", "", error["msg"])
    rule = re.sub(r" after validation, not \d+$", "", rule)
    rule = rule.replace("a valid tuple", "a list").replace("a valid dictionary", "a mapping")
    if error["type"] == "string_pattern_mismatch":
        rule = NAMES.get(error["ctx"]["pattern"], rule)
    if error["type"] in ("model_type", "model_attributes_type"):
        rule = "a mapping of keys to values"
    meaning = _meaning(field)
    return f"{rule} ({meaning})" if meaning else rule


def _meaning(field: FieldInfo | None) -> str:
    description = (field.description if field else None) or ""
    return " ".join(description.split()).rstrip(".")


def _fix(path: KeyPath, field: FieldInfo | None) -> str:
    examples = [] if field is None else list(field.examples or ())
    if not examples:
        return "write a value of that kind" if path else "write a mapping with the keys of a sweep"
    return f"for example `{path[-1]}: {_flow(examples[0])}`"


def _flow(value: object) -> str:
    return value if isinstance(value, str) and value.isalnum() else json.dumps(value)
