"""The interpreter with PyTorch that tests run their scripts in."""

from __future__ import annotations

import importlib.util
import os
import sys

import pytest


def torch_python() -> str:
    """Return HERMES_TEST_TORCH_PYTHON, or this interpreter if it has PyTorch.

    Without one the test is skipped, or fails where PyTorch is required.
    """
    named = os.environ.get("HERMES_TEST_TORCH_PYTHON")
    if named or importlib.util.find_spec("torch"):
        return named or sys.executable
    message = "HERMES_TEST_TORCH_PYTHON names no interpreter with PyTorch"
    if os.environ.get("HERMES_TEST_TORCH") == "required":
        pytest.fail(message)
    pytest.skip(message)
