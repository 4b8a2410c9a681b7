"""pydantic's errors as Problems: path in the file, what was found, what is allowed, the remedy."""

from __future__ import annotations

import difflib
import json
import re
import shlex
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from hermes_ops.config import model, pod, sections, workers
from hermes_ops.config.fields import NAME_PATTERN, PARAMETER_PATTERN
from hermes_ops.config.files import KeyPath, dotted, place_of, printable
from hermes_ops.config.parameters import OptionSpec, ParameterSpec
from hermes_ops.errors import Problem
from hermes_ops.search.space import text

Violation = tuple[KeyPath, Problem]
"""A place in a sweep file, and what is wrong there."""

GPUS: KeyPath = ("trial", "gpus")
SECTIONS: dict[KeyPath, type[BaseModel]] = {
    (): model.SweepConfig,
    ("objective",): model.Objective,
    ("metrics",): sections.MetricSpec,
    ("search",): model.Search,
    ("trial",): model.TrialSpec,
    GPUS: workers.GpuRange,
    ("trial", "batch"): workers.BatchSpec,
    ("trial", "pod"): pod.PodSpec,
    ("trial", "pod", "tolerations"): pod.Toleration,
    ("trial", "pod", "volumes"): pod.Volume,
    ("budget",): model.Budget,
    ("nightly",): sections.Nightly,
    ("checkpoints",): sections.Checkpoints,
    ("model",): sections.BestModel,
}
Sections = Mapping[KeyPath, type[BaseModel]]
"""The model of each section of a file, by its path; indices of lists are left out."""
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

_SECRET_NAME = re.compile(
    r"TOKEN|SECRET|PASS|PWD|KEY|CRED|AUTH|LICEN[CS]E|PIN|PAT\b", re.IGNORECASE
)
MAPPING_EXPECTED = ("model_type", "model_attributes_type")
LONGEST_BITS = 128
MOST_COUNTED = 10**12


def show(value: object) -> str:
    """Return a value for a message: one short line, whatever its size and depth."""
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
    """Return a number of things for a message; above 10^12 only that it is more."""
    return f"{number:,}" if number <= MOST_COUNTED else "more than 10^12"


def _power(number: int) -> str:
    sign = "-" if number < 0 else ""
    return f"{sign}10^{round(number.bit_length() * 0.30103)}"


def comma_separated(words: Iterable[str]) -> str:
    """Return the words separated by commas, the first twenty of many."""
    several = [printable(word) for word in words]
    rest = f" and {len(several) - 20} more" if len(several) > 20 else ""
    return ", ".join(several[:20]) + rest or "none"


def path_in_file(error: ErrorDetails) -> KeyPath:
    """Return the path of an error in the file, without pydantic's own additions to it."""
    path, _ = _split_location(tuple(part for part in error["loc"] if part != "[key]"))
    return (*path, "type") if error["type"].startswith("union_tag") else path


def _split_location(
    loc: KeyPath, sections: Sections = SECTIONS
) -> tuple[KeyPath, type[BaseModel] | None]:
    """Return a location without pydantic's names of unions, and the model with its last key."""
    if loc[:2] == GPUS:  # a number or a range, and of its sizes the form
        loc = (*loc[:2], *loc[3:4], *(part for part in loc[4:] if isinstance(part, int)))
    if loc[:2] != SPACE or len(loc) == 2:
        return loc, sections.get(tuple(part for part in loc[:-1] if not isinstance(part, int)))
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


def translate_error(
    error: ErrorDetails,
    data: object,
    hidden: Collection[str] = (),
    sections: Sections = SECTIONS,
) -> Problem:
    """Translate one error of pydantic's in these data; `hidden`: names of secret variables."""
    path = path_in_file(error)
    holder = _at(data, path[:-1])
    match error["type"]:
        case "extra_forbidden":
            return _unknown_problem(path, error, holder, sections)
        case "missing":
            return _missing_problem(path, _field(error, sections), sections)
        case "union_tag_invalid" | "union_tag_not_found":
            return _tag_problem(path, error["input"])
        case "refused":
            parts = error["ctx"]
            found = parts["found"] or _found_text(path, error, hidden)
            return Problem(dotted(path), found, parts["allowed"], parts["fix"])
    field = _field(error, sections)
    if _is_secret(path, error, hidden):
        fix = f'put it in quotes: `{printable(str(path[-1]))}: "..."`'
    else:
        fix = _remedy(error, path) or _fix(path, field, error, sections)
    return Problem(dotted(path), _found_text(path, error, hidden), _allowed_text(error, field), fix)


