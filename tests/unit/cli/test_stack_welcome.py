"""What `hermes up` says at its end."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from hermes_ops.cli.stack_commands import _login
from hermes_ops.stack.lifecycle import _print_missed_variables
from hermes_ops.stack.settings import resolve


@pytest.fixture
def file(tmp_path: Path) -> Path:
    password = tmp_path / "admin.password"
    password.write_text("correct-horse\n")
    return password


def test_a_password_is_printed_to_a_terminal_alone(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert _login("admin", file) == "log in as admin / correct-horse"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: False)
    assert _login("admin", file) == f"log in as admin, password in {file}"


def test_up_names_what_scripts_often_need_and_do_not_inherit_and_never_a_value(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hush-value")
    monkeypatch.setenv("AWS_PROFILE", "named")
    said: list[str] = []
    settings = resolve(tmp_path, {"trial_environment": ("AWS_*",)}, {})
    _print_missed_variables(settings, said.append)
    (line,) = said
    assert "HF_TOKEN" in line
    assert "--trial-environment" in line
    assert not {"hush-value", "AWS_PROFILE"} & {*line.replace(",", "").split()}
