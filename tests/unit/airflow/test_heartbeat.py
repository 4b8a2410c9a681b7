from __future__ import annotations

from typing import Any
from urllib.error import URLError

import pytest

from hermes_ops.airflow.heartbeat import main, problem


def shown(**status: str | None) -> dict[str, Any]:
    return {name: {"status": value} for name, value in status.items()}


def test_a_component_without_a_heartbeat_is_named() -> None:
    document = shown(triggerer="unhealthy", dag_processor="healthy")
    assert problem("triggerer", lambda: document) == "triggerer: unhealthy"
    assert problem("dag_processor", lambda: document) is None
    assert problem("triggerer", lambda: shown(triggerer=None)) == "triggerer: None"
    assert problem("triggerer", dict) == "triggerer: None"


@pytest.mark.parametrize("failure", [URLError("refused"), TimeoutError(), ValueError("no JSON")])
def test_an_api_server_that_is_away_says_nothing_against_it(failure: Exception) -> None:
    def away() -> dict[str, Any]:
        raise failure

    assert problem("triggerer", away) is None
    assert problem("triggerer", away, strict=True) is not None


def test_an_unknown_component_is_refused() -> None:
    assert main(["webserver"]) == 2
    assert main([]) == 2
    assert main(["--strict"]) == 2
