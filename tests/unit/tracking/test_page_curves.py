from __future__ import annotations

from typing import Any

import httpx
import pytest

from hermes_ops.tracking import Tracker


def test_the_curves_of_a_page_have_of_a_repeated_step_the_first_value_as_the_report_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def point(step: int, value: float, time_ms: int) -> dict[str, Any]:
        return {"run_id": "run-0", "value": value, "step": step, "timestamp": time_ms}

    stored = [point(1, 0.5, 1_000), point(2, 0.4, 2_000), point(2, 0.1, 9_000)]
    answer = httpx.Response(200, json={"metrics": stored})
    client = httpx.Client(transport=httpx.MockTransport(lambda _: answer))
    monkeypatch.setattr("hermes_ops.tracking.rest._new_client", lambda *_: client)
    curves = Tracker("http://mlflow").overview.curves(["run-0"], "loss", 30)
    assert curves == {"run-0": ((1, 0.5, 1_000), (2, 0.4, 2_000))}
