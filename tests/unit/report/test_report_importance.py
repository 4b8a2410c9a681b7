from __future__ import annotations

import random
from typing import Any

import pytest

from hermes_ops.core.summary import SweepSummary
from hermes_ops.report.canvas import NothingToDrawError
from hermes_ops.report.parameter_plots import Importance, Importances, importances
from tests.unit.report.sweeps import conditional, summary, trial


@pytest.fixture(autouse=True)
def few_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hermes_ops.report.parameter_plots._TREES", 15)


def decided(size: int, names: int = 2) -> SweepSummary:
    """The parameter x0 alone decides; all others are noise."""
    rng = random.Random(1)
    configs = [{f"x{n}": rng.random() for n in range(names)} for _ in range(size)]
    return summary(*(trial(n, c["x0"] ** 2, config=c) for n, c in enumerate(configs)))


def test_what_decides_comes_first_and_noise_has_no_importance() -> None:
    found = importances(decided(50))
    assert [i.name for i in found.found] == ["x0", "x1"]
    assert found.found[0].low > 0.5
    assert abs(found.found[1].mean) < 0.1
    assert all(i.low <= i.mean <= i.high for i in found.found)
    assert found.explained > 0.8
    assert "weak" not in found.remark


def test_one_diverged_trial_changes_nothing() -> None:
    calm = decided(30)
    worst = max(calm.trials, key=lambda t: t.best or 0.0)
    trials = [trial(t.number, 1e12 if t is worst else t.best, config=t.config) for t in calm.trials]
    assert importances(summary(*trials)) == importances(calm)


def test_a_parameter_that_some_trials_lack_is_judged_as_well() -> None:
    found = importances(summary(*(conditional(n) for n in range(12))))
    assert {i.name for i in found.found} == {"rate", "layers", "momentum", "warm", "mixed"}


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        (summary(*(trial(n, n / 10) for n in range(9))), "Too few trials: 9 have a value"),
        (summary(*(trial(n, 0.5) for n in range(10))), "All values are equal"),
        (summary(*(trial(n, n, config={"a": 1}) for n in range(10))), "the same configuration"),
    ],
)
def test_where_an_importance_would_be_chance_there_is_none(facts: Any, reason: str) -> None:
    with pytest.raises(NothingToDrawError, match=reason):
        importances(facts)


def test_the_remark_says_when_to_read_nothing_into_the_bars() -> None:
    bar = (Importance("a", 0.1, 0.0, 0.2),)
    assert "read no order" in Importances(100, -0.4, bar).remark
    assert "explains 0%" in Importances(100, -0.4, bar).remark
    assert "fewer than 30" in Importances(29, 0.9, bar).remark
    assert "fewer" not in Importances(30, 0.9, bar).remark
