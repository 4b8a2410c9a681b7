"""Choices with parameters and constraints, whatever is in them: a valid sweep or ConfigError."""

from __future__ import annotations

import copy
import json
from typing import Any

import jsonschema
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hermes_ops.config import (
    SweepConfig,
    check_preview,
    dag_params_schema,
    parse,
    render_command,
    render_environment,
)
from hermes_ops.config.problems import PARAMETERS
from hermes_ops.errors import ConfigError
from hermes_ops.search.constraint import Constraint
from hermes_ops.search.tree import axes, canonical

KEY_NAMES = ["type", "low", "high", "step", "values", "value", "space", "constraints", "c0", "c1"]
KEYS = st.sampled_from([*KEY_NAMES, *PARAMETERS])
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 20),
    st.floats(),
    st.text(max_size=6),
    st.sampled_from(
        [*PARAMETERS, "c0", "c1", "adam", "c0 < 2", "__class__", "{c0", "c0 ** c1 > 2"]
    ),
    st.integers(0xD800, 0xDFFF).map(chr),
)
TREES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(KEYS | st.text(max_size=4), inner, max_size=5)
    ),
    max_leaves=15,
)
FLAT: st.SearchStrategy[dict[str, Any]] = st.sampled_from(
    [
        {"type": "integer", "low": 1, "high": 3},
        {"type": "log_integer", "low": 1, "high": 9},
        {"type": "quantised", "low": 0, "high": 1, "step": 0.25},
        {"type": "uniform", "low": 0, "high": 1},
        {"type": "loguniform", "low": 0.001, "high": 1},
        {"type": "choice", "values": ["adam", 1, 2.5, True, None]},
    ]
)
WORDS = st.sampled_from(
    [
        "c0",
        "c1",
        "c0_0",
        "1",
        "0.5",
        "<",
        ">=",
        "==",
        "!=",
        "+",
        "*",
        "**",
        "and",
        "or",
        "not",
        "'adam'",
    ]
)
PATIENT = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@st.composite
def parameters(draw: st.DrawFn, prefix: str, depth: int) -> dict[str, Any]:
    """A parameter; down to `depth` a choice whose values bring others with them."""
    if depth == 0 or draw(st.booleans()):
        return copy.deepcopy(draw(FLAT))
    options: list[Any] = ["plain"]
    for index in range(draw(st.integers(1, 2))):
        below = {f"{prefix}_{index}": draw(parameters(f"{prefix}_{index}", depth - 1))}
        options.append({"value": index, "space": below if draw(st.booleans()) else {}})
    return {"type": "choice", "values": options}


@st.composite
def sweeps(draw: st.DrawFn) -> dict[str, Any]:
    """A sweep whose space and command are valid; its constraints need not be."""
    names = [f"c{index}" for index in range(draw(st.integers(1, 3)))]
    space = {name: draw(parameters(name, 3)) for name in names}
    limits = st.lists(WORDS, min_size=1, max_size=7).map(" ".join)
    return {
        "name": "generated",
        "objective": {"metric": "loss"},
        "search": {
            "algorithm": draw(st.sampled_from(["grid", "random", "tpe"])),
            "max_trials": 1_000,
            "startup_trials": 2,
            "constraints": draw(st.lists(limits | st.just("c0 == c0"), max_size=2)),
            "space": space,
        },
        "trial": {"command": ["x", *(f"--{name}={{{name}}}" for name in names)]},
        "budget": {"max_epochs": 5},
    }


def places(data: object) -> list[tuple[Any, Any]]:
    """Every (container, key) of a tree."""
    pairs = (
        data.items()
        if isinstance(data, dict)
        else enumerate(data)
        if isinstance(data, list)
        else ()
    )
    return [place for key, inner in pairs for place in [(data, key), *places(inner)]]


@st.composite
def mutations(draw: st.DrawFn) -> dict[str, Any]:
    """A sweep with one to three places of its search changed or removed."""
    data = draw(sweeps())
    for _ in range(draw(st.integers(1, 3))):
        found = places(data["search"])
        container, key = draw(st.sampled_from(found))
        if draw(st.booleans()) or isinstance(container, list):
            container[key] = draw(TREES)
        else:
            container[draw(KEYS)] = container.pop(key)
    return data


def parsed(data: object) -> SweepConfig | None:
    """The config or None; any other exception than ConfigError is the failure looked for."""
    try:
        return parse(data, "generated", None)
    except ConfigError as error:
        problems = error.problems
    assert problems
    assert all(p.where and p.found and p.allowed and p.fix for p in problems)
    return None


def holds_what_it_promises(config: SweepConfig) -> None:
    search = config.search
    space = search.to_space()
    limits = [Constraint.parse(text) for text in search.constraints]
    preview = check_preview(config, 6)
    assert preview.render()
    assert 0 < config.trial_count <= search.max_trials
    every = {name for name, _ in axes(space)}
    for trial in preview.trials:
        assert list(canonical(space, trial).items()) == list(trial.items())
        assert all(limit.holds(trial) for limit in limits)
        assert len(render_command(config, trial)) <= len(config.trial.command)
        assert len(render_environment(config, trial)) == len(trial) <= len(every)


@PATIENT
@given(sweeps())
def test_a_generated_sweep_gives_trials_of_its_space_or_is_refused(data: dict[str, Any]) -> None:
    config = parsed(data)
    if config is not None:
        assert parse(json.loads(config.to_json()), "again", None) == config
        holds_what_it_promises(config)


@PATIENT
@given(sweeps())
def test_only_constraints_and_grids_make_a_generated_sweep_wrong(data: dict[str, Any]) -> None:
    data["search"] |= {"constraints": [], "algorithm": "random"}
    assert parsed(data) is not None


@PATIENT
@given(mutations())
def test_any_mutation_of_a_search_is_a_sweep_or_refused(data: dict[str, Any]) -> None:
    before = copy.deepcopy(data)
    config = parsed(data)
    assert repr(data) == repr(before)
    if config is not None:
        holds_what_it_promises(config)


FORM = jsonschema.Draft202012Validator(dag_params_schema()["search"])


@PATIENT
@given(sweeps())
def test_a_valid_search_passes_the_trigger_form_too(data: dict[str, Any]) -> None:
    config = parsed(data)
    if config is not None:
        assert list(FORM.iter_errors(json.loads(config.to_json())["search"])) == []
