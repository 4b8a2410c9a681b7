"""pydantic's errors as Problems: path in the file, what was found, what is allowed, the fix."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from hermes_ops.config import keeping, metrics, model, nightly, pod
from hermes_ops.config.fields import NAME_PATTERN, PARAMETER_PATTERN
from hermes_ops.config.files import KeyPath, dotted, printable
from hermes_ops.config.parameters import OptionSpec, ParameterSpec
from hermes_ops.config.remedies import misplaced, nearest, remedy, renamed, unknown_of_parameter
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

RULES = (
    ("a valid tuple", "a list"),
    ("a valid dictionary", "a mapping"),
    ("a valid integer", "a whole number"),
    ("a valid number", "a number"),
    ("a valid string", "a text"),
    ("a valid boolean", "true or false"),
    (r"greater than or equal to (\S+)", r"\1 or more"),
    (r"less than or equal to (\S+)", r"\1 or less"),
    (r"greater than (\S+)", r"more than \1"),
    ("at least 1 (item|character)", r"one \1 or more"),
)
"""pydantic's words for what is allowed, and ours."""

STARS = "..."
_SECRET_NAME = re.compile(
    r"TOKEN|SECRET|PASS|PWD|KEY|CRED|AUTH|LICEN[CS]E|PIN|PAT\b", re.IGNORECASE
)
MAPPING_EXPECTED = ("model_type", "model_attributes_type")
LONGEST_BITS = 128
MOST_COUNTED = 10**12


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
            shown = str(value) if value.bit_length() < LONGEST_BITS else f"about {_power(value)}"
        case _:
            shown = f"a {type(value).__name__}"
    return shown


def count(number: int) -> str:
    """A number of things for a message: up to 10^12 itself, else only that it is greater."""
    return f"{number:,}" if number <= MOST_COUNTED else "more than 10^12"


def _power(number: int) -> str:
    sign = "-" if number < 0 else ""
    return f"{sign}10^{round(number.bit_length() * 0.30103)}"


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


def problem_of(error: ErrorDetails, data: object, hidden: Collection[str] = ()) -> Problem:
    """One error of pydantic's in these data, translated; `hidden`: names of secret variables."""
    path = path_of(error)
    holder = _at(data, path[:-1])
    match error["type"]:
        case "extra_forbidden":
            return _unknown(path, _placed(error["loc"])[1], holder)
        case "missing":
            return _missing(path, _field(error))
        case "union_tag_invalid" | "union_tag_not_found":
            return _tag(path, error["input"])
        case "refused":
            parts = error["ctx"]
            found = parts["found"] or _found(path, error, hidden)
            return Problem(dotted(path), found, parts["allowed"], parts["fix"])
    field = _field(error)
    if _is_secret(path, error, hidden):
        fix = f'put it in quotes: `{printable(str(path[-1]))}: "..."`'
    else:
        fix = _remedy(error, path) or _fix(path, field, error)
    return Problem(dotted(path), _found(path, error, hidden), _allowed(error, field), fix)


def translated(
    errors: Sequence[ErrorDetails], data: object, hidden: Collection[str] = ()
) -> list[tuple[KeyPath, Problem]]:
    """All errors with their paths; a list is not called too short when its items are to blame.

    A default that follows from a key with an error is no error of its own.
    """
    errors = [error for error in errors if error["type"] != "default_factory_not_called"]
    paths = [path_of(error) for error in errors]
    return [
        (path, problem_of(error, data, hidden))
        for path, error in zip(paths, errors, strict=True)
        if error["type"] != "too_short"
        or not any(p[: len(path)] == path and len(p) > len(path) for p in paths)
    ]


def _at(data: object, path: KeyPath) -> object:
    """What stands at that path; None where nothing does."""
    for part in path:
        if isinstance(data, Mapping):
            data = data.get(part)
        elif isinstance(data, list | tuple) and isinstance(part, int) and part < len(data):
            data = data[part]
        else:
            return None
    return data


def _is_secret(path: KeyPath, error: ErrorDetails, hidden: Collection[str]) -> bool:
    """True for a value of the environment whose name says that it is one."""
    if path[:-1] not in SECRETS or error["loc"][-1] == "[key]":
        return False
    name = str(path[-1])
    return name in hidden or _SECRET_NAME.search(name) is not None


def _found(path: KeyPath, error: ErrorDetails, hidden: Collection[str]) -> str:
    given = error["input"]
    if not _is_secret(path, error, hidden):
        return show(given)
    kinds = {bool: "true or false", int: "a number", float: "a number", str: "a text"}
    return f"{kinds.get(type(given), 'a value of another kind')} (not shown)"


