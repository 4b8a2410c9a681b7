from __future__ import annotations

from pathlib import Path

import pytest

from hermes_ops.config.pool_quota import PoolQuota, load_quota, refuse_class
from hermes_ops.core.priority_class import PriorityClass
from hermes_ops.core.quota import TeamQuota, UserBudget
from hermes_ops.errors import ConfigError

GOOD = """\
teams:
  - {name: vision, guaranteed: 8, borrow: 4, weight: 2, users: [ann, bob]}
  - name: speech
    guaranteed: 4
users:
  - {name: ann, gpus: 4}
  - {name: bob, sweeps: 1, gpu_hours_per_day: 1.5}
half_life_hours: 24
"""


def load(tmp_path: Path, text: str, gpus: int | None = 16) -> PoolQuota:
    file = tmp_path / "quota.yaml"
    file.write_text(text)
    return load_quota(file, gpus)


def test_a_quota_file_becomes_the_quota_of_the_core(tmp_path: Path) -> None:
    read = load(tmp_path, GOOD)
    quota = read.quota()
    assert quota.teams == (TeamQuota("vision", 8, 4, 2.0), TeamQuota("speech", 4))
    assert quota.limit_of_user == {"ann": 4}
    assert quota.user_budgets == (UserBudget("bob", 1, 5_400.0),)
    assert quota.half_life_s == 86_400
    assert read.team_of_user == {"ann": "vision", "bob": "vision"}


def test_a_team_of_airflow_counts_before_the_owner_of_a_sweep(tmp_path: Path) -> None:
    read = load(tmp_path, "teams: [{name: a, airflow_team: x}, {name: b, users: [ann]}]")
    assert [read.team_of("ann", team) for team in ("x", "y", "")] == ["a", "b", "b"]
    assert read.team_of("bob", "y") == ""


@pytest.mark.parametrize(
    ("text", "where", "words"),
    [
        ("teams: [{name: a, guaranteed: -1}]", "quota.yaml:1 teams[0].guaranteed", "0 or more"),
        ("teams: [{name: a, weight: .nan}]", "teams[0].weight", "number"),
        ("teams: [{name: a, weight: 0}]", "teams[0].weight", "0.000001 or more"),
        ("teams: [{name: a, weight: 1.0e-320}]", "teams[0].weight", "0.000001 or more"),
        ("teams: [{name: a, guarantee: 2}]", "teams[0].guarantee", "did you mean guaranteed?"),
        ("teams: [{guaranteed: 2}]", "teams[0].name", "nothing"),
        (
            "teams: [{name: a, teams: [{name: b}]}]",
            "teams[0].teams",
            "to teams, which is never",
        ),
        ("team: []", "team", "did you mean teams?"),
        ("teams: [{name: a, users: [' ann']}]", "teams[0].users[0]", "without blanks around it"),
        ("teams: [{name: 'a '}]", "teams[0].name", "Fix: write a"),
        ("teams: [{name: a}, {name: a}]", "teams[1].name", "each name once"),
        ("teams: [{name: a, users: [x]}, {name: b, users: [x]}]", "teams[1].users[0]", "in 'a'"),
        (
            "teams: [{name: a, airflow_team: x}, {name: b, airflow_team: x}]",
            "teams[1].airflow_team",
            "each of Airflow's teams once",
        ),
        ("teams: [{name: a, guaranteed: 17}]", "teams", "at most 16, which the pool has"),
        ("teams: []\nusers: [{name: x, gpus: 1.5}]", "quota.yaml:2 users[0].gpus", "whole number"),
        ("teams: []\nusers: [{name: x, sweeps: -1}]", "users[0].sweeps", "0 or more"),
        (
            "teams: []\nusers: [{name: x, gpu_hours_per_day: .nan}]",
            "quota.yaml:2 users[0].gpu_hours_per_day",
            "number",
        ),
        ("teams: []\nclasses: [{name: gold}]", "quota.yaml:2 classes[0].priority", "100, normal"),
        (
            "teams: [{name: vision}]\nclasses: [{name: nightly, teams: [vison]}]",
            "quota.yaml:2 classes[0].teams[0]",
            "did you mean vision?",
        ),
        (
            "teams: []\nclasses: [{name: normal}, {name: normal}]",
            "classes[1].name",
            "each name once",
        ),
        ("teams: []\nclasses: [{name: a b, priority: 1}]", "classes[0].name", "name: a-b"),
        ("teams: []\nclasses: [{name: a, priority: .nan}]", "classes[0].priority", "whole number"),
        ("teams: []\nreclaim_notice_seconds: -1", "reclaim_notice_seconds", "0 or more"),
        ("- 1", "", "mapping"),
    ],
)
def test_a_mistake_is_named_with_its_line_and_the_remedy(
    tmp_path: Path, text: str, where: str, words: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        load(tmp_path, text)
    message = str(raised.value)
    assert where in message
    assert words in message
    assert "Fix: " in message


def test_the_file_adds_classes_and_says_who_may_use_the_built_in_ones(tmp_path: Path) -> None:
    read = load(
        tmp_path,
        "teams: [{name: vision, users: [ann]}]\n"
        "classes:\n"
        "  - {name: gold, priority: 50, teams: [vision]}\n"
        "  - {name: interactive, users: [eve]}\n"
        "  - {name: nightly, priority: -5}\n"
        "reclaim_notice_seconds: 30",
    )
    assert read.quota().classes == (
        PriorityClass("interactive", 100, users=frozenset({"eve"})),
        PriorityClass("gold", 50, teams=frozenset({"vision"})),
        PriorityClass("normal", 0),
        PriorityClass("nightly", -5),
    )
    assert read.quota().reclaim_notice_s == 30.0
    assert read.quota().priorities == {
        "": 0, "interactive": 100, "gold": 50, "normal": 0, "nightly": -5
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "user", "words"),
    [
        ("gold", "ann", "user ann of team vision may not use the class 'gold'"),
        ("gold", "bob", "user bob may not use the class 'gold'"),
        ("golden", "eve", "has no class 'golden'; allowed: one of gold, interactive, normal"),
    ],
)
def test_a_class_that_a_user_may_not_use_is_refused_with_those_that_he_may(
    tmp_path: Path, name: str, user: str, words: str
) -> None:
    quota = load(
        tmp_path,
        "teams: [{name: vision, users: [ann]}]\n"
        "classes: [{name: gold, priority: 500, users: [eve]}]",
    )
    refuse_class(quota, "gold", "eve", "sweep.yaml")
    refuse_class(quota, None, user, "sweep.yaml")
    with pytest.raises(ConfigError) as refused:
        refuse_class(quota, name, user, "sweep.yaml")
    assert words in str(refused.value)
    assert "class: found" in str(refused.value)
    assert "Fix: name one of those" in str(refused.value)


def test_guarantees_are_not_compared_with_a_pool_of_unknown_size(tmp_path: Path) -> None:
    assert load(tmp_path, "teams: [{name: a, guaranteed: 17}]", None).teams[0].guaranteed == 17
