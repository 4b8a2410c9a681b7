from __future__ import annotations

import configparser
import dataclasses
import importlib
import json
import sys
import time
from pathlib import Path

import psutil
import pytest
from airflow.sdk.bases.xcom import BaseXCom

from hermes_ops.errors import ConfigError
from hermes_ops.stack import airflow_service, credentials, programs
from hermes_ops.stack.layout import Layout, shared_folder
from hermes_ops.stack.record import StackRecord
from hermes_ops.stack.settings import Settings, resolve
from hermes_ops.stack.supervisor_client import SupervisorClient

ROOT = Path(__file__).parents[3]


def _settings(home: Path, **options: object) -> Settings:
    Layout(home).create()
    return resolve(home, {"slots": 2, **options}, {})


def _record(
    settings: Settings, standby: int = 0, trial_environment: tuple[str, ...] = ()
) -> StackRecord:
    return StackRecord(
        home=str(settings.home),
        airflow_url="http://127.0.0.1:8080",
        mlflow_url="http://127.0.0.1:5000",
        pool=settings.pool,
        slots=2,
        policy=settings.policy,
        policy_options=dict(settings.policy_options),
        mlflow_auth=settings.mlflow_auth,
        standby=standby,
        started_s=0.0,
        trial_environment=trial_environment,
    )


def _airflow(settings: Settings, slots: int = 2) -> configparser.ConfigParser:
    secrets = credentials.ensure(settings.layout)
    parsed = configparser.ConfigParser()
    parsed.read_string(airflow_service.render(settings, secrets, slots, 8080))
    return parsed


def test_airflow_listens_on_loopback_and_asks_for_a_log_in(tmp_path: Path) -> None:
    parsed = _airflow(_settings(tmp_path))
    assert parsed["api"]["host"] == "127.0.0.1"
    assert parsed["core"]["simple_auth_manager_users"] == "admin:admin,hermes-controller:user"


def test_the_executor_has_more_workers_than_the_pool_has_slots(tmp_path: Path) -> None:
    assert int(_airflow(_settings(tmp_path), slots=8)["core"]["parallelism"]) > 8


def test_a_percent_sign_in_a_database_password_survives_the_file(tmp_path: Path) -> None:
    url = "postgresql://user:pass%25word@127.0.0.1/airflow"
    parsed = _airflow(_settings(tmp_path, airflow_db=url))
    expected = "postgresql+psycopg2://user:pass%25word@127.0.0.1/airflow"
    assert parsed["database"]["sql_alchemy_conn"] == expected


def test_an_extra_folder_of_dags_is_a_bundle_of_its_own(tmp_path: Path) -> None:
    settings = _settings(tmp_path, dags=(tmp_path / "mine",))
    bundles = json.loads(_airflow(settings)["dag_processor"]["dag_bundle_config_list"])
    paths = [bundle["kwargs"]["path"] for bundle in bundles]
    assert paths == [str(shared_folder("dags")), str(tmp_path / "mine")]


def test_a_folder_of_dags_is_the_one_seen_from_where_it_was_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert _settings(tmp_path / "home", dags=(Path("mine"),)).dags == (tmp_path / "mine",)


def test_the_users_own_airflow_settings_win(tmp_path: Path) -> None:
    settings = _settings(tmp_path, airflow={"core": {"parallelism": "77"}, "smtp": {"a": "b"}})
    parsed = _airflow(settings)
    assert parsed["core"]["parallelism"] == "77"
    assert parsed["smtp"]["a"] == "b"


def test_a_dag_file_has_minutes_to_be_read_while_trials_use_all_processors(tmp_path: Path) -> None:
    """Airflow takes the DAGs of a file that it could not read in time for deleted ones."""
    parsed = _airflow(_settings(tmp_path))
    to_import_s = parsed.getfloat("core", "dagbag_import_timeout")
    whole_s = parsed.getint("dag_processor", "dag_file_processor_timeout")
    assert 180 <= to_import_s < whole_s
    chart = (ROOT / "helm/hermes-ops/templates/_airflow.tpl").read_text("utf-8")
    for name, seconds in (
        ("dagbag_import_timeout", to_import_s),
        ("dag_file_processor_timeout", whole_s),
    ):
        assert f'"{name}" "{seconds:g}"' in chart


def test_the_store_of_xcoms_is_one_that_airflow_takes(tmp_path: Path) -> None:
    module, _, name = _airflow(_settings(tmp_path))["core"]["xcom_backend"].rpartition(".")
    assert issubclass(getattr(importlib.import_module(module), name), BaseXCom)


