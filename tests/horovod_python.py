"""The interpreter with Horovod that tests run their scripts in, and its variables."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bench import horovod_env
from bench.measure import NotMeasuredError

# Milliseconds. Ranks that wait ask each other a thousand times a second by default: a quarter of a
# core each.
VARIABLES = {**horovod_env.VARIABLES, "HOROVOD_CYCLE_TIME": "10"}


def horovod_python() -> Path:
    """Return the interpreter; skip the test, or fail it where Horovod is required, without one."""
    try:
        return horovod_env.interpreter()
    except NotMeasuredError as error:
        if os.environ.get("HERMES_TEST_HOROVOD") == "required":
            pytest.fail(str(error))
        pytest.skip(str(error))
