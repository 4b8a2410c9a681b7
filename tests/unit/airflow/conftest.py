"""Airflow is imported here once, with a home of its own: it writes into its home as it starts."""

from __future__ import annotations

import atexit
import importlib
import os
import shutil
import tempfile
from pathlib import Path
from unittest import mock

import pytest

_AIRFLOW_HOME = tempfile.mkdtemp(prefix="hermes-test-airflow-")
atexit.register(shutil.rmtree, _AIRFLOW_HOME, ignore_errors=True)
with mock.patch.dict(os.environ, {"AIRFLOW_HOME": _AIRFLOW_HOME}):
    importlib.import_module("airflow.configuration")
    importlib.import_module("hermes_ops.airflow.trial.operator")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A state folder for each test, and none of the caller's settings."""
    for name in [n for n in os.environ if n.startswith("HERMES_")]:
        monkeypatch.delenv(name)
    folder = tmp_path / "home"
    folder.mkdir()
    monkeypatch.setenv("HERMES_HOME", str(folder))
    return folder
