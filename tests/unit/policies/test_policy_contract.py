"""The policies' contract over every entry of POLICIES; the documentation of each."""

from __future__ import annotations

import re
from inspect import signature
from pathlib import Path
from typing import ClassVar

import pytest

from hermes_ops.errors import ConfigError
from hermes_ops.policies import (
    GIVEN,
    POLICIES,
    live_policies,
    make_policy,
    needs_oracle,
    needs_shares,
)
from hermes_ops.testing import PolicyContract

pytestmark = pytest.mark.law

BUILTIN = POLICIES.builtin  # a package with policies may be installed
each_name = pytest.mark.parametrize("name", BUILTIN)


class TestEveryPolicy(PolicyContract):
    policies: ClassVar = BUILTIN


def test_an_unknown_policy_is_refused_with_the_known_names() -> None:
    with pytest.raises(ConfigError, match=r"fifo, .*hermes"):
        make_policy("best", {})


@pytest.mark.parametrize("parameters", [{"speed": 3}, {"threshold": 0}, {"threshold": "two"}])
def test_a_wrong_parameter_is_refused(parameters: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        make_policy("hermes", parameters)


def of_type(*types: type) -> list[tuple[str, str]]:
    """Each parameter of a policy whose default is of one of these types, with its policy."""
    pairs = ((name, p) for name in BUILTIN for p in signature(POLICIES[name]).parameters.values())
    return [(name, p.name) for name, p in pairs if type(p.default) in types]


@pytest.mark.parametrize(("name", "parameter"), of_type(bool))
def test_a_parameter_that_is_true_or_false_is_nothing_else(name: str, parameter: str) -> None:
    for value in ("off", 0, 1, None):
        with pytest.raises(ConfigError, match="true or false"):
            make_policy(name, {parameter: value})


@pytest.mark.parametrize(("name", "parameter"), of_type(int, float))
def test_a_parameter_that_is_a_number_is_never_none(name: str, parameter: str) -> None:
    with pytest.raises(ConfigError, match=parameter):
        make_policy(name, {parameter: None})


def documented() -> dict[str, tuple[str, set[str]]]:
    """Each policy of the table on docs/policies.md: where it runs, and its parameters."""
    text = (Path(__file__).parents[3] / "docs" / "policies.md").read_text(encoding="utf-8")
    table = text.partition("## All of them")[2].partition("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| `")]
    return {row[0].strip("`"): (row[3], set(re.findall(r"`(\w+)`", row[4]))) for row in rows}


@each_name
def test_the_documentation_says_where_a_policy_runs_and_what_it_takes(name: str) -> None:
    where, parameters = documented()[name]
    needs = {"oracle": needs_oracle(name), "shares": needs_shares(name)}
    assert where == next((f"simulation: {need}" for need in needs if needs[need]), "live")
    assert parameters == set(signature(POLICIES[name]).parameters) - set(GIVEN)
    assert (where == "live") == (name in live_policies())
