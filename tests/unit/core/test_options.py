from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hermes_ops.core.options import OptionValue, parse_options, split_options
from hermes_ops.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3", 3),
        ("0.5", 0.5),
        (".5", 0.5),
        ("-1e3", -1000.0),
        ("inf", float("inf")),
        ("true", True),
        ("False", False),
        ("null", None),
        ("queue", "queue"),
        ('"3"', "3"),
        ("", ""),
        ("a=b", "a=b"),
        ("[4, 8]", (4, 8)),
        ("[]", ()),
        ("[4", "[4"),
        ('{"a": 1}', {"a": 1}),
    ],
)
def test_a_value_is_what_it_looks_like(text: str, value: OptionValue) -> None:
    (found,) = parse_options([f"k={text}"]).values()
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize("pair", ["k", "=3", ""])
def test_what_is_no_pair_is_refused(pair: str) -> None:
    with pytest.raises(ConfigError, match=r"NAME=VALUE"):
        parse_options([pair])


def test_a_comma_in_a_list_or_an_object_parts_no_options() -> None:
    pairs = ["k=3", "limits=[1,2]", "sizes=[4, 8,12]", 'shares={"a": 1, "b": 2}', "mode=queue"]
    assert split_options(",".join(pairs)) == pairs
    assert split_options(" k=3, mode=queue,") == ["k=3", "mode=queue"]


@given(st.dictionaries(st.sampled_from("abc"), st.lists(st.integers()) | st.floats(0, 9)))
def test_options_written_in_one_line_come_back(options: dict[str, list[int] | float]) -> None:
    line = ",".join(f"{name}={value}" for name, value in options.items())
    expected = {n: tuple(v) if isinstance(v, list) else v for n, v in options.items()}
    assert parse_options(split_options(line)) == expected
