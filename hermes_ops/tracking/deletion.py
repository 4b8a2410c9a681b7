"""Deletion of sweeps from MLflow: their runs, runs that scripts nested in them, logged models.

Deleted runs are in MLflow's trash: `hermes_ops.tracking.database` removes them for good, with their
artifacts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from hermes_ops.errors import Refused
from hermes_ops.tracking.rest import MISSING, RestClient, tag_filter
from hermes_ops.tracking.runs import KIND, SWEEP, TRIAL, SweepRun, has_tags, sweep_of, tags_of

_PAGE = 1_000
_PARENT = "mlflow.parentRunId"


@dataclass(frozen=True, slots=True)
class RunsOfSweep:
    """The runs of a sweep, deleted ones too: its parent run, those of trials, nested runs."""

    own: tuple[str, ...] = ()
    trials: tuple[tuple[int, str], ...] = ()
    nested: tuple[str, ...] = ()
    experiments: tuple[str, ...] = ()

    @property
    def all(self) -> tuple[str, ...]:
        """Every run, the sweep's parent run first."""
        return (*self.own, *(run for _, run in self.trials), *self.nested)


class Deletion:
    """Deletions on one server. Each is safe to repeat, also after removal for good."""

    def __init__(self, rest: RestClient) -> None:
        self._rest = rest

    def sweeps(self) -> tuple[SweepRun, ...]:
        """Return every sweep that is not deleted."""
        return tuple(sweep_of(r) for r in self._search_runs({KIND: "sweep"}, "ACTIVE_ONLY"))

    def runs_of(self, sweep: str) -> RunsOfSweep:
        """Return the runs of a sweep, including those in the trash."""
        runs = [r for r in self._search_runs({SWEEP: sweep}, "ALL") if has_tags(r, {SWEEP: sweep})]
        trials = [r for r in runs if tags_of(r).get(TRIAL, "").isdigit()]
        parents = [r for r in runs if tags_of(r).get(KIND) == "sweep"]
        ids = [r["info"]["run_id"] for r in runs]
        named = {r["info"]["run_id"] for r in (*parents, *trials)}
        children = (
            child
            for run in runs
            for child in self._children(run["info"]["run_id"], run["info"]["experiment_id"])
        )
        nested = tuple(r for r in dict.fromkeys((*ids, *children)) if r not in named)
        return RunsOfSweep(
            own=tuple(r["info"]["run_id"] for r in parents),
            trials=tuple((int(tags_of(r)[TRIAL]), r["info"]["run_id"]) for r in trials),
            nested=nested,
            experiments=tuple(sorted({r["info"]["experiment_id"] for r in runs})),
        )

    def registered(self) -> dict[str, str]:
        """Return the versions of registered models by the id of their source run."""
        versions: dict[str, str] = {}
        query = {"max_results": _PAGE}
        for version in self._rest.get_pages("model-versions/search", query, "model_versions"):
            if run_id := version.get("run_id"):
                versions[run_id] = f"models:/{version['name']}/{version['version']}"
        return versions

    def models_of(self, experiments: Iterable[str], runs: Iterable[str]) -> tuple[str, ...]:
        """Return the ids of the models that were logged by these runs."""
        body = {"experiment_ids": sorted(experiments), "max_results": 100}
        if not body["experiment_ids"]:
            return ()
        run_ids = set(runs)
        models = self._rest.post_pages("logged-models/search", body, "models")
        infos = (model.get("info", {}) for model in models)
        return tuple(i["model_id"] for i in infos if i.get("source_run_id") in run_ids)

    def delete_run(self, run_id: str) -> None:
        """Move a run to the trash, unless it is there or removed already."""
        try:
            run = self._rest.get("runs/get", {"run_id": run_id})["run"]
            if run["info"].get("lifecycle_stage") != "deleted":
                self._rest.post("runs/delete", {"run_id": run_id})
        except Refused as error:
            if error.code != MISSING:
                raise

    def delete_model(self, model_id: str) -> None:
        """Move a logged model to the trash, unless it is there or removed already."""
        try:
            self._rest.send("DELETE", f"/api/2.0/mlflow/logged-models/{model_id}")
        except Refused as error:
            if error.code != MISSING:
                raise

    def _children(self, run_id: str, experiment: str) -> Iterator[str]:
        for run in self._search([experiment], {_PARENT: run_id}, "ALL"):
            yield str(run["info"]["run_id"])

    def _search_runs(self, tags: dict[str, str], view: str) -> Iterator[dict[str, Any]]:
        search = {"max_results": _PAGE, "view_type": view}
        experiments = [
            e["experiment_id"]
            for e in self._rest.post_pages("experiments/search", search, "experiments")
        ]
        return self._search(experiments, tags, view) if experiments else iter(())

    def _search(
        self, experiments: list[str], tags: dict[str, str], view: str
    ) -> Iterator[dict[str, Any]]:
        body = {
            "experiment_ids": experiments,
            "filter": tag_filter(tags),
            "run_view_type": view,
            "max_results": _PAGE,
        }
        return self._rest.post_pages("runs/search", body, "runs")