def test_the_sweep_dag_is_found_in_this_installation() -> None:
    assert (shared_folder("dags") / "hermes_sweep.py").is_file()


def test_secrets_are_made_once_and_only_their_owner_reads_them(tmp_path: Path) -> None:
    layout = _settings(tmp_path).layout
    first, second = credentials.ensure(layout), credentials.ensure(layout)
    files = list(layout.secrets.iterdir())
    assert first == second
    assert first.admin_password != first.controller_password
    assert {file.stat().st_mode & 0o777 for file in files} == {0o600}
    assert first.admin_password not in repr(first)


def test_people_have_roles_in_airflow_and_passwords_that_airflow_need_not_print(
    tmp_path: Path,
) -> None:
    people = {"ann": "user", "vera": "viewer"}
    settings = _settings(tmp_path, people=people)
    secrets = credentials.ensure(settings.layout, settings.people)
    parsed = configparser.ConfigParser()
    parsed.read_string(airflow_service.render(settings, secrets, 2, 8080))
    users = parsed["core"]["simple_auth_manager_users"]
    assert users == "admin:admin,hermes-controller:user,ann:user,vera:viewer"
    file = settings.layout.person_password("ann")
    passwords = json.loads(settings.layout.airflow_passwords.read_text())
    assert passwords.keys() == {"admin", "hermes-controller", "ann", "vera"}
    assert passwords["ann"] == file.read_text() != passwords["vera"]
    credentials.ensure(settings.layout, settings.people)  # the next start
    assert json.loads(settings.layout.airflow_passwords.read_text()) == passwords


@pytest.mark.parametrize(
    "people",
    [{"ann": "boss"}, {"admin": "admin"}, {"hermes-controller": "op"}, {"a:admin": "user"},
     {"a,b": "user"}, {"../x": "user"}, {"": "user"}],
)  # fmt: skip
def test_people_with_other_roles_or_names_are_refused(tmp_path: Path, people: object) -> None:
    with pytest.raises(ConfigError, match="people"):
        _settings(tmp_path, people=people)


def test_no_program_has_a_secret_on_its_command_line(tmp_path: Path) -> None:
    url = "postgresql://user:hush@127.0.0.1/mlflow"
    settings = _settings(tmp_path, mlflow_db=url, mlflow_auth=True)
    secrets = credentials.ensure(settings.layout)
    table = programs.programs_of(settings, secrets, _record(settings))
    commands = " ".join(" ".join(program.command) for program in table)
    assert "hush" not in commands
    assert secrets.mlflow_password not in commands


def test_the_scheduler_and_so_every_trial_gets_no_key_of_the_services(tmp_path: Path) -> None:
    settings = _settings(tmp_path, mlflow_db="postgresql://user:hush@127.0.0.1/mlflow")
    secrets = credentials.ensure(settings.layout)
    chosen = _record(settings)
    table = programs.programs_of(settings, secrets, chosen)
    programs.write_configuration(settings.layout, table, chosen)
    written = json.loads(settings.layout.programs.read_text())["scheduler"]["environment"]
    values = " ".join(written.values())
    for secret in ("hush", secrets.fernet_key, secrets.jwt_secret, secrets.admin_password):
        assert secret not in values


def test_variables_of_the_callers_own_airflow_do_not_reach_the_stack(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = _settings(tmp_path)
    monkeypatch.setenv("HERMES_NODES", "node-a=2")
    monkeypatch.setenv("HERMES_POD_DEFAULTS", "/elsewhere")
    environment = programs.base_environment(_record(settings))
    assert environment["AIRFLOW_HOME"] == str(tmp_path / "airflow")
    assert "PYTHONDONTWRITEBYTECODE" not in environment
    assert "HERMES_POD_DEFAULTS" not in environment
    assert environment["HERMES_NODES"] == "node-a=2"


def test_a_program_inherits_what_is_listed_and_what_the_setting_names_where_trials_or_tasks_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "PGSSLMODE", "KUBECONFIG", "LC_TIME"):
        monkeypatch.setenv(name, f"of {name}")
    settings = _settings(tmp_path, trial_environment=("HF_TOKEN",))
    chosen = _record(settings, trial_environment=("HF_TOKEN",), standby=1)
    table = programs.programs_of(settings, credentials.ensure(settings.layout), chosen)
    programs.write_configuration(settings.layout, table, chosen)
    written = json.loads(settings.layout.programs.read_text())
    got = {name: program["environment"] for name, program in written.items()}
    assert all({"PATH", "PGSSLMODE", "KUBECONFIG", "LC_TIME"} <= e.keys() for e in got.values())
    assert not any("AWS_SECRET_ACCESS_KEY" in e for e in got.values())
    assert {n for n, e in got.items() if "HF_TOKEN" not in e} == {"mlflow", "standby", "liveness"}
    assert got["scheduler"]["HERMES_TRIAL_ENVIRONMENT"] == "HF_TOKEN"
    assert "HF_TOKEN" in programs.passed_to_trials(("HF_TOKEN",))
    assert not {"PGSSLMODE", "KUBECONFIG"} & {*programs.passed_to_trials(("HF_TOKEN",))}


