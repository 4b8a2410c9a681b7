"""Stand-ins for the tests of the page in Airflow: its database, MLflow, users, and a reader."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from html.parser import HTMLParser
from typing import Any

from hermes_ops.airflow.control.decisions import DecisionLog, decision
from hermes_ops.airflow.control.pool_file import view_path
from hermes_ops.airflow.metadata_rows import PastRun, PoolRow, RunRow, TaskInstanceRow
from hermes_ops.airflow.page.pool_view import PageSources
from hermes_ops.airflow.page.progress import ProgressCache
from hermes_ops.airflow.records import LEASE_KEY, SEGMENT_KEY, encode
from hermes_ops.core.model import JobId, Reason, Term
from hermes_ops.core.secondary_metrics import SecondaryMetric
from hermes_ops.core.summary import CurvePoints
from hermes_ops.errors import Unavailable
from hermes_ops.tracking import LatestMetric, SweepRef, SweepRun, TrialRun
from tests.unit.airflow.builders import SWEEP, lease, row, run_row, segment, sweep_record

with warnings.catch_warnings():  # the client would rather have the successor of httpx
    warnings.simplefilter("ignore")
    from fastapi.testclient import TestClient

    from hermes_ops.airflow.page.app import create_app

NOW_S = 200.0
SECRET = "hunter2-hunter2"
HOSTILE = '<script>alert("x")</script>'


class Database:
    """Airflow's database: `runs` run, each with the trials and records of `trials_of` its id."""

    def __init__(self, *runs: RunRow) -> None:
        self.runs = runs
        self.rows: dict[str, list[tuple[TaskInstanceRow, dict[str, Any]]]] = {}
        self.pool_row: PoolRow | None = PoolRow(2, 0)
        self.ended: list[PastRun] = []  # newest first
        self.tasks: dict[tuple[str, str, str], dict[str, int]] = {}
        self.away = False

    def sweeps(self) -> tuple[RunRow, ...]:
        if self.away:
            raise Unavailable("host db.internal refused the user airflow")
        return self.runs

    def dags_of(self, sweep: str) -> tuple[str, ...]:
        return tuple(p.run.dag_id for p in self._past() if p.run.sweep_id == sweep)

    def sweep_dags(self) -> tuple[str, ...]:
        return tuple(sorted({p.run.dag_id for p in self._past()}))

    def past_sweeps(self, dags: Any, most: int, skip: int = 0) -> tuple[PastRun, ...]:
        return tuple([p for p in self._past() if p.run.dag_id in dags][skip : skip + most])

    def sweeps_since(self, since_s: float, most: int) -> tuple[PastRun, ...]:
        if self.away:
            raise Unavailable("host db.internal refused the user airflow")
        return tuple(p for p in self._past() if p.ended_s is None or p.ended_s >= since_s)[:most]

    def sweep(self, sweep: str) -> PastRun | None:
        return next((p for p in self._past() if p.run.sweep_id == sweep), None)

    def _past(self) -> list[PastRun]:
        return [*(PastRun(run, None) for run in self.runs), *self.ended]

    def task_states(self, tasks: Any) -> dict[tuple[str, str, str], dict[str, int]]:
        return {task: self.tasks[task] for task in tasks if task in self.tasks}

    def trials(self, run: RunRow, task: str) -> tuple[TaskInstanceRow, ...]:
        return tuple(r for r, _ in self.rows.get(run.sweep_id, ()))

    def records(self, run: RunRow) -> dict[tuple[str, int], dict[str, Any]]:
        return {("trial", r.number): found for r, found in self.rows.get(run.sweep_id, ())}

    def pool(self, name: str, own: Any) -> PoolRow | None:
        return self.pool_row


class Mlflow:
    """MLflow without a point or a past sweep."""

    uri = "http://mlflow"
    away = False
    asked = 0

    def __init__(self) -> None:
        self.overview = Overview(self)
        self.runs: dict[str, SweepRun] = {}
        self.opened: tuple[TrialRun, ...] = ()
        self.points: dict[str, CurvePoints] = {}
        self.best: float | None = None
        self.bounded: list[SecondaryMetric] = []  # of the sweep whose best value was read last
        self.artifacts = self
        self.chunks: dict[str, str] = {}  # of decisions, by path

    def sweeps(self, experiment: str) -> Any:
        if self.away:
            raise Unavailable("MLflow did not answer")
        return []

    def trials(self, ref: Any, *, open_only: bool = False) -> Any:
        return []

    def every_run(self, ref: Any) -> Any:
        return None, ()

    def find_sweep(self, sweep: str, experiment: str | None = None) -> Any:
        return None

    def read_decisions(self, parent: str) -> Any:
        raise AssertionError("it knows no sweep")

    def files(self, run_id: str, path: str) -> tuple[str, ...]:
        return tuple(sorted(self.chunks))

    def fetch(self, run_id: str, path: str) -> bytes:
        return self.chunks[path].encode()


class Overview:
    """What a page reads of MLflow, out of what a test has put there."""

    def __init__(self, mlflow: Mlflow) -> None:
        self.mlflow = mlflow

    def _ask(self) -> Mlflow:
        self.mlflow.asked += 1
        if self.mlflow.away:
            raise Unavailable("MLflow at secret.internal did not answer")
        return self.mlflow

    def sweeps(self, experiments: Any, runs: Any) -> Any:
        return {run: found for run, found in self._ask().runs.items() if run in runs}

    def best(self, sweep: Any, *, maximize: bool, bounded: Any = ()) -> float | None:
        self.mlflow.bounded = list(bounded)
        return self._ask().best

    def trials(self, sweep: Any, most: int) -> Any:
        return self._ask().opened[:most]

    def curves(self, runs: Any, metric: str, points: int) -> Any:
        return {run: found for run, found in self._ask().points.items() if run in runs}


