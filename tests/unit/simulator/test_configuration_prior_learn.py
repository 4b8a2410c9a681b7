"""How the prior over configurations is learnt, on tasks of which the answer is known."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from bench.configuration_prior_learn import Recorded, learn, of_task, write_prior
from bench.curve_tasks import KNOWN
from hermes_ops.policies.frontrunner.configuration_prior import PARAMETERS, read_prior

NAMES = frozenset({"learning_rate", "momentum"})
COLUMNS = [list(PARAMETERS).index(name) for name in sorted(NAMES)]


def recorded(seed: int, count: int = 120) -> Recorded:
    """A task whose best learning rate is 0.01, whatever the momentum."""
    values = np.full((count, len(PARAMETERS)), np.nan)
    values[:, COLUMNS] = np.random.default_rng(seed).uniform((-5, -2), (0, 0), size=(count, 2))
    distance = np.abs(values[:, COLUMNS[0]] + 2)
    return Recorded(values, distance - distance.mean(), NAMES)


@pytest.mark.law
def test_what_is_learnt_orders_the_configurations_of_a_task_that_was_not_seen() -> None:
    prior, unseen = learn([recorded(0), recorded(1)]), recorded(2)
    scores = prior.scores(unseen.values)
    assert np.corrcoef(scores, unseen.scores)[0, 1] > 0.9
    assert prior.familiarity(NAMES) == 1.0


def test_it_answers_for_spaces_that_have_but_some_of_the_hyper_parameters() -> None:
    prior, unseen = learn([recorded(0), recorded(1)]), recorded(2)
    values = unseen.values.copy()
    values[:, COLUMNS[1]] = np.nan
    assert np.corrcoef(prior.scores(values), unseen.scores)[0, 1] > 0.9


def test_a_hyper_parameter_that_no_task_has_changes_no_score() -> None:
    prior, unseen = learn([recorded(0)]), recorded(2)
    values = unseen.values.copy()
    values[:, list(PARAMETERS).index("epsilon")] = np.linspace(-9, 9, len(values))
    np.testing.assert_array_equal(prior.scores(values), prior.scores(unseen.values))


@pytest.mark.law
def test_a_task_without_a_known_hyper_parameter_is_left_out_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "prior.json"
    write_prior([KNOWN[2], "nb301"], file)
    assert json.loads(file.read_text())["tasks"] == [KNOWN[2]]
    names = of_task(KNOWN[2]).names
    assert read_prior(str(file)).spaces == {names}
