"""The learned prior over configurations: what it knows of a space, and what the policy does."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from hermes_ops.policies.frontrunner import CONTENDERS, contenders
from hermes_ops.policies.frontrunner.configuration_prior import (
    ARRAYS,
    FILE,
    PARAMETERS,
    SYNONYMS,
    ConfigurationPrior,
    canonical_name,
    known_values,
    prior_scores,
    read_prior,
)
from hermes_ops.policies.frontrunner.configurations import Configuration
from hermes_ops.policies.frontrunner.forecast import forecast_sweep
from hermes_ops.policies.frontrunner.table import tabulate
from tests.builders import job

GOOD = {"learning_rate": 0.01, "momentum": 0.9, "weight_decay": 1e-3, "max_dropout": 0.2}
BAD = {"learning_rate": 1e-4, "momentum": 0.1, "weight_decay": 0.09, "max_dropout": 0.99}


def configuration(**values: Any) -> Configuration:
    return tuple(values.items())


def test_the_shipped_prior_has_an_input_and_a_mark_for_each_parameter() -> None:
    shipped = read_prior(FILE)
    assert len(shipped.center) == len(shipped.spread) == len(PARAMETERS)
    assert shipped.hidden.shape == (2 * len(PARAMETERS), len(shipped.output))
    assert len(shipped.bias) == len(shipped.output)
    assert (shipped.spread > 0).all()


def test_a_prior_is_the_same_after_it_was_written_and_read() -> None:
    shipped = read_prior(FILE)
    again = ConfigurationPrior.from_json(shipped.to_json())
    assert again.spaces == shipped.spaces
    for name in ARRAYS:
        np.testing.assert_array_equal(getattr(again, name), getattr(shipped, name))


def test_what_trained_badly_on_other_tasks_has_the_higher_score() -> None:
    good, bad = prior_scores((configuration(**GOOD), configuration(**BAD)))
    assert good < bad


def test_a_prior_counts_less_in_a_space_that_is_less_like_the_recorded_ones() -> None:
    """Another optimiser may want another learning rate."""
    shipped = read_prior(FILE)
    recorded = next(space for space in shipped.spaces if "momentum" in space)
    assert shipped.familiarity(recorded) == 1.0
    assert shipped.familiarity(recorded | {"temperature"}) < 1.0
    assert shipped.familiarity({"temperature"}) == 0.0
    some = (configuration(**GOOD), configuration(**BAD))
    others = tuple((*each, ("temperature", 1.0), ("top_k", 5)) for each in some)
    np.testing.assert_array_less(np.abs(prior_scores(others)), np.abs(prior_scores(some)))


def test_a_space_of_unknown_names_has_no_prior() -> None:
    unknown = tuple(configuration(rate=0.1 * n, depth_of_net=n) for n in range(5))
    assert prior_scores(unknown).tolist() == [0.0] * 5


def test_values_that_are_no_numbers_are_not_known() -> None:
    odd: tuple[Configuration, ...] = (
        configuration(learning_rate="0.1", momentum=True),
        configuration(learning_rate=None),
    )
    assert np.isnan(known_values(odd)).all()
    assert prior_scores(odd).tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("lr", "learning_rate"),
        ("optimizer.lr", "learning_rate"),
        ("optim/learning-rate", "learning_rate"),
        ("Learning_Rate", "learning_rate"),
        ("hidden_size", "max_units"),
        ("rate", "rate"),
    ],
)
def test_a_parameter_is_known_by_its_other_names(name: str, known: str) -> None:
    assert canonical_name(name) == known


def test_every_other_name_is_that_of_a_known_parameter() -> None:
    assert set(SYNONYMS.values()) <= PARAMETERS.keys()
    assert not SYNONYMS.keys() & PARAMETERS.keys()


def test_a_value_without_a_logarithm_counts_as_an_extreme_one() -> None:
    rates, momenta = (0.0, -1.0, 1e-30, 1e-2), (1.0, 1.5, 1 - 1e-14, 0.9)
    by_rate = prior_scores(tuple(configuration(learning_rate=rate) for rate in rates))
    by_momentum = prior_scores(tuple(configuration(momentum=value) for value in momenta))
    for scores in (by_rate, by_momentum):
        assert scores[0] == scores[1] == scores[2] != scores[3]
    infinite = prior_scores((configuration(lr=math.inf), configuration(lr=1e30)))
    assert infinite[0] == infinite[1]


def test_the_first_trials_are_those_that_were_good_elsewhere() -> None:
    jobs = [
        job(number, configuration=configuration(**values))
        for number, values in enumerate((BAD, GOOD, BAD))
    ]
    chance = forecast_sweep(tabulate(jobs, ())).chance
    assert chance[1] == chance.max()
    assert chance[0] == pytest.approx(chance[2])


def test_a_large_sweep_compares_the_new_trials_that_were_good_elsewhere() -> None:
    configurations = [configuration(**BAD)] * CONTENDERS + [configuration(**GOOD)]
    jobs = [job(number, configuration=each) for number, each in enumerate(configurations)]
    assert contenders(jobs) == [*jobs[: CONTENDERS - 1], jobs[-1]]
