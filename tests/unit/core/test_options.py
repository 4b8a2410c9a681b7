from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hermes_ops.core.options import (
    GUARD_VALUES,
    GuardOptions,
    OptionValue,
    parse_options,
    split_options,
)
from hermes_ops.errors import ConfigError
from hermes_ops.policies import make_policy


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
        ("no", False),
        ("Yes", True),
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


def refused(call: Any) -> dict[str, Any]:
    with pytest.raises(ConfigError) as caught:
        call()
    return {problem.where: problem for problem in caught.value.problems}


def test_every_option_of_the_guards_can_be_set() -> None:
    options = {f"guard_{name}": 7 for name in GUARD_VALUES}
    assert GuardOptions.parse({**options, "eta": 3}) == GuardOptions(7.0, 7, 7, 7.0)
    assert GuardOptions.parse({"guard_quanta": 8.0}).quanta == 8
    assert GuardOptions.parse({"threshold": 4}).open_per_gpu == 4


def test_the_switch_that_nobody_has_measured_yet_is_the_users() -> None:
    policy = GuardOptions.parse({"guard_default_switch_s": 40}).around(make_policy("hermes", {}))
    assert policy.default_switch_s == policy.policy.default_switch_s == 40.0  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("k", "x", "a number from 0"),
        ("k", -1, "a number from 0"),
        ("k", float("nan"), "a number from 0"),
        ("k", float("inf"), "a number from 0"),
        ("k", True, "a number from 0"),
        ("quanta", 1.5, "a whole number from 0"),
        ("quanta", -1, "a whole number from 0"),
        ("open", 0, "a whole number from 1"),
        ("open", None, "a whole number from 1"),
        ("default_switch_s", -0.5, "seconds, from 0"),
        ("quantas", 3, "guard_quanta"),
    ],
)
def test_a_guards_option_that_cannot_be_is_named_alone(name: str, value: Any, allowed: str) -> None:
    sound = {"guard_k": 2, "guard_open": 3, "threshold": 2}
    sound.pop(f"guard_{name}", None)
    found = refused(lambda: GuardOptions.parse({**sound, f"guard_{name}": value}))
    assert set(found) == {f"guard_{name}"}
    assert allowed in str(found[f"guard_{name}"])


def test_all_guards_options_that_cannot_be_are_named() -> None:
    found = refused(
        lambda: GuardOptions.parse({"guard_k": "x", "guard_open": 0, "guard_quanta": 3})
    )
    assert set(found) == {"guard_k", "guard_open"}


def test_a_threshold_that_cannot_be_is_the_policys_own_error() -> None:
    assert GuardOptions.parse({"threshold": "x"}) == GuardOptions()
    found = refused(lambda: make_policy("hermes", {"threshold": "x"}))
    assert set(found) == {"policy.hermes.threshold"}


@pytest.mark.parametrize(
    ("policy", "wrong", "sound", "allowed"),
    [
        ("asha", {"eta": 0}, {"first_rung": 2}, "eta is at least 2"),
        ("asha", {"eta": "x"}, {"first_rung": 2}, "a value like the default, 3"),
        ("2d-las", {"limits_gpu_s": "abc"}, {"order": "start"}, "(3250.0, 7200.0)"),
        ("median", {"grace_steps": 0}, {"min_others": 2}, "grace_steps"),
    ],
)
def test_a_policys_option_that_cannot_be_is_named_alone(
    policy: str, wrong: dict[str, Any], sound: dict[str, Any], allowed: str
) -> None:
    (name,) = wrong
    found = refused(lambda: make_policy(policy, {**sound, **wrong}))
    assert set(found) == {f"policy.{policy}.{name}"}
    problem = found[f"policy.{policy}.{name}"]
    assert allowed in problem.allowed
    assert problem.found == repr(wrong[name])
