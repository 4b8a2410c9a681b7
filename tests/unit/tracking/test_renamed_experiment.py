from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from hermes_ops.errors import Refused
from hermes_ops.tracking import Tracker
from hermes_ops.tracking.tracker import require_sweep


def run(run_id: str, experiment: str, name: str) -> dict[str, Any]:
    tags = {"hermes.sweep": "digits-1", "hermes.kind": "sweep", "hermes.name": name}
    info = {"run_id": run_id, "experiment_id": experiment, "start_time": 1, "status": "RUNNING"}
    return {"info": info, "data": {"tags": [{"key": k, "value": v} for k, v in tags.items()]}}


@pytest.fixture
def tracker(monkeypatch: pytest.MonkeyPatch) -> Tracker:
    """Return a client of an MLflow in which no experiment has its first name any more."""
    runs = [run("other", "1", "letters"), run("ours", "2", "digits")]

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path.endswith("get-by-name"):
            return httpx.Response(404, json={"error_code": "RESOURCE_DOES_NOT_EXIST"})
        if request.url.path.endswith("experiments/search"):
            found = [{"experiment_id": "1"}, {"experiment_id": "2"}]
            return httpx.Response(200, json={"experiments": found})
        asked = json.loads(request.content)["experiment_ids"]
        return httpx.Response(
            200, json={"runs": [r for r in runs if r["info"]["experiment_id"] in asked]}
        )

    client = httpx.Client(transport=httpx.MockTransport(answer))
    monkeypatch.setattr("hermes_ops.tracking.rest._new_client", lambda *_: client)
    return Tracker("http://mlflow")


def test_a_sweep_of_an_experiment_that_was_renamed_is_found_by_its_own_name(
    tracker: Tracker,
) -> None:
    assert require_sweep(tracker, "digits-1", "digits").parent_run_id == "ours"
    assert require_sweep(tracker, "digits-1", "letters").parent_run_id == "other"


def test_a_sweep_of_the_same_id_and_another_name_is_another_one(tracker: Tracker) -> None:
    with pytest.raises(Refused, match="knows no sweep"):
        require_sweep(tracker, "digits-1", "words")
