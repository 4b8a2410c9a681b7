"""Which sweeps a pruning removes, and why it keeps the others. Times are Unix seconds.

The sweeps are those in Airflow, in MLflow and on disk. A sweep that Airflow no longer has (its rows
were cleaned) belongs to this installation if its folder is here: another Airflow may use the same
MLflow.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING

from hermes_ops.airflow.client import ENDED_RUN, TaskKey
from hermes_ops.airflow.control.cleanup.janitor import keep_note, kept_until_s
from hermes_ops.airflow.identity import PLANNER, group_of, possible_places, sweep_id
from hermes_ops.airflow.prune.removal import PruneEntry
from hermes_ops.airflow.records import SWEEP_KEY, SweepRecord, decode
from hermes_ops.config import RunIn, SweepConfig, parse
from hermes_ops.errors import HermesError, Unavailable
from hermes_ops.tracking.artifacts import fetch_sweep_file
from hermes_ops.tracking.deletion import RunsOfSweep
from hermes_ops.tracking.earlier_sweeps import BEST_TRIAL
from hermes_ops.tracking.runs import RUN_STATUS, SweepRun
from hermes_ops.trial.checkpoint_store.store import safe_name

if TYPE_CHECKING:
    from hermes_ops.airflow.client import AirflowClient
    from hermes_ops.tracking import Tracker

OTHER_NAME = "another name was asked for"
"""Why a sweep stays that was not meant."""

_AGE = re.compile(r"(\d+(?:\.\d+)?)\s*([hdw])")
_UNITS_S = {"h": 3_600.0, "d": 86_400.0, "w": 7 * 86_400.0}
MOST_AGE_S = 10_000 * 86_400.0  # a bound that keeps the date within the calendar


@dataclass(frozen=True, slots=True)
class SweepAge:
    """The facts that decide whether a sweep is pruned.

    `ended_s` is None while it has not ended, whether it runs, waits, is paused or preempted.
    `resumable_until_s` is how long the checkpoints of trials that can be resumed are kept by the
    sweep's own file; None: there are none. `unknown` says why nothing is known of its end.
    """

    sweep: str
    name: str
    ended_s: float | None
    resumable_until_s: float | None = None
    unknown: str = ""


@dataclass(frozen=True, slots=True)
class PruneRules:
    """The scope of a pruning: sweeps of these names or ids, ended at least `older_than_s` ago."""

    now_s: float
    older_than_s: float
    only: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RetentionDecision:
    """Whether a sweep goes, and why it stays if it does not."""

    sweep: str
    goes: bool
    reason: str = ""


def parse_age_s(text: str) -> float:
    """Return the seconds of an age such as `90d`, `12h` or `2w`; ValueError for another text."""
    match = _AGE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"found {text!r}; allowed: hours, days or weeks, as in 12h, 90d or 8w")
    age_s = float(match[1]) * _UNITS_S[match[2]]
    if age_s > MOST_AGE_S:
        raise ValueError(f"found {text[:20]!r}; allowed: at most 10000d")
    return age_s


def is_named(age: SweepAge, only: Iterable[str]) -> bool:
    """Return whether a sweep's id or name fits one of the patterns; without any all do."""
    patterns = tuple(only)
    words = (age.sweep, age.name)
    return not patterns or any(fnmatchcase(w, p) for p in patterns for w in words)


def judge(age: SweepAge, rules: PruneRules) -> RetentionDecision:
    """Return whether a sweep goes by these rules."""
    reason = _why_kept(age, rules)
    return RetentionDecision(age.sweep, reason is None, reason or "")


def _why_kept(age: SweepAge, rules: PruneRules) -> str | None:
    if not is_named(age, rules.only):
        return OTHER_NAME
    if age.unknown:
        return age.unknown
    if age.ended_s is None:
        return "it has not ended"
    if rules.now_s - age.ended_s < rules.older_than_s:
        return f"it ended on {_day(age.ended_s)}"
    if age.resumable_until_s is not None and age.resumable_until_s > rules.now_s:
        until = _day(age.resumable_until_s)
        return f"its trials can be resumed until {until} (checkpoints.keep_seconds)"
    return None