def translate_errors(
    errors: Sequence[ErrorDetails], data: object, sections: Sections = SECTIONS
) -> list[Violation]:
    """Translate pydantic's errors, each with its path in the file; `sections` are its models.

    A list is not reported as too short if its items have errors, nor a default that follows from a
    key with an error.
    """
    hidden = _secret_names(data)
    errors = [error for error in errors if error["type"] != "default_factory_not_called"]
    paths = [path_in_file(error) for error in errors]
    return [
        (path, translate_error(error, data, hidden, sections))
        for path, error in zip(paths, errors, strict=True)
        if error["type"] != "too_short"
        or not any(p[: len(path)] == path and len(p) > len(path) for p in paths)
    ]


def violation(path: KeyPath, found: str, allowed: str, fix: str) -> Violation:
    """Return the problem at a path of the sweep file, together with that path."""
    return path, Problem(dotted(path), found, allowed, fix)


def with_line(path: KeyPath, problem: Problem, lines: Mapping[KeyPath, int], name: str) -> Problem:
    """Return the problem with the file's name and the line of its key, where that is known."""
    place = place_of(lines, path, name)
    if not place:
        return problem
    return replace(problem, where=f"{place} {dotted(path)}")


def _secret_names(data: object) -> tuple[str, ...]:
    """Return the variables that a sweep's data list in `trial.secrets`."""
    names = _at(data, ("trial", "secrets"))
    return tuple(n for n in names if isinstance(n, str)) if isinstance(names, list | tuple) else ()


def _at(data: object, path: KeyPath) -> object:
    """Return the value at that path; None if there is none."""
    for part in path:
        if isinstance(data, Mapping):
            data = data.get(part)
        elif isinstance(data, list | tuple) and isinstance(part, int) and part < len(data):
            data = data[part]
        else:
            return None
    return data


def _is_secret(path: KeyPath, error: ErrorDetails, hidden: Collection[str]) -> bool:
    """Return True for a value of the environment whose name marks it as a secret."""
    if path[:-1] not in SECRETS or error["loc"][-1] == "[key]":
        return False
    name = str(path[-1])
    return name in hidden or _SECRET_NAME.search(name) is not None


def _found_text(path: KeyPath, error: ErrorDetails, hidden: Collection[str]) -> str:
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
        name = _sanitised_name(str(given))
        return f"for example `{path[-1]}: {name}`" if name else ""
    return _remedy_of_kind(error["type"], path, given)


def _field(error: ErrorDetails, sections: Sections) -> FieldInfo | None:
    path, section = _split_location(error["loc"], sections) if error["loc"] else ((), None)
    return None if section is None else fields_by_key(section).get(str(path[-1]))


def fields_by_key(section: type[BaseModel]) -> dict[str, FieldInfo]:
    """Return the fields of a section by their keys in the file."""
    return {field.alias or name: field for name, field in section.model_fields.items()}


def _unknown_problem(
    path: KeyPath, error: ErrorDetails, holder: object, sections: Sections
) -> Problem:
    section = _split_location(error["loc"], sections)[1]
    keys = () if section is None else tuple(fields_by_key(section))
    key = str(path[-1])
    of_type = section in PARAMETERS.values() and isinstance(holder, Mapping)
    fix = _unknown_of_parameter(key, holder) if of_type and isinstance(holder, Mapping) else ""
    if not fix and (meant := nearest(key, keys)):
        fix = f"did you mean {meant}?"
    belongs = "" if section in PARAMETERS.values() else _place_of_key(key, path, sections)
    fix = (belongs if belongs and key not in keys and not fix else fix) or "remove the key"
    found = f"the unknown key '{printable(key)}'"
    return Problem(dotted(path), found, ", ".join(keys), fix)


