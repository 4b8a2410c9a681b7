"""Sweeps of stub scripts on the shared stack, seen from Airflow, MLflow, disk and processes.

MLflow and Airflow are asked over their own REST interfaces here, not through the product's code.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml

from hermes_ops.stack import processes
from hermes_ops.trial.checkpoint_store.store import safe_name
from tests.horovod_python import VARIABLES, horovod_python
from tests.integration.samplers import Sampler, held_gpus, sampling
from tests.torch_python import torch_python

SCRIPTS = Path(__file__).parent / "scripts"
DAG = "/api/v2/dags/hermes_sweep/dagRuns"
FINAL = {"finished", "failed", "stopped_early", "cancelled"}
SWEEP_TIMEOUT_S = 240.0


def await_(condition: Callable[[], Any], timeout_s: float = 120.0, period_s: float = 0.2) -> Any:
    """Return the first true value of `condition`; fail when there is none in time."""
    deadline_s = time.monotonic() + timeout_s
    while not (value := condition()):
        if time.monotonic() >= deadline_s:
            asked = traceback.extract_stack(limit=2)[0]  # a summary shows nothing but the message
            where = f"{Path(asked.filename).name}:{asked.lineno}"
            raise AssertionError(f"{where}: not within {timeout_s:g} s: {asked.line}")
        time.sleep(period_s)
    return value


def config(name: str, space: Mapping[str, list[Any]], *command: str, **changes: Any) -> Any:
    """A sweep over the grid of `space`; `trial`, `budget` and others are merged in."""
    trials = 1
    for values in space.values():
        trials *= len(values)
    base: dict[str, Any] = {
        "name": name,
        "objective": {"metric": "loss", "direction": "minimize"},
        "search": {
            "algorithm": "grid",
            "max_trials": trials,
            "space": {k: {"type": "choice", "values": v} for k, v in space.items()},
        },
        "trial": {"command": ["python", *command], "directory": str(SCRIPTS)},
        "budget": {"max_epochs": 1000},
    }
    for key, value in changes.items():
        base[key] = {**base.get(key, {}), **value} if isinstance(value, dict) else value
    return base


def stub(name: str, rates: list[float], epochs: int, pause: float, **changes: Any) -> Any:
    """A sweep of scripts/stub.py whose trial n falls by `rates[n]` an epoch.

    With `slow_while`, a file, its trials pause in each epoch until that file is removed.
    """
    options = ["--rate", "{rate}", "--epochs", str(epochs), "--pause", str(pause)]
    if slow_while := changes.pop("slow_while", None):
        options += ["--slow-while", str(slow_while)]
    budget = {"max_epochs": epochs, **changes.pop("budget", {})}
    return config(name, {"rate": rates}, "stub.py", *options, budget=budget, **changes)


LONG = 1000  # epochs of a trial that lasts until its test removes the file of `slow_while`


def workers(name: str, rates: list[float], log: Path, slow_while: Path, **trial: Any) -> Any:
    """A sweep of scripts/workers.py of 1 to 4 workers, as `stub`; they list themselves in `log`."""
    facts = {
        "gpus": {"min": 1, "max": 4},
        "workers": "one_per_gpu",
        "environment": {"WORKERS_LOG": str(log)},
        **trial,
    }
    content = stub(name, rates, LONG, 1.0, slow_while=slow_while, trial=facts)
    content["trial"]["command"][1] = "workers.py"
    return content


def horovod(name: str, log: Path, slow_while: Path, epochs: int, **changes: Any) -> Any:
    """A sweep of scripts/horovod_train.py of 1 to 4 workers, which list themselves in `log`."""
    trial = {"python": str(horovod_python()), "environment": {"WORKERS_LOG": str(log), **VARIABLES}}
    return _data_parallel("horovod_train.py", trial, name, slow_while, epochs, **changes)


def ddp(name: str, log: Path, slow_while: Path, epochs: int, **changes: Any) -> Any:
    """A sweep of scripts/ddp_train.py of 1 to 4 workers, which list themselves in `log`."""
    trial = {"python": torch_python(), "environment": {"WORKERS_LOG": str(log)}}
    return _data_parallel("ddp_train.py", trial, name, slow_while, epochs, **changes)


def _data_parallel(
    script: str, trial: Any, name: str, slow_while: Path, epochs: int, **changes: Any
) -> Any:
    options = ["--rate", "{rate}", "--epochs", str(epochs), "--slow-while", str(slow_while)]
    options += ["--pause", str(changes.pop("pause", 4.0))]
    trial |= {"gpus": {"min": 1, "max": 4}, "workers": "one_per_gpu"}
    budget = {"max_epochs": epochs, **changes.pop("budget", {})}
    return config(name, {"rate": [0.002]}, script, *options, trial=trial, budget=budget, **changes)


def slow_file(folder: Path) -> Path:
    """Make and return a file for `slow_while`."""
    file = folder / f"slow-{uuid.uuid4().hex[:6]}"
    file.touch()
    return file


def json_lines(file: Path) -> list[dict[str, Any]]:
    """Return the documents of a file that is being written: its last line may not be complete."""
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def alike(trials: int) -> list[float]:
    """Rates of trials that are as good as each other (two equal choices would be refused)."""
    return [1.0 + n / 10_000 for n in range(trials)]


@functools.cache
def plain_curve(rate: float, epochs: int) -> tuple[float, ...]:
    """The losses of a stub that is run by itself, without Hermes and without a stop."""
    script = [sys.executable, str(SCRIPTS / "stub.py"), "--pause", "0"]
    with tempfile.TemporaryDirectory() as folder:
        said = subprocess.run(
            [*script, "--rate", repr(rate), "--epochs", str(epochs)],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "HERMES_CHECKPOINT_DIR": folder},
        )
    return tuple(float(line.partition("loss=")[2]) for line in said.stdout.splitlines())


def kill_at_once(members: Iterable[processes.HomeProcess]) -> None:
    """Kill these processes, so that none of them sees another go.

    No script prints and saves an epoch when nobody reads any more: trials come first.
    A process may end by itself between being listed and being killed.
    """
    killed = [m.process for m in sorted(members, key=lambda m: m.supervises_trial or not m.trial)]
    for process in killed:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.suspend()
    for process in killed:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(killed, timeout=10)


def program(stack: Any, name: str) -> int:
    """Return the process id of one of the stack's programs."""
    document = json.loads(stack.hermes("status", "--json").stdout)
    return next(int(p["pid"]) for p in document["programs"] if p["name"] == name)


