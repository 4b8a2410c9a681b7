"""The multiple-choice knapsack of the policies that size jobs."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hermes_ops.core.speed_model import Floats
from hermes_ops.policies.toolbox import knapsack as module
from hermes_ops.policies.toolbox.knapsack import Integers, knapsack

VALUES = st.sampled_from([-np.inf, -3.0, -0.5, 0.0, 0.25, 1.0, 1.5, 4.0])


@st.composite
def problems(draw: st.DrawFn, jobs: int) -> tuple[Integers, Floats, int]:
    """Draw a problem in which each job may get nothing."""
    number, options = draw(st.integers(1, jobs)), draw(st.integers(1, 3))
    shape = (number, options)
    sizes = np.array(draw(st.lists(st.integers(1, 5), min_size=number * options,
                                   max_size=number * options))).reshape(shape)  # fmt: skip
    values = np.array(draw(st.lists(VALUES, min_size=number * options,
                                    max_size=number * options))).reshape(shape)  # fmt: skip
    nothing = np.zeros((number, 1))
    return (
        np.hstack((nothing.astype(np.int64), sizes)),
        np.hstack((nothing, values)),
        draw(st.integers(0, 12)),
    )


def best_by_enumeration(sizes: Integers, values: Floats, capacity: int) -> tuple[int, ...]:
    """Return the best solution that is first by its last job, then by the one before, ..."""
    jobs, options = sizes.shape
    solutions = []
    for columns in product(range(options), repeat=jobs):
        rows = tuple(range(jobs))
        if sizes[rows, columns].sum() <= capacity:
            solutions.append((-values[rows, columns].sum(), columns[::-1]))
    return min(solutions)[1][::-1]


@given(problems(jobs=5))
def test_no_solution_is_worth_more_and_ties_go_to_earlier_jobs(
    problem: tuple[Integers, Floats, int],
) -> None:
    assert tuple(knapsack(*problem)) == best_by_enumeration(*problem)


@settings(deadline=None)
@given(problems(jobs=60), st.integers(2, 6))
def test_a_price_on_gpus_decides_many_jobs_as_the_program_alone_does(
    problem: tuple[Integers, Floats, int], few: int
) -> None:
    alone = knapsack(*problem)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "FEW", few)
        assert (knapsack(*problem) == alone).all()


def test_of_many_equal_jobs_the_first_get_something() -> None:
    sizes = np.tile(np.array([0, 1, 2, 0]), (1_000, 1))
    values = np.tile(np.array([0.0, 1.1, 1.7, -np.inf]), (1_000, 1))
    values[::2, 2] = 1.6  # two kinds, of equal worth on one GPU
    assert np.flatnonzero(knapsack(sizes, values, 60)).tolist() == list(range(60))


def test_jobs_that_must_not_get_nothing_raise_when_they_do_not_fit() -> None:
    sizes, values = np.array([[0, 2], [0, 3]]), np.array([[-np.inf, 1.0], [-np.inf, 1.0]])
    assert tuple(knapsack(sizes, values, 5)) == (1, 1)
    with pytest.raises(ValueError, match="exceed the capacity"):
        knapsack(sizes, values, 4)


def test_no_job_needs_no_answer() -> None:
    assert knapsack(np.zeros((0, 3), dtype=np.int64), np.zeros((0, 3)), 4).size == 0
