"""Sweeps and trials as MLflow runs: found again by their tags, never made twice."""

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
from hermes_ops.tracking.artifacts import Artifacts
from hermes_ops.tracking.comparison import SharedViews, comparison_path
from hermes_ops.tracking.names import chunked_tag, in_batches, legal_name, tag_filter
from hermes_ops.tracking.overview import Overview
from hermes_ops.tracking.registry import Registry
from hermes_ops.tracking.rest import RestClient
from hermes_ops.tracking.runs import (
    CONFIG,
    KIND,
    RUN_STATUS,
    SEGMENT_LOG,
    STATE,
    SWEEP,
    TRIAL,
    LatestMetric,
    SweepRef,
    SweepRun,
    TrialRun,
    config_of,
    has_tags,
    metric_of,
    param_of,
    sweep_of,
    tags_of,
    trial_of,
    unwritten,
)

_OPEN_STATES = "'%ing'"  # pending, waiting, running, and none of the final states
_PAGE = 1_000
_OPENINGS = 3  # tries to open a trial while others open it too
_HISTORY_PAGE = 25_000  # the most that MLflow gives in one answer
_STRETCH = 2_500  # the most of a stretch of steps
_GREATEST_BOUND = (1 << 31) - 1  # of a stretch, for MLflow
_OTHER_VALUE = "INVALID_PARAMETER_VALUE"  # a param has another value already
_OVERTAKEN = "BAD_REQUEST"  # another client wrote the same entry; a second time MLflow knows it


