"""What `hermes up` says at its end."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from hermes_ops.cli.stack_commands import _login


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
