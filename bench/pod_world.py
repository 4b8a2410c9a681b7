"""A large busy pool whose tasks and pods are stubs.

Nodes and pods are objects of a real cluster's API whose status says that they run: there is no
kubelet. Trials are rows of a real Airflow's database: there is no scheduler and no worker.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any
from uuid import UUID, uuid4

from bench.measure import Figures
from hermes_ops.airflow.identity import MAIN_DAG, PLAN_TASK, TRIAL_TASK
from hermes_ops.airflow.records import SEGMENT_KEY, SWEEP_KEY, SegmentRecord, SweepRecord, encode
from hermes_ops.config import PodSpec, SweepConfig, parse
from hermes_ops.kubernetes import PodRequest, connect, manifest

GPUS_A_NODE = 8
NODE_LABEL = "hermes-bench"
_WITHOUT_KUBELET = ("node.kubernetes.io/unreachable", "node.kubernetes.io/not-ready")
_LABEL = re.compile(r'\w+="[^"]*"')
_OF_PODS = {'resource="pods"', 'scope="namespace"'}
AT_ONCE = 4
"""Concurrent requests while the world is created."""


def sweep_config(name: str, trials: int, namespace: str) -> SweepConfig:
    """Return a sweep of pods that the triggerer holds."""
    names = ("learning_rate", "momentum", "layers")
    arguments = [part for n in names for part in (f"--{n}", f"{{{n}}}")]
    content: Figures = {
        "name": name,
        "objective": {"metric": "loss"},
        "search": {
            "algorithm": "random",
            "seed": 1,
            "max_trials": trials,
            "space": {
                "learning_rate": {"type": "loguniform", "low": 1e-4, "high": 1e-1},
                "momentum": {"type": "uniform", "low": 0.5, "high": 0.99},
                "layers": {"type": "integer", "low": 1, "high": 8},
            },
        },
        "trial": {
            "command": ["python", "train.py", *arguments],
            "directory": "/opt/work",
            "run_in": "pod",
            "pod": {
                "deferrable": True,
                "image": "localhost/none",
                "claim": "trials",
                "namespace": namespace,
                "tolerations": [{"key": k, "effect": "NoExecute"} for k in _WITHOUT_KUBELET],
            },
        },
        "budget": {"max_epochs": 100},
    }
    return parse(content, source=name, base=None)


@dataclass(slots=True)
class Fleet:
    """Nodes and pods in a cluster's API."""

    namespace: str
    spec: PodSpec
    api: Any = field(default_factory=connect)

    def nodes(self, gpus: int) -> tuple[str, ...]:
        """Create nodes for that number of GPUs; return the node of each GPU."""
        names = [f"bench-{i:03d}" for i in range(-(-gpus // GPUS_A_NODE))]
        with ThreadPoolExecutor(AT_ONCE) as pool:
            list(pool.map(self._node, names))
        return tuple(names[gpu // GPUS_A_NODE] for gpu in range(gpus))

    def _node(self, name: str) -> None:
        room = {"nvidia.com/gpu": str(GPUS_A_NODE), "cpu": "64", "memory": "512Gi", "pods": "110"}
        ready = {"type": "Ready", "status": "True", "reason": "KubeletReady", "message": "bench"}
        labels = {NODE_LABEL: "node", "kubernetes.io/hostname": name}
        self.api.create_node({"metadata": {"name": name, "labels": labels}})
        status = {"capacity": room, "allocatable": room, "conditions": [ready]}
        self.api.patch_node_status(name, {"status": status})

    def run(self, sweep: str, number: int, epoch: int, node: str) -> None:
        """Create a running pod of that lease on that node."""
        pod = manifest(self.spec, _facts(sweep, number, epoch))
        name = pod["metadata"]["name"]
        pod["spec"]["nodeName"] = node
        plain = {"_preload_content": False}
        self.api.create_namespaced_pod(self.namespace, pod, **plain)
        now = datetime.now(UTC).isoformat()
        container = {
            "name": "base", "image": "localhost/none", "imageID": "none", "ready": True,
            "restartCount": 0, "containerID": "bench://none",
            "state": {"running": {"startedAt": now}},
        }  # fmt: skip
        status = {"phase": "Running", "startTime": now, "containerStatuses": [container]}
        self.api.patch_namespaced_pod_status(name, self.namespace, {"status": status}, **plain)

    def run_all(self, pods: Iterable[tuple[str, int, int, str]]) -> None:
        """Create several running pods concurrently."""
        with ThreadPoolExecutor(AT_ONCE) as pool:
            list(pool.map(lambda pod: self.run(*pod), pods))

    def end(self, sweep: str, number: int, epoch: int) -> None:
        """Delete the pod of that lease."""
        name = _facts(sweep, number, epoch).name
        self.api.delete_namespaced_pod(
            name, self.namespace, grace_period_seconds=0, _preload_content=False
        )

    def count(self) -> int:
        """Return the number of pods."""
        answer = self.api.list_namespaced_pod(self.namespace, _preload_content=False)
        return len(json.loads(answer.data)["items"])

    def is_being_deleted(self, sweep: str, number: int, epoch: int) -> bool:
        """Return whether the pod of that lease is being deleted."""
        name = _facts(sweep, number, epoch).name
        answer = self.api.read_namespaced_pod(name, self.namespace, _preload_content=False)
        return "deletionTimestamp" in json.loads(answer.data)["metadata"]

    def calls(self) -> dict[str, int]:
        """Return how often pods of one namespace were listed, and watched to the watch's end."""
        answer = self.api.api_client.call_api(
            "/metrics", "GET", auth_settings=["BearerToken"], _preload_content=False
        )
        found = dict.fromkeys(("list", "watch"), 0)
        for line in answer.data.decode().splitlines():
            if not line.startswith("apiserver_request_total{"):
                continue
            if set(_LABEL.findall(line)) >= _OF_PODS:
                verb = next((v for v in found if f'verb="{v.upper()}"' in line), None)
                if verb is not None:
                    found[verb] += round(float(line.rpartition(" ")[2]))
        return found

    def clear(self) -> None:
        """Delete all pods and nodes."""
        self.api.delete_collection_namespaced_pod(self.namespace, grace_period_seconds=0)
        self.api.delete_collection_node(label_selector=NODE_LABEL)


def _facts(sweep: str, number: int, epoch: int) -> PodRequest:
    return PodRequest(
        sweep=sweep,
        number=number,
        epoch=epoch,
        attempt=1,
        identity=sweep,
        folder=f"{sweep}/trials/{number}",
        arguments=("--epoch", str(epoch), "--", "python", "train.py", "--learning-rate", "0.1"),
        environment={"HERMES_SWEEP": sweep, "HERMES_TRIAL": str(number)},
        gpus=1,
        grace_s=30.0,
        user=1000,
    )


@dataclass(frozen=True, slots=True)
class TrialRowKey:
    """The task instance of a trial, its sweep and its number."""

    id: UUID
    sweep: str
    number: int


@dataclass(slots=True)
class Rows:
    """Sweeps and trials as rows of Airflow's tables."""

    engine: Any
    pool: str
    _tables: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        from airflow.models.dag_version import DagVersion
        from airflow.models.dagrun import DagRun
        from airflow.models.pool import Pool
        from airflow.models.task_state_store import TaskStateStoreModel
        from airflow.models.taskinstance import TaskInstance

        models: dict[str, Any] = {
            "run": DagRun, "ti": TaskInstance, "store": TaskStateStoreModel, "pool": Pool,
            "version": DagVersion,
        }  # fmt: skip
        self._tables = {name: model.__table__ for name, model in models.items()}

    def slots(self, count: int) -> None:
        """Set the number of slots of the pool."""
        pool = self._tables["pool"]
        with self.engine.begin() as connection:
            connection.execute(pool.update().where(pool.c.pool == self.pool).values(slots=count))

    def begin(
        self, sweep: str, record: SweepRecord, trials: Sequence[tuple[Figures, Figures]]
    ) -> None:
        """Insert a running sweep: for each trial the columns of its task and its records by key."""
        from sqlalchemy import select

        now, t = datetime.now(UTC), self._tables
        with self.engine.begin() as connection:
            version = connection.execute(
                select(t["version"].c.id).where(t["version"].c.dag_id == MAIN_DAG)
            ).scalars().first()  # fmt: skip
            run = {"dag_id": MAIN_DAG, "run_id": sweep, "run_type": "manual", "state": "running",
                   "run_after": now, "start_date": now, "queued_at": now,
                   "created_dag_version_id": version, "log_template_id": None}  # fmt: skip
            key = connection.execute(t["run"].insert().values(**run)).inserted_primary_key[0]
            own = {"dag_id": MAIN_DAG, "run_id": sweep}
            shared = {**own, "pool": self.pool, "try_number": 1, "max_tries": 0,
                      "dag_version_id": version}  # fmt: skip
            plan = {**shared, "id": uuid4(), "task_id": PLAN_TASK, "map_index": -1,
                    "state": "success", "pool_slots": 1, "priority_weight": 1}  # fmt: skip
            tasks = [
                {**shared, "id": uuid4(), "task_id": TRIAL_TASK, "map_index": n, **columns}
                for n, (columns, _) in enumerate(trials)
            ]
            connection.execute(t["ti"].insert(), [plan, *tasks])
            found = [(PLAN_TASK, -1, SWEEP_KEY, encode(record))]
            for n, (_, records) in enumerate(trials):
                found += [(TRIAL_TASK, n, k, v) for k, v in records.items()]
            told = [
                {**own, "dag_run_id": key, "task_id": task, "map_index": n, "key": k,
                 "value": json.dumps(value), "updated_at": now}
                for task, n, k, value in found
            ]  # fmt: skip
            connection.execute(t["store"].insert(), told)

    def end(self, sweep: str) -> None:
        """Set the sweep to ended."""
        run = self._tables["run"]
        with self.engine.begin() as connection:
            connection.execute(run.update().where(run.c.run_id == sweep).values(state="success"))

    def write_segment(
        self,
        connection: Any,  # noqa: ANN401 - SQLAlchemy's
        trial: TrialRowKey,
        segment: SegmentRecord,
        **columns: Any,  # noqa: ANN401 - any columns
    ) -> None:
        """Write the record of a trial's task, and its state in Airflow's table."""
        ti = self._tables["ti"]
        connection.execute(ti.update().where(ti.c.id == trial.id).values(**columns))
        self.put(connection, trial.sweep, trial.number, SEGMENT_KEY, encode(segment))

    def put(
        self,
        connection: Any,  # noqa: ANN401 - SQLAlchemy's
        sweep: str,
        number: int,
        key: str,
        value: Figures,
    ) -> None:
        """Replace a record of a trial."""
        from sqlalchemy import select

        store, run, text = self._tables["store"], self._tables["run"], json.dumps(value)
        place = {"run_id": sweep, "task_id": TRIAL_TASK, "map_index": number, "key": key}
        here = [store.c[name] == found for name, found in place.items()]
        if not connection.execute(store.update().where(*here).values(value=text)).rowcount:
            of_run = select(run.c.id).where(run.c.run_id == sweep).scalar_subquery()
            row = {**place, "dag_id": MAIN_DAG, "dag_run_id": of_run, "value": text}
            connection.execute(store.insert().values(**row, updated_at=datetime.now(UTC)))