class Users:
    """Airflow's auth manager: tokens are user names, `dags` what each may read."""

    def __init__(self) -> None:
        self.dags: dict[str, set[str]] = {"ann": {"hermes_sweep"}, "bob": set()}
        self.pools = {"gpus"}

    async def get_user_from_token(self, token: str) -> str:
        return token

    def is_authorized_dag(self, *, method: str, user: str, details: Any, **_: Any) -> bool:
        assert method == "GET"
        return bool(self.dags[user]) if details.id is None else details.id in self.dags[user]

    def get_authorized_pools(self, *, user: str) -> set[str]:
        return self.pools

    def get_url_login(self, **found: Any) -> str:
        return f"/auth/login?next={found['next_url']}"


def planned() -> Database:
    """One sweep: trial 0 holds GPU 1, trial 1 waits, trial 2 has not begun; GPU 0 is free."""
    found = Database(run_row(trial={
        "command": ["python", "train.py", "--rate", "{rate}"], "directory": "/",
        "environment": {"API_TOKEN": SECRET},
    }))  # fmt: skip
    own = lease(gpus=(1,), environment={"API_TOKEN": SECRET})
    found.rows[SWEEP] = [
        (row(0, "running"), {LEASE_KEY: encode(own), SEGMENT_KEY: encode(segment(gpus=(1,)))}),
        (row(1), {LEASE_KEY: encode(lease()),
                  SEGMENT_KEY: encode(segment(running=False, ended_s=110.0, preemptions=3))}),
        (row(2), {}),
    ]  # fmt: skip
    return found


Get = Callable[..., Any]


@contextmanager
def page_of(database: Any, mlflow: Any) -> Iterator[Get]:
    """Open the page; what comes asks it as a user, "" for nobody."""
    asked = [0]

    def clock() -> float:
        return NOW_S + 2 * (asked[0] - 1)

    sources = PageSources(database, lambda: mlflow, clock=clock, progress=ProgressCache(clock))
    client = TestClient(create_app(lambda: sources), follow_redirects=False)

    def ask(path: str = "/", user: str = "ann", *, method: str = "GET", **query: str) -> Any:
        asked[0] += 1
        headers = {"Authorization": f"Bearer {user}"} if user else {}
        return client.request(method, path, headers=headers, params=query or None)

    with client:
        yield ask


def view(**changes: Any) -> None:
    """The controller's view of trial 0, which runs."""
    job: dict[str, Any] = {
        "id": f"{SWEEP}/0", "phase": "running", "gpus": [1], "step": 3, "value": 0.5,
        "preemptions": 0, "rank": 1, "reason": "it converges best", "terms": {"gain": 0.25},
        "runner_up": f"{SWEEP}/1", "would_change": "a gain of 0.3", **changes,
    }  # fmt: skip
    found = {"time_s": NOW_S - 1, "policy": "hermes", "gpus": [0, 1], "sweeps": {}, "jobs": [job]}
    view_path("gpus").write_text(json.dumps(found))


def decide(action: str, reason: str, number: int = 0, sweep: str = SWEEP) -> None:
    outside: Any = None
    found = decision(JobId(f"{sweep}/{number}"), action, (1,), Reason(reason, (Term("g", 0.5),)),
                     time_s=100.0, policy="hermes", options={}, curve_age_s=None)  # fmt: skip
    DecisionLog(outside).append([found])


class Text(HTMLParser):
    """What a person reads of a page, and the tags in it."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.words: list[str] = []
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append(tag)
        self.addresses += [v for k, v in attrs if k in ("href", "src", "action")]

    def handle_data(self, data: str) -> None:
        if self.tags[-1:] not in (["style"], ["script"]):
            self.words.append(data)

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", " ".join(self.words))


def read(answer: Any) -> str:
    assert answer.status_code == 200, answer.text
    return Text(answer.text).text


def ended(number: int, state: str = "success", **changes: Any) -> PastRun:
    """A sweep that ran for 30 s at 10 s times its number."""
    record = sweep_record(**changes)
    record |= {"parent_run_id": f"parent-{number}"}
    run = RunRow(10 + number, "hermes_sweep", f"old-{number}", "plan", state, 10.0 * number, record)
    return PastRun(run, 10.0 * number + 30.0)


def sweep_run(number: int, state: str = "finished", **tags: str) -> SweepRun:
    ref = SweepRef(f"old-{number}", "7", f"parent-{number}")
    return SweepRun(ref, ref.sweep_id, state, "FINISHED", tags, 0, 1)


def trial_run(number: int, state: str, best: float, **changes: Any) -> TrialRun:
    metrics = {"hermes.best": LatestMetric(best, 0, 1), "hermes.final": LatestMetric(best, 0, 1)}
    segments = f'[[1, [{number}], 100.0, 130.0, 0, 3, "finished"]]'
    tags = {"hermes.segment_log": segments, **changes.pop("tags", {})}
    facts: dict[str, Any] = {"config": {"rate": 0.5}, "tags": tags, "metrics": metrics,
                             "status": "FINISHED", "started_ms": 1, "ended_ms": 2}  # fmt: skip
    return TrialRun(number, f"run-{number}", state=state, **{**facts, **changes})
