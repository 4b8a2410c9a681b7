"""Configurations as features and similarities, where a search has not suggested all of them yet."""

from __future__ import annotations

from math import inf, nan

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hermes_ops.policies.frontrunner.configuration_prior import prior_scores
from hermes_ops.policies.frontrunner.configurations import (
    RECENT,
    Configuration,
    columns_of,
    features,
    similarities,
)
from hermes_ops.policies.frontrunner.forecast import estimate_sweep
from hermes_ops.policies.frontrunner.table import CurveTable

KNOWN = 2 * RECENT
UNKNOWN: tuple[Configuration, ...] = ((),) * 100


def configurations(count: int = KNOWN) -> tuple[Configuration, ...]:
    chance = np.random.default_rng(0)
    return tuple(
        (("learning_rate", float(10 ** -chance.uniform(1, 4))), ("units", float(number)))
        for number in range(count)
    )


def test_a_trial_that_is_not_configured_yet_is_like_the_last_ones_that_are() -> None:
    trials = configurations() + UNKNOWN
    last = slice(KNOWN - RECENT, KNOWN)
    made, kernels, scores = features(trials), similarities(trials), prior_scores(trials)
    assert made[-1] == pytest.approx(made[last].mean(axis=0))
    assert kernels[:, -1, 0] == pytest.approx(kernels[:, last, 0].mean(axis=1))
    assert scores[-1] == pytest.approx(scores[last].mean())


def test_trials_that_are_not_configured_yet_change_nothing_between_the_others() -> None:
    trials = configurations()
    assert features(trials + UNKNOWN)[:KNOWN] == pytest.approx(features(trials))
    kernels = similarities(trials + UNKNOWN)[:, :KNOWN, :KNOWN]
    assert kernels == pytest.approx(similarities(trials))


def test_two_trials_that_are_not_configured_yet_may_end_differently() -> None:
    kernels = similarities(configurations() + UNKNOWN)
    assert (kernels[:, -1, -1] > kernels[:, -1, -2]).all()


@given(st.lists(st.booleans(), min_size=3, max_size=40))
def test_similarities_are_those_of_a_covariance(are_known: list[bool]) -> None:
    made = configurations(len(are_known))
    trials = tuple(each if known else () for each, known in zip(made, are_known, strict=True))
    for kernel in similarities(trials):
        assert np.linalg.eigvalsh(kernel).min() > -1e-9


def expected_end_of_new_trials(final_losses: list[float]) -> float:
    """Forecast the trials that are not configured yet, after complete ones with these losses."""
    trials = tuple((("units", float(number)),) for number in range(len(final_losses)))
    count = len(trials) + len(UNKNOWN)
    losses, seconds = np.full((count, 2), np.nan), np.full((count, 2), np.nan)
    losses[: len(trials)] = np.array([np.add(final_losses, 1.0), final_losses]).T
    seconds[: len(trials)] = (1.0, 10.0)
    is_complete = ~np.isnan(losses[:, 1])
    table = CurveTable((1, 10), losses, seconds, 2 * is_complete, is_complete, trials + UNKNOWN)
    return float(estimate_sweep(table).at_the_end(table.over).mean[-1])


def test_what_a_search_suggests_next_is_expected_to_be_as_good_as_what_it_suggested_last() -> None:
    rising = [1.0 + 0.1 * number for number in range(KNOWN)]
    assert expected_end_of_new_trials(rising[::-1]) < expected_end_of_new_trials(rising)


@pytest.mark.parametrize("missing", [nan, inf, -inf])
def test_numbered_hyper_parameters_of_which_some_are_not_finite_are_numbers(missing: float) -> None:
    trials: tuple[Configuration, ...] = tuple(
        (("units_1", 16), ("units_2", 16 * number), ("units_3", missing if number < 4 else 64))
        for number in range(1, 8)
    )
    found = columns_of(trials)
    assert found.is_numeric
    assert np.isfinite(found.values).all()
    assert np.isfinite(features(trials)).all()
