"""For all tests of trials' tasks: what one leaves to be done later is not done in another."""

from __future__ import annotations

import pytest

from hermes_ops.airflow.trial import segment_run


@pytest.fixture(autouse=True)
def nothing_is_left_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment_run, "_pending", [])
