"""How the correction of chances is learnt, on examples of which the answer is known."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bench import frontrunner_learn as bench
from bench.curve_tasks import KNOWN
from bench.frontrunner import TRIALS, dataset
from bench.frontrunner_learn import (
    WITHOUT_PRIOR,
    Examples,
    learn,
    mean_nats,
    states_at_random,
    states_of_policy,
)
from hermes_ops.policies.frontrunner import correction
from hermes_ops.policies.frontrunner.correction import EVIDENCE, FILE
from hermes_ops.policies.frontrunner.forecast import forecast_sweep

TASK = KNOWN[2]


def examples(count: int = 60, trials: int = 8, column: int = 3, seed: int = 0) -> Examples:
    """States in which the trial with the largest value in a column ends as the best."""
    inputs = np.random.default_rng(seed).normal(size=(count, trials, len(EVIDENCE)))
    chance = np.full((count, trials), 1 / trials)
    chance[:, 0] = 0.0
    best = 1 + inputs[:, 1:, column].argmax(axis=1)
    return Examples(inputs, chance, best, np.full(count, 1 / count))


def test_what_is_learnt_tells_the_best_trial_of_states_that_were_not_seen() -> None:
    learnt = learn(examples())
    unseen = examples(seed=1)
    hits = 0
    for inputs, chance, best in zip(unseen.evidence, unseen.chance, unseen.best, strict=True):
        hits += int(learnt.apply(chance, inputs).argmax() == best)
    assert hits > 50


def test_the_gradient_is_that_of_the_loss() -> None:
    seen = examples(12)
    learnt = learn(seen)
    inputs = learnt.standardised(seen.evidence)
    _, gradient = mean_nats(learnt, inputs, seen)
    step, width = 1e-6, len(EVIDENCE)
    for number, name in ((2, "linear"), (width + width * bench.HIDDEN + 1, "bias")):
        part = getattr(learnt, name).copy()
        part[2 if name == "linear" else 1] += step
        moved, _ = mean_nats(replace(learnt, **{name: part}), inputs, seen)
        now, _ = mean_nats(learnt, inputs, seen)
        assert (moved - now) / step == pytest.approx(gradient[number], abs=1e-4)


def test_the_best_trial_of_a_state_can_still_win() -> None:
    states = [*states_at_random(dataset(TASK), 4, 2)]
    found = Examples.of(states)
    assert len(states) == 8
    assert (found.chance[np.arange(8), found.best] > 0).all()
    assert {state.table.trial_count for state in states} == {TRIALS, bench.SMALL}
    assert len({state.table.depths[-1] for state in states}) > 1


def test_the_policy_is_asked_with_what_it_has_learnt_and_forgets_it_afterwards(
    tmp_path: Path,
) -> None:
    file = tmp_path / "learnt.json"
    file.write_text(Path(FILE).read_text("utf-8"), "utf-8")
    states = [*states_of_policy(TASK, 1, 3, file)]
    assert 0 < len(states) <= 3
    assert not any(state.table.over[state.best] for state in states)
    assert correction.FILE == FILE


def test_the_correction_is_learnt_without_the_prior_over_configurations() -> None:
    (state,) = states_at_random(dataset(TASK), 1, 1)
    names = dataset(TASK).hyperparameter_names
    unknown = {name: f"unknown {name}" for name in names}
    renamed = tuple(
        tuple((unknown[name], value) for name, value in configuration)
        for configuration in state.table.configurations
    )
    nameless = replace(state.table, configurations=renamed)
    assert (forecast_sweep(state.table).chance != forecast_sweep(nameless).chance).any()
    with WITHOUT_PRIOR.applied():
        known = forecast_sweep(state.table).chance
    np.testing.assert_allclose(known, forecast_sweep(nameless).chance)


def test_kinds_of_states_count_the_same_however_many_there_are() -> None:
    both = Examples.together([examples(10), examples(40, seed=1)])
    assert both.weight.sum() == pytest.approx(1.0)
    assert both.weight[:10].sum() == pytest.approx(0.5)
