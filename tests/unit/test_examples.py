"""The examples to copy are valid sweeps of the scripts beside them."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import pytest

from hermes_ops.config import load_file
from hermes_ops.config.pool_quota import load_quota
from hermes_ops.search import SAMPLERS, make_sampler
from hermes_ops.search.space import Integer
from hermes_ops.simulator.traces import read_trace

ROOT = Path(__file__).parents[2]
SWEEPS = sorted((ROOT / "examples").glob("*/*.yaml"))


def options_of(script: Path) -> set[str]:
    """Return the options that a script's argument parser has, without running it."""
    calls = (n for n in ast.walk(ast.parse(script.read_text())) if isinstance(n, ast.Call))
    added = (c for c in calls if isinstance(c.func, ast.Attribute))
    return {
        word.value
        for call in added
        if isinstance(call.func, ast.Attribute) and call.func.attr == "add_argument"
        for word in call.args
        if isinstance(word, ast.Constant) and isinstance(word.value, str)
    }


def test_there_are_examples() -> None:
    assert {path.parent.name for path in SWEEPS} >= {"digits", "sgd", "pytorch", "xgboost"}


@pytest.mark.parametrize("path", SWEEPS, ids=lambda p: f"{p.parent.name}/{p.name}")
def test_the_script_of_an_example_takes_every_argument_that_its_sweep_passes(path: Path) -> None:
    config = load_file(path)
    words = [part for word in config.trial.command for part in word.split("=", 1)]
    script = next(word for word in words if word.endswith(".py"))
    options = {word for word in words if word.startswith("--")}
    assert options <= options_of(path.parent / Path(script).name)
    trained = max(words.index(o) for o in ("--epochs", "--rounds") if o in words)
    assert words[trained + 1] == str(config.budget.max_epochs)


@pytest.mark.law
def test_the_teams_of_the_public_trace_are_guaranteed_gpus_by_the_gpu_time_of_their_jobs() -> None:
    quota = load_quota(ROOT / "examples" / "philly_teams.yaml", 400)
    guaranteed = {team.name: team.guaranteed for team in quota.teams}
    asked_gpu_s: dict[str, float] = defaultdict(float)
    for work in read_trace(ROOT / "examples" / "traces" / "philly_82k.csv.gz").jobs:
        asked_gpu_s[work.virtual_cluster] += work.gpus * work.seconds
    assert sum(guaranteed.values()) == 400
    assert guaranteed.keys() == asked_gpu_s.keys()
    for team, gpus in guaranteed.items():
        by_size = 385 * asked_gpu_s[team] / sum(asked_gpu_s.values())
        assert gpus - 1 == pytest.approx(by_size, abs=1)


def test_the_sampler_of_the_example_package_tries_no_known_point_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples" / "package" / "src"))
    from hermes_examples.halton import HaltonSampler

    monkeypatch.setitem(SAMPLERS, "halton", HaltonSampler)
    space = (("a", Integer(0, 9)),)
    points = [{"a": 3}, {"a": 7}]
    sampler = make_sampler("halton", space, 0, points_to_evaluate=points)
    drawn = [sampler.ask(number, []) for number in range(30)]
    assert drawn[:2] == points
    assert [config for config in drawn[2:] if config in points] == []