def test_the_supervisor_itself_inherits_no_secret_of_the_shell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hush")
    settings = _settings(tmp_path)
    settings.layout.create()
    programs.write_configuration(settings.layout, [], _record(settings))
    supervisor = SupervisorClient(settings.layout)
    try:
        supervisor.start()
        pid = int(settings.layout.supervisor_pid.read_text())
        assert "AWS_SECRET_ACCESS_KEY" not in psutil.Process(pid).environ()
    finally:
        supervisor.shutdown()


@pytest.mark.parametrize("name", ["a%b c", "100%", "%(here)s ;x #y", "%20%s{x}'"])
def test_a_real_supervisor_runs_a_program_in_a_home_of_any_name(tmp_path: Path, name: str) -> None:
    settings = _settings(tmp_path / name)
    settings.layout.create()
    code = "import os, time; print(os.environ['HERMES_HOME'], flush=True); time.sleep(60)"
    table = [programs.Program("probe", (sys.executable, "-c", code))]
    programs.write_configuration(settings.layout, table, _record(settings))
    supervisor, log = SupervisorClient(settings.layout), settings.layout.log("probe")
    try:
        supervisor.start()
        supervisor.start_program("probe")
        deadline_s = time.monotonic() + 60
        while not (log.exists() and "\n" in log.read_text()) and time.monotonic() < deadline_s:
            time.sleep(0.05)
        assert log.read_text() == f"{tmp_path / name}\n"
        assert settings.layout.log("supervisor").exists()
        assert settings.layout.supervisor_pid.exists()
    finally:
        supervisor.shutdown()


def test_every_program_is_restarted_and_its_group_is_killed_in_the_end(tmp_path: Path) -> None:
    settings = _settings(tmp_path)
    chosen = _record(settings, standby=2)
    table = programs.programs_of(settings, credentials.ensure(settings.layout), chosen)
    programs.write_configuration(settings.layout, table, chosen)
    parsed = configparser.RawConfigParser()
    parsed.read_string(settings.layout.supervisor_config.read_text())
    sections = [name for name in parsed.sections() if name.startswith("program:")]
    assert len(sections) == len(table) == 8
    assert all(parsed[name]["autorestart"] == "true" for name in sections)
    assert all(parsed[name]["killasgroup"] == "true" for name in sections)


def test_only_the_api_server_waits_shortly_for_the_lock_of_sqlite(tmp_path: Path) -> None:
    def waits(**changes: str) -> dict[str, str | None]:
        settings = _settings(tmp_path, **changes)
        secrets = credentials.ensure(settings.layout)
        table = programs.programs_of(settings, secrets, _record(settings))
        name = "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN"
        return {p.name: p.environment[name] for p in table if name in p.environment}

    file = _settings(tmp_path).layout.airflow / "airflow.db"
    assert waits() == {"api-server": f"sqlite:///{file}?timeout=1.0"}
    assert waits(airflow_db="postgresql://u:p@host/airflow") == {}


def test_the_controller_answers_prometheus_where_the_record_says(tmp_path: Path) -> None:
    settings = _settings(tmp_path)
    record = dataclasses.replace(_record(settings), metrics_url="http://127.0.0.1:9464/metrics")
    table = programs.programs_of(settings, credentials.ensure(settings.layout), record)
    command = next(p.command for p in table if p.name == "controller")
    assert command[-2:] == ("--metrics-port", "9464")


def test_without_a_time_for_programs_that_hang_nothing_watches_for_them(tmp_path: Path) -> None:
    settings = _settings(tmp_path, hang_timeout_s=0)
    table = programs.programs_of(settings, credentials.ensure(settings.layout), _record(settings))
    assert programs.LIVENESS not in {program.name for program in table}
