"""What tests of faults have in common: a trial, what must hold at its end, how soon it was back."""

from __future__ import annotations

import contextlib
import itertools
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from hermes_ops.stack import processes
from tests.integration import harness

RATE, EPOCHS, PAUSE_S = 0.5, 30, 0.6
SWEEP_S = 300.0
START_S = 240.0
"""Until a trial trains: the first sweep of an Airflow that has just started waits longest."""
NO_POD_S = 60.0
"""How soon after a sweep's end, or a fault, no pod without a lease may be left."""


def check(sweep: Any, lab: Any, *outcomes: list[str]) -> None:
    """It ends finished in one of these ways, with the curve of a run that nothing disturbed."""
    sweep.await_end(SWEEP_S)
    whole(sweep, lab)
    assert [s["outcome"] for s in sweep.segments(0)] in outcomes


def whole(sweep: Any, lab: Any) -> None:
    """Its trial has ended once, finished, never ran twice, lost an epoch at most, left no pod."""
    assert sweep.states() == {0: "finished"}, sweep.log("trial", 0)
    assert sweep.tasks()["trial", 0]["state"] == "success"
    sweep.assert_whole(0, RATE, EPOCHS)
    never_twice(sweep, 0)
    harness.await_(lambda: not lab.cluster.pods(sweep=sweep.id), NO_POD_S)


def never_twice(sweep: Any, number: int) -> None:
    """Its segments follow each other, and each begins at most an epoch behind what was done."""
    parts = sweep.segments(number)
    points = metrics(sweep, number)
    for before, after in itertools.pairwise(parts):
        assert before.get("end_s", 0.0) <= after["start_s"]
        done = [p["step"] for p in points if p["time_ms"] / 1000 < after["start_s"]]
        assert after["first_step"] >= max(done, default=0) - 1


def metrics(sweep: Any, number: int) -> list[dict[str, Any]]:
    """Every metric that the trial has reported, as it stands in its folder."""
    file = sweep.folder / "trials" / str(number) / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines() if line]


def pods_seen(sweep: Any, number: int) -> list[dict[str, Any]]:
    """What each of the trial's pods said of itself when it began."""
    file = sweep.folder / "trials" / str(number) / "pods.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()]


@dataclass(frozen=True)
class Recovery:
    """A fault of the cluster, from its beginning; prints how long the trial stood still."""

    sweep: Any
    fault: str
    number: int = 0

    @contextlib.contextmanager
    def measured(self) -> Any:
        """From here; at the end the time to the first step of the next pod, if there was one."""
        began_s = time.time()
        yield
        pods = [p["started_s"] for p in pods_seen(self.sweep, self.number)]
        later = [started_s for started_s in pods if started_s > began_s]
        steps = [p["time_ms"] / 1000 for p in metrics(self.sweep, self.number)]
        if later:
            back_s = min((t for t in steps if t > later[0]), default=float("nan")) - began_s
            print(f"\nrecovery: {self.fault}: {back_s:.1f} s to the next pod's first step")
        else:
            after = [t for t in steps if t > began_s]
            gap_s = max((b - a for a, b in itertools.pairwise(after)), default=0.0)
            print(f"\nrecovery: {self.fault}: same pod, {gap_s:.1f} s between steps at most")


def resumed(sweep: Any, former: str, lab: Any, timeout_s: float = 120.0) -> None:
    """Wait until another pod of the trial runs."""

    def fresh() -> bool:
        pods = lab.cluster.pods(sweep=sweep.id)
        return any(
            p["metadata"]["uid"] != former and p["status"]["phase"] == "Running" for p in pods
        )

    harness.await_(fresh, timeout_s)


def inside(sweep: Any) -> int:
    """The host's process id of the guard in the pod's container."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if "hermes_ops.trial" not in process.cmdline():
                continue
            status = Path(f"/proc/{process.pid}/status").read_text()
            within = next(n for n in status.splitlines() if n.startswith("NSpid:")).split()
            if within[-1] == "1" and process.environ().get("HERMES_SWEEP") == sweep.id:
                return int(process.pid)
    pytest.fail("the pod's process is not on this machine: this fault cannot be made here")


def program(lab: Any, name: str) -> psutil.Process:
    """The main process of one of the stack's programs."""
    own = [m.process for m in processes.members(lab.home) if m.program == name]
    pids = {p.pid for p in own}
    return next(p for p in own if p.ppid() not in pids)


def task_process(sweep: Any, number: int) -> psutil.Process:
    """The process of a trial's task; its parent is the worker that Airflow runs it in."""
    title = f"airflow worker -- {sweep.tasks()['trial', number]['id']}"
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if title in " ".join(process.cmdline()):
                return process
    pytest.fail(f"no process is called {title!r}")
