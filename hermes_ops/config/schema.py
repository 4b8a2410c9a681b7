"""The sweep file as JSON Schema: whole for editors, by key for Airflow's trigger form."""

from __future__ import annotations

from typing import Any

from hermes_ops.config.model import SweepConfig

EXAMPLE: dict[str, Any] = {
    "name": "my-sweep",
    "objective": {"metric": "val_loss", "direction": "minimize"},
    "search": {
        "algorithm": "tpe",
        "startup_trials": 5,
        "seed": 0,
        "max_trials": 16,
        "space": {"learning_rate": {"type": "loguniform", "low": 0.0001, "high": 0.1}},
    },
    "trial": {
        "command": ["python", "train.py", "--learning-rate", "{learning_rate}"],
        "directory": "/path/to/the/script",
    },
    "budget": {"max_epochs": 20},
}


def json_schema() -> dict[str, Any]:
    """The JSON Schema (2020-12) of a sweep file."""
    schema = SweepConfig.model_json_schema()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def dag_params_schema() -> dict[str, dict[str, Any]]:
    """For each top-level key a self-contained JSON Schema with a `default`.

    For Airflow: `Param(schema.pop("default"), **schema)`. A required key's default is an example.
    """
    whole = SweepConfig.model_json_schema()
    definitions = whole["$defs"]
    params: dict[str, dict[str, Any]] = {}
    for key, prop in whole["properties"].items():
        schema = _flat(_inlined(prop, definitions))
        schema["default"] = EXAMPLE.get(key, schema.get("default"))
        params[key] = schema
    return params


def _inlined(schema: Any, definitions: dict[str, Any], around: frozenset[str] = frozenset()) -> Any:  # noqa: ANN401 - JSON of any shape
    """Definitions in place of references; `discriminator` refers to them and is dropped.

    A definition inside itself (a choice under a choice) is any object with its keys: what is in it
    is checked when the sweep is started.
    """
    if isinstance(schema, list):
        return [_inlined(item, definitions, around) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        target = definitions[name] if name not in around else _outline(definitions[name])
        rest = {key: value for key, value in schema.items() if key != "$ref"}
        return _inlined({**target, **rest}, definitions, around | {name})
    kept = {key: value for key, value in schema.items() if key != "discriminator"}
    return {key: _inlined(value, definitions, around) for key, value in kept.items()}


def _outline(definition: dict[str, Any]) -> dict[str, Any]:
    """An object with the constant keys of a definition, which tell it from others."""
    constant = {k: v for k, v in definition["properties"].items() if "const" in v}
    return {"type": "object", "properties": constant, "required": definition["required"]}


def _flat(schema: dict[str, Any]) -> dict[str, Any]:
    """`anyOf` with null as a list of types, which the form can show as an optional field."""
    options = schema.get("anyOf", [])
    if {"type": "null"} not in options or len(options) != 2:
        return schema
    (other,) = (option for option in options if option != {"type": "null"})
    rest = {key: value for key, value in schema.items() if key != "anyOf"}
    return {**other, **rest, "type": [other["type"], "null"]}