def _day(moment_s: float) -> str:
    try:
        return datetime.fromtimestamp(moment_s, UTC).strftime("%Y-%m-%d")
    except (ValueError, OverflowError, OSError):  # no calendar goes that far
        return "a day far off"


@dataclass(slots=True)
class DeletionRights:
    """The rights of this user to delete runs in Airflow; each DAG is asked for once."""

    airflow: AirflowClient
    _permitted: dict[str, bool] = field(default_factory=dict)

    def refusal(self, sweep: str, dag_id: str = "") -> str:
        """Return why the user may not remove a sweep; empty if he may.

        A sweep that Airflow does not show, as its runs are deleted or this user may not see them,
        may belong to any DAG that its id can mean: without `dag_id` he needs the right on all.
        """
        dags = dict.fromkeys(place.dag_id for place in possible_places(sweep))
        for dag in (dag_id,) if dag_id else dags:
            if dag not in self._permitted:
                self._permitted[dag] = self.airflow.may_delete_runs(dag)
            if not self._permitted[dag]:
                return f"Airflow does not let this user delete runs of the DAG {dag}"
        return ""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A sweep and its places: its plan's task in Airflow, its run in MLflow, its folder."""

    age: SweepAge
    plan: TaskKey | None
    run: SweepRun | None
    folder: Path

    @property
    def sweep(self) -> str:
        """The sweep's id."""
        return self.age.sweep


def candidates(
    airflow: AirflowClient, tracker: Tracker, home: Path, before_s: float
) -> Iterator[Candidate]:
    """Yield every sweep of this installation; those begun since `before_s` may be left out."""
    recorded = {run.ref.sweep_id: run for run in tracker.deletion.sweeps()}
    listed: set[str] = set()
    for row in airflow.all_made_by(PLANNER):
        plan = TaskKey(row["dag_id"], row["dag_run_id"], row["task_id"])
        sweep = sweep_id(plan.dag_id, plan.run_id, plan.task_id)
        listed.add(sweep)
        run, folder = recorded.get(sweep), home / "sweeps" / safe_name(sweep)
        begun_s = _seconds(row.get("start_date"))
        ended_s, unknown = None, "it was begun since then"
        if begun_s is None or begun_s < before_s:
            ended_s, unknown = _end_in_airflow(airflow, plan)
        yield _candidate(sweep, (ended_s, unknown), plan, run, folder)
    yield from _left(recorded, listed, home)


def _end_in_airflow(airflow: AirflowClient, plan: TaskKey) -> tuple[float | None, str]:
    run = airflow.dag_run(plan.dag_id, plan.run_id)
    if run is None:
        return None, "its DAG run was deleted a moment ago"
    if run["state"] not in ENDED_RUN:
        return None, ""
    ended_s = _seconds(run.get("end_date"))
    return ended_s, "" if ended_s is not None else "Airflow does not say when it ended"


def _left(recorded: Mapping[str, SweepRun], listed: set[str], home: Path) -> Iterator[Candidate]:
    """Yield the sweeps that Airflow lacks: those of MLflow with a folder here, then folders."""
    folders = {path.name: path for path in (home / "sweeps").glob("*") if _is_folder(path)}
    names = {safe_name(sweep) for sweep in listed}
    for sweep, run in recorded.items():
        folder = folders.get(safe_name(sweep))
        if sweep in listed or folder is None:
            continue
        names.add(folder.name)
        ended = run.state in RUN_STATUS and run.ended_ms is not None
        ended_s = (run.ended_ms or 0) / 1_000 if ended else None
        unknown = "" if ended else "MLflow says that it runs, and Airflow does not know it"
        yield _candidate(sweep, (ended_s, unknown), None, run, folder)
    for name in sorted(folders.keys() - names):
        folder = folders[name]
        sweep = str(keep_note(folder).get("sweep") or name)
        yield _candidate(sweep, (newest_s(folder), ""), None, None, folder)