def _remedy(error: ErrorDetails, path: KeyPath) -> str:
    given = error["input"]
    expected = error.get("ctx", {}).get("expected")
    if expected and isinstance(given, str):
        meant = nearest(given, re.findall(r"'([^']*)'", expected))
        return f"did you mean {meant}?" if meant else ""
    if error["type"] == "string_pattern_mismatch" and error["ctx"]["pattern"] == NAME_PATTERN:
        name = renamed(str(given))
        return f"for example `{path[-1]}: {name}`" if name else ""
    return remedy(error["type"], path, given)


def _field(error: ErrorDetails) -> FieldInfo | None:
    section = _placed(error["loc"])[1] if error["loc"] else None
    return None if section is None else section.model_fields.get(str(error["loc"][-1]))


def _unknown(path: KeyPath, section: type[BaseModel] | None, holder: object) -> Problem:
    keys = () if section is None else tuple(section.model_fields)
    key = str(path[-1])
    of_type = section in PARAMETERS.values() and isinstance(holder, Mapping)
    fix = unknown_of_parameter(key, holder) if of_type and isinstance(holder, Mapping) else ""
    if not fix and (meant := nearest(key, keys)):
        fix = f"did you mean {meant}?"
    belongs = "" if section in PARAMETERS.values() else misplaced(key, path, SECTIONS)
    fix = (belongs if belongs and key not in keys and not fix else fix) or "remove the key"
    found = f"the unknown key '{printable(key)}'"
    return Problem(dotted(path), found, ", ".join(keys), fix)


def _missing(path: KeyPath, field: FieldInfo | None) -> Problem:
    meaning = _meaning(field)
    section = SECTIONS.get(path)
    fix = _example(path, [] if section is None else _examples_of(section))
    fix = fix or _fix(path, field, None)
    allowed = f"a value: {meaning}" if meaning else "this section of the file"
    return Problem(dotted(path), "nothing", allowed, fix)


def _tag(path: KeyPath, given: object) -> Problem:
    kind = given.get("type") if isinstance(given, dict) else None
    meant = nearest(kind, PARAMETERS) if isinstance(kind, str) else ""
    fix = f"did you mean {meant}?" if meant else "write one of these types"
    found = "nothing" if kind is None else show(kind)
    return Problem(dotted(path), found, ", ".join(PARAMETERS), fix)


def _allowed(error: ErrorDetails, field: FieldInfo | None) -> str:
    rule = re.sub(r"^\w+ should (be |have )?", "", error["msg"])
    rule = re.sub(r" after validation, not \d+$", "", rule)
    for pattern, words in RULES:
        rule = re.sub(pattern, words, rule)
    if error["type"] == "string_pattern_mismatch":
        rule = NAMES.get(error["ctx"]["pattern"], rule)
    if error["type"] in MAPPING_EXPECTED:
        rule = "a mapping of keys to values"
    meaning = _meaning(field)
    return f"{rule} ({meaning})" if meaning else rule


def _meaning(field: FieldInfo | None) -> str:
    description = (field.description if field else None) or ""
    return " ".join(description.split()).rstrip(".")


def _fix(path: KeyPath, field: FieldInfo | None, error: ErrorDetails | None) -> str:
    examples = [] if field is None else list(field.examples or ())
    if not examples and error is not None and error["type"] in MAPPING_EXPECTED and path:
        section = SECTIONS.get(tuple(part for part in path if not isinstance(part, int)))
        section = PARAMETERS["uniform"] if path[:2] == SPACE else section
        examples = [] if section is None else _examples_of(section)
    if fix := _example(path, examples):
        return fix
    if error is not None and error["type"] == "enum":
        return "write one of these"
    return "write a value of that kind" if path else "write a mapping with the keys of a sweep"


def _example(path: KeyPath, examples: Sequence[object]) -> str:
    if not examples:
        return ""
    shown = _flow(examples[0])
    return f"for example `{shown if isinstance(path[-1], int) else f'{path[-1]}: {shown}'}`"


def _examples_of(section: type[BaseModel]) -> list[object]:
    """The keys that a section needs, with their examples; none where one of them has none."""
    kind = get_args(field.annotation) if (field := section.model_fields.get("type")) else ()
    needed = {"type": kind[0]} if kind else {}
    for name, field in section.model_fields.items():
        if field.is_required() and name not in needed:
            if not field.examples:
                return []
            needed[name] = field.examples[0]
    return [needed] if needed else []


def _flow(value: object) -> str:
    return value if isinstance(value, str) and value.isalnum() else json.dumps(value)
