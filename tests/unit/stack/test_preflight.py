from __future__ import annotations

import errno
import os
import random
import socket
from pathlib import Path

import pytest

from hermes_ops.errors import ConfigError, StackError
from hermes_ops.stack import preflight
from hermes_ops.stack.layout import Layout, write_private
from hermes_ops.stack.settings import resolve
from hermes_ops.trial.disk_space import DiskSpace, disks_of


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


def test_port_zero_takes_a_free_one_that_no_outgoing_connection_is_given() -> None:
    assert preflight.choose_port(0, "--airflow-port") in range(20_000, 30_000)


@pytest.mark.parametrize("others", ["airflow", "mlflow"])
def test_a_port_of_the_metrics_that_is_another_services_is_refused(
    tmp_path: Path, others: str
) -> None:
    port = preflight.free_port()
    ports = {"airflow_port": 0, "mlflow_port": 0, f"{others}_port": port, "metrics_port": port}
    with pytest.raises(StackError, match=rf"--{others}-port and --metrics-port cannot share"):
        preflight.check_ports(resolve(tmp_path, ports, {}), ())


def test_ports_in_use_are_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = server.getsockname()[1]
        free = preflight.free_port()
        monkeypatch.setattr(random, "sample", lambda *_: [taken, free])
        assert preflight.free_port() == free
        monkeypatch.setattr(random, "sample", lambda *_: [taken])
        assert preflight.free_port() not in (0, taken)


def _disk(free_bytes: int, free_files: int | None = None) -> DiskSpace:
    return DiskSpace(Path("/state"), free_bytes, 10 * 1024**3, free_files)


def test_a_full_disk_is_one_line_with_its_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "disks_of", lambda _: [_disk(3 * 1024**2)])
    with pytest.raises(StackError, match=r"full \(3.0 MiB free of 10.0 GiB.*--home") as refused:
        preflight.check_disks(Layout(tmp_path))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("disk", "words"),
    [
        (_disk(3 * 1024**2), "is full (3.0 MiB free of 10.0 GiB)"),
        (_disk(5 * 1024**3, 3), "is full (5.0 GiB free of 10.0 GiB, room for 3 more files)"),
        (_disk(700 * 1024**2), "is nearly full (700 MiB free of 10.0 GiB; below 2.0 GiB"),
    ],
)
def test_a_disk_that_fills_up_is_said_with_its_numbers(disk: DiskSpace, words: str) -> None:
    (line,) = preflight.disk_lines([disk])
    assert words in line
    assert "ree some space" in line


def test_a_disk_with_space_is_not_mentioned() -> None:
    assert preflight.disk_lines([_disk(3 * 1024**3), _disk(3 * 1024**3, 10**6)]) == []


def test_each_disk_of_the_home_is_looked_at_once(tmp_path: Path) -> None:
    layout = Layout(tmp_path)
    layout.create()
    (disk,) = disks_of(layout.folders)
    assert (disk.folder, disk.total_bytes > 0) == (tmp_path, True)


STEPS = ("open", "fsync", "replace")


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS])
def test_a_file_that_cannot_be_written_keeps_its_content_and_leaves_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, number: int
) -> None:
    path = tmp_path / "stack.json"
    write_private(path, "before")

    def fails(*_: object, **__: object) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, step, fails)
    with pytest.raises(StackError, match=rf"stack.json cannot be written \({os.strerror(number)}"):
        write_private(path, "after")
    monkeypatch.undo()
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [(path.name, "before")]


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


@pytest.mark.parametrize("option", [{"guard_kk": 2.0}, {"guard_k": "abc"}])
def test_a_wrong_option_of_the_guards_is_refused_before_anything_starts(
    tmp_path: Path, option: dict[str, object]
) -> None:
    options = {"policy": "fifo", "policy_options": option}
    with pytest.raises(ConfigError, match="guard_k"):
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
