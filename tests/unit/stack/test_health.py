"""The wait for the parts of a stack: what it says of one that does not answer in time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hermes_ops.errors import StackError
from hermes_ops.stack.health import HealthCheck, HealthGate
from hermes_ops.stack.layout import Layout


class Supervised:
    """A supervisor all of whose programs run."""

    def states(self) -> list[Any]:
        return []


def test_a_part_that_does_not_answer_in_time_is_named_with_the_limit_and_how_to_raise_it(
    tmp_path: Path,
) -> None:
    layout = Layout(tmp_path)
    layout.log("mlflow").parent.mkdir(parents=True)
    layout.log("mlflow").write_text("It computes.\n")
    gate = HealthGate(layout, Supervised(), 0.0)  # type: ignore[arg-type]
    checks = [HealthCheck("api-server", lambda: None), HealthCheck("mlflow", lambda: "no answer")]
    with pytest.raises(StackError) as raised:
        gate.wait(checks)
    first, *lines = str(raised.value).splitlines()
    assert first.startswith("mlflow did not become healthy: no answer after 0 s (")
    assert "start_timeout_s in hermes.toml" in first
    assert lines == ["    It computes."]
