from __future__ import annotations

import shutil
import socket
from collections import namedtuple
from pathlib import Path

import pytest

from hermes_ops.errors import ConfigError, StackError
from hermes_ops.stack import preflight
from hermes_ops.stack.layout import Layout
from hermes_ops.stack.settings import resolve


def _fake_smi(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")


def test_the_slots_are_the_gpus_that_nvidia_smi_lists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _fake_smi(tmp_path, "echo 'GPU 0: H (UUID: a)'; echo 'GPU 1: H (UUID: b)'", monkeypatch)
    assert preflight.slots_of(resolve(tmp_path, {}, {})) == 2


def test_slots_that_are_given_win_over_the_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _fake_smi(tmp_path, "echo 'GPU 0: H (UUID: a)'", monkeypatch)
    assert preflight.slots_of(resolve(tmp_path, {"slots": 5}, {})) == 5


def test_without_gpus_and_slots_the_error_names_the_option(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _fake_smi(tmp_path, "exit 9", monkeypatch)
    with pytest.raises(StackError, match="--slots N"):
        preflight.slots_of(resolve(tmp_path, {}, {}))


def test_a_taken_port_is_named_with_the_option_that_changes_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(StackError, match=rf"Port {port} .*--mlflow-port N") as refused:
            preflight.choose_port(port, "--mlflow-port")
    assert "\n" not in str(refused.value)


def test_port_zero_takes_a_free_one() -> None:
    assert preflight.choose_port(0, "--airflow-port") > 1023


def test_a_full_disk_is_one_line_with_its_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")(10**12, 10**12, 3 * 1024**2)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(StackError, match=r"full \(3 MiB free.*--home") as refused:
        preflight.check_disk(Layout(tmp_path))
    assert "\n" not in str(refused.value)


def test_a_home_that_cannot_be_a_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StackError, match="--home"):
        preflight.prepare_home(Layout(tmp_path / "file"))


def test_a_home_too_long_for_a_socket_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StackError, match="too long for UNIX sockets"):
        preflight.prepare_home(Layout(tmp_path / ("x" * 100)))


def test_the_home_is_its_owners_alone(tmp_path: Path) -> None:
    preflight.prepare_home(Layout(tmp_path / "home"))
    assert (tmp_path / "home").stat().st_mode & 0o777 == 0o700


def test_an_unknown_policy_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        preflight.check_policy(resolve(tmp_path, {"policy": "no-such-policy"}, {}))


@pytest.mark.parametrize("policy", ["srsf", "flowcon"])
def test_a_policy_that_only_a_simulation_can_run_is_refused_before_anything_starts(
    tmp_path: Path, policy: str
) -> None:
    with pytest.raises(ConfigError, match="simulation only"):
        preflight.check_policy(resolve(tmp_path, {"policy": policy}, {}))


def test_the_guards_options_are_not_the_policys(tmp_path: Path) -> None:
    options = {"policy": "fifo", "policy_options": {"guard_k": 2.0}}
    preflight.check_policy(resolve(tmp_path, options, {}))


def test_an_extra_dag_folder_that_is_absent_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StackError, match="--dags"):
        preflight.check_dags(resolve(tmp_path, {"dags": (tmp_path / "none",)}, {}))


def test_a_database_that_does_not_answer_is_named_without_its_password(tmp_path: Path) -> None:
    pytest.importorskip("psycopg2")
    url = "postgresql://user:hush@127.0.0.1:1/name"
    with pytest.raises(StackError, match="--airflow-db") as refused:
        preflight.check_databases(resolve(tmp_path, {"airflow_db": url}, {}))
    assert "hush" not in str(refused.value)