def _missing_problem(path: KeyPath, field: FieldInfo | None, sections: Sections) -> Problem:
    meaning = _meaning(field)
    section = sections.get(path)
    fix = _example(path, [] if section is None else _examples_of(section))
    fix = fix or _fix(path, field, None, sections)
    allowed = f"a value: {meaning}" if meaning else "this section of the file"
    return Problem(dotted(path), "nothing", allowed, fix)


def _tag_problem(path: KeyPath, given: object) -> Problem:
    kind = given.get("type") if isinstance(given, dict) else None
    meant = nearest(kind, PARAMETERS) if isinstance(kind, str) else ""
    fix = f"did you mean {meant}?" if meant else "write one of these types"
    found = "nothing" if kind is None else show(kind)
    return Problem(dotted(path), found, ", ".join(PARAMETERS), fix)


def plain_rule(error: ErrorDetails) -> str:
    """Return what is allowed, in our words for pydantic's."""
    rule = re.sub(r"^(\w+ should (be |have )?|Value error, )", "", error["msg"])
    rule = re.sub(r" after validation, not \d+$", "", rule)
    for pattern, words in RULES:
        rule = re.sub(pattern, words, rule)
    return re.sub("^match pattern", "a text that matches the pattern", rule)


def _allowed_text(error: ErrorDetails, field: FieldInfo | None) -> str:
    rule = plain_rule(error)
    if error["type"] == "string_pattern_mismatch":
        rule = NAMES.get(error["ctx"]["pattern"], rule)
    if error["type"] in MAPPING_EXPECTED:
        rule = "a mapping of keys to values"
    meaning = _meaning(field)
    return f"{rule} ({meaning})" if meaning else rule


def _meaning(field: FieldInfo | None) -> str:
    description = (field.description if field else None) or ""
    return " ".join(description.split()).rstrip(".")


def _fix(
    path: KeyPath, field: FieldInfo | None, error: ErrorDetails | None, sections: Sections
) -> str:
    examples = [] if field is None else list(field.examples or ())
    if not examples and error is not None and error["type"] in MAPPING_EXPECTED and path:
        section = sections.get(tuple(part for part in path if not isinstance(part, int)))
        section = PARAMETERS["uniform"] if path[:2] == SPACE else section
        examples = [] if section is None else _examples_of(section)
    if fix := _example(path, examples):
        return fix
    if error is not None and error["type"] == "enum":
        return "write one of these"
    return "write a value of that kind" if path else "write a mapping with its keys"


def _example(path: KeyPath, examples: Sequence[object]) -> str:
    if not examples:
        return ""
    shown = _flow(examples[0])
    return f"for example `{shown if isinstance(path[-1], int) else f'{path[-1]}: {shown}'}`"


def _examples_of(section: type[BaseModel]) -> list[object]:
    """Return the keys that a section requires, with examples; none if one of them has none."""
    kind = get_args(field.annotation) if (field := section.model_fields.get("type")) else ()
    needed = {"type": kind[0]} if kind else {}
    for name, field in fields_by_key(section).items():
        if field.is_required() and name not in needed:
            if not field.examples:
                return []
            needed[name] = field.examples[0]
    return [needed] if needed else []


def _flow(value: object) -> str:
    return value if isinstance(value, str) and value.isalnum() else json.dumps(value)


