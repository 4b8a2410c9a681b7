from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hermes_ops.config import load_file
from hermes_ops.config.overrides import places, read_with_overrides
from hermes_ops.errors import ConfigError

FILE = """\
name: digits
objective: {metric: loss, direction: minimize}
search:
  algorithm: random
  max_trials: 16
  space:
    lr: {type: loguniform, low: 0.001, high: 1}
    opt.kind: {type: choice, values: [adam, sgd]}
trial:
  command: [python, train.py, "{lr}", "{opt.kind}"]
budget: {max_epochs: 20}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "sweep.yaml"
    path.write_text(FILE)
    return path


def _refused(file: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as refused:
        load_file(file, overrides)
    return str(refused.value)


@pytest.mark.parametrize(("override", "path", "value"), [
    ("search.max_trials=8", ("search", "max_trials"), 8),
    ("search.max_trials = 8", ("search", "max_trials"), 8),
    ("budget.gpu_seconds=1e3", ("budget", "gpu_seconds"), 1000.0),
    ("trial.gpus={min: 1, max: 4}", ("trial", "gpus"), {"min": 1, "max": 4}),
    ("trial.gpus.max=4", ("trial", "gpus", "max"), 4),
    ("trial.pod.image=a:b", ("trial", "pod", "image"), "a:b"),
    ("search.space.lr.high=0.1", ("search", "space", "lr", "high"), 0.1),
    ("search.space.opt.kind.values[1]=lion", ("search", "space", "opt.kind", "values", 1), "lion"),
    ("trial.environment.A=x=y", ("trial", "environment", "A"), "x=y"),
    ("trial.environment={B: on}", ("trial", "environment", "B"), "on"),
    ("name='8'", ("name",), "8"),
    ("trial.preemptible=false", ("trial", "preemptible"), False),
    ("budget.gpu_seconds=", ("budget", "gpu_seconds"), None),
])  # fmt: skip
def test_the_value_is_what_the_file_would_have_there(
    file: Path, override: str, path: tuple[str | int, ...], value: object
) -> None:
    changed: Any = read_with_overrides(file, [override]).data
    for part in path:
        changed = changed[part]
    assert changed == value
    assert type(changed) is type(value)


def test_the_sweep_is_that_of_a_file_with_these_values(file: Path) -> None:
    config = load_file(file, ["search.max_trials=4", "search.space.lr.high=0.1", "weight=2"])
    text = FILE.replace("max_trials: 16", "max_trials: 4").replace("high: 1}", "high: 0.1}")
    file.write_text(text + "weight: 2\n")
    assert config == load_file(file)


def test_of_two_values_of_a_key_the_later_counts(file: Path) -> None:
    config = load_file(file, ["search.max_trials=4", "search.max_trials=5"])
    assert config.search.max_trials == 5
    config = load_file(file, ["budget.gpu_seconds=9", "budget={max_epochs: 3}"])
    assert (config.budget.max_epochs, config.budget.gpu_seconds) == (3, None)


def test_a_json_file_takes_the_same_overrides(tmp_path: Path, file: Path) -> None:
    other = tmp_path / "sweep.json"
    other.write_text(json.dumps(read_with_overrides(file).data))
    assert load_file(other, ["search.max_trials=4"]) == load_file(file, ["search.max_trials=4"])


@pytest.mark.parametrize(("override", "where", "found", "allowed"), [
    ("search.max_trials=many", "search.max_trials", "the text 'many'", "a whole number"),
    ("trial.gpu=2", "trial.gpu", "the unknown key 'gpu'", "gpus"),
    ("space.lr.high=1", "space", "the unknown key 'space'", "search"),
    ("search.space.lr={type: loguniform, low: 0, high: 1}", "search.space.lr.low", "0", "0"),
    ("budget.max_epochs.x=1", "budget.max_epochs", "20", "a mapping"),
    ("search.space.opt.kind.values[2]=a", "search.space.opt.kind.values[2]", "item 2", "0 to 1"),
    ("trial.gpus=[1", "trial.gpus", "expected ',' or ']'", "on one line"),
    ("name=a: b", "name", "mapping values", "on one line"),
    ("name=a\nweight: 2", "name", "several lines", "on one line"),
    ("name=!!str a", "name", "the tag", "plain YAML"),
    ("a..b=1", "a..b", "an empty part", "a dot between them"),
])  # fmt: skip
def test_a_wrong_override_is_refused_with_its_key_and_as_one_of_the_command_line(
    file: Path, override: str, where: str, found: str, allowed: str
) -> None:
    message = _refused(file, override)
    assert f"--set {where}: found {found}" in message
    assert allowed in message.partition("allowed: ")[2]
    assert "sweep.yaml:" not in message


@pytest.mark.parametrize("override", ["search.max_trials", "=8", ""])
def test_what_is_no_key_and_value_is_refused_with_the_form(file: Path, override: str) -> None:
    assert "write --set KEY=VALUE" in _refused(file, override)


def test_a_mistake_of_the_file_keeps_its_line_beside_one_of_the_command_line(file: Path) -> None:
    file.write_text(FILE.replace("max_epochs: 20", "max_epochs: none"))
    message = _refused(file, "weight=none")
    assert f"{file} with --set weight is not valid" in message
    assert "--set weight: found" in message
    assert "sweep.yaml:11 budget.max_epochs: found" in message


def test_a_warning_names_the_command_line_if_its_key_is_set_there(file: Path) -> None:
    paths = [("search", "max_trials"), ("budget", "max_epochs"), ("search", "space", "lr", "low")]
    assert places(file, paths, ["search.max_trials=4", "search.space.lr={}"]) == [
        "--set", "sweep.yaml:11", "--set",
    ]  # fmt: skip
    assert places(file, paths) == ["sweep.yaml:5", "sweep.yaml:11", "sweep.yaml:7"]


def test_a_secret_in_an_override_is_not_shown(file: Path) -> None:
    assert "hunter2" not in _refused(file, "trial.environment.PASSWORD=[hunter2]")
