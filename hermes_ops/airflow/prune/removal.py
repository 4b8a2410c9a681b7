"""Removal of a sweep, in an order that leaves nothing half visible, and its journal.

Airflow's run goes first: from then on no command and no page shows the sweep, and nobody can
resume it. Then MLflow's runs, the checkpoints outside, the logs, the folder, at last MLflow's
trash and the journal's entry.

The journal says what a pruning removes, on disk before anything is removed. If a pruning is
interrupted, the next one reads from the journal what the sweep had in each service, and completes
the removal. An entry is deleted last.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hermes_ops.airflow.client import ENDED_RUN, TaskKey
from hermes_ops.airflow.control.cleanup.janitor import clear_sweep
from hermes_ops.airflow.disk_usage import artifact_folders
from hermes_ops.airflow.records import SWEEP_KEY
from hermes_ops.config import PodSpec
from hermes_ops.errors import HermesError
from hermes_ops.trial.checkpoint_store.store import safe_name
from hermes_ops.trial.files import write_json
from hermes_ops.trial.locks import BusyError, lock_file

if TYPE_CHECKING:
    from hermes_ops.airflow.client import AirflowClient
    from hermes_ops.tracking import Tracker

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PruneEntry:
    """A sweep that is being removed. `runs` and `models` are MLflow's, the sweep's own run first.

    `run_id` is empty where Airflow knows nothing of the sweep; `group` is that of a sweep within
    another DAG, whose run stays. `trials` are numbers; `pod` is the sweep file's `trial.pod` where
    trials have left checkpoints on nodes.
    """

    sweep: str
    dag_id: str = ""
    run_id: str = ""
    plan_task: str = ""
    group: str = ""
    runs: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    store: str | None = None
    trials: tuple[int, ...] = ()
    pod: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class PruneJournal:
    """The journal's entries in a state folder."""

    folder: Path

    @classmethod
    def from_home(cls, home: Path) -> PruneJournal:
        """Return the journal of a state folder."""
        return cls(home / "prune")

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock of prunings; HermesError while another one holds it."""
        try:
            lock = lock_file(self.folder / "lock", 0.0, "the state folder's pruning")
        except BusyError:
            raise HermesError("another `hermes prune` is at work here: wait for its end.") from None
        try:
            yield
        finally:
            os.close(lock)

    def entries(self) -> list[PruneEntry]:
        """Return the entries of incomplete prunings, sorted by sweep."""
        entries = []
        for path in sorted(self.folder.glob("*.json")):
            with suppress(OSError, ValueError, TypeError):
                document = json.loads(path.read_text())
                names = {f.name for f in fields(PruneEntry)}
                given = {k: v for k, v in document.items() if k in names}
                for name in ("runs", "models", "trials"):
                    given[name] = tuple(given.get(name) or ())
                entries.append(PruneEntry(**given))
        return entries

    def write(self, entry: PruneEntry) -> None:
        """Store an entry, flushed to the disk."""
        self.folder.mkdir(parents=True, exist_ok=True)
        write_json(self._path(entry.sweep), asdict(entry), durable=True)

    def remove(self, entry: PruneEntry) -> None:
        """Delete an entry, and what is left of its folder."""
        shutil.rmtree(self.trash(entry.sweep), ignore_errors=True)
        self._path(entry.sweep).unlink(missing_ok=True)

    def trash(self, sweep: str) -> Path:
        """Return where the sweep's folder is moved to before its files go."""
        return self.folder / f"{safe_name(sweep)}.trash"

    def _path(self, sweep: str) -> Path:
        return self.folder / f"{safe_name(sweep)}.json"


GarbageCollector = Callable[[list[str], list[str]], None]
"""Removes deleted runs and logged models of MLflow, and their artifacts, for good."""

RESUMED = "it was resumed meanwhile, and is kept"


def log_folder(logs: Path, dag_id: str, run_id: str) -> Path:
    """Return where Airflow keeps the task logs of a run, by its default template."""
    return logs / f"dag_id={dag_id}" / f"run_id={run_id}"