SYNONYMS: dict[str, tuple[str, ...]] = {
    "metric": ("name", "metric_name", "objective_metric", "objectiveMetricName", "monitor"),
    "direction": ("goal", "mode", "optimize", "minimize", "maximize"),
    "max_trials": ("trials", "n_trials", "num_trials", "num_samples", "max_evals", "n_iter"),
    "algorithm": ("method", "sampler", "strategy", "optimizer"),
    "space": ("parameters", "params", "search_space", "hyperparameters"),
    "values": ("options", "choices", "categories", "items", "list"),
    "low": ("min", "minimum", "lower", "from", "start"),
    "high": ("max", "maximum", "upper", "to", "stop", "end"),
    "at_most": ("max", "maximum", "upper", "high", "less_than", "below"),
    "at_least": ("min", "minimum", "lower", "low", "greater_than", "above"),
    "step": ("q", "stride", "increment", "step_size"),
    "command": ("script", "cmd", "entrypoint", "entry_point", "program", "run", "args"),
    "directory": ("cwd", "workdir", "working_dir", "working_directory", "folder", "path"),
    "environment": ("env", "envs", "env_vars", "environment_variables"),
    "gpus": ("gpu", "num_gpus", "n_gpus", "gpu_count", "resources"),
    "python": ("interpreter", "python_path"),
    "max_failures": ("retries", "max_retries"),
    "max_epochs": ("epochs", "num_epochs", "n_epochs", "max_steps", "steps"),
    "deadline": ("due", "due_date", "until", "end_time"),
    "wall_clock_seconds": ("timeout", "time", "max_time", "wall_clock", "time_limit"),
    "gpu_seconds": ("gpu_hours",),
    "max_parallel": ("parallelism", "parallel", "concurrency", "max_concurrent_trials"),
    "early_stop": ("early_stopping", "early_terminate", "pruner"),
    "schedule": ("cron",),
    "maximize": ("max", "maximise", "higher", "up", "increase"),
    "minimize": ("min", "minimise", "lower", "down", "decrease"),
    "tpe": ("bayes", "bayesian", "bo", "optuna", "hyperopt", "smbo"),
    "random": ("rand", "uniform", "randomsearch"),
    "uniform": ("float", "double", "real", "number", "continuous", "range"),
    "loguniform": ("log", "log_float", "logfloat", "lognormal", "reciprocal", "log_range"),
    "integer": ("int", "randint", "whole", "int_range"),
    "log_integer": ("logint", "log_int", "lograndint"),
    "quantised": ("quniform", "qrandint", "quantized", "discrete", "step", "qloguniform"),
    "choice": ("categorical", "category", "enum", "list", "values", "select", "grid_search"),
}
"""Words of other tools, by the word for it here."""

BOUNDS = ("at_most", "at_least")
"""Of a metric: a least and a greatest number may belong to anything, so no other section's key is
taken for one."""

DURATION = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(s|m|h|d)\w*\s*")
SECONDS = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}
NUMBER = re.compile(r"\s*[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?\s*")


def nearest(word: str, words: Iterable[str]) -> str:
    """Return the word that was probably meant, or an empty text."""
    candidates = list(words)[:200]
    lower = word.lower()
    meant = [w for w in candidates if w == lower or lower in SYNONYMS.get(w, ())]
    close = meant or difflib.get_close_matches(word[:100], candidates, n=1)
    return printable(close[0]) if close else ""


def _remedy_of_kind(kind: str, path: KeyPath, given: object) -> str:
    """Return the remedy for a value of a wrong kind; an empty text if none is known.

    `kind`: the type of pydantic's error.
    """
    key = path[-1] if path else ""
    fix = ""
    match kind:
        case "string_type":
            fix = _quoted(key, given)
        case "int_type":
            fix = _whole(key, given)
        case "float_type":
            fix = _number(key, given)
        case "bool_type":
            fix = f"write `{key}: true` or `{key}: false`, without quotes"
        case "tuple_type" if isinstance(given, str) and given:
            words = _words(given) if key == "command" else [given]
            fix = f"write a list: {_entry(key, json.dumps(words))}"
        case "model_type" | "model_attributes_type" if isinstance(given, list):
            fix = _choice_of(path, given)
    return fix


