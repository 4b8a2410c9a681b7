"""A sweep whose services are killed one by one, then all at once, while its trials train."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest

from hermes_ops.stack import processes

pytestmark = [pytest.mark.integration, pytest.mark.heavy, pytest.mark.timeout(1500)]

EPOCHS = 100
TRIALS = 8
BACK_WITHIN_S = 120.0
SCRIPT = """
import json, os, sys, time
folder = os.environ["HERMES_CHECKPOINT_DIR"]
if os.fork() == 0:  # gets away: a session of its own, an orphan, another program and environment
    os.setsid()
    if os.fork() == 0:
        null = os.open(os.devnull, os.O_RDWR)
        for handle in (0, 1, 2):
            os.dup2(null, handle)
        code = "import time; time.sleep(3600)"
        os.execve(sys.executable, ["sshd", "-c", code, os.path.dirname(folder)], {})
    os._exit(0)
state = os.path.join(folder, "state.json")
epoch = json.load(open(state))["epoch"] if os.path.exists(state) else 0
rate = float(sys.argv[1])
own = os.environ["HERMES_TRIAL"]
found = open("whose").read() if os.path.exists("whose") else None  # in the working directory
if found not in (own, None) or (epoch and found is None):
    sys.exit(f"trial {own} is at epoch {epoch} in the working directory of trial {found}")
open("whose", "w").write(own)
with open(os.path.join(os.path.dirname(folder), "starts.log"), "a") as log:
    log.write(f"{os.getpid()} {time.time()} {epoch}\\n")
metrics = os.environ["HERMES_METRICS_FILE"]
def is_read():
    return os.path.exists(metrics) and f'"step": {epoch},' in open(metrics).read()
while epoch < EPOCHS:
    slow = os.path.exists(sys.argv[2])
    if slow:
        time.sleep(0.5)
    epoch += 1
    print(f"epoch={epoch} loss={1 / (1 + rate * epoch):.8f}", flush=True)
    while slow and not is_read():  # what has only been printed is lost if its reader is killed too
        time.sleep(0.01)
    with open(state + ".new", "w") as file:
        json.dump({"epoch": epoch}, file)
    os.replace(state + ".new", state)
"""


def sweep_file(folder: Path, slow: Path) -> Path:
    """Write a sweep whose trials pause in each epoch until the file `slow` is removed."""
    (folder / "train.py").write_text(SCRIPT.replace("EPOCHS", str(EPOCHS)))
    file = folder / "sweep.json"
    file.write_text(
        json.dumps(
            {
                "name": "crash",
                "objective": {"metric": "loss", "direction": "minimize"},
                "search": {
                    "algorithm": "random",
                    "max_trials": TRIALS,
                    "space": {"rate": {"type": "uniform", "low": 0.1, "high": 3.0}},
                },
                "trial": {
                    "command": ["python", "train.py", "{rate}", str(slow)],
                    "directory": "copy",
                },
                "budget": {"max_epochs": EPOCHS},
            }
        )
    )
    return file


class Sweep:
    """A sweep of one stack, seen from its files and processes."""

    def __init__(self, stack: Any, sweep_id: str) -> None:
        self.stack, self.id = stack, sweep_id
        self.trials = stack.home / "sweeps" / sweep_id / "trials"

    def lines(self) -> int:
        return sum(len(f.read_text().splitlines()) for f in self.trials.glob("*/metrics.jsonl"))

    def live(self) -> set[str]:
        found = processes.trials(processes.members(self.stack.home))
        return {m.trial for m in found if m.supervises_trial}

    def trains_again(self) -> None:
        """Two new lines come in: the first may have been on its way when the kill struck."""
        before = self.lines()
        wait_for(lambda: self.lines() >= before + 3 or self.ended(), BACK_WITHIN_S)

    def ended(self) -> bool:
        return bool((self.trials.parent / "report" / "summary.json").exists())


def wait_for(condition: Callable[[], bool], timeout_s: float) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, f"it did not happen within {timeout_s:g} s"
        time.sleep(0.2)


def strays(home: Path) -> list[psutil.Process]:
    """What the scripts have started to get away, whoever knows of it."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            command = process.cmdline()
            if command[:1] == ["sshd"] and command[-1].startswith(f"{home}/"):
                found.append(process)
    return found


