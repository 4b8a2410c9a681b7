from __future__ import annotations

import sys

import pytest

from hermes_ops.errors import StackError
from hermes_ops.stack import databases


def test_a_cleanup_that_takes_too_long_is_one_error_with_what_comes_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(databases, "CLEANUP_TIMEOUT_S", 0.1)
    endless = [sys.executable, "-c", "import time; time.sleep(600)"]
    with pytest.raises(StackError, match="more than an hour; the next `hermes prune` continues"):
        databases._clean(endless, {}, None, "", "MLflow's trash could not be emptied")
