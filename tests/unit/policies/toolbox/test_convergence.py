"""What counts as converging, and how fast."""

from __future__ import annotations

from functools import partial
from math import inf, nan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hermes_ops.core.model import Job, JobId, Phase, SweepId
from hermes_ops.policies.toolbox.convergence import (
    convergence,
    largest_drops,
    weighted_convergences,
)
from tests import builders
from tests.builders import trial

curve = partial(builders.curve, step_s=2.0)


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        ((), inf),
        ((1.0,), inf),
        ((nan,), inf),
        ((1.0, 0.5), 0.25),
        ((0.5, 1.0), 0.0),
        ((1.0, 1.0), 0.0),
        ((1.0, nan), 0.0),
        ((1.0, inf), 0.0),
        ((nan, 1.0), 0.0),
        ((1.0, nan, 0.5), 0.125),
        ((1.0, 0.4, 0.9, 0.4), 0.1),  # best so far: the way back from 0.9 earns nothing
        ((9.0, 1.0, 1.0, 1.0, 1.0), 0.0),  # a plateau's past is forgotten after three intervals
    ],
)
def test_convergence_is_the_drop_of_the_best_loss_per_second_of_the_slice(
    losses: tuple[float, ...], expected: float
) -> None:
    assert convergence(curve(*losses), largest_drop=1.0) == pytest.approx(expected)


def test_a_clock_that_stood_still_gives_no_infinite_rate() -> None:
    assert convergence(curve(1.0, 0.5, step_s=0.0), 1.0) < inf


@given(
    st.lists(st.floats(), max_size=8),
    st.floats(min_value=0, allow_nan=False, allow_infinity=False),
)
def test_any_curve_has_a_convergence_that_is_not_negative(losses: list[float], drop: float) -> None:
    assert convergence(curve(*losses), drop) >= 0


def test_the_largest_drop_is_taken_over_the_sweep_and_its_ended_trials() -> None:
    jobs = [trial("s/0", 3.0, nan), trial("s/1", 2.0, 1.0, phase=Phase.ENDED), trial("t/0", 7.0)]
    assert largest_drops(jobs) == {"s": 2.0, "t": 0.0}


def test_jobs_without_any_curve_have_no_drop_and_are_unseen() -> None:
    assert largest_drops([trial("s/0")]) == {}
    assert weighted_convergences([trial("s/0"), trial("s/1", phase=Phase.ENDED)]) == {"s/0": inf}


def test_two_trials_of_a_sweep_with_one_drop_each_differ() -> None:
    found = weighted_convergences([trial("s/0", 3.0, 1.0), trial("s/1", 3.0, 2.9)])
    assert found[JobId("s/0")] > found[JobId("s/1")] > 0


def test_the_scale_of_the_loss_does_not_matter_between_sweeps() -> None:
    found = weighted_convergences([trial("s/0", 3.0, 1.0), trial("t/0", 300.0, 100.0)])
    assert found[JobId("s/0")] == found[JobId("t/0")]


@given(st.lists(st.lists(st.floats(), max_size=8), max_size=5))
def test_many_curves_at_once_give_what_each_gives_alone(losses: list[list[float]]) -> None:
    jobs = [trial(f"s/{n}", *shown) for n, shown in enumerate(losses)]
    drop = largest_drops(jobs).get(SweepId("s"), 0.0)
    alone = {this.id: convergence(this.curve, drop) for this in jobs}
    assert weighted_convergences(jobs) == alone


def test_weight_multiplies_and_ended_jobs_have_no_convergence() -> None:
    jobs = [trial("s/0", 2.0, 1.0, weight=3.0), trial("s/1", 2.0, 1.0, phase=Phase.ENDED)]
    assert weighted_convergences(jobs) == {"s/0": pytest.approx(1.5)}


@pytest.mark.parametrize(
    ("points", "steps_at_start", "finished"),
    [(0, 0, False), (1, 0, False), (2, 0, True), (3, 3, False), (4, 3, True)],
)
def test_a_slice_is_a_new_step_or_two_points_from_scratch(
    points: int, steps_at_start: int, finished: bool
) -> None:
    this = Job(
        JobId("s/0"),
        SweepId("s"),
        0.0,
        Phase.RUNNING,
        curve=curve(*[1.0] * points),
        steps_at_start=steps_at_start,
    )
    assert this.has_finished_slice is finished