def kill_supervisor(home: Path, sweep: str, trial: int = 0) -> None:
    """Kill the hermes-trial of a trial of that sweep; the next one where it has just ended."""

    def kills() -> bool:
        for member in processes.leaders(processes.members(home)):
            with contextlib.suppress(psutil.Error):
                of = member.process.environ()
                if (of["HERMES_SWEEP"], of["HERMES_TRIAL"]) == (sweep, str(trial)):
                    member.process.kill()
                    return True
        return False

    await_(kills, period_s=0.05)


class Patient(httpx.HTTPTransport):
    """Asks again after a 500: Airflow's writers meet on SQLite, and one of them is refused.

    A request that had been done all the same may be answered with a conflict then.
    """

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        for _ in range(4):
            answer = super().handle_request(request)
            if answer.status_code != 500:
                return answer
            answer.close()
        return super().handle_request(request)


class Lab:
    """The shared stack with what tests of sweeps need of it."""

    def __init__(self, stack: Any, folder: Path) -> None:
        self.stack, self.home, self._folder = stack, stack.home, folder
        self.connect()

    def connect(self) -> None:
        """Connect to the stack; again where it has been started again, on other ports."""
        self.airflow = self.logged_in("admin")
        environment = self.stack.environment  # with a log-in if MLflow asks for one
        names = ("MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD")
        login = tuple(environment[name] for name in names if name in environment)
        self.mlflow = httpx.Client(
            base_url=f"{self.stack.mlflow_url}/api/2.0/mlflow",
            timeout=60,
            trust_env=False,
            auth=login or None,
        )

    def logged_in(self, user: str) -> httpx.Client:
        """Airflow's REST interface as that user of the stack reaches it."""
        password = (self.home / "secrets" / f"{user}.password").read_text().strip()
        client = httpx.Client(
            base_url=self.stack.airflow_url, timeout=60, trust_env=False, transport=Patient()
        )
        answer = client.post("/auth/token", json={"username": user, "password": password})
        client.headers["Authorization"] = f"Bearer {answer.json()['access_token']}"
        return client

    def close(self) -> None:
        self.airflow.close()
        self.mlflow.close()

    def restart_stack(self, *options: str) -> None:
        """Kill the whole stack with its trials, and start it again with these options."""
        kill_at_once(processes.members(self.home))
        again = self.stack.up(*options)
        assert again.returncode == 0, again.stdout + again.stderr
        self.close()
        self.connect()

    def hermes(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self.stack.hermes(*arguments, timeout_s=SWEEP_TIMEOUT_S)  # type: ignore[no-any-return]

    def file(self, content: Any) -> Path:
        path = Path(self._folder) / f"{content['name']}-{uuid.uuid4().hex[:6]}.json"
        path.write_text(json.dumps(content))
        return path

    def start(self, content: Any, client: httpx.Client | None = None) -> Sweep:
        """Trigger a sweep over REST, as the form does; `client` is that of another user."""
        run = f"{content['name']}-{uuid.uuid4().hex[:6]}"
        body = {"dag_run_id": run, "conf": content, "logical_date": None}
        answer = (client or self.airflow).post(DAG, json=body)
        assert answer.status_code in (200, 409), answer.text  # 409: the failed request was done
        return Sweep(self, run)

    def run(self, content: Any) -> Sweep:
        sweep = self.start(content)
        sweep.await_end()
        return sweep

    @contextlib.contextmanager
    def sampled(self) -> Iterator[Sampler]:
        with sampling(Sampler(self.home)) as sampler:
            yield sampler

    @contextlib.contextmanager
    def pool(self, slots: int) -> Iterator[None]:
        """The pool with another number of slots for a while."""
        self.resize_pool(slots)
        try:
            yield
        finally:
            self.resize_pool(2)

    def resize_pool(self, slots: int) -> None:
        """Give the pool that many slots."""
        body = {"pool": "gpus", "slots": slots, "include_deferred": True}
        answer = self.airflow.patch("/api/v2/pools/gpus", json=body)
        assert answer.status_code == 200, answer.text

    @contextlib.contextmanager
    def policy(self, name: str, **options: int) -> Iterator[None]:
        """Another policy for a while, by `hermes policy`."""
        pairs = [part for k, v in options.items() for part in ("--option", f"{k}={v}")]
        changed = self.hermes("policy", name, *pairs)
        assert changed.returncode == 0, changed.stderr
        try:
            yield
        finally:
            assert self.hermes("policy", "frontrunner").returncode == 0

    @contextlib.contextmanager
    def quota(self, teams: Any) -> Iterator[str]:
        """The pool with this quota for a while; what `hermes pool quota` says of it."""
        file = self._folder / f"teams-{uuid.uuid4().hex[:6]}.yaml"
        file.write_text(yaml.safe_dump(teams))
        chosen = self.hermes("pool", "quota", str(file))
        assert chosen.returncode == 0, chosen.stderr
        try:
            yield chosen.stdout
        finally:
            removed = self.hermes("pool", "quota", "--remove")
        assert "has no quota from now on" in removed.stdout

    def stop_sweeps(self) -> None:
        """Stop the sweeps that have not ended."""
        query = {"state": ["queued", "running"]}
        for run in self.airflow.get(DAG, params=query).json()["dag_runs"]:
            sweep = Sweep(self, run["dag_run_id"])
            self.hermes("sweep", "stop", sweep.id, "--reason", "its test has ended")
            sweep.await_end()

    def runs(self, sweep: str) -> list[dict[str, Any]]:
        """Every MLflow run of a sweep, its parent included, with its tags as a mapping."""
        experiments = self._mlflow("experiments/search", {"max_results": 1000})["experiments"]
        body = {
            "experiment_ids": [e["experiment_id"] for e in experiments],
            "filter": f"tags.`hermes.sweep` = '{sweep}'",
            "max_results": 1000,
        }
        runs: list[dict[str, Any]] = self._mlflow("runs/search", body).get("runs", [])
        for run in runs:
            run["tags"] = {t["key"]: t["value"] for t in run["data"].get("tags", [])}
            run["params"] = {p["key"]: p["value"] for p in run["data"].get("params", [])}
        return runs

    def history(self, run_id: str, metric: str = "loss") -> list[tuple[int, float]]:
        """All stored points of a metric by step."""
        query = {"run_id": run_id, "metric_key": metric}
        found = self.mlflow.get("/metrics/get-history", params=query).json().get("metrics", [])
        return sorted((int(m.get("step", 0)), float(m["value"])) for m in found)

    def artifacts(self, run_id: str, path: str = "") -> set[str]:
        query = {"run_id": run_id, "path": path} if path else {"run_id": run_id}
        found = self.mlflow.get("/artifacts/list", params=query).json().get("files", [])
        return {f["path"] for f in found}

    def _mlflow(self, method: str, body: Any) -> Any:
        answer = self.mlflow.post(f"/{method}", json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()


class Sweep:
    """One sweep of the shared stack."""

    def __init__(self, lab: Lab, run_id: str) -> None:
        self.lab, self.id = lab, run_id
        self.folder = lab.home / "sweeps" / safe_name(run_id)

    @property
    def state(self) -> str:
        return str(self.lab.airflow.get(f"{DAG}/{self.id}").json()["state"])

    def await_end(self, timeout_s: float = SWEEP_TIMEOUT_S) -> str:
        try:
            ended = await_(lambda: (s := self.state) in ("success", "failed") and s, timeout_s, 0.5)
            return str(ended)
        except AssertionError as error:
            states = {task: entry["state"] for task, entry in self.tasks().items()}
            error.add_note(f"{self.id} is {self.state}, its tasks are {states}")
            raise

    def tasks(self) -> dict[tuple[str, int], dict[str, Any]]:
        """Airflow's task instances by (task, number); -1 for tasks that are not mapped."""
        query = {"limit": 1000}
        answer = self.lab.airflow.get(f"{DAG}/{self.id}/taskInstances", params=query)
        return {(t["task_id"], t["map_index"]): t for t in answer.json()["task_instances"]}

    def log(self, task: str, number: int = -1, attempt: int = 1) -> str:
        """A task's log as Airflow's page shows it."""
        path = f"{DAG}/{self.id}/taskInstances/{task}/logs/{attempt}"
        answer = self.lab.airflow.get(path, params={"map_index": number, "full_content": True})
        assert answer.status_code == 200, answer.text
        lines = answer.json()["content"]
        errors = [e["exc_value"] for line in lines for e in line.get("error_detail") or ()]
        return "\n".join([str(line.get("event", line)) for line in lines] + errors)

    def document(self) -> Any:
        """What `hermes sweep watch --json` prints of an ended sweep."""
        said = self.lab.hermes("sweep", "watch", self.id, "--json")
        assert said.stdout, said.stderr
        return json.loads(said.stdout)

    @property
    def parent(self) -> Any:
        return next(r for r in self.lab.runs(self.id) if "hermes.trial" not in r["tags"])

    def runs(self) -> dict[int, list[dict[str, Any]]]:
        """The MLflow runs of each trial: one, or the product is wrong."""
        found: dict[int, list[dict[str, Any]]] = {}
        for run in self.lab.runs(self.id):
            if "hermes.trial" in run["tags"]:
                found.setdefault(int(run["tags"]["hermes.trial"]), []).append(run)
        return found

    def states(self) -> dict[int, str]:
        """The final state of each trial that was opened, as its MLflow run says it."""
        return {n: runs[0]["tags"]["hermes.state"] for n, runs in self.runs().items()}

    def curve(self, number: int) -> list[tuple[int, float]]:
        return self.lab.history(self.runs()[number][0]["info"]["run_id"])

    def assert_whole(self, number: int, rate: float, epochs: int = LONG) -> None:
        """Check that a trial has one run, with the curve of a stub that nothing has stopped."""
        (run,) = self.runs()[number]
        curve = self.lab.history(run["info"]["run_id"])
        assert [step for step, _ in curve] == list(range(1, epochs + 1)), curve
        assert [loss for _, loss in curve] == pytest.approx(plain_curve(rate, epochs), abs=1e-9)

    def tag(self, number: int, name: str) -> str:
        return str(self.runs()[number][0]["tags"][name])

    def segments(self, number: int) -> list[dict[str, Any]]:
        """The trial's segments from its own folder, begin and end put together."""
        found: dict[int, dict[str, Any]] = {}
        file = self.folder / "trials" / str(number) / "segments.jsonl"
        for part in json_lines(file):
            found.setdefault(part["epoch"], {}).update(part)
        return [found[epoch] for epoch in sorted(found)]

    def sizes(self, number: int = 0) -> list[int]:
        """Return the GPUs of each segment of a trial so far."""
        return [len(segment["gpus"]) for segment in self.segments(number)]

    def lines(self, number: int) -> int:
        """How many metrics the trial has reported until now."""
        file = self.folder / "trials" / str(number) / "metrics.jsonl"
        return len(file.read_text().splitlines()) if file.exists() else 0

    def decisions(self) -> list[dict[str, Any]]:
        return json_lines(self.folder / "decisions.jsonl")

    def await_preemptible(self, trials: int, pause_s: float) -> None:
        """Wait until its first trials train and any of them may be preempted.

        Also without a quantum (k = 0) a trial keeps its GPUs for its start, taken as 5 s until its
        cost is known; before that a policy takes those of the other trials.
        """
        epochs = 6.0 / pause_s
        await_(lambda: all(self.lines(number) > epochs for number in range(trials)))

    def on_gpus(self) -> set[int]:
        """The trials of this sweep that hold GPUs now."""
        live = (trial.rpartition("/") for trial, _ in held_gpus(self.lab.home))
        return {int(number) for sweep, _, number in live if sweep == self.id}

    def live(self) -> list[str]:
        """The trials of this sweep whose processes are there now, scripts included."""
        found = []
        for member in processes.trials(processes.members(self.lab.home)):
            with contextlib.suppress(psutil.Error, OSError):  # it has just ended
                if member.process.environ().get("HERMES_SWEEP") == self.id:
                    found.append(member.trial)
        return found


def resized_by_another(lab: Lab, folder: Path) -> tuple[Sweep, Sweep, Sampler]:
    """Run a trial alone on two GPUs, and a second one that comes and ends while the first lasts."""
    lasts = slow_file(folder), slow_file(folder)

    def start(name: str, slow_while: Path) -> Sweep:
        trial = {"gpus": {"min": 1, "max": 2}}
        return lab.start(stub(name, alike(1), LONG, 0.5, slow_while=slow_while, trial=trial))

    with lab.policy("elastic-fifo", guard_k=0), lab.sampled() as sampler:
        first = start("wide", lasts[0])
        await_(lambda: first.sizes() == [2])
        second = start("late", lasts[1])
        await_(lambda: first.sizes()[-1] == 1 and second.sizes() == [1])
        lasts[1].unlink()
        second.await_end()
        await_(lambda: first.sizes()[-1] == 2)
        lasts[0].unlink()
        first.await_end()
    return first, second, sampler
