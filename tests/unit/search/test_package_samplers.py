"""Samplers of other packages: their size, and what is said of those that fail."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hermes_ops.config import SweepConfig, check_installation, check_preview, parse
from hermes_ops.errors import ConfigError, HermesError
from hermes_ops.search import SAMPLERS, SamplerFactory
from hermes_ops.search.feasible import Feasible
from hermes_ops.search.samplers import RandomSampler
from hermes_ops.search.space import Config
from hermes_ops.testing import SamplerContract

Install = Callable[[SamplerFactory], None]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Install:
    """Add a package's sampler, under the name `design`."""

    def added(factory: SamplerFactory) -> None:
        monkeypatch.setitem(SAMPLERS, "design", factory)

    return added


class Design:
    """A list of configurations that is exhausted after the last one."""

    def __init__(self, values: list[Any]) -> None:
        self._values = values

    @property
    def size(self) -> int | None:
        return len(self._values)

    def exhausted(self, number: int) -> bool:
        return number >= len(self._values)

    def ask(self, number: int, history: object) -> Config:
        return {"a": self._values[number]}


def sweep(points: int = 0, max_trials: int = 9) -> SweepConfig:
    search = {
        "algorithm": "design",
        "max_trials": max_trials,
        "points_to_evaluate": [{"a": 9 - number} for number in range(points)],
        "space": {"a": {"type": "integer", "low": 0, "high": 9}},
    }
    trial = {"command": ["python", "train.py"]}
    document = {"name": "x", "objective": {"metric": "loss"}, "search": search, "trial": trial}
    return parse({**document, "budget": {"max_epochs": 1}}, "the sweep", None)


@pytest.mark.parametrize(("points", "max_trials", "trials"), [(0, 9, 4), (6, 9, 6), (0, 3, 3)])
def test_a_sweep_has_no_more_trials_than_its_sampler_has_configurations_or_it_has_points(
    install: Install, points: int, max_trials: int, trials: int
) -> None:
    install(lambda settings: Design([3, 2, 1, 0]))
    config = sweep(points, max_trials)
    assert config.trial_count == trials
    preview = check_preview(config)
    assert (preview.cost.trials, len(preview.trials)) == (trials, trials)


def test_a_sweep_whose_sampler_does_not_take_its_search_is_refused_before_it_starts(
    install: Install,
) -> None:
    def refusing(settings: object) -> Design:
        raise ValueError("only for floats")

    for factory in (refusing, lambda settings: Design([])):
        install(factory)
        with pytest.raises(ConfigError) as raised:
            check_installation(sweep(), Path("no-such-file"))
        (problem,) = raised.value.problems
        assert problem.where == "search.algorithm"
        assert problem.found.startswith("the sampler 'design', which fails: ValueError: ")


@pytest.mark.parametrize("value", [99, "much", None, [1]])
def test_a_sampler_that_fails_in_mid_search_is_named_with_the_trial(
    install: Install, value: object
) -> None:
    install(lambda settings: Design([0, value]))
    with pytest.raises(HermesError, match="the sampler 'design' gave trial 1 a configuration outs"):
        check_preview(sweep())
    install(lambda settings: Failing([0, 1]))
    with pytest.raises(HermesError, match=r"'design' gave trial 0 no configuration \(KeyError: 'a"):
        check_preview(sweep())


def test_a_sampler_that_ignores_constraints_does_not_pass_the_contract(install: Install) -> None:
    install(lambda settings: RandomSampler(Feasible(settings.feasible.space), settings.seed))
    with pytest.raises(HermesError, match="does not satisfy filters < 10"):
        SamplerContract().test_conditional_parameters_and_constraints_are_respected("design")


class Failing(Design):
    """A sampler that has a bug."""

    def ask(self, number: int, history: object) -> Config:
        raise KeyError("a")