def _place_of_key(key: str, path: KeyPath, sections: Mapping[KeyPath, type[BaseModel]]) -> str:
    """Return where an unknown key belongs if another section has it; else an empty text."""
    for holder, section in sections.items():
        meant = nearest(key, fields_by_key(section)) if holder != path[:-1] else ""
        is_synonym = meant not in BOUNDS and key.lower() in SYNONYMS.get(meant, ())
        if (meant == key or is_synonym) and "pod" not in holder:
            place, around = (*holder, meant), tuple(p for p in path[:-1] if isinstance(p, str))
            if around[: len(place)] == place:
                return f"move what it holds to {dotted(place)}, which is never nested"
            return f"write it as {dotted(place)}"
    return ""


def _unknown_of_parameter(key: str, parameter: Mapping[str, Any]) -> str:
    """Return the type that has such a key, with the bounds that the parameter has."""
    kind = str(parameter.get("type"))
    if key in {"step", *SYNONYMS["step"]} and kind in {"uniform", "integer"}:
        bounds = [f"{name}: {text(parameter[name])}" for name in ("low", "high")
                  if isinstance(parameter.get(name), int | float)]  # fmt: skip
        step = parameter[key]
        shown = text(step) if isinstance(step, int | float) else "1"
        return f"use quantised: {{{', '.join(['type: quantised', *bounds, f'step: {shown}'])}}}"
    if key == "step":
        return "remove it: a logarithmic range has no steps; a choice lists its values"
    if key == "log":
        logarithmic = "log_integer" if "int" in kind else "loguniform"
        return f"remove it; the type {logarithmic} is logarithmic"
    if key in {"values", *SYNONYMS["values"]} and kind != "choice":
        return "write `type: choice` with `values`, or remove the key"
    if key in {"low", "high"} and kind == "choice":
        return "list `values`, or write the type of a range: uniform, integer, ..."
    return ""


def _sanitised_name(name: str) -> str:
    """Return a name of letters, digits and dashes that is as near to the given one as can be."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.")[:64]


def _quoted(key: str | int, given: object) -> str:
    if given is None:
        return f"write {_entry(key, chr(34) * 2)} for an empty text, or remove it"
    if isinstance(given, bool | int | float):
        return f"put it in quotes: {_entry(key, json.dumps(text(given)))}"
    if isinstance(given, dict) and [*given.values()] == [None]:  # {name} without quotes in YAML
        (name,) = given
        return f"put it in quotes: {_entry(key, json.dumps(f'{{{name}}}'))}"
    return ""


def _whole(key: str | int, given: object) -> str:
    if isinstance(given, float) and given == given // 1 and abs(given) < 2**53:
        return f"write {_entry(key, str(int(given)))}"
    if isinstance(given, float) and key in {"low", "high"}:
        return "write a whole number, or use the type uniform (quantised with a step)"
    if isinstance(given, str) and NUMBER.fullmatch(given) and float(given).is_integer():
        return f"write it without quotes: {_entry(key, str(int(float(given))))}"
    return ""


def _number(key: str | int, given: object) -> str:
    if not isinstance(given, str):
        return ""
    if NUMBER.fullmatch(given):
        return f"write it without quotes: {_entry(key, given.strip())}"
    duration = DURATION.fullmatch(given)
    if duration and "seconds" in str(key):
        seconds = float(duration[1]) * SECONDS[duration[2]]
        return f"write the seconds: {_entry(key, f'{seconds:g}')}"
    return ""


def _choice_of(path: KeyPath, given: list[Any]) -> str:
    plain = all(isinstance(value, str | int | float | bool | None) for value in given)
    if path[:2] != SPACE or len(path) == 2 or not given or not plain:
        return ""
    shown = ", ".join(json.dumps(value) for value in given[:5])
    rest = ", ..." if len(given) > 5 else ""
    return f"write {_entry(path[-1], f'{{type: choice, values: [{shown}{rest}]}}')}"


def _words(command: str) -> list[str]:
    try:
        return shlex.split(command)
    except ValueError:
        return command.split()


def _entry(key: str | int, value: str) -> str:
    shown = printable(value)
    return f"`{shown}`" if isinstance(key, int) or not key else f"`{printable(key)}: {shown}`"
