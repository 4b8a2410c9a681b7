from __future__ import annotations

from pathlib import Path

import pytest

from hermes_ops.config.pool_quota import PoolQuota, load_quota
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
        ("team: []", "team", "did you mean teams?"),
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


def test_guarantees_are_not_compared_with_a_pool_of_unknown_size(tmp_path: Path) -> None:
    assert load(tmp_path, "teams: [{name: a, guaranteed: 17}]", None).teams[0].guaranteed == 17
