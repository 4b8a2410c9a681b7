"""Sweeps that run and that have ended, newest first: from Airflow's tables and MLflow's runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hermes_ops.airflow.identity import REPORT_TASK, group_of, in_group
from hermes_ops.airflow.metadata_rows import ENDED_TASK_STATES, PastRun, state_in_group
from hermes_ops.airflow.page.access import Reader
from hermes_ops.airflow.page.pool_view import PageSources
from hermes_ops.airflow.records import SweepRecord, decode
from hermes_ops.airflow.trial.links import comparison_address, report_address
from hermes_ops.core.amounts import figure
from hermes_ops.core.secondary_metrics import SecondaryMetric
from hermes_ops.core.summary import ENDED_STATES, sweep_state
from hermes_ops.errors import HermesError
from hermes_ops.tracking import SweepRef, SweepRun
from hermes_ops.tracking.runs import ended_spans_of

ROWS = 50
NEWEST_ROWS = 10
MOST_RUNNING = 10
"""Running sweeps of a page whose best value is requested: one request each."""


@dataclass(frozen=True, slots=True)
class SweepRow:
    """One sweep in the list. Unix seconds; `ended_s` is None while it runs.

    `idle_s` are the seconds between an end and the start with which it was continued.
    `best` is "" where no value is known. The addresses lead to MLflow, "" where there is none.
    """

    sweep: str
    dag_id: str
    run_id: str
    pool: str
    state: str
    started_s: float
    ended_s: float | None
    ended: int
    trials: int
    metric: str
    best: str
    compare: str
    report: str
    idle_s: float = 0.0

    @property
    def is_running(self) -> bool:
        """Whether it has not ended."""
        return self.state not in ENDED_STATES


@dataclass(frozen=True, slots=True)
class SweepListPage:
    """One page of the list, counted from 1; `mlflow` is False when MLflow did not answer."""

    rows: Sequence[SweepRow]
    page: int
    has_more: bool
    mlflow: bool


@dataclass(frozen=True, slots=True)
class _AirflowSweep:
    """A sweep in Airflow: its run, its record, and its tasks by state."""

    past: PastRun
    record: SweepRecord | None
    trial_states: Mapping[str, int]
    airflow_state: str

    @property
    def ref(self) -> SweepRef | None:
        if self.record is None:
            return None
        run = self.record.parent_run_id
        return SweepRef(self.past.run.sweep_id, self.record.experiment_id, run)


def history(sources: PageSources, reader: Reader, page: int = 1, rows: int = ROWS) -> SweepListPage:
    """Return a page of the list of sweeps, of the DAGs that the reader may see."""
    dags = [dag for dag in sources.metadata.sweep_dags() if reader.reads_dag(dag)]
    past = sources.metadata.past_sweeps(dags, rows + 1, (page - 1) * rows) if dags else ()
    sweeps = _airflow_sweeps(sources, past[:rows])
    refs = [f.ref for f in sweeps if f.ref is not None]
    runs = sources.from_mlflow(
        lambda tracker: tracker.overview.sweeps(
            [r.experiment_id for r in refs], [r.parent_run_id for r in refs]
        )
    )
    best = _running_best(sources, sweeps) if runs is not None else {}
    shown = [_row(sources, f, runs or {}, best) for f in sweeps]
    return SweepListPage(shown, page, len(past) > rows, runs is not None)


def sweep_row(sources: PageSources, past: PastRun, run: SweepRun | None) -> SweepRow:
    """Return the row of one sweep; `run` is its MLflow run, None where that is not known."""
    (sweep,) = _airflow_sweeps(sources, [past])
    runs = {} if run is None else {run.ref.parent_run_id: run}
    return _row(sources, sweep, runs, {})


def _airflow_sweeps(sources: PageSources, past: Sequence[PastRun]) -> list[_AirflowSweep]:
    # A configuration that is stored in pieces is not read: the record then has an empty one.
    records = [decode(SweepRecord, {"config": {}, **p.run.sweep}) for p in past]
    trials = [_trials(p, r) for p, r in zip(past, records, strict=True)]
    reports = [_report(p) for p in past]
    states = sources.metadata.task_states([*trials, *reports])
    return [
        _AirflowSweep(p, record, states.get(trial, {}), _airflow_state(p, states.get(report, {})))
        for p, record, trial, report in zip(past, records, trials, reports, strict=True)
    ]


def _trials(past: PastRun, record: SweepRecord | None) -> tuple[str, str, str]:
    return past.run.dag_id, past.run.run_id, record.trial_task if record else ""


def _report(past: PastRun) -> tuple[str, str, str]:
    run = past.run
    return run.dag_id, run.run_id, in_group(group_of(run.plan_task), REPORT_TASK)


def _airflow_state(past: PastRun, report: Mapping[str, int]) -> str:
    """Return Airflow's state of the sweep; in a task group, the state of its last task."""
    if not group_of(past.run.plan_task):
        return past.run.state
    return state_in_group(next(iter(report), None))  # it is one task; none yet of a new run


