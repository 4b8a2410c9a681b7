"""The policies' contract over every entry of POLICIES; the documentation of each."""

from __future__ import annotations

import pickle
import re
from dataclasses import replace
from inspect import signature
from pathlib import Path
from typing import ClassVar

import pytest

from hermes_ops.core.model import Gpu, Job, JobId, Phase, Point, Snapshot, SweepId
from hermes_ops.core.sizes import StepTime
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
from hermes_ops.testing.worlds import Fortune, built

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


REMEMBERED = {"qssf": {"remembered": 8}}  # where a parameter bounds what ended jobs leave


def remembers(name: str) -> bool:
    """Whether the policy has a memory."""
    return built(name, "bare").initial() is not None


def night(number: int, ended: bool) -> list[Job]:
    """A sweep of two trials: the first one runs and the other is new, or both have ended."""
    begun_s, points = 1e6 + 100.0 * number, tuple(Point(k, 1 / k, k * 10.0) for k in (1, 2, 3))
    jobs = []
    for trial in (0, 1):
        phase = Phase.ENDED if ended else (Phase.RUNNING, Phase.PENDING)[trial]
        job = Job(
            JobId(f"night-{number:05d}/{trial}"), SweepId(f"night-{number:05d}"), begun_s, phase,
            max_gpus=2, total_steps=4, waiting_since_s=begun_s,
        )  # fmt: skip
        if phase is not Phase.PENDING:
            job = replace(
                job, total_steps=3 if ended else 4, curve=points, configuration=(("rate", 0.1),),
                service_gpu_s=30.0, step_times=(StepTime(1, 10.0),), waiting_since_s=None,
            )  # fmt: skip
        if phase is Phase.RUNNING:
            job = replace(job, gpus_held=(number % 2,), started_s=begun_s, service_at_s=begun_s)
        jobs.append(job)
    return jobs


@pytest.mark.parametrize("name", [name for name in BUILTIN if remembers(name)])
def test_no_memory_grows_with_the_sweeps_that_have_ended(name: str) -> None:
    policy = make_policy(name, REMEMBERED.get(name, {}), {"oracle": Fortune()})
    memory, gpus, bytes_by_night = policy.initial(), tuple(map(Gpu, range(4))), {}
    for number in range(1, 2_001):
        jobs = (*night(number, ended=False), *night(number - 1, ended=True))
        _, memory = policy.decide(Snapshot(1e6 + 100.0 * number, gpus, jobs), memory)
        if number in (1_000, 2_000):
            bytes_by_night[number] = len(pickle.dumps(memory))
    assert bytes_by_night[2_000] <= bytes_by_night[1_000] + 100
