"""A search whose Horovod trials change their size, and something is killed in each change."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.samplers import Sampler, WorkerSampler, sampling

pytestmark = [pytest.mark.integration, pytest.mark.horovod, pytest.mark.timeout(2400)]

SLOTS, TRIALS, EPOCHS = 4, 8, 30
WAIT_S = 600.0  # a start of several workers on a busy machine
NUDGE_S = 60.0  # without a resize another trial comes or goes
UP = ("--slots", str(SLOTS), "--policy", "elastic-frontrunner", "--policy-option", "guard_k=0")
TPE = {
    "algorithm": "tpe",
    "seed": 1,
    "max_trials": TRIALS,
    "space": {"rate": {"type": "loguniform", "low": 0.0002, "high": 0.01}},
}
KILLED = ("rank", "supervisor", "controller", "scheduler", "everything")


class Kills:
    """The search, and what is killed while one of its trials changes its size.

    Two of its trials train at a time. A trial of another sweep comes and goes, so they shrink and
    grow.
    """

    def __init__(self, stack: Any, harness: Any, folder: Path) -> None:
        self.stack, self.harness, self.folder = stack, harness, folder
        self.lab = harness.Lab(stack, folder)
        log = folder / "workers"
        log.mkdir()
        self.workers, self.holders = WorkerSampler(log), Sampler(stack.home)
        self.lasts, self.other_lasts = harness.slow_file(folder), folder / "nobody"
        budget = {"max_parallel": 2}
        self.sweep = self.lab.start(
            harness.horovod("search", log, self.lasts, EPOCHS, pause=3.0, search=TPE, budget=budget)
        )
        self.others: list[Any] = []

    def resizes(self) -> list[int]:
        """Return the trials that were resized so far, in that order."""
        decisions = self.sweep.decisions()
        return [int(d["trial"]) for d in decisions if d["action"] == "resize"]

    def disturb(self) -> None:
        """Have a trial of one GPU come, or let the one that is there go."""
        if self.other_lasts.exists():
            self.other_lasts.unlink()
            return
        self.other_lasts = self.harness.slow_file(self.folder)
        content = self.harness.stub(
            "other", [1.0], self.harness.LONG, 0.5, slow_while=self.other_lasts
        )
        self.others.append(self.lab.start(content))

    def await_resize(self, seen: int) -> int:
        """Return the trial of the resize after so many, as soon as it is decided."""
        while True:
            self.disturb()
            with contextlib.suppress(AssertionError):
                self.harness.await_(lambda: len(self.resizes()) > seen, NUDGE_S, period_s=0.05)
                return self.resizes()[seen]
            assert self.sweep.state == "running", f"{seen} resizes, then the search had ended"

    def kill_in_next_resize(self, what: str) -> None:
        """Kill one of the processes of a resize, or of the stack, during it."""
        trial = self.await_resize(len(self.resizes()))
        if what == "rank":
            self.harness.await_(lambda: self._kill_worker(trial), period_s=0.05)
        elif what == "supervisor":
            self.harness.kill_supervisor(self.stack.home, self.sweep.id, trial)
        elif what == "everything":
            self.lab.restart_stack(*UP)
        else:
            os.kill(self.harness.program(self.stack, what), signal.SIGKILL)

    def _kill_worker(self, trial: int) -> bool:
        """Kill the trial's worker that started last; False where none lives at this moment."""
        alive = self.workers.alive()
        mine = [w for w in self.workers.starts if int(w["trial"]) == trial and w["pid"] in alive]
        with contextlib.suppress(IndexError, ProcessLookupError):
            os.kill(int(mine[-1]["pid"]), signal.SIGKILL)
            return True
        return False


@pytest.fixture(scope="module")
def survived(
    tmp_path_factory: pytest.TempPathFactory, stack_at: Callable[[Path], Any], harness: Any
) -> Iterator[Kills]:
    """The search after all kills, at its end."""
    stack = stack_at(tmp_path_factory.mktemp("horovod"))
    with stack.running(*UP):
        kills = Kills(stack, harness, tmp_path_factory.mktemp("search"))
        with contextlib.closing(kills.lab):
            with sampling(kills.workers), sampling(kills.holders):
                for what in KILLED:
                    kills.kill_in_next_resize(what)
                for lasts in (kills.lasts, kills.other_lasts):
                    lasts.unlink(missing_ok=True)
                for sweep in (kills.sweep, *kills.others):
                    sweep.await_end(WAIT_S)
            yield kills


def test_every_trial_of_a_search_finishes_though_something_was_killed_in_each_resize(
    survived: Kills,
) -> None:
    assert survived.sweep.states() == dict.fromkeys(range(TRIALS), "finished")
    assert len(survived.resizes()) >= len(KILLED)


def test_no_epoch_of_a_search_is_lost_or_stored_twice(survived: Kills) -> None:
    sweep = survived.sweep
    assert {number: len(runs) for number, runs in sweep.runs().items()} == dict.fromkeys(
        range(TRIALS), 1
    )
    for number in range(TRIALS):
        assert [step for step, _ in sweep.curve(number)] == list(range(1, EPOCHS + 1))


def test_the_best_of_a_search_is_found_though_its_trials_were_killed(survived: Kills) -> None:
    sweep = survived.sweep
    lowest = {number: min(loss for _, loss in sweep.curve(number)) for number in range(TRIALS)}
    assert sweep.document()["best"]["number"] == min(lowest, key=lambda number: lowest[number])


def test_no_gpu_of_a_search_has_two_workers_at_any_instant(survived: Kills) -> None:
    assert 0 < survived.workers.most <= SLOTS
    assert survived.holders.doubly_held == []
    assert survived.workers.alive() == []
