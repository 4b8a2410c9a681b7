from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from hermes_ops.errors import ConfigError, StackError
from hermes_ops.stack import record
from hermes_ops.stack.layout import Layout
from hermes_ops.stack.preflight import check_policy
from hermes_ops.stack.settings import resolve


def test_an_option_wins_over_the_environment_and_that_over_the_file(tmp_path: Path) -> None:
    (tmp_path / "hermes.toml").write_text('slots = 1\npool = "file"\npolicy = "fifo"\n')
    environment = {"HERMES_SLOTS": "2", "HERMES_POOL": "environment"}
    settings = resolve(tmp_path, {"slots": 3, "pool": None}, environment)
    assert (settings.slots, settings.pool, settings.policy) == (3, "environment", "fifo")


def test_without_any_setting_the_ports_are_8080_and_5000(tmp_path: Path) -> None:
    settings = resolve(tmp_path, {}, {})
    assert (settings.airflow_port, settings.mlflow_port, settings.pool) == (8080, 5000, "gpus")


def test_an_unknown_setting_is_refused_with_its_name_and_file(tmp_path: Path) -> None:
    (tmp_path / "hermes.toml").write_text("slotts = 1\n")
    with pytest.raises(ConfigError, match=r"slotts.*unknown setting.*slots.*hermes\.toml"):
        resolve(tmp_path, {}, {})


def test_a_broken_settings_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "hermes.toml").write_text("slots = \n")
    with pytest.raises(ConfigError, match=r"hermes\.toml"):
        resolve(tmp_path, {}, {})


@pytest.mark.parametrize(
    ("name", "value"),
    [("slots", 0), ("airflow_port", 70000), ("pool", "a b"), ("standby", -1)],
)
def test_a_value_out_of_range_is_refused_with_its_option(
    tmp_path: Path, name: str, value: object
) -> None:
    with pytest.raises(ConfigError, match=f"--{name.replace('_', '-')}"):
        resolve(tmp_path, {name: value}, {})


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("slots", 0, "allowed: 1 or more. Fix"),
        ("mlflow_port", 70000, "allowed: 65535 or less. Fix"),
        ("mlflow_db", "mysql://x", "allowed: only postgresql://"),
        ("pool", "a b", "allowed: a text that matches the pattern"),
        ("policy", 3, "allowed: a text. Fix"),
    ],
)
def test_what_a_setting_allows_is_said_in_plain_words(
    tmp_path: Path, name: str, value: object, allowed: str
) -> None:
    with pytest.raises(ConfigError, match=allowed):
        resolve(tmp_path, {name: value}, {})


def test_names_of_trial_variables_are_separated_by_commas_and_may_end_with_a_star(
    tmp_path: Path,
) -> None:
    (tmp_path / "hermes.toml").write_text('trial_environment = ["DATA", "HF_*"]\n')
    named = {"HERMES_TRIAL_ENVIRONMENT": "HF_TOKEN,AWS_*"}
    assert resolve(tmp_path, {}, {}).trial_environment == ("DATA", "HF_*")
    assert resolve(tmp_path, {}, named).trial_environment == ("HF_TOKEN", "AWS_*")


@pytest.mark.parametrize("name", ["*", "A B", "A=b", "9A", "AIRFLOW__CORE__FERNET_KEY", "HERMES_*"])
def test_a_name_that_no_trial_may_inherit_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=r"--trial-environment") as refused:
        resolve(tmp_path, {"trial_environment": (name,)}, {})
    assert name in str(refused.value)


def test_a_settings_file_that_is_not_utf_8_is_refused_by_its_name(tmp_path: Path) -> None:
    file = tmp_path / "hermes.toml"
    file.write_bytes('pool = "café"\n'.encode("latin-1"))
    with pytest.raises(ConfigError, match="a TOML file") as refused:
        resolve(tmp_path, {}, {})
    assert str(file) in str(refused.value)


@pytest.mark.parametrize(
    ("text", "fix"),
    [
        ('[people]\nann = "king"', "correct {file}"),
        ("[airflow.core]\nparallelism = 4", "correct {file}"),
        ("slotz = 2", "correct {file}"),
        ("drain_timeout_s = -1", "correct HERMES_DRAIN_TIMEOUT_S or {file}"),
        ("policy_options = 3", "correct --policy-option or HERMES_POLICY_OPTIONS or {file}"),
        ("slots = 0", "correct --slots or HERMES_SLOTS or {file}"),
    ],
)
def test_the_remedy_names_the_places_in_which_a_setting_can_be(
    tmp_path: Path, text: str, fix: str
) -> None:
    file = tmp_path / "hermes.toml"
    file.write_text(f"{text}\n")
    with pytest.raises(ConfigError) as refused:
        resolve(tmp_path, {}, {})
    assert [p.fix for p in refused.value.problems] == [fix.format(file=file)]


