"""Metrics other than the objective in a sweep file."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from hermes_ops.config import load_file, parse, render_environment
from hermes_ops.core.secondary_metrics import SecondaryMetric
from hermes_ops.errors import ConfigError, Problem

ROOT = Path(__file__).parents[3]


def data(*metrics: Any, **objective: Any) -> dict[str, Any]:
    return {
        "name": "bounded",
        "objective": {"metric": "loss", **objective},
        "metrics": list(metrics),
        "search": {
            "algorithm": "random",
            "max_trials": 2,
            "space": {"rate": {"type": "uniform", "low": 0, "high": 1}},
        },
        "trial": {"command": ["python", "train.py", "{rate}"]},
        "budget": {"max_epochs": 2},
    }


def secondary(**metric: Any) -> SecondaryMetric:
    (found,) = parse(data({"name": "m", **metric}), "test", None).secondary
    return found


def problems(*metrics: Any, **objective: Any) -> dict[str, Problem]:
    with pytest.raises(ConfigError) as caught:
        parse(data(*metrics, **objective), "test", None)
    return {problem.where: problem for problem in caught.value.problems}


@pytest.mark.parametrize(
    ("metric", "direction"),
    [
        ({}, None),
        ({"at_most": 20}, "minimize"),
        ({"at_least": 0.9}, "maximize"),
        ({"at_least": 0.1, "at_most": 0.5}, None),
        ({"at_most": 20, "direction": "maximize"}, "maximize"),
        ({"direction": "minimize"}, "minimize"),
    ],
)
def test_the_direction_is_that_of_the_only_bound_unless_it_is_given(
    metric: dict[str, Any], direction: str | None
) -> None:
    assert secondary(**metric).direction == direction


def test_bounds_reach_those_who_judge_trials() -> None:
    assert secondary(at_most=20, at_least=1) == SecondaryMetric("m", None, 20.0, 1.0)


BAD: list[tuple[str, list[Any], str, str]] = [
    ("the objective again", [{"name": "loss"}], "metrics[0].name", "which is the objective"),
    ("a name twice", [{"name": "a"}, {"name": "a"}], "metrics[1].name", "which is metrics[0]"),
    ("no name", [{"at_most": 1}], "metrics[0].name", "nothing"),
    ("an unknown key", [{"name": "a", "at_mots": 1}], "metrics[0].at_mots", "unknown key"),
    ("a text", ["latency_ms"], "metrics[0]", "latency_ms"),
    ("a pattern of no sense", [{"name": "a", "pattern": "("}], "metrics[0].pattern", "'('"),
    ("a pattern of no value", [{"name": "a", "pattern": "a=b"}], "metrics[0].pattern", "a=b"),
    ("a bound of no number", [{"name": "a", "at_most": "x"}], "metrics[0].at_most", "x"),
    ("an infinite bound", [{"name": "a", "at_least": 1e101}], "metrics[0].at_least", "1e+101"),
    ("no room", [{"name": "a", "at_most": 1, "at_least": 2}], "metrics[0]", "at_least 2"),
    ("no direction", [{"name": "a", "direction": "up"}], "metrics[0].direction", "up"),
    ("too many", [{"name": f"m{n}"} for n in range(51)], "metrics", "a list of 51"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("metrics", "where", "found"), [case[1:] for case in BAD], ids=[case[0] for case in BAD]
)
def test_what_is_wrong_is_refused_at_its_place(metrics: list[Any], where: str, found: str) -> None:
    problem = problems(*metrics)[where]
    assert found in problem.found
    assert problem.allowed
    assert problem.fix


def test_the_fix_of_a_pattern_shows_one_that_is_allowed() -> None:
    found = problems({"name": "a", "pattern": "a=b"})["metrics[0].pattern"]
    assert found.allowed == "a regular expression with the group value"
    assert "(?P<value>" in found.fix


BOUNDS = ({"name": "a"}, {"name": "b", "at_most": 20}, {"name": "c", "at_least": 0.5})


@pytest.mark.parametrize(
    ("values", "last", "reached"),
    [
        ([0.4, 0.1, 0.05], {"b": 20.0, "c": 0.5}, 0.1),
        ([0.4, 0.1, 0.9], {"b": 20.0, "c": 0.5}, 0.1),
        ([math.nan, math.inf, 0.1], {"b": 1.0, "c": 1.0, "a": 9.0}, 0.1),
        ([-math.inf, 0.2], {"b": 1.0, "c": 1.0}, None),
        ([0.4, 0.11], {"b": 1.0, "c": 1.0}, None),
        ([0.1], {"b": 20.1, "c": 0.5}, None),
        ([0.1], {"b": 20.0, "c": 0.4}, None),
        ([0.1], {"b": 20.0}, None),
        ([0.1], {"b": math.nan, "c": 0.5}, None),
        ([], {"b": 1.0, "c": 1.0}, None),
    ],
)
def test_the_target_is_reached_by_a_trial_that_keeps_every_bound(
    values: list[float], last: dict[str, float], reached: float | None
) -> None:
    assert parse(data(*BOUNDS, target=0.1), "test", None).reached(values, last) == reached


def test_the_target_of_a_maximised_objective_is_reached_from_below() -> None:
    config = parse(data(direction="maximize", target=0.9), "test", None)
    assert config.reached([0.8, 0.95, 0.91], {}) == 0.95
    assert config.reached([0.89], {}) is None


def test_bounds_are_watched_for_a_sweeps_end_only_beside_a_target() -> None:
    assert parse(data(*BOUNDS, target=0.1), "test", None).ending_bounds == ("b", "c")
    without = parse(data(*BOUNDS), "test", None)
    assert without.ending_bounds == ()
    assert without.reached([-1e9], {"b": 1.0, "c": 1.0}) is None


def test_the_trial_is_told_the_names_and_their_patterns() -> None:
    pattern = r"took (?P<value>\S+)"
    config = parse(data({"name": "a"}, {"name": "b", "pattern": pattern}), "test", None)
    told = render_environment(config, {})["HERMES_OTHER_METRICS"]
    assert json.loads(told) == {"a": None, "b": pattern}
    assert "HERMES_OTHER_METRICS" not in render_environment(parse(data(), "test", None), {})


def test_the_example_is_valid_and_bounded() -> None:
    config = load_file(ROOT / "examples/sgd/bounded.yaml")
    assert [m.bound for m in config.secondary] == ["at most 450", "at least 0.85"]
