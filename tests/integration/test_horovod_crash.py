"""A search over Horovod trials of which a part, and everything, is killed in mid-resize."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from hermes_ops.stack import processes

pytestmark = [pytest.mark.integration, pytest.mark.horovod, pytest.mark.timeout(1800)]

SLOTS, FEWER, TRIALS, EPOCHS = 4, 2, 8, 120
WAIT_S = 480.0
SEARCH = {
    "algorithm": "tpe",
    "seed": 1,
    "max_trials": TRIALS,
    "space": {"rate": {"type": "loguniform", "low": 0.0002, "high": 0.01}},
}


@dataclass
class Crashes:
    """Two of eight trials at a time; the pool shrinks and grows, and with it their sizes."""

    stack: Any
    harness: Any
    folder: Path
    options: tuple[str, ...]
    slots: int = FEWER
    log: Path = field(init=False)
    lasts: Path = field(init=False)
    lab: Any = field(init=False)
    sweep: Any = field(init=False)
    looking: Any = field(init=False)

    def start(self) -> None:
        """Start the stack and the sweep."""
        self.log = self.folder / "workers"
        self.log.mkdir()
        self.lasts = self.harness.slow_file(self.folder)
        self.looking = self.harness.WorkerSampler(self.log)
        self.up()
        content = self.harness.horovod(
            "crash", self.log, self.lasts, EPOCHS, search=SEARCH, budget={"max_parallel": 2}
        )
        self.sweep = self.lab.start(content)

    def up(self) -> None:
        """Start what does not run, and connect to it."""
        started = self.stack.up(*self.options, slots=self.slots)
        assert started.returncode == 0, started.stdout + started.stderr
        self.lab = self.harness.Lab(self.stack, self.folder)

    def close(self) -> None:
        """Close the connections to the stack that runs now."""
        self.lab.close()

    def trains(self) -> None:
        """Wait until a worker trains on each slot, and a trial reports."""
        self.harness.await_(lambda: len(self.looking.alive()) == self.slots, WAIT_S)
        before = self._lines()
        self.harness.await_(lambda: self._lines() > before, WAIT_S)

    def _lines(self) -> int:
        return sum(self.sweep.lines(number) for number in range(TRIALS))

    def resizes(self) -> int:
        """Count the decisions to resize a trial."""
        return sum(decision["action"] == "resize" for decision in self.sweep.decisions())

    def kill_in_resize(self, slots: int, kill: Callable[[], object]) -> None:
        """Give the pool that many slots; kill as soon as a trial is to be resized for it."""
        before, self.slots = self.resizes(), slots
        self.lab.resize_pool(slots)
        self.harness.await_(lambda: self.resizes() > before, WAIT_S, 0.01)
        kill()
        self.trains()

    def kill_rank(self) -> None:
        """Kill the worker that has started last."""
        os.kill(self.looking.alive()[-1], signal.SIGKILL)

    def kill_supervisor(self) -> None:
        """Kill the hermes-trial of a trial."""
        self.harness.kill_supervisor(self.stack.home, self.sweep.id)

    def kill_program(self, name: str) -> None:
        """Kill a program of the stack."""
        os.kill(self.harness.program(self.stack, name), signal.SIGKILL)

    def kill_everything(self) -> None:
        """Kill the whole stack with its trials, and start it again."""
        self.harness.kill_at_once(processes.members(self.stack.home))
        self.lab.close()
        self.up()
        self.sweep.lab = self.lab


@pytest.fixture(scope="module")
def survived(
    tmp_path_factory: pytest.TempPathFactory,
    stack_at: Callable[[Path], Any],
    harness: Any,
    postgres: Any,
) -> Iterator[Crashes]:
    """A sweep that has lived through the kills and has ended; Airflow lies on PostgreSQL."""
    stack = stack_at(tmp_path_factory.mktemp("hvd"))
    policy = ("--policy", "elastic-frontrunner", "--policy-option", "guard_k=0")
    options = (*policy, "--airflow-db", postgres.url("horovod_airflow"))
    crashes = Crashes(stack, harness, tmp_path_factory.mktemp("search"), options)
    try:
        crashes.start()
        with closing(crashes), harness.sampling(crashes.looking):
            crashes.trains()
            crashes.kill_in_resize(SLOTS, crashes.kill_rank)
            crashes.kill_in_resize(FEWER, crashes.kill_supervisor)
            crashes.kill_in_resize(SLOTS, lambda: crashes.kill_program("controller"))
            crashes.kill_in_resize(FEWER, lambda: crashes.kill_program("scheduler"))
            crashes.kill_in_resize(SLOTS, crashes.kill_everything)
            crashes.lasts.unlink()
            crashes.sweep.await_end(WAIT_S)
            yield crashes
    finally:
        stopped = stack.down()
    assert stopped.returncode == 0, stopped.stdout + stopped.stderr


def test_every_trial_has_one_run_and_one_final_state(survived: Crashes) -> None:
    runs = survived.sweep.runs()
    assert {number: len(found) for number, found in runs.items()} == dict.fromkeys(range(TRIALS), 1)
    assert survived.sweep.states() == dict.fromkeys(range(TRIALS), "finished")
    tasks = survived.sweep.tasks()
    assert {tasks["trial", number]["state"] for number in range(TRIALS)} == {"success"}


def test_no_epoch_of_a_trial_is_lost_or_stored_twice(survived: Crashes) -> None:
    for number in range(TRIALS):
        steps = [step for step, _ in survived.sweep.curve(number)]
        assert steps == list(range(1, EPOCHS + 1))


def test_never_more_workers_live_than_there_are_slots_whatever_is_killed(
    survived: Crashes,
) -> None:
    assert survived.looking.most == SLOTS
    assert survived.looking.alive() == []
    assert survived.resizes() >= 5
