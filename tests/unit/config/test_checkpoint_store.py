"""`checkpoints.store`: what it may be, and how it reaches the trial."""

from __future__ import annotations

from typing import Any

import pytest

from hermes_ops.config import SweepConfig, parse
from hermes_ops.config.render import render_environment
from hermes_ops.errors import ConfigError


def sweep(**checkpoints: Any) -> SweepConfig:
    space = {"rate": {"type": "uniform", "low": 0, "high": 1}}
    data = {
        "name": "digits",
        "objective": {"metric": "loss"},
        "search": {"algorithm": "random", "max_trials": 2, "space": space},
        "trial": {"command": ["train"], "directory": "/data"},
        "budget": {"max_epochs": 3},
        "checkpoints": checkpoints,
    }
    return parse(data, source="sweep.yaml", base=None)


@pytest.mark.parametrize(
    "url",
    [
        "s3://bucket/prefix",
        "gs://bucket",
        "abfs://container@account.dfs.core.windows.net/a b".replace(" ", "_"),
        "sftp://user@host/folder",
        "file:///mnt/share",
    ],
)
def test_a_store_reaches_the_trial_as_a_variable_and_not_in_its_command(url: str) -> None:
    config = sweep(store=url)
    assert render_environment(config, {})["HERMES_CHECKPOINT_STORE"] == url
    assert "store" not in " ".join(config.trial.command)


def test_a_sweep_without_a_store_says_nothing_of_one() -> None:
    assert "HERMES_CHECKPOINT_STORE" not in render_environment(sweep(), {})


@pytest.mark.parametrize(
    "url", ["s3://key:sesame@bucket/p", "sftp://user:sesame@host/p", "s3://:sesame@bucket"]
)
def test_a_password_in_the_url_is_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        sweep(store=url)
    (problem,) = caught.value.problems
    assert problem.where == "checkpoints.store"
    assert "AWS_ACCESS_KEY_ID" in problem.fix
    assert "sesame" not in str(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        "", "bucket", "/mnt/share", "s3://", "s3:///", "s3://b/*", "s3://b/../c", "s3://b?key=sesame",
        "simplecache::s3://b", "memory://b", "s3://b /c", "s3://[b", 7,
    ],
)  # fmt: skip
def test_what_is_no_folder_of_a_store_is_refused(url: object) -> None:
    with pytest.raises(ConfigError) as caught:
        sweep(store=url)
    assert {p.where for p in caught.value.problems} == {"checkpoints.store"}
    assert "sesame" not in str(caught.value)
