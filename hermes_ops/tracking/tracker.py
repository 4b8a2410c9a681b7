"""Sweeps and trials as MLflow runs: found again by their tags, never created twice."""

from __future__ import annotations

import getpass
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hermes_ops.core.summary import Segment
from hermes_ops.errors import Refused
from hermes_ops.tracking.artifacts import SWEEP_FILE, Artifacts, Registry, json_objects
from hermes_ops.tracking.comparison import SharedViews, comparison_path
from hermes_ops.tracking.deletion import Deletion
from hermes_ops.tracking.overview import Overview
from hermes_ops.tracking.rest import (
    EXISTS,
    MISSING,
    RestClient,
    chunked_tag,
    in_batches,
    legal_name,
    tag_filter,
)
from hermes_ops.tracking.runs import (
    CONFIG,
    KIND,
    NAME,
    RUN_STATUS,
    SEGMENT_LOG,
    SET_ASIDE_KIND,
    STATE,
    SWEEP,
    TRIAL,
    TRIAL_KIND,
    LatestMetric,
    SweepRef,
    SweepRun,
    TrialRun,
    config_of,
    has_tags,
    is_numbered,
    metric_of,
    param_of,
    sweep_of,
    tags_of,
    trial_of,
    unwritten,
    with_ended_span,
)

_OPEN_STATES = "'%ing'"  # pending, waiting, running, and none of the final states
_PAGE = 1_000
_OPENINGS = 3  # tries to open a trial while others open it too
_HISTORY_PAGE = 25_000  # the most that MLflow gives in one answer
_STRETCH = 2_500  # the most of a stretch of steps
_GREATEST_BOUND = (1 << 31) - 1  # of a stretch, for MLflow
_OTHER_VALUE = "INVALID_PARAMETER_VALUE"  # a param has another value already
_CONFLICT = "BAD_REQUEST"  # another client wrote the same entry; the second request succeeds