def _candidate(
    sweep: str, end: tuple[float | None, str], plan: TaskKey | None, run: SweepRun | None, at: Path
) -> Candidate:
    name = run.tags.get("hermes.name", "") if run is not None else ""
    age = SweepAge(sweep, name, end[0], kept_until_s(keep_note(at)), end[1])
    return Candidate(age, plan, run, at)


def newest_s(folder: Path) -> float:
    """Return when something in a sweep's folder, or in a trial's, was last changed."""
    paths = [folder, *folder.glob("*"), *folder.glob("trials/*"), *folder.glob("trials/*/*")]
    return max((_changed_s(path) for path in paths), default=0.0)


def _changed_s(path: Path) -> float:
    try:
        return path.lstat().st_mtime
    except OSError:
        return 0.0


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _seconds(text: str | None) -> float | None:
    return None if not text else datetime.fromisoformat(text).timestamp()


def entry_of(
    airflow: AirflowClient,
    tracker: Tracker,
    candidate: Candidate,
    runs: RunsOfSweep,
    spared: Iterable[str],
) -> PruneEntry:
    """Return the entry with everything that a sweep has left, except spared MLflow runs."""
    stay = set(spared)
    gone = tuple(run for run in runs.all if run not in stay)
    config = _config(airflow, tracker, candidate)
    pod = config.trial.pod if config and config.trial.run_in is RunIn.POD else None
    plan = candidate.plan or TaskKey("", "", "")
    return PruneEntry(
        candidate.sweep,
        plan.dag_id,
        plan.run_id,
        plan.task_id,
        group_of(plan.task_id),
        gone,
        tracker.deletion.models_of(runs.experiments, gone),
        config.checkpoints.store if config else keep_note(candidate.folder).get("store"),
        tuple(sorted(int(p.name) for p in candidate.folder.glob("trials/*") if p.name.isdigit())),
        pod.model_dump(mode="json", exclude_none=True) if pod is not None else None,
    )


def _config(airflow: AirflowClient, tracker: Tracker, candidate: Candidate) -> SweepConfig | None:
    """Return the sweep's configuration, from its record or from MLflow; None without both."""
    try:
        if candidate.plan is not None:
            record = decode(SweepRecord, airflow.get_state(candidate.plan, SWEEP_KEY))
            if record is not None:
                return parse(record.config, source=candidate.sweep, base=None)
        if candidate.run is not None:
            parent = candidate.run.ref.parent_run_id
            document = fetch_sweep_file(tracker.artifacts, parent, candidate.sweep)
            return parse(document, source=candidate.sweep, base=None)
    except Unavailable:
        raise
    except (HermesError, ValueError):  # of an earlier version: its folder says where its store is
        return None
    return None


def is_gone(entry: PruneEntry, folder: Path) -> bool:
    """Return whether nothing is left of a sweep but what Airflow has of it in another DAG's run."""
    return not (entry.runs or folder.exists() or (entry.run_id and not entry.group))


def spared_runs(
    runs: RunsOfSweep, candidate: Candidate, registered: Iterable[str], *, best: bool
) -> set[str]:
    """Return the MLflow runs of a sweep that stay: of registered models, of its best trial.

    Where the run of a trial stays, the sweep's run stays too: MLflow shows the trial below it.
    """
    kept = set(runs.all) & set(registered)
    if best and candidate.run is not None:
        number = candidate.run.tags.get(BEST_TRIAL)
        kept |= {run for n, run in runs.trials if str(n) == number}
        kept |= set(runs.own)
    return kept | set(runs.own) if kept else kept
