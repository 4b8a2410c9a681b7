"""Configurations of a rate, which decides the final loss, and of what does not."""

from __future__ import annotations

import numpy as np
import pytest

from hermes_ops.core.model import Value
from hermes_ops.policies.frontrunner.configurations import Configuration, similarities
from hermes_ops.policies.frontrunner.relevance import LEAST_TRIALS, kernel_families, relevances
from hermes_ops.policies.frontrunner.table import CurveTable

TRIALS = 80


def configurations(count: int = TRIALS) -> tuple[Configuration, ...]:
    chance = np.random.default_rng(0)
    kinds: tuple[Value, ...] = ("relu", "tanh", "gelu")
    return tuple(
        (
            ("activation", kinds[int(chance.integers(3))]),
            ("rate", float(chance.uniform())),
            ("seed", float(chance.uniform())),
        )
        for _ in range(count)
    )


def final_losses(trials: tuple[Configuration, ...]) -> tuple[float, ...]:
    return tuple(1.0 + abs(float(dict(trial)["rate"]) - 0.4) for trial in trials)


def test_what_decides_the_final_loss_counts_more_than_what_does_not() -> None:
    trials = configurations()
    activation, rate, seed = relevances(trials, tuple(range(TRIALS)), final_losses(trials))
    assert rate > 4 * max(activation, seed)


def test_with_few_complete_trials_nothing_is_said() -> None:
    trials = configurations()
    few = tuple(range(LEAST_TRIALS - 1))
    assert relevances(trials, few, final_losses(trials[: len(few)])) == ()


@pytest.mark.parametrize(
    "losses",
    [
        (1.0,) * TRIALS,
        (2.0,) * (TRIALS - 1) + (1e300,),
        (-1e308, *(1e308,) * (TRIALS - 1)),
    ],
)
def test_where_no_loss_tells_trials_apart_nothing_is_said(losses: tuple[float, ...]) -> None:
    assert relevances(configurations(), tuple(range(TRIALS)), losses) == ()


def test_configurations_that_are_all_alike_have_no_relevance() -> None:
    alike = ((("rate", 0.1),),) * TRIALS
    assert relevances(alike, tuple(range(TRIALS)), tuple(map(float, range(TRIALS)))) == ()


def test_more_hyperparameters_need_more_complete_trials() -> None:
    def learnt(parameters: str, complete: int) -> int:
        chance = np.random.default_rng(0)
        trials = tuple(
            tuple((f"rate_{letter}", float(chance.uniform())) for letter in parameters)
            for _ in range(complete)
        )
        losses = tuple(1.0 + float(dict(trial)["rate_a"]) for trial in trials)
        return len(relevances(trials, tuple(range(complete)), losses))

    assert (learnt("abcdefghij", 40), learnt("abcdefghij", 39)) == (10, 0)
    assert learnt("abcdefghijklmnopq", 400) == 0  # of all trials 64 are looked at


def test_relevance_does_not_depend_on_the_unit_of_the_loss() -> None:
    trials = configurations()
    losses, complete = final_losses(trials), tuple(range(TRIALS))
    other_unit = tuple(8.0 * loss - 4.0 for loss in losses)
    assert relevances(trials, complete, other_unit) == relevances(trials, complete, losses)


def test_trials_are_alike_by_what_is_relevant() -> None:
    same_rate: tuple[Configuration, ...] = (
        (("rate", 0.1), ("seed", 0.1)),
        (("rate", 0.1), ("seed", 0.9)),
        (("rate", 0.9), ("seed", 0.1)),
    )
    kernels = similarities(same_rate, (1.0, 0.02))
    assert (kernels[:, 0, 1] > kernels[:, 0, 2]).all()


def test_a_table_has_a_second_family_of_kernels_once_enough_trials_are_complete() -> None:
    trials = configurations()
    losses = np.array(final_losses(trials))[:, None]

    def table(complete: int) -> CurveTable:
        known = np.where(np.arange(TRIALS)[:, None] < complete, losses, np.nan)
        reached = (~np.isnan(known)).sum(axis=1)
        return CurveTable((1,), known, known, reached, reached > 0, trials)

    alike, by_relevance = kernel_families(table(LEAST_TRIALS))
    np.testing.assert_array_equal(alike, similarities(trials))
    assert not np.allclose(alike, by_relevance)
    assert len(kernel_families(table(LEAST_TRIALS - 1))) == 1
