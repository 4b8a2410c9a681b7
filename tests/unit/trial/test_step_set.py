"""A set of steps in little memory."""

from __future__ import annotations

import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hermes_ops.trial import metrics as module
from hermes_ops.trial.metrics import StepSet


@settings(deadline=None)
@given(st.lists(st.integers(0, 40)))
def test_it_holds_what_was_added_and_nothing_else(numbers: list[int]) -> None:
    steps = StepSet()
    for number in numbers:
        steps.add(number)
    assert {n for n in range(-1, 42) if n in steps} == set(numbers)
    assert steps.highest == max(numbers, default=0)


def test_many_steps_at_equal_distance_take_no_memory() -> None:
    tracemalloc.start()
    try:
        steps = StepSet()
        for number in range(0, 200_000, 100):
            steps.add(number)
        ours = [tracemalloc.Filter(True, module.__file__)]  # other threads have memory, too
        held = tracemalloc.take_snapshot().filter_traces(ours).statistics("filename")
        assert 0 < sum(part.size for part in held) < 10_000
    finally:
        tracemalloc.stop()
    assert 199_900 in steps
    assert 199_901 not in steps


def test_steps_without_order_are_bounded_and_none_is_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps = StepSet()
    monkeypatch.setattr(module, "MOST_RANGES", 100)
    numbers = [n * n for n in range(2, 1000)]
    for number in numbers:
        steps.add(number)
    assert all(number in steps for number in numbers)
    assert len(steps._ranges) <= 100