def _clear_nodes(entry: PruneEntry) -> bool:
    """Delete checkpoints on the nodes' own claims; return whether none is left."""
    from hermes_ops.airflow.trial.node_checkpoints import by_node, clear_disks

    spec = PodSpec.model_validate(entry.pod)
    if not spec.checkpoint_claims or not by_node(entry.sweep, entry.trials):
        return True
    try:
        clear_disks(entry.sweep, spec, entry.trials)
    except Exception as error:  # no cluster here, whatever its client says to that
        log.warning("The nodes' claims of %s are not reached: %s", entry.sweep, error)
        return False
    return not by_node(entry.sweep, entry.trials)


@dataclass(slots=True)
class Removal:
    """The services and folders that a sweep is removed from.

    `logs` is the folder of Airflow's task logs, None where it is not here; without `collect` the
    runs stay in MLflow's trash.
    """

    airflow: AirflowClient
    tracker: Tracker
    home: Path
    logs: Path | None = None
    collect: GarbageCollector | None = None
    clear_nodes: Callable[[PruneEntry], bool] = _clear_nodes

    @property
    def journal(self) -> PruneJournal:
        """The journal of the removals."""
        return PruneJournal.from_home(self.home)

    def remove(self, entry: PruneEntry) -> str | None:
        """Remove all but what is in MLflow's trash; return why something stays, or None."""
        self.journal.write(entry)
        if not self._leave_airflow(entry):
            self.journal.remove(entry)
            return RESUMED
        for run in entry.runs:
            self.tracker.deletion.delete_run(run)
        for model in entry.models:
            self.tracker.deletion.delete_model(model)
        if not clear_sweep(entry.store, entry.sweep):
            return f"its checkpoints at {entry.store} could not be deleted"
        if entry.pod is not None and not self.clear_nodes(entry):
            return "its checkpoints on the nodes' claims could not be deleted"
        self._remove_logs(entry)
        return self._remove_folder(entry)

    def finish(self, entries: list[PruneEntry]) -> None:
        """Empty MLflow's trash of these sweeps, and forget them."""
        runs = [run for entry in entries for run in entry.runs]
        models = [model for entry in entries for model in entry.models]
        if self.collect is not None and (runs or models):
            self.collect(runs, models)
            self._remove_empty(runs)
        for entry in entries:
            self.journal.remove(entry)

    def _remove_empty(self, runs: list[str]) -> None:
        """Remove the folders of these runs that MLflow has emptied and left, if they are here."""
        gone = set(runs)
        for run, folder in artifact_folders(self.home).items():
            if run in gone:
                with suppress(OSError):
                    folder.rmdir()

    def _leave_airflow(self, entry: PruneEntry) -> bool:
        """Delete the sweep from Airflow; return False where it goes on."""
        if not entry.run_id:
            return True
        if not entry.group:
            return self.airflow.delete_dag_run(entry.dag_id, entry.run_id)
        run = self.airflow.dag_run(entry.dag_id, entry.run_id)
        if run is not None and run["state"] not in ENDED_RUN:
            return False
        if run is not None:
            plan = TaskKey(entry.dag_id, entry.run_id, entry.plan_task)
            self.airflow.delete_state(plan, SWEEP_KEY)
        return True

    def _remove_logs(self, entry: PruneEntry) -> None:
        if self.logs is not None and entry.run_id and not entry.group:
            folder = log_folder(self.logs, entry.dag_id, entry.run_id)
            if folder.is_dir() and not folder.is_symlink():
                shutil.rmtree(folder)

    def _remove_folder(self, entry: PruneEntry) -> str | None:
        folder, trash = (
            self.home / "sweeps" / safe_name(entry.sweep),
            self.journal.trash(entry.sweep),
        )
        if folder.is_symlink():
            return f"{folder} is a link, which is left alone: remove it by hand"
        if not folder.is_dir():
            return None
        shutil.rmtree(trash, ignore_errors=True)
        try:
            os.rename(folder, trash)
        except OSError:  # another file system
            trash = folder
        shutil.rmtree(trash)
        return None
