"""The constants of the model of `frontrunner`, learnt from recorded tasks."""

from __future__ import annotations

import pytest

from bench import frontrunner_constants as bench
from bench.curve_tasks import KNOWN
from bench.frontrunner_chances import states_of
from bench.frontrunner_constants import LEARNT, climb, constant, multiplied, nats_of

TASK = KNOWN[2]


@pytest.mark.parametrize("name", LEARNT)
def test_each_constant_that_is_learnt_is_in_use(name: str) -> None:
    states = [states_of(TASK, range(3), 2)]
    before = nats_of(states, {})
    value = constant(name)
    changes = [multiplied(value, place, by) for place in bench.places(value) for by in (0.2, 5.0)]
    assert any((nats_of(states, {name: change}) != before).any() for change in changes)


def test_a_number_is_found_and_changed_in_its_place() -> None:
    value = ((0.0, 0.4), (0.5, 0.2))
    assert [*bench.places(value)] == [(0, 1), (1, 0), (1, 1)]
    assert multiplied(value, (1, 0), 1.5) == ((0.0, 0.4), (0.75, 0.2))
    assert multiplied(0.3, (), 1.5) == 0.45


def test_what_is_learnt_makes_the_best_trials_more_likely() -> None:
    states = [states_of(TASK, range(4), 2)]
    first = {"forecast.SURER": 6.0}
    found = climb(states, first)
    assert found["forecast.SURER"] < first["forecast.SURER"]
    assert nats_of(states, found).mean() < nats_of(states, first).mean() - bench.LEAST_GAIN


def test_a_change_that_brings_nothing_is_not_made() -> None:
    assert climb([states_of(TASK, [0], 1)], {"forecast.KEPT": 64.0}) == {"forecast.KEPT": 64.0}
