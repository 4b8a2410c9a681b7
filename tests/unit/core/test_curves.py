"""What was made of curves is kept, and no result depends on it."""

from __future__ import annotations

import pickle
import tracemalloc
from math import inf, nan

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hermes_ops.core.curves import LearningCurve, Memo, PackedPoints, Table, best, columns
from hermes_ops.core.model import Point
from hermes_ops.core.speed_model import Floats

Fact = tuple[int, ...]


class Maker:
    """Makes a row of two numbers of each fact, and counts."""

    def __init__(self) -> None:
        self.made: list[Fact] = []

    def __call__(self, facts: list[Fact]) -> Floats:
        self.made += facts
        return np.array([(float(fact[0]), fact[0] * 10.0) for fact in facts])


@given(st.lists(st.lists(st.integers(0, 5), max_size=8), max_size=8), st.integers(1, 6))
def test_a_table_gives_what_making_all_anew_gives(asked: list[list[int]], size: int) -> None:
    facts = [(number, number) for number in range(6)]
    table = Table(Maker(), width=2, size=size)
    for numbers in asked:
        found = table.get([facts[number] for number in numbers])
        assert found.tolist() == [[number, number * 10] for number in numbers]


def test_a_row_is_made_once_however_often_and_with_whomever_it_is_asked_for() -> None:
    maker, one, two = Maker(), (1, 1), (2, 2)
    table = Table(maker, width=2)
    for asked in ([one, one], [two, one], [one], [two]):
        table.get(asked)
    assert maker.made == [one, two]


def test_a_full_table_forgets_what_is_not_asked_for_and_keeps_the_rest() -> None:
    maker, one, two, three = Maker(), (1, 1), (2, 2), (3, 3)
    table = Table(maker, width=2, size=2)
    for asked in ([one, two], [two, three], [one]):
        table.get(asked)
    assert maker.made == [one, two, three, one]


def test_equal_facts_that_are_two_objects_are_two() -> None:
    maker, one = Maker(), (1, 1)
    other = (one[0], int("1"))
    Table(maker, width=2).get([one, other])
    assert len(maker.made) == len({id(one), id(other)})


numbers = st.floats(allow_nan=False)
steps = st.integers(-(2**63), 2**63 - 1)
rows = st.lists(st.tuples(steps, numbers, steps), max_size=12)
ends = st.none() | st.integers(-14, 14)
slices = st.builds(slice, ends, ends, st.none() | st.sampled_from([-2, -1, 1, 2]))


@given(rows, rows, slices)
def test_packed_points_read_like_the_tuple_of_their_rows(
    some: list[tuple[int, float, int]], more: list[tuple[int, float, int]], part: slice
) -> None:
    packed, plain = PackedPoints.from_rows(some).extended(more), (*some, *more)
    assert packed == plain == tuple(packed)
    assert packed[part] == plain[part]
    assert [packed[index] for index in range(-len(plain), len(plain))] == [*plain, *plain]
    assert [type(number) for row in packed for number in row] == [int, float, int] * len(plain)
    assert tuple(reversed(packed)) == plain[::-1]
    assert hash(packed) == hash(plain)
    assert pickle.loads(pickle.dumps(packed)) == packed


@given(rows, rows, rows)
def test_a_longer_curve_changes_no_shorter_one(
    some: list[tuple[int, float, int]],
    one: list[tuple[int, float, int]],
    other: list[tuple[int, float, int]],
) -> None:
    short = PackedPoints.from_rows(some)
    first, second = short.extended(one), short.extended(other)
    assert short == tuple(some)
    assert first == (*some, *one)
    assert second == (*some, *other)


def test_a_loss_that_is_not_a_number_equals_itself() -> None:
    one, two = (LearningCurve.from_rows([Point(1, nan, 1.0)]) for _ in range(2))
    assert one == two
    assert one != LearningCurve.from_rows([Point(1, 0.0, 1.0)])


def test_a_packed_curve_has_the_columns_of_its_points() -> None:
    plain = tuple(Point(n, loss, n * 2.0) for n, loss in enumerate([3.0, nan, 1.0, inf, 2.0]))
    packed = LearningCurve.from_rows(plain)
    for name in ("steps", "losses", "seconds", "best", "mean"):
        expected = getattr(columns(plain), name).tolist()
        assert repr(getattr(columns(packed), name).tolist()) == repr(expected)
    assert best(packed) == 1.0
    assert packed[-1] == plain[-1]


def test_what_was_computed_of_a_curve_goes_with_it() -> None:
    rounds = 500
    memo, table = Memo[LearningCurve, int](lambda c: map(len, c)), Table(_first_losses, width=1)
    curve = LearningCurve.from_rows([Point(0, 1.0, 0.0)])
    tracemalloc.start()
    for step in range(1, rounds):
        curve = curve.extended([Point(step, 1.0 / step, float(step))])
        columns(curve)
        assert memo.get([curve]) == [step + 1]
        table.get([curve])
    used_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert used_bytes < 1_000 * rounds  # all its versions, with their arrays, have 12,000


def _first_losses(curves: list[LearningCurve]) -> Floats:
    return np.array([[curve[0].loss] for curve in curves])