class Tracker:
    """The runs of one MLflow tracking server. Every method may be repeated.

    All methods raise Unavailable when the server is away (after `timeout_s` at the most, at once
    when the connection is refused) and Refused when it says no.
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
        """Return the sweep's parent run, made now if there is none; of several, the oldest.

        The resolved configuration becomes the artifact `sweep.yaml`. Tags are set when the run is
        made; those of a run that is there stay as they are.
        """
        experiment_id = self._experiment(experiment_name)
        key = {SWEEP: sweep_id, KIND: "sweep"}
        rest = {STATE: "running", **(tags or {})}
        run_id = self._ensure_run(experiment_id, sweep_id, key, rest)["info"]["run_id"]
        if not self.artifacts.has(run_id, "sweep.yaml"):
            self.artifacts.write(run_id, "sweep.yaml", resolved_config_yaml.encode())
        return SweepRef(sweep_id, experiment_id, run_id)

    def find_sweep(self, sweep_id: str, experiment_name: str | None = None) -> SweepRef | None:
        """Return the sweep of that id, looked for in one experiment or in all; None: not there."""
        if experiment_name is None:
            experiments = [e["experiment_id"] for e in self._experiments()]
        else:
            found = self._experiment_named(experiment_name)
            experiments = [found["experiment_id"]] if found else []
        runs = self._search(experiments, {SWEEP: sweep_id, KIND: "sweep"})
        if not runs:
            return None
        return SweepRef(sweep_id, runs[0]["info"]["experiment_id"], runs[0]["info"]["run_id"])

    def sweep(self, ref: SweepRef) -> SweepRun:
        """Return the parent run as it stands now."""
        run = self._rest.get("runs/get", {"run_id": ref.parent_run_id})["run"]
        return replace(sweep_of(run), ref=ref)

    def sweeps(self, experiment_name: str) -> tuple[SweepRun, ...]:
        """Return the sweeps of an experiment, newest first; none when there is no such one."""
        found = self._experiment_named(experiment_name)
        runs = self._search([found["experiment_id"]] if found else [], {KIND: "sweep"})
        return tuple(sweep_of(run) for run in reversed(runs))

    def newest_sweeps(self, most: int = 200) -> dict[str, SweepRun]:
        """Return the newest sweeps of all experiments by id; of two of one id the older one."""
        experiments = [e["experiment_id"] for e in self._experiments()]
        body = {
            "experiment_ids": experiments,
            "filter": tag_filter({KIND: "sweep"}),
            "max_results": most,
            "order_by": ["attributes.start_time DESC"],
        }
        runs = self._rest.post("runs/search", body).get("runs", ()) if experiments else ()
        found = map(sweep_of, runs)
        return {run.ref.sweep_id: run for run in found}

    def finish_sweep(
        self, parent_run_id: str, state: str, tags: Mapping[str, str] | None = None
    ) -> None:
        """End the parent run in a final state (finished, failed, cancelled)."""
        self._finish(parent_run_id, state, tags)

    def reopen(self, run_id: str, drop: Sequence[str] = ()) -> None:
        """Let an ended run go on, without the tags `drop`, which it has; MLflow keeps its end."""
        for key in drop:
            self._rest.post("runs/delete-tag", {"run_id": run_id, "key": key})
        self.set_tags(run_id, {STATE: "running"})
        self._rest.post("runs/update", {"run_id": run_id, "status": "RUNNING"})

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
        """Return the run id of a trial, made now if there is none; of several, the oldest.

        The configuration of the call that made the run stands: it is what `trials` returns, with
        its types, and the run's params. `tags` are set when the run is made. `unseen` says that
        there was none a moment ago: then it is looked for once a run has been made. Without
        `params` a run of that very configuration may be left to `add_params`.
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
                # Another opener, since found to be the later one, took its run away.
                if attempt == _OPENINGS - 1 or self.accepts(run["info"]["run_id"]):
                    raise
        raise AssertionError("unreachable")

    def add_params(self, run_id: str, config: Mapping[str, Any]) -> None:
        """Write the params of a trial whose run was opened without; it may be done again.

        One that the script has logged before, perhaps in another spelling, stays as it is.
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
        for run in runs:  # oldest first: it is the trial, should there be two
            trial = trial_of(run)
            if trial.tags.get("mlflow.parentRunId") == sweep.parent_run_id:
                by_number.setdefault(trial.number, trial)
        return tuple(by_number[n] for n in sorted(by_number))

    def finish_trial(self, run_id: str, state: str, tags: Mapping[str, str] | None = None) -> None:
        """End a trial in a final state: finished, failed, stopped_early or cancelled."""
        self._finish(run_id, state, tags)

    def set_aside(self, trial: TrialRun, reason: str) -> None:
        """Take a trial's run out of its sweep, so that `open_trial` makes another; it is kept."""
        if trial.is_open:
            self.finish_trial(trial.run_id, "cancelled")
        self.set_tags(trial.run_id, {KIND: "set aside", "hermes.reason": reason})

    def set_tags(self, run_id: str, tags: Mapping[str, str]) -> None:
        """Set tags; a value over 8,000 characters is cut."""
        entries = [{"key": k, "value": str(v)[:8_000]} for k, v in tags.items()]
        self._log_in_batches(run_id, "tags", entries)

    def save_segments(self, run_id: str, segments: Sequence[Segment]) -> None:
        """Store the trial's segments, in the place of those stored before.

        They are tags, in parts: one search then returns those of every trial of a sweep.
        """
        text = json.dumps([s.to_json() for s in segments], separators=(",", ":"))
        self.set_tags(run_id, chunked_tag(SEGMENT_LOG, text))

    # Metrics

    def log_metrics(self, run_id: str, metrics: Sequence[Mapping[str, Any]]) -> None:
        """Store at most 1,000 metrics {key, value, timestamp, step}; repeated ones once only."""
        self._rest.post("runs/log-batch", {"run_id": run_id, "metrics": list(metrics)})

    def history(self, run_id: str, metric: str) -> tuple[LatestMetric, ...]:
        """Return every stored point of a metric, in the order of its time."""
        query = {"run_id": run_id, "metric_key": legal_name(metric), "max_results": _HISTORY_PAGE}
        found: list[LatestMetric] = []
        while True:
            answer = self._rest.get("metrics/get-history", query)
            found.extend(metric_of(m) for m in answer.get("metrics", ()))
            token = answer.get("next_page_token", "")
            if not token:
                return tuple(found)
            query = {**query, "page_token": token}

    def stretch(
        self, run_id: str, metric: str, first_step: int, last_step: int
    ) -> tuple[LatestMetric, ...] | None:
        """Return the points of those steps, in their order; None when they are too many for it.

        One answer holds 2,500 of them: of more MLflow gives a sample.
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
        found = self._rest.get("metrics/get-history-bulk-interval", query).get("metrics", ())
        return tuple(metric_of(m) for m in found) if len(found) < _STRETCH else None

    def accepts(self, run_id: str) -> bool:
        """Return whether the run is there and not deleted."""
        try:
            run = self._rest.get("runs/get", {"run_id": run_id})["run"]
        except Refused:
            return False
        return bool(run["info"].get("lifecycle_stage", "active") == "active")

    # Artifacts

    def record_decisions(self, parent_run_id: str, chunk_number: int, lines: Sequence[str]) -> None:
        """Store decisions, each one JSON object, as the artifact `decisions/000001.jsonl`."""
        text = "".join(f"{line.rstrip()}\n" for line in lines)
        self.artifacts.write(parent_run_id, f"decisions/{chunk_number:06d}.jsonl", text.encode())

    def read_decisions(self, parent_run_id: str) -> tuple[dict[str, Any], ...]:
        """Return all recorded decisions, oldest chunk first; a torn line is left out."""
        found = []
        for path in self.artifacts.files(parent_run_id, "decisions"):
            for line in self.artifacts.read(parent_run_id, path).splitlines():
                try:
                    found.append(json.loads(line))
                except ValueError:
                    continue
        return tuple(found)

    def log_folder(self, run_id: str, folder: Path, path: str) -> None:
        """Store every file under `folder` below the artifact `path`."""
        self.artifacts.write_folder(run_id, folder, path)

    def download(self, run_id: str, path: str, folder: Path) -> tuple[Path, ...]:
        """Copy the artifacts below `path` into `folder`; return the files written."""
        return self.artifacts.download(run_id, path, folder)

    def run_url(self, experiment_id: str, run_id: str) -> str:
        """Return the address of the run's page."""
        return f"{self.uri}/#/experiments/{experiment_id}/runs/{run_id}"

    def comparison_url(self, sweep: SweepRef) -> str:
        """Return the address of MLflow's page of runs with the trials of that sweep."""
        return f"{self.uri}{comparison_path(sweep)}"

    # The requests beneath

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
        made = self._create_run(experiment_id, name, {**tags, **key})
        # Somebody may have made it between our search and our creation: the oldest one stands.
        oldest = (self._search([experiment_id], key) or [made])[0]
        if oldest["info"]["run_id"] != made["info"]["run_id"]:
            self._rest.post("runs/delete", {"run_id": made["info"]["run_id"]})
        return oldest

    def _complete_trial(self, run: Mapping[str, Any]) -> str:
        """Do what is left of opening a trial once its run is there; return the run id."""
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
        """Return the active runs with these tags, oldest first, of any number."""
        if not experiments:
            return []
        asked = {k: v for k, v in tags.items() if k != KIND or TRIAL not in tags}  # a join each
        is_open = f" and tags.`{STATE}` LIKE {_OPEN_STATES}" if open_only else ""
        body = {
            "experiment_ids": list(experiments),
            "filter": tag_filter(asked) + is_open,
            "max_results": _PAGE,
            "order_by": ["attributes.start_time ASC"],
        }
        runs = [r for r in self._rest.pages("runs/search", body, "runs") if has_tags(r, tags)]
        return sorted(runs, key=lambda r: (int(r["info"]["start_time"]), r["info"]["run_id"]))

    def _finish(self, run_id: str, state: str, tags: Mapping[str, str] | None) -> None:
        if state not in RUN_STATUS:
            raise ValueError(f"{state!r} is not a final state: {', '.join(RUN_STATUS)}")
        self.set_tags(run_id, {**(tags or {}), STATE: state})
        body = {"run_id": run_id, "status": RUN_STATUS[state], "end_time": self._now_ms()}
        self._rest.post("runs/update", body)

    def _log_in_batches(self, run_id: str, kind: str, entries: list[dict[str, str]]) -> None:
        for entries_of_batch in in_batches(entries):
            batch = {"run_id": run_id, kind: entries_of_batch}
            try:
                self._rest.post("runs/log-batch", batch)
            except Refused as error:
                if error.code != _OVERTAKEN:
                    raise
                self._rest.post("runs/log-batch", batch)

    def _experiment(self, name: str) -> str:
        found = self._experiment_named(name)
        if found is None:
            try:
                return str(self._rest.post("experiments/create", {"name": name})["experiment_id"])
            except Refused as error:
                if error.code != "RESOURCE_ALREADY_EXISTS":
                    raise
                found = self._experiment_named(name)  # somebody else was quicker
                if found is None:
                    raise
        if found.get("lifecycle_stage") == "deleted":
            self._rest.post("experiments/restore", {"experiment_id": found["experiment_id"]})
        return str(found["experiment_id"])

    def _experiment_named(self, name: str) -> dict[str, Any] | None:
        try:
            answer = self._rest.get("experiments/get-by-name", {"experiment_name": name})
        except Refused as error:
            if error.code != "RESOURCE_DOES_NOT_EXIST":
                raise
            return None
        found: dict[str, Any] = answer["experiment"]
        return found

    def _experiments(self) -> list[dict[str, Any]]:
        body = {"max_results": _PAGE}
        return list(self._rest.pages("experiments/search", body, "experiments"))

    def _now_ms(self) -> int:
        return int(self._clock() * 1_000)