def kill_everything(harness: Any, home: Path) -> list[psutil.Process]:
    """Kill all but what has got away; return that."""
    left = strays(home)
    harness.kill_at_once(m for m in processes.members(home) if m.process not in left)
    return left


@pytest.fixture(scope="module")
def survivor(
    tmp_path_factory: pytest.TempPathFactory, stack_at: Callable[[Path], Any], harness: Any
) -> Iterator[Sweep]:
    """A sweep that has lived through every kill, one after the other, and has ended by itself."""
    stack = stack_at(tmp_path_factory.mktemp("crash"))
    started = stack.up()
    assert started.returncode == 0, started.stderr
    try:
        slow = harness.slow_file(tmp_path_factory.mktemp("slow"))
        file = sweep_file(tmp_path_factory.mktemp("script"), slow)
        said = stack.hermes("sweep", "run", str(file))
        assert said.returncode == 0, said.stderr
        sweep = Sweep(stack, said.stdout.split()[1])
        wait_for(lambda: sweep.lines() > 4, 90)
        for name in ("controller", "scheduler", "mlflow", "api-server"):
            os.kill(harness.program(stack, name), signal.SIGKILL)
            sweep.trains_again()
        left = kill_everything(harness, stack.home)
        assert left, "nothing got away"
        again = stack.up()
        assert again.returncode == 0, again.stderr
        assert not any(process.is_running() for process in left)
        sweep.trains_again()
        slow.unlink()
        wait_for(sweep.ended, 600)
        wait_for(lambda: "running" not in state_of(sweep), 60)
        yield sweep
    finally:
        stopped = stack.down()
    assert stopped.returncode == 0, stopped.stderr


def state_of(sweep: Sweep) -> str:
    rows = json.loads(sweep.stack.hermes("sweep", "list", "--json").stdout)
    return next(str(r["state"]) for r in rows if r["dag_run_id"] == sweep.id)


def segments(sweep: Sweep, number: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for line in (sweep.trials / str(number) / "segments.jsonl").read_text().splitlines():
        record = json.loads(line)
        if "start_s" in record:
            found.append(record)
        else:
            found[-1].update(record)
    return found


def test_every_trial_ends_finished_though_every_service_was_killed(survivor: Sweep) -> None:
    summary = json.loads((survivor.trials.parent / "report" / "summary.json").read_text())
    assert Counter(t["state"] for t in summary["trials"]) == {"finished": TRIALS}
    assert state_of(survivor) == "finished"


def test_no_metric_is_lost_or_stored_twice(survivor: Sweep) -> None:
    from hermes_ops.tracking import Tracker
    from hermes_ops.tracking.tracker import require_sweep

    with closing(Tracker(survivor.stack.mlflow_url)) as tracker:
        runs = tracker.trials(require_sweep(tracker, survivor.id))
        assert len(runs) == TRIALS
        for run in runs:
            steps = [m.step for m in tracker.history(run.run_id, "loss")]
            assert sorted(steps) == list(range(1, EPOCHS + 1))


def test_no_trial_ran_twice_at_once(survivor: Sweep) -> None:
    for number in range(TRIALS):
        for before, after in pairwise(segments(survivor, number)):
            assert before["end_s"] <= after["start_s"]


def test_no_gpu_was_held_twice(survivor: Sweep) -> None:
    held = sorted(
        (s["start_s"], s["end_s"], gpu)
        for number in range(TRIALS)
        for s in segments(survivor, number)
        for gpu in s["gpus"]
    )
    for gpu in {g for _, _, g in held}:
        for (_, end, _), (start, _, _) in pairwise([h for h in held if h[2] == gpu]):
            assert end <= start


def test_finished_work_is_not_done_again(survivor: Sweep) -> None:
    for number in range(TRIALS):
        starts = (survivor.trials / str(number) / "starts.log").read_text().splitlines()
        epochs = [int(line.split()[2]) for line in starts]
        assert epochs == sorted(epochs)
        assert EPOCHS not in epochs


def test_no_process_of_a_trial_is_left(survivor: Sweep) -> None:
    assert survivor.live() == set()
    assert strays(survivor.stack.home) == []
