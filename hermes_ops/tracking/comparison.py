"""A shared view of MLflow's page of runs that compares the trials of one sweep.

MLflow keeps a shared view of an experiment's runs as a tag of the experiment; a URL names the
tag. The view of a sweep filters its trials, shows their figures and parameters as columns and
their learning curves as charts. The format is that of MLflow 3.17.
"""

from __future__ import annotations

import base64
import hashlib
import json
import logging
import uuid
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from hermes_ops.errors import Refused, Unavailable
from hermes_ops.search.tree import axes
from hermes_ops.tracking.rest import RestClient, legal_name, tag_filter
from hermes_ops.tracking.runs import KIND, STATE, SWEEP, SweepRef, param_of

if TYPE_CHECKING:
    from hermes_ops.config import SweepConfig

log = logging.getLogger(__name__)

VIEW_TAG = "mlflow.sharedViewState."
"""MLflow's prefix of the tags of an experiment that are shared views."""
MOST_VIEWS = 200
"""Views that an experiment keeps: MLflow reads them all whenever it reads the experiment."""
MOST_COLUMNS = 40
MOST_AXES = 12
MOST_DRAWN = 50
"""With more trials the view begins with the curves of the first 20 rows of the table."""
_OURS = "hermes-"
_MOST_CHARACTERS = 5_000  # of a tag's value, in the narrowest of the databases behind MLflow
_FIGURES = ("hermes.best", "hermes.final", "hermes.steps", "hermes.preemptions")


@dataclass(frozen=True, slots=True)
class ComparedSweep:
    """The fields of a sweep that its view shows; `metrics` are those besides the objective."""

    metric: str
    direction: str
    parameters: Sequence[str]
    trials: int
    metrics: Sequence[str] = ()

    @classmethod
    def from_config(cls, config: SweepConfig) -> ComparedSweep:
        """Return the fields of a sweep file, with every parameter that a trial may have."""
        return cls(
            metric=config.objective.metric,
            direction=config.objective.direction.value,
            parameters=tuple(name for name, _ in axes(config.search.to_space())),
            trials=config.search.max_trials,
            metrics=tuple(metric.name for metric in config.secondary),
        )


class SharedViews:
    """The shared views of the experiments of one server. Every method is safe to repeat."""

    def __init__(self, rest: RestClient) -> None:
        self._rest = rest

    def save(self, sweep: SweepRef, compared: ComparedSweep, created_ms: int) -> None:
        """Write the view of a sweep, and delete the oldest views of an experiment with too many.

        Nothing depends on a view: errors of MLflow are logged.
        """
        try:
            key = f"{VIEW_TAG}{view_key(sweep.sweep_id)}"
            self._set(sweep.experiment_id, key, view_text(sweep.sweep_id, compared, created_ms))
            for old in _surplus(self._tags(sweep.experiment_id)):
                body = {"experiment_id": sweep.experiment_id, "key": old}
                self._rest.post("experiments/delete-experiment-tag", body)
        except (Refused, Unavailable) as error:
            log.warning("The view that compares the trials of %s: %s", sweep.sweep_id, error)

    def _set(self, experiment_id: str, key: str, value: str) -> None:
        body = {"experiment_id": experiment_id, "key": key, "value": value}
        self._rest.post("experiments/set-experiment-tag", body)

    def _tags(self, experiment_id: str) -> dict[str, str]:
        answer = self._rest.get("experiments/get", {"experiment_id": experiment_id})
        experiment = answer["experiment"]
        return {tag["key"]: tag.get("value", "") for tag in experiment.get("tags", ())}


def view_key(sweep_id: str) -> str:
    """Return the name of a sweep's view, the same at each call."""
    return f"{_OURS}{hashlib.sha256(sweep_id.encode(errors='replace')).hexdigest()[:20]}"


def comparison_path(sweep: SweepRef) -> str:
    """Return the path of a sweep's view, to be appended to the tracking server's URL."""
    return (
        f"/#/experiments/{quote(sweep.experiment_id)}/runs"
        f"?workflowType=machine_learning&viewStateShareKey={view_key(sweep.sweep_id)}"
    )


