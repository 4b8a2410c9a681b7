"""What is valid and likely to be a mistake: said for the mistake, never for what is meant."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hermes_ops.config import SweepConfig, load_file, never_fits, parse
from hermes_ops.config.overrides import places
from hermes_ops.config.sweep_warnings import (
    as_tag,
    can_name,
    config_warnings,
    from_tag,
    is_higher_better,
)

FINITE = {"a": {"type": "choice", "values": [1, 2]}, "b": {"type": "integer", "low": 1, "high": 3}}


def sweep(**changes: Any) -> SweepConfig:
    data: dict[str, Any] = {
        "name": "digits",
        "objective": {"metric": "val_loss"},
        "search": {"algorithm": "tpe", "max_trials": 6, "space": FINITE},
        "trial": {"command": ["python", "train.py"]},
        "budget": {"max_epochs": 2},
    }
    for key, value in changes.items():
        section, _, name = key.partition("__")
        data[section] = {**data[section], name: value}
    return parse(data, "test", None)


def said(config: SweepConfig, slots: int | None = None) -> dict[str, str]:
    return {w.document()["where"]: str(w) for w in config_warnings(config, slots)}


def test_a_sound_sweep_has_no_warning() -> None:
    assert said(sweep(), 1) == {}


def test_more_gpus_than_the_pool_has_can_never_run() -> None:
    line = said(sweep(trial__gpus=5), 2)["trial.gpus"]
    assert "5 GPUs a trial, and the pool gpus has 2; no trial can ever start" in line
    assert "write `gpus: 2` or less" in line
    assert said(sweep(trial__gpus=2), 2) == {}
    assert said(sweep(trial__gpus=5), None) == {}


def test_a_pool_without_slots_is_said() -> None:
    assert "0 slots" in said(sweep(), 0)["pool"]
    assert "0 slots" in str(never_fits(1, "gpus", 0))
    assert "no number of slots (-1)" in said(sweep(), -1)["pool"]
    assert "no number of slots (-1)" in str(never_fits(1, "gpus", -1))
    assert "needs 3 GPUs and the pool gpus has 1 slot:" in str(never_fits(3, "gpus", 1))
    assert never_fits(2, "gpus", 2) is None


@pytest.mark.parametrize("algorithm", ["random", "tpe"])
def test_more_trials_than_configurations_are_said(algorithm: str) -> None:
    config = sweep(search__max_trials=7, search__algorithm=algorithm)
    line = said(config)["search.max_trials"]
    assert "7 trials, and the space has 6 configurations" in line
    assert "max_trials: 6" in line


def test_constraints_leave_fewer_configurations() -> None:
    line = said(sweep(search__constraints=["a + b <= 3"]))["search.max_trials"]
    assert "the space has 3 configurations" in line


def test_a_space_without_end_has_configurations_enough() -> None:
    space = {**FINITE, "x": {"type": "uniform", "low": 0, "high": 1}}
    assert said(sweep(search__space=space, search__max_trials=100_000)) == {}


@pytest.mark.parametrize(
    "metric",
    ["val_accuracy", "acc", "val/acc", "AUC", "eval_f1", "mAP", "metrics/mAP50(B)", "R2",
     "r2_score", "bleu", "test/BLEU-4", "episode_reward", "meanReward", "ep_return", "valIoU",
     "dice", "Recall@10", "top1", "validation ROC-AUC", "precision", "f1_score", "val_macroF1"],
)  # fmt: skip
def test_what_is_better_the_higher_it_is_needs_its_direction(metric: str) -> None:
    assert is_higher_better(metric)
    config = sweep(objective__metric=metric)
    assert "`direction: maximize`" in said(config)["objective.direction"]
    for direction in ("maximize", "minimize"):
        given = {"metric": metric, "direction": direction}
        assert said(parse({**json.loads(config.to_json()), "objective": given}, "", None)) == {}


@pytest.mark.parametrize(
    "metric",
    ["val_loss", "loss", "accuracy_loss", "error_rate", "nll", "perplexity", "wer", "mse", "mape",
     "dice_loss", "f1_loss", "neg_mean_squared_error", "recall_time_ms", "accuracy_gap", "value",
     "objective", "map_error", "bracket", "false_accuracy_rate", "fid", "brier_score", "score"],
)  # fmt: skip
def test_other_names_say_nothing_about_their_direction(metric: str) -> None:
    assert said(sweep(objective__metric=metric)) == {}


@pytest.mark.parametrize("metric", [" loss", "loss ", "val\tloss", "val\nloss", "lo\x1bss"])
def test_a_name_that_no_line_can_carry_is_said(metric: str) -> None:
    assert "no line of output can report it" in said(sweep(objective__metric=metric))[
        "objective.metric"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("pattern", "metric", "possible"),
    [
        (r"(?P<name>\w+): (?P<value>\S+)", "val_loss", True),
        (r"(?P<name>\w+): (?P<value>\S+)", "val/loss", False),
        (r"(?P<name>[a-z)\]]+)=(?P<value>.+)", "Loss", False),
        (r"(?P<name>(?:val|test)_(?:loss|acc))=(?P<value>.+)", "val_loss", True),
        (r"(?P<name>(?:val|test)_(?:loss|acc))=(?P<value>.+)", "train_loss", False),
        (r"(?P<name>a\)b)=(?P<value>.+)", "a)b", True),
        (r"(?P<name>acc)?=(?P<value>.+)", "anything", True),
        (r"(?i)(?P<name>acc)=(?P<value>.+)", "ACC", True),
        (r"(?P<name>acc) (?P<value>.+)|(?P<step>\d+)", "anything", True),
        (r"(x)(?P<name>\1y)=(?P<value>.+)", "xy", True),
        (r"(?P<name>(a+)+)=(?P<value>.+)", "a" * 64 + "!", True),  # it never ends: not known
        (r"(?P<name>(a|aa)+)=(?P<value>.+)", "a" * 64 + "!", True),
    ],
)
def test_a_pattern_that_never_gives_the_objectives_name_is_said(
    pattern: str, metric: str, possible: bool
) -> None:
    assert can_name(pattern, metric) is possible
    config = sweep(objective__metric=metric, trial__metric_pattern=pattern)
    assert ("trial.metric_pattern" in said(config)) is not possible


def test_warnings_name_the_line_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "sweep.yaml"
    file.write_text(sweep(search__max_trials=9).to_yaml())
    config = load_file(file)
    (warning,) = config_warnings(config, None)
    (place,) = places(file, [warning.path])
    line = file.read_text().splitlines()[int(place.rpartition(":")[2]) - 1]
    assert line.strip() == "max_trials: 9"
    assert warning.at(place).startswith(f"{place} search.max_trials: 9 trials")


def test_a_tag_holds_as_many_warnings_as_fit() -> None:
    some = tuple(config_warnings(sweep(trial__gpus=5, search__max_trials=9), 2))
    assert from_tag(as_tag(some)["hermes.warnings"]) == [w.document() for w in some]
    many = from_tag(as_tag(some * 100)["hermes.warnings"])
    assert 2 < len(many) < 200
    assert as_tag(()) == {}
    assert from_tag("no json") == from_tag("") == from_tag('{"a": 1}') == []


def test_workers_on_each_of_one_gpu_are_likely_a_mistake() -> None:
    line = said(sweep(trial__workers="one_per_gpu"), None)["trial.workers"]
    assert "no trial ever has several workers" in line
    assert said(sweep(trial__workers="one_per_gpu", trial__gpus={"max": 2}), None) == {}
