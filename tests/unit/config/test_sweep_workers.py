"""The keys of trials with several workers: what is accepted, refused, and given to the script."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hermes_ops.config import SweepConfig, parse, render_environment
from hermes_ops.config.render import with_batch
from hermes_ops.config.workers import BatchSpec
from hermes_ops.errors import ConfigError, Problem

RANGE = {"min": 1, "max": 4}
BATCH = {"parameter": "batch_size", "min": 32, "max": 256}
SPACE = {
    "rate": {"type": "uniform", "low": 0, "high": 1},
    "batch_size": {"type": "choice", "values": [32, 64]},
}


def data(space: dict[str, Any] | None = None, **trial: Any) -> dict[str, Any]:
    return {
        "name": "workers",
        "objective": {"metric": "loss"},
        "search": {"algorithm": "random", "max_trials": 2, "space": space or SPACE},
        "trial": {"command": ["python", "train.py"], "gpus": RANGE, **trial},
        "budget": {"max_epochs": 2},
    }


def config(**changes: Any) -> SweepConfig:
    return parse(data(**changes), "test", None)


def refused(changes: dict[str, Any]) -> dict[str, Problem]:
    with pytest.raises(ConfigError) as caught:
        parse(data(**changes), "test", None)
    return {problem.where: problem for problem in caught.value.problems}


def test_a_trial_has_one_process_and_no_variable_more_unless_it_asks_for_workers() -> None:
    found = config(gpus=1)
    assert (found.trial.workers, found.trial.batch) == ("one_process", None)
    assert found.trial.processes(4) == 1
    assert render_environment(found, {}) == {}


def test_the_hook_learns_the_learning_rate_and_the_place_of_a_resize_from_variables() -> None:
    found = config(workers="one_per_gpu", scale_learning_rate="off", resize="epoch")
    assert render_environment(found, {}) == {
        "HERMES_SCALE_LEARNING_RATE": "off",
        "HERMES_RESIZE": "epoch",
    }
    assert found.trial.processes(4) == 4
    assert parse(json.loads(found.to_json()), "again", None) == found


REFUSED: list[tuple[str, dict[str, Any], str, str]] = [
    ("tf_config of one process", {"tf_config": True}, "trial.tf_config", "one_per_gpu"),
    (
        "a scaled rate of one process",
        {"scale_learning_rate": "hermes"},
        "trial.scale_learning_rate",
        "one_per_gpu",
    ),
    ("a resize that never comes", {"gpus": 2, "resize": "epoch"}, "trial.resize", "min: 1"),
    (
        "a rank of one's own",
        {"workers": "one_per_gpu", "environment": {"HOROVOD_RANK": "0"}},
        "trial.environment.HOROVOD_RANK",
        "remove it",
    ),
    (
        "a TF_CONFIG of one's own",
        {"workers": "one_per_gpu", "tf_config": True, "environment": {"TF_CONFIG": "{}"}},
        "trial.environment.TF_CONFIG",
        "remove it",
    ),
    (
        "a launcher in each worker",
        {"workers": "one_per_gpu", "command": ["/opt/bin/horovodrun", "-np", "2", "python"]},
        "trial.command[0]",
        "remove horovodrun",
    ),
    (
        "another launcher in each worker",
        {"workers": "one_per_gpu", "command": ["accelerate", "launch", "train.py"]},
        "trial.command[0]",
        "remove accelerate",
    ),
    (
        "the module of a launcher in each worker",
        {"workers": "one_per_gpu", "command": ["python", "-m", "torch.distributed.run", "t.py"]},
        "trial.command[2]",
        "remove torch.distributed.run",
    ),
    ("a turned batch", {"batch": {**BATCH, "max": 16}}, "trial.batch", "exchange"),
    ("no parameter", {"batch": {"min": 1, "max": 2}}, "trial.batch.parameter", "batch_size"),
    (
        "a parameter of another name",
        {"batch": {**BATCH, "parameter": "batchsize"}},
        "trial.batch.parameter",
        "did you mean batch_size?",
    ),
    (
        "a parameter that is nowhere",
        {"batch": {**BATCH, "parameter": "samples"}, "workers": "one_per_gpu"},
        "trial.batch.parameter",
        "add samples to search.space, for example as {type: choice, values: [32]}",
    ),
    (
        "a parameter that is no number of samples",
        {"batch": {**BATCH, "parameter": "rate"}},
        "trial.batch.parameter",
        "whole numbers",
    ),
    (
        "values outside the range",
        {"batch": {**BATCH, "max": 48}},
        "trial.batch.parameter",
        "widen",
    ),
    (
        "values outside the range on the least GPUs",
        {"batch": {**BATCH, "max": 96}, "gpus": 2, "workers": "one_per_gpu"},
        "trial.batch.parameter",
        "widen",
    ),
    (
        "memory for less than the least batch",
        {"batch": {**BATCH, "per_gpu_max": 16}},
        "trial.batch.per_gpu_max",
        "write 32 or more",
    ),
    (
        "workers without a sample",
        {
            "batch": {**BATCH, "min": 1, "max": 64},
            "gpus": {"min": 1, "max": 128},
            "workers": "one_per_gpu",
        },
        "trial.batch.max",
        "write 128 or more",
    ),
]


@pytest.mark.parametrize(
    ("changes", "where", "fix"),
    [case[1:] for case in REFUSED],
    ids=[case[0] for case in REFUSED],
)
def test_what_is_impossible_is_refused_with_its_place_and_the_fix(
    changes: dict[str, Any], where: str, fix: str
) -> None:
    problem = refused(changes)[where]
    assert problem.found
    assert problem.allowed
    assert fix in problem.fix


def test_a_batch_that_not_every_configuration_has_is_refused() -> None:
    below = {"value": "sgd", "space": {"samples": {"type": "choice", "values": [32]}}}
    space = {"optimizer": {"type": "choice", "values": ["adam", below]}}
    found = refused({"space": space, "batch": {**BATCH, "parameter": "samples"}})
    assert "move it up" in found["trial.batch.parameter"].fix


@pytest.mark.parametrize(
    ("workers", "batch", "value", "samples"),
    [
        ("one_process", None, 64, 64),
        ("one_per_gpu", None, 64, 256),
        ("one_process", 96, 96, 96),
        ("one_per_gpu", 96, 24, 96),
        ("one_per_gpu", 98, 25, 100),  # rounded
        ("one_per_gpu", 255, 64, 256),
    ],
)
def test_a_process_gets_its_part_of_the_batch(
    workers: str, batch: int | None, value: int, samples: int
) -> None:
    drawn = {"rate": 0.5, "batch_size": 64}
    found = config(workers=workers, batch=BATCH)
    assert with_batch(found, drawn, batch, 4) == ({"rate": 0.5, "batch_size": value}, samples)
    assert drawn == {"rate": 0.5, "batch_size": 64}


def test_without_a_range_of_batches_the_configuration_stays_and_its_batch_is_not_known() -> None:
    assert with_batch(config(), {"batch_size": 64}, 96, 4) == ({"batch_size": 64}, None)


@given(
    least=st.integers(1, 200),
    further=st.integers(0, 200),
    gpus=st.integers(1, 16),
    one_per_gpu=st.booleans(),
    per_gpu_max=st.none() | st.integers(1, 300),
    data=st.data(),
)
def test_no_batch_exceeds_the_largest_one_or_the_memory_of_a_gpu(
    *,
    least: int,
    further: int,
    gpus: int,
    one_per_gpu: bool,
    per_gpu_max: int | None,
    data: st.DataObject,
) -> None:
    spec = BatchSpec(parameter="b", min=least, max=least + further, per_gpu_max=per_gpu_max)
    processes = gpus if one_per_gpu else 1
    batch = data.draw(st.integers(spec.min, spec.max))
    samples = spec.of_process(batch, gpus, processes)
    assert samples >= 1
    assert samples == 1 or samples * processes <= spec.max
    if per_gpu_max is not None:
        assert samples <= per_gpu_max * (gpus // processes)
    elif samples * processes < spec.max - processes:
        assert abs(samples * processes - batch) <= processes