def view_text(sweep_id: str, compared: ComparedSweep, created_ms: int) -> str:
    """Return the value of the tag: the name in MLflow's menu of views, and the view.

    Where a tag cannot hold all parameters of the sweep, the view has the first ones.
    """
    count = min(len(compared.parameters), MOST_COLUMNS)
    while True:
        packed = _deflated(view_state(sweep_id, compared, count))
        envelope = {"name": sweep_id, "createdAt": created_ms, "updatedAt": created_ms}
        text = json.dumps({**envelope, "state": packed}, separators=(",", ":"))
        if len(text) <= _MOST_CHARACTERS or count == 0:
            return text
        count //= 2


def view_state(sweep_id: str, compared: ComparedSweep, count: int) -> dict[str, Any]:
    """Return the view with columns of the first `count` parameters, in MLflow's format."""
    columns = list(_columns(compared, compared.parameters[:count]))
    section = _identity(sweep_id, "section")
    return {
        "searchFilter": tag_filter({SWEEP: sweep_id, KIND: "trial"}),
        "orderByKey": _column("metrics", _FIGURES[0]),
        "orderByAsc": compared.direction != "maximize",
        "startTime": "ALL",
        "lifecycleFilter": "Active",
        "selectedColumns": columns,
        "columnOrder": columns,
        "columnWidths": {name: _width_px(name) for name in columns},
        "runsHiddenMode": "SHOW_ALL" if compared.trials <= MOST_DRAWN else "FIRST_20_RUNS",
        "compareRunCharts": [
            {"uuid": _identity(sweep_id, str(place)), "metricSectionId": section, **chart}
            for place, chart in enumerate(_charts(compared, count))
        ],
        "compareRunSections": [
            {"uuid": section, "name": "Learning curves", "display": True, "isReordered": False}
        ],
        "isAccordionReordered": True,
    }


def _columns(compared: ComparedSweep, parameters: Sequence[str]) -> Iterator[str]:
    """Yield the columns' names: the trial's state and figures, its parameters, other metrics."""
    yield _column("tags", STATE)
    for name in (*_FIGURES, legal_name(compared.metric), *map(legal_name, compared.metrics)):
        yield _column("metrics", name)
    for name in parameters:
        yield _column("params", _param(name))


def _charts(compared: ComparedSweep, count: int) -> Iterator[Mapping[str, Any]]:
    """Yield the objective by step and by time, and the parameters beside the best value."""
    metric = legal_name(compared.metric)
    for axis, words in (("step", "by step"), ("time-relative", "by time")):
        yield {
            "type": "LINE",
            "displayName": f"{metric} {words}",
            "metricKey": metric,
            "selectedMetricKeys": [metric],
            "xAxisKey": axis,
            "useGlobalXaxisKey": False,
            "useGlobalLineSmoothing": True,
            "scaleType": "linear",
            "xAxisScaleType": "linear",
            "yAxisKey": "metric",
            "yAxisExpressions": [],
            "range": {},
        }
    if count:
        yield {
            "type": "PARALLEL",
            "displayName": "Parameters and best value",
            "selectedParams": [_param(n) for n in compared.parameters[: min(count, MOST_AXES)]],
            "selectedMetrics": [_FIGURES[0]],
            "showAllRuns": True,
        }


def _column(kind: str, name: str) -> str:
    return f"{kind}.`{name}`"


def _width_px(column: str) -> int:
    """Return a width that fits most column headings."""
    return min(200, max(90, 8 * len(column.split("`")[1]) + 30))


def _param(name: str) -> str:
    return param_of((name, ""))["key"]


def _identity(sweep_id: str, part: str) -> str:
    return str(uuid.uuid5(uuid.NAMESPACE_URL, f"{view_key(sweep_id)}/{part}"))


def _deflated(state: Mapping[str, Any]) -> str:
    text = json.dumps(state, separators=(",", ":"))
    return f"deflate;{base64.b64encode(zlib.compress(text.encode(), 9)).decode()}"


def _surplus(tags: Mapping[str, str]) -> list[str]:
    """Return the keys of Hermes' views beyond the newest MOST_VIEWS, oldest first."""
    ours = [key for key in tags if key.startswith(f"{VIEW_TAG}{_OURS}")]
    return sorted(ours, key=lambda key: (_created_ms(tags[key]), key))[:-MOST_VIEWS]


def _created_ms(text: str) -> int:
    try:
        return int(json.loads(text)["createdAt"])
    except (ValueError, TypeError, KeyError):
        return 0
