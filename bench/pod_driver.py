"""The controller's loop on a pool of 1,000 GPUs whose trials are pods of a real cluster's API."""

from __future__ import annotations

import contextlib
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from bench import pod_cluster, postgres, stack
from bench.measure import QUICK, ROOT, Figures, NotMeasuredError, await_, child, environment
from hermes_ops.stack import client_environment
from hermes_ops.stack.layout import Layout
from hermes_ops.stack.supervisor_client import SupervisorClient

NOT_STARTED = ["controller", "scheduler", "dag-processor", "triggerer"]
"""Programs of the stack that do not run: the benchmark has its own controller and stub trials."""

POLICY = "frontrunner"
WAITING, ROUNDS = (60, 5) if QUICK else (5_000, 60)
PODS = (8, 24) if QUICK else (100, 1_000)
ENDS = 2
CASE_S = 280.0


@dataclass(frozen=True, slots=True)
class DriverCase:
    """Pods, one a GPU, and waiting trials, of which some were preempted before.

    `ends` trials end in each round, so that as many others begin.
    """

    namespace: str
    pods: int
    waiting: int
    preempted: int
    policy: str
    rounds: int
    ends: int
    seed: int = 1


def run() -> Figures:
    """Measure 100 and 1,000 pods; as many of the 5,000 waiting trials were preempted before."""
    with contextlib.ExitStack() as held:
        held.enter_context(pod_cluster.cluster(nodes=1, gpus=1))
        server = held.enter_context(postgres.server())
        databases = ("--airflow-db", server.url("airflow"), "--mlflow-db", server.url("mlflow"))
        own = held.enter_context(stack.running(2, "--standby", 0, *databases))
        SupervisorClient(Layout(own.home)).stop_programs(NOT_STARTED)
        found = {f"pods_{pods}": _measured(own, pods) for pods in PODS}
    return {
        **found,
        "waiting": WAITING,
        "policy": POLICY,
        "ends_a_round": ENDS,
        "target_loop_ms": 500,
    }


def _measured(own: stack.Stack, pods: int) -> Figures:
    with pod_cluster.namespace() as (api, name):
        await_(lambda: pod_cluster.takes_pods(api, name), 30.0, "the namespace takes pods", 0.2)
        case = DriverCase(name, pods, WAITING, min(pods, WAITING), POLICY, ROUNDS, ENDS)
        given, result = own.home / f"{name}.json", own.home / f"{name}-figures.json"
        given.write_text(json.dumps(asdict(case)))
        command = [sys.executable, "-m", "bench.pod_rounds", given, result]
        with child(command, environment(**client_environment(own.home)), cwd=ROOT) as process:
            if code := process.wait(CASE_S):
                raise NotMeasuredError(f"the controller with {pods} pods ended with {code}")
    return _read(result)


def _read(result: Path) -> Figures:
    found: Figures = json.loads(result.read_text())
    return found