class Tracker:
    """The runs of one MLflow tracking server. Every method is safe to repeat.

    All methods raise Unavailable when the server is away (after `timeout_s` at most, at once when
    the connection is refused) and Refused when it refuses.
    """

    def __init__(
        self,
        uri: str,
        timeout_s: float = 10.0,
        clock: Callable[[], float] = time.time,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self._rest = RestClient(uri, timeout_s, variables)
        self._clock = clock
        self.artifacts = Artifacts(self._rest)
        self.registry = Registry(self._rest)
        self.deletion = Deletion(self._rest)
        self.views = SharedViews(self._rest)
        self.overview = Overview(self._rest)

    @property
    def uri(self) -> str:
        """The server's address."""
        return self._rest.uri

    def close(self) -> None:
        """Close the connections to the server."""
        self._rest.close()

    # Sweeps

    def ensure_sweep(
        self,
        experiment_name: str,
        sweep_id: str,
        resolved_config_yaml: str,
        tags: Mapping[str, str] | None = None,
    ) -> SweepRef:
        """Return the sweep's parent run, creating it if there is none; of several, the oldest.

        The resolved configuration becomes the artifact `sweep.yaml`. Tags are set when the run is
        created; those of an existing run stay.
        """
        experiment_id = self._experiment(experiment_name)
        key = {SWEEP: sweep_id, KIND: "sweep"}
        rest = {STATE: "running", **(tags or {})}
        run_id = self._ensure_run(experiment_id, sweep_id, key, rest)["info"]["run_id"]
        if not self.artifacts.has(run_id, SWEEP_FILE):
            self.artifacts.write(run_id, SWEEP_FILE, resolved_config_yaml.encode())
        return SweepRef(sweep_id, experiment_id, run_id)

    def find_sweep(self, sweep_id: str, experiment_name: str | None = None) -> SweepRef | None:
        """Search a sweep in one experiment or in all; return None when there is none.

        The experiment may have been renamed since: then the sweep is the one of that name and id.
        """
        key = {SWEEP: sweep_id, KIND: "sweep"}
        experiment = self._experiment_named(experiment_name) if experiment_name else None
        runs = self._search([experiment["experiment_id"]], key) if experiment else []
        if not runs:
            matching = self._search([e["experiment_id"] for e in self._experiments()], key)
            runs = [r for r in matching if experiment_name in (None, tags_of(r).get(NAME))]
        if not runs:
            return None
        return SweepRef(sweep_id, runs[0]["info"]["experiment_id"], runs[0]["info"]["run_id"])

    def sweep(self, ref: SweepRef) -> SweepRun:
        """Fetch the parent run of a sweep."""
        run = self._rest.get("runs/get", {"run_id": ref.parent_run_id})["run"]
        return replace(sweep_of(run), ref=ref)

    def sweeps(self, experiment_name: str) -> tuple[SweepRun, ...]:
        """Return the sweeps of an experiment, newest first; none without the experiment."""
        experiment = self._experiment_named(experiment_name)
        runs = self._search([experiment["experiment_id"]] if experiment else [], {KIND: "sweep"})
        return tuple(sweep_of(run) for run in reversed(runs))

    def newest_sweeps(self, most: int = 200) -> dict[str, SweepRun]:
        """Return the newest sweeps of all experiments by id; of two with one id the older."""
        experiments = [e["experiment_id"] for e in self._experiments()]
        body = {
            "experiment_ids": experiments,
            "filter": tag_filter({KIND: "sweep"}),
            "max_results": most,
            "order_by": ["attributes.start_time DESC"],
        }
        runs = self._rest.post("runs/search", body).get("runs", ()) if experiments else ()
        parsed = map(sweep_of, runs)
        return {run.ref.sweep_id: run for run in parsed}

    def reopen(
        self, run_id: str, drop: Sequence[str] = (), tags: Mapping[str, str] | None = None
    ) -> None:
        """Set an ended run to running and delete its tags `drop`.

        MLflow keeps its end time; a tag says from when to when it had ended.
        """
        spans = with_ended_span(
            self._rest.get("runs/get", {"run_id": run_id})["run"], self._clock()
        )
        for key in drop:
            self._rest.post("runs/delete-tag", {"run_id": run_id, "key": key})
        self.set_tags(run_id, {**spans, **(tags or {}), STATE: "running"})
        self._rest.post("runs/update", {"run_id": run_id, "status": "RUNNING"})

    def finish(self, run_id: str, state: str, tags: Mapping[str, str] | None = None) -> None:
        """End the run of a sweep or of a trial in a final state: a key of RUN_STATUS."""
        if state not in RUN_STATUS:
            raise ValueError(f"{state!r} is not a final state: {', '.join(RUN_STATUS)}")
        self.set_tags(run_id, {**(tags or {}), STATE: state})
        body = {"run_id": run_id, "status": RUN_STATUS[state], "end_time": self._now_ms()}
        self._rest.post("runs/update", body)

    # Trials

    def open_trial(
        self,
        sweep: SweepRef,
        number: int,
        config: Mapping[str, Any],
        tags: Mapping[str, str] | None = None,
        *,
        unseen: bool = False,
        params: bool = True,
    ) -> str:
        """Return the run id of a trial, creating the run if there is none; of several, the oldest.

        The configuration of the call that created the run is kept: `trials` returns it with its
        types, and it is the run's params. `tags` are set when the run is created. `unseen`: the
        caller has just seen that there is no run, so the search follows the creation. Without
        `params` these are left to `add_params`, if the run has the same configuration.
        """
        key = {SWEEP: sweep.sweep_id, TRIAL: str(number), KIND: "trial"}
        rest = {
            STATE: "running",
            "mlflow.parentRunId": sweep.parent_run_id,
            **chunked_tag(CONFIG, json.dumps(dict(config))),
            **(tags or {}),
        }
        for attempt in range(_OPENINGS):
            name, new = f"trial-{number:03d}", unseen and not attempt
            run = self._ensure_run(sweep.experiment_id, name, key, rest, unseen=new)
            if new and not params and config_of(run) == dict(config):
                return str(run["info"]["run_id"])
            try:
                return self._complete_trial(run)
            except Refused:
                # Another process opened the trial too, and has deleted its own, later run.
                if attempt == _OPENINGS - 1 or self.accepts(run["info"]["run_id"]):
                    raise
        raise AssertionError("unreachable")

    def add_params(self, run_id: str, config: Mapping[str, Any]) -> None:
        """Write the params of a trial whose run was opened without them.

        A param that the script has logged before, perhaps in another spelling, stays.
        """
        try:
            self._log_in_batches(run_id, "params", [param_of(item) for item in config.items()])
        except Refused as error:
            if error.code != _OTHER_VALUE:
                raise
            run = self._rest.get("runs/get", {"run_id": run_id})["run"]
            left = unwritten(run, config)
            self._log_in_batches(run_id, "params", [param_of(item) for item in left.items()])

    def trials(self, sweep: SweepRef, *, open_only: bool = False) -> tuple[TrialRun, ...]:
        """Return the sweep's open and ended trials by number, with the latest of each metric."""
        key = {SWEEP: sweep.sweep_id, KIND: "trial"}
        runs = self._search([sweep.experiment_id], key, open_only=open_only)
        by_number: dict[int, TrialRun] = {}
        for run in filter(is_numbered, runs):  # oldest first: of two runs it is the trial's
            trial = trial_of(run)
            if trial.tags.get("mlflow.parentRunId") == sweep.parent_run_id:
                by_number.setdefault(trial.number, trial)
        return tuple(by_number[n] for n in sorted(by_number))

    def every_run(self, sweep: SweepRef) -> tuple[SweepRun | None, tuple[TrialRun, ...]]:
        """Return the sweep's own run and those of its trials, also the ones set aside.

        They are sorted by trial, then by time.
        """
        runs = self._search([sweep.experiment_id], {SWEEP: sweep.sweep_id})
        parent = next((r for r in runs if r["info"]["run_id"] == sweep.parent_run_id), None)
        trials: dict[tuple[int, str], TrialRun] = {}
        for run in filter(is_numbered, runs):
            trial, kind = trial_of(run), tags_of(run).get(KIND, "")
            if trial.tags.get("mlflow.parentRunId") != sweep.parent_run_id:
                continue
            if kind == SET_ASIDE_KIND:
                trials[trial.number, trial.run_id] = trial
            elif kind == TRIAL_KIND:  # of two runs the oldest is the trial's
                trials.setdefault((trial.number, ""), trial)
        in_order = sorted(trials.values(), key=lambda t: (t.number, t.started_ms, t.run_id))
        return None if parent is None else sweep_of(parent), tuple(in_order)

    def set_aside(self, trial: TrialRun, reason: str) -> None:
        """Detach a trial's run from its sweep, so that `open_trial` creates another; keep it."""
        if trial.is_open:
            self.finish(trial.run_id, "cancelled")
        self.set_tags(trial.run_id, {KIND: SET_ASIDE_KIND, "hermes.reason": reason})

    def set_tags(self, run_id: str, tags: Mapping[str, str]) -> None:
        """Set tags; cut values over 8,000 characters."""
        entries = [{"key": k, "value": str(v)[:8_000]} for k, v in tags.items()]
        self._log_in_batches(run_id, "tags", entries)

    def save_segments(self, run_id: str, segments: Sequence[Segment]) -> None:
        """Store the trial's segments, replacing those stored before.

        They are tags, in chunks, so that one search returns those of all trials of a sweep.
        """
        text = json.dumps([s.to_json() for s in segments], separators=(",", ":"))
        self.set_tags(run_id, chunked_tag(SEGMENT_LOG, text))

    # Metrics

    def log_metrics(self, run_id: str, metrics: Sequence[Mapping[str, Any]]) -> None:
        """Store at most 1,000 metrics {key, value, timestamp, step}; repeated ones once only."""
        self._rest.post("runs/log-batch", {"run_id": run_id, "metrics": list(metrics)})

    def history(self, run_id: str, metric: str) -> tuple[LatestMetric, ...]:
        """Return every stored point of a metric, by time."""
        query = {"run_id": run_id, "metric_key": legal_name(metric), "max_results": _HISTORY_PAGE}
        return tuple(map(metric_of, self._rest.get_pages("metrics/get-history", query, "metrics")))

    def stretch(
        self, run_id: str, metric: str, first_step: int, last_step: int
    ) -> tuple[LatestMetric, ...] | None:
        """Return the points of a range of steps, by step; None when they are too many.

        One response holds 2,500 points: of more MLflow returns a sample.
        """
        if last_step > _GREATEST_BOUND:
            return None
        query = {
            "run_ids": run_id,
            "metric_key": legal_name(metric),
            "start_step": first_step,
            "end_step": last_step,
            "max_results": _STRETCH,
        }
        points = self._rest.get("metrics/get-history-bulk-interval", query).get("metrics", ())
        return tuple(metric_of(m) for m in points) if len(points) < _STRETCH else None

    def accepts(self, run_id: str) -> bool:
        """Return whether the run exists and is not deleted."""
        try:
            run = self._rest.get("runs/get", {"run_id": run_id})["run"]
        except Refused as error:
            if error.code != MISSING:
                raise  # by a proxy in front of MLflow, for instance, which knows no run
            return False
        return bool(run["info"].get("lifecycle_stage", "active") == "active")

    # Artifacts

    def record_decisions(self, parent_run_id: str, chunk_number: int, lines: Sequence[str]) -> None:
        """Store decisions, each one JSON object, as the artifact `decisions/000001.jsonl`."""
        text = "".join(f"{line.rstrip()}\n" for line in lines)
        self.artifacts.write(parent_run_id, f"decisions/{chunk_number:06d}.jsonl", text.encode())

    def read_decisions(self, parent_run_id: str) -> tuple[dict[str, Any], ...]:
        """Return all recorded decisions, oldest chunk first; skip what is none."""
        decisions: list[dict[str, Any]] = []
        for path in self.artifacts.files(parent_run_id, "decisions"):
            decisions += json_objects(self.artifacts.fetch(parent_run_id, path))
        return tuple(decisions)

    def log_folder(self, run_id: str, folder: Path, path: str) -> None:
        """Store every file under `folder` below the artifact `path`."""
        self.artifacts.write_folder(run_id, folder, path)

    def download(self, run_id: str, path: str, folder: Path) -> tuple[Path, ...]:
        """Copy the artifacts below `path` into `folder`; return the files written."""
        return self.artifacts.download(run_id, path, folder)

    def run_url(self, experiment_id: str, run_id: str) -> str:
        """Return the URL of the run's page."""
        return f"{self.uri}/#/experiments/{experiment_id}/runs/{run_id}"

    def comparison_url(self, sweep: SweepRef) -> str:
        """Return the URL of MLflow's page of runs with the trials of that sweep."""
        return f"{self.uri}{comparison_path(sweep)}"

    # Requests

    def _ensure_run(
        self,
        experiment_id: str,
        name: str,
        key: Mapping[str, str],
        tags: Mapping[str, str],
        *,
        unseen: bool = False,
    ) -> dict[str, Any]:
        if not unseen and (runs := self._search([experiment_id], key)):
            return runs[0]
        created = self._create_run(experiment_id, name, {**tags, **key})
        # Another process may have created one since the search: the oldest run stands.
        oldest = (self._search([experiment_id], key) or [created])[0]
        if oldest["info"]["run_id"] != created["info"]["run_id"]:
            self._rest.post("runs/delete", {"run_id": created["info"]["run_id"]})
        return oldest

    def _complete_trial(self, run: Mapping[str, Any]) -> str:
        """Complete the opening of a trial whose run exists; return the run id."""
        run_id = str(run["info"]["run_id"])
        self.add_params(run_id, unwritten(run, config_of(run)))
        if run["info"]["status"] != "RUNNING" and tags_of(run).get(STATE) not in RUN_STATUS:
            # The script's own `mlflow.end_run` has ended it, at a preemption for instance.
            self._rest.post("runs/update", {"run_id": run_id, "status": "RUNNING"})
        return run_id

    def _create_run(self, experiment_id: str, name: str, tags: Mapping[str, str]) -> dict[str, Any]:
        all_tags = {"mlflow.user": getpass.getuser(), "mlflow.source.name": "hermes", **tags}
        body = {
            "experiment_id": experiment_id,
            "run_name": name,
            "start_time": self._now_ms(),
            "tags": [{"key": k, "value": str(v)[:8_000]} for k, v in all_tags.items()],
        }
        run: dict[str, Any] = self._rest.post("runs/create", body)["run"]
        return run

    def _search(
        self, experiments: Sequence[str], tags: Mapping[str, str], *, open_only: bool = False
    ) -> list[dict[str, Any]]:
        """Return all active runs with these tags, oldest first."""
        if not experiments:
            return []
        searched = {k: v for k, v in tags.items() if k != KIND or TRIAL not in tags}  # a join each
        is_open = f" and tags.`{STATE}` LIKE {_OPEN_STATES}" if open_only else ""
        body = {
            "experiment_ids": list(experiments),
            "filter": tag_filter(searched) + is_open,
            "max_results": _PAGE,
            "order_by": ["attributes.start_time ASC"],
        }
        runs = [r for r in self._rest.post_pages("runs/search", body, "runs") if has_tags(r, tags)]
        return sorted(runs, key=lambda r: (int(r["info"]["start_time"]), r["info"]["run_id"]))

    def _log_in_batches(self, run_id: str, kind: str, entries: list[dict[str, str]]) -> None:
        for entries_of_batch in in_batches(entries):
            batch = {"run_id": run_id, kind: entries_of_batch}
            try:
                self._rest.post("runs/log-batch", batch)
            except Refused as error:
                if error.code != _CONFLICT:
                    raise
                self._rest.post("runs/log-batch", batch)

    def _experiment(self, name: str) -> str:
        experiment = self._experiment_named(name)
        if experiment is None:
            try:
                return str(self._rest.post("experiments/create", {"name": name})["experiment_id"])
            except Refused as error:
                if error.code != EXISTS:
                    raise
                experiment = self._experiment_named(name)  # another process created it
                if experiment is None:
                    raise
        if experiment.get("lifecycle_stage") == "deleted":
            self._rest.post("experiments/restore", {"experiment_id": experiment["experiment_id"]})
        return str(experiment["experiment_id"])

    def _experiment_named(self, name: str) -> dict[str, Any] | None:
        try:
            answer = self._rest.get("experiments/get-by-name", {"experiment_name": name})
        except Refused as error:
            if error.code != MISSING:
                raise
            return None
        experiment: dict[str, Any] = answer["experiment"]
        return experiment

    def _experiments(self) -> list[dict[str, Any]]:
        body = {"max_results": _PAGE}
        return list(self._rest.post_pages("experiments/search", body, "experiments"))

    def _now_ms(self) -> int:
        return int(self._clock() * 1_000)


def require_sweep(tracker: Tracker, sweep_id: str, experiment_name: str | None = None) -> SweepRef:
    """Return the sweep of that id; Refused when MLflow has none."""
    ref = tracker.find_sweep(sweep_id, experiment_name)
    if ref is None:
        raise Refused(
            f"MLflow at {tracker.uri} knows no sweep {sweep_id!r}. `hermes sweep list` shows all; "
            "MLflow has none that was skipped or is not planned yet.",
            MISSING,
        )
    return ref
