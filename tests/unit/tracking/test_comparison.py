from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hermes_ops.config import parse
from hermes_ops.errors import Refused, Unavailable
from hermes_ops.tracking.comparison import (
    MOST_COLUMNS,
    MOST_VIEWS,
    VIEW_TAG,
    ComparedSweep,
    SharedViews,
    comparison_path,
    view_key,
    view_text,
)
from hermes_ops.tracking.runs import SweepRef

REF = SweepRef("digits-1", "7", "parent")
COMPARED = ComparedSweep("val_loss", "minimize", ("rate", "drop"), 16)


def state_of(text: str) -> dict[str, Any]:
    """What MLflow's page of runs unpacks of such a tag."""
    packed = json.loads(text)["state"]
    assert packed.startswith("deflate;")
    found = json.loads(zlib.decompress(base64.b64decode(packed.removeprefix("deflate;"))))
    assert isinstance(found, dict)
    return found


class Mlflow:
    """An experiment's tags, behind the REST interface."""

    def __init__(self, trouble: Exception | None = None) -> None:
        self.tags: dict[str, str] = {}
        self.trouble = trouble

    def get(self, path: str, query: Mapping[str, Any]) -> dict[str, Any]:
        assert (path, query) == ("experiments/get", {"experiment_id": "7"})
        return {"experiment": {"tags": [{"key": k, "value": v} for k, v in self.tags.items()]}}

    def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        if self.trouble is not None:
            raise self.trouble
        if path == "experiments/set-experiment-tag":
            self.tags[body["key"]] = body["value"]
        else:
            assert path == "experiments/delete-experiment-tag"
            del self.tags[body["key"]]
        return {}


def saved(mlflow: Any, *sweeps: str) -> None:
    for at_ms, sweep in enumerate(sweeps):
        SharedViews(mlflow).save(SweepRef(sweep, "7", "parent"), COMPARED, at_ms)


def test_the_view_shows_the_trials_of_its_sweep_with_figures_and_parameters_as_columns() -> None:
    mlflow = Mlflow()
    saved(mlflow, "digits-1")
    (tag,) = mlflow.tags
    assert comparison_path(REF) == (
        "/#/experiments/7/runs?workflowType=machine_learning"
        f"&viewStateShareKey={tag.removeprefix(VIEW_TAG)}"
    )
    assert json.loads(mlflow.tags[tag])["name"] == "digits-1"
    state = state_of(mlflow.tags[tag])
    assert state["searchFilter"] == (
        "tags.`hermes.sweep` = 'digits-1' and tags.`hermes.kind` = 'trial'"
    )
    assert state["selectedColumns"] == [
        "tags.`hermes.state`",
        "metrics.`hermes.best`",
        "metrics.`hermes.final`",
        "metrics.`hermes.steps`",
        "metrics.`hermes.preemptions`",
        "metrics.`val_loss`",
        "params.`rate`",
        "params.`drop`",
    ]
    assert (state["orderByKey"], state["orderByAsc"]) == ("metrics.`hermes.best`", True)


def test_a_metric_that_is_to_grow_is_sorted_downwards() -> None:
    state = state_of(view_text("s", ComparedSweep("acc", "maximize", (), 4), 0))
    assert state["orderByAsc"] is False


def test_the_charts_of_the_view_are_learning_curves_by_step_and_by_time() -> None:
    state = state_of(view_text("s", ComparedSweep("top1%", "minimize", ("rate",), 4), 0))
    by_step, by_time, parameters = state["compareRunCharts"]
    assert [(c["type"], c["xAxisKey"]) for c in (by_step, by_time)] == [
        ("LINE", "step"),
        ("LINE", "time-relative"),
    ]
    assert by_step["selectedMetricKeys"] == ["top1_-84dadc"]  # as MLflow keeps that name
    assert (parameters["type"], parameters["selectedParams"]) == ("PARALLEL", ["rate"])
    (section,) = state["compareRunSections"]
    assert {c["metricSectionId"] for c in state["compareRunCharts"]} == {section["uuid"]}
    assert len({c["uuid"] for c in state["compareRunCharts"]}) == 3


@pytest.mark.parametrize(("trials", "mode"), [(50, "SHOW_ALL"), (51, "FIRST_20_RUNS")])
def test_of_many_trials_only_the_first_curves_are_drawn_at_once(trials: int, mode: str) -> None:
    state = state_of(view_text("s", ComparedSweep("loss", "minimize", (), trials), 0))
    assert state["runsHiddenMode"] == mode


@given(st.lists(st.text(st.characters(codec="utf-8"), min_size=1, max_size=250), max_size=1_000))
def test_a_view_fits_into_a_tag_whatever_the_parameters_are_called(names: list[str]) -> None:
    text = view_text("s", ComparedSweep("loss", "minimize", names, 4), 0)
    assert len(text) <= 5_000
    shown = [c for c in state_of(text)["selectedColumns"] if c.startswith("params.")]
    assert len(shown) <= MOST_COLUMNS


def test_all_parameters_are_columns_up_to_the_limit() -> None:
    names = [f"parameter_{n}" for n in range(MOST_COLUMNS)]
    columns = state_of(view_text("s", ComparedSweep("loss", "minimize", names, 4), 0))
    assert [f"params.`{n}`" for n in names] == columns["selectedColumns"][-MOST_COLUMNS:]


def test_an_experiment_keeps_the_newest_views_of_ours_and_all_of_others() -> None:
    mlflow = Mlflow()
    mlflow.tags = {f"{VIEW_TAG}somebody's": "{}", "note": "x"}
    sweeps = [f"sweep-{n}" for n in range(MOST_VIEWS + 3)]
    saved(mlflow, *sweeps)
    views = {key.removeprefix(VIEW_TAG) for key in mlflow.tags} - {"somebody's", "note"}
    assert views == {view_key(sweep) for sweep in sweeps[3:]}
    assert {f"{VIEW_TAG}somebody's", "note"} <= mlflow.tags.keys()


@pytest.mark.parametrize("trouble", [Unavailable("away"), Refused("no such endpoint")])
def test_a_view_that_mlflow_does_not_take_stops_nothing(
    trouble: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    saved(Mlflow(trouble), "digits-1")
    assert "digits-1" in caplog.text


def test_a_sweep_file_says_what_is_compared() -> None:
    axis = {"type": "uniform", "low": 0, "high": 1}
    tree = {
        "name": "x",
        "objective": {"metric": "acc", "direction": "maximize"},
        "metrics": [{"name": "size", "direction": "minimize"}],
        "search": {
            "algorithm": "random",
            "max_trials": 3,
            "space": {
                "optimizer": {
                    "type": "choice",
                    "values": [
                        "adam",
                        {"value": "sgd", "space": {"momentum": axis}},
                    ],
                },
                "rate": axis,
            },
        },
        "trial": {"command": ["python", "t.py", "{rate}"], "directory": "/"},
        "budget": {"max_epochs": 2},
    }
    found = ComparedSweep.from_config(parse(tree, source="x", base=None))
    assert found == ComparedSweep(
        "acc", "maximize", ("optimizer", "momentum", "rate"), 3, ("size",)
    )
