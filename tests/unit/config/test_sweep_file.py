"""Reading sweep files: what is accepted, and that everything else is refused with its place."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hermes_ops.config import (
    EarlyStopRule,
    SweepConfig,
    load_file,
    parse,
    refuse_passed_deadline,
    render_command,
    render_environment,
)
from hermes_ops.errors import ConfigError, Problem
from hermes_ops.search.space import Config

SPACE: dict[str, Any] = {
    "rate": {"type": "loguniform", "low": 0.0001, "high": 0.1},
    "units": {"type": "log_integer", "low": 16, "high": 256},
    "batch": {"type": "quantised", "low": 16, "high": 64, "step": 16},
    "optimizer": {"type": "choice", "values": ["adam", "sgd"]},
}
POINT = {"rate": 0.01, "units": 32, "batch": 32, "optimizer": "sgd"}
GRID = {"batch": SPACE["batch"], "optimizer": SPACE["optimizer"]}


def sweep(**changes: Any) -> dict[str, Any]:
    """A valid sweep; `search__seed=1` changes a key of a section."""
    data: dict[str, Any] = {
        "name": "digits",
        "objective": {"metric": "val_loss", "direction": "minimize"},
        "search": {"algorithm": "tpe", "max_trials": 16, "seed": 7, "space": dict(SPACE)},
        "trial": {"command": ["python", "train.py", "--rate", "{rate}"]},
        "budget": {"max_epochs": 20},
    }
    for path, value in changes.items():
        *sections, key = path.split("__")
        target = data
        for section in sections:
            target = target[section]
        target[key] = value
    return data


def problems(data: object) -> dict[str, Problem]:
    with pytest.raises(ConfigError) as caught:
        parse(data, "the form", None)
    found = {problem.where: problem for problem in caught.value.problems}
    assert all(p.found and p.allowed and p.fix for p in found.values())
    return found


def refused_file(tmp_path: Path, text: str | bytes, name: str = "sweep.yaml") -> ConfigError:
    path = tmp_path / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(ConfigError) as caught:
        load_file(path)
    return caught.value


def test_defaults_are_filled_in() -> None:
    config = parse(sweep(), "test", None)
    assert config.search.startup_trials == 5
    assert config.trial.max_failures == 2
    assert config.early_stop is EarlyStopRule.NONE
    assert config.pool == "gpus"
    assert (config.objective.sign, config.trial_count) == (1.0, 16)


def test_a_maximised_objective_has_the_opposite_sign() -> None:
    assert parse(sweep(objective__direction="maximize"), "test", None).objective.sign == -1.0


def test_start_up_trials_default_to_no_more_than_there_are_trials() -> None:
    assert parse(sweep(search__max_trials=3), "test", None).search.startup_trials == 3


def test_a_grid_counts_its_own_combinations() -> None:
    config = parse(
        sweep(search__algorithm="grid", search__space=GRID, trial__command=["x"]), "", None
    )
    assert config.trial_count == 8


def test_the_folder_of_a_user_who_is_not_there_is_a_folder_that_is_not_there(
    tmp_path: Path,
) -> None:
    file = tmp_path / "sweep.yaml"
    given = {"command": ["python", "train.py"], "directory": "~no-such-user/experiment"}
    file.write_text(json.dumps(sweep(trial=given)))
    assert load_file(file).trial.directory == str(tmp_path / "~no-such-user/experiment")


def test_a_grid_tries_every_combination_though_a_point_is_written_in_two_ways() -> None:
    """2 and 2.0 are one value of the parameter."""
    space = {"batch": {"type": "quantised", "low": 1, "high": 4, "step": 1}}
    grid = {"search__algorithm": "grid", "search__space": space, "trial__command": ["x"]}
    told = problems(sweep(**grid, search__points_to_evaluate=[{"batch": 2}, {"batch": 2.0}]))
    assert told["search.points_to_evaluate[1]"].found == "point 0 again"
    config = parse(sweep(**grid, search__points_to_evaluate=[{"batch": 2.0}]), "test", None)
    sampler = config.search.to_sampler()
    tried = [sampler.ask(number, ())["batch"] for number in range(config.trial_count)]
    assert tried == [2, 1, 3, 4]


def test_a_resolved_config_reads_back_to_an_equal_one(tmp_path: Path) -> None:
    config = parse(sweep(search__points_to_evaluate=[POINT], schedule="0 2 * * *"), "test", None)
    path = tmp_path / "resolved.yaml"
    path.write_text(config.to_yaml())
    assert parse(json.loads(config.to_json()), "test", None) == config
    assert parse(json.loads(load_file(path).to_json()), "test", tmp_path) == load_file(path)


@pytest.mark.parametrize("text", ["1e-4", "on", "null", "1", "0x1f", "~", "2024-01-01", "a: b"])
def test_a_text_that_looks_like_something_else_stays_text_in_yaml(
    tmp_path: Path, text: str
) -> None:
    path = tmp_path / "resolved.yaml"
    config = parse(sweep(trial__environment={"X": text}), "test", tmp_path)
    path.write_text(config.to_yaml())
    assert load_file(path) == config


def test_yaml_is_read_by_the_rules_of_version_1_2(tmp_path: Path) -> None:
    path = tmp_path / "sweep.yaml"
    data = sweep(
        search__space={"rate": 0, "flag": 1}, trial__command=["python", "{rate}"], weight=2
    )
    text = json.dumps(data).replace('"rate": 0', '"rate": {type: uniform, low: 1e-4, high: 010}')
    path.write_text(text.replace('"flag": 1', '"flag": {type: choice, values: [on, no, ~, 1e2]}'))
    space = dict(load_file(path).search.to_space())
    assert space["rate"].describe() == "a number from 0.0001 to 10.0"
    assert space["flag"].describe() == "one of 'on', 'no', None, 100.0"


def test_json_files_are_read_too(tmp_path: Path) -> None:
    path = tmp_path / "sweep.json"
    path.write_text(json.dumps(sweep(), indent="\t"))
    assert load_file(path).name == "digits"


def test_paths_are_taken_from_the_folder_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "sweep.json"
    path.write_text(json.dumps(sweep(trial__directory="../code", trial__python="venv/bin/python")))
    trial = load_file(path).trial
    assert trial.directory == str(tmp_path.parent / "code")
    assert trial.python == str(tmp_path / "venv/bin/python")


def test_without_a_folder_paths_stay_as_they_are() -> None:
    assert parse(sweep(), "form", None).trial.directory == "."


def test_a_directory_of_each_trials_own_is_a_copy_of_the_files_folder(tmp_path: Path) -> None:
    for given, directory, workspace in [
        ({"trial__directory": "copy"}, tmp_path, "copy"),
        ({"trial__directory": "./copy"}, tmp_path / "copy", "shared"),
        ({"trial__directory": "code", "trial__workspace": "copy"}, tmp_path / "code", "copy"),
        ({}, tmp_path, "shared"),
    ]:
        trial = parse(sweep(**given), "test", tmp_path).trial
        assert (trial.directory, trial.workspace.value) == (str(directory), workspace)
    again = parse(json.loads(parse(sweep(trial__directory="copy"), "t", None).to_json()), "t", None)
    assert (again.trial.directory, again.trial.workspace.value) == (".", "copy")


BAD: list[tuple[str, dict[str, Any], str, str]] = [
    ("an unknown key", {"nmae": 1}, "nmae", "did you mean name?"),
    ("an unknown key of a section", {"search__sede": 1}, "search.sede", "did you mean seed?"),
    ("a name that is a number", {"name": 12}, "name", 'put it in quotes: `name: "12"`'),
    ("a name with a slash", {"name": "a/b"}, "name", "name: a-b"),
    ("a boolean for a number", {"search__seed": True}, "search.seed", "seed: 7"),
    ("a text for a number", {"search__seed": "7"}, "search.seed", "seed: 7"),
    ("a number for a boolean", {"trial__preemptible": 1}, "trial.preemptible", "write"),
    (
        "a float for a whole number",
        {"budget__max_epochs": 2.0},
        "budget.max_epochs",
        "max_epochs: 2`",
    ),
    ("a text for a list", {"trial__command": "python x"}, "trial.command", '["python", "x"]'),
    ("an empty command", {"trial__command": []}, "trial.command", "train.py"),
    ("NaN", {"weight": math.nan}, "weight", "1.0"),
    ("infinity", {"budget__gpu_seconds": math.inf}, "budget.gpu_seconds", "14400"),
    ("no weight", {"weight": 0}, "weight", "1.0"),
    ("no GPU", {"trial__gpus": 0}, "trial.gpus", "gpus: 1"),
    ("a turned range", {"trial__gpus": {"min": 4, "max": 1}}, "trial.gpus", "exchange"),
    ("half a range", {"trial__gpus": {"min": 1}}, "trial.gpus.max", "max: 4"),
    ("an unknown size", {"trial__gpus": {"max": 4, "sizes": "odd"}}, "trial.gpus.sizes", "write"),
    ("no size", {"trial__gpus": {"max": 4, "sizes": []}}, "trial.gpus", "correct sizes"),
    ("a size outside", {"trial__gpus": {"max": 4, "sizes": [8]}}, "trial.gpus", "correct sizes"),
    (
        "no power of two",
        {"trial__gpus": {"min": 5, "max": 7, "sizes": "powers_of_two"}},
        "trial.gpus",
        "sizes: any",
    ),
    ("a word for a size", {"trial__gpus": {"max": 4, "sizes": ["a"]}}, "trial.gpus.sizes[0]", ""),
    ("a budget of nothing", {"budget__wall_clock_seconds": 0}, "budget.wall_clock_seconds", "7200"),
    ("a negative budget", {"budget__failed_trials": -1}, "budget.failed_trials", "write"),
    ("an unknown algorithm", {"search__algorithm": "bayes"}, "search.algorithm", "tpe"),
    ("an unknown early stop", {"early_stop": "hyperband"}, "early_stop", "write"),
    ("an empty space", {"search__space": {}}, "search.space", "loguniform"),
    ("a schedule of no sense", {"schedule": "at night"}, "schedule", "0 2 * * *"),
    ("a schedule that never comes", {"schedule": "0 0 31 2 *"}, "schedule", "0 2 * * *"),
    ("six fields of cron", {"schedule": "0 0 2 * * *"}, "schedule", "0 2 * * *"),
    (
        "more start-up trials than trials",
        {"search__startup_trials": 17},
        "search.startup_trials",
        "16 or less",
    ),
    (
        "a pattern that does not compile",
        {"trial__metric_pattern": "(?P<name>"},
        "trial.metric_pattern",
        "(?P<name>",
    ),
    (
        "a pattern without groups",
        {"trial__metric_pattern": "a=b"},
        "trial.metric_pattern",
        "(?P<value>",
    ),
    (
        "an environment name with a dash",
        {"trial__environment": {"A-B": "x"}},
        "trial.environment.A-B",
        "rename",
    ),
    (
        "an environment name of ours",
        {"trial__environment": {"HERMES_TRIAL": "x"}},
        "trial.environment.HERMES_TRIAL",
        "rename",
    ),
    (
        "the GPUs of a lease",
        {"trial__environment": {"CUDA_VISIBLE_DEVICES": "7"}},
        "trial.environment.CUDA_VISIBLE_DEVICES",
        "trial.gpus says how many",
    ),
    (
        "the run of a trial",
        {"trial__environment": {"MLFLOW_RUN_ID": "1"}},
        "trial.environment.MLFLOW_RUN_ID",
        "the trial's own run",
    ),
    (
        "the server of a sweep",
        {"trial__environment": {"MLFLOW_TRACKING_URI": "http://m"}},
        "trial.environment.MLFLOW_TRACKING_URI",
        "trial.pod.environment",
    ),
    (
        "the GPUs of a pod's lease",
        {"trial__run_in": "pod", "trial__pod": {"environment": {"NVIDIA_VISIBLE_DEVICES": "all"}}},
        "trial.pod.environment.NVIDIA_VISIBLE_DEVICES",
        "trial.gpus says how many",
    ),
    (
        "an unknown placeholder",
        {"trial__command": ["python", "{ratte}"]},
        "trial.command[1]",
        "did you mean {rate}?",
    ),
    ("a single brace", {"trial__command": ["python", "}"]}, "trial.command[1]", "double it"),
    ("a NUL character", {"trial__command": ["a\0b"]}, "trial.command[0]", "remove"),
    ("a lone surrogate", {"trial__command": ["a\ud800b"]}, "trial.command[0]", ""),
    (
        "a point without a parameter",
        {"search__points_to_evaluate": [{k: v for k, v in POINT.items() if k != "units"}]},
        "search.points_to_evaluate[0].units",
        "add units",
    ),
    (
        "a point with an unknown parameter",
        {"search__points_to_evaluate": [{**POINT, "unit": 1}]},
        "search.points_to_evaluate[0].unit",
        "did you mean units?",
    ),
    (
        "a point outside its range",
        {"search__points_to_evaluate": [POINT, {**POINT, "rate": 1.0}]},
        "search.points_to_evaluate[1].rate",
        "widen",
    ),
    (
        "a point between two steps",
        {"search__points_to_evaluate": [{**POINT, "batch": 33}]},
        "search.points_to_evaluate[0].batch",
        "widen",
    ),
    (
        "a point twice",
        {"search__points_to_evaluate": [POINT, dict(POINT)]},
        "search.points_to_evaluate[1]",
        "remove one",
    ),
    (
        "a grid over a continuous range",
        {"search__algorithm": "grid"},
        "search.space.rate",
        "quantised",
    ),
    (
        "a grid larger than max_trials",
        {"search__algorithm": "grid", "search__space": GRID, "search__max_trials": 7},
        "search.max_trials",
        "max_trials: 8",
    ),
]


@pytest.mark.parametrize(
    ("changes", "where", "fix"), [row[1:] for row in BAD], ids=[row[0] for row in BAD]
)
def test_it_is_refused_with_its_path_and_the_fix(
    changes: dict[str, Any], where: str, fix: str
) -> None:
    found = problems(sweep(**changes))
    assert where in found
    assert fix in found[where].fix


BAD_PARAMETERS: list[tuple[dict[str, Any], str]] = [
    ({"type": "unifrom", "low": 0, "high": 1}, ".type"),
    ({"low": 0, "high": 1}, ".type"),
    ({"type": "uniform", "low": 1, "high": 1}, ""),
    ({"type": "uniform", "low": 2, "high": 1}, ""),
    ({"type": "uniform", "low": 0}, ".high"),
    ({"type": "uniform", "low": 0, "high": 1, "step": 1}, ".step"),
    ({"type": "uniform", "low": 0, "high": math.nan}, ".high"),
    ({"type": "uniform", "low": -1e300, "high": 1}, ".low"),
    ({"type": "uniform", "low": False, "high": 1}, ".low"),
    ({"type": "loguniform", "low": 0, "high": 1}, ".low"),
    ({"type": "loguniform", "low": -1.0, "high": 1}, ".low"),
    ({"type": "integer", "low": 0.5, "high": 3}, ".low"),
    ({"type": "integer", "low": 0, "high": 2**60}, ".high"),
    ({"type": "log_integer", "low": 0, "high": 3}, ".low"),
    ({"type": "quantised", "low": 0, "high": 3, "step": 0}, ""),
    ({"type": "quantised", "low": 0, "high": 3, "step": -1}, ""),
    ({"type": "quantised", "low": 0, "high": 3, "step": 4}, ""),
    ({"type": "quantised", "low": 0, "high": 3, "step": 1e-30}, ""),
    ({"type": "quantised", "low": 0, "high": 3, "step": "1"}, ".step"),
    ({"type": "choice", "values": []}, ".values"),
    ({"type": "choice", "values": "ab"}, ".values"),
    ({"type": "choice", "values": [1, 2, 1]}, ""),
    ({"type": "choice", "values": [1, "1"]}, ""),
    ({"type": "choice", "values": [None, ""]}, ""),
    ({"type": "choice", "values": [[1]]}, ".values[0]"),
    ({"type": "choice", "values": [math.inf]}, ".values[0]"),
    ({"type": "choice", "values": [2**80]}, ".values[0]"),
]


@pytest.mark.parametrize(("spec", "where"), BAD_PARAMETERS, ids=str)
def test_a_bad_parameter_is_refused_at_its_key(spec: dict[str, Any], where: str) -> None:
    space = {**SPACE, "bad": spec}
    assert set(problems(sweep(search__space=space))) == {f"search.space.bad{where}"}


@pytest.mark.parametrize("name", ["", "1a", "a b", "a{b}", "ä", "a" * 65])
def test_a_parameter_name_that_is_no_name_is_refused(name: str) -> None:
    found = problems(sweep(search__space={**SPACE, name: SPACE["rate"]}))
    assert set(found) == {f"search.space.{name}"}


def test_names_that_share_an_environment_variable_are_refused() -> None:
    space = {**SPACE, "l2.rate": SPACE["rate"], "L2-rate": SPACE["rate"]}
    found = problems(sweep(search__space=space))["search.space.L2-rate"]
    assert "HERMES_PARAM_L2_RATE" in found.found


def test_all_wrong_keys_are_told_at_once() -> None:
    data = sweep(
        name="",
        search__space={**SPACE, "bad": {"type": "uniform", "low": 2, "high": 1}},
        trial__gpus=0,
        budget__max_epochs=0,
    )
    assert set(problems(data)) == {"name", "search.space.bad", "trial.gpus", "budget.max_epochs"}


def test_all_conditions_between_keys_are_told_at_once() -> None:
    data = sweep(
        search__algorithm="grid",
        search__startup_trials=99,
        trial__command=["{lr}"],
        trial__run_in="process",
        trial__pod={},
    )
    assert set(problems(data)) == {
        "search.startup_trials",
        "search.space.rate",
        "trial.command[0]",
        "trial.pod",
    }


def test_conditions_between_keys_are_told_once_every_key_is_right() -> None:
    both = {"search__startup_trials": 99, "trial__command": ["{lr}"]}
    assert set(problems(sweep(budget__max_epochs=0, **both))) == {"budget.max_epochs"}
    assert set(problems(sweep(**both))) == {"search.startup_trials", "trial.command[0]"}


def test_a_value_of_the_environment_is_not_shown() -> None:
    found = problems(sweep(trial__environment={"PASSWORD": 90210}))
    assert "90210" not in str(found["trial.environment.PASSWORD"])


@pytest.mark.parametrize("data", [None, [], "name: x", 3, {1: 2}, {"search": {1: 2}}])
def test_data_that_is_no_sweep_at_all_is_refused(data: object) -> None:
    assert problems(data)


def test_a_problem_names_the_line_of_a_yaml_file(tmp_path: Path) -> None:
    parameter = "    lr:\n      type: uniform\n      low: 3\n      high: 1e1000\n"
    text = f"name: digits\nsearch:\n  space:\n{parameter}"
    wheres = [problem.where for problem in refused_file(tmp_path, text).problems]
    assert "sweep.yaml:7 search.space.lr.high" in wheres


@pytest.mark.parametrize(
    ("text", "name"),
    [("name: a\nname: b\n", "sweep.yaml"), ('{"name": "a", "name": "b"}', "sweep.json")],
)
def test_a_repeated_key_is_refused(tmp_path: Path, text: str, name: str) -> None:
    assert "'name'" in str(refused_file(tmp_path, text, name))
    assert any("each key once" in p.allowed for p in refused_file(tmp_path, text, name).problems)


def test_a_repeated_key_alone_is_enough_to_refuse_a_file(tmp_path: Path) -> None:
    text = json.dumps(sweep()).replace('"name"', '"pool": "a", "pool": "b", "name"')
    for name in ("sweep.yaml", "sweep.json"):
        assert len(refused_file(tmp_path, text, name).problems) == 1


BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{b}: &{b} [{', '.join(['*' + a] * 9)}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)
)
UNREADABLE: dict[str, str | bytes] = {
    "a syntax error": "name: [1, 2\nfoo",
    "a tab": "name:\n\t- x",
    "two documents": "a: 1\n---\nb: 2\n",
    "an undefined alias": "name: *x",
    "a list inside itself": "name: &a [*a]",
    "an alias bomb": BOMB,
    "an alias bomb as a key": BOMB + "? *i\n: 1\n",
    "deep nesting": "[" * 5_000,
    "a large file": "#" * (2**20 + 1),
    "bytes that are no text": b"\xff\xfe\xfa",
    "a control character": "name: \x07",
    "an impossible escape": '"\\UFFFFFFFF"',
    "a number of 5,000 digits": "seed: " + "9" * 5_000,
    "nothing": "",
}


@pytest.mark.parametrize("name", ["sweep.yaml", "sweep.json"])
@pytest.mark.parametrize("text", UNREADABLE.values(), ids=UNREADABLE)
def test_a_file_that_cannot_be_read_is_one_clear_error(
    tmp_path: Path, text: str | bytes, name: str
) -> None:
    error = refused_file(tmp_path, text, name)
    assert len(str(error)) < 2_000


@pytest.mark.parametrize("tag", ["!!python/object/apply:os.system [x]", "!x y", "!!binary aGk="])
def test_a_tag_is_refused_and_makes_no_object(tmp_path: Path, tag: str) -> None:
    error = refused_file(tmp_path, f"name: {tag}\n")
    assert any("without tags" in problem.allowed for problem in error.problems)


@pytest.mark.parametrize("tagged", ["!!bool yes", "!!null 3", "!!str 5", "! 5", "!!seq [a]"])
def test_a_tag_that_yaml_itself_has_is_refused_too(tmp_path: Path, tagged: str) -> None:
    """`!!bool yes` would be read as false, and `!!null 3` as nothing."""
    error = refused_file(tmp_path, f"early_stop: {tagged}\n")
    assert any("without tags" in problem.allowed for problem in error.problems)


@pytest.mark.parametrize("key", ["1", "true", "null", "[a, b]", "!!set {a}"])
def test_a_key_that_is_no_text_is_refused(tmp_path: Path, key: str) -> None:
    error = refused_file(tmp_path, f"? {key}\n: 1\n")
    assert any("keys that are text" in problem.allowed for problem in error.problems)


def _missing(path: Path) -> None:
    pass


def _folder(path: Path) -> None:
    path.mkdir()


def _pipe(path: Path) -> None:
    os.mkfifo(path)


@pytest.mark.parametrize("make", [_missing, _folder, _pipe])
def test_something_that_is_no_file_is_one_problem(
    tmp_path: Path, make: Callable[[Path], None]
) -> None:
    make(tmp_path / "sweep.yaml")
    with pytest.raises(ConfigError) as caught:
        load_file(tmp_path / "sweep.yaml")
    assert len(caught.value.problems) == 1


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file")
def test_a_file_without_permission_is_one_problem(tmp_path: Path) -> None:
    (tmp_path / "sweep.yaml").touch(mode=0)
    with pytest.raises(ConfigError, match="Permission denied"):
        load_file(tmp_path / "sweep.yaml")


def _rendering(*command: str) -> SweepConfig:
    return parse(sweep(trial__command=list(command)), "test", None)


def test_a_value_replaces_its_placeholder_and_nothing_else() -> None:
    config = _rendering("x", "--r={rate}", '{{"u": {units}}}', "$(rm) `{optimizer}` %s {{rate}}")
    params: Config = {"rate": 1e-5, "units": 3, "optimizer": "{rate} $HOME; {{"}
    assert render_command(config, params) == [
        "x",
        "--r=1e-05",
        '{"u": 3}',
        "$(rm) `{rate} $HOME; {{` %s {rate}",
    ]


@pytest.mark.parametrize("value", [0.1, 1e-300, 1 / 3, 123456789.123456789])
def test_a_float_reaches_the_command_without_loss(value: float) -> None:
    assert float(render_command(_rendering("x", "{rate}"), {"rate": value})[1]) == value


def test_booleans_are_lower_case_and_null_is_empty() -> None:
    config = _rendering("x", "{rate}", "{units}")
    assert render_command(config, {"rate": True, "units": None}) == ["x", "true", ""]


def test_a_leading_python_is_the_interpreter_of_the_trial() -> None:
    data = sweep(trial__python="/opt/python")
    assert render_command(parse(data, "", None), {"rate": 1})[0] == "/opt/python"
    assert render_command(_rendering("python", "python"), {}) == [sys.executable, "python"]
    assert render_command(_rendering("./python"), {}) == ["./python"]


def test_where_metrics_and_secrets_are_is_told_by_the_environment() -> None:
    config = parse(sweep(trial__tensorboard="runs", trial__secrets=["A", "B"]), "test", None)
    found = render_environment(config, {})
    assert found == {"HERMES_TENSORBOARD_DIR": "runs", "HERMES_SECRETS": "A,B"}
    assert problems(sweep(trial__secrets=["A,B"]))["trial.secrets[0]"]


def test_parameters_are_environment_variables_beside_the_users_own() -> None:
    config = parse(sweep(trial__environment={"DATA": "{rate}"}), "test", None)
    assert render_environment(config, {"rate": 0.5, "l2.weight-decay": None}) == {
        "DATA": "{rate}",
        "HERMES_PARAM_RATE": "0.5",
        "HERMES_PARAM_L2_WEIGHT_DECAY": "",
    }


@pytest.mark.parametrize(
    ("gpus", "numbers", "least", "most"),
    [
        (3, (), 3, 3),
        ({"min": 1, "max": 4}, (), 1, 4),
        ({"max": 9, "sizes": "powers_of_two"}, (1, 2, 4, 8), 1, 8),
        ({"min": 1, "max": 8, "sizes": [4, 2, 2]}, (2, 4), 2, 4),
    ],
)
def test_a_number_or_a_range_of_gpus_reads_back_the_same(
    gpus: object, numbers: tuple[int, ...], least: int, most: int
) -> None:
    config = parse(sweep(trial__gpus=gpus), "test", None)
    found = config.trial.gpu_range
    assert (found.numbers, found.least, found.most) == (numbers, least, most)
    assert parse(json.loads(config.to_json()), "again", None) == config


def test_a_time_that_has_passed_is_refused_when_the_sweep_is_to_begin() -> None:
    config = parse(sweep(deadline="2026-12-01T08:00:00+01:00"), "test", None)
    refuse_passed_deadline(config, 1_796_108_399.0, "test")
    with pytest.raises(ConfigError, match="which has passed"):
        refuse_passed_deadline(config, 1_796_108_400.0, "test")
    refuse_passed_deadline(parse(sweep(deadline="1s"), "test", None), 1e12, "test")


def test_a_sweep_with_a_schedule_has_a_duration_as_its_deadline() -> None:
    parse(sweep(schedule="@daily", deadline="8h"), "test", None)
    with pytest.raises(ConfigError, match="a duration, as a sweep with a schedule"):
        parse(sweep(schedule="@daily", deadline="2026-12-01T08:00:00Z"), "test", None)