def test_a_refused_database_address_never_shows_its_password(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        resolve(tmp_path, {"airflow_db": "mysql://user:hush@host/name"}, {})
    assert "hush" not in str(refused.value)
    assert "--airflow-db" in str(refused.value)


def test_policy_options_in_the_environment_are_pairs_or_json(tmp_path: Path) -> None:
    pairs = resolve(tmp_path, {}, {"HERMES_POLICY_OPTIONS": "k=3,mode=queue"})
    text = resolve(tmp_path, {}, {"HERMES_POLICY_OPTIONS": '{"k": 3, "mode": "queue"}'})
    assert pairs.policy_options == text.policy_options == {"k": 3, "mode": "queue"}


@pytest.mark.parametrize("written", ["limits_gpu_s=[300,1200]", '{"limits_gpu_s": [300, 1200]}'])
def test_a_policy_option_may_be_a_list_and_reaches_the_policy(tmp_path: Path, written: str) -> None:
    options = {"policy": "2d-las"}
    settings = resolve(tmp_path, options, {"HERMES_POLICY_OPTIONS": written})
    check_policy(settings)
    assert settings.policy_options == {"limits_gpu_s": (300, 1200)}
    layout = Layout(tmp_path)
    layout.create()
    record.save(layout, replace(_record(tmp_path), policy_options=settings.policy_options))
    environment = record.client_environment(tmp_path)
    assert json.loads(environment["HERMES_POLICY_OPTIONS"]) == {"limits_gpu_s": [300, 1200]}


@pytest.mark.parametrize("written", ["{", "k"])
def test_policy_options_that_cannot_be_read_are_refused_with_the_way_to_write_them(
    tmp_path: Path, written: str
) -> None:
    with pytest.raises(ConfigError, match=r"k=v|NAME=VALUE"):
        resolve(tmp_path, {}, {"HERMES_POLICY_OPTIONS": written})


def _record(home: Path, mlflow_auth: bool = False) -> record.StackRecord:
    return record.StackRecord(
        home=str(home),
        airflow_url="http://127.0.0.1:1",
        mlflow_url="http://127.0.0.1:2",
        pool="gpus",
        slots=2,
        policy="hermes",
        policy_options={"k": 3},
        mlflow_auth=mlflow_auth,
        standby=0,
        started_s=1.0,
    )


def test_a_client_gets_the_addresses_and_the_password_file_but_no_password(tmp_path: Path) -> None:
    layout = Layout(tmp_path)
    layout.create()
    record.save(layout, _record(tmp_path))
    environment = record.client_environment(tmp_path)
    assert environment["HERMES_AIRFLOW_URL"] == "http://127.0.0.1:1"
    assert environment["MLFLOW_TRACKING_URI"] == "http://127.0.0.1:2"
    assert environment["HERMES_AIRFLOW_USER"] == "hermes-controller"
    assert json.loads(environment["HERMES_POLICY_OPTIONS"]) == {"k": 3}
    assert "MLFLOW_TRACKING_PASSWORD" not in environment


def test_with_mlflows_log_in_on_a_client_gets_its_user_and_password(tmp_path: Path) -> None:
    layout = Layout(tmp_path)
    layout.create()
    layout.mlflow_password.write_text("secret\n")
    environment = record.environment_of(_record(tmp_path, mlflow_auth=True))
    assert environment["MLFLOW_TRACKING_USERNAME"] == "admin"
    assert environment["MLFLOW_TRACKING_PASSWORD"] == "secret"


def test_a_home_where_nothing_was_started_names_the_command_to_start_it(tmp_path: Path) -> None:
    with pytest.raises(StackError, match="hermes up"):
        record.client_environment(tmp_path)


def test_a_damaged_record_names_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "stack.json").write_text("{")
    with pytest.raises(StackError, match="hermes down"):
        record.load(tmp_path)


def test_loopback_is_kept_away_from_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "example.org,localhost")
    assert record.quiet_environment()["NO_PROXY"] == "example.org,localhost,127.0.0.1"
