"""The interpreters that the Keras tests are run in: Keras 3 in this one, Keras 2 in its own."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
KERAS_2 = Path(os.environ.get("HERMES_TEST_KERAS2_PYTHON", ROOT / ".venvs/keras2/bin/python"))


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