def _running_best(sources: PageSources, sweeps: Sequence[_AirflowSweep]) -> dict[str, float]:
    """Return the best value so far of the first running sweeps, by sweep."""
    best: dict[str, float] = {}
    running = [f for f in sweeps if f.airflow_state not in ("success", "failed", "skipped")]
    for one in running[:MOST_RUNNING]:
        config = one.record.config if one.record else {}
        if one.ref is None or not config.get("objective"):
            continue
        value = _fetch_best(sources, one.ref, config)
        if value is not None:
            best[one.ref.sweep_id] = value
    return best


def _fetch_best(sources: PageSources, ref: SweepRef, config: Mapping[str, Any]) -> float | None:
    maximize = config["objective"].get("direction") == "maximize"
    metrics = [
        SecondaryMetric(m["name"], at_most=m.get("at_most"), at_least=m.get("at_least"))
        for m in config.get("metrics") or ()
    ]
    bounded = [metric for metric in metrics if metric.is_bounded]
    return sources.from_mlflow(
        lambda tracker: tracker.overview.best(ref, maximize=maximize, bounded=bounded)
    )


def _row(
    sources: PageSources,
    sweep: _AirflowSweep,
    runs: Mapping[str, SweepRun],
    best: Mapping[str, float],
) -> SweepRow:
    past, record, ref = sweep.past, sweep.record, sweep.ref
    run = runs.get(ref.parent_run_id) if ref else None
    state = sweep_state(sweep.airflow_state, run.state if run else None)
    config = record.config if record else {}
    ended = sum(n for state, n in sweep.trial_states.items() if state in ENDED_TASK_STATES)
    return SweepRow(
        sweep=past.run.sweep_id,
        dag_id=past.run.dag_id,
        run_id=past.run.run_id,
        pool=str(config.get("pool", "")),
        state=state,
        started_s=_began_s(past, record),
        ended_s=past.ended_s if state in ENDED_STATES else None,
        ended=ended,
        trials=record.trials if record else sum(sweep.trial_states.values()),
        metric=str(config.get("objective", {}).get("metric", "")),
        best=_best(run if state in ENDED_STATES else None, best.get(past.run.sweep_id)),
        compare=_address(sources, lambda uri: comparison_address(uri, ref) if ref else ""),
        report=_address(sources, lambda uri: _report_page(uri, ref, state)),
        idle_s=sum(end_s - start_s for start_s, end_s in ended_spans_of(run.tags)) if run else 0.0,
    )


def _began_s(past: PastRun, record: SweepRecord | None) -> float:
    """Return when a sweep began: Airflow's date is the last time that its run was started."""
    planned_s = record.planned_s if record is not None else 0.0
    return min(past.run.started_s, planned_s) if planned_s else past.run.started_s


def _best(run: SweepRun | None, so_far: float | None) -> str:
    tag = run.tags.get("hermes.best", "") if run is not None else ""
    try:
        value = float(tag) if tag else so_far
    except ValueError:
        value = None
    return "" if value is None else figure(value, 4)


def _report_page(uri: str, ref: SweepRef | None, state: str) -> str:
    """Return the report's address; "" before the sweep has ended."""
    if ref is None or state not in ENDED_STATES:
        return ""
    return report_address(uri, ref.experiment_id, ref.parent_run_id)


def _address(sources: PageSources, make: Any) -> str:  # noqa: ANN401 - a function of MLflow's address
    try:
        return str(make(sources.tracker.uri))
    except HermesError:  # nothing says where MLflow is
        return ""
