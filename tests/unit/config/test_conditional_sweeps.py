"""Sweep files with parameters under choices and with constraints."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from hermes_ops.config import (
    SweepConfig,
    check_preview,
    load_file,
    parse,
    render_command,
    render_environment,
)
from hermes_ops.errors import ConfigError, Problem
from hermes_ops.search.space import Config

SWEEP: dict[str, Any] = {
    "name": "conditional",
    "objective": {"metric": "loss"},
    "search": {
        "algorithm": "random",
        "max_trials": 20,
        "space": {
            "units": {"type": "integer", "low": 1, "high": 4},
            "optimizer": {
                "type": "choice",
                "values": [
                    "adam",
                    {
                        "value": "sgd",
                        "space": {
                            "momentum": {"type": "uniform", "low": 0, "high": 0.9},
                            "style": {
                                "type": "choice",
                                "values": [
                                    {
                                        "value": True,
                                        "space": {"tau": {"type": "integer", "low": 1, "high": 3}},
                                    },
                                    False,
                                ],
                            },
                        },
                    },
                ],
            },
        },
    },
    "trial": {"command": ["python", "train.py", "--units={units}"]},
    "budget": {"max_epochs": 5},
}
SGD = "search.space.optimizer.values[1]"
ADAM: Config = {"units": 1, "optimizer": "adam"}
PLAIN: Config = {"units": 1, "optimizer": "sgd", "momentum": 0.5, "style": False}
FULL: Config = {"units": 1, "optimizer": "sgd", "momentum": 0.5, "style": True, "tau": 2}


def sweep(**search: Any) -> dict[str, Any]:
    data = copy.deepcopy(SWEEP)
    data["search"] |= search
    return data


def sgd(data: dict[str, Any]) -> Any:
    """The option with parameters of its own."""
    return data["search"]["space"]["optimizer"]["values"][1]


def with_command(*command: str) -> dict[str, Any]:
    return {**copy.deepcopy(SWEEP), "trial": {"command": list(command)}}


def problems(data: object) -> dict[str, Problem]:
    with pytest.raises(ConfigError) as caught:
        parse(data, "the form", None)
    found = {problem.where: problem for problem in caught.value.problems}
    assert all(p.found and p.allowed and p.fix for p in found.values())
    return found


def test_a_conditional_sweep_reads_back_to_an_equal_one(tmp_path: Path) -> None:
    config = parse(sweep(constraints=["momentum * units < 2"]), "test", tmp_path)
    path = tmp_path / "resolved.yaml"
    path.write_text(config.to_yaml())
    assert load_file(path) == config
    assert parse(json.loads(config.to_json()), "test", None) == config


def test_a_value_written_as_a_mapping_without_a_space_is_that_value() -> None:
    data = sweep()
    data["search"]["space"]["optimizer"]["values"] = [{"value": "adam"}, {"value": None}]
    flat = sweep()
    flat["search"]["space"]["optimizer"]["values"] = ["adam", None]
    spaces = [parse(d, "test", None).search.to_space() for d in (data, flat)]
    assert spaces[0] == spaces[1]


def test_the_preview_shows_what_each_trial_has() -> None:
    preview = check_preview(parse(sweep(), "test", None), 20)
    assert {tuple(trial) for trial in preview.trials} == {tuple(c) for c in (ADAM, PLAIN, FULL)}
    lines = [line for line in preview.render().splitlines() if "optimizer=adam" in line]
    assert lines
    assert not any("momentum" in line or "tau" in line for line in lines)


INTEGER = {"type": "integer", "low": 1, "high": 2}
MISTAKES: list[tuple[tuple[Any, ...], Any, str, str]] = [
    (("space", "momentum", "low"), 2, ".space.momentum", "swap"),
    (("space", "momentum", "lwo"), 1, ".space.momentum.lwo", "did you mean low?"),
    (("spcae",), {}, ".spcae", "did you mean space?"),
    (("space", "momentum", "type"), "unifrom", ".space.momentum.type", "did you mean uniform?"),
    (("value",), [1], ".value", "write"),
    (("value",), {"value": 1}, ".value", "write"),
    (("space",), 3, ".space", "momentum"),
    (("space", "1a"), INTEGER, ".space.1a", "write"),
    (("space", "style", "values", 0), {"space": {}}, ".space.style.values[0].value", "value: sgd"),
    (
        ("space", "style", "values", 0, "space", "tau", "high"),
        "x",
        ".space.style.values[0].space.tau.high",
        "high: 32",
    ),
    (("space", "style", "values", 1), "true", ".space.style", "remove"),
    (("space", "units"), INTEGER, ".space.units", "rename"),
    (("space", "UNITS"), INTEGER, ".space.UNITS", "rename"),
]


@pytest.mark.parametrize(("path", "value", "where", "fix"), MISTAKES)
def test_a_mistake_under_a_choice_is_told_at_its_place(
    path: tuple[Any, ...], value: Any, where: str, fix: str
) -> None:
    data = sweep()
    holder = sgd(data)
    for part in path[:-1]:
        holder = holder[part]
    holder[path[-1]] = value
    found = problems(data)
    assert set(found) == {SGD + where}
    assert fix in found[SGD + where].fix


def nested(levels: int) -> dict[str, Any]:
    space: dict[str, Any] = {"last": {"type": "integer", "low": 1, "high": 2}}
    for level in range(levels):
        space = {f"c{level}": {"type": "choice", "values": [{"value": 1, "space": space}]}}
    return space


def test_five_choices_inside_one_another_are_enough() -> None:
    data = {**with_command("x"), "search": {**sweep()["search"], "space": nested(5)}}
    assert "last" in check_preview(parse(data, "test", None)).trials[0]


@pytest.mark.parametrize("levels", [6, 300])
def test_more_choices_inside_one_another_are_one_problem(levels: int) -> None:
    data = {**with_command("x"), "search": {**sweep()["search"], "space": nested(levels)}}
    found = problems(data)
    assert set(found) == {"search.space"}
    assert "at most 5 choices" in found["search.space"].allowed
    assert len(str(found["search.space"])) < 300


def test_the_whole_tree_has_at_most_a_thousand_parameters() -> None:
    many = {f"p{i}": {"type": "integer", "low": 1, "high": 2} for i in range(1000)}
    data = sweep()
    sgd(data)["space"] = many
    assert "at most 1000" in problems(data)["search.space"].allowed


def test_a_problem_under_a_choice_names_its_line(tmp_path: Path) -> None:
    path = tmp_path / "sweep.yaml"
    text = (
        "search:\n  space:\n    opt:\n      type: choice\n      values:\n        - adam\n"
        "        - value: sgd\n          space:\n"
        "            momentum: {type: uniform, low: 2, high: 1}\n"
    )
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_file(path)
    wheres = [problem.where for problem in caught.value.problems]
    assert "sweep.yaml:9 search.space.opt.values[1].space.momentum" in wheres


@pytest.mark.parametrize("point", [ADAM, PLAIN, FULL])
def test_a_point_names_the_parameters_that_it_has(point: Config) -> None:
    config = parse(sweep(points_to_evaluate=[point]), "test", None)
    assert check_preview(config).trials[0] == point


@pytest.mark.parametrize(
    ("point", "key", "found"),
    [
        ({**ADAM, "momentum": 0.5}, "momentum", "does not have"),
        ({**PLAIN, "tau": 1}, "tau", "does not have"),
        ({k: v for k, v in FULL.items() if k != "tau"}, "tau", "nothing"),
        ({k: v for k, v in FULL.items() if k != "momentum"}, "momentum", "nothing"),
        ({**FULL, "tau": 9}, "tau", "9, outside the range"),
        ({**FULL, "optimizer": "sdg"}, "optimizer", "not one of the values"),
        ({**ADAM, "momentun": 0.5}, "momentun", "not in the space"),
    ],
)
def test_a_point_with_other_parameters_is_refused(
    point: dict[str, Any], key: str, found: str
) -> None:
    told = problems(sweep(points_to_evaluate=[FULL, point]))
    where = f"search.points_to_evaluate[1].{key}"
    assert set(told) == {where}
    assert found in told[where].found


def test_a_point_that_the_constraints_exclude_is_refused() -> None:
    told = problems(sweep(points_to_evaluate=[ADAM, FULL], constraints=["momentum < 0.4"]))
    assert set(told) == {"search.points_to_evaluate[1]"}
    assert told["search.points_to_evaluate[1]"].allowed == "momentum < 0.4"


@pytest.mark.parametrize(
    ("constraint", "found", "fix"),
    [
        ("momentun < 0.5", "'momentun' at character 1", "did you mean momentum?"),
        ("os.system('x') == 1", "'os.system(' at character 1", "braces"),
        ("units <", "no expression", "correct it"),
        ("units + optimizer < 2", "a text at character 9", "correct"),
        ("optimizer == 'sdg'", "'sdg' at character 14", "write one of them"),
        ("units > 4", "no configuration", "widen the space"),
        ("1 / 0 < units", "no configuration", "widen the space"),
        (3, "3", 'put it in quotes: `"3"`'),
        ("units < 3 and " * 100 + "units < 3", "1409 characters", "several"),
    ],
)
def test_a_constraint_of_no_sense_is_refused_at_its_place(
    constraint: object, found: str, fix: str
) -> None:
    told = problems(sweep(constraints=["units > 0", constraint]))
    assert set(told) == {"search.constraints[1]"}
    assert found in told["search.constraints[1]"].found
    assert fix in told["search.constraints[1]"].fix


def test_constraints_that_exclude_each_other_are_one_problem() -> None:
    told = problems(sweep(constraints=["units < 2", "units > 2"]))
    assert set(told) == {"search.constraints"}


def test_mistakes_of_constraints_and_of_the_space_are_told_together() -> None:
    data = sweep(constraints=["units > 0", "units <"], seed=-1)
    sgd(data)["space"]["momentum"]["low"] = 2
    assert set(problems(data)) == {
        "search.seed",
        f"{SGD}.space.momentum",
        "search.constraints[1]",
    }


def test_a_constraint_is_checked_beside_other_conditions_between_keys() -> None:
    data = sweep(constraints=["unit < 3", "units > 0"], startup_trials=99)
    sgd(data)["space"]["units"] = INTEGER
    assert set(problems(data)) == {
        "search.startup_trials",
        f"{SGD}.space.units",
        "search.constraints[0]",
    }


def grid(**search: Any) -> dict[str, Any]:
    data = sweep(algorithm="grid", **search)
    sgd(data)["space"]["momentum"] = {"type": "quantised", "low": 0, "high": 0.9, "step": 0.3}
    return data


def test_a_grid_counts_each_value_with_what_it_brings_alone() -> None:
    assert parse(grid(max_trials=1000), "test", None).trial_count == 4 * (1 + 4 * (3 + 1))
    assert "max_trials: 68" in problems(grid(max_trials=67))["search.max_trials"].fix


def test_a_grid_counts_what_its_constraints_leave() -> None:
    limits = ["units < 3", "momentum < 0.5"]
    config = parse(grid(max_trials=30, constraints=limits), "test", None)
    assert config.trial_count == 2 * (1 + 2 * (3 + 1)) == 18
    assert len(check_preview(config, 100).trials) == 18
    assert (
        "max_trials: 18"
        in problems(grid(max_trials=17, constraints=limits))["search.max_trials"].fix
    )


def test_a_continuous_range_under_a_choice_is_refused_in_a_grid() -> None:
    assert set(problems(sweep(algorithm="grid"))) == {f"{SGD}.space.momentum"}


def test_a_grid_too_large_for_its_constraints_is_refused() -> None:
    data = grid(constraints=["units > 0"], max_trials=100_000)
    data["search"]["space"]["units"]["high"] = 10_000
    assert "at most 100,000" in problems(data)["search.space"].allowed


COMMAND = ("python", "x.py", "--momentum", "{momentum}", "--tau={tau}", "style={style}", "-u")


def rendered(command: tuple[str, ...], params: Config) -> list[str]:
    config: SweepConfig = parse(with_command(*command), "test", None)
    return render_command(config, params)[1:]


@pytest.mark.parametrize(
    ("params", "arguments"),
    [
        (ADAM, ["x.py", "-u"]),
        (PLAIN, ["x.py", "--momentum", "0.5", "style=false", "-u"]),
        (FULL, ["x.py", "--momentum", "0.5", "--tau=2", "style=true", "-u"]),
    ],
)
def test_arguments_of_what_a_configuration_lacks_are_left_out(
    params: Config, arguments: list[str]
) -> None:
    assert rendered(COMMAND, params) == arguments


def test_an_argument_goes_when_one_of_several_parameters_is_lacking() -> None:
    command = ("x", "--both={momentum},{tau}", "--units={units}")
    assert rendered(command, PLAIN) == ["--units=1"]
    assert rendered(command, FULL) == ["--both=0.5,2", "--units=1"]


def test_the_environment_has_what_the_configuration_has() -> None:
    config = parse(sweep(), "test", None)
    assert set(render_environment(config, ADAM)) == {"HERMES_PARAM_UNITS", "HERMES_PARAM_OPTIMIZER"}
    assert render_environment(config, FULL)["HERMES_PARAM_TAU"] == "2"


@pytest.mark.parametrize(
    "command",
    [
        ("{momentum}",),
        ("x={momentum}",),
        ("python", "{momentum}"),
        ("python", "x.py", "{momentum}"),
        ("python", "x.py", "--", "{momentum}"),
        ("python", "-c", "print({momentum})"),
        ("python", "-c", "x={momentum}"),
        ("python", "x.py", "--a=b", "{momentum}"),
        ("python", "x.py", "--rate", "{momentum}e-3"),
        ("python", "x.py", '{{"m": {momentum}}}'),
        ("python", "x.py", "{units}={momentum}"),
        ("python", "x.py", "--{momentum}=1"),
        ("--momentum", "{momentum}"),
    ],
)
def test_an_argument_that_cannot_be_left_out_is_refused(command: tuple[str, ...]) -> None:
    ((where, problem),) = problems(with_command(*command)).items()
    assert where == f"trial.command[{len(command) - 1}]"
    assert "HERMES_PARAM_MOMENTUM" in problem.fix


def test_parameters_that_every_configuration_has_may_stand_anywhere() -> None:
    assert rendered(("x", "{units}", "-c", "f({optimizer})"), ADAM) == ["1", "-c", "f(adam)"]
