"""What was made of curves is kept, and no result depends on it."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hermes_ops.core.curves import Table
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
