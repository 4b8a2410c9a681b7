"""How to correct what was found at a key of a sweep file, shown with the user's own value."""

from __future__ import annotations

import difflib
import json
import re
import shlex
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import BaseModel

from hermes_ops.config.files import KeyPath, dotted, printable
from hermes_ops.search.space import text

SYNONYMS: dict[str, tuple[str, ...]] = {
    "metric": ("name", "metric_name", "objective_metric", "objectiveMetricName", "monitor"),
    "direction": ("goal", "mode", "optimize", "minimize", "maximize"),
    "max_trials": ("trials", "n_trials", "num_trials", "num_samples", "max_evals", "n_iter"),
    "algorithm": ("method", "sampler", "strategy", "optimizer"),
    "space": ("parameters", "params", "search_space", "hyperparameters"),
    "values": ("options", "choices", "categories", "items", "list"),
    "low": ("min", "minimum", "lower", "from", "start"),
    "high": ("max", "maximum", "upper", "to", "stop", "end"),
    "step": ("q", "stride", "increment", "step_size"),
    "command": ("script", "cmd", "entrypoint", "entry_point", "program", "run", "args"),
    "directory": ("cwd", "workdir", "working_dir", "working_directory", "folder", "path"),
    "environment": ("env", "envs", "env_vars", "environment_variables"),
    "gpus": ("gpu", "num_gpus", "n_gpus", "gpu_count", "resources"),
    "python": ("interpreter", "python_path"),
    "max_failures": ("retries", "max_retries"),
    "max_epochs": ("epochs", "num_epochs", "n_epochs", "max_steps", "steps"),
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
"""What people write who know another tool, by the word for it here."""

DURATION = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(s|m|h|d)\w*\s*")
SECONDS = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}
NUMBER = re.compile(r"\s*[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?\s*")


def nearest(word: str, words: Iterable[str]) -> str:
    """The word that was probably meant, or nothing."""
    known = list(words)[:200]
    lower = word.lower()
    meant = [w for w in known if w == lower or lower in SYNONYMS.get(w, ())]
    close = meant or difflib.get_close_matches(word[:100], known, n=1)
    return printable(close[0]) if close else ""


def remedy(kind: str, path: KeyPath, given: object) -> str:
    """Return what to write in the place of a value of a wrong kind; empty where nothing is known.

    `kind`: the type of pydantic's error.
    """
    key = path[-1] if path else ""
    found = ""
    match kind:
        case "string_type":
            found = _quoted(key, given)
        case "int_type":
            found = _whole(key, given)
        case "float_type":
            found = _number(key, given)
        case "bool_type":
            found = f"write `{key}: true` or `{key}: false`, without quotes"
        case "tuple_type" if isinstance(given, str) and given:
            words = _words(given) if key == "command" else [given]
            found = f"write a list: {_at(key, json.dumps(words))}"
        case "model_type" | "model_attributes_type" if isinstance(given, list):
            found = _choice(path, given)
    return found


def misplaced(key: str, path: KeyPath, sections: Mapping[KeyPath, type[BaseModel]]) -> str:
    """Return where an unknown key belongs that another section has; empty where none has."""
    for holder, section in sections.items():
        meant = nearest(key, section.model_fields) if holder != path[:-1] else ""
        exact = meant == key or key.lower() in SYNONYMS.get(meant, ())
        if exact and "pod" not in holder:
            return f"write it as {dotted((*holder, meant))}"
    return ""


def unknown_of_parameter(key: str, parameter: Mapping[str, Any]) -> str:
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


def renamed(name: str) -> str:
    """Return a name of letters, digits and dashes that is as near to the given one as can be."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.")[:64]


def _quoted(key: str | int, given: object) -> str:
    if given is None:
        return f"write {_at(key, chr(34) * 2)} for an empty text, or remove it"
    if isinstance(given, bool | int | float):
        return f"put it in quotes: {_at(key, json.dumps(text(given)))}"
    if isinstance(given, dict) and [*given.values()] == [None]:  # {name} without quotes in YAML
        (name,) = given
        return f"put it in quotes: {_at(key, json.dumps(f'{{{name}}}'))}"
    return ""


def _whole(key: str | int, given: object) -> str:
    if isinstance(given, float) and given == given // 1 and abs(given) < 2**53:
        return f"write {_at(key, str(int(given)))}"
    if isinstance(given, float) and key in {"low", "high"}:
        return "write a whole number, or use the type uniform (quantised with a step)"
    if isinstance(given, str) and NUMBER.fullmatch(given) and float(given).is_integer():
        return f"write it without quotes: {_at(key, str(int(float(given))))}"
    return ""


def _number(key: str | int, given: object) -> str:
    if not isinstance(given, str):
        return ""
    if NUMBER.fullmatch(given):
        return f"write it without quotes: {_at(key, given.strip())}"
    found = DURATION.fullmatch(given)
    if found and "seconds" in str(key):
        seconds = float(found[1]) * SECONDS[found[2]]
        return f"write the seconds: {_at(key, f'{seconds:g}')}"
    return ""


def _choice(path: KeyPath, given: list[Any]) -> str:
    plain = all(isinstance(value, str | int | float | bool | None) for value in given)
    if path[:2] != ("search", "space") or len(path) == 2 or not given or not plain:
        return ""
    shown = ", ".join(json.dumps(value) for value in given[:5])
    rest = ", ..." if len(given) > 5 else ""
    return f"write {_at(path[-1], f'{{type: choice, values: [{shown}{rest}]}}')}"


def _words(command: str) -> list[str]:
    try:
        return shlex.split(command)
    except ValueError:
        return command.split()


def _at(key: str | int, value: str) -> str:
    shown = printable(value)
    return f"`{shown}`" if isinstance(key, int) or not key else f"`{printable(key)}: {shown}`"
