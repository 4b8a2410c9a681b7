"""Any memory becomes text and comes back; any other text leaves the initial one."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hermes_ops.core.model import JobId
from hermes_ops.core.placement import Queues
from hermes_ops.memory import decode, encode


@dataclass(frozen=True, slots=True)
class Turn:
    job: JobId
    since_s: float
    label: str | None = None


@dataclass(frozen=True, slots=True)
class Turns:
    turns: tuple[Turn, ...] = ()
    scores: tuple[tuple[JobId, float], ...] = ()
    best: Turn | None = None
    value: float | int | str | bool = 0


@dataclass(frozen=True, slots=True)
class Lookalike:
    places: tuple[tuple[JobId, tuple[int, ...]], ...] = ()


TURNS = st.builds(Turn, st.text(), st.floats(), st.none() | st.text())
MEMORIES = st.builds(
    Turns,
    st.lists(TURNS, max_size=3).map(tuple),
    st.lists(st.tuples(st.text(), st.floats()), max_size=3).map(tuple),
    st.none() | TURNS,
    st.floats() | st.integers() | st.text() | st.booleans(),
)


@given(memory=MEMORIES)
def test_a_memory_survives_with_its_types_its_nans_and_its_infinities(memory: Turns) -> None:
    back = decode(encode(memory), Turns())
    assert repr(back) == repr(memory)
    assert encode(back) == encode(memory)


def test_no_memory_at_all_survives() -> None:
    assert decode(encode(None), None) is None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "null",
        "{",
        "[]",
        '["Turns"]',
        '["Queues", {"places": []}]',
        '["Turns", {"turns": 3}]',
        '["Turns", {"turns": [["s/0", 1.0]]}]',
        '["Turns", {"colour": "red"}]',
        '["Turns", {"scores": [["s/0", "1.0"]]}]',
    ],
)
def test_any_other_text_leaves_the_initial_memory(text: str) -> None:
    initial = Turns(value=inf)
    assert decode(text, initial) is initial
    assert decode(text, None) is None


@given(cut=st.integers(0, 40))
def test_a_torn_write_leaves_the_initial_memory(cut: int) -> None:
    text = encode(replace(Turns(), turns=(Turn(JobId("s/0"), 1.0),)))
    initial = Turns(value=7)
    assert decode(text[: -1 - cut], initial) is initial


def test_a_class_with_the_same_fields_is_not_the_same_memory() -> None:
    initial = Queues()
    assert decode(encode(Lookalike(((JobId("s/0"), (1,)),))), initial) is initial
