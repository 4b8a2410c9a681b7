"""The interpreters that the Keras tests are run in: Keras 3 in this one, others in their own."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
KERAS_2 = Path(os.environ.get("HERMES_TEST_KERAS2_PYTHON", ROOT / ".venvs/keras2/bin/python"))
JAX = Path(os.environ.get("HERMES_TEST_KERAS_JAX_PYTHON", ROOT / ".venvs/keras-jax/bin/python"))
TORCH = os.environ.get("HERMES_TEST_KERAS_TORCH_PYTHON")


@pytest.fixture(params=["keras3", "keras2"])
def interpreter(request: pytest.FixtureRequest) -> str:
    if request.param == "keras3":
        return sys.executable
    if not KERAS_2.exists():
        message = f"no Keras 2 interpreter at {KERAS_2}"
        if os.environ.get("HERMES_TEST_KERAS2") == "required":
            pytest.fail(message)
        pytest.skip(message)
    return str(KERAS_2)


@pytest.fixture(params=["jax", "torch"])
def backend(request: pytest.FixtureRequest) -> tuple[str, str]:
    """Keras 3 on another backend: its name and an interpreter that has it."""
    python = str(JAX) if request.param == "jax" else TORCH
    if python is None:
        pytest.skip("HERMES_TEST_KERAS_TORCH_PYTHON names no interpreter with Keras and PyTorch")
    return request.param, python
